"""The invariants of a cluster: after every event, and at its end. Raises Violation."""

from __future__ import annotations

import dataclasses

from relayline.coordinator.sessions.session import REPLAYS_MAX
from relayline.coordinator.sessions.suspects import LOSSES_MAX
from relayline.deploy.testing.cluster.client import Client
from relayline.deploy.testing.cluster.clock import Violation
from relayline.deploy.testing.cluster.coordinator import Coordinator
from relayline.deploy.testing.cluster.link import IN_FLIGHT_MAX
from relayline.deploy.testing.cluster.mover import parts
from relayline.deploy.testing.cluster.node import NOTHING, Node

REFUSALS = {"refused: overloaded", "refused: not_ready"}
SENDS_MAX = 8_192  # frames that may wait at a stage


def check_coordinator(coordinator: Coordinator) -> None:
    """Check that every admitted request is in exactly one place, and that nothing else is remembered."""
    conductor = coordinator.conductor
    admission, readers = conductor.admission, conductor.readers
    running, waiting = set(admission.running), [session.session_id for session in admission.waiting]
    known = {session.session_id for session in readers}
    if len(running) + len(waiting) != len(known) or running | set(waiting) != known:
        raise Violation(f"sessions {sorted(known)} have readers, but {sorted(running)} run and {sorted(waiting)} wait")
    lanes = [session.lane for session in admission.running.values()]
    if len(set(lanes)) != len(lanes):
        raise Violation(f"lanes {lanes} are given twice")
    if coordinator.is_connected:
        _check_epoch(coordinator, running)
    if waiting and len(running) < min(admission.n_ours, admission.n_lanes):
        raise Violation("a lane is free and some wait for one")
    if waiting and not running and not conductor._is_trying and coordinator.is_connected:
        raise Violation("some wait for a lane, and nothing will bring them one")
    if conductor.is_held and coordinator.is_connected and not coordinator.is_pausing:
        raise Violation("nothing leaves, and nothing will end that")
    suspects = conductor.suspects
    if not {*suspects._losses, *suspects._passed, *suspects._then} <= known:
        raise Violation("sessions that are over are still suspected")
    if len(conductor.prefixes._kept) > conductor.prefixes.n_max:
        raise Violation("more lanes are kept than may be")
    for session_id, audience in coordinator.audiences.by_session.items():
        if not audience.streams:
            raise Violation(f"session {session_id} goes on without a reader")
    for read in readers._by_id.values():
        if read.n_readers <= 0:
            raise Violation(f"session {read.session.session_id} goes on without a reader")


def _check_epoch(coordinator: Coordinator, running: set[int]) -> None:
    scheduler = coordinator.conductor.scheduler
    if not set(scheduler.under_way()) <= running:
        raise Violation("frames of sessions that are over are still counted as under way")
    pool = [frame.session.session_id for frame in scheduler._pool]
    if not set(pool) <= running or len(set(pool)) != len(pool):
        raise Violation("the pool holds rows of sessions that are over, or two of one")
    if not {*scheduler._pool.streams, *(session.session_id for session in scheduler._prompts.sessions)} <= running:
        raise Violation("the scheduler counts sessions that are over")
    if len(running) > coordinator.conductor.admission.n_lanes:
        raise Violation("more sessions run than there are lanes")
    if any(link.n_in_flight > IN_FLIGHT_MAX for link in coordinator.links):
        raise Violation("a link holds more than it may")


