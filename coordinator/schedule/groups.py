"""Chooses the number of groups under way, and the rows of each step, from the stages' cost curves. Pure.

With P stages, N running streams and G flights of r rows, one *cycle* in which every flight goes round once takes

    cycle = max( the busiest stage's work on all flights,  one flight's way through all stages + overhead )

and yields min(N, G r) tokens. The first term is the time of a saturated stage, the second the time of a flight that
meets no queue. One flight is lock-step: one stage computes while the others wait. Too many flights pay for many small
steps. If G r is less than N, the flights are full and the streams take turns in them. On a staircase of costs this can
beat both an expensive row count and one more, poorly filled flight. If G r is more than N, the last flight is smaller,
or all are: a plan must be good either way. The optimum depends on the staircase of each stage, so candidates are simply
evaluated.

Stages that share a device take turns on it, so they count as one whose steps take as long as theirs together. Where one
device is all that there is for several stages, there is one decode flight: a second one would only wait. The same holds
for a single stage that computes the next rows of its streams before they are asked for (`stage.steps.run_ahead`). It
hides the round trip already, and rows of a second flight would take the place of those.

When both terms are nearly equal, any delay shows in the cycle. So nearness has a cost too, see cycles.SHARPNESS.

Prompt rows travel in one of two ways, whichever makes more progress. They *ride* in decode flights, where a step with
room in its tile or a high fixed cost takes them at little extra cost. Or they form separate flights. Both are sized so
that the inter-token latency of running streams stays within `itl_stretch` of its value without prompts. When more
streams wait for their first token than run, this bound grows in proportion, because a second of delay counts the same
for both. While prompts wait, there may be one decode flight more than would be best without them. There may also be
fewer, if that leaves more room for prompt rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from relayline.coordinator.schedule.cycles import (
    by_device,
    cost_of_each,
    flights_of,
    joined,
    prompts_ns,
    train_ns,
    turns_of,
)
from relayline.coordinator.schedule.overhead import RoundTrip
from relayline.coordinator.schedule.prompt_mix import MixSearch
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.coordinator.schedule.tiles import TileRule, has_time_for_tiles
from relayline.wire.common.bounds import DRAFTED_ROWS_MAX

GROUPS_MAX_PER_STAGE = 4  # candidates: more groups than this per stage only add small steps
ITL_STRETCH = 2.0  # inter-token latency of running streams with prefill over without, unless set by --itl-stretch
PREDICTED_PART = 0.92  # of that bound is what plans may predict; the rest is reserve for prediction errors
PRESSURE_MAX = 64  # prompts per running stream beyond which more of them change nothing
FALLBACK_CHUNK_ROWS = 64  # while nothing has been measured
TRAIN_ROWS = 512  # prompt rows that a train is made for if their number is unknown
TRAIN_ROWS_MAX = 4_096  # beyond that the best chunk hardly changes
NEAR_TRAIN = 1.1  # of such trains that of the largest chunk is taken
EQUAL = 1.02  # plans whose predicted rates are this close count as equally fast
# A single flight that leaves streams out must be predicted to be this many times as fast as one of all streams: streams
# left out wait for a whole extra step, and curves are not exact.
LEFT_OUT_GAIN = 1.1
ROWS_ONE_BY_ONE = 32  # candidates: every row count up to here, whole tiles beyond
CACHE_MAX = 4_096  # plans kept
CONTEXT_STEPS = 8  # distinguished context lengths between two powers of two
CONTEXT_STEP_MIN = 32  # tokens; below it, a step of context would cause needless planning
VIEWS_MAX = 64  # pairs of contexts for which a planner is kept


@dataclasses.dataclass(frozen=True, slots=True)
class GroupPlan:
    """The flights that may be under way at once."""

    n_groups: int  # decode flights
    group_rows: int  # streams of the largest decode flight
    period_ns: float  # predicted time per token of every stream, without prefill; 0 when nothing is known
    prefill_flights: int  # flights of prompt rows alone
    chunk_rows: int  # rows of one of them
    ride_rows: int = 0  # prompt rows that a full decode flight takes along; a smaller one takes more in shared cells
    latency_max_ns: float = 0.0  # of a decode flight with riding rows, its waits for others included; 0 unbounded
    hold_max_ns: float = 0.0
    """The longest time for which a row may be held until a flight lands: the predicted time per token of its stream,
    prompts in the same step included. Sent at once, it would have its token by then. 0.0: no curve is known.
    """


class GroupPlanner:
    """Plans from curves; results are cached until the curves or the overhead move."""

    def __init__(self, stages: Sequence[StageCost], itl_stretch: float = ITL_STRETCH) -> None:
        self.itl_stretch = itl_stretch
        self._know(stages)
        self.round_trip = RoundTrip()
        """What it takes beyond the steps, see coordinator.schedule.overhead."""
        self._cache: dict[tuple[int, int, tuple[int, int], tuple[int, int] | None], GroupPlan] = {}
        self._costs_ns: dict[int, tuple[float, ...]] = {}  # rows -> each stage's decode step
        self._views: dict[tuple[int, int], GroupPlanner] = {}  # by context of decode rows and of prompt rows

    def _know(self, stages: Sequence[StageCost]) -> None:
        """Take the stages, and what of them is asked for at every token."""
        stages = self.stages = tuple(stages)
        self.devices = by_device(stages)
        self.rows_max = min((stage.rows_max for stage in stages), default=1)
        """Rows that every stage takes in one step."""
        self.is_per_lane = any(stage.is_per_lane for stage in stages)
        """Whether any stage computes rows of neighbouring lanes alone at once."""
        self.shares_longest = any(stage.shares_longest for stage in stages)
        """Whether the context of a flight's decode rows is that of the longest of them."""
        self.shares_host = any(stage.shares_host for stage in stages)
        """Whether stages compute on one host."""
        has_time = has_time_for_tiles((stage.prefill for stage in stages), self.rows_max)
        tiled = [stage for stage in stages if stage.may_tile]
        has_tiles = self.is_per_lane or bool(tiled)
        is_avoided = has_tiles and not self.is_per_lane and all(stage.takes_lanes_apart for stage in tiled)
        self.tile_rule = TileRule(has_tiles, self.is_per_lane, has_tiles and has_time and not is_avoided, is_avoided)
        """Which rows may be in one step. Lanes have cells of their own on processors alone, which may go by tiles."""
        self.chunks: Sequence[int] = self.tile_rule.steps_tried(min(self.rows_max, self.tile_rule.prompt_rows_max(0)))
        """How many rows a flight of prompt rows alone may have, ascending."""
        self._has_context = any(stage.context_ns for stage in stages)
        self._runs_ahead = len(stages) == 1 and stages[0].runs_ahead
        self._is_one_flight = len(self.devices) == 1 and (len(stages) > 1 or self._runs_ahead)

    @property
    def is_known(self) -> bool:
        """Whether there are stages and every one has measured both of its curves."""
        return bool(self.stages) and all(s.decode.is_known and s.prefill.is_known for s in self.stages)

    def update(self, stages: Sequence[StageCost]) -> None:
        """Take refreshed curves."""
        self._know(stages)
        self._costs_ns.clear()
        self.forget()

    def forget(self) -> None:
        """Plan again: curves or overhead have changed."""
        self._cache.clear()
        self._views.clear()

    def at(self, decode_tokens: float, prompt_tokens: float) -> GroupPlanner:
        """Return the planner for rows of such contexts: of decode rows (as in StageCost), and of the next prompt rows.

        It is good until the next `update` or `forget`.
        """
        if not self._has_context:
            return self
        key = (_context_step(decode_tokens), _context_step(prompt_tokens))
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= VIEWS_MAX:
                self._views.clear()
            stages = [dataclasses.replace(s, decode_tokens=key[0], prompt_tokens=key[1]) for s in self.stages]
            view = self._views[key] = GroupPlanner(stages, self.itl_stretch)
            view.round_trip = self.round_trip
        return view

    def plan(
        self,
        n_streams: int,
        *,
        n_prompts: int,
        n_prompt_rows: int = TRAIN_ROWS,
        pressure_min: int = 0,
        by_hand: tuple[int, int] | None = None,
    ) -> GroupPlan:
        """Return the plan for this many running streams and this many waiting prompts.

        n_prompt_rows: of these prompts together. While no stream runs, both numbers set the size of chunks: fewer rows
        need smaller ones to keep all stages at work, and of many prompts most should be read soon. Both are taken in
        powers of two. pressure_min: at least this many prompts per running stream are assumed. by_hand: decode flights,
        and rows of the largest, chosen by a setting; only prompt rows are planned around them.
        """
        if n_streams:
            train = 0, 0
            pressure = max(pressure_of(n_streams, n_prompts), pressure_min) if n_prompts else pressure_min
        else:
            train, pressure = (min(TRAIN_ROWS_MAX, _power_of_two(n_prompt_rows)), _power_of_two(n_prompts)), 0
        key = (n_streams, pressure, train, by_hand)
        plan = self._cache.get(key)
        if plan is None:
            if len(self._cache) >= CACHE_MAX:
                self._cache.clear()
            plan = self._cache[key] = self._plan(*key)
        return plan

    def step_ns(self, rows: int) -> float:
        """Predict the busiest stage's step of `rows` decode rows."""
        return max(self._costs(rows), default=0.0)

    def way_ns(self, rows: int) -> float:
        """Predict all native steps of a decode flight on its way through idle stages."""
        return sum(self._costs(rows))

    def chunk_ns(self, rows: int) -> float:
        """Predict the busiest stage's step of `rows` prefill rows."""
        return max(prompts_ns(self.devices, rows), default=0.0)

    def mixed_ns(self, rows: int, prompt_rows: int) -> float:
        """Predict the busiest stage's step of decode rows and prompt rows."""
        return max(self.mixed_each(rows, prompt_rows), default=0.0)

    def ride_within(self, rows: int, ride_rows: int, way_max_ns: float, n_streams: int) -> int:
        """Return how many of `ride_rows` may ride with `rows` decode rows, so that their way takes at most so long.

        n_streams: how many run.
        """
        step_max_ns = way_max_ns - self.round_trip.of(n_streams)
        if not ride_rows or sum(self.mixed_each(rows, ride_rows)) <= step_max_ns:
            return ride_rows
        smaller = (ride for ride in self.rides(rows) if ride < ride_rows)
        fitting = (ride for ride in smaller if sum(self.mixed_each(rows, ride)) <= step_max_ns)
        return max(fitting, default=0)

    def rides(self, rows: int) -> list[int]:
        """Return how many prompt rows may join this many decode rows: the numbers that fill tiles, ascending."""
        n_decode = 0 if self.is_per_lane else rows
        most = min(self.rows_max - rows, self.tile_rule.prompt_rows_max(rows))
        return [total - n_decode for total in self.tile_rule.steps_tried(n_decode + most) if total > n_decode]

    def draft_room(self, n_streams: int) -> int:
        """Return how many guesses may follow one row of each of n_streams."""
        return max(0, min(DRAFTED_ROWS_MAX, self.rows_max - n_streams, self.tile_rule.draft_room(n_streams)))

    def rate(self, n_streams: int, n_groups: int, rows: int) -> float:
        """Predict the tokens per nanosecond of n_groups flights of at most `rows` rows among n_streams streams."""
        return min(n_streams, n_groups * rows) / self._cycle_ns(n_streams, n_groups, rows)

    def saturating(self, rows: int, n_streams: int) -> int:
        """Return how many flights of this many rows keep the stages busy while n_streams run; 0: nothing is known."""
        step_ns = self.step_ns(rows)
        return round((self.way_ns(rows) + self.round_trip.of(n_streams)) / step_ns) if step_ns else 0

    def _costs(self, rows: int) -> tuple[float, ...]:
        costs = self._costs_ns.get(rows)
        if costs is None:
            costs = cost_of_each(self.devices, lambda stage: stage.decode_ns(rows))
            self._costs_ns[rows] = costs
        return costs

    def mixed_each(self, rows: int, prompt_rows: int) -> tuple[float, ...]:
        """Predict each device's step of decode rows and prompt rows."""
        if not prompt_rows:
            return self._costs(rows)
        return cost_of_each(self.devices, lambda stage: stage.mixed_ns(rows, prompt_rows))

    def _cycle_ns(self, n_streams: int, n_groups: int, rows: int) -> float:
        """Predict a cycle. Flights that have room for all streams may divide them in any way, and stay as they are."""
        even = math.ceil(n_streams / n_groups)
        cycle_ns = self._divided_ns(n_streams, n_groups, rows)
        return max(cycle_ns, self._divided_ns(n_streams, n_groups, even)) if even < rows else cycle_ns

    def _divided_ns(self, n_streams: int, n_groups: int, rows: int) -> float:
        """Predict a cycle of flights of `rows` rows, the last of which has the rest."""
        n_full, rest = flights_of(n_streams, n_groups, rows)
        largest = self._costs(rows if n_full else rest)
        if rest:
            work_ns = max(n_full * full + left for full, left in zip(largest, self._costs(rest), strict=True))
        else:
            work_ns = n_full * max(largest)
        if not n_full:
            work_ns = max(largest)
        return joined(work_ns, sum(largest) + self.round_trip.of(n_streams))

    def _plan(
        self, n_streams: int, pressure: int, train: tuple[int, int], by_hand: tuple[int, int] | None = None
    ) -> GroupPlan:
        n_stages = len(self.devices)
        if not self.is_known:
            n_groups = max(1, min(n_stages, n_streams))
            rows = min(self.rows_max, math.ceil(n_streams / n_groups))
            return GroupPlan(n_groups, max(1, rows), 0.0, max(1, n_stages), min(FALLBACK_CHUNK_ROWS, self.rows_max))
        n_groups, rows = (by_hand or self._best_groups(n_streams)) if n_streams else (1, 1)
        period_ns = n_streams / self.rate(n_streams, n_groups, rows) if n_streams else 0.0
        if pressure and n_streams:
            quiet_ns, turns = self._cycle_ns(n_streams, n_groups, rows), turns_of(n_streams, n_groups, rows)
            token_max_ns = pressure * PREDICTED_PART * self.itl_stretch * quiet_ns * turns
            search, may_change = MixSearch(self), by_hand is None
            choice = search.best(n_streams, (n_groups, rows), pressure, token_max_ns, may_change=may_change)
            if choice is None:
                return GroupPlan(n_groups, rows, period_ns, 1, 1, 0, token_max_ns / turns, token_max_ns)
            prompt_plan = choice.flights, choice.chunk, choice.ride
            turns = turns_of(n_streams, choice.n_groups, choice.rows)
            hold_max_ns = max(period_ns, choice.latency_ns * turns)
            return GroupPlan(choice.n_groups, choice.rows, period_ns, *prompt_plan, token_max_ns / turns, hold_max_ns)
        chunk = self._train(*train) if train[0] else self._train(TRAIN_ROWS, 1)
        return GroupPlan(n_groups, rows, period_ns, 2 * n_stages, chunk, hold_max_ns=period_ns)

    def _best_groups(self, n_streams: int) -> tuple[int, int]:
        """Return flights and rows of the fastest plan.

        Of equally fast ones, that with about one flight per device: it keeps all of them at work, at no more steps than
        that takes. Of these one that has all streams in its flights, and then the one with the most even flights. A
        stage that runs ahead computes the next rows of all streams together, whatever flights they are asked for in.
        """
        if self._runs_ahead and n_streams <= self.rows_max:
            return 1, n_streams
        rates = {key: self.rate(n_streams, *key) for key in self._candidates(n_streams)}
        least = LEFT_OUT_GAIN * rates.get((1, n_streams), 0.0)
        rates = {key: rate for key, rate in rates.items() if key[0] > 1 or key[1] == n_streams or rate >= least}
        best = max(rates.values())
        good = (key for key, rate in rates.items() if rate * EQUAL >= best)
        n_devices = len(self.devices)
        return min(good, key=lambda key: (abs(key[0] - n_devices), key[0] * key[1] < n_streams, key[1], -rates[key]))

    def _candidates(self, n_streams: int) -> Iterator[tuple[int, int]]:
        rows_max, groups_max = min(n_streams, self.rows_max), self.groups_max(n_streams)
        sizes = {*range(1, min(rows_max, ROWS_ONE_BY_ONE) + 1), *range(ROWS_ONE_BY_ONE, rows_max, 16), rows_max}
        sizes |= {math.ceil(n_streams / n_groups) for n_groups in range(1, groups_max + 1)}
        for rows in sizes:
            if rows > rows_max:
                continue
            slowest_ns = self.step_ns(rows)
            saturating = math.ceil((self.way_ns(rows) + self.round_trip.of(n_streams)) / slowest_ns)
            all_full, all_in = n_streams // rows, math.ceil(n_streams / rows)
            for n_groups in {saturating - 1, saturating, saturating + 1, all_full, all_in}:
                if 1 <= n_groups <= min(all_in, groups_max):
                    yield n_groups, rows

    def groups_max(self, n_streams: int) -> int:
        """Return how many decode flights n_streams allow."""
        few = 1 if self._is_one_flight else min(n_streams, GROUPS_MAX_PER_STAGE * len(self.devices))
        return max(math.ceil(n_streams / self.rows_max), few)

    def _train(self, n_rows: int, n_prompts: int) -> int:
        """Return the chunk with which n_rows of prompts pass idle stages soonest on average, at their average context.

        A chunk lands as a whole, and so do the prompts that end in it.
        """
        n_stages = len(self.stages)

        def time_ns(chunk: int) -> float:
            n_chunks = math.ceil(n_rows / chunk)
            ways_ns = (n_chunks + n_stages - 1) * self.round_trip.of(0) / (n_stages + 1)
            all_ns = train_ns(prompts_ns(self.devices, chunk), n_chunks) + ways_ns
            return all_ns * (n_rows + max(min(chunk, n_rows), n_rows / n_prompts)) / (2 * n_rows)

        best = min(self.chunks, key=time_ns)
        if not self.tile_rule.is_avoided:
            return best
        # Where steps stay small, their number weighs: each costs some more than its curve says.
        return max(chunk for chunk in self.chunks if time_ns(chunk) <= NEAR_TRAIN * time_ns(best))


def _power_of_two(number: int) -> int:
    """Return the least power of two that is not smaller."""
    return 1 << max(0, number - 1).bit_length()


def _context_step(tokens: float) -> int:
    """Return the nearest of the distinguished context lengths."""
    if not tokens:
        return 0
    step = max(CONTEXT_STEP_MIN, (1 << int(tokens).bit_length()) // (2 * CONTEXT_STEPS))
    return step * round(tokens / step)


def pressure_of(n_streams: int, n_prompts: int) -> int:
    """Return how many prompts wait per running stream, at least 1 if any does."""
    return min(PRESSURE_MAX, math.ceil(n_prompts / n_streams)) if n_streams else min(1, n_prompts)
