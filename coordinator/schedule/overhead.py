"""The overhead of a round trip: time on links and in host work that no planned step accounts for. Pure.

Plans need this figure. The longer a flight travels without a stage working on it, the more flights it takes to keep
all stages busy. A flight that waited in a queue does not show its overhead, so there are two estimates.

*Measured.* Each stage reports how long decode frames waited there and how long it computed them. The rest of an
average flight's time is overhead, even where flights queue or prompts are read. This estimate is used after
WINDOWS_MIN windows with about as many streams as run now. It has two known errors: a stage counts the frames of all
coordinators that it serves, and if a step takes only part of a flight, the rows that wait for the rest count as
overhead.

*Bounded,* before that. The upper bound is a flight's time beyond its own predicted steps. The lower bound also
subtracts the work of the flights ahead of it, since overhead hides behind that work. Without a queue both bounds are
equal. The estimate only moves when it leaves the bounds. These, too, are of flights with about as many streams. Once
windows of other numbers of streams are known, only the upper bound counts. The weakness of bounds: after a bad minute
on a link a large estimate would last as long as the load does, because it makes the plan send many small flights, which
hide the true value.

A part of the overhead grows with the streams that run: each of their tokens is sampled, sent and written to its client,
and flights wait for each other's tokens. A plan for 8 streams that took the overhead of 64 would send two small flights
where one of all streams is faster. So an estimate names the streams that ran, and what one more adds. That is learned
from two numbers of streams, each with figures of its own, so no figure of many is taken for that of one. Until two are
known, most of the overhead is taken for that of the streams (STREAM_PART), but at most STREAM_MAX_NS for each.
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
WINDOWS_USED, WINDOWS_MIN = 5, 3  # the median of this many counts: a hitch of a process spoils one of them
WINDOWS_KEPT = 20  # of all numbers of streams: a load that comes and goes finds its own again
NEAR = 2  # numbers of streams at most this many times apart tell of each other
OVERHEAD_STEP_NS = 200_000  # and a fifth: smaller moves of the overhead are noise
STREAM_PART = 0.75  # of the overhead is that of the streams, while only one number of them is known
STREAM_MAX_NS = 100_000  # for each: a coordinator with free cores takes half of it, sampling on the processor the rest
LEARNED_MAX_NS = 250_000  # links that became slower between two numbers of streams look like dear streams
NUMBERS_APART = 4  # times as many streams as the fewest that are known show what one adds


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """A stage's counters since its start."""

    n_frames: int
    """Decode frames that it has computed."""
    held_ns: int
    """While they waited and were computed, with what plans add to a native step for host work, summed."""


@dataclasses.dataclass(frozen=True, slots=True)
class RoundTrip:
    """The overhead of a flight, by the streams that run."""

    ns: float = 0.0
    """While `streams` run."""
    streams: float = 0.0
    stream_ns: float = 0.0
    """And for each stream more or less."""

    def of(self, streams: float) -> float:
        """Predict the overhead of a flight while this many streams run, in nanoseconds."""
        return max(0.0, self.ns + self.stream_ns * (streams - self.streams))

    def scaled(self, factor: float) -> RoundTrip:
        """Return one that takes `factor` times as long."""
        return RoundTrip(self.ns * factor, self.streams, self.stream_ns * factor)


