"""The rate of a split with its best grouping, by trying them all: the reference for what a plan may claim."""

from __future__ import annotations

from relayline.coordinator.planner.costs import Costs, Cycle, Edges, candidates


def best_rate(costs: Costs, edges: Edges, n_streams: int) -> float:
    """Return the tokens per nanosecond that a split reaches with the best grouping."""
    instance = costs.instance
    keys = candidates(n_streams, len(instance.hosts), instance.load.max_rows)
    return max(Cycle(costs, n_streams, key).of_split(edges) for key in keys)
