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
from collections.abc import Sequence

from relayline.coordinator.schedule.groups import GroupPlanner

DRAFT_GAIN = 0.03  # less than this is noise of the curves, and not worth the energy
SHARED_GAIN = 0.2  # and less than this, where there are other flights, is lost on the way from plain ones to others
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
    offers = sorted(
        ((chance, -ahead, frame) for frame, each in enumerate(chances) for ahead, chance in enumerate(each[:-1])),
        reverse=True,
    )
    counts, n_frames = [0] * len(chances), len(chances)
    # With per-lane cells, lanes with different numbers of rows are computed in parts.
    if not offers or (planner.is_per_lane and n_frames > 1):
        return counts
    cycle = _Cycle(planner, n_frames, traffic)
    n_drafted, n_right, gain = 0, 0.0, SHARED_GAIN if traffic.n_other_rows else DRAFT_GAIN
    follows = sum(each[0] for each in chances if each)  # chances that the flight of guesses behind it is right, summed
    best, chosen = (1 + gain) * cycle.rate(follows / n_frames), list(counts)
    for chance, _, frame in offers[: planner.draft_room(n_frames)]:
        counts[frame] += 1
        follows += chances[frame][counts[frame]] - chance
        n_drafted, n_right = n_drafted + 1, n_right + chance
        alike = others.likely(chance, n_drafted * traffic.n_other_rows // n_frames)
        rate = cycle.rate(follows / n_frames, (n_drafted, n_right), alike)
        if rate > best:
            best, chosen = rate, list(counts)
    return chosen


class _Cycle:
    """In which every flight goes round once: this one and all others."""

    def __init__(self, planner: GroupPlanner, n_frames: int, traffic: Traffic) -> None:
        self._planner, self._n_frames, self._traffic = planner, n_frames, traffic
        self._n_others, self._n_streams = traffic.n_flights - 1, n_frames + traffic.n_other_rows
        work_ns, way_ns = self._terms_ns(0, 0)
        self._plain_ns = max(work_ns, way_ns)

    def rate(self, follows: float, mine: tuple[int, float] = (0, 0.0), others: tuple[int, float] = (0, 0.0)) -> float:
        """Predict the tokens per nanosecond of all streams; mine, others: guesses, and how many of them are right."""
        cycle_ns = self._cycle_ns(follows, mine[0], others[0])
        n_streams = self._n_streams
        if not cycle_ns or (n_streams > 1 and cycle_ns > STRETCH_MAX * self._plain_ns):
            return 0.0
        return (n_streams + mine[1] + others[1]) / cycle_ns

    def _cycle_ns(self, follows: float, n_mine: int, n_others: int) -> float:
        work_ns, way_ns = self._terms_ns(n_mine, n_others)
        longer_ns, shorter_ns = max(work_ns, way_ns), min(work_ns, way_ns)
        if not self._n_others:
            if self._traffic.n_idle and follows >= FOLLOWING_CHANCE_MIN:
                return follows * work_ns + (1 - follows) * longer_ns
            return longer_ns
        if not n_mine or not longer_ns:
            return longer_ns
        return float(longer_ns * (1 + (shorter_ns / longer_ns) ** UNEVEN) ** (1 / UNEVEN))

    def _terms_ns(self, n_mine: int, n_others: int) -> tuple[float, float]:
        planner, rows = self._planner, self._n_frames + n_mine
        work_ns = planner.step_ns(rows)
        if self._n_others:
            n_mean = max(1, round((self._traffic.n_other_rows + n_others) / self._n_others))
            work_ns, rows = work_ns + self._n_others * planner.step_ns(n_mean), max(rows, n_mean)
        return work_ns, planner.way_ns(rows) + planner.round_trip.of(self._n_streams)
