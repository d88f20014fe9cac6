"""Finds the tokens that hold a sequence breaker of DRY, or begin one: llama.cpp's `get_overlapping_token_sequences`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.bounds import DRY_BREAKERS_MAX, SAMPLER_TOKENS_MAX
from relayline.wire.common.errors import InvalidRequestError

TEXT_BYTES_MAX = 40  # of one breaker; llama.cpp cuts it here
TAIL_MAX = 20  # tokens behind the one in which a breaker begins
TEXTS_MAX = 64


class Breakers(NamedTuple):
    """Sequence breakers as tokens."""

    whole: tuple[int, ...]  # tokens with one in them, ascending
    sequences: tuple[tuple[int, ...], ...]  # a token that one begins in, and the tokens of its rest


def breakers_of(tokenizer: Tokenizer, texts: Sequence[str]) -> Breakers:
    """Return the tokens of these breakers. Raises InvalidRequestError where they are too many."""
    if len(texts) > TEXTS_MAX:
        raise _too_many(f"at most {TEXTS_MAX}, got {len(texts)}")
    whole: set[int] = set()
    sequences: dict[tuple[int, ...], None] = {}
    for text in texts:
        raw = text.encode(errors="replace")[:TEXT_BYTES_MAX]
        if not raw:
            continue
        for token, word in enumerate(tokenizer.words):
            if raw in word:
                whole.add(token)
            elif raw[0] in word:
                for tail in _tails(tokenizer, word, raw):
                    sequences[token, *tail] = None
    if len(whole) > DRY_BREAKERS_MAX:
        raise _too_many(f"{len(whole)} tokens of this vocabulary hold one, at most {DRY_BREAKERS_MAX}; send fewer")
    n_tokens = sum(map(len, sequences))
    if n_tokens > SAMPLER_TOKENS_MAX:
        raise _too_many(f"their beginnings and rests are {n_tokens} tokens, at most {SAMPLER_TOKENS_MAX}; send fewer")
    return Breakers(tuple(sorted(whole)), tuple(sequences))


def _tails(tokenizer: Tokenizer, word: bytes, raw: bytes) -> list[list[int]]:
    """Return the rests of a breaker that begins in a word and does not end there, as tokens."""
    found = []
    for at in range(len(word)):
        n_here = len(word) - at
        if n_here < len(raw) and word[at:] == raw[:n_here]:
            found.append(tokenizer.encode_bytes(raw[n_here:])[:TAIL_MAX])
    return found


def _too_many(text: str) -> InvalidRequestError:
    return InvalidRequestError.of_field("dry_sequence_breakers", text)
