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

A part of the overhead grows with the rows of a flight: each row is sampled, sent and written to its client. A plan for
8 streams that took the overhead of 64 would send two small flights where one of all streams is faster. So an estimate
names the rows that it was measured with, and what one row more adds. That is learned from flights of two sizes. Until
these are known, most of the overhead is taken for that of the rows (ROW_PART), but at most ROW_MAX_NS for each.
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
ROW_PART = 0.75  # of the overhead is that of the rows, while only one size of flights is known
ROW_MAX_NS = 100_000  # for each: a coordinator with free cores takes half of it, sampling on the processor the rest
ROW_LEARNED_MAX_NS = 250_000  # links that became slower between two sizes of flights look like dear rows
SIZES_APART = 4  # times as many rows as in the smallest known flights show what a row adds


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """A stage's counters since its start."""

    n_frames: int
    """Decode frames that it has computed."""
    held_ns: int
    """While they waited and were computed, with what plans add to a native step for host work, summed."""


@dataclasses.dataclass(frozen=True, slots=True)
class RoundTrip:
    """The overhead of a flight, by its rows."""

    ns: float = 0.0
    """Of a flight of `rows` rows."""
    rows: float = 0.0
    row_ns: float = 0.0
    """And for each row more or less."""

    def of(self, rows: float) -> float:
        """Predict the overhead of a flight of this many rows, in nanoseconds."""
        return max(0.0, self.ns + self.row_ns * (rows - self.rows))


class Overhead:
    """The estimate of one epoch."""

    def __init__(self) -> None:
        # Of one flight each: rows, and the least and the most overhead that it may have had.
        self._bounds: collections.deque[tuple[int, float, float]] = collections.deque(maxlen=ROUND_TRIPS_KEPT)
        self._n_landed = 0
        self._windows: collections.deque[RoundTrip] = collections.deque(maxlen=WINDOWS_KEPT)
        self._by_size: dict[int, RoundTrip] = {}  # the latest estimate by bits of its rows, which bounds them
        self._since: tuple[Held, ...] = ()  # the stages' counters at the start of the window
        # Of flights that landed in it. Squares: of the rows of each flight; took: summed over rows.
        self._n_flights = self._n_rows = self._n_squares = self._took_ns = 0

    def landed(self, n_rows: int, took_ns: int) -> None:
        """Note a decode flight of `n_rows` that came back whole."""
        self._n_flights += 1
        self._n_rows += n_rows
        self._n_squares += n_rows * n_rows
        self._took_ns += n_rows * took_ns

    def bounded(self, n_rows: int, took_ns: int, way_ns: float, ahead_ns: float) -> None:
        """Bound the overhead by a flight that met no prompts: by its predicted steps and the work ahead of it."""
        self._bounds.append((n_rows, took_ns - max(way_ns, ahead_ns), took_ns - way_ns))
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
            rows = self._n_squares / self._n_rows  # of the flight in which an average row travelled
            self._windows.append(RoundTrip(self._took_ns / self._n_rows - held_ns, rows))
        self._since = now
        self._n_flights = self._n_rows = self._n_squares = self._took_ns = 0

    def revised(self, known: RoundTrip) -> RoundTrip:
        """Return the overhead for the next plans: the known one, unless it has clearly moved."""
        if len(self._windows) >= WINDOWS_MIN:
            found = self._measured(known)
        elif len(self._bounds) >= ROUND_TRIPS_MIN and self._n_landed % ROUND_TRIPS_STRIDE == 0:
            found = self._within_bounds(known)
        else:
            return known
        sizes = (found.rows, *(each.rows for each in self._by_size.values()))
        has_moved = any(
            abs(found.of(rows) - known.of(rows)) > 0.2 * known.of(rows) + OVERHEAD_STEP_NS for rows in sizes
        )
        return found if has_moved else known

    def _measured(self, known: RoundTrip) -> RoundTrip:
        rows = self._windows[-1].rows
        row_ns = self._row_ns() or known.row_ns
        ns = max(0.0, statistics.median(each.ns + row_ns * (rows - each.rows) for each in self._windows))
        self._by_size[int(rows).bit_length()] = RoundTrip(ns, rows)
        return RoundTrip(ns, rows, self._row_ns() or _assumed_row_ns(ns, rows))

    def _row_ns(self) -> float:
        """Return the overhead that a row adds, 0.0 while only flights of one size are known."""
        known = sorted(self._by_size.values(), key=lambda each: each.rows)
        if not known or known[-1].rows < SIZES_APART * known[0].rows:
            return 0.0
        few, many = known[0], known[-1]
        return min(ROW_LEARNED_MAX_NS, max(1.0, (many.ns - few.ns) / (many.rows - few.rows)))

    def _within_bounds(self, known: RoundTrip) -> RoundTrip:
        rows = self._bounds[-1][0]
        moved = ((known.row_ns * (rows - each), least_ns, most_ns) for each, least_ns, most_ns in self._bounds)
        bounds = [(more_ns + least_ns, more_ns + most_ns) for more_ns, least_ns, most_ns in moved]
        least_ns, most_ns = (max(0.0, sorted(each)[len(each) // 4]) for each in zip(*bounds, strict=True))
        ns = min(max(known.of(rows), least_ns), most_ns)
        return RoundTrip(ns, rows, _assumed_row_ns(ns, rows))


def _assumed_row_ns(ns: float, rows: float) -> float:
    return min(ROW_MAX_NS, ROW_PART * ns / rows) if rows else 0.0
