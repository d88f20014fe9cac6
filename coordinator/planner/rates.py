"""The rate of a pipeline, with the groups that its coordinator would choose. Pure.

Every figure that people see is from `Rates`: the plan's table, its advice, one more machine, other cuts, the page, and
the gain of an imbalance. The search for a cut ends with it too.

A coordinator plans its groups from curves and from the overhead of a round trip. These show delays, but not how busy
links and cores are. A plan knows that from the manifest, and would sometimes find other groups better. They would not
run, though, so a plan takes the coordinator's. The reverse, a coordinator that follows the plan, would trade
measurements for estimates. And of groupings within 2 % of each other the coordinator takes the one with about one
flight per device on purpose, since curves are not as exact as that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from relayline.coordinator.planner.costs import (
    COORDINATOR_FLIGHT_NS,
    COORDINATOR_TOKEN_NS,
    CROWD_SHARPNESS,
    Around,
    Costs,
    Edges,
    Flights,
    Grouping,
    candidates,
    coordinator_ns,
)
from relayline.coordinator.planner.instance import Instance
from relayline.coordinator.schedule.cycles import flights_of, joined
from relayline.coordinator.schedule.groups import GroupPlanner
from relayline.coordinator.schedule.one_flight import CLEARLY, may_be_better
from relayline.coordinator.schedule.overhead import RoundTrip, has_moved
from relayline.coordinator.schedule.stage_cost import StageCost

SETTLES_MAX = 3  # times that groups are planned again, because their flights have another overhead


class Surroundings(Protocol):
    """What is around the stages of a pipeline, and takes time too."""

    def overhead_ns(self, n_streams: int, rows: int) -> float:
        """Return the time of a flight's round trip beyond its steps: `rows` of n_streams streams are in it."""

    def busy_ns(self, flights: Flights, works_ns: Sequence[float], busiest_ns: float) -> float:
        """Return how long the busiest part works in a cycle: at least busiest_ns, the busiest device's work.

        `works_ns`: of each stage.
        """


class Measured:
    """A running pipeline's surroundings: the overhead that its coordinator has measured, and the coordinator's work."""

    def __init__(self, round_trips: Sequence[RoundTrip]) -> None:
        """`round_trips`: the overhead with several numbers of streams; none or zero: nothing has been measured yet."""
        self._known = [each for each in round_trips if each.ns]

    def overhead_ns(self, n_streams: int, rows: int) -> float:
        """Return what was measured with about so many streams; before that, the coordinator's own time."""
        if not self._known:
            return COORDINATOR_FLIGHT_NS + COORDINATOR_TOKEN_NS
        nearest = min(self._known, key=lambda each: abs(math.log(max(1.0, each.streams) / n_streams)))
        return nearest.of(n_streams)

    def busy_ns(self, flights: Flights, works_ns: Sequence[float], busiest_ns: float) -> float:
        """Return the work of the busiest device, or the coordinator's."""
        return max(busiest_ns, coordinator_ns(flights))


class Planned:
    """The surroundings of a plan: its links, its coordinator, and the cores that stages share."""

    def __init__(self, instance: Instance, edges: Edges) -> None:
        self._instance, self._edges = instance, edges
        self._crowded = instance.crowded_machines

    def around(self, flights: Flights) -> Around:
        """Return how busy links and coordinator are with these flights."""
        return Around(self._instance, flights, self._edges)

    def overhead_ns(self, n_streams: int, rows: int) -> float:
        """Return the time on links and in the coordinator."""
        return self.around((1, rows, 0)).ways_ns

    def busy_ns(self, flights: Flights, works_ns: Sequence[float], busiest_ns: float) -> float:
        """Return the longest of all that works at the same time."""
        around = self.around(flights)
        crowd_ns = max(around.crowds_ns(works_ns, self._crowded).values(), default=0)
        return joined(max(busiest_ns, around.least_ns), crowd_ns, CROWD_SHARPNESS)


