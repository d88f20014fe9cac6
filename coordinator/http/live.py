"""GET /v1/pipeline/live: the page's data, collected once for all open pages, and not at all while none is open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import msgspec
from aiohttp import web

from relayline.coordinator.engine.descriptions import place_of, share_host, stage_cost
from relayline.coordinator.engine.stage_client import StageClient
from relayline.coordinator.engine.telemetry_control import TelemetryControl
from relayline.coordinator.http.edge.middleware import json_response
from relayline.coordinator.observe.live_view import LiveView, Seen
from relayline.coordinator.observe.step_looks import StepLooks, steps_asked
from relayline.coordinator.planner.running_plan import running_plan
from relayline.coordinator.schedule.shared_devices import device_numbers
from relayline.coordinator.sessions.generation import Generator
from relayline.wire.common.errors import InvalidRequestError, NotReadyError
from relayline.wire.common.tasks import end_task
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.telemetry.telemetry import Level

FACTS = web.AppKey("page_facts", dict[str, object])  # of the page that do not come from looks
NUMBER_DIGITS_MAX = 15
LOOKS_PER_BEAT = 5  # looks from one measurement of round trips to the next
PLAN_EVERY_S = 5.0  # at most: planning takes a while, in a thread
LOOK_EVERY_S = 0.9  # at most: pages ask every second


class LiveFeed:
    """The looks of one application. Event loop only."""

    def __init__(self, generator: Generator, control: TelemetryControl, facts: Mapping[str, object]) -> None:
        now_ns = time.monotonic_ns()
        self._generator, self._control = generator, control
        self._looks = StepLooks(now_ns)
        self._view = LiveView(now_ns, time.time_ns() - now_ns, facts)
        self._looked_ns = self._planned_ns = -(1 << 62)  # never
        self._plan_body, self._planning = b"", asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None
        self.n_looks = 0

    async def live(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/pipeline/live; `?after=N` leaves out look N and everything before it."""
        after = _look_number(request.query.get("after", "0"))
        if time.monotonic_ns() - self._looked_ns >= LOOK_EVERY_S * 1e9:
            await self._look_once()
        return json_response(self._view.answer(after, self._looked_ns), headers={"Cache-Control": "no-store"})

    async def plan(self, _request: web.Request) -> web.StreamResponse:
        """GET /v1/pipeline/plan: the predictions for the running plan and for others."""
        async with self._planning:  # pages that ask together wait for one plan
            if time.monotonic_ns() - self._planned_ns >= PLAN_EVERY_S * 1e9:
                await self._plan()
            return json_response(self._plan_body, headers={"Cache-Control": "no-store"})

    async def _plan(self) -> None:
        described = await self._generator.describe(with_recent=False)
        stages, listed = self._control.stages(), described.get("stages")
        statuses = await asyncio.gather(*(stage.status(with_recent=False) for stage in stages))
        known = [status for status in statuses if status is not None]
        if not isinstance(listed, list) or len(known) != len(listed):
            raise NotReadyError("not every stage answers; a plan needs the measurements of all")
        shared = share_host([stage.address for stage in stages])
        devices = device_numbers([place_of(status.place) for status in known])
        costs = [
            stage_cost(status, _rows_max(status), is_per_lane=status.kv_per_lane, shares_host=shares, device=device)
            for status, shares, device in zip(known, shared, devices, strict=True)
        ]
        edges = tuple((int(stage["layers"][0]), int(stage["layers"][1])) for stage in listed)
        names = [str(stage.get("name") or f"stage {stage['index']}") for stage in listed]
        running, lanes = described.get("plan"), described.get("lanes")
        overhead_ns = float(running.get("overhead_ns", 0.0)) if isinstance(running, dict) else 0.0
        ctx_tokens = described.get("ctx_tokens")
        plan = await asyncio.to_thread(
            running_plan,
            costs,
            edges,
            names,
            overhead_ns=overhead_ns,
            n_lanes=lanes if isinstance(lanes, int) else 1,
            ctx_tokens=ctx_tokens if isinstance(ctx_tokens, int) else 0,
        )
        self._plan_body, self._planned_ns = msgspec.json.encode(plan), time.monotonic_ns()

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


def _rows_max(status: pb.StatusResponse) -> int:
    """Return the rows up to which a stage has measured its steps."""
    return max((point.n_rows for point in status.decode_curve), default=1)


def _look_number(text: str) -> int:
    """Return the look that a page saw last. Raises InvalidRequestError."""
    if not (text.isascii() and text.isdigit() and len(text) <= NUMBER_DIGITS_MAX):
        raise InvalidRequestError.of_field("after", "must be the `look` of an earlier answer, or left out")
    return int(text)
