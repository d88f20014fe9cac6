"""Cost curves: the time of one native step of a slice, by its number of rows. Pure.

Why a curve: the cost of a step is a staircase, and not even monotonic. CPU kernels work in tiles of rows and run
leftover rows one by one, so three rows can cost more than four. GPUs have different steps. Stages measure their curve
and keep refining it from real steps; the coordinator plans groups with the curves of all stages.

Between measured points: a row count a few rows above a measured multiple of the tile costs that multiple, plus the cost
of the same leftover above the first tile. Elsewhere cost is linear between points, and beyond the last point it grows
by the last slope.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

# Rows measured one by one at the low end, where steps are steep; beyond, a geometric ladder of tile multiples.
LADDER = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# Rows that llama.cpp's attention on CPUs takes at once (GGML_FA_TILE_Q in ggml-cpu/common.h), in steps of at least this
# size: keys and values are read once for all of them. Fewer rows read their lanes one by one.
ATTENTION_TILE_ROWS = 64
# Where the build takes lanes apart, attention compares four pairs of neighbouring rows, at odd eighths of a step. It
# goes by tiles only if two pairs are of one lane (rows_see_alike in deploy/kernels/attend_own_cells.cpp). Decode rows
# of different lanes come first, so this part of their number may follow.
APART_PART = 3 / 5
# Of what context costs the first row of a frame, for each further one, where the build takes lanes apart: these rows
# find the lane's keys and values in a cache. Measured: 0.45 to 0.6 (demo and llama-1b, lanes of 512 to 2,048 tokens).
FURTHER_ROW_PART = 0.5
TILE_ROWS = 4  # of llama.cpp's repacked CPU kernels; the pattern is measured, only its period is assumed
PAD_SEARCH_ROWS = 7  # how far above the real row count a cheaper one is looked for
PAD_GAIN = 0.03  # padding must be predicted to save this part of the step, or the noise of a flat curve would pad
SMOOTHING = 0.1  # weight of a new observation for its own row count
SMOOTHING_SHARED = 0.05  # and for all others: a machine that slows down does so at every row count
OUTLIER = 4.0  # an observation above this multiple of the known cost is a hiccup of the machine
FLAT_ROWS_MIN, FLAT_RATIO = 64, 1.1  # times the fewest rows, in about their time
OUTLIERS_MAX = 3  # unless so many come one after another: then the machine has changed


class CostCurve:
    """Nanoseconds of a step by rows. Empty until measured or observed: `is_known` says so."""

    def __init__(self, points: Iterable[tuple[int, float]] = ()) -> None:
        self._cost_ns: dict[int, float] = {rows: float(ns) for rows, ns in points if rows > 0 and ns > 0}
        self._rows = sorted(self._cost_ns)
        self._scale = 1.0  # what all points have in common since they were measured
        self._n_outliers = 0
        self._best: dict[tuple[int, int], int] = {}

    @property
    def is_known(self) -> bool:
        """Whether there is anything to predict from."""
        return bool(self._rows)

    def points(self) -> list[tuple[int, int]]:
        """Return the known (rows, ns) pairs, ascending."""
        return [(rows, max(1, round(self._scale * self._cost_ns[rows]))) for rows in self._rows]

    def scale(self, factor: float) -> None:
        """Multiply every cost by this factor."""
        self._scale *= factor

    @property
    def is_flat(self) -> bool:
        """Whether many rows seem to cost no more than the fewest, as where these were disturbed each time."""
        points = self.points()
        (first_rows, first_ns), (last_rows, last_ns) = (points or [(0, 0)])[0], (points or [(0, 0)])[-1]
        return last_rows >= FLAT_ROWS_MIN * max(1, first_rows) and last_ns <= FLAT_RATIO * first_ns

    def cost_ns(self, rows: int) -> float:
        """Predict a step of `rows` rows; 0 for no rows or while nothing is known."""
        if rows <= 0 or not self._rows:
            return 0.0
        return self._scale * self._unscaled(rows)

    def _unscaled(self, rows: int) -> float:
        known = self._cost_ns.get(rows)
        if known is not None:
            return known
        leftover = rows % TILE_ROWS
        if leftover and rows > 2 * TILE_ROWS and {TILE_ROWS, TILE_ROWS + leftover} <= self._cost_ns.keys():
            extra = self._cost_ns[TILE_ROWS + leftover] - self._cost_ns[TILE_ROWS]
            return self._between(rows - leftover) + max(0.0, extra)
        return self._between(rows)

    def _between(self, rows: int) -> float:
        if rows in self._cost_ns:
            return self._cost_ns[rows]
        known = self._rows
        if len(known) == 1:
            return self._cost_ns[known[0]] * max(1.0, rows / known[0])
        above = bisect.bisect_left(known, rows)
        above = min(max(above, 1), len(known) - 1)
        low, high = known[above - 1], known[above]
        slope = (self._cost_ns[high] - self._cost_ns[low]) / (high - low)
        if rows > high:
            return self._cost_ns[high] + max(slope, 0.0) * (rows - high)
        return max(self._cost_ns[low] + slope * (rows - low), 1.0)

    def padded_rows(self, rows: int, rows_max: int) -> int:
        """Return the row count, at least `rows` and at most `rows_max`, that is predicted to be clearly cheapest."""
        if rows <= 0 or not self._rows:
            return rows
        best = self._best.get((rows, rows_max))
        if best is None:
            candidates = range(rows, min(rows + PAD_SEARCH_ROWS, max(rows, rows_max)) + 1)
            best = min(candidates, key=self._unscaled)
            if self._unscaled(best) > (1 - PAD_GAIN) * self._unscaled(rows):
                best = rows
            self._best[rows, rows_max] = best
        return best

    def padded_cost_ns(self, rows: int, rows_max: int) -> float:
        """Predict a step of `rows` real rows after padding."""
        return self.cost_ns(self.padded_rows(rows, rows_max))

    def observe(self, rows: int, ns: int) -> None:
        """Refine from a real step of `rows` rows (padding included)."""
        if rows <= 0 or ns <= 0:
            return
        if not self._rows:
            self._cost_ns[rows] = float(ns)
            self._rows.append(rows)
            return
        predicted_ns = self.cost_ns(rows)
        if ns > OUTLIER * predicted_ns:
            self._n_outliers += 1
            if self._n_outliers < OUTLIERS_MAX:
                return
        self._n_outliers = 0
        # In logarithms, so that a slow and a fast phase cancel out for row counts that did not occur in between.
        ratio = max(1 / OUTLIER, min(ns / predicted_ns, OUTLIER))
        is_new = rows not in self._cost_ns
        # The shared part moves through the scale and the rest through the point; a new point starts half way. The
        # cost comes before the row count, and the list is another one: the decode thread may be predicting.
        self._cost_ns[rows] = self._unscaled(rows) * ratio ** (0.5 if is_new else SMOOTHING)
        self._scale *= ratio**SMOOTHING_SHARED
        if is_new:
            self._rows = sorted((*self._rows, rows))
        self._best.clear()


def further_ns(context_ns: float, *, takes_lanes_apart: bool) -> float:
    """Return what context costs a row of a frame after its first, for each token, if it costs the first so much."""
    return context_ns * (FURTHER_ROW_PART if takes_lanes_apart else 1.0)


def price_per_lane(context_ns: float, further_ns: float, row_tokens: float, lane_tokens: float) -> float:
    """Predict what context adds to a step where the rows of a frame share what is read of their lane.

    context_ns is the price of a token before the only row of a frame, further_ns before each further one. row_tokens
    and lane_tokens are the tokens before all rows, and before all frames. Where lanes have KV cells of their own, each
    counts as many as the longest lane that is computed with it.
    """
    return context_ns * lane_tokens + further_ns * (row_tokens - lane_tokens)


def goes_by_tiles(decode_rows: int, other_rows: int, *, takes_lanes_apart: bool) -> bool:
    """Return whether attention goes by tiles in a step of decode rows of different lanes, and of prompts or padding.

    For stages on a processor, with shared cells, where a step of a prompt's rows does so.
    """
    is_apart = takes_lanes_apart and other_rows <= APART_PART * decode_rows
    return decode_rows + other_rows >= ATTENTION_TILE_ROWS and not is_apart


def rows_apart(decode_rows: int) -> int:
    """Return how many rows a step with so many decode rows may have, prompts' included, that does not go by tiles.

    For stages that take lanes apart. The stage may pad such a step.
    """
    return max(ATTENTION_TILE_ROWS - 1, decode_rows + int(APART_PART * decode_rows) - PAD_SEARCH_ROWS)


def mixed_cost_ns(decode: CostCurve, prefill: CostCurve, decode_rows: int, prompt_rows: int) -> float:
    """Predict a step of decode rows and prompt rows; 0 while either curve is unknown.

    All of them pass the layers, as rows of a prompt do, and the decode rows pay for the head, if there is one. Prompt
    rows may make a step cheaper: three decode rows and one of a prompt fill a tile.
    """
    if not (decode.is_known and prefill.is_known):
        return 0.0
    head_ns = max(0.0, decode.cost_ns(decode_rows) - prefill.cost_ns(decode_rows))
    return prefill.cost_ns(decode_rows + prompt_rows) + head_ns
