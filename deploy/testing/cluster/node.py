"""A stage of the cluster: the real executor, lanes, batcher and codec; the process around them is simulated. It can
die, hang, be slow, lose its queue, and restart with other lanes.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence

from relayline.deploy.testing.cluster.clock import MS, Clock, Violation
from relayline.deploy.testing.cluster.hand_over import HandOver
from relayline.deploy.testing.cluster.link import Link
from relayline.deploy.testing.cluster.model import (
    DTYPE,
    ROWS_MAX,
    WIDTH,
    Memory,
    ModelEmbeddings,
    ModelEngine,
    new_batcher,
)
from relayline.deploy.testing.cluster.process import Process
from relayline.deploy.testing.cluster.route import NodeRoute
from relayline.stage.inbound import check_due, queued_frames
from relayline.stage.queue_types import QueuedFrame, Step
from relayline.stage.routes import check_newer
from relayline.stage.steps.lane_copies import SLICE_NS
from relayline.stage.steps.lane_states import LaneStates
from relayline.stage.steps.lanes import LaneTable
from relayline.stage.steps.run_ahead import RunAhead
from relayline.stage.steps.step import StepExecutor
from relayline.stage.steps.step_types import RouteOutput, RouteWiring
from relayline.wire.common.errors import HandshakeError, NotReadyError, RelaylineError, StageLostError
from relayline.wire.envelopes.buffers import BufferPool
from relayline.wire.envelopes.envelope import parse
from relayline.wire.envelopes.frames import Flag
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

CTX_TOKENS = 128
REJOIN_NS = 200 * MS
STEP_NS, ROW_NS, PIECE_NS = 4 * MS, MS // 2, 20 * MS
_ENVELOPES = itertools.count(1)

Reply = Callable[["dict[int, int] | RelaylineError"], None]


class EpochBook:
    """The newest epoch of each route that has begun in a process: nothing of an older one may happen there."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}

    def begun(self, route_id: int, epoch: int) -> None:
        """Note an epoch."""
        self._newest[route_id] = max(epoch, self._newest.get(route_id, 0))

    def check(self, stage_index: int, step: Step) -> None:
        """Raise Violation if a step computes anything of an epoch that was followed by another."""
        for frame in (*step.controls, *step.frames):
            if frame.epoch < self._newest.get(frame.route_id, 0):
                raise Violation(f"stage {stage_index} takes a step with a frame of epoch {frame.epoch}, which is over")


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A stage's part of the model."""

    index: int
    """Its index in layer order; -1 if it holds no layers."""
    n_stages: int
    layers: range

    @property
    def is_last(self) -> bool:
        """Whether tokens are sampled here."""
        return self.index == self.n_stages - 1


NOTHING = Part(-1, 0, range(0))


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """A coordinator's order to a stage for a new epoch."""

    route_id: int
    epoch: int
    instance: int
    """The process that the order is for."""
    returns: Link
    downstream: Link | None
    part: Part
    """The layers of the order."""