class Overhead:
    """The estimate of one epoch."""

    def __init__(self) -> None:
        # Of one flight each: the streams that ran, and the least and the most overhead that it may have had.
        self._bounds: collections.deque[tuple[int, float, float]] = collections.deque(maxlen=ROUND_TRIPS_KEPT)
        self._n_landed = 0
        self._windows: collections.deque[RoundTrip] = collections.deque(maxlen=WINDOWS_KEPT)
        self._unmoved: RoundTrip | None = None  # what the windows until now have not moved
        self._n_running = 0  # streams that ran when the latest flight landed
        self._n_unmoved = 0  # and that ran when this was found
        self._by_number: dict[int, RoundTrip] = {}  # the latest estimate by the bits of the number of streams
        self._since: tuple[Held, ...] = ()  # the stages' counters at the start of the window
        # Of flights that landed in it; the last two are summed over rows.
        self._n_flights = self._n_rows = self._n_streams = self._took_ns = 0

    def known(self, now: RoundTrip) -> list[RoundTrip]:
        """Return the present estimate, and the latest ones of other numbers of streams."""
        others = (each for each in self._by_number.values() if each.streams != now.streams)
        return [now, *(dataclasses.replace(each, stream_ns=now.stream_ns) for each in others)]

    def landed(self, n_rows: int, took_ns: int, n_streams: int) -> None:
        """Note a decode flight of `n_rows` that came back whole while n_streams ran."""
        self._n_running = n_streams
        self._n_flights += 1
        self._n_rows += n_rows
        self._n_streams += n_rows * n_streams
        self._took_ns += n_rows * took_ns

    def bounded(self, n_streams: int, took_ns: int, way_ns: float, ahead_ns: float) -> None:
        """Bound the overhead by a flight that met no prompts: by its predicted steps and the work ahead of it."""
        self._bounds.append((n_streams, took_ns - max(way_ns, ahead_ns), took_ns - way_ns))
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
            took_ns, streams = self._took_ns / self._n_rows, self._n_streams / self._n_rows
            self._windows.append(RoundTrip(took_ns - held_ns, streams))
            self._unmoved = None
        self._since = now
        self._n_flights = self._n_rows = self._n_streams = self._took_ns = 0

    def revised(self, known: RoundTrip) -> RoundTrip:
        """Return the overhead for the next plans: the known one, unless it has clearly moved."""
        if known is self._unmoved and self._n_running == self._n_unmoved:
            return known  # asked with every token, and windows end once a second: saves 25 of 105 Python calls a token
        windows = [each for each in self._windows if are_near(each.streams, self._n_running)]
        if len(windows) >= WINDOWS_MIN:
            found = self._measured(windows[-WINDOWS_USED:], known)
        elif self._n_landed % ROUND_TRIPS_STRIDE == 0:
            found = self._within_bounds(known)
        else:
            return known
        numbers = (found.streams, *(each.streams for each in self._by_number.values()))
        if found is not known and any(has_moved(known.of(n), found.of(n)) for n in numbers):
            return found
        if len(windows) >= WINDOWS_MIN:
            self._unmoved, self._n_unmoved = known, self._n_running
        return known

    def _measured(self, windows: Sequence[RoundTrip], known: RoundTrip) -> RoundTrip:
        """Return what windows with about as many streams say of the latest one's number of them."""
        streams, stream_ns = windows[-1].streams, self._stream_ns() or known.stream_ns
        ns = statistics.median(each.ns + stream_ns * (streams - each.streams) for each in windows)
        return self._learned(max(0.0, ns), streams)

    def _within_bounds(self, known: RoundTrip) -> RoundTrip:
        """Return the known overhead, or the nearest within the bounds of flights with about as many streams."""
        streams = self._n_running
        near = [each for each in self._bounds if are_near(each[0], streams)]
        if len(near) < ROUND_TRIPS_MIN:
            return known
        moved = ((known.stream_ns * (streams - each), least, most) for each, least, most in near)
        bounds = [(more_ns + least_ns, more_ns + most_ns) for more_ns, least_ns, most_ns in moved]
        least_ns, most_ns = (max(0.0, sorted(each)[len(each) // 4]) for each in zip(*bounds, strict=True))
        if len(self._windows) >= WINDOWS_MIN:
            least_ns = 0.0  # a busy host's steps take longer than predicted, which would pass for overhead
        if least_ns <= known.of(streams) <= most_ns:
            return known  # nothing is learned of this number
        return self._learned(min(max(known.of(streams), least_ns), most_ns), streams)

    def _learned(self, ns: float, streams: float) -> RoundTrip:
        self._by_number[int(streams).bit_length()] = RoundTrip(ns, streams)
        return RoundTrip(ns, streams, self._stream_ns() or min(STREAM_MAX_NS, STREAM_PART * ns / max(1.0, streams)))

    def _stream_ns(self) -> float:
        """Return the overhead that a stream adds, 0.0 while only one number of them is known."""
        known = sorted(self._by_number.values(), key=lambda each: each.streams)
        if not known or known[-1].streams < NUMBERS_APART * known[0].streams:
            return 0.0
        few, many = known[0], known[-1]
        return min(LEARNED_MAX_NS, max(1.0, (many.ns - few.ns) / (many.streams - few.streams)))


def has_moved(known_ns: float, found_ns: float) -> bool:
    """Return whether an overhead differs from the known one by so much that plans are made again."""
    return abs(found_ns - known_ns) > 0.2 * known_ns + OVERHEAD_STEP_NS


def are_near(streams: float, others: float) -> bool:
    """Return whether the overhead with `streams` streams tells of that with `others`."""
    return max(streams, others) <= NEAR * min(streams, others)
