"""The context of a pipeline whose manifest and flags leave it open: as its model and the free memory allow."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.planner.usual_context import beside_others, usual_context, weights_by_memory
from relayline.deploy.launch.control import launched
from relayline.deploy.launch.prepare import override, shown_model
from relayline.deploy.manifest import Manifest, load_manifest
from relayline.deploy.manifest.settings import LANES, TOKENS, value_at
from relayline.deploy.planning.inputs import instance_of
from relayline.deploy.planning.known_hosts import KnownHost
from relayline.wire.common.errors import RelaylineError
from relayline.wire.common.texts import plural
from relayline.wire.settings.setting import Setting

log = logging.getLogger("relayline.up")


@dataclasses.dataclass(frozen=True, slots=True)
class Beside:
    """The other pipelines behind a gateway, with which a pipeline may share machines."""

    others: tuple[Manifest, ...] = ()
    n_most: int | None = None
    """How many of them are awake at once beside it, at most; None: all."""


ALONE = Beside()


def with_usual_context(
    manifest: Manifest,
    opened: Collection[Setting],
    state_dir: Path | None = None,
    *,
    ends_first: bool = False,
    beside: Beside = ALONE,
    model: Path | None = None,
) -> Manifest:
    """Return the manifest with a context that its model can use and its hosts have memory for.

    Only `opened` is chosen. A pipeline of this name that runs keeps its own, unless it `ends_first`: then all memory
    counts, as it does while neighbours serve. A model that is elsewhere, or cannot be read, changes nothing: its next
    reader reports the problem. Nor does one `beside` it whose size is unknown. `model`: where its file is, if the
    manifest does not say so.
    """
    path = model or manifest.model_path
    if not opened or path is None or not path.exists():
        return manifest
    try:
        if not ends_first and (running := _of_running(manifest.name, state_dir)) is not None:
            return _with(manifest, opened, running)
        return with_context_beside(manifest, path, opened, beside, state_dir, ends_first=ends_first)
    except RelaylineError:
        return manifest


def with_context_beside(
    manifest: Manifest,
    model: Path,
    opened: Collection[Setting],
    beside: Beside,
    state_dir: Path | None = None,
    known: Mapping[str, KnownHost] | None = None,
    *,
    ends_first: bool = False,
) -> Manifest:
    """As `with_fitting_context`, beside the other pipelines of a gateway. Raises as that, also for their models."""
    # Neighbours that serve hold what they need already: it would count twice if only free memory counted.
    is_running = ends_first or (bool(beside.others) and _has_neighbours(state_dir))
    weights = _weights_of(beside, is_running=is_running)
    return with_fitting_context(
        manifest, model, opened, known, is_running=is_running, others=weights, n_others_most=beside.n_most
    )


def _has_neighbours(state_dir: Path | None) -> bool:
    """Return whether another pipeline of this one's gateway serves; their states lie next to each other."""
    if state_dir is None or not state_dir.parent.is_dir():
        return False
    places = [place for place in state_dir.parent.iterdir() if place.is_dir() and place.name != state_dir.name]
    return any(one.is_running and one.phase.is_up for place in places for one in launched(place))


def _weights_of(beside: Beside, *, is_running: bool) -> list[Mapping[str, int]]:
    """Return the weights of pipelines by memory. Raises ModelFileError, UsageError where one's model is unknown."""
    if beside.n_most == 0:
        return []
    found: list[Mapping[str, int]] = []
    for other in beside.others:
        with shown_model(other) as shown:
            found.append(weights_by_memory(instance_of(other, inspect_model(shown.path), is_running=is_running)))
    return found


def with_running_context(manifest: Manifest, opened: Collection[Setting], state_dir: Path) -> Manifest:
    """Return the manifest with the context of the pipeline of its name, if that runs."""
    running = _of_running(manifest.name, state_dir)
    return manifest if running is None else _with(manifest, opened, running)


def with_fitting_context(
    manifest: Manifest,
    model: Path,
    opened: Collection[Setting],
    known: Mapping[str, KnownHost] | None = None,
    *,
    is_running: bool = False,
    others: Sequence[Mapping[str, int]] = (),
    n_others_most: int | None = None,
) -> Manifest:
    """Return the manifest with `opened` chosen for the model and its hosts; `known`, `is_running` as in `instance_of`.

    `others`, `n_others_most`: as in `usual_context.beside_others`. Raises ModelFileError, UsageError.
    """
    engine = manifest.engine
    instance = instance_of(manifest, inspect_model(model), known=known, is_running=is_running)
    n_lanes, ctx_tokens = usual_context(
        beside_others(instance, others, n_others_most),
        None if LANES in opened else engine.n_lanes,
        None if TOKENS in opened else engine.ctx_tokens,
    )
    if (n_lanes, ctx_tokens) != (engine.n_lanes, engine.ctx_tokens):
        log.info("%d %s of %d tokens, as the model and the free memory allow; %s and %s set them",
                 n_lanes, plural(n_lanes, "stream"), ctx_tokens, LANES.flag, TOKENS.flag)  # fmt: skip
    return _with(manifest, opened, {LANES.name: n_lanes, TOKENS.name: ctx_tokens})


def _of_running(name: str, state_dir: Path | None) -> dict[str, int] | None:
    """Return lanes and tokens of the pipeline of this name, if it runs."""
    for pipeline in launched(state_dir, name):
        # One that runs and has ended: this process may be its supervisor, started again.
        runs = pipeline.is_running and not pipeline.state.phase.has_ended
        if pipeline.state.name == name and runs and pipeline.directory.manifest.exists():
            spec = load_manifest(pipeline.directory.manifest).spec
            return {entry.name: value_at(spec, entry) for entry in (LANES, TOKENS)}
    return None


def _with(manifest: Manifest, opened: Collection[Setting], wanted: Mapping[str, int]) -> Manifest:
    changes = {entry.place: wanted[entry.name] for entry in opened}
    same = {entry.place: value_at(manifest.spec, entry) for entry in opened}
    return override(manifest, {place: value for place, value in changes.items() if value != same[place]})
