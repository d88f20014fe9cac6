"""Draws a token from those that top-k, top-p and min-p keep, without ever sorting a vocabulary. Pure.

Each filter keeps the likeliest tokens down to some point, in the order (logit descending, token ascending), as
llama.cpp's chain of the same names does. The noise of a token does not depend on which others are left
(`stage.sampling.draws`). So the winner of the race among all tokens is the pick if it is kept. If it is not kept, no
token of lower rank is kept either, and the race runs again among the tokens of higher rank. min-p is a floor, applied
within the race. top-k comes first and leaves few tokens, which the largest logits of the blocks find. Bounds mostly
decide whether top-p keeps a winner: they compare the weight of the tokens before it with that of the blocks' largest
logits. Only if they leave it open are all tokens weighed.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from relayline.stage.sampling.draws import Draws, Places

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]
SUMS_DIFFER = 1e-5  # more than two sums of the same f32 weights in another order do, as a share
_COLUMNS = 2_048


class FilteredDraws:
    """Draws from one vocabulary behind filters, with arrays over it that every draw reuses. Not thread-safe."""

    def __init__(self, draws: Draws, n_vocab: int) -> None:
        self._draws = draws
        self._weights, self._counted = np.empty(n_vocab, np.float32), np.empty(n_vocab, np.float32)
        self._before = np.empty(n_vocab, np.bool_)

    def draw(
        self,
        logits: Logits,
        largest: float,
        temperature: float,
        keys: tuple[int, int],
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        maxima: Logits | None = None,
    ) -> int:
        """Return the token drawn from softmax(logits / temperature) over the tokens of `logits` (f32 [n]) that the
        filters keep.

        The filters come in the order top-k, top-p, min-p and see the logits without temperature. `largest` is the
        largest logit, a finite number. 0, 1.0 and 0.0 keep all tokens; one token is kept at least. `maxima` are those
        of `Draws.maxima`, where they are known.
        """
        if maxima is None:
            maxima = self._draws.maxima(logits)
        floor, tokens = floor_of(largest, min_p), None
        if 0 < top_k < logits.size:
            tokens = largest_tokens(logits, top_k, self._draws, maxima)
            logits = logits[tokens]
        token = self._draws.draw(logits, largest, temperature, keys, tokens, floor=floor, maxima=maxima)
        if top_p == 1.0:
            return token
        return self.kept(token, logits, largest, temperature, keys, tokens, top_p=top_p, floor=floor, maxima=maxima)

    def kept(
        self,
        token: int,
        logits: Logits,
        largest: float,
        temperature: float,
        keys: tuple[int, int],
        tokens: Tokens | None,
        *,
        top_p: float,
        floor: float,
        maxima: Logits,
    ) -> int:
        """Return the token that won the race among `tokens` (None: all), or the first behind it that top-p keeps.

        The logits are those of `tokens`. `floor` is what the race was run with, `maxima` are the whole row's.
        """
        total, weights = 0.0, None
        while True:
            place = token if tokens is None else int(np.searchsorted(tokens, token))
            few = self._few_before(logits, place, maxima) if tokens is None else None
            theirs = 0.0
            if few is not None:
                theirs = float(np.exp(logits[few] - np.float32(largest)).sum(dtype=np.float64))
                if not few.size or _is_less(theirs, top_p * _least_total(maxima, largest)):
                    return token
            if weights is None:
                weights = self._weights_of(logits, largest)
                total = total or sum_of(weights)
            mass, before = top_p * total, None
            if few is None or not (_is_less(theirs, mass) or _is_less(mass, theirs)):
                before = self._ranked_before(logits, place)
                theirs = sum_of(np.multiply(weights, before, out=self._counted[: logits.size]))
            if not 0.0 < theirs >= mass:
                return token
            if tokens is None and few is None and not (logits[:place] == logits[place]).any():
                # The next one is looked for among the logits above.
                floor = max(floor, float(np.nextafter(logits[place], np.float32(np.inf))))
            else:
                left = few if before is None else np.flatnonzero(before)
                assert left is not None
                tokens = left.astype(np.int32) if tokens is None else tokens[left]
                logits, weights = logits[left], None
            token = self._draws.draw(logits, largest, temperature, keys, tokens, floor=floor, maxima=maxima)

    def _few_before(self, logits: Logits, place: int, maxima: Logits) -> Places | None:
        """Return the tokens of a whole row that rank before one, in the order of tokens; None if they are many."""
        edge = logits[place]
        reach = self._draws.reaching(logits, float(edge), maxima)
        if reach is None:
            return None
        before: Places = reach[(logits[reach] > edge) | (reach < place)]
        return before

    def _ranked_before(self, logits: Logits, place: int) -> npt.NDArray[np.bool_]:
        """Tell which tokens rank before the one at `place`. Rows are in the order of tokens: ties are cut by place."""
        before = self._before[: logits.size]
        np.greater(logits, logits[place], out=before)
        before[:place] |= logits[:place] == logits[place]
        return before

    def _weights_of(self, logits: Logits, largest: float) -> Logits:
        weights = self._weights[: logits.size]
        np.subtract(logits, np.float32(largest), out=weights)
        return np.exp(weights, out=weights)


def _is_less(one: float, other: float) -> bool:
    """Return whether a sum of weights is less than another, in whatever order both were added up."""
    return one < other * (1 - SUMS_DIFFER)


def _least_total(maxima: Logits, largest: float) -> float:
    """Return less than the weight of a row: that of the largest logits of its blocks."""
    return float(np.exp(maxima - np.float32(largest)).sum(dtype=np.float64))


def floor_of(largest: float, min_p: float) -> float:
    """Return the least logit that min-p keeps."""
    return float(np.float32(largest + math.log(min_p))) if min_p > 0.0 else -math.inf


def sum_of(weights: Logits) -> float:
    """Return the sum of an f32 row: columns in f32, then these in f64, which is exact to some ulp and fast."""
    n_columns = min(weights.size, _COLUMNS)
    n_full, n_more = divmod(weights.size, n_columns)
    columns = np.add.reduce(weights[: n_full * n_columns].reshape(n_full, n_columns), axis=0)
    total = float(columns.sum(dtype=np.float64))
    return total + (float(weights[weights.size - n_more :].sum(dtype=np.float64)) if n_more else 0.0)


def largest_tokens(logits: Logits, n: int, draws: Draws | None = None, maxima: Logits | None = None) -> Tokens:
    """Return the tokens of the `n` largest logits, ascending by token; ties are cut by token.

    `maxima`, of `Draws.maxima` of a whole row, spare most of it: of so many, the n-th largest bounds the edge from
    below.
    """
    if draws is not None and maxima is not None and n <= maxima.size:
        bound = np.partition(maxima, maxima.size - n)[maxima.size - n]
        some = draws.reaching(logits, float(bound), maxima)
        if some is None:
            some = np.flatnonzero(logits >= bound)
        return some[largest_tokens(logits[some], n)].astype(np.int32) if some.size > n else some.astype(np.int32)
    edge = np.partition(logits, logits.size - n)[logits.size - n]
    left = np.flatnonzero(logits >= edge)
    if left.size > n:  # a tie at the edge: its first tokens stay
        tied = np.flatnonzero(logits[left] == edge)
        left = np.delete(left, tied[n - left.size :])
    return left.astype(np.int32)
