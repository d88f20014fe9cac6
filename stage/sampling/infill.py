"""The filter for text that fills a gap: llama.cpp's `infill`, for use behind top-k and top-p.

It ends the answer unless going on is much likelier, and otherwise keeps the tokens about which the model is sure. A
token that begins with another one counts as the same choice: the likelier of the two stays, with the chances of both.
It keeps what llama.cpp's sampler of that name keeps (`llama_sampler_infill_apply`). Where the answer may not end, the
sampler keeps all that the other filters leave (`stage.sampling.sampler`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer

from relayline.wire.common.errors import InvalidRequestError

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]
TOKENS_MAX = 256  # the likeliest ones; each is compared with each, and llama-server's default top-k is 40
END_FACTOR = 3.0  # an end counts so much more, for each token that there is
SURE = 0.2  # the chance that a token needs to stay


class _Choice(NamedTuple):
    token: int
    chance: float
    is_end: bool


class Infill:
    """The filter for one vocabulary. Decode thread only."""

    def __init__(self, vocabulary: LLTokenizer | None) -> None:
        """Raise InvalidRequestError for a vocabulary without texts."""
        if vocabulary is None:
            raise InvalidRequestError("infill: this model's vocabulary has no texts or no end token; send none")
        self._vocabulary, self._ends = vocabulary, frozenset(vocabulary.eos_tokens)

    def kept(self, tokens: Tokens, logits: Logits) -> Tokens:
        """Return those that are kept of some tokens with these logits, ascending; at least one, perhaps another end."""
        order = np.argsort(-logits, kind="stable")[:TOKENS_MAX]
        weights = np.exp(logits[order].astype(np.float64) - float(logits.max()))
        chances = weights / weights.sum()
        choices = [
            _Choice(int(token), float(chance), int(token) in self._ends)
            for token, chance in zip(tokens[order], chances, strict=True)
        ]
        ends = [choice for choice in choices if choice.is_end]
        p_end = sum(choice.chance for choice in ends)
        if END_FACTOR * p_end * len(choices) > 1.0 - p_end:
            return _tokens(ends)
        merged = self._merged(choices)
        sure = [choice for choice in merged if choice.is_end or choice.chance >= SURE]
        n_texts = sum(not choice.is_end for choice in sure)
        if not n_texts:
            return _tokens(ends[:1]) if ends else np.array([self._vocabulary.eos_token], np.int32)
        total, least = sum(choice.chance for choice in sure), 1.0 / (n_texts + 1)
        return _tokens([choice for choice in sure if choice.is_end or choice.chance / total >= least])

    def _merged(self, choices: list[_Choice]) -> list[_Choice]:
        """Return the choices without those that are the beginning of another one, or begin with it."""
        texts = [self._text(choice.token) for choice in choices]
        chances: list[float | None] = [choice.chance for choice in choices]  # None: merged into another one
        for one, beginning in enumerate(texts):
            for other, text in enumerate(texts):
                mine, theirs = chances[one], chances[other]
                if mine is None:
                    break
                if one == other or theirs is None or not beginning or not text.startswith(beginning):
                    continue
                winner, loser = (other, one) if theirs > mine else (one, other)
                chances[winner], chances[loser] = mine + theirs, None
        left = zip(choices, chances, strict=True)
        return [choice._replace(chance=chance) for choice, chance in left if chance is not None]

    def _text(self, token: int) -> bytes:
        return b"" if self._vocabulary.is_special_token(token) else self._vocabulary.decode_bytes([token])


def _tokens(choices: list[_Choice]) -> Tokens:
    return np.array(sorted(choice.token for choice in choices), np.int32)
