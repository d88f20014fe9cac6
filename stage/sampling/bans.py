"""The tokens that a session may not generate at a position, whatever their logits are. Pure.

There are three rules, each a list of tokens. Only the allowed tokens. No token that is held back before a position (the
end of an answer with min_tokens). Not the last token of a bad word, if the rest of it has just been generated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from relayline.wire.common.bounds import SAMPLER_TOKENS_MAX
from relayline.wire.common.errors import ProtocolError

_NOTHING = np.float32(-np.inf)


class Bans:
    """The bans of one session."""

    def __init__(
        self,
        n_vocab: int,
        allowed: Sequence[int] = (),
        held_back: Sequence[int] = (),
        held_back_until: int = 0,
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        """`allowed`: empty allows all. Raises ProtocolError for tokens outside the vocabulary, or too many."""
        in_words = [token for word in bad_words for token in word]
        if max(len(allowed), len(held_back), len(in_words)) > SAMPLER_TOKENS_MAX or not all(bad_words):
            raise ProtocolError("a session's lists of tokens are too long, or a bad word is empty")
        if max((*allowed, *held_back, *in_words), default=0) >= n_vocab:
            raise ProtocolError(f"a list of tokens has one outside the vocabulary of {n_vocab}")
        self._allowed = np.array(sorted(set(allowed)), np.int64)
        self._held_back, self._until = np.array(held_back, np.int64), held_back_until
        self._words = [tuple(word) for word in bad_words]

    @property
    def looks_back(self) -> int:
        """How many of the latest tokens `apply` looks at."""
        return max((len(word) - 1 for word in self._words), default=0)

    def apply(self, logits: npt.NDArray[np.float32], position: int, latest: Sequence[int]) -> None:
        """Set the `logits` (f32 [n_vocab]) of tokens that may not be said at `position` to -inf.

        `latest` are the session's own tokens before it, at least the last `looks_back` ones.
        """
        if self._allowed.size:
            kept = logits[self._allowed]
            logits.fill(_NOTHING)
            logits[self._allowed] = kept
        if position < self._until:
            logits[self._held_back] = _NOTHING
        for word in self._words:
            n_before = len(word) - 1
            if n_before <= len(latest) and tuple(latest[len(latest) - n_before :]) == word[:-1]:
                logits[word[-1]] = _NOTHING
