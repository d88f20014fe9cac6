"""From a manifest to files that can be served: finds the model, chooses the cuts, makes the split, records every
choice. All of it can be repeated: existing files are reused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from relayline.coordinator.model.gguf_file import open_model
from relayline.coordinator.model.inspection import check_support, inspect_model
from relayline.coordinator.model.origin import origins_of
from relayline.coordinator.model.pipeline_file import PipelineFile, load_pipeline
from relayline.deploy.launch.own_tls import (
    JOIN_DIR,
    make_own_tls,
    make_own_token,
    make_stage_tokens,
    makes_stage_tokens,
    needs_own_tls,
    needs_own_token,
)
from relayline.deploy.machine.cores import shares, write_cores
from relayline.deploy.manifest import Manifest, Stage
from relayline.deploy.manifest.settings import open_context
from relayline.deploy.models.hub_headers import Shown, model_or_headers
from relayline.deploy.models.model_source import check_here, is_pattern, resolve_model
from relayline.deploy.models.splits import split_for
from relayline.deploy.planning.inputs import cuts_for
from relayline.wire.common.errors import UsageError
from relayline.wire.common.usable_cores import computing_cores
from relayline.wire.links.security import TOKEN_FILE

Split = Callable[[Path, tuple[int, ...]], Path]
ChooseCuts = Callable[[Manifest, Path], tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A manifest with nothing left to choose."""

    manifest: Manifest
    """The manifest with the model's path, every stage's layers, threads and cores, and full paths."""
    pipeline_dir: Path
    """The finished split."""
    file: PipelineFile
    """Its description."""


def prepare(
    manifest: Manifest,
    *,
    choose: ChooseCuts | None = None,
    split: Split | None = None,
) -> Prepared:
    """Find the model, choose the cuts, split it.

    Raises UsageError (the manifest does not fit the model or the machines), ModelFileError,
    UnsupportedArchitectureError, ArtifactError.
    """
    model = find_model(manifest)
    cuts = (choose or choose_cuts)(manifest, model)
    directory = (split or _split)(model, cuts)
    file = load_pipeline(directory)
    return Prepared(settle(manifest, model, file), directory, file)


def with_credentials(manifest: Manifest, own_tls: Path) -> Manifest:
    """Return the manifest with TLS material made in `own_tls`, or without TLS join tokens in `join` next to it.

    What the manifest names stays. Raises UsageError.
    """
    if needs_own_tls(manifest):
        material = make_own_tls(manifest, own_tls)
        manifest = override(manifest, {"wire.tls.directory": str(material.absolute())})
    if needs_own_token(manifest):
        token = make_own_token(own_tls.parent / JOIN_DIR / TOKEN_FILE)
        manifest = override(manifest, {"wire.tokenFile": str(token.absolute())})
    if makes_stage_tokens(manifest):
        make_stage_tokens(manifest, own_tls.parent / JOIN_DIR)
    return manifest


def find_model(manifest: Manifest, *, is_found: bool = False) -> Path:
    """Return the model's file here, loaded from the hub if it is there, or its headers if the manifest says so.

    `is_found`: this start has already found it; the hub is not asked again for headers.

    Raises UsageError, ModelFileError.
    """
    if manifest.spec.model.download == "layers":
        from relayline.deploy.models.hollow import hollow_model  # here, because most models are files

        return hollow_model(*_reference(manifest), is_found=is_found)
    return resolve_model(*_reference(manifest))


def with_hub_model(manifest: Manifest, *, is_found: bool = False) -> Manifest:
    """Return the manifest with the path of its model, loaded first if it is on the hub. Raises as `find_model`."""
    if manifest.spec.model.hf is None:
        return manifest
    return override(manifest, {"model": {"path": str(find_model(manifest, is_found=is_found).absolute())}})


