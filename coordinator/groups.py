"""How many groups circulate, and how many rows each step takes: chosen from the stages' cost curves. Pure.

With P stages and N running streams every stream gets one token per *period*. A plan of G groups of r rows has

    period = max( the busiest stage's work on all groups,  one group's way through all stages + overhead )

The first term is what a saturated stage needs, the second what a group needs when nothing is in its way. One group is
lock-step: one stage works, the others wait. Too many groups pay the cost of small steps. Where the best lies depends
on the staircase of each stage, so candidates are simply evaluated.

Prefill travels as flights of its own beside the decode groups: sized so that running streams' inter-token latency
stays within `ITL_STRETCH` of what it is without them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from wire.curve import CostCurve

GROUPS_MAX_PER_STAGE = 4  # candidates: more groups than this per stage only add small steps
ITL_STRETCH = 1.7  # predicted worst inter-token latency beside prefill, against none
CHUNK_LADDER = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
FALLBACK_CHUNK_ROWS = 64  # while nothing has been measured
EQUAL_ENOUGH = 0.985  # a plan with more groups must be predicted to be this much better


@dataclasses.dataclass(frozen=True, slots=True)
class StageCost:
    """One stage as the planner sees it."""

    decode: CostCurve  # every row wants what the stage computes for decode
    prefill: CostCurve  # rows of a prompt: the last stage computes no head for them
    rows_max: int  # rows of one native step


@dataclasses.dataclass(frozen=True, slots=True)
class GroupPlan:
    """What may be in flight at once."""

    n_groups: int  # decode flights
    group_rows: int  # streams of the largest decode flight
    period_ns: float  # predicted time per token of every stream, without prefill; 0 when nothing is known
    prefill_flights: int
    chunk_rows: int  # rows of one prefill flight


class GroupPlanner:
    """Plans from curves; results are cached until the curves or the overhead move."""

    def __init__(self, stages: Sequence[StageCost]) -> None:
        self.stages = tuple(stages)
        self.overhead_ns = 0.0  # of one round trip beyond the native steps: links, host work
        self._cache: dict[tuple[int, bool], GroupPlan] = {}

    @property
    def rows_max(self) -> int:
        """Rows that every stage takes in one step."""
        return min((stage.rows_max for stage in self.stages), default=1)

    def update(self, stages: Sequence[StageCost]) -> None:
        """Take refreshed curves."""
        self.stages = tuple(stages)
        self.forget()

    def forget(self) -> None:
        """Plan anew: curves or overhead have changed."""
        self._cache.clear()

    def plan(self, n_streams: int, *, has_prefill: bool) -> GroupPlan:
        """Return the plan for this many running streams, with or without prompts waiting beside them."""
        key = (n_streams, has_prefill)
        if key not in self._cache:
            if len(self._cache) > 4_096:
                self._cache.clear()
            self._cache[key] = self._plan(n_streams, has_prefill)
        return self._cache[key]

    def _plan(self, n_streams: int, has_prefill: bool) -> GroupPlan:
        n_stages = len(self.stages)
        if not all(stage.decode.is_known and stage.prefill.is_known for stage in self.stages):
            n_groups = max(1, min(n_stages, n_streams))
            rows = min(self.rows_max, math.ceil(n_streams / n_groups))
            return GroupPlan(n_groups, max(1, rows), 0.0, n_stages, min(FALLBACK_CHUNK_ROWS, self.rows_max))
        n_groups, period_ns = self._best_groups(n_streams) if n_streams else (1, 0.0)
        rows = math.ceil(n_streams / n_groups) if n_streams else 1
        flights, chunk = 1, 1
        if has_prefill:
            flights, chunk = self._beside(n_groups, rows, period_ns) if n_streams else (2 * n_stages, self._train())
        return GroupPlan(n_groups, rows, period_ns, flights, chunk)

    def _best_groups(self, n_streams: int) -> tuple[int, float]:
        fewest = math.ceil(n_streams / self.rows_max)
        most = max(fewest, min(n_streams, GROUPS_MAX_PER_STAGE * len(self.stages)))
        best = (fewest, self.period_ns(n_streams, fewest))
        for n_groups in range(fewest + 1, most + 1):
            period_ns = self.period_ns(n_streams, n_groups)
            if period_ns < EQUAL_ENOUGH * best[1]:
                best = (n_groups, period_ns)
        return best

    def period_ns(self, n_streams: int, n_groups: int) -> float:
        """Predict the time per token of every stream when n_streams circulate in n_groups even groups."""
        small, n_larger = divmod(n_streams, n_groups)
        large = small + 1 if n_larger else small
        work_ns = way_ns = 0.0
        for stage in self.stages:
            large_ns = stage.decode.padded_cost_ns(large, stage.rows_max)
            small_ns = stage.decode.padded_cost_ns(small, stage.rows_max)
            work_ns = max(work_ns, n_larger * large_ns + (n_groups - n_larger) * small_ns)
            way_ns += max(large_ns, small_ns)
        return max(work_ns, way_ns + self.overhead_ns)

    def _beside(self, n_groups: int, rows: int, period_ns: float) -> tuple[int, int]:
        """Return (flights, rows) of the most prefill beside decode that keeps the latency bound."""
        way_ns = sum(stage.decode.padded_cost_ns(rows, stage.rows_max) for stage in self.stages) + self.overhead_ns
        best, best_rate = (1, 1), 0.0
        for flights in range(1, len(self.stages) + 1):
            for chunk in CHUNK_LADDER:
                if chunk > self.rows_max:
                    break
                costs = [stage.prefill.cost_ns(chunk) for stage in self.stages]
                work_ns = max(
                    n_groups * stage.decode.padded_cost_ns(rows, stage.rows_max) + flights * cost_ns
                    for stage, cost_ns in zip(self.stages, costs, strict=True)
                )
                latency_ns = max(work_ns, way_ns + flights * max(costs))
                if latency_ns > ITL_STRETCH * period_ns:
                    continue
                rate = flights * chunk / max(work_ns, sum(costs) + self.overhead_ns)
                if rate > best_rate:
                    best, best_rate = (flights, chunk), rate
        return best

    def _train(self) -> int:
        """Return the chunk that brings a prompt of typical length through idle stages soonest."""
        typical_rows, n_stages = 512, len(self.stages)

        def time_ns(chunk: int) -> float:
            slowest = max(stage.prefill.cost_ns(chunk) for stage in self.stages)
            return (math.ceil(typical_rows / chunk) + n_stages - 1) * (slowest + self.overhead_ns / (n_stages + 1))

        return min((chunk for chunk in CHUNK_LADDER if chunk <= self.rows_max), key=time_ns)
