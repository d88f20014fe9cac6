"""Virtual time: what happens when, in an order that depends on nothing but the seed."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

MS = 1_000_000
S = 1_000 * MS


class Violation(AssertionError):
    """An invariant broke: the code under test is wrong."""


class Clock:
    """One heap of events."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self.n_events = 0

    def at(self, time_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        """Let something happen at a time; what is asked for first of one moment happens first."""
        heapq.heappush(self._heap, (max(time_ns, self.now_ns), next(self._order), action, arguments))

    def after(self, delay_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        """Let something happen after a while; 0: behind everything that happens now."""
        self.at(self.now_ns + delay_ns, action, *arguments)

    def step(self) -> bool:
        """Let the next thing happen; False if nothing will."""
        if not self._heap:
            return False
        self.now_ns, _, action, arguments = heapq.heappop(self._heap)
        self.n_events += 1
        action(*arguments)
        return True
