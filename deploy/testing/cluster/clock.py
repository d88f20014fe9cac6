"""Virtual time: events in an order that depends only on the seed."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

MS = 1_000_000
S = 1_000 * MS


class Violation(AssertionError):
    """An invariant was violated: the code under test is wrong."""


class Clock:
    """One heap of events."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self.n_events = 0

    def at(self, time_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule an action at a time. Actions of one moment run in the order in which they were scheduled."""
        heapq.heappush(self._heap, (max(time_ns, self.now_ns), next(self._order), action, arguments))

    def after(self, delay_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule an action after a delay; 0: after everything that is scheduled for now."""
        self.at(self.now_ns + delay_ns, action, *arguments)

    def step(self) -> bool:
        """Run the next action; False if there is none."""
        if not self._heap:
            return False
        self.now_ns, _, action, arguments = heapq.heappop(self._heap)
        self.n_events += 1
        action(*arguments)
        return True
