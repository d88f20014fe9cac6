"""Plays one history of a cluster: real conductor, scheduler, executor, lanes, batchers and codec, on virtual time.

`simulate(seed)` returns its outcome, or raises Violation. The same seed gives the same history, event for event.
`python -m relayline.deploy.testing.cluster.run` plays many, and prints the first seed that fails.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import os
import random
import secrets
import sys
import traceback
from collections.abc import Sequence

from relayline.coordinator.engine.conductor import ConductorConfig
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.deploy.testing.cluster import audit
from relayline.deploy.testing.cluster.client import Client
from relayline.deploy.testing.cluster.clock import MS, Clock, S, Violation
from relayline.deploy.testing.cluster.coordinator import Coordinator
from relayline.deploy.testing.cluster.model import N_LAYERS, N_VOCAB, Memory, Truth
from relayline.deploy.testing.cluster.mover import Mover, parts
from relayline.deploy.testing.cluster.node import NOTHING, Node, Part
from relayline.deploy.testing.cluster.plan import (
    COMES_BACK_NS,
    KINDS,
    START_NS,
    TAKEOVER_NS,
    Plan,
    Trouble,
    Wish,
    plan_of,
)
from relayline.stage.queue_types import QueuedFrame
from relayline.wire.common.phase import Phase

PATIENCE_NS = 120 * S  # after the last fault, everything must end within this time
EVENTS_MAX = 200_000
SEED_VARIABLE = "RELAYLINE_CLUSTER_SEED"


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one history."""

    n_events: int
    n_tokens: int
    n_epochs_lost: int
    n_deaths: int
    ends: collections.Counter[str]
    n_moves: int = 0
    """Changes of layers."""
    n_handed: int = 0
    """Changes of layers that gave them to other nodes."""
    n_taken: int = 0
    """Lanes that were taken over with their layers."""
    n_sleeps: int = 0
    """Times that the stages freed their memory."""
    n_wakes: int = 0
    """Times that they loaded again."""


