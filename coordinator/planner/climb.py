"""Improves a cut step by step, by moves that make the pipeline faster, until no further one does. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from relayline.coordinator.planner.costs import Edges

BETTER = 1 + 1e-9  # times as fast at least, or floating point would move layers to and fro
IsPossible = Callable[[Edges], bool]
"""Whether a split is legal and fits."""
Moves = Callable[[Edges], Iterator[Edges]]
"""Yields splits around a split that are possible too."""


class Climbed(NamedTuple):
    """The end of a climb."""

    rate: float
    edges: Edges
    is_done: bool
    """Whether all moves from there were tried."""


def climbed(edges: Edges, rate: Callable[[Edges], float], kinds: Sequence[Moves], *, tries_max: int) -> Climbed:
    """Return the split that this search ends with: no move of the last kind makes it faster.

    `kinds` of moves, coarse ones first. `tries_max`: splits whose rate is asked for; when they are used up, the best
    one so far is returned.
    """
    best, n_tries = rate(edges), 1
    for moves in kinds:
        is_better = True
        while is_better:
            is_better = False
            for tried in moves(edges):
                if n_tries >= tries_max:
                    return Climbed(best, edges, False)
                n_tries += 1
                if (found := rate(tried)) > best * BETTER:
                    best, edges, is_better = found, tried, True
                    break
    return Climbed(best, edges, True)


def transfers(edges: Edges, n_layers: int, is_possible: IsPossible) -> Iterator[Edges]:
    """Yield splits in which one stage has given n_layers to another. Stages between keep their number of layers."""
    for giver, taker in itertools.permutations(range(len(edges)), 2):
        if edges[giver][1] - edges[giver][0] > n_layers:
            step = -n_layers if giver < taker else n_layers
            tried = _moved(edges, range(min(giver, taker), max(giver, taker)), step)
            if is_possible(tried):
                yield tried


def shifts(edges: Edges, is_possible: IsPossible) -> Iterator[Edges]:
    """Yield splits in which one cut lies elsewhere: at the nearest possible layer before it, and behind it."""
    for at in range(len(edges) - 1):
        (start, cut), (_, end) = edges[at], edges[at + 1]
        for steps in (range(-1, start - cut, -1), range(1, end - cut)):
            tried = (_moved(edges, (at,), step) for step in steps)
            nearest = next(filter(is_possible, tried), None)
            if nearest is not None:
                yield nearest


def _moved(edges: Edges, cuts: Sequence[int], step: int) -> Edges:
    """Return a split with these cuts, by their numbers, so many layers further."""
    ends = [0, *(end + step * (at in cuts) for at, (_, end) in enumerate(edges))]
    return tuple(itertools.pairwise(ends))
