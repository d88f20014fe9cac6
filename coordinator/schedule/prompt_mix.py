"""Fits prompt rows in while streams run: into their flights, into flights of prompt rows, or both. Pure.

It takes the most prompt rows per nanosecond that keep a bound on the streams' latency, see `groups`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Protocol

from relayline.coordinator.schedule.cycles import Devices, joined, prompts_ns, turns_of
from relayline.coordinator.schedule.overhead import RoundTrip

BUSY = 0.9  # a stage that works this part of the time has none for another flight
NEAR_BEST = 1.08  # of choices whose rates are this close the one with the shorter latency is taken
# The part of the bound that may be used where flights join to make room: more streams feel any delay that such a step
# did not predict.
MET_PART = 0.92


@dataclasses.dataclass(frozen=True, slots=True)
class PromptMix:
    """One way to mix prefill with decode."""

    n_groups: int
    rows: int
    rate: float  # prompt rows per nanosecond
    latency_ns: float  # of a decode flight, from one round to the next
    flights: int
    chunk: int
    ride: int


class FlightCosts(Protocol):
    """The costs that the search uses; a GroupPlanner provides them."""

    devices: Devices
    rows_max: int
    round_trip: RoundTrip
    chunks: Sequence[int]
    """How many rows a flight of prompt rows alone may have, ascending."""

    def step_ns(self, rows: int) -> float:
        """Predict the busiest stage's step of `rows` decode rows."""

    def way_ns(self, rows: int) -> float:
        """Predict all native steps of a decode flight on its way through idle stages."""

    def mixed_each(self, rows: int, prompt_rows: int) -> tuple[float, ...]:
        """Predict each device's step of decode rows and prompt rows."""

    def rides(self, rows: int) -> list[int]:
        """Return how many prompt rows may join this many decode rows."""

    def groups_max(self, n_streams: int) -> int:
        """Return how many decode flights there may be."""


class MixSearch:
    """The search for one planner."""

    def __init__(self, costs: FlightCosts) -> None:
        self._costs = costs

    def best(
        self, n_streams: int, best: tuple[int, int], pressure: int, token_max_ns: float, *, may_change: bool = True
    ) -> PromptMix | None:
        """Return the most prefill that keeps the bound on the streams' latency; None if none does.

        The decode flights are the best ones without prompts. If they may change, there may be one more, in case these
        leave the busiest stage idle at times. Where a step costs much at any row count, one flight of all streams may
        be best, but prompt rows riding in it would find all stages idle except one. There may also be fewer flights,
        since a wider step may have room where one row costs half of a tile.

        The bound is held for flights that have spread over the stages, which they do as soon as each has gone round
        once. The first ones after a quiet time queue behind each other; those take fewer rows along, see `ride_within`.
        """
        found: list[PromptMix] = []
        for plan in (best, *(self._one_more(n_streams, *best) if may_change else ())):
            found.extend(self._within(plan, pressure, token_max_ns / turns_of(n_streams, *plan)))
        for plan in self._fewer(n_streams, best[0]) if may_change else ():
            found.extend(self._within(plan, pressure, MET_PART * token_max_ns / turns_of(n_streams, *plan)))
        best_rate = max((choice.rate for choice in found), default=0.0)
        good = [choice for choice in found if choice.rate * NEAR_BEST >= best_rate]

        def rank(choice: PromptMix) -> tuple[float, int, int]:
            turns = turns_of(n_streams, choice.n_groups, choice.rows)
            return choice.latency_ns * turns, choice.flights, choice.n_groups

        return min(good, key=rank, default=None)

    def _within(self, groups: tuple[int, int], pressure: int, latency_max_ns: float) -> Iterator[PromptMix]:
        """Yield the choices of riding rows and of prompt flights that keep the bound, with these decode flights."""
        n_groups, rows = groups
        overhead_ns = self._costs.round_trip.of(n_groups * rows)
        for ride in (0, *self._costs.rides(rows)):
            decode = self._costs.mixed_each(rows, ride)
            if max(n_groups * max(decode), sum(decode) + overhead_ns) > latency_max_ns:
                continue  # more rows may take less time, as they do once attention goes in tiles
            if ride:
                cycle_ns = joined(n_groups * max(decode), sum(decode) + overhead_ns)
                yield PromptMix(n_groups, rows, n_groups * ride / cycle_ns, cycle_ns, 0, 1, ride)
            if not ride or pressure > 1:  # both at once fill every gap, and then flights wait for each other
                yield from self._with_flights(groups, decode, ride, latency_max_ns)

    def _one_more(self, n_streams: int, n_groups: int, rows: int) -> Iterator[tuple[int, int]]:
        """Yield one flight more, and its rows, where the busiest stage has time for it.

        Never more at once: flights that split because a prompt came queue behind each other until they have spread.
        """
        way_ns = self._costs.way_ns(rows) + self._costs.round_trip.of(n_streams)
        is_idle = n_groups * self._costs.step_ns(rows) < BUSY * way_ns
        if n_groups < self._costs.groups_max(n_streams) and is_idle:
            yield n_groups + 1, math.ceil(n_streams / (n_groups + 1))

    def _fewer(self, n_streams: int, n_groups: int) -> Iterator[tuple[int, int]]:
        """Yield some smaller numbers of flights that leave each device one, and their rows."""
        n_stages = len(self._costs.devices)
        for fewer in sorted({n_stages, math.ceil(n_groups / 2), math.ceil(n_groups * 3 / 4)}):
            rows = math.ceil(n_streams / fewer)
            if n_stages <= fewer < n_groups and rows <= self._costs.rows_max:
                yield fewer, rows

    def _with_flights(
        self, groups: tuple[int, int], decode: Sequence[float], ride: int, latency_max_ns: float
    ) -> Iterator[PromptMix]:
        """Yield the choices of prompt flights that keep the bound, with decode flights that carry this ride."""
        n_groups, way_ns = groups[0], sum(decode) + self._costs.round_trip.of(groups[0] * groups[1])
        overhead_ns = self._costs.round_trip.of(0)
        for chunk in self._costs.chunks:
            costs = prompts_ns(self._costs.devices, chunk)
            for flights in range(1, len(self._costs.devices) + 1):
                work_ns = max(n_groups * ours + flights * theirs for ours, theirs in zip(decode, costs, strict=True))
                # Flights do not overtake, so decode flights return no more often than the prompt rows among them.
                cycle_ns = max(work_ns, sum(costs) + overhead_ns)
                latency_ns = max(cycle_ns, way_ns + flights * max(costs))
                if latency_ns > latency_max_ns:
                    break
                rate = flights * chunk / cycle_ns + n_groups * ride / max(cycle_ns, way_ns)
                yield PromptMix(*groups, rate, latency_ns, flights, chunk, ride)
