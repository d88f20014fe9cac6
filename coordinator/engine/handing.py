"""Decides which stage hands over the lanes of which layers to which stage when layers move. Pure.

Places are as in `coordinator.engine.moves`. A holder that keeps its slice keeps its lanes. Every other takes the lanes
of each of its next layers from the place that has that layer now, which may be itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from relayline.wire.common import bounds


class Handed(NamedTuple):
    """Layers [layer_start:layer_end) whose lanes change hands."""

    giver: int
    taker: int
    layer_start: int
    layer_end: int


def handed(
    before: Sequence[tuple[int, int, int]], after: Sequence[tuple[int, int, int]], keeps: Sequence[bool]
) -> list[Handed]:
    """Return what changes hands, in layer order.

    before, after: (place, first layer, end) of each holder, in layer order, together the whole model; keeps: which
    holders of `after` keep their slice.
    """
    return [
        Handed(giver, taker, max(start, first), min(end, stop))
        for (taker, start, end), is_kept in zip(after, keeps, strict=True)
        if not is_kept
        for giver, first, stop in before
        if max(start, first) < min(end, stop)
    ]


def time_ns(n_tokens: Iterable[int], read_ns: Callable[[int], float]) -> int:
    """Return how long a hand-over of lanes may take, from their tokens: as long as computing them again."""
    wanted_ns = sum(map(read_ns, n_tokens))
    return round(min(max(wanted_ns, bounds.HAND_OVER_S_MIN * 1e9), bounds.HAND_OVER_S_MAX * 1e9))
