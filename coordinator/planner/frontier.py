"""Exact search over contiguous partitions: all cuts, except those that another cut beats in every respect. Pure.

A *label* is a tuple of numbers that sums up a partial split, stages 0..k over layers 0..e. Smaller numbers never make a
continuation worse. Of two labels at the same (k, e), the one that is nowhere smaller is dropped. The remaining labels
include the best split for every objective that never falls when a number grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

COMPARISONS_PER_LABEL = 16  # making a label takes about as long as this many comparisons
Label = tuple[float, ...]
Trail = tuple[int, "Trail"] | tuple[()]  # last end, and the trail before it


class TooLargeError(Exception):
    """An exact search would take too long. Never leaves the planner."""


class Effort:
    """Counts label comparisons, so that a search of hopeless size ends, and on every machine at the same place."""

    def __init__(self, comparisons_max: int) -> None:
        self.left = comparisons_max

    def spend(self, n_comparisons: int) -> None:
        """Raise TooLargeError when there is nothing left."""
        self.left -= n_comparisons
        if self.left < 0:
            raise TooLargeError


def frontier(
    n_stages: int,
    n_layers: int,
    first: Label,
    ends: Callable[[int, int], Iterable[int]],
    extend: Callable[[Label, int, int, int], Label | None],
    effort: Effort | None = None,
) -> list[tuple[Label, tuple[int, ...]]]:
    """Return (label, cuts) of every split that no other one beats in every respect.

    `ends(stage, start)` yields the possible ends of a stage that begins at `start`. `extend(label, stage, start, end)`
    is the label after one more stage, or None if that is impossible or useless. Raises TooLargeError when `effort` is
    spent.
    """
    reached: dict[int, list[tuple[Label, Trail]]] = {0: [(first, ())]}
    for stage in range(n_stages):
        further: dict[int, list[tuple[Label, Trail]]] = {}
        for start, labels in reached.items():
            for end in ends(stage, start):
                kept = further.setdefault(end, [])
                for label, trail in labels:
                    longer = extend(label, stage, start, end)
                    if effort is not None:
                        effort.spend(len(kept) + COMPARISONS_PER_LABEL)
                    if longer is not None:
                        _keep(kept, longer, (end, trail))
        reached = {end: labels for end, labels in further.items() if labels}
    return [(label, _cuts(trail)) for label, trail in reached.get(n_layers, ())]


def _keep(kept: list[tuple[Label, Trail]], label: Label, trail: Trail) -> None:
    """Add a label unless one that is kept is as good, and drop those that it makes useless."""
    if any(all(ours <= theirs for ours, theirs in zip(other, label, strict=True)) for other, _ in kept):
        return
    kept[:] = [entry for entry in kept if not all(ours <= theirs for ours, theirs in zip(label, entry[0], strict=True))]
    kept.append((label, trail))


def _cuts(trail: Trail) -> tuple[int, ...]:
    """Return the ends of all stages but the last."""
    ends: list[int] = []
    while trail:
        ends.append(trail[0])
        trail = trail[1]
    return tuple(reversed(ends[1:]))
