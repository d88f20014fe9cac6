"""The context of a pipeline whose manifest and flags leave it open: as its model and the free memory allow."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.planner.usual_context import usual_context
from relayline.deploy.launch.control import launched
from relayline.deploy.launch.prepare import override
from relayline.deploy.manifest import Manifest, load_manifest
from relayline.deploy.planning.inputs import instance_of
from relayline.wire.common.errors import RelaylineError
from relayline.wire.settings.setting import Setting, entry_of
from relayline.wire.settings.table import EngineSettings

log = logging.getLogger("relayline.up")

LANES, TOKENS = (entry_of(EngineSettings, name) for name in ("n_lanes", "ctx_tokens"))


def open_context(manifest: Manifest) -> tuple[Setting, ...]:
    """Return those of lanes and tokens that a manifest does not set.

    To be asked before stages are put into the manifest, which writes every default down.
    """
    return tuple(entry for entry in (LANES, TOKENS) if entry.key not in manifest.spec.context.model_fields_set)


def with_usual_context(manifest: Manifest, opened: Collection[Setting], state_dir: Path | None = None) -> Manifest:
    """Return the manifest with a context that its model can use and its hosts have memory for.

    Only `opened` is chosen. A pipeline of this name that runs keeps its own. A model that is elsewhere, or cannot be
    read, changes nothing: its next reader reports the problem.
    """
    path = manifest.model_path
    if not opened or path is None or not path.exists():
        return manifest
    try:
        wanted = _running_context(manifest.name, state_dir) or _chosen(manifest, path, opened)
    except RelaylineError:
        return manifest
    changes = {entry.place: wanted[entry.name] for entry in opened}
    return override(manifest, {place: value for place, value in changes.items() if value != _at(manifest, place)})


def _at(manifest: Manifest, place: str) -> int:
    return manifest.engine.n_lanes if place == LANES.place else manifest.engine.ctx_tokens


def _running_context(name: str, state_dir: Path | None) -> dict[str, int] | None:
    for pipeline in launched(state_dir, name):
        if pipeline.state.name == name and pipeline.is_running and pipeline.directory.manifest.exists():
            engine = load_manifest(pipeline.directory.manifest).engine
            return {LANES.name: engine.n_lanes, TOKENS.name: engine.ctx_tokens}
    return None


def _chosen(manifest: Manifest, path: Path, opened: Collection[Setting]) -> dict[str, int]:
    facts = inspect_model(path)
    engine = manifest.engine
    n_lanes, ctx_tokens = usual_context(
        instance_of(manifest, facts),
        None if LANES in opened else engine.n_lanes,
        None if TOKENS in opened else engine.ctx_tokens,
    )
    if (n_lanes, ctx_tokens) != (engine.n_lanes, engine.ctx_tokens):
        log.info("%d streams of %d tokens, as the model and the free memory allow; %s and %s set them",
                 n_lanes, ctx_tokens, LANES.flag, TOKENS.flag)  # fmt: skip
    return {LANES.name: n_lanes, TOKENS.name: ctx_tokens}
