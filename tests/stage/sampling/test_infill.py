"""The filter for text that fills a gap, compared with llama.cpp's own of the same name."""

from __future__ import annotations

import ctypes
import itertools
from typing import NamedTuple

import llama_cpp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.paths import DEMO_MODEL
from relayline.stage.sampling import infill
from relayline.stage.sampling.constraint import read_vocabulary
from relayline.stage.sampling.infill import Infill
from relayline.stage.sampling.sampler import SamplingOptions, SessionSampler
from relayline.wire.common.errors import InvalidRequestError


class Vocabulary(NamedTuple):
    """The demo model's, with the bytes of each token."""

    tokenizer: Tokenizer
    texts: LLTokenizer
    pieces: list[bytes]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    tokenizer = Tokenizer.load(DEMO_MODEL)
    found = read_vocabulary(tokenizer._vocab, tokenizer.n_vocab)
    assert found is not None
    return Vocabulary(tokenizer, found, [tokenizer.piece(token) for token in range(tokenizer.n_vocab)])


def kept_natively(tokenizer: Tokenizer, tokens: np.ndarray, logits: np.ndarray) -> list[int]:
    """Return the tokens that llama.cpp's sampler keeps."""
    candidates = (llama_cpp.llama_token_data * len(tokens))(
        *(
            llama_cpp.llama_token_data(int(token), float(logit), 0.0)
            for token, logit in zip(tokens, logits, strict=True)
        )
    )
    found = llama_cpp.llama_token_data_array(candidates, len(tokens), -1, False)
    sampler = llama_cpp.llama_sampler_init_infill(tokenizer._vocab)
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(found))
    llama_cpp.llama_sampler_free(sampler)
    return sorted(found.data[at].id for at in range(found.size))


def candidates(vocabulary: Vocabulary, seed: int, n: int, *, with_end: bool) -> np.ndarray:
    """Return tokens of which many begin alike, as those of a real step."""
    rng = np.random.default_rng(seed)
    beginning = b" " + bytes([rng.integers(ord("a"), ord("z") + 1)])
    alike = [token for token, piece in enumerate(vocabulary.pieces) if piece.startswith(beginning)]
    some = rng.permutation(np.union1d(alike[: n // 2], rng.integers(0, len(vocabulary.pieces), n)))[:n]
    ends = vocabulary.texts.eos_tokens
    texts = np.union1d(np.setdiff1d(some, ends), vocabulary.pieces.index(b" the"))
    return np.union1d(texts, ends if with_end else []).astype(np.int32)


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.sampled_from([1, 2, 3, 8, 40]),
    spread=st.sampled_from([0.3, 1.5, 4.0]),
    with_end=st.booleans(),
    end_is_behind=st.sampled_from([0.0, 6.0, 12.0]),
)
def test_it_keeps_what_llama_cpp_keeps(
    vocabulary: Vocabulary, seed: int, n: int, spread: float, with_end: bool, end_is_behind: float
) -> None:
    tokenizer, texts, _ = vocabulary
    tokens = candidates(vocabulary, seed, n, with_end=with_end)
    logits = (spread * np.random.default_rng(seed + 1).standard_normal(tokens.size)).astype(np.float32)
    logits[np.isin(tokens, texts.eos_tokens)] -= np.float32(end_is_behind)
    ours = Infill(texts).kept(tokens, logits).tolist()
    native = kept_natively(tokenizer, tokens, logits)
    if ours != native:  # one end is as good as another, and a sum in f32 may put a token on either side of an edge
        assert set(ours) <= set(texts.eos_tokens) or len(set(ours) ^ set(native)) <= 1
    if set(native) <= set(texts.eos_tokens):
        assert set(ours) <= set(texts.eos_tokens)


def test_what_begins_alike_is_one_choice(vocabulary: Vocabulary) -> None:
    pieces = {piece: token for token, piece in enumerate(vocabulary.pieces) if piece}
    pairs = itertools.permutations(pieces, 2)
    short, long = next((one, other) for one, other in pairs if other.startswith(one))
    third = next(text for text in pieces if not any(text.startswith(each[:1]) for each in (short, long)))
    tokens = np.array(sorted((pieces[short], pieces[long], pieces[third])), np.int32)
    chances = {pieces[short]: 0.3, pieces[long]: 0.15, pieces[third]: 0.55}
    logits = np.log([chances[int(token)] for token in tokens]).astype(np.float32)
    assert Infill(vocabulary.texts).kept(tokens, logits).tolist() == sorted((pieces[short], pieces[third]))


def test_it_looks_at_no_more_than_the_likeliest(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infill, "TOKENS_MAX", 2)
    tokens = candidates(vocabulary, 3, 40, with_end=False)
    logits = np.linspace(0, 0.1, tokens.size, dtype=np.float32)
    assert set(Infill(vocabulary.texts).kept(tokens, logits)) <= set(tokens[-2:])


def test_a_session_ends_where_nothing_is_sure(vocabulary: Vocabulary) -> None:
    tokenizer, texts, _ = vocabulary
    flat = np.zeros(tokenizer.n_vocab, np.float32)
    options = SamplingOptions(top_k=40, numbers={"infill": 1.0})
    sampler = SessionSampler(options, tokenizer.n_vocab, vocabulary=texts)
    assert not sampler.draws_plainly, "it is not drawn together with others"
    assert sampler.sample(flat, 5).token in texts.eos_tokens
    sure = flat.copy()
    sure[tokens := tokenizer.encode("x", add_special=False)[0]] = 30.0
    assert sampler.sample(sure, 6).token == tokens
    greedy = SessionSampler(
        SamplingOptions(temperature=0, numbers={"infill": 1.0}), tokenizer.n_vocab, vocabulary=texts
    )
    assert greedy.sample(sure, 7).token == tokens


@pytest.mark.parametrize("more", [{}, {"dynatemp_range": 0.5}, {"adaptive_target": 0.3}])
def test_an_end_that_may_not_come_does_not_come(vocabulary: Vocabulary, more: dict[str, float]) -> None:
    """Neither before `min_tokens` nor where a grammar goes on; and no state is lost with it."""
    tokenizer, texts, pieces = vocabulary
    numbers, ends = {"infill": 1.0, **more}, tuple(texts.eos_tokens)
    flat = np.zeros(tokenizer.n_vocab, np.float32)
    options = SamplingOptions(top_k=40, held_back_tokens=ends, numbers={**numbers, "held_back_until": 3.0})
    sampler = SessionSampler(options, tokenizer.n_vocab, vocabulary=texts)
    picked = [sampler.sample(flat, position) for position in range(4)]
    assert [each.token in ends for each in picked] == [False, False, False, True]
    totals = [each.mirostat_mu for each in picked if each.mirostat_mu is not None]
    assert len(totals) == 4 * ("adaptive_target" in more)
    assert np.isfinite(totals).all()
    held = SamplingOptions(grammar="start: /[xy]{3}/", numbers=numbers)
    sampler = SessionSampler(held, tokenizer.n_vocab, vocabulary=texts)
    text = b""
    while (token := sampler.sample(flat, len(text)).token) not in ends:
        text += pieces[token]
    assert len(text) == 3


def test_a_vocabulary_without_texts_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="infill: this model's vocabulary has no texts"):
        SessionSampler(SamplingOptions(numbers={"infill": 1.0}), 100)
