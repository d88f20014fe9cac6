"""The share of time in which stages compute at once, from their own step intervals. Pure."""

from __future__ import annotations

from collections.abc import Sequence

Interval = tuple[int, int]  # start and end in nanoseconds of one common clock


def overlap(stages: Sequence[Sequence[Interval]]) -> dict[str, float]:
    """Return the share of busy time in which exactly k stages compute, by str(k), and "2+" for two or more.

    Busy time is when at least one stage computes, within the window that every stage's intervals cover; idle time
    between requests would only blur the figure. Empty without such a window.
    """
    if not stages or any(not intervals for intervals in stages):
        return {}
    from_ns = max(intervals[0][0] for intervals in stages)
    to_ns = min(intervals[-1][1] for intervals in stages)
    return overlap_between(stages, from_ns, to_ns)


def overlap_between(stages: Sequence[Sequence[Interval]], from_ns: int, to_ns: int) -> dict[str, float]:
    """Return the same for a given window. Intervals are clipped to it, and a stage without intervals was idle.

    Empty when no stage computed in the window.
    """
    edges: list[tuple[int, int]] = []
    for intervals in stages:
        for start_ns, end_ns in intervals:
            start_ns, end_ns = max(start_ns, from_ns), min(end_ns, to_ns)
            if start_ns < end_ns:
                edges += [(start_ns, 1), (end_ns, -1)]
    edges.sort()
    time_ns = [0] * (len(stages) + 1)
    active, since_ns = 0, from_ns
    for at_ns, change in edges:
        time_ns[active] += at_ns - since_ns
        active, since_ns = active + change, at_ns
    busy_ns = sum(time_ns[1:])
    if busy_ns <= 0:
        return {}
    shares = {str(k): time_ns[k] / busy_ns for k in range(1, len(time_ns))}
    return shares | {"2+": sum(time_ns[2:]) / busy_ns}
