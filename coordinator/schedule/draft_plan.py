"""Chooses the number of draft rows in each flight, from the stages' cost curves. Pure.

A draft token pays if its row costs less than its chance of acceptance is worth. That depends on the stage and the row
count. On a staircase the rest of a tile is free. On a GPU a few dozen rows are free, and on a compute-bound CPU hardly
any is. So the choice is made for each flight, with the curves and the cycle of `coordinator.schedule.groups`. It
maximises the expected tokens of all streams in a cycle, over

    cycle = max( the busiest stage's work on all flights, the longest flight's way through all stages + overhead )

A flight with guesses takes longer, and no flight overtakes another, so the others soon queue behind it at its pace. The
gain of one flight is therefore weighed against the loss of all. The loss is smaller if the others draft too, since the
same long way then carries more tokens. If each flight looked at the present load of the others, none would begin to
draft. So each assumes that the others take guesses that are as likely as its own, as far as their streams had any when
they were last asked. All flights then decide alike, and the assumption comes true.

Flights of unequal rows spread less evenly over the stages than equal ones, see UNEVEN. Flights with guesses are
unequal.

If stages would be idle, guesses may also follow as a separate flight, right behind the rows that they depend on. One
stage computes them while the next computes those rows. If they are right, a single stream keeps several stages busy.
For a lone stream such a flight counts with its chance to be right as a whole: the next token then takes one stage's
step instead of the whole way.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

from relayline.coordinator.schedule.groups import GroupPlan, GroupPlanner
from relayline.wire.common.bounds import DRAFT_AHEAD_MAX

DRAFT_GAIN = 0.03  # less than this is noise of the curves, and not worth the energy
SHARED_GAIN = 0.2  # and less than this, where there are other flights, is lost on the way from plain ones to others
WAIT_GAIN = 0.05  # less than this is not worth a wait for guesses that may be wrong
WAIT_LOOK = 2  # guesses beyond the best number that are tried: a tile may end there
WAIT_GUESSES_MAX = 8  # that a flight waits for at most
STRETCH_MAX = 4.0  # times that a cycle may become longer: not all streams may have guesses
UNEVEN = 3  # exponent that joins the two terms of a cycle of flights that differ; equal terms make it 26 % longer
FOLLOWING_CHANCE_MIN = 0.4  # of the first row of a flight of guesses: below, it is work for nothing more often than not
CHANCE_STEPS = 20  # the resolution of the chances of other streams' drafts


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """The other rows that are on their way."""

    n_flights: int
    """Decode flights under way, the one that is asked about included."""
    n_other_rows: int
    """Streams in the others."""
    n_idle: int
    """Flights more that the stages would have time for."""


def traffic(plan: GroupPlan, planner: GroupPlanner, n_streams: int, n_decoding: int) -> Traffic:
    """Return the traffic that a flight of n_streams meets once all decoding streams are under way."""
    n_flights = min(plan.n_groups, math.ceil(n_decoding / n_streams))
    n_idle = planner.saturating(n_streams, n_decoding) - n_flights
    # If streams take turns in the flights, some of them wait in the pool.
    n_other_rows = max(0, min(n_decoding - n_streams, (n_flights - 1) * plan.group_rows))
    return Traffic(n_flights, n_other_rows, max(0, n_idle))


class Offers:
    """The guesses that streams had when they were asked last, by their chance to be right."""

    def __init__(self) -> None:
        self._of: dict[int, list[float]] = {}  # session id -> chances
        self._n = [0] * (CHANCE_STEPS + 1)  # guesses of each step of chance
        self._n_right = [0.0] * (CHANCE_STEPS + 1)  # of these are expected to be right

    def put(self, session_id: int, chances: Sequence[float]) -> None:
        """Note a stream's present guesses; of none once it has ended."""
        for sign, each in ((-1, self._of.pop(session_id, ())), (1, chances)):
            for chance in each:
                self._n[int(chance * CHANCE_STEPS)] += sign
                self._n_right[int(chance * CHANCE_STEPS)] += sign * chance
        if chances:
            self._of[session_id] = list(chances)

    def likely(self, chance: float, n_max: int) -> tuple[int, float]:
        """Return how many are about so likely or more, at most n_max, and how many of them are expected to be right."""
        step = int(chance * CHANCE_STEPS)
        n, n_right = sum(self._n[step:]), sum(self._n_right[step:])
        return (n, n_right) if n <= max(0, n_max) else (max(0, n_max), n_right * max(0, n_max) / n)