class Cluster:
    """Nodes, coordinators, clients and faults."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.clock, self._rng = plan, Clock(), random.Random(f"{plan.seed}/run")
        self.excuses = audit.Excuses()
        self._poison: dict[tuple[int, int], int] = {}  # (route, session) -> the stage that it crashes
        n = plan.n_stages
        shares = parts([N_LAYERS * index // n for index in range(1, n)])
        n_spares = plan.n_spares if plan.n_coordinators == 1 else 0
        self.nodes = [self._node(at, part) for at, part in enumerate([*shares, *[NOTHING] * n_spares])]
        config = ConductorConfig(
            schedule=plan.schedule,
            stage_names=tuple(f"stage {index}" for index in range(n)),
            n_vocab=N_VOCAB,
            share=plan.share,
            prefix_lanes=plan.prefix_lanes,
            waiting_max=plan.waiting_max,
        )
        self.coordinators = [
            Coordinator(
                route_id,
                config,
                self.nodes,
                self.clock,
                self._rng,
                plan.delay_ns,
                has_slow_calls=plan.has_slow_calls,
                has_late_answers=plan.has_late_answers,
                moves=plan.n_coordinators == 1,
                takeover_ns=plan.takeover_ns,
            )
            for route_id in range(1, 1 + plan.n_coordinators)
        ]
        self._n_to_come = len(plan.wishes)
        for number, wish in enumerate(plan.wishes):
            self.clock.at(START_NS + wish.at_ns, self._arrive, number, wish)
        for trouble in plan.troubles:
            self.clock.at(START_NS + trouble.at_ns, self._begin, trouble)

    def _node(self, place: int, part: Part) -> Node:
        plan = self.plan
        memory = Memory(plan.keeps_state, plan.keeps_window, plan.tier_bytes, plan.tier_survives)
        node = Node(place, part, plan.n_lanes, plan.stage_policy, self.clock, self._rng, memory=memory)
        node.on_rows = self._on_rows
        return node

    # --- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Play to the end. Raises Violation."""
        clock, until_ns = self.clock, self.plan.settled_ns + PATIENCE_NS
        while not self._is_over() and clock.now_ns < until_ns and clock.n_events < EVENTS_MAX:
            clock.step()
            self._check()
        if clock.n_events >= EVENTS_MAX:
            raise Violation(f"{EVENTS_MAX} events, and no end")
        quiet_ns = clock.now_ns + 30 * S  # closes are in flight, and a last loss may not be noticed yet
        while clock.now_ns < quiet_ns and not (self._is_quiet() and self._is_over()):
            clock.step()
            self._check()
        audit.check_end(self.coordinators, self.nodes, self.excuses)
        clients = [client for coordinator in self.coordinators for client in coordinator.clients]
        return Outcome(
            clock.n_events,
            sum(client.n_tokens for client in clients),
            sum(coordinator.n_lost for coordinator in self.coordinators),
            self.excuses.n_deaths,
            collections.Counter("left" if client.has_left else client.end for client in clients),
            sum(coordinator.mover.moves.n_done for coordinator in self.coordinators if coordinator.mover),
            sum(coordinator.mover.n_handed for coordinator in self.coordinators if coordinator.mover),
            sum(node.hand_over.n_taken for node in self.nodes),
            sum(coordinator.mover.sleeper.sleep.n_sleeps for coordinator in self.coordinators if coordinator.mover),
            sum(coordinator.mover.sleeper.sleep.n_wakes for coordinator in self.coordinators if coordinator.mover),
        )

    def _check(self) -> None:
        for node in self.nodes:
            audit.check_node(node)
        for coordinator in self.coordinators:
            audit.check_coordinator(coordinator)
            if coordinator.mover is not None:
                coordinator.mover.sleeper.check()

    def _is_over(self) -> bool:
        clients = (client for coordinator in self.coordinators for client in coordinator.clients)
        return not self._n_to_come and self.clock.now_ns > self.plan.settled_ns and all(c.is_done for c in clients)

    def _is_quiet(self) -> bool:
        links = (link for coordinator in self.coordinators for link in coordinator.links)
        return (
            all(
                (coordinator.is_connected or (coordinator.mover and coordinator.mover.sleeper.sleep.is_asleep))
                and not coordinator.conductor._is_dispatching
                for coordinator in self.coordinators
            )
            and all(
                node.process.answers and node.step is None and not len(node.batcher)
                for node in self.nodes
                if node.process.is_up or node.ordered != NOTHING
            )
            and not any(coordinator.mover and coordinator.mover.moves.is_open for coordinator in self.coordinators)
            and not any(link.n_in_flight or link.is_cut for link in links)  # a cut is only noticed later
        )

    # --- clients ------------------------------------------------------------------------------------------------------

    def _arrive(self, number: int, wish: Wish) -> None:
        coordinator = self.coordinators[wish.coordinator]
        if coordinator.conductor.availability.phase is Phase.LOADING:  # clients get an error, and ask again
            self.clock.after(100 * MS, self._arrive, number, wish)
            return
        self._n_to_come -= 1
        prediction: tuple[int, ...] = ()
        if wish.is_predicted and self.plan.schedule.draft:
            answer = truth_of(wish).answer(wish.max_tokens)
            prediction = tuple((token + (at % 4 == 3)) % N_VOCAB for at, token in enumerate(answer))
        sampling = SamplingParams(temperature=0.0)
        request = GenerationRequest(
            f"r{number}",
            wish.prompt,
            wish.max_tokens,
            sampling,
            prediction=prediction,
            images=wish.images,
            adapter=wish.adapter,
        )
        client = Client(request, truth_of(wish), wish.leaves_after)
        coordinator.open(client)
        if wish.kills_stage is not None and client.session_id is not None:
            self.excuses.poisoned.add(request.request_id)
            self._poison[coordinator.route_id, client.session_id] = wish.kills_stage
        elif (coordinator.route_id, client.session_id) in self._poison:  # they share the session
            self.excuses.poisoned.add(request.request_id)

    def _on_rows(self, node: Node, frames: list[QueuedFrame]) -> bool:
        kills = any(self._poison.get(frame.session_key) == node.place for frame in frames)
        if kills:
            self.excuses.n_deaths += 1
            self.clock.after(COMES_BACK_NS, node.start, node.lanes.n_lanes)
        return kills

    # --- faults ----------------------------------------------------------------------------------------------

    def _begin(self, trouble: Trouble) -> None:
        node, clock, lasts_ns = self.nodes[trouble.stage], self.clock, trouble.lasts_ns
        coordinator = self.coordinators[trouble.which % len(self.coordinators)]
        links = [link for each in self.coordinators for link in each.links if not link.is_cut]
        match trouble.kind:
            case "dies":
                self._die(node, lasts_ns, node.lanes.n_lanes)
            case "comes back with other lanes":
                self._die(node, lasts_ns, 1 + trouble.which % 4)
            case "flaps":
                for turn in range(3):
                    clock.after(turn * (lasts_ns + COMES_BACK_NS), self._die, node, lasts_ns // 2, node.lanes.n_lanes)
            case "hangs" if node.process.is_up:
                node.process.hang()
                clock.after(lasts_ns, node.process.go_on, node.process.instance)
            case "is late":
                node.factor = 30.0
                clock.after(lasts_ns, setattr, node, "factor", 1.0)
            case "loses rows":
                self.excuses.n_envelopes_lost += 1 + trouble.which % 2
                node.lose_rows(1 + trouble.which % 2)
            case "cut":
                for turn in range(1 + trouble.which % 3):
                    clock.after(turn * (lasts_ns + COMES_BACK_NS), self._cut, trouble.which >> turn)
            case "moves" if coordinator.mover is not None:
                for turn in range(1 + trouble.which % 3):
                    clock.after(turn * (lasts_ns + COMES_BACK_NS), self._move, coordinator.mover, trouble.which >> turn)
            case "drains" if coordinator.mover is not None:
                coordinator.mover.drain(node.place, is_drained=True)
                offer_again = functools.partial(coordinator.mover.drain, node.place, is_drained=False)
                clock.after(lasts_ns, offer_again)
            case "is lost for long":
                self._die(node, TAKEOVER_NS + lasts_ns, node.lanes.n_lanes)
            case "sleeps" if coordinator.mover is not None:
                for turn in range(1 + trouble.which % 3):
                    clock.after(turn * (lasts_ns + COMES_BACK_NS), coordinator.mover.sleeper.ask)
            case "joins" if coordinator.mover is not None:
                self.nodes.append(self._node(len(self.nodes), NOTHING))
                coordinator.add(self.nodes[-1])
                coordinator.mover.add(self.nodes[-1])
            case "slow link" if links:
                link = links[trouble.which % len(links)]
                before_ns, link.delay_ns = link.delay_ns, lasts_ns // 4
                clock.after(lasts_ns, setattr, link, "delay_ns", before_ns)
            case "answers again":
                for turn in range(8):
                    clock.after(turn * lasts_ns // 8, self._answer_again, coordinator, trouble.which >> turn)

    def _die(self, node: Node, lasts_ns: int, n_lanes: int) -> None:
        if node.process.is_up:
            self.excuses.n_deaths += 1
            node.die()
            self.clock.after(lasts_ns, node.start, n_lanes)

    def _move(self, mover: Mover, which: int) -> None:
        cuts = random.Random(which).sample(range(1, N_LAYERS), len(mover.moves.cuts))
        mover.ask(tuple(sorted(cuts)))

    def _cut(self, which: int) -> None:
        links = [link for each in self.coordinators for link in each.links if not link.is_cut]
        if links:
            links[which % len(links)].cut()

    def _answer_again(self, coordinator: Coordinator, which: int) -> None:
        if coordinator.heard:
            coordinator.answer(coordinator.heard[which % len(coordinator.heard)])


def truth_of(wish: Wish) -> Truth:
    """Return the model's tokens behind a client's prompt."""
    return Truth(wish.prompt, wish.adapter, are_mutual=wish.image is not None and wish.image.are_mutual)


def simulate(seed: str, kinds: Sequence[str] = KINDS) -> Outcome:
    """Play one history. Raises Violation, or the exception of a bug in the code under test."""
    return Cluster(plan_of(seed, kinds)).run()


def simulate_many(base: str, n_seeds: int, kinds: Sequence[str] = KINDS) -> Outcome:
    """Play many histories, seeds base/0, base/1 and so on; raises Violation with the seed of the first that fails.

    kinds: the faults that may occur.
    """
    total = Outcome(0, 0, 0, 0, collections.Counter())
    for number in range(n_seeds):
        seed = f"{base}/{number}"
        try:
            one = simulate(seed, kinds)
        except Exception as error:
            raise Violation(f"seed {seed}: {error!r}; replay it with {SEED_VARIABLE}={seed}") from error
        total = Outcome(
            total.n_events + one.n_events,
            total.n_tokens + one.n_tokens,
            total.n_epochs_lost + one.n_epochs_lost,
            total.n_deaths + one.n_deaths,
            total.ends + one.ends,
            total.n_moves + one.n_moves,
            total.n_handed + one.n_handed,
            total.n_taken + one.n_taken,
            total.n_sleeps + one.n_sleeps,
            total.n_wakes + one.n_wakes,
        )
    return total


def base_seed() -> str:
    """Return the prefix of this run's seeds: a fixed one if CI is set, otherwise a new one each time."""
    return "ci" if os.environ.get("CI") else secrets.token_hex(4)


def main() -> int:
    """Play histories from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Simulate a whole cluster with losses on virtual time.")
    parser.add_argument("--n", type=int, default=10_000, metavar="N", help="histories to play (default: %(default)s)")
    parser.add_argument("--base", default=base_seed(), help="prefix of their seeds (default: a new one each time)")
    arguments = parser.parse_args()
    if one := os.environ.get(SEED_VARIABLE):
        print(f"seed {one}", flush=True)
        print(plan_of(one))
        print(simulate(one))
        return 0
    print(f"seeds {arguments.base}/0 to {arguments.base}/{arguments.n - 1}", flush=True)
    try:
        print(simulate_many(arguments.base, arguments.n))
    except Violation as violation:
        traceback.print_exception(violation)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
