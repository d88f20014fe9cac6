"""Planned changes of layers in the cluster: the real `Moves` and `Pool`, driven as coordinator.joining does."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from relayline.coordinator.engine.handing import handed
from relayline.coordinator.engine.moves import Cut, Drop, MoveInstruction, Moves, MoveState, Prepare, Settle, Switch
from relayline.coordinator.engine.pool import Pool
from relayline.coordinator.planner.share_out import Holder, share_out
from relayline.deploy.testing.cluster.clock import Clock, S
from relayline.deploy.testing.cluster.model import N_LAYERS
from relayline.deploy.testing.cluster.node import NOTHING, Node, Part
from relayline.deploy.testing.cluster.sleeper import LOAD_NS, Sleeper, travel_ns
from relayline.wire.common.errors import NotReadyError, RelaylineError
from relayline.wire.common.phase import Phase

if TYPE_CHECKING:
    from relayline.deploy.testing.cluster.coordinator import Coordinator


def parts(cuts: Sequence[int]) -> tuple[Part, ...]:
    """Return the layers of each stage, in layer order."""
    edges = (0, *cuts, N_LAYERS)
    n_stages = len(edges) - 1
    return tuple(Part(index, n_stages, range(edges[index], edges[index + 1])) for index in range(n_stages))


class Mover:
    """The planned changes of the cluster's only coordinator."""

    def __init__(
        self, coordinator: Coordinator, nodes: Sequence[Node], clock: Clock, rng: random.Random, takeover_ns: int
    ) -> None:
        self._coordinator, self._nodes, self._clock, self._rng = coordinator, nodes, clock, rng
        names = [f"stage {node.place}" for node in nodes]
        self.holders = tuple(node.place for node in nodes if node.ordered != NOTHING)
        """The nodes with layers in the next epoch, in layer order."""
        cuts = tuple(nodes[at].layers.start for at in self.holders[1:])
        self.moves = Moves(coordinator.conductor, names, N_LAYERS, cuts, self.holders)
        self.pool = Pool(names, set(range(len(nodes))) - set(self.holders), takeover_ns)
        self.served = parts(cuts)
        """Their layers."""
        self.n_kept = 0  # stages that kept their loaded layers
        self.n_handed = 0  # changes that gave layers to other nodes than before
        self._switching = 0
        self._takes: dict[int, list[tuple[Node, range]]] = {}  # of the latest change: earlier holders, by place
        self.sleeper = Sleeper(coordinator, self.moves, lambda: [nodes[at] for at in self.holders], clock, rng)
        for node in nodes:
            self._watch(node)

    def _watch(self, node: Node) -> None:
        node.on_death, node.on_start = (functools.partial(call, node.place) for call in (self._died, self._started))
        if node.process.is_up:
            self.pool.came(node.place, self._clock.now_ns)

    def add(self, node: Node) -> None:
        """Add a node that holds no layers."""
        self.moves.add(f"stage {node.place}")
        self.pool.add(f"stage {node.place}")
        self._watch(node)

    def ask(self, cuts: tuple[int, ...], holders: tuple[int, ...] = ()) -> bool:
        """Request other layers; returns whether the change has begun."""
        if not all(self._nodes[at].process.is_up for at in holders or self.holders):
            return False
        try:
            instructions = self.moves.begin(cuts, self._clock.now_ns, holders)
        except RelaylineError:
            return False
        self._carry(instructions)
        return True

    def give_up(self, why: str) -> None:
        """Give up the change that is under way, if it can be."""
        if self.moves.latest is not None:
            self._carry(self.moves.failed(self.moves.latest.number, why, self._clock.now_ns))
            self._after_failure()

    def look(self) -> None:
        """A node came back, or time has passed."""
        self._carry(self.moves.look(self._clock.now_ns))

    # --- nodes that come and go, as coordinator.joining.hosts has it --------------------------------------------------

    def drain(self, place: int, *, is_drained: bool) -> None:
        """Drain a node, or let it hold layers again."""
        if is_drained and (self.moves.is_open or self.pool.is_drained(place)):
            return
        self.pool.drain(place, is_drained=is_drained)
        if is_drained and place in self.moves.holders and not self._change():
            self.pool.drain(place, is_drained=False)

    def look_at_hosts(self) -> None:
        """Check whether other nodes should hold layers."""
        self.sleeper.look()
        phase, freed = self._coordinator.conductor.availability.phase, self.pool.freed(self.holders, self._clock.now_ns)
        if not self.moves.is_open and (phase is Phase.READY or (phase.is_paused and freed)):
            self._change()

    def _change(self) -> bool:
        holders = self.pool.wanted(self.moves.holders, N_LAYERS, self._clock.now_ns)
        if not holders:
            return False
        had = dict(zip(self.moves.holders, self.served, strict=True))
        wanted = [
            Holder(str(at), held=(part.layers.start, part.layers.stop)) if (part := had.get(at)) else Holder(str(at))
            for at in holders
        ]
        same = self.moves.cuts if len(holders) == len(self.moves.holders) else None
        if self.ask(share_out(wanted, N_LAYERS, lambda start, end: 0, lambda start, end: True, same=same), holders):
            return True
        self.pool.failed(self._clock.now_ns)
        return False

    def _after_failure(self) -> None:
        """A failed change has no effect: the node is not drained."""
        move = self.moves.latest
        if move is not None and move.state is MoveState.FAILED:
            self.pool.failed(self._clock.now_ns)
            for at in set(self.moves.holders) - set(move.holders):
                self.pool.drain(at, is_drained=False)

    # --- the switch ---------------------------------------------------------------------------------------------------

    def ended(self) -> None:
        """Everything of an epoch has been closed."""
        self._carry(self.moves.lost(self._clock.now_ns))
        if self._switching:
            number, self._switching = self._switching, 0
            move = self.moves.latest
            assert move is not None
            places = sorted({*self.holders, *move.holders})
            self.n_handed += self.holders != move.holders
            self.holders, self.served = move.holders, parts(move.cuts)
            self.n_kept += sum(move.keeps)
            takes = self._takes
            names = [f"stage {at}" for at in self.holders]
            self._coordinator.conductor.availability.changes_engines(names)
            kept = dict(zip(move.holders, move.keeps, strict=True))
            self.pool.moved()
            for at in places:
                node = self._nodes[at]
                node.ordered = self._part_of(at)
                switch = functools.partial(node.switch, number, takes.get(at, ()), keeps=kept.get(at, False))
                self._clock.after(travel_ns(self._rng), node.process.do, switch)
        self.sleeper.ended()

    def _part_of(self, place: int) -> Part:
        return self.served[self.holders.index(place)] if place in self.holders else NOTHING

    def stands(self) -> None:
        """An epoch has begun."""
        if not self._switching:
            self.moves.connected(self._clock.now_ns)
        self.sleeper.stands()

    def _died(self, place: int) -> None:
        self.sleeper.died(self._nodes[place])
        self._clock.after(travel_ns(self._rng), self._left, place)

    def _left(self, place: int) -> None:
        if not self._nodes[place].process.is_up:
            self.pool.left(place, self._clock.now_ns)
        self._carry(self.moves.left(place, self._clock.now_ns))
        self._after_failure()

    def _started(self, place: int) -> None:
        self.sleeper.started(self._nodes[place])
        self._clock.after(travel_ns(self._rng), self._came, place)

    def _came(self, place: int) -> None:
        if self._nodes[place].process.is_up:
            self.pool.came(place, self._clock.now_ns)

    # --- instructions -------------------------------------------------------------------------------------------------

    def _carry(self, instructions: Iterable[MoveInstruction]) -> None:
        clock, rng = self._clock, self._rng
        for instruction in instructions:
            match instruction:
                case Cut(number, cuts):
                    assert self.moves.latest is not None
                    clock.after(rng.randrange(LOAD_NS), self._cut, number, cuts, self.moves.latest.holders)
                case Prepare(number):
                    self._prepare(number)
                case Drop(number):
                    for node in self._nodes:
                        clock.after(travel_ns(self._rng), node.process.do, functools.partial(node.drop, number))
                    self._coordinator.carry(self._coordinator.conductor.dispatch(clock.now_ns))
                case Settle(after_s):
                    clock.after(round(after_s * S), self.look)
                case Switch(number):
                    self._switching = number
                    if self._coordinator.is_connected:
                        self._coordinator.lose(NotReadyError("layers move"), is_planned=True)
                    elif self._coordinator.is_closed:
                        self.ended()

    def _cut(self, number: int, cuts: tuple[int, ...], holders: tuple[int, ...]) -> None:
        if self._rng.random() < 0.1:
            self._carry(self.moves.failed(number, "no room on the disk", self._clock.now_ns))
            self._after_failure()
            return
        keeps = [self._part_of(at) == part for at, part in zip(holders, parts(cuts), strict=True)]
        self._carry(self.moves.cut(number, keeps, self._clock.now_ns))

    def _prepare(self, number: int) -> None:
        move = self.moves.latest
        assert move is not None
        before = [(at, part.layers.start, part.layers.stop) for at, part in zip(self.holders, self.served, strict=True)]
        after = [
            (at, part.layers.start, part.layers.stop) for at, part in zip(move.holders, parts(move.cuts), strict=True)
        ]
        self._takes = {}
        for giver, taker, start, end in handed(before, after, move.keeps):
            self._takes.setdefault(taker, []).append((self._nodes[giver], range(start, end)))
        wanted = dict(zip(move.holders, zip(parts(move.cuts), move.keeps, strict=True), strict=True))
        for at in sorted({*self.holders, *move.holders}):
            node, (part, keeps) = self._nodes[at], wanted.get(at, (NOTHING, True))
            after_ns = travel_ns(self._rng) + (0 if keeps else self._rng.randrange(LOAD_NS))
            prepare = functools.partial(node.prepare, number, part, functools.partial(self._prepared, number))
            self._clock.after(after_ns, node.process.do, prepare)

    def _prepared(self, number: int, place: int) -> None:
        self._clock.after(travel_ns(self._rng), self._is_prepared, number, place)

    def _is_prepared(self, number: int, place: int) -> None:
        self._carry(self.moves.prepared(number, place, self._clock.now_ns))
        self._after_failure()
