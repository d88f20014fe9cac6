"""The time of a prompt that is read alone. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from relayline.coordinator.schedule.stage_cost import StageCost


def read_time(costs: Sequence[StageCost]) -> Callable[[int], float]:
    """Return a function that predicts the time to prefill a lone prompt from its tokens: by the slowest stage, in whole
    chunks."""

    def read_ns(n_tokens: int) -> float:
        times_ns = []
        for cost in costs:
            n_chunks, n_left = divmod(n_tokens, max(1, cost.rows_max))
            left_ns = cost.prefill_ns(n_left) if n_left else 0.0
            times_ns.append((n_chunks * cost.prefill_ns(cost.rows_max) if n_chunks else 0.0) + left_ns)
        return max(times_ns, default=0.0)

    return read_ns
