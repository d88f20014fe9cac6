"""Filters that must sort tokens: top-n-sigma, typical-p and XTC, with the others in between. Pure.

The arithmetic and the usual order are those of llama.cpp's chain: top-n-sigma, top-k, typical-p, top-p, min-p, XTC.
Only sessions that ask for one of the three, or for another order, come here. Of a large vocabulary only the tokens that
may be kept are sorted.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from relayline.stage.sampling.draws import clipped, noise_keys
from relayline.stage.sampling.filters import largest_tokens
from relayline.wire.common.sampler_order import TEMPERATURE, USUAL

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]
Chances = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]
SORTED_FIRST = 2_048  # tokens that are sorted at first; the others only where these have too little chance together
_XTC_SALT = 0xD1B54A32D192ED03  # so that whether XTC acts does not go along with any token's noise


@dataclasses.dataclass(frozen=True, slots=True)
class Filters:
    """The limits of the filters. The defaults keep all."""

    top_n_sigma: float = 0.0
    top_k: int = 0
    typical_p: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    xtc_threshold: float = 1.0  # above 0.5 it removes nothing
    order: tuple[str, ...] = USUAL  # those that act, by the names of `wire.common.sampler_order`

    def kept(self, logits: Logits) -> Tokens:
        """Return the tokens that are kept of `logits` (f32 [n], the largest finite), ascending; at least one."""
        tokens = np.flatnonzero(logits > -np.inf)
        for name in self.order:
            if name == "top_n_sigma" and self.top_n_sigma > 0:
                finite = logits[tokens].astype(np.float64)
                tokens = tokens[finite >= finite.max() - self.top_n_sigma * finite.std()]
            elif name == "top_k" and 0 < self.top_k < tokens.size:
                tokens = tokens[largest_tokens(logits[tokens], self.top_k)]
            elif name == "typ_p" and self.typical_p < 1.0:
                tokens = tokens[_typical(logits[tokens], self.typical_p)]
            elif name == "top_p" and self.top_p < 1.0:
                tokens = tokens[_likeliest(logits[tokens], self.top_p)]
            elif name == "min_p" and self.min_p > 0.0:
                tokens = tokens[logits[tokens] >= np.float32(float(logits[tokens].max()) + math.log(self.min_p))]
            elif name == "xtc" and self.xtc_threshold <= 0.5:
                tokens = tokens[_unlikely(logits[tokens], self.xtc_threshold)]
        return tokens.astype(np.int32)

    def without_xtc(self) -> Filters:
        """Return the same where XTC does not act."""
        return dataclasses.replace(self, xtc_threshold=1.0)

    @property
    def parts(self) -> tuple[Filters, Filters]:
        """Those before the temperature, and those behind it."""
        at = self.order.index(TEMPERATURE)
        before, behind = self.order[:at], self.order[at + 1 :]
        return dataclasses.replace(self, order=before), dataclasses.replace(self, order=behind)


def kept_behind(filters: Filters, tokens: Tokens, logits: Logits, temperature: float) -> Tokens:
    """Return those of `tokens` that filters behind a temperature above 0 keep; `logits` are the tokens' own."""
    scaled = (logits.astype(np.float64) - float(logits.max())) / clipped(temperature)
    lowest = np.finfo(np.float32).min  # a token that has no chance is still there
    return tokens[filters.kept(np.maximum(scaled, lowest).astype(np.float32))]


# Below, rows are those of some tokens in their order, and places in these rows come back, ascending.


def _chances(logits: Logits) -> Chances:
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    return np.asarray(weights / weights.sum())


def _typical(logits: Logits, mass: float) -> Places:
    """Return those whose surprise is nearest to the expected one, until they have more than `mass`."""
    chances = _chances(logits)
    # A surprise is the same number less the logit for all of them, and so is the expected one.
    wide = logits.astype(np.float64)
    distances = np.abs(wide - (chances * wide).sum())
    near = np.arange(chances.size)
    if near.size > SORTED_FIRST:
        edge = np.partition(distances, SORTED_FIRST)[SORTED_FIRST]
        within = np.flatnonzero(distances < edge)
        near = within if chances[within].sum() > mass else near
    order = near[np.argsort(distances[near], kind="stable")]
    return np.sort(order[: int((np.cumsum(chances[order]) <= mass).sum()) + 1])


def _likeliest(logits: Logits, mass: float) -> Places:
    """Return the likeliest until they have `mass`, one at least; ties in the order of tokens."""
    chances = _chances(logits)
    first = np.arange(chances.size)
    if first.size > SORTED_FIRST:
        leaders = largest_tokens(logits, SORTED_FIRST)
        first = leaders.astype(np.intp) if chances[leaders].sum() > mass else first
    order = first[np.argsort(-logits[first], kind="stable")]
    before = np.cumsum(chances[order]) - chances[order]
    return np.sort(order[: max(1, int((before < mass).sum()))])


def _unlikely(logits: Logits, threshold: float) -> Places:
    """Return all but the tokens of at least that chance, and of these the least likely one."""
    likely = np.flatnonzero(_chances(logits) >= threshold)
    if likely.size < 2:
        return np.arange(logits.size)
    order = likely[np.argsort(-logits[likely], kind="stable")]
    return np.delete(np.arange(logits.size), order[:-1])


def xtc_acts(seed: int, position: int, probability: float) -> bool:
    """Return whether XTC acts at a position: a draw that depends on the seed and the position alone."""
    return probability > 0 and (noise_keys(seed ^ _XTC_SALT, position)[0] >> 11) * 2.0**-53 < probability
