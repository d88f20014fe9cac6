"""Draws tokens for several rows of a step together: the same tokens as row by row, in less time. Pure.

A draw is some forty short numpy calls (`stage.sampling.draws`), and most of their time is the calls' own. Here the
noise of blocks, the race among the tokens that are left, and the bounds of top-p are computed for all rows at once.
Only what reads a row of logits goes row by row, and all of that at once, while the row is in the processor's cache.

The filters are those of `stage.sampling.filters`. Where the bounds here do not tell that top-p keeps a row's winner,
that module finishes the row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from relayline.stage.sampling.draws import MANY, SCATTERED, Draws, Logits, Places, Tokens, clipped
from relayline.stage.sampling.filters import SUMS_DIFFER, FilteredDraws, floor_of, largest_tokens
from relayline.stage.sampling.noise import ROWS, Noise


@dataclasses.dataclass(slots=True)
class Row:
    """A row to draw from, and how."""

    logits: Logits  # f32 [n_vocab]
    largest: float  # finite
    temperature: float
    keys: tuple[int, int]
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    floor: float = -math.inf  # what min-p makes of the largest logit
    tokens: Tokens | None = None  # what top-k leaves; None: all

    def __post_init__(self) -> None:
        self.temperature, self.floor = clipped(self.temperature), floor_of(self.largest, self.min_p)


class DrawsTogether:
    """Draws from rows of one vocabulary, with arrays that every step reuses. Not thread-safe.

    For at most ROWS rows: `begin`, then for each in turn `look` and `add`, then `draw`.
    """

    def __init__(self, draws: Draws, filtered: FilteredDraws, noise: Noise, n_rows: int = ROWS) -> None:
        self._draws, self._filtered, self._noise = draws, filtered, noise
        self._maxima = np.empty((n_rows, draws.n_blocks), np.float32)
        self._bounds = np.empty((n_rows, draws.n_blocks), np.float32)
        self._steps = np.arange(draws.block, dtype=np.int64) * draws.n_blocks  # from a block's first token to each
        self._is_ragged = draws.n_blocks * draws.block > draws.n_vocab
        self._changed: Logits | None = None  # made when first needed
        self._noise_of: tuple[Logits, Places]
        self._rows: list[Row] = []
        self._left: list[tuple[int, Places, Logits]] = []  # of a row, the tokens that may win
        self._alone: list[int] = []  # rows that have too many of these

    def begin(self, keys: Sequence[int]) -> None:
        """Begin with rows of these keys, the first ones of `noise_keys`."""
        self._noise_of = self._noise.of(keys)
        self._rows, self._left, self._alone = [], [], []

    @property
    def changed(self) -> Logits:
        """Memory for logits of the next row that are not the model's own: f32 [n_vocab]."""
        if self._changed is None:
            self._changed = np.empty((ROWS, self._draws.n_vocab), np.float32)
        changed: Logits = self._changed[len(self._rows)]
        return changed

    def look(self, logits: Logits) -> float:
        """Look at the logits of the next row (f32 [n_vocab]); returns the largest, NaN if there is one."""
        maxima = self._maxima[len(self._rows)]
        self._draws.maxima(logits, maxima)
        return float(maxima.max())

    def add(self, row: Row, place: int) -> None:
        """Add the row that was looked at. `place` is that of its key."""
        at = len(self._rows)
        self._rows.append(row)
        with np.errstate(over="ignore", invalid="ignore"):
            if 0 < row.top_k < row.logits.size:
                row.tokens = largest_tokens(row.logits, row.top_k, self._draws, self._maxima[at])
                tokens, logits = row.tokens.astype(np.int64), row.logits[row.tokens]
                if row.floor > -math.inf:
                    above = logits >= np.float32(row.floor)
                    tokens, logits = tokens[above], logits[above]
            else:
                noise = self._noise_of[0][place], self._noise_of[1][place]
                tokens, logits = self._draws.may_win(
                    row.logits, row.largest, row.temperature, row.keys, row.floor, self._maxima[at], noise
                )
        if tokens.size > SCATTERED:
            self._alone.append(at)
        else:
            self._left.append((at, tokens, logits))

    def draw(self) -> list[int]:
        """Return each row's token, in the order in which they were added."""
        rows, maxima = self._rows, self._maxima
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            winners = self._first() if self._left else {}
            asked = [at for at in winners if rows[at].top_p < 1.0]
            whole = [at for at in asked if rows[at].tokens is None]
            surely = self._surely_kept(winners, whole) if whole else set()
        found = {at: token for at, (token, _) in winners.items()}
        for at in self._alone:
            row = rows[at]
            found[at] = self._filtered.draw(
                row.logits, row.largest, row.temperature, row.keys, top_k=row.top_k, top_p=row.top_p, min_p=row.min_p,
                maxima=maxima[at],
            )  # fmt: skip
        for at in asked:
            if at not in surely:
                found[at] = self._kept(rows[at], found[at], maxima[at])
        return [found[at] for at in range(len(rows))]

    def _kept(self, row: Row, token: int, maxima: Logits) -> int:
        logits = row.logits if row.tokens is None else row.logits[row.tokens]
        return self._filtered.kept(
            token, logits, row.largest, row.temperature, row.keys, row.tokens, top_p=row.top_p, floor=row.floor,
            maxima=maxima,
        )  # fmt: skip

    def _first(self) -> dict[int, tuple[int, float]]:
        """Return the token of each row that arrives first, and its logit; of several, the first of these."""
        rows, places = self._rows, [at for at, _, _ in self._left]
        sizes = [tokens.size for _, tokens, _ in self._left]
        tokens = np.concatenate([tokens for _, tokens, _ in self._left])
        logits = np.concatenate([logits for _, _, logits in self._left])
        keys = np.array([rows[at].keys for at in places], np.uint64).repeat(sizes, 0)
        largest = np.array([rows[at].largest for at in places]).repeat(sizes)
        temperatures = np.array([rows[at].temperature for at in places]).repeat(sizes)
        arrivals = np.log(self._draws.noise(tokens, (keys[:, 0], keys[:, 1])))
        arrivals -= (logits.astype(np.float64) - largest) / temperatures  # the numbers that `Draws.draw` compares
        ends: Places = np.cumsum(sizes, dtype=np.int64)
        earliest = np.minimum.reduceat(arrivals, ends - sizes)
        first = (arrivals == earliest.repeat(sizes)).nonzero()[0]
        found: dict[int, tuple[int, float]] = {}
        numbers = np.searchsorted(ends, first, "right").tolist()
        for number, *winner in zip(numbers, tokens[first].tolist(), logits[first].tolist(), strict=True):
            at, one = places[number], (winner[0], winner[1])
            found[at] = min(one, found.get(at, one))
        return found

    def _surely_kept(self, found: dict[int, tuple[int, float]], asked: Sequence[int]) -> set[int]:
        """Return which whole rows' winners top-p surely keeps: the tokens before them are few and have little weight.

        These tokens are all in blocks whose largest logit reaches the winner's. The other blocks' largest logits stand
        for their weight, which is more.
        """
        rows, n_rows, n_blocks = self._rows, len(self._rows), self._draws.n_blocks
        winners = np.full(n_rows, -1, np.int64)
        edges = np.full(n_rows, np.inf, np.float32)  # of rows that are not asked, which no block reaches
        for each in asked:
            winners[each], edges[each] = found[each]
        maxima, top = self._maxima[:n_rows], np.array([row.largest for row in rows], np.float32)
        reaches = maxima >= edges[:, None]
        many = [each for each in asked if np.count_nonzero(reaches[each]) > MANY]
        reaches[many] = False
        places = reaches.ravel().nonzero()[0]
        at, blocks = places // n_blocks, places % n_blocks
        tokens, logits = self._of_blocks(at, blocks)
        edge = edges[at, None]
        before = (logits > edge) | ((logits == edge) & (tokens < winners[at, None]))
        if self._is_ragged:
            is_one = tokens < self._draws.n_vocab
            before &= is_one
        if not before.any():
            return set(asked) - set(many)
        weights = np.exp(logits - top[at, None])
        if self._is_ragged:
            weights *= is_one
        theirs = np.bincount(at, (weights * before).sum(1, dtype=np.float64), n_rows)
        stand_ins = np.subtract(maxima, top[:, None], out=self._bounds[:n_rows])
        np.exp(stand_ins, out=stand_ins)
        stand_ins[reaches] = 0.0
        least = stand_ins.sum(1, dtype=np.float64) + np.bincount(at, weights.sum(1, dtype=np.float64), n_rows)
        n_before = np.bincount(at, before.sum(1), n_rows)
        return {
            each
            for each in asked
            if each not in many
            and (n_before[each] == 0 or theirs[each] < rows[each].top_p * least[each] * (1 - SUMS_DIFFER))
        }

    def _of_blocks(self, at: Places, blocks: Places) -> tuple[Places, Logits]:
        """Return the tokens of blocks, and their logits: [n, places]. A place of no token has some other's logit.

        `at` are the blocks' rows, ascending.
        """
        tokens = blocks[:, None] + self._steps
        return tokens, self._gathered(at, tokens)

    def _gathered(self, at: Places, tokens: Places) -> Logits:
        """Return the logits of some tokens of rows: [n, m]; `at` [n] ascend."""
        logits, begin = np.empty(tokens.shape, np.float32), 0
        for row, end in zip(self._rows, np.searchsorted(at, np.arange(len(self._rows)), "right").tolist(), strict=True):
            if end > begin:
                row.logits.take(tokens[begin:end], out=logits[begin:end], mode="clip")
            begin = end
        return logits
