"""DRY ("don't repeat yourself"): a token that would continue a repetition of earlier text is penalised, more for a
longer repetition.

The same as llama.cpp's sampler of this name, number for number (`llama_sampler_dry_apply`). Among the latest tokens,
the prompt's included, it finds places whose text ends like the present text. The token that followed there is penalised
by multiplier x base ^ (length - allowed length). No repetition crosses a sequence breaker. Pure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from relayline.wire.common.errors import ProtocolError

_FLOAT_MAX_LOG = np.float32(88.7228391)  # of the largest float; what llama.cpp clamps exponents by
_BASE_MIN = np.float32(1.000001)


@dataclasses.dataclass(frozen=True, slots=True)
class Dry:
    """The settings of one session."""

    multiplier: float
    base: float
    allowed_length: int
    n_latest: int  # tokens that are looked at
    breakers: frozenset[int]  # tokens that break a repetition
    sequences: dict[int, tuple[tuple[int, ...], ...]]  # and those that do where these others follow

    @classmethod
    def of(
        cls,
        numbers: tuple[float, float, float, float],
        breakers: Sequence[int],
        sequences: Sequence[Sequence[int]],
        n_vocab: int,
    ) -> Dry:
        """`numbers`: multiplier, base, allowed length, tokens. Raises ProtocolError for tokens of no vocabulary."""
        if max((*breakers, *(token for each in sequences for token in each)), default=0) >= n_vocab:
            raise ProtocolError(f"a sequence breaker is outside the vocabulary of {n_vocab} tokens")
        tails: dict[int, tuple[tuple[int, ...], ...]] = {}
        for head, *tail in sequences:
            tails[head] = (*tails.get(head, ()), tuple(tail))
        multiplier, base, allowed, n_latest = numbers
        return cls(multiplier, base, int(allowed), int(n_latest), frozenset(breakers), tails)

    def apply(self, out: npt.NDArray[np.float32], latest: Sequence[int]) -> None:
        """Take off `out` (f32 [n_vocab]) what repeating `latest`, the newest last, costs. At most `n_latest` count."""
        newest_first = list(latest[-self.n_latest :])[::-1]
        if len(newest_first) <= self.allowed_length:
            return
        limit = self._limit(newest_first)
        if limit < self.allowed_length:
            return
        longest: dict[int, int] = {}
        for at, length in enumerate(_lengths(newest_first)):
            if at and min(length, limit) >= self.allowed_length:
                token = newest_first[at - 1]
                longest[token] = max(longest.get(token, 0), min(length, limit))
        base = np.float32(self.base)
        exponent_max = int(_FLOAT_MAX_LOG / np.log(base)) if base > _BASE_MIN else 0
        for token, length in longest.items():
            if token not in self.breakers:
                exponent = length - self.allowed_length
                exponent = min(exponent, exponent_max) if exponent_max else exponent
                out[token] -= np.float32(float(np.float32(self.multiplier)) * math.pow(float(base), exponent))

    def _limit(self, newest_first: Sequence[int]) -> int:
        """Return how long a repetition may be: up to the latest sequence breaker."""
        for at, token in enumerate(newest_first):
            found = 0 if token in self.breakers else -1
            for tail in self.sequences.get(token, ()):
                n_tail = len(tail)
                if found < n_tail <= at and all(newest_first[at - 1 - i] == tail[i] for i in range(n_tail)):
                    found = n_tail
            if found >= 0:
                return at - found
        return len(newest_first)


def _lengths(text: Sequence[int]) -> list[int]:
    """Return for each place the length of the text's beginning that is found there (the Z-algorithm)."""
    n, left, right = len(text), 0, 0
    lengths = [n] * n
    for at in range(1, n):
        length = min(right - at, lengths[at - left]) if at < right else 0
        while at + length < n and text[length] == text[at + length]:
            length += 1
        lengths[at] = length
        if at + length > right:
            left, right = at, at + length
    return lengths
