"""A discrete-event simulation of a whole pipeline on virtual time, around the code that runs in production.

Real: batcher, policies, lanes and curves of every stage; scheduler, planner, sessions and admission of the coordinator.
Simulated: the native step (its time is that of the true curve), the model, links (with the world's delays), clients.
The coordinator's part handles events as `coordinator.engine.pipeline` does. One heap of events, one seed; the same
world gives the same history, event for event.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.coordinator.schedule.groups import GroupPlanner
from relayline.coordinator.schedule.overhead import Held
from relayline.coordinator.schedule.scheduler import Scheduler
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.coordinator.sessions.admission import Admission
from relayline.coordinator.sessions.drafts import Acceptance
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.session import OutFrame, Session, State
from relayline.deploy.testing.simulation.audit import Audit
from relayline.deploy.testing.simulation.drafts import oracle, prediction
from relayline.deploy.testing.simulation.stage import ROUTE, SimStage, Violation
from relayline.deploy.testing.simulation.world import Disturbance, Request, World
from relayline.stage.queue_types import QueuedFrame
from relayline.wire.common.curve import CostCurve
from relayline.wire.envelopes.frames import Flag
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """Settings of the code under test in one simulation."""

    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    stage_policy: str = "auto"
    is_calibrated: bool = True
    """Whether stages know their curves at the start; otherwise they only learn them from steps, as with --no-calibrate.
    """
    melts_envelopes: bool = False
    """Send all rows of one turn as one message, regardless of groups (to see the cost)."""


AUTO = Setup()
DRAIN = Setup(ScheduleConfig("drain"), "drain")
SINGLE = Setup(ScheduleConfig("drain"), "single")


def fixed(n_groups: int, group_rows: int) -> Setup:
    """Return a plan with a fixed number of groups and rows."""
    return Setup(ScheduleConfig("fixed", n_groups=n_groups, group_rows=group_rows))


class Simulation:
    """Call `run` once; the figures are then in `trace`."""

    def __init__(self, world: World, setup: Setup = AUTO) -> None:
        self.world, self.setup = world, setup
        rng = random.Random(world.seed)
        n_stages, calibrated = len(world.stages), setup.is_calibrated
        self.stages = [
            SimStage(index, model, setup.stage_policy, world.n_lanes, rng, is_calibrated=calibrated, is_last=is_last)
            for index, model, is_last in zip(
                range(n_stages), world.stages, [False] * (n_stages - 1) + [True], strict=True
            )
        ]
        self.planner = GroupPlanner(self._stage_costs(), setup.schedule.itl_stretch)
        self.scheduler = Scheduler(setup.schedule, self.planner)
        self.admission = Admission(world.n_lanes, 1 << 20, world.waiting_max)
        self.acceptance = Acceptance()
        self.sessions: dict[int, Session] = {}
        self.audit = Audit(self)
        self.now_ns = 0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order, self._envelopes = itertools.count(), itertools.count(1)
        self._arrivals: dict[int, int] = {}
        self._dispatching = False
        self._extra_link_ns = 0
        self._touched: SimStage | None = None  # the stage of this event; None: the coordinator's
        self._arrived_ns = [0] * (len(self.stages) + 1)  # arrival of the latest envelope of each link
        for request in world.requests:
            self._at(request.arrives_ns, self._arrive, request)
        for disturbance in world.disturbances:
            self._at(disturbance.at_ns, self._disturb, disturbance)
        for slow in world.slow_links:
            self._at(slow.at_ns, self._slow_down, slow.extra_ns)
        if world.refresh_ns:
            self._at(world.refresh_ns, self._refresh)

    # --- the run ------------------------------------------------------------------------------------------------------

    def run(self, until_ns: int | None = None) -> Simulation:
        """Run until every request has ended, or until a time; may be called again. Raises Violation."""
        while self._heap and (until_ns is None or self._heap[0][0] <= until_ns):
            self.now_ns, _, action, arguments = heapq.heappop(self._heap)
            self._touched = None
            action(*arguments)
            self.audit.event(self._touched)
        if until_ns is None:
            self.audit.end()
        return self

    def _at(self, time_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._heap, (time_ns, next(self._order), action, arguments))

    def _disturb(self, disturbance: Disturbance) -> None:
        stage = self.stages[disturbance.stage]
        stage.factor = disturbance.factor
        if disturbance.stall_ns:
            stage.stalled_until_ns = self.now_ns + disturbance.stall_ns
            self.audit.stalled(disturbance.stall_ns)

    @property
    def links_max_ns(self) -> int:
        """The largest time that an envelope spends on all links."""
        extra_ns = max((slow.extra_ns for slow in self.world.slow_links), default=0)
        work_ns = self.world.token_ns * len(self.world.requests)
        return work_ns + sum(self.world.way_ns(link) + extra_ns for link in range(len(self.stages) + 1))

    def _slow_down(self, extra_link_ns: int) -> None:
        self._extra_link_ns = extra_link_ns

    def _stage_costs(self) -> list[StageCost]:
        """Return copies of the stages' curves, as a coordinator gets them over the wire."""
        return [
            StageCost(
                CostCurve(stage.curves.decode.points()),
                CostCurve(stage.curves.prefill.points()),
                stage.model.rows_max,
                stage.curves.context_ns,
                stage.curves.context_tiled_ns,
                is_per_lane=stage.model.is_per_lane,
                shares_host=self.world.crowding > 1,
            )
            for stage in self.stages
        ]

    def _refresh(self) -> None:
        held = [Held(stage.counts.n_decode_frames, stage.counts.decode_held_ns) for stage in self.stages]
        self.scheduler.refresh(self._stage_costs(), held)
        if self._heap:  # otherwise nothing can happen any more, and unfinished requests never end
            self._at(self.now_ns + self.world.refresh_ns, self._refresh)

    # --- coordinator: follows coordinator.engine.pipeline -----------------------------------------------------------

    def _arrive(self, request: Request) -> None:
        session_id = len(self._arrivals) + 1
        self._arrivals[session_id] = self.now_ns
        generation = GenerationRequest(
            str(session_id),
            (7,) * request.n_prompt,
            request.max_tokens,
            SamplingParams(),
            prediction=prediction(request, session_id, self.world.seed),
        )
        acceptance = self.acceptance if request.predicted is not None else None
        session = Session(session_id, generation, lambda _: False, acceptance=acceptance)
        session.history.extend((7,) * request.n_before)
        self.sessions[session_id] = session
        self.audit.arrived(session)
        if request.cancel_ns is not None:
            self._at(max(request.cancel_ns, self.now_ns), self._cancel, session)
        for starting in self.admission.admit(session):
            self._start(starting)

    def _start(self, session: Session) -> None:
        self.scheduler.control(session.start())
        self.scheduler.prompt(session)
        self.audit.prompted(session)
        self._dispatch()

    def _cancel(self, session: Session) -> None:
        if session.session_id in self.sessions:
            self._finish(session, session.cancel(), is_cancelled=True)

    def _finish(self, session: Session, frames: Sequence[OutFrame], *, is_cancelled: bool = False) -> None:
        del self.sessions[session.session_id]
        self.audit.ended(session, is_cancelled)
        self.scheduler.forget(session.session_id)
        self.scheduler.control(frames)
        self._dispatch()
        for following in self.admission.leave(session):
            self._start(following)

    def _dispatch(self) -> None:
        if not self._dispatching:
            self._dispatching = True
            self._at(self.now_ns, self._dispatch_now)

    def _dispatch_now(self) -> None:
        self._dispatching = False
        plan = self.scheduler.plan()
        envelopes = self.scheduler.take(self.now_ns)
        self.audit.sent(envelopes, plan)
        if self.setup.melts_envelopes and envelopes:
            envelopes = [[frame for envelope in envelopes for frame in envelope]]
        for envelope in envelopes:
            self._travel(0, [queued(frame) for frame in envelope])

    def _returned(self, message: pb.ReturnResponse, n_frames: int) -> None:
        self.audit.frames.n_on_links -= n_frames
        for passed in message.progress:
            self.audit.passed(passed.session_id, passed.position)
            self.scheduler.passed(passed.session_id, passed.position, self.now_ns)
        for sample in message.samples:
            self.audit.sampled(sample.session_id, sample.position)
            self.scheduler.answered(sample.session_id, sample.position, self.now_ns)
            self._on_sample(sample)
        self._dispatch()

    def _on_sample(self, sample: pb.Sampled) -> None:
        session_id, position = sample.session_id, sample.position
        session = self.sessions.get(session_id)
        if session is None:
            return
        event, frames = session.sampled(position, sample.token)
        if event is None or event.token != oracle(session_id, position):
            raise Violation(
                f"session {session_id} got a sample for position {position}, expected {len(session.history)}"
            )
        self.audit.token(session)
        if session.state is State.DONE:
            self._finish(session, frames)
            return
        for frame in frames:
            self.scheduler.decode(frame)
            self.audit.pooled(frame)

    # --- links and stages ---------------------------------------------------------------------------------------------

    def _travel(self, stage_index: int, frames: list[QueuedFrame]) -> None:
        n_row_frames = sum(1 for frame in frames if frame.n_rows)
        self.audit.frames.n_on_links += n_row_frames
        arrives_ns = self._arrives_ns(stage_index)
        if frames:
            self._at(arrives_ns, self._reach, stage_index, frames)

    def _arrives_ns(self, link: int, work_ns: int = 0) -> int:
        arrives_ns = self.now_ns + self.world.way_ns(link) + self._extra_link_ns + work_ns
        self._arrived_ns[link] = max(arrives_ns, self._arrived_ns[link])  # no message overtakes another
        return self._arrived_ns[link]

    def _reach(self, stage_index: int, frames: list[QueuedFrame]) -> None:
        self._touched = stage = self.stages[stage_index]
        self.audit.frames.n_on_links -= sum(1 for frame in frames if frame.n_rows)
        self.audit.frames.n_dropped += stage.push(frames, self.now_ns, next(self._envelopes))
        if not stage.is_busy:
            self._begin(stage)

    def _begin(self, stage: SimStage) -> None:
        crowding = self.world.crowding
        if crowding != 1.0 and not any(other.is_busy for other in self.stages):
            crowding = 1.0
        done_ns = stage.begin(self.now_ns, self.world.jitter, crowding)
        if done_ns is not None:
            assert stage.step is not None
            self.audit.step_begins(stage, stage.step)
            self._at(done_ns, self._step_done, stage)

    def _step_done(self, stage: SimStage) -> None:
        assert stage.step is not None
        self._touched = stage
        self.audit.step_ends(stage, stage.step)
        n_frames = len(stage.step.frames)
        frames = stage.finish(self.now_ns)
        if not stage.is_last:
            self._travel(stage.index + 1, frames)
        else:
            message, n_gone = stage.answer()
            self.audit.frames.n_dropped += n_gone
            self.audit.frames.n_on_links += n_frames - n_gone
            arrives_ns = self._arrives_ns(len(self.stages), self.world.token_ns * len(message.samples))
            if n_frames > n_gone:
                self._at(arrives_ns, self._returned, message, n_frames - n_gone)
        self._begin(stage)


def queued(frame: OutFrame) -> QueuedFrame:
    """Return the frame in the stages' form."""
    return QueuedFrame(
        route_id=ROUTE,
        session_id=frame.session.session_id,
        epoch=1,
        position=frame.position,
        n_rows=len(frame.tokens),
        flags=frame.flags,
        argument=frame.argument,
        payload=None,
        exponents=None,
        options=None,
        trace=b"",
        arrived_ns=0,
        upstream_wait_ns=0,
        draft_tokens=frame.tokens if frame.flags & Flag.DRAFTED else (),
    )
