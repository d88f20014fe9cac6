"""llama.cpp's cutting of a step into micro-batches when each lane has its own cells. Pure.

With one unified cache a step is one micro-batch and keeps its row order. With a separate cache for each lane
(`llama_batch_allocr::split_equal`, sequential), a micro-batch holds lanes of consecutive numbers, each with the same
number of rows, in the order of lanes. The first lane of the batch with rows left begins it. Every following lane of the
batch joins if its number is one higher than the last one's. All give as many rows as the shortest has. Hidden rows are
captured in that order, so this module must know it. A step of decode rows of neighbouring lanes is one micro-batch.

If some layers have a recurrent state, this is true of a unified cache too, but every following lane joins, whatever its
number (`llama_memory_hybrid::init_batch`). Where such lanes can be taken back by some rows, the last of these and one
more stay in one micro-batch: of the lanes that would share it, those before the first that would leave fewer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

CUTS_KEPT = 64  # of the last shapes of steps; a step of 512 rows takes 4 KiB for each of three sequences


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """One step as llama.cpp will run it."""

    given: npt.NDArray[np.intp]
    """Rows of the step in the order in which they are best given to llama.cpp."""
    computed: npt.NDArray[np.intp]
    """The same rows in the order in which they are computed."""
    sizes: tuple[int, ...]
    """Rows of each micro-batch."""
    is_in_order: bool
    """Whether rows are passed and computed in the step's own order."""


def cut(lanes: npt.NDArray[np.int32], *, sequential: bool = True, n_tail: int = 0) -> Cut:
    """Return how a step whose rows are of these lanes (shape [n_rows]) is run in the fewest micro-batches.

    `sequential`: only lanes of consecutive numbers share a micro-batch. `n_tail`: this many last rows of a lane stay
    together; 0 for no such rule.

    Rows of one lane keep their order; a lane's rows need not be neighbours. Of several orders with equally few
    micro-batches, the one that keeps lanes of several rows (prompts) apart from those of one is taken. Do not write to
    its arrays: a repeated decode step gets the same ones again.
    """
    return _cut(tuple(lanes.tolist()), sequential, n_tail)


@functools.lru_cache(maxsize=CUTS_KEPT)
def _cut(lanes: tuple[int, ...], sequential: bool, n_tail: int) -> Cut:
    rows_of: dict[int, list[int]] = {}
    for row, lane in enumerate(lanes):
        rows_of.setdefault(lane, []).append(row)
    ascending = sorted(rows_of)
    several = [lane for lane in ascending if len(rows_of[lane]) > 1]
    single = [lane for lane in ascending if len(rows_of[lane]) == 1]
    orders = [several + single, single + several, ascending] if several and single else [ascending]
    runs = [(order, _run(order, rows_of, sequential=sequential, n_tail=n_tail)) for order in orders]
    best_order, best = min(runs, key=lambda each: len(each[1]))
    given = _flat(rows_of[lane] for lane in best_order)
    computed = _flat(part for micro_batch in best for part in micro_batch)
    as_they_stand = np.arange(len(lanes))
    is_in_order = np.array_equal(given, as_they_stand) and np.array_equal(computed, as_they_stand)
    return Cut(given, computed, tuple(sum(map(len, micro_batch)) for micro_batch in best), is_in_order)


def _run(order: list[int], rows_of: dict[int, list[int]], *, sequential: bool, n_tail: int) -> list[list[list[int]]]:
    """Return the micro-batches of lanes given in this order: of each lane in it the rows that it gives."""
    taken = dict.fromkeys(order, 0)
    micro_batches: list[list[list[int]]] = []
    left = list(order)
    while left:
        chosen = [left[0]]
        for lane in left[1:]:
            if not sequential or lane == chosen[-1] + 1:
                chosen.append(lane)
        count = min(len(rows_of[lane]) - taken[lane] for lane in chosen)
        if n_tail:
            remaining = [len(rows_of[lane]) - taken[lane] - count for lane in chosen]
            n_kept = next((at for at, n_rows in enumerate(remaining) if 0 < n_rows < n_tail), len(chosen))
            if not n_kept:  # the first one goes alone, to its end
                count += remaining[0]
            chosen = chosen[: max(1, n_kept)]
        micro_batches.append([rows_of[lane][taken[lane] : taken[lane] + count] for lane in chosen])
        for lane in chosen:
            taken[lane] += count
        left = [lane for lane in left if taken[lane] < len(rows_of[lane])]
    return micro_batches


def _flat(parts: Iterable[list[int]]) -> npt.NDArray[np.intp]:
    found = np.fromiter((row for part in parts for row in part), np.intp)
    found.setflags(write=False)
    return found