class Rates:
    """The rates of some stages with any number of streams."""

    def __init__(self, stages: Sequence[StageCost], surroundings: Surroundings) -> None:
        self.stages, self._around = tuple(stages), surroundings
        self._planner = GroupPlanner(stages)
        self._found: dict[int, Grouping] = {}

    def planner(self, n_streams: int, rows: int = 1) -> GroupPlanner:
        """Return the coordinator's planner where a flight of so many rows has shown it the overhead."""
        self._planner.round_trip = RoundTrip(self._around.overhead_ns(n_streams, rows))
        self._planner.forget()
        return self._planner

    def grouping(self, n_streams: int) -> Grouping:
        """Return the flights, and the rows of one, that the coordinator would choose."""
        found = self._found.get(n_streams)
        if found is None:
            found = self._found[n_streams] = self._grouping(n_streams)
        return found

    def rate(self, n_streams: int) -> float:
        """Return the tokens per nanosecond with so many streams; 0.0 while curves are not known."""
        return self._rate_of(n_streams, *self.grouping(n_streams)) if self._planner.is_known else 0.0

    def reachable(self, n_streams: int) -> float:
        """Return the tokens per nanosecond with the best grouping, which the coordinator may not choose."""
        keys = {self.grouping(n_streams), *candidates(n_streams, len(self.stages), self._planner.rows_max)}
        return max(self._rate_of(n_streams, *key) for key in keys)

    def _grouping(self, n_streams: int) -> Grouping:
        rows = 1
        for _ in range(SETTLES_MAX):
            known_ns = self._around.overhead_ns(n_streams, rows)
            plan = self.planner(n_streams, rows).plan(n_streams, n_prompts=0)
            rows = plan.group_rows
            if not has_moved(known_ns, self._around.overhead_ns(n_streams, rows)):
                break
        chosen = plan.n_groups, plan.group_rows
        # Stages of one host: the coordinator tries a single flight, and keeps it if it is faster.
        is_tried = may_be_better(self._planner, n_streams)
        if is_tried and self._rate_of(n_streams, 1, n_streams) > CLEARLY * self._rate_of(n_streams, *chosen):
            return 1, n_streams
        return chosen

    def _rate_of(self, n_streams: int, n_groups: int, rows: int) -> float:
        """As in GroupPlanner: flights with room to spare may divide streams in any way, and the slower one counts."""
        even = min(rows, math.ceil(n_streams / n_groups))
        cycle_ns = max(self._divided_ns(n_streams, n_groups, each) for each in {rows, even})
        return min(n_streams, n_groups * rows) / cycle_ns

    def _divided_ns(self, n_streams: int, n_groups: int, rows: int) -> float:
        """Return a cycle of flights of `rows` rows, the last of which has the rest."""
        n_full, rest = flights_of(n_streams, n_groups, rows)
        largest = rows if n_full else rest
        steps_ns = [stage.decode_ns(largest) for stage in self.stages]
        rests_ns = [stage.decode_ns(rest) for stage in self.stages] if rest else [0.0] * len(self.stages)
        works_ns = [n_full * full + left for full, left in zip(steps_ns, rests_ns, strict=True)]
        devices_ns: dict[int, float] = {}
        for at, (stage, work_ns) in enumerate(zip(self.stages, works_ns, strict=True)):
            device = stage.device if stage.device >= 0 else -1 - at
            devices_ns[device] = devices_ns.get(device, 0.0) + work_ns
        work_ns = self._around.busy_ns((n_full, rows, rest), works_ns, max(devices_ns.values()))
        # A stage that runs ahead computes the next rows while the round trip lasts.
        way_ns = 0.0 if len(self.stages) == 1 and self.stages[0].runs_ahead else sum(steps_ns)
        return joined(work_ns, way_ns + self._around.overhead_ns(n_streams, largest))


def split_rates(costs: Costs, edges: Edges) -> Rates:
    """Return the rates of a split."""
    stages = [costs.stage_cost(stage, *edge) for stage, edge in enumerate(edges)]
    return Rates(stages, Planned(costs.instance, edges))


def rate_of(instance: Instance, edges: Edges) -> float:
    """Return the tokens per nanosecond of a split with all the streams that it is planned for."""
    return split_rates(Costs(instance), edges).rate(instance.load.streams)
