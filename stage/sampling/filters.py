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

from relayline.stage.sampling.draws import Draws

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]
_FEW = 2_048  # tokens before a winner that are weighed for themselves
_SUMS_DIFFER = 1e-5  # more than two sums of the same f32 weights in another order do, as a share
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
        floor = float(np.float32(largest + math.log(min_p))) if min_p > 0.0 else -math.inf
        tokens: Tokens | None = None
        if 0 < top_k < logits.size:
            tokens = largest_tokens(logits, top_k, maxima)
            logits = logits[tokens]
        total = 0.0
        while True:
            token = self._draws.draw(logits, largest, temperature, keys, tokens, floor=floor, maxima=maxima)
            if top_p == 1.0:
                return token
            place = token if tokens is None else int(np.searchsorted(tokens, token))
            before = self._ranked_before(logits, place)
            if self._is_kept(logits, before, largest, top_p, maxima):
                return token
            total = total or self._weigh(logits, largest)
            if not self._is_behind(logits.size, before, top_p * total):
                return token
            if tokens is None:  # the next one is looked for among the logits above, or as large ones before it
                edge = logits[place]
                tied = np.flatnonzero(logits[:place] == edge)
                floor = max(floor, float(edge if tied.size else np.nextafter(edge, np.float32(np.inf))))
                if not tied.size:
                    continue
            left = np.flatnonzero(before)
            tokens = left.astype(np.int32) if tokens is None else tokens[left]
            logits = logits[left]
            self._weights[: left.size] = self._weights[left]

    def _is_kept(
        self, logits: Logits, before: npt.NDArray[np.bool_], largest: float, top_p: float, maxima: Logits
    ) -> bool:
        """Return whether top-p surely keeps the token behind these: they are few and have little weight.

        The largest logits of the blocks represent the row; the tokens left by top-k are weighed in full.
        """
        n_before = int(np.count_nonzero(before))
        if n_before == 0:
            return True
        if n_before > _FEW or logits.size != self._weights.size:
            return False
        theirs = np.exp(logits[np.flatnonzero(before)] - np.float32(largest)).sum(dtype=np.float64)
        least = np.exp(maxima - np.float32(largest)).sum(dtype=np.float64)
        return bool(theirs < top_p * least * (1 - _SUMS_DIFFER))

    def _weigh(self, logits: Logits, largest: float) -> float:
        weights = self._weights[: logits.size]
        np.subtract(logits, np.float32(largest), out=weights)
        np.exp(weights, out=weights)
        return sum_of(weights)

    def _is_behind(self, n_tokens: int, before: npt.NDArray[np.bool_], mass: float) -> bool:
        """Tell whether the tokens before one have that weight or more, and there is one at least."""
        counted = self._counted[:n_tokens]
        np.multiply(self._weights[:n_tokens], before, out=counted)
        return 0.0 < sum_of(counted) >= mass

    def _ranked_before(self, logits: Logits, place: int) -> npt.NDArray[np.bool_]:
        """Tell which tokens rank before the one at `place`. Rows are in the order of tokens: ties are cut by place."""
        before = self._before[: logits.size]
        np.greater(logits, logits[place], out=before)
        before[:place] |= logits[:place] == logits[place]
        return before


def sum_of(weights: Logits) -> float:
    """Return the sum of an f32 row: columns in f32, then these in f64, which is exact to some ulp and fast."""
    n_columns = min(weights.size, _COLUMNS)
    n_full, n_more = divmod(weights.size, n_columns)
    columns = np.add.reduce(weights[: n_full * n_columns].reshape(n_full, n_columns), axis=0)
    total = float(columns.sum(dtype=np.float64))
    return total + (float(weights[weights.size - n_more :].sum(dtype=np.float64)) if n_more else 0.0)


def largest_tokens(logits: Logits, n: int, maxima: Logits | None = None) -> Tokens:
    """Return the tokens of the `n` largest logits, ascending by token; ties are cut by token.

    `maxima`, the largest of each of some blocks of the row, spare most of it: of so many, the n-th largest bounds the
    edge from below.
    """
    if maxima is not None and n <= maxima.size:
        bound = np.partition(maxima, maxima.size - n)[maxima.size - n]
        some = np.flatnonzero(logits >= bound)
        return some[largest_tokens(logits[some], n)].astype(np.int32) if some.size > n else some.astype(np.int32)
    edge = np.partition(logits, logits.size - n)[logits.size - n]
    left = np.flatnonzero(logits >= edge)
    if left.size > n:  # a tie at the edge: its first tokens stay
        tied = np.flatnonzero(logits[left] == edge)
        left = np.delete(left, tied[n - left.size :])
    return left.astype(np.int32)
