"""Mirostat, versions 1 and 2: which tokens a draw may pick, so that surprise stays near a target. Pure.

As llama.cpp's samplers of these names (Basu et al., 2021). `mu`, the most surprise that a token may have, changes with
every token that is picked. It cannot be derived from tokens, so it travels (`stage.sampling.carried`).
"""

from __future__ import annotations

import math
import sys

import numpy as np
import numpy.typing as npt

from relayline.stage.sampling.carried import Carried
from relayline.stage.sampling.filters import largest_tokens

LEADERS = 100  # tokens from which version 1 estimates how steep the distribution is; llama.cpp's number

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]


class Mirostat:
    """The state of one session."""

    def __init__(self, version: int, tau: float, eta: float, temperature: float, mu: float | None) -> None:
        """`mu` is None for a session that has picked nothing. `temperature` is above 0."""
        self._version, self._tau, self._eta = version, tau, eta
        self._temperature = min(temperature, sys.float_info.max)  # infinite, it would make NaN of forbidden tokens
        self._carried = Carried(2 * tau if mu is None else mu)

    @property
    def mu(self) -> float:
        """The most surprise, in bits, that the next token may have. An f32."""
        return self._carried.value

    def kept(self, logits: Logits, position: int) -> Tokens:
        """Return the tokens that may be picked at `position`, at least one. At least one logit is finite.

        Raises InternalError for a position beyond the next one: the tokens before it are not known here.
        """
        self._carried.go_to(position)
        wide = logits.astype(np.float64)
        wide -= wide.max()
        wide /= self._temperature
        surprises = (math.log(np.exp(wide).sum()) - wide) / math.log(2)
        if self._version == 1:
            n_kept = self._n_kept(surprises, logits.size)
            finite = int(np.isfinite(logits).sum())
            return largest_tokens(logits, min(n_kept, finite))
        tokens = np.flatnonzero(surprises <= self.mu)
        return (tokens if tokens.size else np.array([surprises.argmin()])).astype(np.int32)

    def _n_kept(self, surprises: npt.NDArray[np.float64], n_vocab: int) -> int:
        """Return how many of the likeliest tokens version 1 keeps: as many as a Zipf distribution would need."""
        finite = surprises[np.isfinite(surprises)]
        leaders = np.sort(np.partition(finite, min(LEADERS, finite.size) - 1)[:LEADERS])
        ranks = np.arange(1, leaders.size)
        steps = np.log((ranks + 1) / ranks)
        with np.errstate(all="ignore"):
            drops = np.diff(leaders) * math.log(2)
            slope = np.float64((steps * drops).sum()) / np.float64((steps * steps).sum())
            epsilon = slope - 1
            n_kept = (epsilon * np.exp2(np.float64(self.mu)) / (1 - float(n_vocab) ** -epsilon)) ** (1 / slope)
        return int(min(max(n_kept, 1), n_vocab)) if not math.isnan(n_kept) else 1

    def said(self, token: int, tokens: Tokens, logits: Logits) -> None:
        """Record the token picked from those that `kept` returned; `logits` are theirs."""
        wide = logits.astype(np.float64)
        wide -= wide.max()
        wide /= self._temperature
        at = int(np.flatnonzero(tokens == token)[0])
        surprise = (math.log(np.exp(wide).sum()) - float(wide[at])) / math.log(2)
        self._carried.follow(self.mu - self._eta * (surprise - self._tau))
