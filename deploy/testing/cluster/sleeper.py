"""The sleep of a simulated pipeline: the real `Sleep`, driven as coordinator.joining.sleeper does."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from relayline.coordinator.engine.sleep import (
    Connect,
    EndEpoch,
    GiveUpMove,
    Refuse,
    Sleep,
    SleepInstruction,
    SleepState,
    TellStages,
)
from relayline.deploy.testing.cluster.clock import MS, Clock, Violation
from relayline.wire.common.errors import NotReadyError
from relayline.wire.common.phase import Phase

if TYPE_CHECKING:
    from relayline.coordinator.engine.moves import Moves
    from relayline.deploy.testing.cluster.coordinator import Coordinator
    from relayline.deploy.testing.cluster.node import Node

LOAD_NS = 400 * MS  # the longest time to load a slice
FAILS_SHARE = 0.1  # of loads


def travel_ns(rng: random.Random) -> int:
    """Return how long an order, or an answer, is on its way between the coordinator and a node."""
    return rng.randrange(1, 20 * MS)


class Sleeper:
    """Puts the cluster's only coordinator to sleep, and wakes it."""

    def __init__(
        self,
        coordinator: Coordinator,
        moves: Moves,
        holders: Callable[[], list[Node]],
        clock: Clock,
        rng: random.Random,
    ) -> None:
        """`holders` returns the nodes that are to hold layers now, in layer order."""
        self._coordinator, self._holders, self._clock, self._rng = coordinator, holders, clock, rng
        self._moves = moves
        self.sleep = Sleep(
            coordinator.conductor,
            0.0,
            0,
            is_moving=lambda: moves.is_open,
            missing=lambda: [f"stage {node.place}" for node in holders() if not node.process.is_up],
        )
        self._orders = 0  # a stage that hears of an earlier one after a later one does nothing
        self._is_told = False  # whether the stages are to sleep
        self._awake: set[int] = set()  # places of nodes that say that they serve, since they were told to
        self.n_reported_failures = 0

    @property
    def is_resting(self) -> bool:
        """Whether no epoch is to be begun."""
        if self.sleep.state is SleepState.WAKING:
            return any(node.place not in self._awake for node in self._holders())
        return self.sleep.state is SleepState.ASLEEP

    def ask(self) -> None:
        """Sleep as soon as no request runs."""
        self._carry(self.sleep.ask(self._clock.now_ns))

    def wake(self) -> None:
        """Wake without a request."""
        self._carry(self.sleep.wake(self._clock.now_ns))

    def fails(self) -> None:
        """A stage cannot load."""
        self._failed(self._orders)

    def look(self) -> None:
        """A second has passed."""
        self._carry(self.sleep.look(self._clock.now_ns))

    def came(self) -> None:
        """A request was admitted."""
        self._carry(self.sleep.came(self._clock.now_ns))

    def ended(self) -> None:
        """Everything of an epoch is closed."""
        self._carry(self.sleep.ended(self._clock.now_ns))

    def stands(self) -> None:
        """An epoch has begun."""
        if any(node.process.is_asleep for node in self._coordinator.line):
            raise Violation("an epoch stands with a stage that sleeps")
        self.sleep.stands(self._clock.now_ns)

    def died(self, node: Node) -> None:
        """A node is gone."""
        if node in self._holders():
            self._awake.discard(node.place)
            self.sleep.left(f"stage {node.place}", self._clock.now_ns)

    def started(self, node: Node) -> None:
        """A node is back: it loads nothing while the pipeline sleeps."""
        node.process.is_asleep = self._is_told
        if not self._is_told:
            self._awake.add(node.place)

    def check(self) -> None:
        """Raise Violation if a request waits and nothing will wake its stages, or if one runs while they sleep."""
        conductor = self._coordinator.conductor
        if conductor.availability.phase is Phase.SLEEPING and conductor.readers:
            raise Violation("a request waits for a pipeline that sleeps")
        if self._coordinator.is_connected and any(node.process.is_asleep for node in self._coordinator.line):
            raise Violation("a stage sleeps while its epoch stands")
        if self.sleep.is_asleep and self._moves.is_open and not self._moves.is_switching:
            raise Violation("layers are on the move while the stages sleep, which follow no change")

    # --- instructions -------------------------------------------------------------------------------------------------

    def _carry(self, instructions: Iterable[SleepInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case EndEpoch():
                    if self._coordinator.conductor.readers:
                        raise Violation("it goes to sleep while a request runs")
                    self._coordinator.lose(NotReadyError("the pipeline goes to sleep"), is_planned=True)
                case TellStages(is_asleep):
                    self._tell(is_asleep=is_asleep)
                case GiveUpMove(why):
                    if self._coordinator.mover is not None:
                        self._coordinator.mover.give_up(why)
                case Refuse(error):
                    self._coordinator.carry(self._coordinator.conductor.fail_all(error, self._clock.now_ns))
                case Connect():
                    pass

    def _tell(self, *, is_asleep: bool) -> None:
        self._orders += 1
        self._is_told = is_asleep
        if is_asleep:
            self._coordinator.failed()  # no attempt reaches stages that sleep
        self._awake.clear()
        for node in self._holders():
            told = functools.partial(self._told, node, self._orders, is_asleep=is_asleep)
            self._clock.after(travel_ns(self._rng), node.process.do, told)

    def _told(self, node: Node, order: int, *, is_asleep: bool) -> None:
        """A node hears an order, in its process."""
        if order < self._orders:
            return
        if is_asleep:
            node.fall_asleep(lambda: order == self._orders)
        elif node.process.is_asleep:
            self._clock.after(self._rng.randrange(LOAD_NS), node.process.do_as, node.process.instance,
                              functools.partial(self._loaded, node, order))  # fmt: skip
        else:
            self._serves(node, order)

    def _loaded(self, node: Node, order: int) -> None:
        if order < self._orders:
            return
        if self._rng.random() < FAILS_SHARE:
            self._clock.after(travel_ns(self._rng), self._failed, order)
            return
        node.process.is_asleep = False
        self._clock.after(travel_ns(self._rng), self._serves, node, order)

    def _failed(self, order: int) -> None:
        if order == self._orders:
            self.n_reported_failures += 1
            self._carry(self.sleep.failed("no memory", self._clock.now_ns))

    def _serves(self, node: Node, order: int) -> None:
        if order == self._orders and node.process.is_up:
            self._awake.add(node.place)
