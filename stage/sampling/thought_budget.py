"""A bound for the thoughts of an answer: behind so many tokens they are ended. Pure.

As llama.cpp's reasoning budget: each block of thoughts has the whole budget. Behind it come the last words, token by
token whatever the logits are, and they end with the mark that ends thoughts. Where the budget ends within a character,
the character is completed first. Where the answer's grammar forbids a last word, it and those behind it are not
said: a text in such an answer may name the mark that begins thoughts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from relayline.wire.common.thoughts import ThoughtMarks, Thoughts

_NOTHING = np.float32(-np.inf)
CHARACTER_BYTES_MAX = 4  # of UTF-8, hence tokens that one may take
BytesOf = Callable[[Sequence[int]], bytes]


class ThoughtBudget:
    """The bound of one session."""

    def __init__(
        self, marks: ThoughtMarks, n_tokens_max: int, begun_at: int | None = None, bytes_of: BytesOf | None = None
    ) -> None:
        """`begun_at`: position of the first token of thoughts that are under way. `bytes_of`: the bytes of tokens."""
        self._thoughts, self._last_words = Thoughts(marks, begun_at), (*marks.last_words, *marks.end)
        self._n_tokens_max, self._bytes_of = n_tokens_max, bytes_of

    def apply(self, logits: npt.NDArray[np.float32], position: int, said: Sequence[int]) -> bool:
        """Leave the `logits` (f32 [n_vocab]) of one token alone where thoughts at `position` are too long.

        `said` are the answer's tokens before it, at least the latest ones. Returns whether one was left alone.
        """
        self._thoughts.go_to(position)
        begun_at = self._thoughts.begun_at
        if begun_at is None or position < begun_at + self._n_tokens_max:
            return False
        n_over = position - begun_at - self._n_tokens_max
        at = n_over - self._n_completing(said, n_over)
        if not 0 <= at < len(self._last_words) or tuple(said[len(said) - at :]) != self._last_words[:at]:
            return False
        logits.fill(_NOTHING)
        logits[self._last_words[at]] = 0.0
        return True

    def said(self, said: Sequence[int], position: int) -> None:
        """Record that `said` ends with the token picked for the place before `position`."""
        self._thoughts.said(said, position)

    def _n_completing(self, said: Sequence[int], n_over: int) -> int:
        """Return how many tokens behind the budget complete a character: at most the n_over ones, or one more than
        these where it goes on.
        """
        if self._bytes_of is None or n_over > len(said):
            return 0
        for n_more in range(min(CHARACTER_BYTES_MAX - 1, n_over + 1)):
            n_until = len(said) - n_over + n_more  # tokens before the last words, if they begin there
            if not _ends_within(self._bytes_of(said[max(0, n_until - CHARACTER_BYTES_MAX) : n_until])):
                return n_more
        return min(CHARACTER_BYTES_MAX - 1, n_over + 1)


def _ends_within(text: bytes) -> bool:
    """Return whether bytes end within a character of UTF-8."""
    for n_back, byte in enumerate(reversed(text[-CHARACTER_BYTES_MAX:]), 1):
        if byte & 0xC0 == 0x80:
            continue
        n_bytes = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return n_bytes > n_back
    return False
