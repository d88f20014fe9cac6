"""The overhead of a round trip: time on links and in host work that no planned step accounts for. Pure.

Plans need this figure. The longer a flight travels without a stage working on it, the more flights it takes to keep
all stages busy. A flight that waited in a queue does not show its overhead, so there are two estimates.

*Measured.* Each stage reports how long decode frames waited there and how long it computed them. The rest of an
average flight's time is overhead, even where flights queue or prompts are read. This estimate is used after
WINDOWS_MIN windows. It has two known errors: a stage counts the frames of all coordinators that it serves, and if a
step takes only part of a flight, the rows that wait for the rest count as overhead.

*Bounded,* before that. The upper bound is a flight's time beyond its own predicted steps. The lower bound also
subtracts the work of the flights ahead of it, since overhead hides behind that work. Without a queue both bounds are
equal. The estimate only moves when it leaves the bounds. Its weakness: after a bad minute on a link a large estimate
would last as long as the load does, because it makes the plan send many small flights, which hide the true value.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Sequence

# Placing, encoding, sending and receiving of one step: `python -m benches.hop` at a few rows, rounded up.
# It matters where native steps are equally short: without it a tiny model would get many tiny steps.
HOST_STEP_NS = 500_000
ROUND_TRIPS_KEPT = 64  # recent decode flights from which bounds are taken
ROUND_TRIPS_MIN = 8  # before the first estimate, and in a window
ROUND_TRIPS_STRIDE = 4  # landings between estimates
WINDOWS_KEPT, WINDOWS_MIN = 5, 3  # the median of this many counts: a hitch of a process spoils one of them
OVERHEAD_STEP_NS = 200_000  # and a fifth: smaller moves of the overhead are noise


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """A stage's counters since its start."""

    n_frames: int
    """Decode frames that it has computed."""
    held_ns: int
    """While they waited and were computed, with what plans add to a native step for host work, summed."""


class Overhead:
    """The estimate of one epoch."""

    def __init__(self) -> None:
        self._bounds_ns: collections.deque[tuple[float, float]] = collections.deque(maxlen=ROUND_TRIPS_KEPT)
        self._n_landed = 0
        self._windows_ns: collections.deque[float] = collections.deque(maxlen=WINDOWS_KEPT)
        self._since: tuple[Held, ...] = ()  # the stages' counters at the start of the window
        self._n_flights = self._n_rows = self._took_ns = 0  # of flights that landed in it; took: summed over rows

    def landed(self, n_rows: int, took_ns: int) -> None:
        """Note a decode flight of `n_rows` that came back whole."""
        self._n_flights += 1
        self._n_rows += n_rows
        self._took_ns += n_rows * took_ns

    def bounded(self, took_ns: int, way_ns: float, ahead_ns: float) -> None:
        """Bound the overhead by a flight that met no prompts: by its predicted steps and the work ahead of it."""
        self._bounds_ns.append((took_ns - max(way_ns, ahead_ns), took_ns - way_ns))
        self._n_landed += 1

    def stages_held(self, counters: Sequence[Held]) -> None:
        """Take the counters of every stage. A window ends when enough flights have landed in it."""
        now = tuple(counters)
        if self._since and self._n_flights < ROUND_TRIPS_MIN:
            return
        n_frames = [late.n_frames - early.n_frames for late, early in zip(now, self._since, strict=False)]
        if n_frames and min(n_frames) > 0:
            pairs = zip(now, self._since, n_frames, strict=True)
            held_ns = sum((late.held_ns - early.held_ns) / count for late, early, count in pairs)
            self._windows_ns.append(self._took_ns / self._n_rows - held_ns)
        self._since = now
        self._n_flights = self._n_rows = self._took_ns = 0

    def revised_ns(self, known_ns: float) -> float:
        """Return the overhead for the next plans: the known one, unless it has clearly moved."""
        if len(self._windows_ns) >= WINDOWS_MIN:
            overhead_ns = max(0.0, statistics.median(self._windows_ns))
        elif len(self._bounds_ns) >= ROUND_TRIPS_MIN and self._n_landed % ROUND_TRIPS_STRIDE == 0:
            least_ns, most_ns = (max(0.0, sorted(each)[len(each) // 4]) for each in zip(*self._bounds_ns, strict=True))
            overhead_ns = min(max(known_ns, least_ns), most_ns)
        else:
            return known_ns
        has_moved = abs(overhead_ns - known_ns) > 0.2 * known_ns + OVERHEAD_STEP_NS
        return overhead_ns if has_moved else known_ns
