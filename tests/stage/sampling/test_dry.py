"""DRY is llama.cpp's, number for number: over random texts that repeat themselves, with breakers of every kind."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from llama_cpp import llama_cpp as llama

from relayline.coordinator.engine.token_sender import _options
from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.requests.bodies import CompletionBody, decode_body
from relayline.coordinator.http.requests.validation import plan_completion
from relayline.coordinator.sessions.frame import Opening
from relayline.coordinator.sessions.generation import SamplingParams
from relayline.coordinator.text.dry import breakers_of
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import write_tokenizer
from relayline.stage.sampling.dry import Dry
from relayline.stage.sampling.sampler import SamplingOptions, SessionSampler
from relayline.wire.common.errors import InvalidRequestError, ProtocolError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tok") / "tokenizer.gguf"))


class Reference:
    """llama.cpp's own sampler."""

    def __init__(self, tokenizer: Tokenizer, numbers: tuple[float, float, int, int], breakers: Sequence[str]) -> None:
        texts = (ctypes.c_char_p * len(breakers))(*(text.encode() for text in breakers))
        multiplier, base, allowed, n_latest = numbers
        self._sampler = llama.llama_sampler_init_dry(
            tokenizer._vocab, multiplier, base, allowed, n_latest, texts, len(breakers)
        )

    def apply(self, latest: Sequence[int], logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        llama.llama_sampler_reset(self._sampler)
        for token in latest:
            llama.llama_sampler_accept(self._sampler, token)
        data = (llama.llama_token_data * logits.size)()
        for token, logit in enumerate(logits.tolist()):
            data[token] = llama.llama_token_data(token, logit, 0.0)
        array = llama.llama_token_data_array(data, logits.size, -1, False)
        llama.llama_sampler_apply(self._sampler, ctypes.byref(array))
        return np.array([array.data[at].logit for at in range(logits.size)], np.float32)

    def close(self) -> None:
        llama.llama_sampler_free(self._sampler)


def text_of(random: np.random.Generator, n_tokens: int) -> list[int]:
    """A text of a few bytes with many repetitions."""
    text: list[int] = []
    letters = [ord(letter) for letter in "abc:\n*xy"]
    while len(text) < n_tokens:
        if text and random.random() < 0.6:
            begin = int(random.integers(len(text)))
            text += text[begin : begin + int(random.integers(1, 12))]
        else:
            text.append(int(random.choice(letters)))
    return text[:n_tokens]


USUAL, LONG = ("\n", ":", '"', "*"), ("ab", "xy:", "cab", "y")


@pytest.mark.parametrize("breakers", [(), USUAL, LONG], ids=["none", "usual", "long"])
def test_it_is_llama_cpps(tokenizer: Tokenizer, breakers: tuple[str, ...]) -> None:
    random = np.random.default_rng(len(breakers) + 7)
    n_changed = 0
    for trial in range(60):
        allowed, n_latest = int(random.integers(0, 5)), int(random.choice([3, 16, 64, 400]))
        multiplier, base = np.float32(random.uniform(0.1, 3)), np.float32(random.choice([1.0, 1.75, 4.0]))
        numbers = (float(multiplier), float(base), allowed)
        reference = Reference(tokenizer, (*numbers, n_latest), breakers)
        found = breakers_of(tokenizer, breakers)
        dry = Dry.of((*numbers, n_latest), found.whole, found.sequences, tokenizer.n_vocab)
        for n_tokens in (1, 7, 90 + trial):
            text = text_of(random, n_tokens)
            logits = random.standard_normal(tokenizer.n_vocab).astype(np.float32)
            ours = logits.copy()
            dry.apply(ours, text)
            assert np.array_equal(ours, reference.apply(text, logits))
            n_changed += not np.array_equal(ours, logits)
        reference.close()
    assert n_changed > 40


def test_a_text_that_repeats_itself_breaks_off(tokenizer: Tokenizer) -> None:
    """Over the prompt and the answer together; also if a session is opened again in the middle of its answer."""
    text = [ord(letter) for letter in "abcdefg" * 3]
    logits = np.zeros(tokenizer.n_vocab, np.float32)
    logits[ord("a")] = 1.0  # the next token of a repetition
    logits[ord("z")] = 0.5
    options = SamplingOptions(temperature=0, numbers={"dry_multiplier": 0.8, "dry_penalty_last_n": 64})
    for n_said in (0, 5):
        said, read = text[len(text) - n_said :], text[: len(text) - n_said]
        sampler = SessionSampler(options, tokenizer.n_vocab, said, None, read)
        assert sampler.sample(logits, len(text)).token == ord("z")
    broken = SamplingOptions(temperature=0, numbers={"dry_multiplier": 0.8}, dry_breakers=(ord("g"),))
    assert SessionSampler(broken, tokenizer.n_vocab, (), None, text).sample(logits, len(text)).token == ord("a")
    with pytest.raises(ProtocolError):
        SessionSampler(SamplingOptions(numbers={"dry_multiplier": 1.0}, dry_breakers=(99_999,)), tokenizer.n_vocab)


def test_a_bodys_fields_reach_the_stage(tokenizer: Tokenizer) -> None:
    raw = b'{"prompt": "x", "dry_multiplier": 0.8, "dry_allowed_length": 3, "dry_sequence_breakers": ["a", "bc"]}'
    plan = plan_completion(decode_body(raw, CompletionBody), HttpLimits(), 1)
    assert plan.dry_texts == ("a", "bc")
    numbers = dict(plan.sampling.numbers)
    assert numbers == {"dry_multiplier": 0.8, "dry_allowed_length": 3, "dry_penalty_last_n": 64}
    assert plan.sampling.looks_at_prompt
    found = breakers_of(tokenizer, plan.dry_texts)
    assert ord("a") in found.whole
    assert (ord("b"), ord("c")) in found.sequences
    sampling = SamplingParams(numbers=plan.sampling.numbers, dry_breakers=found.whole, dry_sequences=found.sequences)
    options = _options(Opening(sampling), "")
    assert list(np.cumsum(options.dry_breaker_steps)) == list(found.whole)
    assert [tuple(each.tokens) for each in options.dry_sequences] == list(found.sequences)
    without = plan_completion(decode_body(b'{"prompt": "x", "dry_base": 3}', CompletionBody), HttpLimits(), 1)
    assert (without.sampling.numbers, without.dry_texts) == ((), ())


def test_too_many_breakers_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="at most 64, got 65"):
        breakers_of(tokenizer, ["a"] * 65)
