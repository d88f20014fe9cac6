"""The first start over several hosts: they join and measure themselves, then a plan is made, and then the split.

`up` leaves the layers open in the coordinator's manifest. The coordinator surveys the hosts, plans, splits the model,
records the result in that manifest, and continues as with any other. The hosts' reports are kept: the next start plans
at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relayline.coordinator.model.cuts import ranges
from relayline.coordinator.model.inspection import ModelFacts, inspect_model
from relayline.coordinator.model.split import HollowSlice, hollow_slices
from relayline.deploy.launch.context import ALONE, Beside, with_context_beside, with_fitting_context
from relayline.deploy.launch.prepare import settled
from relayline.deploy.manifest.settings import open_context
from relayline.deploy.models.split_apart import split_apart
from relayline.deploy.models.splits import split_place
from relayline.deploy.planning.inputs import best_for, instance_of, is_declared
from relayline.deploy.planning.known_hosts import KnownHost, known_hosts, remember_hosts
from relayline.deploy.planning.measure import slices_for
from relayline.deploy.planning.plan_description import describe_plan, lines_of
from relayline.wire.common.errors import ArtifactError, RelaylineError
from relayline.wire.common.process import first_of
from relayline.wire.pb.relayline.v1 import join_pb2 as pb

if TYPE_CHECKING:
    from relayline.coordinator.joining.config import JoinConfig, PoolState
    from relayline.coordinator.joining.port import OnMember
    from relayline.coordinator.joining.survey import HostReport
    from relayline.deploy.manifest import Manifest
    from relayline.wire.links.security import LinkSecurity

# Of a slice that a host measures: more than caches hold, so that weights come from memory, and little enough that steps
# of many rows fit the time on a slow machine.
SLICE_BYTES_MAX = 256 << 20
HEAD_BYTES_MAX = 1 << 30  # a larger head counts like layers of its size
LARGE_MS, SMALL_MS, HEAD_MS = 3_000, 1_000, 2_000  # for measuring a slice once it is loaded

Tell = Callable[[dict[str, Any]], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """The result of a survey."""

    manifest: Manifest
    """With the layers of each stage, and a context."""
    directory: Path
    """The split."""
    join: str
    """Where stages join (host:port), which stays the same."""
    enrol: str


@dataclasses.dataclass(frozen=True, slots=True)
class Neighbours:
    """The pipelines that may share the hosts."""

    beside: Beside = ALONE
    """Those of the same gateway."""
    state_dir: Path | None = None
    """Of the pipeline itself; theirs lie next to it."""


def unknown_hosts(manifest: Manifest, model: Path) -> list[str]:
    """Return the names of the stages on hosts whose speed with this model is unknown."""
    known = known_hosts(manifest, model)
    return [
        stage.name
        for stage in manifest.stages
        if not is_declared(stage) and (stage.name not in known or known[stage.name].speed is None)
    ]


def wants_survey(manifest: Manifest, model: Path, *, measure: bool | None) -> bool:
    """Tell whether a start has to survey the hosts first. `measure`: asked for, refused, or (None) as is sensible.

    It is needed if the planner has a choice between unknown hosts. Stages that are all on this machine are planned from
    estimates: they are alike.
    """
    if None not in manifest.fixed_cuts() or measure is False:
        return False
    is_over_hosts = not all(stage.is_local for stage in manifest.stages)
    return bool((measure or is_over_hosts) and unknown_hosts(manifest, model))


def survey_slices(model: Path, n_stages: int) -> list[pb.SurveySlice]:
    """Return the slices that a host measures: some layers, fewer, and the last ones with the head. Raises as
    `inspect_model`.
    """
    facts = inspect_model(model)
    wanted = list(slices_for(facts, min(sum(facts.layer_bytes) / n_stages, SLICE_BYTES_MAX)))
    found = [_order(each) for each in hollow_slices(model, wanted) if each.head_bytes <= HEAD_BYTES_MAX]
    if found and not found[0].head_bytes:
        found[0].budget_ms = LARGE_MS
    return found


def _order(hollow: HollowSlice) -> pb.SurveySlice:
    return pb.SurveySlice(
        header=hollow.header,
        size_bytes=hollow.size_bytes,
        layer_bytes=hollow.layer_bytes,
        head_bytes=hollow.head_bytes,
        budget_ms=HEAD_MS if hollow.head_bytes else SMALL_MS,
    )


async def survey_and_plan(
    manifest: Manifest,
    config: JoinConfig,
    security: LinkSecurity,
    split_dir: Path | None,
    on_member: OnMember,
    tell: Tell,
    stopping: asyncio.Event,
    neighbours: Neighbours,
) -> tuple[Planned, dict[str, Any]] | None:
    """Wait for the hosts, plan from their measurements, split the model.

    Returns also the plan's description. `tell` gets the events `surveying`, `planned` and `splitting`. None once
    `stopping` is set. Raises UsageError where nothing fits, StartError, ArtifactError, and the errors of a model that
    cannot be read.
    """
    from relayline.coordinator.joining.port import serve_survey  # half a second; most starts need none of it

    model = manifest.model_path
    assert model is not None
    wanted = set(await asyncio.to_thread(unknown_hosts, manifest, model))
    slices = await asyncio.to_thread(survey_slices, model, len(manifest.stages))
    orders = {stage.name: slices if stage.name in wanted else [] for stage in manifest.stages}
    began_s, stop = time.monotonic(), asyncio.ensure_future(stopping.wait())
    try:
        async with serve_survey(config, orders, security, on_member) as (survey, join, enrol):
            names = [stage.name for stage in manifest.stages]
            tell({"event": "surveying", "role": "coordinator", "join": join, "enrol": enrol, "stages": names})
            if not wanted:
                survey.is_complete.set()
            complete = asyncio.ensure_future(survey.is_complete.wait())
            await first_of(complete, stop)
            complete.cancel()
            if stop.done():
                return None
            plan = asyncio.ensure_future(asyncio.to_thread(_plan, manifest, model, dict(survey.reports), neighbours))
            await first_of(plan, stop)
            if stop.done():
                return None
            manifest, cuts, planned = plan.result()
            seconds = max((report.took_ns / 1e9 for report in survey.reports.values()), default=0.0)
            planned |= {"survey_s": round(seconds, 1), "waited_s": round(time.monotonic() - began_s, 1)}
            tell({"event": "planned", "message": "\n".join(lines_of(planned)), "plan": planned})
            splitting = asyncio.ensure_future(_split(model, cuts, split_dir, tell))
            await first_of(splitting, stop)
            if stop.done():
                splitting.cancel()
                await asyncio.gather(splitting, return_exceptions=True)
                return None
            n_layers = inspect_model(model).n_layers
            whole = settled(manifest, model, list(ranges(n_layers, cuts)))
            return Planned(whole, splitting.result(), join, enrol), planned
    finally:
        stop.cancel()


def _plan(
    manifest: Manifest, model: Path, reports: dict[str, HostReport], neighbours: Neighbours
) -> tuple[Manifest, tuple[int, ...], dict[str, Any]]:
    """Keep the hosts' reports and plan from them; returns the manifest with a context, the cuts, their description."""
    known: dict[str, KnownHost] = known_hosts(manifest, model)
    # A host with a known speed has reported only today's link and memory.
    fresh = [report for name, report in reports.items() if report.samples or name not in known]
    known |= remember_hosts(manifest, model, fresh)
    manifest = _with_context(manifest, model, known, neighbours)
    facts: ModelFacts = inspect_model(model)
    instance = instance_of(manifest, facts, known=known)
    best = best_for(instance)
    return manifest, tuple(start for start, _ in best.edges[1:]), describe_plan(instance, best.edges, known)


