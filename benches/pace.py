"""Repeats as far as time allows, and more of what is over in a moment. Pure."""

from __future__ import annotations

TURNS = 4  # of one stream in one repeat


def turns_of(n_streams: int) -> int:
    """Return how often one repeat asks everybody: what few streams take a second for is left to chance."""
    return max(1, TURNS // n_streams)


class Pace:
    """How long each point took at its first time."""

    def __init__(self, end_ns: int | None) -> None:
        """`end_ns`: when the last repeat is to have ended; None: all of them are made."""
        self._end_ns = end_ns
        self._took_ns: dict[int, int] = {}
        self.left_out: list[tuple[int, int]] = []  # (streams, repeat) for which there was no time

    def has_time(self, n_streams: int, repeat: int, now_ns: int) -> bool:
        """Return whether a point's repeat ends in time, by what it took before. The first one (0) is always made."""
        took_ns = self._took_ns.get(n_streams, 0)
        if not repeat or self._end_ns is None or now_ns + took_ns <= self._end_ns:
            return True
        self.left_out.append((n_streams, repeat))
        return False

    def took(self, n_streams: int, took_ns: int) -> None:
        """A point with all its systems took so long."""
        self._took_ns[n_streams] = max(took_ns, self._took_ns.get(n_streams, 0))
