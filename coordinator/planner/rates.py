"""The rate of a plan: what a split makes with the groups that the running coordinator would choose. Pure.

Every figure that people see is from here: the plan's table, its advice, one more machine, and other cuts. The search
compares splits by the best grouping instead, which the coordinator may not choose: it plans from the curves alone.
"""

from __future__ import annotations

from relayline.coordinator.planner.costs import COORDINATOR_FLIGHT_NS, COORDINATOR_TOKEN_NS, Costs, Cycle, Edges
from relayline.coordinator.planner.instance import Instance
from relayline.coordinator.schedule.groups import GroupPlanner
from relayline.coordinator.schedule.overhead import RoundTrip


class SplitRates:
    """One split with any number of streams."""

    def __init__(self, costs: Costs, edges: Edges) -> None:
        self._costs, self._edges = costs, edges
        links = costs.instance.links
        self.link_bytes = costs.instance.link_bytes(1, edges)
        """Of one row in its own message: coordinator to stage 0, between neighbours, last stage to coordinator."""
        self.overhead_ns = COORDINATOR_FLIGHT_NS + COORDINATOR_TOKEN_NS
        """Links and coordinator in one round trip of one row."""
        self.overhead_ns += sum(link.one_way_ns(size) for link, size in zip(links, self.link_bytes, strict=True))
        self.planner = GroupPlanner([costs.stage_cost(stage, *edge) for stage, edge in enumerate(edges)])
        """Chooses the groups, as the coordinator's does."""
        self.planner.round_trip = RoundTrip(float(self.overhead_ns))

    def grouping(self, n_streams: int) -> tuple[int, int]:
        """Return the flights, and the rows of one, that the coordinator would choose."""
        plan = self.planner.plan(n_streams, n_prompts=0)
        return plan.n_groups, plan.group_rows

    def cycle(self, n_streams: int) -> Cycle:
        """Return the cycle of these flights."""
        return Cycle(self._costs, n_streams, self.grouping(n_streams))

    def rate(self, n_streams: int) -> float:
        """Return the tokens per nanosecond with so many streams."""
        return self.cycle(n_streams).of_split(self._edges)


def rate_of(instance: Instance, edges: Edges) -> float:
    """Return the tokens per nanosecond of a split with all the streams that it is planned for."""
    return SplitRates(Costs(instance), edges).rate(instance.load.streams)
