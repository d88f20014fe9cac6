"""The launch that the flags of `relayline up` describe."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from relayline.deploy.cli.options import check_draft
from relayline.deploy.cli.stage_flags import stage_flags_of, with_stage_flags
from relayline.deploy.cli.up_changes import DOWNLOAD, changes_of, http_of
from relayline.deploy.launch.checks import check_before_work
from relayline.deploy.launch.companions import with_companions
from relayline.deploy.launch.context import ALONE, with_usual_context
from relayline.deploy.launch.gateway.beside import read_beside
from relayline.deploy.launch.here import at_home
from relayline.deploy.launch.lanes import with_usual_lanes
from relayline.deploy.launch.prepare import named, override, with_hub_model
from relayline.deploy.launch.run import Launch, before_of
from relayline.deploy.launch.state import StateDir, state_root
from relayline.deploy.launch.target import manifest_of
from relayline.deploy.manifest import Manifest, load_manifest
from relayline.deploy.manifest.settings import open_context
from relayline.deploy.manifest.smallest import smallest_manifest, with_stages
from relayline.deploy.models.hollow import hollow_model
from relayline.deploy.models.model_source import is_on_hub, resolve_model
from relayline.wire.common.errors import RelaylineError


@dataclasses.dataclass(frozen=True, slots=True)
class _Named:
    """What the user has named, and what flags have still to change in it."""

    manifest: Manifest
    source: Path
    """Of the manifest or the model, absolute."""
    model: str
    """The model's name on the hub, or what names a model without a manifest; empty for a manifest's file."""
    changes: dict[str, Any]
    """Values by dotted place below `spec`."""


def launch_of(given: dict[str, Any], changed: dict[str, Any], log_flags: tuple[str, ...]) -> Launch:
    """Return the launch: the named manifest, or a model's smallest one, with the flags applied."""
    is_flag = given["target"] is None and given["model"] is not None
    target = given["model"] if is_flag else given["target"]
    path = None if is_flag else manifest_of(target, Path.cwd())
    is_again = given["report_fd"] is not None
    if path is not None:
        found = _of_manifest(path, given, changes_of(changed), is_again=is_again)
    else:
        found = _of_model(str(target), given, changed, is_again=is_again)
    manifest = override(found.manifest, found.changes)
    if given["name"]:
        manifest = named(manifest, given["name"], "--name")
    manifest = with_companions(manifest, found.model)
    check_draft(manifest.serving, manifest.engine.policy)
    beside = read_beside(given["beside"]) if given["beside"] else ALONE
    opened = () if beside is None else open_context(manifest.spec)
    manifest = with_stage_flags(manifest, given, changed)
    # Of the pipeline that this start is for: another one of its name may run elsewhere.
    place = given["state_dir"] or state_root() / manifest.name
    manifest = with_usual_context(manifest, opened, place, ends_first=given["check"], beside=beside or ALONE)
    return _launch(manifest, found.source, given, log_flags, is_again=is_again)


def launch_before(
    given: dict[str, Any], changed: dict[str, Any], log_flags: tuple[str, ...], mistake: RelaylineError
) -> Launch:
    """Return the launch of what served before, now that there is a mistake in its source. Raises as `before_of`."""
    manifest, source = before_of(StateDir(given["state_dir"]), mistake)
    manifest = override(manifest, changes_of({"http": changed["http"]}) if "http" in changed else {})
    return _launch(manifest, source, given, log_flags, is_again=True)


def _launch(
    manifest: Manifest, source: Path, given: dict[str, Any], log_flags: tuple[str, ...], *, is_again: bool
) -> Launch:
    return Launch(
        manifest,
        source,
        log_flags,
        given["split_dir"],
        given["measure"],
        is_again,
        or_before=given["or_before"],
        is_behind=bool(given["change"]),
        beside=given["beside"],
    )


def _of_manifest(path: Path, given: dict[str, Any], changes: dict[str, Any], *, is_again: bool) -> _Named:
    """Return a manifest with its model here, where that is on the hub. Raises as `with_hub_model`."""
    # Of a pipeline behind a gateway: its hosts are looked at like a manifest's own.
    change = json.loads(given["change"]) if given["change"] else {}
    change |= {DOWNLOAD: changes.pop(DOWNLOAD)} if DOWNLOAD in changes else {}
    manifest = override(load_manifest(path), change)
    model = manifest.spec.model.hf or ""
    if model and not given["dry_run"]:
        check_before_work(override(manifest, changes), may_run=True)  # a model may take an hour to load
        manifest = with_hub_model(manifest, is_found=is_again)
    return _Named(at_home(with_usual_lanes(manifest)), path.absolute(), model, changes)


def _of_model(target: str, given: dict[str, Any], changed: dict[str, Any], *, is_again: bool) -> _Named:
    """Return a model's smallest manifest, with the model or its headers here. Raises as `resolve_model`."""
    changes = changes_of(changed)
    is_by_layers = changes.pop(DOWNLOAD, "whole") == "layers"
    if is_on_hub(target):
        # Everything is looked at before a model is loaded from the hub, which may take an hour.
        expected = override(_placeholder(given["name"]), changes | http_of(given))
        without_cuts = dataclasses.replace(stage_flags_of(given, changed), cuts=None)  # they need the model
        expected = with_stages(expected, without_cuts, 0)
        check_before_work(expected, may_run=True)
        check_draft(expected.serving, expected.engine.policy)
    find = hollow_model if is_by_layers and not is_again else resolve_model  # if again, `target` is the file found
    model = find(target)
    return _Named(with_usual_lanes(smallest_manifest(model)), model.absolute(), target, changes | http_of(given))


def _placeholder(name: str) -> Manifest:
    """Return a manifest of a model that is not here yet. Raises UsageError for an invalid name."""
    manifest = smallest_manifest(Path("model.gguf"))
    return named(manifest, name, "--name") if name else manifest
