"""One host's estimate of another's clock: from round trips, with its uncertainty. Pure.

A peer answers between two readings of our clock, so it read its own in between. The midpoint is wrong by at most half
of the round trip, however unequal its two directions are. The best of the latest round trips is the shortest. An older
one counts for less, because two clocks drift apart, by at most DRIFT_MAX.
"""

from __future__ import annotations

import collections
import dataclasses

DRIFT_MAX = 50e-6  # of two quartz clocks, in seconds per second
ROUND_TRIPS_KEPT = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Clock:
    """The wall clock that a process stamps its spans with."""

    unix_offset_ns: int
    """What to add to its own monotonic nanoseconds."""
    uncertainty_ns: int
    """How far off that can be, either way."""

    def is_like(self, other: Clock) -> bool:
        """Return whether the two can be the same truth and are about as sure of it."""
        is_near = abs(self.unix_offset_ns - other.unix_offset_ns) <= self.uncertainty_ns + other.uncertainty_ns
        return is_near and other.uncertainty_ns <= 2 * self.uncertainty_ns


@dataclasses.dataclass(frozen=True, slots=True)
class _RoundTrip:
    offset_ns: int
    half_ns: int  # of the round trip's time
    at_ns: int

    def uncertainty_ns(self, now_ns: int) -> int:
        return self.half_ns + round(DRIFT_MAX * max(0, now_ns - self.at_ns)) + 1


class OffsetEstimate:
    """The difference between a peer's monotonic clock and ours, by one link's round trips. In nanoseconds."""

    def __init__(self) -> None:
        self._kept: collections.deque[_RoundTrip] = collections.deque(maxlen=ROUND_TRIPS_KEPT)

    def heard(self, sent_ns: int, received_ns: int, theirs_ns: int) -> None:
        """Add a round trip: asked at sent_ns, answered at received_ns of our clock, at theirs_ns of the peer's."""
        if received_ns < sent_ns:
            return  # no clock of ours says so
        # A time that fits in between is from the clock of this very machine, which all its processes share.
        is_shared = sent_ns <= theirs_ns <= received_ns
        offset_ns = 0 if is_shared else (sent_ns + received_ns) // 2 - theirs_ns
        half_ns = (received_ns - sent_ns + 1) // 2
        self._kept.append(_RoundTrip(offset_ns, half_ns, received_ns))

    def best(self, now_ns: int) -> tuple[int, int] | None:
        """Return (offset, uncertainty) at present; None before the first round trip."""
        if not self._kept:
            return None
        best = min(self._kept, key=lambda trip: trip.uncertainty_ns(now_ns))
        return best.offset_ns, best.uncertainty_ns(now_ns)