def best_counts(
    planner: GroupPlanner, chances: Sequence[Sequence[float]], traffic: Traffic, others: Offers
) -> list[int]:
    """Return how many guesses each frame of a flight takes along.

    chances: per frame, the chance that each draft token is right together with those before it, and one more for a
    draft in a separate flight behind it. The list ends where drafts become too unlikely. others: the same for streams
    outside this flight.
    """
    counts, n_frames = [0] * len(chances), len(chances)
    offers = _offers(chances, planner.draft_room(n_frames))
    # With per-lane cells, lanes with different numbers of rows are computed in parts.
    if not offers or (planner.is_per_lane and n_frames > 1):
        return counts
    cycle = _Cycle(planner, n_frames, traffic)
    n_drafted, n_right, gain = 0, 0.0, SHARED_GAIN if traffic.n_other_rows else DRAFT_GAIN
    follows = sum(each[0] for each in chances if each)  # chances that the flight of guesses behind it is right, summed
    best, chosen = (1 + gain) * cycle.rate(follows / n_frames), list(counts)
    for chance, _, frame in offers:
        counts[frame] += 1
        follows += chances[frame][counts[frame]] - chance
        n_drafted, n_right = n_drafted + 1, n_right + chance
        alike = others.likely(chance, n_drafted * traffic.n_other_rows // n_frames)
        rate = cycle.rate(follows / n_frames, (n_drafted, n_right), alike)
        if rate > best:
            best, chosen = rate, list(counts)
    return chosen


def waits_for(
    planner: GroupPlanner,
    chances: Sequence[Sequence[float]],
    traffic: Traffic,
    coming: Sequence[float],
    guess_ns: float,
) -> int:
    """Return for how many more guesses a flight had better wait; 0: it leaves now.

    chances: for each frame those of the guesses that are known. coming: for each frame the chance that one more guess
    is right if those before it are; 0.0 where none comes. guess_ns: how long it takes until all of these have one more.
    """
    n_frames = len(chances)
    if planner.is_per_lane and n_frames > 1:
        return 0
    cycle = _Cycle(planner, n_frames, traffic)
    plain = cycle.best([[] for _ in chances], 0.0)
    # What the next flight has if every guess of this one is right: the model goes on meanwhile.
    n_made = min(DRAFT_AHEAD_MAX, int(plain.cycle_ns / guess_ns))
    ready = cycle.best([[*itertools.accumulate([chance] * (n_made + 1), operator.mul)] for chance in coming], 0.0)
    known = [list(each) for each in chances]
    n_best, best = 0, 0.0
    for n_guesses in range(WAIT_GUESSES_MAX + 1):
        # The guess behind those that go along comes while these are under way, and may follow.
        following = [(each[-1] if each else 1.0) * chance for each, chance in zip(known, coming, strict=True)]
        behind = [[*each, chance] for each, chance in zip(known, following, strict=True)]
        now, hit = cycle.best(behind, n_guesses * guess_ns), sum(following) / n_frames
        n_tokens = now.n_tokens + hit * ready.n_tokens + (1 - hit) * plain.n_tokens
        took_ns = n_guesses * guess_ns + now.cycle_ns + hit * ready.cycle_ns + (1 - hit) * plain.cycle_ns
        rate = n_tokens / took_ns if took_ns else 0.0
        if not n_guesses:
            best = (1 + WAIT_GAIN) * rate
        elif rate > best:
            n_best, best = n_guesses, rate
        elif n_guesses > n_best + WAIT_LOOK:
            break
        for each, chance in zip(known, following, strict=True):
            if chance:
                each.append(chance)
    return n_best


class _Best(NamedTuple):
    """The tokens of all streams in the cycle of the best choice, and how long it takes."""

    n_tokens: float
    cycle_ns: float


def _offers(chances: Sequence[Sequence[float]], n_max: int) -> list[tuple[float, int, int]]:
    """Return the likeliest guesses, at most n_max, without each frame's last: chance, its place, frame.

    A frame's chances fall, so only its next guess can be the next of all.
    """
    waiting = [(-each[0], 0, -frame) for frame, each in enumerate(chances) if len(each) > 1]
    heapq.heapify(waiting)
    found: list[tuple[float, int, int]] = []
    while waiting and len(found) < n_max:
        less, ahead, frame = waiting[0]
        found.append((-less, ahead, -frame))
        each = chances[-frame]
        if ahead + 2 < len(each):
            heapq.heapreplace(waiting, (-each[ahead + 1], ahead + 1, frame))
        else:
            heapq.heappop(waiting)
    return found


class _Cycle:
    """In which every flight goes round once: this one and all others."""

    def __init__(self, planner: GroupPlanner, n_frames: int, traffic: Traffic) -> None:
        self._planner, self._n_frames, self._traffic = planner, n_frames, traffic
        self._n_others, self._n_streams = traffic.n_flights - 1, n_frames + traffic.n_other_rows
        work_ns, way_ns = self._terms_ns(0, 0)
        self._plain_ns = max(work_ns, way_ns)
        self._room = planner.draft_room(n_frames)
        self._known: list[tuple[float, float]] = []  # by guesses of this flight, with none of others; see _alone

    def best(self, chances: Sequence[Sequence[float]], wait_ns: float) -> _Best:
        """Return the best choice of these guesses, the likeliest first, for a flight that waits so long before."""
        offers, follows = _offers(chances, self._room), sum(each[0] for each in chances if each)
        n_frames, far_ns = self._n_frames, STRETCH_MAX * self._plain_ns if self._n_streams > 1 else math.inf
        n_tokens, follows_min = float(self._n_streams), FOLLOWING_CHANCE_MIN * n_frames
        cycle_ns, work_ns = self._alone(0)
        if follows >= follows_min:
            cycle_ns += (work_ns - cycle_ns) * follows / n_frames
        best_tokens, best_ns = n_tokens, cycle_ns + wait_ns
        for n_drafted, (chance, ahead, frame) in enumerate(offers, start=1):
            follows += chances[frame][ahead + 1] - chance
            n_tokens += chance
            cycle_ns, work_ns = self._alone(n_drafted)
            if follows >= follows_min:
                cycle_ns += (work_ns - cycle_ns) * follows / n_frames
            if cycle_ns <= far_ns and n_tokens * best_ns > best_tokens * (cycle_ns + wait_ns):
                best_tokens, best_ns = n_tokens, cycle_ns + wait_ns
        return _Best(best_tokens, best_ns - wait_ns)

    def _alone(self, n_mine: int) -> tuple[float, float]:
        """Return the cycle with so many guesses of this flight, and what it is if the next flight has left before.

        The latter holds with the chance that this flight's guesses are all right; else both are the same.
        """
        known = self._known
        while len(known) <= n_mine:
            known.append(self._pair_ns(len(known), 0))
        return known[n_mine]

    def rate(self, follows: float, mine: tuple[int, float] = (0, 0.0), others: tuple[int, float] = (0, 0.0)) -> float:
        """Predict the tokens per nanosecond of all streams; mine, others: guesses, and how many of them are right."""
        cycle_ns = self._cycle_ns(follows, mine[0], others[0])
        n_streams = self._n_streams
        if not cycle_ns or (n_streams > 1 and cycle_ns > STRETCH_MAX * self._plain_ns):
            return 0.0
        return (n_streams + mine[1] + others[1]) / cycle_ns

    def _cycle_ns(self, follows: float, n_mine: int, n_others: int) -> float:
        cycle_ns, ahead_ns = self._pair_ns(n_mine, n_others)
        return cycle_ns + (ahead_ns - cycle_ns) * follows if follows >= FOLLOWING_CHANCE_MIN else cycle_ns

    def _pair_ns(self, n_mine: int, n_others: int) -> tuple[float, float]:
        """Return as `_alone`; n_others: guesses of the other flights."""
        work_ns, way_ns = self._terms_ns(n_mine, n_others)
        longer_ns, shorter_ns = max(work_ns, way_ns), min(work_ns, way_ns)
        if not self._n_others:
            return longer_ns, work_ns if self._traffic.n_idle else longer_ns
        if n_mine and longer_ns:
            longer_ns = float(longer_ns * (1 + (shorter_ns / longer_ns) ** UNEVEN) ** (1 / UNEVEN))
        return longer_ns, longer_ns

    def _terms_ns(self, n_mine: int, n_others: int) -> tuple[float, float]:
        planner, rows = self._planner, self._n_frames + n_mine
        work_ns = planner.step_ns(rows)
        if self._n_others:
            n_mean = max(1, round((self._traffic.n_other_rows + n_others) / self._n_others))
            work_ns, rows = work_ns + self._n_others * planner.step_ns(n_mean), max(rows, n_mean)
        return work_ns, planner.way_ns(rows) + planner.round_trip.of(self._n_streams)