def check_node(node: Node) -> None:
    """Check that only open sessions have lanes, cells and samplers."""
    if not node.process.is_up:
        return
    node.lanes.check()
    owned = node.lanes._by_session
    cells = [len(lane) - (index in node.ahead.lanes) for index, lane in enumerate(node.engine.lanes)]
    if len(node.ahead._streams) > node.lanes.n_lanes:
        raise Violation(f"stage {node.index} expects rows of more sessions than it has lanes")
    for lane in owned.values():
        is_filled = node.executor.sessions.states.copies.is_filling(lane.index)
        if node.step is None and not is_filled and cells[lane.index] != lane.next_position:
            raise Violation(
                f"lane {lane.index} of stage {node.index} has {cells[lane.index]} cells for {lane.next_position} rows"
            )
        cells[lane.index] = 0
    if any(cells):
        raise Violation(f"stage {node.index} keeps cells of sessions that are over")
    sessions = node.executor.sessions
    if not set(sessions.samplers) <= set(owned):
        raise Violation(f"stage {node.index} keeps samplers of sessions that are over")
    if node.batcher.queued_rows < 0 or len(node.batcher) > SENDS_MAX:
        raise Violation(f"stage {node.index} queues {len(node.batcher)} frames")
    for route_id, _ in node.batcher._sessions:
        if route_id not in node.routes:
            raise Violation(f"stage {node.index} has frames of a route whose epoch is over")


@dataclasses.dataclass(slots=True)
class Excuses:
    """Events that may end a request with an error."""

    n_deaths: int = 0  # of processes
    n_envelopes_lost: int = 0  # stages that lost rows
    poisoned: set[str] = dataclasses.field(default_factory=set)  # requests that crash stages

    def excuse(self, client: Client) -> bool:
        """Return whether the client's error is allowed by what happened."""
        match client.end:
            case "internal":  # suspected of crashing stages
                return client.request.request_id in self.poisoned or self.n_deaths >= LOSSES_MAX
            case "stage_lost":  # its rows were lost several times
                return self.n_envelopes_lost > REPLAYS_MAX
            case "not_ready":
                return client.may_be_refused and not client.n_tokens
        return False


def check_end(coordinators: list[Coordinator], nodes: list[Node], excuses: Excuses) -> None:
    """Check that every request ended in an allowed way, and that only lanes remain that can be reclaimed."""
    for coordinator in coordinators:
        for client in coordinator.clients:
            n_failed = coordinator.mover.sleeper.n_reported_failures if coordinator.mover is not None else 0
            _check_client(client, excuses, can_wake=not n_failed)
        if coordinator.audiences.by_session or len(coordinator.conductor.readers):
            raise Violation("a session is left without a reader")
        check_coordinator(coordinator)
        _check_layers(coordinator, nodes)
    kept = {
        (coordinator.route_id, kept.session.session_id)
        for coordinator in coordinators
        for kept in coordinator.conductor.prefixes._kept
    }
    for node in nodes:
        if not node.process.is_up:
            continue
        check_node(node)
        held = {key for key, lane in node.lanes._by_session.items()}
        if not held <= kept:
            raise Violation(f"stage {node.index} was never given back lanes of sessions {sorted(held - kept)}")
        if len(node.batcher):
            raise Violation(f"stage {node.index} has frames left that nobody waits for")


def _check_layers(coordinator: Coordinator, nodes: list[Node]) -> None:
    """Check that every change of layers is over, and that every stage has the layers of the last one."""
    if coordinator.mover is None:
        return
    if coordinator.mover.moves.is_open:
        raise Violation("a change of layers never ended")
    mover = coordinator.mover
    held = dict(zip(mover.moves.holders, parts(mover.moves.cuts), strict=True))
    if any(node.process.is_up and node.part != held.get(node.place, NOTHING) for node in nodes):
        raise Violation("stages have layers that no change gave them")
    if any(mover.pool.is_drained(at) for at in held):
        raise Violation("a stage that was drained holds layers")


def _check_client(client: Client, excuses: Excuses, *, can_wake: bool) -> None:
    name, end = client.request.request_id, client.end
    if client.has_left or end == "length" or end in REFUSALS:
        return
    if not end:
        raise Violation(f"request {name} never ended")
    if end == "not_ready" and not can_wake and not client.n_tokens:
        return
    if not excuses.excuse(client):
        raise Violation(f"request {name} ended with {end!r}")
