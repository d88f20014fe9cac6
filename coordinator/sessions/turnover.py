"""Estimates when a lane becomes free, from how long lanes were held recently. Pure."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

HOLDS_MAX = 64  # latest holds of lanes that count
RETRY_AFTER_MAX_S = 120  # OpenAI's clients give up if told to wait longer


class Turnover:
    """How long requests hold their lanes."""

    def __init__(self) -> None:
        self._held_ns: collections.deque[int] = collections.deque(maxlen=HOLDS_MAX)

    def left(self, held_ns: int) -> None:
        """A request has given its lane back after so long."""
        self._held_ns.append(held_ns)

    def wait_s(self, n_before: int, n_lanes: int, running_ns: Sequence[int]) -> int:
        """Return in how many seconds a request behind n_before others would get a lane: 1 to RETRY_AFTER_MAX_S.

        running_ns: for how long each taken lane has been held so far.
        """
        hold_ns = max(_mean(self._held_ns), _mean(running_ns))
        wait_s = hold_ns * (n_before + 1) / max(1, n_lanes) / 1e9
        return min(max(1, math.ceil(wait_s)), RETRY_AFTER_MAX_S)


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0