def check_named_model(manifest: Manifest) -> None:
    """Raise UsageError where a manifest names a model on this machine, and there is none."""
    path = manifest.model_path
    if path is None:
        return
    if not is_pattern(str(path)) and not os.path.lexists(path):
        raise UsageError(f"{path}: no such file; spec.model.path of the manifest names it")
    check_here(str(path))


def _reference(manifest: Manifest) -> tuple[str, str]:
    """Return the model's name as `resolve_model` reads it, and its checksum."""
    check_named_model(manifest)
    model, path = manifest.spec.model, manifest.model_path
    return str(path) if path is not None else str(model.hf), model.sha256 or ""


@contextlib.contextmanager
def shown_model(manifest: Manifest, *, needs_weights: bool = False) -> Iterator[Shown]:
    """Give the model's file, or its headers where it is on the hub and nothing needs its weights.

    Of `download: layers` these are the headers that a start takes, so that both find the same measurements. Raises as
    `find_model`.
    """
    if manifest.spec.model.download == "layers":
        path = find_model(manifest)
        n_bytes = sum(origin.size_bytes for origin in origins_of(open_model(path)))
        yield Shown(path, n_bytes, is_by_layers=True)
        return
    if needs_weights:
        yield Shown(find_model(manifest))
        return
    with model_or_headers(*_reference(manifest)) as shown:
        yield shown


def choose_cuts(manifest: Manifest, model: Path) -> tuple[int, ...]:
    """Return the first layer of every stage but the first: the manifest's where it says all, else the planner's.

    Raises UsageError where the manifest's ranges do not fit the model, or the plan not the machines.
    """
    check_last_layer(manifest, model)
    given = manifest.fixed_cuts()
    cuts = tuple(cut for cut in given if cut is not None)
    return cuts if len(cuts) == len(given) else cuts_for(manifest, model)


def planned_cuts(manifest: Manifest, model: Path, *, is_running: bool = False) -> tuple[int, ...]:
    """Return the same as `choose_cuts`, but have the planner check the memory even where nothing is left to choose.

    For a launch: running processes would count as missing memory, unless `is_running`, see `instance_of`. Raises
    UsageError.
    """
    check_last_layer(manifest, model)
    return cuts_for(manifest, model, is_running=is_running)


def check_fits(manifest: Manifest, model: Path) -> None:
    """Check that a model can be split, and that the hosts had memory for it if all of it were free.

    Raises UsageError, ModelFileError, UnsupportedArchitectureError.
    """
    check_support(inspect_model(model), experimental=True)  # `relayline split --experimental` may have split it
    planned_cuts(manifest, model, is_running=True)


def check_last_layer(manifest: Manifest, model: Path) -> None:
    """Raise UsageError unless a given range of the last stage ends where the model does."""
    last = manifest.stages[-1]
    if last.layer_range is None:
        return
    n_layers = inspect_model(model).n_layers
    if last.layer_range[1] != n_layers:
        raise UsageError(
            f"stage {last.name!r} ends at layer {last.layer_range[1]}, but {model.name} has {n_layers} layers; "
            f"write layers: [{last.layer_range[0]}, {n_layers}]"
        )


def _split(model: Path, cuts: tuple[int, ...]) -> Path:
    return split_for(model, None, cuts, None) if cuts else split_for(model, 1, None, None)


def settle(manifest: Manifest, model: Path, file: PipelineFile) -> Manifest:
    """Return the manifest with every choice written down and every path in full."""
    return settled(manifest, model, [(held.layer_start, held.layer_end) for held in file.stages])


