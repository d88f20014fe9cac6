"""Filters that must rank tokens: top-n-sigma, typical-p and XTC, with the others in between. Pure.

The order and the arithmetic are those of llama.cpp's chain: top-n-sigma, top-k, typical-p, top-p, min-p, XTC. Only
sessions that ask for one of the three come here: a vocabulary of 128,000 tokens takes some 10 ms to rank.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from relayline.stage.sampling.draws import noise_keys

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]
_XTC_SALT = 0xD1B54A32D192ED03  # so that whether XTC acts does not go along with any token's noise


@dataclasses.dataclass(frozen=True, slots=True)
class Filters:
    """What is kept. The defaults keep all."""

    top_n_sigma: float = 0.0
    top_k: int = 0
    typical_p: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    xtc_threshold: float = 1.0  # above 0.5 it removes nothing

    def kept(self, logits: Logits) -> Tokens:
        """Return the tokens that are kept of `logits` (f32 [n], the largest finite), ascending; at least one."""
        tokens = np.flatnonzero(logits > -np.inf)
        if self.top_n_sigma > 0:
            finite = logits[tokens].astype(np.float64)
            tokens = tokens[finite >= finite.max() - self.top_n_sigma * finite.std()]
        tokens = tokens[np.argsort(-logits[tokens], kind="stable")]  # tokens ascend, so ties are in their order
        if 0 < self.top_k < tokens.size:
            tokens = tokens[: self.top_k]
        if self.typical_p < 1.0:
            tokens = _typical(logits, tokens, self.typical_p)
        if self.top_p < 1.0:
            chances = _chances(logits, tokens)
            before = np.cumsum(chances) - chances
            tokens = tokens[: max(1, int((before < self.top_p).sum()))]
        if self.min_p > 0.0:
            tokens = tokens[logits[tokens] >= np.float32(float(logits[tokens[0]]) + math.log(self.min_p))]
        if self.xtc_threshold <= 0.5:
            n_likely = int((_chances(logits, tokens) >= self.xtc_threshold).sum())
            tokens = tokens[max(0, n_likely - 1) :]
        return np.sort(tokens).astype(np.int32)


def _chances(logits: Logits, tokens: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
    weights = np.exp(logits[tokens].astype(np.float64) - float(logits[tokens[0]]))
    return np.asarray(weights / weights.sum())


def _typical(logits: Logits, ranked: npt.NDArray[np.intp], mass: float) -> npt.NDArray[np.intp]:
    """Keep the tokens whose surprise is nearest to the expected one until they have `mass`, in their order."""
    chances = _chances(logits, ranked)
    surprises = -np.log(np.maximum(chances, 1e-300))
    distances = np.abs(surprises - (chances * surprises).sum())
    order = np.argsort(distances, kind="stable")
    n_kept = int((np.cumsum(chances[order]) <= mass).sum()) + 1
    return ranked[np.sort(order[:n_kept])]


def xtc_acts(seed: int, position: int, probability: float) -> bool:
    """Return whether XTC acts at a position: a draw that depends on the seed and the position alone."""
    return probability > 0 and (noise_keys(seed ^ _XTC_SALT, position)[0] >> 11) * 2.0**-53 < probability
