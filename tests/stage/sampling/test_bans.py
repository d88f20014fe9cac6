"""Repetition penalty and bans: plain definitions, compared with a stage's tokens, also from the middle of an answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayline.stage.sampling.bans import Bans
from relayline.stage.sampling.sampler import SamplingOptions, SessionSampler
from relayline.wire.common import bounds
from relayline.wire.common.errors import ProtocolError

N_VOCAB = 12
TOKENS = st.integers(0, N_VOCAB - 1)


def plainly(logits: np.ndarray, read: Sequence[int], said: list[int], options: SamplingOptions, position: int) -> int:
    changed = logits.astype(np.float64)
    n_latest = int(options.number("repeat_last_n"))
    for token in {*[*read, *said][max(0, len(read) + len(said) - n_latest) :]} if n_latest else ():
        penalty = options.number("repetition_penalty")
        changed[token] = changed[token] / penalty if changed[token] > 0 else changed[token] * penalty
    for token in range(N_VOCAB):
        is_out = bool(options.allowed_tokens) and token not in options.allowed_tokens
        is_early = token in options.held_back_tokens and position < options.number("held_back_until")
        is_bad = any(
            word[-1] == token and tuple(said[max(0, len(said) - len(word) + 1) :]) == word[:-1] if len(word) > 1 else
            word[-1] == token
            for word in options.bad_words
        )  # fmt: skip
        if is_out or is_early or is_bad:
            changed[token] = -np.inf
    return int(changed.argmax())


@settings(max_examples=150)
@given(
    read=st.lists(TOKENS, max_size=8),
    penalty=st.sampled_from([1.0, 1.3, 3.0, 0.5]),
    n_latest=st.sampled_from([0, 1, 5, bounds.PENALTY_TOKENS_MAX]),
    allowed=st.one_of(st.just([]), st.lists(TOKENS, min_size=9, max_size=12)),
    held_back=st.lists(TOKENS, max_size=2),
    bad_words=st.lists(st.lists(TOKENS, min_size=2, max_size=3), max_size=4),
    seed=st.integers(0, 1000),
    cut=st.integers(1, 29),
)
def test_each_pick_is_that_of_the_definition(
    read: list[int], penalty: float, n_latest: int, allowed: list[int], held_back: list[int],
    bad_words: list[list[int]], seed: int, cut: int,
) -> None:  # fmt: skip
    numbers = {"repetition_penalty": penalty, "repeat_last_n": n_latest, "held_back_until": 15.0}
    options = SamplingOptions(
        temperature=0.0,
        numbers=numbers,
        allowed_tokens=tuple(allowed),
        held_back_tokens=tuple(held_back),
        bad_words=tuple(map(tuple, bad_words)),
    )
    if len({*allowed, *range(N_VOCAB * (not allowed))} - {*held_back} - {word[-1] for word in bad_words}) == 0:
        return  # nothing might be left
    rows = np.random.default_rng(seed).standard_normal((30, N_VOCAB)).astype(np.float32)
    said: list[int] = []
    sampler = SessionSampler(options, N_VOCAB, read=read)
    for at, logits in enumerate(rows):
        token = sampler.sample(logits, 5 + at).token
        assert token == plainly(logits, read, said, options, 5 + at)
        said.append(token)
    again = SessionSampler(options, N_VOCAB, said[:cut], read=read)
    assert [again.sample(rows[at], 5 + at).token for at in range(cut, 30)] == said[cut:]


def test_a_bad_word_of_one_token_is_never_said() -> None:
    sampler = SessionSampler(SamplingOptions(temperature=0.0, bad_words=((4,),)), N_VOCAB)
    logits = np.zeros(N_VOCAB, np.float32)
    logits[4], logits[6] = 9.0, 1.0
    assert [sampler.sample(logits, position).token for position in range(3)] == [6, 6, 6]


@pytest.mark.parametrize(
    "lists",
    [
        {"allowed": [N_VOCAB]},
        {"held_back": [N_VOCAB]},
        {"bad_words": [[1], [N_VOCAB]]},
        {"bad_words": [[]]},
        {"allowed": [1] * (bounds.SAMPLER_TOKENS_MAX + 1)},
    ],
)
def test_invalid_bans_are_refused(lists: dict[str, list[int]]) -> None:
    with pytest.raises(ProtocolError):
        Bans(N_VOCAB, **lists)  # type: ignore[arg-type]
