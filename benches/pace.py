"""Decides how many repeats fit the time: more for points that are quick. Pure."""

from __future__ import annotations

TURNS = 4  # of one stream in one repeat


def turns_of(n_streams: int) -> int:
    """Return how often one repeat measures each system: points with few streams take a second, so one run is left to
    chance.
    """
    return max(1, TURNS // n_streams)


class Pace:
    """How long each point took at its first time."""

    def __init__(self, end_ns: int | None) -> None:
        """`end_ns`: when the last repeat must have ended; None: no limit."""
        self._end_ns = end_ns
        self._took_ns: dict[int, int] = {}
        self.left_out: list[tuple[int, int]] = []  # (streams, repeat) for which there was no time

    def has_time(self, n_streams: int, repeat: int, now_ns: int) -> bool:
        """Return whether a point's repeat ends in time, judged by its earlier time. The first one (0) always runs."""
        took_ns = self._took_ns.get(n_streams, 0)
        if not repeat or self._end_ns is None or now_ns + took_ns <= self._end_ns:
            return True
        self.left_out.append((n_streams, repeat))
        return False

    def took(self, n_streams: int, took_ns: int) -> None:
        """Record how long a point took with all its systems."""
        self._took_ns[n_streams] = max(took_ns, self._took_ns.get(n_streams, 0))
