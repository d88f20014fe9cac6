"""Planned changes of layers in the cluster: the real `Moves`, driven as coordinator.joining.mover does."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from relayline.coordinator.engine.moves import Cut, Drop, MoveInstruction, Moves, Prepare, Settle, Switch
from relayline.deploy.testing.cluster.clock import MS, Clock, S
from relayline.deploy.testing.cluster.model import N_LAYERS
from relayline.deploy.testing.cluster.node import Node
from relayline.wire.common.errors import NotReadyError, RelaylineError

if TYPE_CHECKING:
    from relayline.deploy.testing.cluster.coordinator import Coordinator

LOAD_NS = 400 * MS  # the longest that a slice takes to be loaded


def ranges(cuts: Sequence[int]) -> list[range]:
    """Return the layers of each stage."""
    edges = (0, *cuts, N_LAYERS)
    return [range(edges[index], edges[index + 1]) for index in range(len(edges) - 1)]


class Mover:
    """The planned changes of the cluster's only coordinator."""

    def __init__(self, coordinator: Coordinator, nodes: Sequence[Node], clock: Clock, rng: random.Random) -> None:
        self._coordinator, self._nodes, self._clock, self._rng = coordinator, nodes, clock, rng
        names = [f"stage {node.index}" for node in nodes]
        cuts = tuple(node.layers.start for node in nodes[1:])
        self.moves = Moves(coordinator.conductor, names, N_LAYERS, cuts)
        self.served = cuts
        """The cuts that the next epoch is begun with."""
        self.n_kept = 0  # stages that kept what they had loaded
        self._switching = 0
        for node in nodes:
            node.on_death = functools.partial(self._died, node.index)

    def ask(self, cuts: tuple[int, ...]) -> bool:
        """Somebody wants other layers; returns whether that is begun."""
        if not all(node.is_up for node in self._nodes):
            return False
        try:
            instructions = self.moves.begin(cuts, self._clock.now_ns)
        except RelaylineError:
            return False
        self._carry(instructions)
        return True

    def look(self) -> None:
        """Something has come back, or time has passed."""
        self._carry(self.moves.look(self._clock.now_ns))

    def ended(self) -> None:
        """Everything of an epoch is closed."""
        self._carry(self.moves.lost(self._clock.now_ns))
        if self._switching:
            number, self._switching = self._switching, 0
            move = self.moves.latest
            assert move is not None
            self.served = move.cuts
            self.n_kept += sum(move.keeps)
            for node, layers, keeps in zip(self._nodes, ranges(move.cuts), move.keeps, strict=True):
                node.ordered = layers
                self._clock.after(self._travel_ns(), node.do, functools.partial(node.switch, number, keeps=keeps))

    def stands(self) -> None:
        """An epoch stands."""
        if not self._switching:
            self.moves.connected(self._clock.now_ns)

    def _travel_ns(self) -> int:
        return self._rng.randrange(1, 20 * MS)

    def _died(self, index: int) -> None:
        self._clock.after(self._travel_ns(), self._left, index)

    def _left(self, index: int) -> None:
        self._carry(self.moves.left(index, self._clock.now_ns))

    def _carry(self, instructions: Iterable[MoveInstruction]) -> None:
        clock, rng = self._clock, self._rng
        for instruction in instructions:
            match instruction:
                case Cut(number, cuts):
                    clock.after(rng.randrange(LOAD_NS), self._cut, number, cuts)
                case Prepare(number):
                    self._prepare(number)
                case Drop(number):
                    for node in self._nodes:
                        clock.after(self._travel_ns(), node.do, functools.partial(node.drop, number))
                case Settle(after_s):
                    clock.after(round(after_s * S), self.look)
                case Switch(number):
                    self._switching = number
                    if self._coordinator.is_connected:
                        self._coordinator.lose(NotReadyError("layers move"), is_planned=True)
                    elif self._coordinator.is_closed:
                        self.ended()

    def _cut(self, number: int, cuts: tuple[int, ...]) -> None:
        if self._rng.random() < 0.1:
            self._carry(self.moves.failed(number, "no room on the disk", self._clock.now_ns))
            return
        held = zip(ranges(self.served), ranges(cuts), strict=True)
        self._carry(self.moves.cut(number, [one == other for one, other in held], self._clock.now_ns))

    def _prepare(self, number: int) -> None:
        move = self.moves.latest
        assert move is not None
        for node, layers, keeps in zip(self._nodes, ranges(move.cuts), move.keeps, strict=True):
            after_ns = self._travel_ns() + (0 if keeps else self._rng.randrange(LOAD_NS))
            prepare = functools.partial(node.prepare, number, layers, functools.partial(self._prepared, number))
            self._clock.after(after_ns, node.do, prepare)

    def _prepared(self, number: int, index: int) -> None:
        self._clock.after(self._travel_ns(), self._is_prepared, number, index)

    def _is_prepared(self, number: int, index: int) -> None:
        self._carry(self.moves.prepared(number, index, self._clock.now_ns))
