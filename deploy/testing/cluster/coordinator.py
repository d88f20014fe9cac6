"""A coordinator of the cluster: the real conductor, sender's codec and readers; the shell and the connection are
simulated.

It follows `coordinator.engine.epochs` and `coordinator.engine.pipeline`, on virtual time.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Sequence

from relayline.coordinator.engine.conductor import Conductor, ConductorConfig
from relayline.coordinator.engine.epoch_facts import EpochFacts
from relayline.coordinator.engine.instructions import Dispatch, Ended, Instruction, Lose, Note, Send, Tell, TryLanes
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.coordinator.sessions.prefixes import held_by_all
from relayline.coordinator.sessions.silence import Silence, Work
from relayline.coordinator.sessions.tier import TierFacts, stored_by_all
from relayline.deploy.testing.cluster.audiences import Audiences
from relayline.deploy.testing.cluster.client import Client
from relayline.deploy.testing.cluster.clock import MS, Clock, S, Violation
from relayline.deploy.testing.cluster.link import Link
from relayline.deploy.testing.cluster.model import ADAPTERS, ROWS_MAX
from relayline.deploy.testing.cluster.mover import Mover
from relayline.deploy.testing.cluster.node import CTX_TOKENS, Node, Order, Part
from relayline.deploy.testing.cluster.sender import Sender
from relayline.deploy.testing.simulation.world import smooth
from relayline.wire.common.bounds import BEAT_EVERY_S, LOST_AFTER_S
from relayline.wire.common.errors import RelaylineError, StageLostError
from relayline.wire.envelopes.returns import ReturnReader
from relayline.wire.links import silence as looks
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

ATTEMPT_NS, RETRY_NS = 2 * S, 300 * MS  # time limit of one attempt to connect, and the wait before the next
BEAT_NS = round(BEAT_EVERY_S * S)
SLOW_SHARE, SLOW_FACTOR = 0.15, 400
LATE_MAX = 6  # answers of the epoch before that come late
HEARD_MAX = 64  # answers that are kept to be repeated


class Coordinator:
    """One pipeline over all nodes."""

    def __init__(
        self,
        route_id: int,
        config: ConductorConfig,
        nodes: Sequence[Node],
        clock: Clock,
        rng: random.Random,
        delay_ns: int,
        *,
        has_slow_calls: bool,
        has_late_answers: bool,
        moves: bool = False,
        takeover_ns: int = 0,
    ) -> None:
        self.route_id, self.nodes = route_id, nodes
        self._has_slow_calls, self._has_late_answers = has_slow_calls, has_late_answers
        self._clock, self._rng, self._delay_ns = clock, rng, delay_ns
        # Both coordinators use the same session ids: they must never mix.
        self.conductor = Conductor(config, lambda _: False, itertools.count(1), 0)
        self.is_connected = False
        self.links: list[Link] = []  # links of the current epoch or of the attempt, the one to stage 0 last
        self.heard: list[pb.ReturnResponse] = []  # received answers, some of them from epochs that are over
        self.audiences = Audiences(lambda client: clock.after(0, self.leave, client), BEAT_NS)
        self.clients: list[Client] = []
        self.n_lost = 0
        self._silences = {node.place: looks.Silence() for node in nodes}
        self.line: list[Node] = []
        """The nodes that hold layers, in layer order: those of the attempt or of the current epoch."""
        self._held: list[dict[int, int]] = []
        self._sender: Sender | None = None
        self._attempted = 0  # the epoch of the attempt; 0: none
        self._lost: RelaylineError | None = None  # the error that ends the latest epoch
        self._readers: list[ReturnReader] = []
        self._quiet = Silence()
        self._is_planned = False
        self.mover = Mover(self, nodes, clock, rng, takeover_ns) if moves else None
        self._served: tuple[Part, ...] = ()  # of the attempt, or of the current epoch
        clock.after(0, self._attempt)
        clock.after(BEAT_NS, self._beat)

    # --- clients ------------------------------------------------------------------------------------------------------

    def open(self, client: Client) -> None:
        """Take a client's request."""
        now_ns, conductor = self._clock.now_ns, self.conductor
        self.clients.append(client)
        client.came_ns, client.came_while_lost = now_ns, not self.is_connected
        try:
            opened, instructions = conductor.open(client.request, now_ns)
        except RelaylineError as error:
            client.end = f"refused: {error.label}"
            return
        client.session_id = opened.session_id
        self.audiences.join(opened.session_id, client, is_new=not opened.is_joined)
        self.carry(instructions)
        if self.mover is not None:
            self.mover.sleeper.came()
        if client.leaves_after == 0:
            self._clock.after(self._rng.randrange(100 * MS), self.leave, client)

    def leave(self, client: Client) -> None:
        """A client leaves, with or without a complete answer."""
        if client.session_id is None or client.has_left:
            return
        client.has_left = True
        self.audiences.left(client.session_id, client)
        self.carry(self.conductor.left(client.session_id, self._clock.now_ns))

    # --- the connection's life, as coordinator.engine.epochs has it ---------------------------------------------------

    def _attempt(self) -> None:
        if self.mover is not None and self.mover.sleeper.is_resting:
            self._attempted = 0
            self._clock.after(RETRY_NS, self._attempt)
            return
        epoch = self._attempted = self.conductor.begin_epoch()
        self._lost = None
        self._held, self.links, self._readers = [], [], []
        self.line, self._served = self._wanted()
        instances = [node.process.instance for node in self.line]
        if all(node.process.answers and node.part == node.ordered for node in self.line):
            self._configure(len(self.line) - 1, epoch, instances, None)
            self._clock.after(ATTEMPT_NS, self.failed, epoch)
        else:
            self._clock.after(RETRY_NS, self.failed, epoch)

    def _wanted(self) -> tuple[list[Node], tuple[Part, ...]]:
        """Return the nodes that will hold layers in the next epoch, in layer order, and their layers."""
        if self.mover is None:
            return list(self.nodes), tuple(node.ordered for node in self.nodes)
        return [self.nodes[at] for at in self.mover.holders], self.mover.served

    @property
    def is_pausing(self) -> bool:
        """Whether the epoch is ending so that layers can be switched."""
        return self._lost is not None or (self.mover is not None and self.mover.moves.is_settling)

    @property
    def is_closed(self) -> bool:
        """Whether everything of the previous epoch is closed."""
        return not self.is_connected

    def failed(self, epoch: int | None = None) -> None:
        """The attempt of an epoch has failed; by default the one that is made now, if one is."""
        if self._attempted and epoch in (None, self._attempted):
            for link in self.links:
                link.cut()
            self._attempt()

    def _open_back(self, first: Node, last: Node) -> None:
        """Open the link over which the last stage sends tokens to stage 0."""
        route_id, epoch = self.route_id, self.conductor.epoch
        receive = functools.partial(first.receive, route_id, epoch, is_back=True)
        error = StageLostError("the link back to stage 0 is gone")
        gone = functools.partial(first.link_broke, route_id, epoch, error)
        back = self._new_link(
            lambda message: first.process.do(functools.partial(receive, message)),
            upstream_lost=functools.partial(self._broken, last, epoch, 0),
            downstream_lost=lambda: first.process.do(gone),
        )

        def opened() -> None:
            route = last.routes.get(route_id)
            if route is not None and route.epoch == epoch:
                route.feeds_back(last.index, back)

        self._clock.after(self._travel_ns(), last.process.do, opened)

    def _configure(self, index: int, epoch: int, instances: list[int], downstream: Link | None) -> None:
        """Order a stage into the next epoch; the stage before it follows once this one has answered."""
        node, reader = self.line[index], ReturnReader(f"stage {index}")
        lost = functools.partial(self._lost_at, epoch, StageLostError(f"the return link of stage {index} is gone"))
        returns = self._new_link(functools.partial(self._returned, epoch, reader), downstream_lost=lost)
        self._readers.insert(0, reader)
        order = Order(self.route_id, epoch, instances[index], returns, downstream, self._served[index])

        def reply(held: dict[int, int] | RelaylineError) -> None:
            self._clock.after(self._travel_ns(), answered, held)

        def answered(held: dict[int, int] | RelaylineError) -> None:
            if epoch != self._attempted:
                return
            if isinstance(held, RelaylineError):
                self._clock.after(RETRY_NS, self.failed, epoch)
                return
            self._held.append(held)
            receive = functools.partial(node.receive, self.route_id, epoch)
            gone = functools.partial(node.upstream_left, self.route_id, epoch)
            above = self.line[index - 1] if index else None
            link = self._new_link(
                lambda message: node.process.do(functools.partial(receive, message)),
                upstream_lost=functools.partial(self._broken, above, epoch, index),
                downstream_lost=lambda: node.process.do(gone),
            )
            if index:
                self._configure(index - 1, epoch, instances, link)
            else:
                self._connected(link)
                if self.is_connected and len(self.line) > 1:
                    self._open_back(*self.line[:: len(self.line) - 1])

        self._clock.after(self._travel_ns(), node.process.do, lambda: node.configure(order, reply))

    def _travel_ns(self) -> int:
        """Return the one-way time of a call; in some histories it is now and then longer than an attempt."""
        is_slow = self._has_slow_calls and self._rng.random() < SLOW_SHARE
        return (SLOW_FACTOR if is_slow else 1) * self._rng.randrange(1 + 2 * self._delay_ns)

    def _new_link(
        self,
        deliver: Callable[[bytes], None],
        downstream_lost: Callable[[], None],
        upstream_lost: Callable[[], None] = lambda: None,
    ) -> Link:
        ends = {"upstream_lost": upstream_lost, "downstream_lost": downstream_lost}
        link = Link(self._clock, self._rng, self._delay_ns, deliver, **ends)
        self.links.append(link)
        return link

    def _broken(self, above: Node | None, epoch: int, index: int) -> None:
        """The upstream end of the link into a stage notices that it is gone."""
        error = StageLostError(f"the link to stage {index} is gone")
        if above is None:
            self._lost_at(epoch, error)
        else:
            above.process.do(functools.partial(above.link_broke, self.route_id, epoch, error))

    def _connected(self, link: Link) -> None:
        if (self.line, self._served) != self._wanted():  # layers were moved meanwhile
            self._clock.after(RETRY_NS, self.failed, self._attempted)
            return
        self._sender, self.is_connected = Sender(link, self.conductor.epoch), True
        self._attempted = 0
        self._quiet = Silence()
        curve = smooth()
        facts = EpochFacts(
            n_lanes=min(node.lanes.n_lanes for node in self.line),
            ctx_tokens=CTX_TOKENS,
            held=held_by_all(self._held),
            instances=tuple(f"{node.place}/{node.process.instance}" for node in self.line),
            costs=[StageCost(curve, curve, ROWS_MAX) for _ in self.line],
            rewinds=not self.nodes[0].memory.keeps_state,
            keeps_state=self.nodes[0].memory.keeps_state or self.nodes[0].memory.keeps_window,
            tier=tier_of(self.line),
        )
        for node in self.line:
            self._silences[node.place].heard()
            self.conductor.availability.heard(node.index, self._clock.now_ns)
            self.conductor.availability.serves(node.index, str(node.process.instance))
        instructions = self.conductor.connected(facts, self._clock.now_ns)
        if self.mover is not None:
            self.mover.stands()
        self.carry(instructions)
        if self._has_late_answers:
            for message in self.heard[-LATE_MAX:]:
                self._clock.after(self._rng.randrange(100 * MS), self.answer, message)
        if self._lost is not None:  # while the others were ordered
            self._clock.after(0, self._disconnect, self._lost)

    def _lost_at(self, epoch: int, error: RelaylineError) -> None:
        if epoch == self.conductor.epoch:
            self.lose(error)

    def lose(self, error: RelaylineError, *, is_planned: bool = False) -> None:
        """End the epoch with an error; only the first report counts."""
        if self._lost is None:
            self._is_planned = is_planned
            self._lost = error
            if self.is_connected:
                self._clock.after(0, self._disconnect, error)

    def _disconnect(self, error: RelaylineError) -> None:
        self.n_lost += not self._is_planned
        self.is_connected = False
        is_planned, self._is_planned = self._is_planned, False
        self.carry(self.conductor.lost(error, self._clock.now_ns, is_planned=is_planned))
        for link in self.links:
            link.close()
        self._sender = None
        if self.mover is not None:
            self.mover.ended()
        self._clock.after(RETRY_NS, self._attempt)

    # --- heartbeats ---------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        self._clock.after(BEAT_NS, self._beat)
        now_ns, conductor = self._clock.now_ns, self.conductor
        line = self._wanted()[0]
        for index, node in enumerate(line):
            if node.process.answers:
                self._silences[node.place].heard()
                conductor.availability.heard(index, now_ns)
        self.carry(conductor.look(now_ns))
        n_looks = [self._silences[node.place].look() for node in line]
        if max(n_looks) >= looks.looks_of(LOST_AFTER_S):
            self.lose(StageLostError("a stage sends no heartbeat"))
        if self.is_connected:
            self._look_for_lost_sessions()
        if self.mover is not None:
            self.mover.look_at_hosts()

    def add(self, node: Node) -> None:
        """Consider another node."""
        self._silences[node.place] = looks.Silence()

    def _look_for_lost_sessions(self) -> None:
        """Follow coordinator.engine.connection.watch_silence."""
        now_ns, sender = self._clock.now_ns, self._sender
        silent = self._quiet.silent(self.conductor.scheduler.under_way(), now_ns)
        if not silent or sender is None or not all(node.process.answers for node in self.line):
            return
        works: list[Work] = []
        for node, reader in zip(self.line, self._readers, strict=True):
            route = node.routes.get(self.route_id)
            if route is None or route.epoch != self.conductor.epoch:
                return
            n_out = route.downstream.n_sent if route.downstream is not None else 0
            came, ids = reader.n_messages, node.session_ids(self.route_id)
            works.append(Work(route.n_envelopes, n_out, route.n_returned, came, is_busy=False, session_ids=ids))
        if lost := self._quiet.lost(silent, sender.link.n_sent, works):
            self.carry(self.conductor.silent(lost, len(self.line), now_ns))
        if self._quiet.broken_way(sender.link.n_sent, works, now_ns) is not None:
            self.lose(StageLostError("a message has not arrived"))

    # --- answers in, instructions out ---------------------------------------------------------------------------------

    def _returned(self, epoch: int, reader: ReturnReader, data: bytes) -> None:
        try:
            message = reader.read(data)
        except RelaylineError as error:
            self._lost_at(epoch, error)
            return
        self.heard = [*self.heard, message][-HEARD_MAX:]
        self.answer(message)

    def answer(self, message: pb.ReturnResponse) -> None:
        """Take a stage's answer, possibly one that was taken before."""
        is_over = message.epoch != self.conductor.epoch
        before = self._known() if is_over else None
        instructions = self.conductor.returned(message, self._clock.now_ns)
        if is_over and (instructions or self._known() != before):
            raise Violation(f"at epoch {self.conductor.epoch} an answer of another epoch changes something")
        self.carry(instructions)
        if self.mover is not None:
            self.mover.look()

    def _known(self) -> object:
        """Return the state that an answer may change."""
        conductor = self.conductor
        histories = [(session.session_id, session.state, len(session.history)) for session in conductor.readers]
        return histories, conductor.scheduler.under_way(), dict(conductor.suspects._passed)

    def carry(self, instructions: Iterable[Instruction]) -> None:
        """Carry out the conductor's instructions, as coordinator.engine.pipeline does."""
        for instruction in instructions:
            match instruction:
                case Send(frames):
                    if self._sender is None:
                        raise Violation("frames leave while no epoch stands")
                    self._sender.send(frames, self._clock.now_ns)
                case Tell(session_id, event):
                    silent_ns = [node.process.silent_since_ns for node in self.line if not node.process.answers]
                    self.audiences.tell(session_id, event, silent_ns)
                case Note(notes):
                    if self.line[0].process.answers:
                        told = [pb.StoredNote(key=key, note=note) for key, note in notes.items()]
                        self.line[0].executor.sessions.states.notes(pb.NotesRequest(notes=told))
                case Dispatch():
                    self._clock.after(0, lambda: self.carry(self.conductor.dispatch(self._clock.now_ns)))
                case Lose(error):
                    self.lose(error)
                case TryLanes(after_s):
                    self._clock.after(round(after_s * S), self._try_lanes)
                case Ended(session_id, error) if error is not None and error.label == "internal":
                    if "not tried again" not in error.message:
                        raise Violation(f"session {session_id} met a bug: {error.message}")
                case _:
                    if getattr(instruction, "bug", None) is not None:
                        raise instruction.bug  # type: ignore[union-attr, misc]

    def _try_lanes(self) -> None:
        self.carry(self.conductor.try_lanes(self._clock.now_ns))


def tier_of(nodes: Sequence[Node]) -> TierFacts:
    """Return the state of the stages' tiers from the handshake, as coordinator.engine.descriptions reads it."""
    descriptions = [pb.DescribeResponse() for _ in nodes]
    for node, message in zip(nodes, descriptions, strict=True):
        node.executor.sessions.states.tell(message)
    stored = [{each.key: each.n_tokens for each in message.stored} for message in descriptions]
    is_on_disk = all(
        message.stores and node.memory.tier_survives for node, message in zip(nodes, descriptions, strict=True)
    )
    known = nodes[0].executor.sessions.states.notes(pb.NotesRequest(wants_known=True))
    return TierFacts(
        stored_by_all(stored),
        is_used=all(message.stores for message in descriptions),
        is_on_disk=is_on_disk,
        keeps_notes=descriptions[0].keeps_notes,
        notes={each.key: each.note for each in known.notes},
        adapters=ADAPTERS,
    )