def settled(manifest: Manifest, model: Path, ranges: Sequence[tuple[int, int] | None]) -> Manifest:
    """Return the same, with the layers of each stage: the first, and one past the last.

    None leaves them open, until the hosts are surveyed; then the context stays open as well where it was.
    """
    data = manifest.model_dump(mode="json", by_alias=True, exclude_none=True)
    spec = data["spec"]
    spec["model"] = {"path": str(model.absolute())}
    for opened in open_context(manifest.spec) if None in ranges else ():
        del spec["context"][opened.key]
    for part, key in (
        (spec["coordinator"], "apiKeysFile"),
        (spec["coordinator"], "chatTemplateFile"),
        (spec["coordinator"]["http"].get("tls", {}), "certFile"),
        (spec["coordinator"]["http"].get("tls", {}), "keyFile"),
        (spec["wire"], "tokenFile"),
        (spec["wire"]["tls"], "directory"),
    ):
        if key in part:
            part[key] = str(manifest.resolve(part[key]).absolute())
    spec["stages"] = []
    cores = cores_of(manifest.stages)
    for stage, held in zip(manifest.stages, ranges, strict=True):
        entry = stage.model_dump(mode="json", by_alias=True, exclude_none=True)
        entry["layers"] = "auto" if held is None else list(held)
        entry["threads"] = threads_for(stage, manifest.stages)
        entry["cores"] = cores[stage.name]
        if "calibration" in entry["speed"]:
            entry["speed"]["calibration"] = str(manifest.resolve(entry["speed"]["calibration"]).absolute())
        spec["stages"].append(entry)
    spec["spares"] = []
    for spare in manifest.spares:
        entry = spare.model_dump(mode="json", by_alias=True, exclude_none=True)
        entry["threads"] = threads_for(spare, (*manifest.stages, spare))
        entry["cores"] = "any" if spare.cores == "auto" else spare.cores
        spec["spares"].append(entry)
    return Manifest.model_validate(data).with_directory(manifest.directory)


def threads_for(stage: Stage, stages: tuple[Stage, ...]) -> int:
    """Return a stage's threads: given, or this machine's cores divided by the local stages that give none.

    0 for a stage elsewhere that gives none: its own host knows how many cores it has.
    """
    if stage.threads or not stage.is_local:
        return stage.threads
    local = [other for other in stages if other.is_local]
    left = len(computing_cores()) - sum(other.threads for other in local)
    return max(1, left // sum(1 for other in local if not other.threads))


def cores_of(stages: tuple[Stage, ...]) -> dict[str, str]:
    """Return the cores that each stage keeps to, by its name, as a manifest says it."""
    found = {stage.name: "any" if stage.cores == "auto" else stage.cores for stage in stages}
    local = [stage for stage in stages if stage.is_local]
    if local and all(stage.cores == "auto" for stage in local):
        divided = shares([threads_for(stage, stages) for stage in local])
        found |= zip((stage.name for stage in local), map(write_cores, divided or []), strict=False)
    return found


def override(manifest: Manifest, changes: dict[str, Any]) -> Manifest:
    """Return the manifest with values replaced: dotted camelCase paths below `spec`, such as context.tokens.

    Raises UsageError for a value that the manifest does not allow.
    """
    if not changes:
        return manifest
    # Only given settings: others, such as the lanes, may still be chosen later.
    data = manifest.model_dump(mode="json", by_alias=True, exclude_unset=True)
    for path, value in changes.items():
        *parents, key = path.split(".")
        part = data["spec"]
        for parent in parents:
            part = part.setdefault(parent, {})
        part[key] = value
    try:
        return Manifest.model_validate(data).with_directory(manifest.directory)
    except ValueError as error:
        first = next(itertools.islice(getattr(error, "errors", list)(), 1), {"msg": str(error), "loc": ()})
        where = ".".join(map(str, first["loc"])).removeprefix("spec.")
        raise UsageError(f"{where}: {str(first['msg']).removeprefix('Value error, ')}") from error


def named(manifest: Manifest, name: str, given_as: str = "the pipeline's name") -> Manifest:
    """Return the manifest with another name. Raises UsageError for an invalid name."""
    data = manifest.model_dump(mode="json", by_alias=True, exclude_unset=True)
    data["metadata"]["name"] = name
    try:
        return Manifest.model_validate(data).with_directory(manifest.directory)
    except ValueError as error:
        raise UsageError(
            f"{given_as} {name!r} is not a name of lower-case letters, digits and inner dashes, at most 63 characters"
        ) from error