def _with_context(manifest: Manifest, model: Path, known: dict[str, KnownHost], neighbours: Neighbours) -> Manifest:
    """Return the manifest with the context that hosts have memory for, if it leaves it open."""
    opened = open_context(manifest.spec)
    if opened and neighbours.beside.others:
        with contextlib.suppress(RelaylineError):  # of a model that one of them cannot read, which its own start says
            return with_context_beside(manifest, model, opened, neighbours.beside, neighbours.state_dir, known)
    return with_fitting_context(manifest, model, opened, known)


async def _split(model: Path, cuts: tuple[int, ...], split_dir: Path | None, tell: Tell) -> Path:
    directory = split_dir if split_dir is not None else await asyncio.to_thread(split_place, model, None, cuts)
    tell({"event": "splitting", "message": f"splitting {model.name}"})
    where = ("--cuts", ",".join(map(str, cuts)), "--output", str(directory))
    if error := await split_apart(str(model), *where):
        raise ArtifactError(error)
    return directory


def is_about(record: dict[str, Any], state: PoolState) -> bool:
    """Return whether a description is about these layers of these stages."""
    stages = record["stages"]
    cuts = tuple(stage["layers"][0] for stage in stages[1:])
    return cuts == state.cuts and tuple(stage["name"] for stage in stages) == state.stages


def moved_plan_record(manifest: Manifest, model: Path, state: PoolState) -> dict[str, Any] | None:
    """Return the description of layers that have moved; None where nothing is known of a stage that holds some."""
    members = {stage.name: stage for stage in manifest.members}
    if not members.keys() >= set(state.stages):
        return None  # one that has joined since the start
    held = ranges(inspect_model(model).n_layers, state.cuts)
    stages = [members[name].model_copy(update={"layers": edge}) for name, edge in zip(state.stages, held, strict=True)]
    spec = manifest.spec.model_copy(update={"stages": tuple(stages), "spares": ()})
    try:
        record = plan_record(manifest.model_copy(update={"spec": spec}).with_directory(manifest.directory), model)
    except RelaylineError:
        return None
    return record | {"is_moved": True}


def plan_record(manifest: Manifest, model: Path) -> dict[str, Any]:
    """Return the description of a manifest whose layers are all fixed. Raises UsageError."""
    known, facts = known_hosts(manifest, model), inspect_model(model)
    instance = instance_of(manifest, facts, known=known)
    cuts = tuple(cut for cut in manifest.fixed_cuts() if cut is not None)
    return describe_plan(instance, ranges(facts.n_layers, cuts), known)
