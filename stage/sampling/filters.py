"""Draws a token from those that top-k, top-p and min-p keep, without ever sorting a vocabulary. Pure.

Each filter keeps the likeliest tokens down to some point, in the order (logit descending, token ascending), as
llama.cpp's chain of the same names does. The noise of a token does not depend on which others are left
(`stage.sampling.draws`). So the winner of the race among all tokens is the pick if it is kept, and nothing that ranks
behind a winner that is not kept can be kept either: the race is run again among those before it. Whether one token is
kept takes one pass over the row, where a sorted row of 128,256 tokens takes 10 ms.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from relayline.stage.sampling.draws import Draws

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]


class FilteredDraws:
    """Draws from one vocabulary behind filters, with arrays over it that every draw reuses. Not thread-safe."""

    def __init__(self, draws: Draws, n_vocab: int) -> None:
        self._draws = draws
        self._weights, self._counted = np.empty(n_vocab, np.float32), np.empty(n_vocab, np.float32)

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
    ) -> int:
        """Return the token drawn from softmax(logits / temperature) over what the filters keep of `logits` (f32 [n]).

        The filters come in the order top-k, top-p, min-p and see the logits without temperature. `largest` is the
        largest logit, a finite number. 0, 1.0 and 0.0 keep all tokens; one token is kept at least.
        """
        tokens: Tokens | None = None
        if 0 < top_k < logits.size:
            tokens = largest_tokens(logits, top_k)
            logits = logits[tokens]
        floor = np.float32(largest + math.log(min_p) if min_p > 0.0 else -math.inf)
        total = self._weigh(logits, largest) if top_p < 1.0 else 0.0
        while True:
            token = self._draws.draw(logits, largest, temperature, keys, tokens)
            place = token if tokens is None else int(np.searchsorted(tokens, token))
            if logits[place] < floor:
                before = np.greater_equal(logits, floor)
            elif total and self._is_behind(logits, place, top_p * total):
                before = _ranked_before(logits, place)
            else:
                return token
            left = np.flatnonzero(before)
            tokens = left.astype(np.int32) if tokens is None else tokens[left]
            logits = logits[left]
            if total:
                self._weights[: left.size] = self._weights[left]

    def _weigh(self, logits: Logits, largest: float) -> float:
        weights = self._weights[: logits.size]
        np.subtract(logits, np.float32(largest), out=weights)
        np.exp(weights, out=weights)
        return float(weights.sum(dtype=np.float64))

    def _is_behind(self, logits: Logits, place: int, mass: float) -> bool:
        """Tell whether tokens of that weight or more rank before the one at `place`, and one at least."""
        counted = self._counted[: logits.size]
        np.multiply(self._weights[: logits.size], _ranked_before(logits, place), out=counted)
        found = float(counted.sum(dtype=np.float64))
        return 0.0 < found >= mass


def largest_tokens(logits: Logits, n: int) -> Tokens:
    """Return the tokens of the `n` largest logits, ascending by token; ties are cut by token."""
    edge = np.partition(logits, logits.size - n)[logits.size - n]
    left = np.flatnonzero(logits >= edge)
    if left.size > n:  # a tie at the edge: its first tokens stay
        tied = np.flatnonzero(logits[left] == edge)
        left = np.delete(left, tied[n - left.size :])
    return left.astype(np.int32)


def _ranked_before(logits: Logits, place: int) -> npt.NDArray[np.bool_]:
    """Tell which tokens rank before the one at `place`. Rows are in the order of tokens, so ties are cut by place."""
    before: npt.NDArray[np.bool_] = np.greater(logits, logits[place])
    before[:place] |= logits[:place] == logits[place]
    return before
