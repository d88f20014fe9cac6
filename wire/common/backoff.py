"""How long to wait before a further attempt. Pure: the caller makes the attempts, and waits."""

from __future__ import annotations

import random


class Backoff:
    """Delays in seconds, each twice the one before, from `first_s` to at most `max_s`."""

    def __init__(self, first_s: float, max_s: float) -> None:
        self._first_s, self._max_s = first_s, max_s
        self._delay_s = first_s

    def next_s(self) -> float:
        """Return the delay before the next attempt."""
        delay_s = self._delay_s
        self._delay_s = min(2 * delay_s, self._max_s)
        return delay_s

    def apart_s(self) -> float:
        """Return `next_s`, shortened by up to half at random: those that lost the same peer do not return at once."""
        return self.next_s() * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Begin with `first_s` again, after an attempt that got somewhere."""
        self._delay_s = self._first_s
