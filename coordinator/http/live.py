"""GET /v1/pipeline/live: the page's data, collected once for all open pages, and not at all while none is open."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence

import msgspec
from aiohttp import web

from relayline.coordinator.engine.descriptions import place_of, share_host, stage_cost
from relayline.coordinator.engine.stage_client import StageClient
from relayline.coordinator.engine.telemetry_control import TelemetryControl
from relayline.coordinator.http.edge.middleware import json_response
from relayline.coordinator.model.cuts import ranges
from relayline.coordinator.observe.live_view import LiveView, Seen
from relayline.coordinator.observe.step_looks import StepLooks, steps_asked
from relayline.coordinator.planner.costs import Edges
from relayline.coordinator.planner.running_plan import RunningPlan, Variant, other_layers, running_plan
from relayline.coordinator.schedule.overhead import RoundTrip
from relayline.coordinator.schedule.shared_devices import device_numbers
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.coordinator.sessions.generation import Generator
from relayline.wire.common.errors import InvalidRequestError, NotReadyError
from relayline.wire.common.tasks import end_task
from relayline.wire.common.texts import counted, whole_number
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.telemetry.telemetry import Level, own_offset_ns

FACTS = web.AppKey("page_facts", dict[str, object])  # of the page that do not come from looks
NUMBER_DIGITS_MAX = 15
LOOKS_PER_BEAT = 5  # looks from one measurement of round trips to the next
PLAN_EVERY_S = 5.0  # at most: planning takes a while, in a thread
LOOK_EVERY_S = 0.9  # at most: pages ask every second


class _Planner:
    """Everything that the running pipeline says about its speed."""

    def __init__(
        self, costs: Sequence[StageCost], edges: Edges, names: Sequence[str], described: Mapping[str, object]
    ) -> None:
        self._costs, self.edges, self._names, self._described = costs, edges, names, described
        self._round_trips, lanes = _round_trips(described.get("plan")), described.get("lanes")
        self._n_lanes = lanes if isinstance(lanes, int) else 1

    def all(self) -> _Plans:
        """Return the plans, and who was to get which layers; takes a while."""
        ctx_tokens, planned = self._described.get("ctx_tokens"), self._described.get("planned")
        unequal = self._described.get("imbalance")
        found = running_plan(
            self._costs,
            self.edges,
            self._names,
            round_trips=self._round_trips,
            n_lanes=self._n_lanes,
            ctx_tokens=ctx_tokens if isinstance(ctx_tokens, int) else 0,
            faster=tuple((start, end) for start, end in unequal["layers"]) if isinstance(unequal, dict) else (),
        )
        stages = planned.get("stages") if isinstance(planned, dict) else None
        return _Plans(self, found, stages, time.monotonic_ns())

    def with_layers(self, asked: Edges) -> Variant | None:
        """Return the plan with other layers of the same stages; takes a part of that while."""
        return other_layers(self._costs, self.edges, asked, round_trips=self._round_trips, n_lanes=self._n_lanes)


@dataclasses.dataclass(frozen=True, slots=True)
class _Plans:
    """What was planned last."""

    planner: _Planner
    found: RunningPlan
    stages: object
    """Who was to get which layers at the start."""
    planned_ns: int

    def body(self, asked: Variant | None = None) -> bytes:
        """Return it as JSON, with `asked` as the second plan."""
        plans = self.found.plans
        if asked is not None:
            plans = [plans[0], asked, *plans[1:]]
        return msgspec.json.encode({**dataclasses.asdict(self.found), "plans": plans, "planned": self.stages})


class LiveFeed:
    """The looks of one application. Event loop only."""

    def __init__(self, generator: Generator, control: TelemetryControl, facts: Mapping[str, object]) -> None:
        now_ns = time.monotonic_ns()
        self._generator, self._control = generator, control
        self._looks = StepLooks(now_ns)
        self._view = LiveView(now_ns, own_offset_ns(), facts)
        self._looked_ns = -(1 << 62)  # never
        self._plans: _Plans | None = None
        self._planning = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None
        self.n_looks = 0

    async def live(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/pipeline/live; `?after=N` leaves out look N and everything before it."""
        after = _look_number(request.query.get("after", "0"))
        if time.monotonic_ns() - self._looked_ns >= LOOK_EVERY_S * 1e9:
            await self._look_once()
        return json_response(self._view.answer(after, self._looked_ns), headers={"Cache-Control": "no-store"})

    async def plan(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/pipeline/plan: the predictions for the running plan and for others.

        `?cuts=8,16` adds the plan in which each stage but the first begins at one of these layers.
        """
        text = request.query.get("cuts")
        async with self._planning:  # pages that ask together wait for one plan
            plans = self._plans
            if plans is None or time.monotonic_ns() - plans.planned_ns >= PLAN_EVERY_S * 1e9:
                plans = self._plans = await asyncio.to_thread((await self._measured()).all)
            asked = None
            if text is not None:
                edges = _asked_edges(text, plans.planner.edges)
                asked = await asyncio.to_thread(plans.planner.with_layers, edges)
            body = plans.body(asked)
        return json_response(body, headers={"Cache-Control": "no-store"})

    async def _measured(self) -> _Planner:
        """Ask all stages for their measurements. Raises NotReadyError."""
        described = await self._generator.describe(with_recent=False)
        stages, listed = self._control.stages(), described.get("stages")
        statuses = await asyncio.gather(*(stage.status(with_recent=False) for stage in stages))
        known = [status for status in statuses if status is not None]
        if not isinstance(listed, list) or len(known) != len(listed):
            raise NotReadyError("not every stage answers; a plan needs the measurements of all")
        shared = share_host([stage.address for stage in stages])
        devices = device_numbers([place_of(status.place) for status in known])
        costs = [
            stage_cost(status, stage.max_rows, is_per_lane=status.kv_per_lane, shares_host=shares, device=device)
            for stage, status, shares, device in zip(stages, known, shared, devices, strict=True)
        ]
        edges = tuple((int(stage["layers"][0]), int(stage["layers"][1])) for stage in listed)
        names = [str(stage.get("name") or f"stage {stage['index']}") for stage in listed]
        return _Planner(costs, edges, names, described)

    async def close(self, _app: web.Application | None = None) -> None:
        """End a look that is under way."""
        if self._looking is not None:
            await end_task(self._looking)

    async def _look_once(self) -> None:
        """Look, or wait for the look that another page has begun. A page that goes away takes no look with it."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        await asyncio.shield(self._looking)

    async def _look(self) -> None:
        described = await self._generator.describe(with_recent=False)
        stages = self._control.stages()
        listed = described.get("stages")
        known = listed if isinstance(listed, list) and len(listed) == len(stages) else [{}] * len(stages)
        limit = steps_asked(len(stages))
        asked = (self._ask(index, stage, known[index], limit) for index, stage in enumerate(stages))
        found = await asyncio.gather(*asked)
        now_ns = time.monotonic_ns()
        picture = self._looks.look([batches for batches, _ in found], now_ns)
        observer = self._control.observer
        is_recording = observer.telemetry.level > Level.OFF
        seen = Seen(described, picture, [trip_ns for _, trip_ns in found], observer.loss, is_recording)
        self._view.follow_clock(own_offset_ns())
        self._view.update(seen, observer.log, now_ns)
        self._looked_ns = now_ns
        self.n_looks += 1

    async def _ask(
        self, index: int, stage: StageClient, known: Mapping[str, object], limit: int
    ) -> tuple[pb.BatchesResponse | None, int | None]:
        """Ask a stage that has just answered for its new steps, and now and then measure its round trip.

        Each question is most of a look's cost for this process, so a question with a known answer is not asked.
        """
        if not known.get("up"):
            return None, None
        trip_ns = None
        if self.n_looks % LOOKS_PER_BEAT == 0 and (trip := await stage.beat(pb.BeatRequest())) is not None:
            trip_ns = trip.received_ns - trip.sent_ns
        after = self._looks.after(index, str(known.get("instance_id", "")))
        if known.get("steps") == after:
            return None, trip_ns
        return await stage.batches((), after_step=after, limit=limit), trip_ns


def _round_trips(plan: object) -> list[RoundTrip]:
    """Return the overheads that GET /v1/pipeline gives with its plan."""
    return [RoundTrip(**each) for each in plan.get("overheads", ())] if isinstance(plan, dict) else []


def _asked_edges(text: str, edges: Edges) -> Edges:
    """Return the layers of each stage if they are cut there. Raises InvalidRequestError."""
    n_layers = edges[-1][1] if edges else 0
    parts = text.split(",") if text else []
    cuts = [cut for part in parts if (cut := whole_number(part, 6)) is not None]
    if not len(parts) == len(cuts) == len(edges) - 1:
        raise InvalidRequestError.of_field(
            "cuts", f"{len(edges)} stages need {counted(len(edges) - 1, 'layer')}, such as 8,16"
        )
    if [0, *cuts, n_layers] != sorted({0, *cuts, n_layers}):
        raise InvalidRequestError.of_field("cuts", f"they must ascend and lie between 1 and {n_layers - 1}")
    return ranges(n_layers, cuts)


def _look_number(text: str) -> int:
    """Return the look that a page saw last. Raises InvalidRequestError."""
    found = whole_number(text, NUMBER_DIGITS_MAX)
    if found is None:
        raise InvalidRequestError.of_field("after", "must be the `look` of an earlier answer, or left out")
    return found
