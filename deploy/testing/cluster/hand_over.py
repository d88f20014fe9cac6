"""Lanes that change hands with their layers in the cluster, as stage.hand_over has it: lane by lane, between processes
that may die meanwhile. The cells are cut, joined and taken by the real stage.steps.handing.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from relayline.deploy.testing.cluster.clock import MS, Clock
from relayline.deploy.testing.cluster.process import Process
from relayline.stage.steps.handing import HandedLane, Handing, behind, joined
from relayline.stage.steps.step import StepExecutor

LIMIT_NS = 250 * MS  # for lanes to change hands

Send = Callable[[HandedLane | None], None]
Sources = list[list[HandedLane | None]]  # of each source the lanes that have come, None at its end


class Stage(Protocol):
    """The stage that gives or takes."""

    executor: StepExecutor
    """Of the engine that serves."""


class HandOver:
    """One stage's part in it."""

    def __init__(self, clock: Clock, process: Process, stage: Stage, seed: int) -> None:
        self._clock, self._process, self._stage = clock, process, stage
        self._rng = random.Random(seed)  # a separate one: other draws of a history stay the same
        self._change = 0
        self._old: tuple[Handing, int] | None = None  # the engine of before and its first layer
        self._taking: Sources | None = None
        self.n_taken = 0
        """Lanes that were taken over."""

    @property
    def is_taking(self) -> bool:
        """Whether lanes are awaited: no epoch begins before they are here, or given up."""
        return self._taking is not None

    def restarted(self) -> None:
        """A new engine was made: it has nothing of the old one."""
        self._change, self._old, self._taking = 0, None, None

    def switched(self, change: int, handing: Handing, first_layer: int) -> None:
        """An engine with other layers serves from now on; this was the one before."""
        self._change, self._old = change, (handing, first_layer)

    def take(self, change: int, takes: Sequence[tuple[Process, HandOver, range]]) -> None:
        """Take over lanes from the earlier holders, in layer order."""
        if not takes:
            return
        taking: Sources = [[] for _ in takes]
        self._taking = taking
        for source, (process, giver, layers) in enumerate(takes):
            send = functools.partial(self._process.do_as, self._process.instance, self._taken, taking, source)
            give = functools.partial(giver.give, change, layers, send)
            self._clock.after(self._rng.randrange(LIMIT_NS // 4), process.do, give)
        self._clock.after(LIMIT_NS, self._give_up, taking)

    def give(self, change: int, layers: range, send: Send, n_tries: int = 8) -> None:
        """Give the lanes of layers that it had before a change, one after the other."""
        if self._change != change:  # the order to switch has not come yet, or never comes
            if self._change < change and n_tries:
                again = functools.partial(self.give, change, layers, send, n_tries - 1)
                self._clock.after(LIMIT_NS // 8, self._process.do, again)
            return
        assert self._old is not None
        handing, first_layer = self._old
        first, end = layers.start - first_layer, layers.stop - first_layer
        found = (handing.give(key, first, end) for key in handing.left())
        at_ns = 0
        for lane in (*(lane for lane in found if lane is not None), None):
            at_ns += self._rng.randrange(LIMIT_NS // 16)
            self._clock.after(at_ns, self._process.do_as, self._process.instance, send, lane)

    def _taken(self, taking: Sources, source: int, lane: HandedLane | None) -> None:
        if self._taking is not taking:
            return
        taking[source].append(lane)
        while all(taking):
            heads = [lanes[0] for lanes in taking]
            found = [head for head in heads if head is not None]
            if len(found) < len(heads):
                self._taking = None
                return
            late = behind(found)
            if not late:
                self.n_taken += self._stage.executor.sessions.handing.take(joined(found))
            for index in late or range(len(heads)):
                taking[index].pop(0)

    def _give_up(self, taking: Sources) -> None:
        if self._taking is taking:
            self._taking = None