class Node:
    """One stage. Everything that reaches it goes through `process.do`."""

    def __init__(
        self, place: int, part: Part, n_lanes: int, policy: str, clock: Clock, rng: random.Random, *,
        memory: Memory | None = None,
    ) -> None:  # fmt: skip
        self.memory = memory or Memory()
        self.place, self._policy = place, policy
        self._clock, self._rng = clock, rng
        self.ordered = part
        """The settings of a process that starts now."""
        self.on_death: Callable[[], None] = lambda: None
        self.on_start: Callable[[], None] = lambda: None
        self.process = Process(clock)
        self.hand_over = HandOver(clock, self.process, self, place)
        self.factor = 1.0  # factor by which its steps are slower now
        self.on_rows: Callable[[Node, list[QueuedFrame]], bool] = lambda node, frames: False
        """Whether these rows crash the process when they are computed."""
        self.start(n_lanes)

    def start(self, n_lanes: int) -> None:
        """Start its process, without the state of the previous one."""
        if self.process.is_up:
            return
        self.process.start()
        self._epochs = EpochBook()
        self._load(n_lanes)
        self.on_start()

    def _load(self, n_lanes: int) -> None:
        """Make an empty engine with the ordered layers."""
        self.part = self.ordered
        self.hand_over.restarted()
        self._prepared: dict[int, Part] = {}  # by the number of the change: at most one
        kept = {"keeps_state": self.memory.keeps_state, "keeps_window": self.memory.keeps_window}
        self.engine = ModelEngine(self.layers, n_lanes, is_last=self.part.is_last, **kept)
        self.lanes = LaneTable(n_lanes, CTX_TOKENS)
        embeddings = None if self.index else ModelEmbeddings()
        states = LaneStates(self.engine, self.engine, self.memory.tier(self.layers), long_bytes=0)
        states.on_dropped = self._dropped
        self.executor = StepExecutor(self.engine, self.lanes, self.index, embeddings, states=states)
        is_whole = self.part.n_stages == 1 and not self.memory.keeps_state
        self.ahead = RunAhead(self.executor, ROWS_MAX if is_whole else 0)
        self.batcher = new_batcher(self._policy)
        self.routes: dict[int, NodeRoute] = {}
        self.step: Step | None = None
        self._is_ahead = False  # whether that step was not asked for
        self._n_to_lose = 0
        self.memory.is_copying = False
        self._between: list[Callable[[], None]] = []  # work to be done between two steps

    @property
    def index(self) -> int:
        """Its index."""
        return self.part.index

    @property
    def layers(self) -> range:
        """Its layers."""
        return self.part.layers

    # --- faults ----------------------------------------------------------------------------------------------

    def die(self) -> None:
        """Kill the process: its links break."""
        if not self.process.is_up:
            return
        self.process.die()
        self.step = None
        self.on_death()
        for route in self.routes.values():
            route.returns.cut()
            for link in (route.downstream, route.back):
                if link is not None:
                    link.cut()
        self.routes.clear()

    def lose_rows(self, n_envelopes: int) -> None:
        """Lose all rows of the next envelopes that have any, as a bug would."""
        self._n_to_lose = n_envelopes

    # --- routes -------------------------------------------------------------------------------------------------------

    def configure(self, order: Order, reply: Reply) -> None:
        """Begin an epoch, as stage.epochs.Epochs does; `reply` gets the rows that sessions hold, or the refusal."""
        self._between_steps(lambda: self._configure(order, reply))

    def _configure(self, order: Order, reply: Reply) -> None:
        try:
            if order.instance != self.process.instance:
                raise NotReadyError("this stage has been started anew")
            if self.hand_over.is_taking:
                raise NotReadyError("this stage does not serve yet")
            if self.process.is_asleep:
                raise NotReadyError("this stage sleeps")
            if order.part != self.part:
                raise HandshakeError("this stage has other layers")
            if (previous := self.routes.get(order.route_id)) is not None:
                check_newer(order.epoch, previous.epoch)
                self._end(previous)
                if order.epoch <= previous.epoch:
                    raise Violation(f"stage {self.index} goes from epoch {previous.epoch} to {order.epoch}")
        except RelaylineError as error:
            reply(error)
            return
        self._epochs.begun(order.route_id, order.epoch)
        route = NodeRoute(order.route_id, order.epoch, order.returns, order.downstream)
        pool = None if self.part.is_last else BufferPool(DTYPE, WIDTH)
        held = self.executor.begin_route(order.route_id, RouteWiring(order.epoch, pool))
        self.routes[order.route_id] = route
        reply(held)

    # --- planned changes, as stage.joining.changes and stage.served make them ---------------------------------------

    def prepare(self, number: int, part: Part, ready: Callable[[int], None]) -> None:
        """Prepare a slice while the old one serves."""
        self._prepared = {number: part}
        ready(self.place)

    def drop(self, number: int) -> None:
        """Free the prepared slice."""
        self._prepared.pop(number, None)

    def switch(self, number: int, takes: Sequence[tuple[Node, range]] = (), *, keeps: bool) -> None:
        """Serve the prepared slice, with a new engine unless the layers stay. Without one, join again.

        takes: who had which of its layers.
        """
        part = self._prepared.pop(number, None)
        if part is None:
            if self.part != self.ordered:
                n_lanes = self.lanes.n_lanes
                self.die()
                self._clock.after(REJOIN_NS, self.start, n_lanes)
        elif not keeps:
            for route in list(self.routes.values()):
                self._end(route)
            self.process.instance += 1
            between, self._between = self._between, []
            old = (self.executor.sessions.handing, self.layers.start)
            self._load(self.lanes.n_lanes)
            self.hand_over.switched(number, *old)
            if self.engine.forms():
                self.hand_over.take(number, [(giver.process, giver.hand_over, layers) for giver, layers in takes])
            for action in between:  # earlier calls to the engine are answered, by refusing them
                action()
        elif part != self.part:
            raise Violation(f"stage {self.index} is to keep {self.part} as {part}")

    # --- sleep, as stage.joining.join makes it ------------------------------------------------------------------------

    def fall_asleep(self, is_due: Callable[[], bool]) -> None:
        """Free the engine once its step is over, if that is still due."""

        def free() -> None:
            if not is_due():
                return
            for route in list(self.routes.values()):
                self._end(route)
            self.process.instance += 1
            between, self._between = self._between, []
            self._load(self.lanes.n_lanes)
            self.process.is_asleep = True
            for action in between:  # earlier calls to the engine are answered, by refusing them
                action()

        self._between_steps(free)

    def _end(self, route: NodeRoute) -> None:
        if self.routes.get(route.route_id) is route:
            del self.routes[route.route_id]
            self.batcher.drop_route(route.route_id)
            self.executor.leave_route(route.route_id)
            route.returns.cut()
            for link in (route.downstream, route.back):
                if link is not None:
                    link.close()

    def upstream_left(self, route_id: int, epoch: int) -> None:
        """The upstream end of an epoch's link is gone: end the epoch here."""
        text = f"the upstream link of stage {self.index} closed"
        self.link_broke(route_id, epoch, StageLostError(text))
        route = self.routes.get(route_id)
        if route is not None and route.epoch == epoch:
            self._between_steps(lambda: self._end(route))

    def link_broke(self, route_id: int, epoch: int, error: RelaylineError) -> None:
        """A link of an epoch broke: tell the coordinator if that epoch is the current one here."""
        route = self.routes.get(route_id)
        if route is not None and route.epoch == epoch:
            fault = pb.SessionFault(stage_index=self.index, label=error.label, message=error.message, retryable=True)
            route.report(self.index, RouteOutput(route_id, epoch, faults=[fault]))

    # --- envelopes in, steps, answers out -----------------------------------------------------------------------------

    def receive(self, route_id: int, epoch: int, message: bytes, *, is_back: bool = False) -> None:
        """Take one envelope from upstream, or from the last stage, as stage.inbound.Inbound does."""
        route = self.routes.get(route_id)
        if route is None or route.epoch != epoch:
            return  # its link has ended
        try:
            view = parse(message, max_rows=ROWS_MAX)
            check_due(view, epoch, route.counts(is_back=is_back))
            frames = queued_frames(view, route_id, epoch, self._clock.now_ns, next(_ENVELOPES), None)
        except RelaylineError as error:
            self.link_broke(route_id, epoch, error)
            return
        if is_back:
            frames = route.grants.fed_back(frames)
        elif self.index == 0:
            frames = route.grants.came(frames)
        for frame in frames:
            if frame.flags & Flag.CLOSE:
                self.executor.sessions.cancelled.add(frame.session_key)
        if self._n_to_lose and any(frame.n_rows for frame in frames):
            self._n_to_lose -= 1
            frames = [frame for frame in frames if frame.is_control]
        self.batcher.push_together(frames)
        self._begin()

    def _between_steps(self, action: Callable[[], None]) -> None:
        if self.step is not None:
            self._between.append(action)
        else:
            self.ahead.settle()
            action()

    def _begin(self) -> None:
        if self.step is not None:
            return
        self.step = self.batcher.take(self._clock.now_ns)
        self._is_ahead = self.step is None and self.ahead.is_due
        if self._is_ahead:
            self.step = self.ahead.next_step(self._clock.now_ns)
        if self.step is None:
            if self.executor.sessions.states.copies and not self.memory.is_copying:
                self.memory.is_copying = True
                self._clock.after(PIECE_NS, self._copied, self.process.instance)
            return
        duration_ns = (STEP_NS + ROW_NS * self.step.n_rows) * self.factor * (0.5 + self._rng.random())
        self._clock.after(round(duration_ns), self._ended, self.process.instance)

    def _copied(self, instance: int) -> None:
        if instance == self.process.instance:
            self.memory.is_copying = False
            if self.step is None:
                self._copy_lanes()
                self._begin()

    def _copy_lanes(self) -> None:
        """Copy one piece of a lane, as stage.steps.runner does between two steps."""
        copies = self.executor.sessions.states.copies
        if copies:
            if copies.fills_next:
                self.ahead.settle()
            copies.work(itertools.count(step=SLICE_NS).__next__)

    def _dropped(self, key: int) -> None:
        for route in self.routes.values():
            route.report(self.index, RouteOutput(route.route_id, route.epoch, dropped_keys=[key]))

    def _ended(self, instance: int) -> None:
        if instance == self.process.instance:  # otherwise the result is of a process that is gone
            self.process.do(self._finish)

    def _finish(self) -> None:
        step = self.step
        if step is None:
            return
        if self.on_rows(self, step.frames):
            self.die()
            return
        self._epochs.check(self.index, step)
        if self._is_ahead:
            self.ahead.compute(step)
            results = []
        else:
            results = [self.ahead.execute(part) for part in self.ahead.parts(step)]
        self.step = None
        for output in [output for result in results for output in result.outputs]:
            route = self.routes.get(output.route_id)
            if route is None or route.epoch != output.epoch:
                raise Violation(f"stage {self.index} has an output of epoch {output.epoch}, which does not stand")
            route.send_back(output, self._clock.now_ns)
            route.report(self.index, output)
            if output.buffer is not None and route.downstream is not None:
                route.downstream.send(bytes(bytearray(output.message)))
                self.executor.routes[route.route_id].pool.give_back(output.buffer)  # type: ignore[union-attr]
        between, self._between = self._between, []
        if between:
            self.ahead.settle()
        for action in between:
            action()
        self._copy_lanes()
        self._begin()

    # --- for inspection -------------------------------------------------------------------------------------------

    def session_ids(self, route_id: int) -> frozenset[int]:
        """Return the sessions of a route that have frames waiting or running."""
        running = () if self.step is None or self._is_ahead else (*self.step.controls, *self.step.frames)
        taken = {frame.session_id for frame in running if frame.route_id == route_id}
        return frozenset(taken | self.batcher.session_ids(route_id))
