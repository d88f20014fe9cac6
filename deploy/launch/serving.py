"""`relayline serve --manifest FILE`: the manifest's values as defaults of the command's own flags.

Click looks for a value on the command line, then in the environment, then in these defaults: flag > RELAYLINE_* > file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relayline.deploy.launch.ports import links_host
from relayline.deploy.models.recut import cutter, model_of, shape_reader
from relayline.wire.common.errors import UsageError
from relayline.wire.common.units import GIB

if TYPE_CHECKING:
    from relayline.coordinator.joining.config import JoinConfig, OpenUnread, PoolState
    from relayline.coordinator.joining.hosts import ReadShape
    from relayline.deploy.manifest import Manifest
    from relayline.deploy.models.recut import Cut


def read_manifest(ctx: click.Context, _: click.Parameter, path: Path | None) -> Manifest | None:
    """Read the manifest before any other flag, and let it speak where they are silent. Raises UsageError."""
    if path is None:
        return None
    from relayline.deploy.manifest import load_manifest  # a stage process shares this module and never needs it

    manifest = load_manifest(path)
    ctx.default_map = flag_defaults(manifest) | dict(ctx.default_map or {})
    return manifest


def flag_defaults(manifest: Manifest) -> dict[str, Any]:
    """Return the manifest's values by the names of `relayline serve`'s parameters."""
    from relayline.deploy.manifest.settings import parameters_of

    spec, http = manifest.spec, manifest.spec.coordinator.http
    defaults = parameters_of(spec) | {
        "names": ",".join(stage.name for stage in manifest.stages),
        "spares": ",".join(stage.name for stage in manifest.spares),
        "join_listen": (links_host(manifest), manifest.join_port),
        "relay_listen": (links_host(manifest), manifest.relay_port),
        "http": (http.host, http.port),
        "allow_hosts": spec.coordinator.allow_hosts,
    }
    if spec.wire.token_file is not None:
        defaults["token_file"] = manifest.resolve(spec.wire.token_file)
    if spec.coordinator.api_keys_file is not None:
        defaults["api_keys"] = manifest.resolve(spec.coordinator.api_keys_file)
    if spec.coordinator.chat_template_file is not None:
        defaults["chat_template"] = manifest.resolve(spec.coordinator.chat_template_file)
    if http.tls is not None:
        defaults |= {"http_cert": manifest.resolve(http.tls.cert_file), "http_key": manifest.resolve(http.tls.key_file)}
    if manifest.uses_tls and spec.wire.tls.directory is not None:
        defaults["tls_dir"] = manifest.resolve(spec.wire.tls.directory)
    elif not manifest.uses_tls and not manifest.all_local:
        defaults["insecure"] = True  # the manifest says `off` itself
    return defaults


def for_each_stage(
    join: JoinConfig | None, manifest: Manifest | None, architecture: str, given: Mapping[str, Any] | None = None
) -> JoinConfig | None:
    """Return the join configuration, with the manifest's settings of each single stage. `architecture`: of the model.

    `join` has the stages in the same order, with the values of `given` in their engine settings: these are settings by
    flag, by name, and they win over the manifest. Settings that must be equal but could differ by stage are settled.
    """
    from relayline.coordinator.joining.config import TelemetryDefaults

    if join is None:
        return None
    if manifest is None:
        return join.with_one_layout(architecture)
    by_flag = given or {}
    telemetry, stages = manifest.telemetry, {stage.name: stage for stage in manifest.members}
    if missing := stages.keys() - {place.name for place in join.stages}:
        raise UsageError(f"--names leaves out {', '.join(sorted(missing))} of the manifest")
    places = []
    for place in join.stages:
        stage = stages.get(place.name)
        defaults = TelemetryDefaults(
            by_flag.get("level", telemetry.level),
            by_flag.get("otlp_endpoint", telemetry.otlp_endpoint),
            by_flag.get("sampler_ratio", telemetry.sampler_ratio),
            manifest.metrics_port(stage) if stage is not None else 0,
        )
        if stage is None:  # it was invited while an earlier coordinator served
            places.append(dataclasses.replace(place, telemetry=defaults))
            continue
        own = {name: value for name, value in stage.engine_settings.items() if name not in by_flag}
        places.append(
            dataclasses.replace(
                place,
                engine=dataclasses.replace(place.engine, **own),
                telemetry=defaults,
                listen_port=manifest.listen_port(stage),
                memory_bytes=round((stage.memory_gib or 0) * GIB),
            )
        )
    ports = {stage.name: manifest.listen_port(stage) for stage in manifest.members if stage.relay}
    relay = dataclasses.replace(join.relay, advertise=manifest.spec.coordinator.host, ports=ports)
    return dataclasses.replace(join, stages=tuple(places), relay=relay).with_one_layout(architecture)


def check_named(directory: Path | None, manifest: Manifest | None) -> None:
    """Raise UsageError where nothing says what to serve."""
    if directory is None and manifest is None:
        raise UsageError("give --pipeline DIR or --manifest FILE")


def served_directory(directory: Path | None, manifest: Manifest | None) -> Path:
    """Return the split to serve: the given one, else the manifest's, made now if it is not there yet.

    Raises UsageError where neither is given, and as `prepare`.
    """
    from relayline.deploy.launch.prepare import prepare

    check_named(directory, manifest)
    if directory is not None:
        return directory
    assert manifest is not None
    return prepare(manifest).pipeline_dir


@dataclasses.dataclass(frozen=True, slots=True)
class ServedSplit:
    """The split that `serve` serves, and its changes while it does."""

    directory: Path
    architecture: str
    n_stages: int
    """Of the split given at the start, from which layers may have moved since."""
    known: PoolState | None
    """The holders and their layers since then; None for no difference."""
    cut_model: Cut | None
    """Splits the model again."""
    read_shape: ReadShape | None
    """Returns the model's sizes."""
    on_moved: Callable[[PoolState], None] | None
    """Keeps the holders and their layers."""
    open_unread: OpenUnread | None
    """Reads artifacts of a model whose weights are on the hub; None for one that is here."""


def served_split(given: dict[str, Any], names: tuple[str, ...]) -> ServedSplit:
    """Return the served split from the flags of `serve`. `names`: of the stages, where the user gave any.

    Raises UsageError where no split is given, as `prepare`, and UsageError or ModelFileError for a --model that is
    none.
    """
    from relayline.coordinator.model.gguf_file import open_model
    from relayline.coordinator.model.pipeline_file import load_pipeline
    from relayline.deploy.models.hollow import opener
    from relayline.deploy.models.kept_layers import keeper, kept_split
    from relayline.deploy.models.model_source import local_model

    base, model = served_directory(given["directory"], given["manifest"]), model_of(given["manifest"])
    if given["model"] is not None:
        model = local_model(str(given["model"]))
        open_model(model)  # else only the first move of layers would find it to be none
    kept = given["keep_layers"]
    directory, known = kept_split(kept, base, model, names)
    pipeline = load_pipeline(base, stages_here=False)
    return ServedSplit(
        directory=directory,
        architecture=pipeline.architecture,
        n_stages=len(pipeline.stages),
        known=known,
        cut_model=cutter(model),
        read_shape=shape_reader(model, given["lora"], given["draft_model"]),
        on_moved=keeper(kept, base),
        open_unread=opener(model),
    )
