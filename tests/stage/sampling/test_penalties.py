"""Penalties and biases: a plain definition compared with a stage's tokens, also sampled again and after a loss."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Sequence

import numpy as np
import pytest

from relayline.coordinator.engine.token_sender import _options
from relayline.coordinator.sessions.generation import SamplingParams
from relayline.coordinator.sessions.session import OutFrame, Session
from relayline.deploy.testing.reference import ReferenceModel
from relayline.stage.sampling.penalties import Penalties, Repetition, biases_of
from relayline.stage.sampling.sampler import SamplingOptions, SessionSampler
from relayline.wire.common import bounds
from relayline.wire.common.errors import InternalError, ProtocolError
from relayline.wire.envelopes.frames import Flag
from tests.support.fleet import (
    NEAR_TIE,
    Artifacts,
    artifacts_fixture,
    fleet,
    logits_along,
    prompt_of,
    read,
    request,
    tokens_of,
    whole_fixture,
)

FIXTURES = (artifacts_fixture, whole_fixture)  # pytest finds them in the modules that name them
N_VOCAB = 60
PENALISED = SamplingParams(0.0, frequency_penalty=0.7, presence_penalty=1.5, logit_bias=((3, 4.0), (9, -100.0)))


def plainly(logits: np.ndarray, said: Sequence[int], sampling: SamplingParams) -> np.ndarray:
    changed = logits.astype(np.float64).copy()
    for token, bias in sampling.logit_bias:
        changed[token] += bias
    for token, n_times in collections.Counter(said[-bounds.PENALTY_TOKENS_MAX :]).items():
        changed[token] -= n_times * sampling.frequency_penalty + sampling.presence_penalty
    return changed


def sampler_of(sampling: SamplingParams, said: Sequence[int] = ()) -> SessionSampler:
    options = SamplingOptions(
        temperature=sampling.temperature,
        seed=sampling.seed,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=sampling.logit_bias,
    )
    return SessionSampler(options, N_VOCAB, said)


def logits_at(position: int) -> np.ndarray:
    return np.random.default_rng(position).standard_normal(N_VOCAB).astype(np.float32) * 2


@pytest.mark.parametrize("sampling", [PENALISED, SamplingParams(0.0, frequency_penalty=-0.4)])
def test_each_pick_is_that_of_the_definition(sampling: SamplingParams) -> None:
    sampler, said = sampler_of(sampling), list[int]()
    flat = np.zeros(N_VOCAB, np.float32)
    flat[5] = 1.0
    for position in range(20, 80):
        logits = logits_at(position) if position % 2 else flat
        before = logits.copy()
        said.append(sampler.sample(logits, position).token)
        assert said[-1] == int(plainly(logits, said[:-1], sampling).argmax())
        np.testing.assert_array_equal(logits, before)
    assert len(set(said)) > 5


def test_only_the_latest_tokens_count() -> None:
    n_said = bounds.PENALTY_TOKENS_MAX
    sampling = SamplingParams(0.0, presence_penalty=2.0)
    first, rest = np.zeros(N_VOCAB, np.float32), np.zeros(N_VOCAB, np.float32)
    first[7], rest[8] = 1.0, 50.0
    sampler = sampler_of(sampling)
    assert sampler.sample(first, 0).token == 7
    for position in range(1, n_said):
        assert sampler.sample(rest, position).token == 8
    assert sampler.sample(first, n_said).token != 7, "generated so many tokens ago"
    sampler = sampler_of(sampling)
    assert sampler.sample(first, 0).token == 7
    for position in range(1, 2 * n_said + 1):
        assert sampler.sample(rest, position).token == 8
    assert sampler.sample(first, 2 * n_said + 1).token == 7, "too long ago"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_session_opened_elsewhere_resumes_its_penalties(temperature: float) -> None:
    sampling = SamplingParams(temperature, seed=5, frequency_penalty=1.0, presence_penalty=0.5)
    straight = sampler_of(sampling)
    tokens = [straight.sample(logits_at(position % 7), position).token for position in range(10, 60)]
    again = sampler_of(sampling, tokens[:25])
    assert [again.sample(logits_at(position % 7), position).token for position in range(35, 60)] == tokens[25:]
    without = sampler_of(sampling)
    assert [without.sample(logits_at(position % 7), position).token for position in range(35, 60)] != tokens[25:]


def test_a_position_picked_again_is_picked_alike() -> None:
    sampler = sampler_of(PENALISED)
    tokens = [sampler.sample(logits_at(position % 5), position).token for position in range(10, 40)]
    assert [sampler.sample(logits_at(position % 5), position).token for position in range(22, 40)] == tokens[12:]
    assert [sampler.sample(logits_at(position % 5), position).token for position in range(10, 40)] == tokens
    with pytest.raises(InternalError, match="position 42 was sampled out of order: 2 tokens before it are missing"):
        sampler.sample(logits_at(1), 42)


def test_log_probabilities_are_those_of_the_model() -> None:
    options = SamplingOptions(temperature=0.0, n_logprobs=1, presence_penalty=2.0, logit_bias=((4, 100.0),))
    plain = SessionSampler(SamplingOptions(temperature=0.0, n_logprobs=1), N_VOCAB).sample(logits_at(1), 0)
    sampled = SessionSampler(options, N_VOCAB).sample(logits_at(1), 0)
    assert sampled.token == 4
    assert sampled.top == plain.top
    assert sampled.logprob is not None
    assert plain.logprob is not None
    assert sampled.logprob < plain.logprob


@pytest.mark.parametrize(
    ("said", "biases"),
    [([N_VOCAB], []), ([], [(N_VOCAB, 1.0)]), ([1] * (bounds.PENALTY_TOKENS_MAX + 1), []), ([], [(1, 1.0)] * 301)],
)
def test_invalid_options_are_refused(said: list[int], biases: list[tuple[int, float]]) -> None:
    with pytest.raises(ProtocolError):
        Penalties(1.0, 0.0, biases, said, N_VOCAB)


@pytest.mark.parametrize(
    "wrong",
    [
        {"frequency_penalty": 2.1}, {"presence_penalty": float("nan")}, {"logit_bias": ((1, 101.0),)},
        {"logit_bias": ((1, float("nan")),)},
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        SamplingOptions(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="1 logit biases came for 2 tokens"):
        biases_of([1, 2], [0.5])


def session_of(sampling: SamplingParams) -> Session:
    return Session(7, request((1, 2, 3), 9, sampling), lambda _: False)


def test_a_session_opens_with_the_latest_that_it_has_said_where_that_matters() -> None:
    for sampling, expected in ((PENALISED, [50, 51]), (SamplingParams(0.0, logit_bias=((3, 4.0),)), [])):
        session = session_of(sampling)
        session.start()
        session.next_chunk(9)
        session.sampled(3, 50)
        session.sampled(4, 51)
        opening = session.start()[0].leave().opening
        session.next_chunk(9)
        session.sampled(5, 52)  # an answer from before, which comes while the open waits for credit
        options = _options(opening, "")
        assert list(options.said) == expected
        assert list(options.bias_tokens) == [token for token, _ in sampling.logit_bias]
    session.history += [1 << 20] * 5_000
    session.start()
    session.request = request((1,), 9, SamplingParams(presence_penalty=1.0, logit_bias=((1 << 20, 1.0),) * 300))
    options = _options(OutFrame(session, 0, (), Flag.OPEN).leave().opening, "")
    assert len(options.said) == bounds.PENALTY_TOKENS_MAX
    assert options.ByteSize() <= bounds.PLAIN_OPTIONS_BYTES_MAX


def test_an_answer_from_before_a_replay_is_sampled_again_with_the_earlier_tokens() -> None:
    """Else the stage would not know of one token that counts."""
    for sampling, is_taken in ((PENALISED, False), (SamplingParams(0.0), True)):
        session = session_of(sampling)
        session.start()
        session.next_chunk(9)
        session.start()
        event, _ = session.sampled(3, 50)
        assert (event is not None) == is_taken


def assert_penalised(
    whole: ReferenceModel, prompt: tuple[int, ...], tokens: list[int], near_tie: float = NEAR_TIE
) -> None:
    for at, logits in enumerate(logits_along(whole, prompt, tokens)):
        changed = plainly(logits, tokens[:at], PENALISED)
        assert changed.max() - changed[tokens[at]] <= near_tie, f"token {at}"


@pytest.mark.parametrize("cuts", [[2], [1, 3]])
async def test_penalised_streams_are_the_unsplit_models_also_after_a_loss(
    cuts: list[int], artifacts: Artifacts, whole: ReferenceModel
) -> None:
    prompts = [prompt_of(60 + index, 10 + index) for index in range(3)]
    plain = prompt_of(70, 12)
    async with fleet(artifacts(cuts)) as running:
        streams = [running.pipeline.open(request(prompt, 60, PENALISED)) for prompt in prompts]
        greedy = running.pipeline.open(request(plain, 60))
        said = await asyncio.gather(*(read(stream, 10 + 5 * index) for index, stream in enumerate(streams)))
        await running.lose(len(cuts))
        await running.start(len(cuts))
        rest = await asyncio.gather(*map(tokens_of, streams))
        unpenalised = await tokens_of(greedy)
    outputs = [before + after for before, after in zip(said, rest, strict=True)]
    for prompt, tokens in zip(prompts, outputs, strict=True):
        assert len(tokens) == 60
        assert_penalised(whole, prompt, tokens)
        assert 9 not in tokens
        assert len(set(tokens)) > len(set(unpenalised)), "they repeat themselves less"


@pytest.mark.parametrize(
    ("repetition", "is_neutral"), [(Repetition(), True), (Repetition(1.5), False), (Repetition(1.5, n_latest=0), True)]
)
def test_a_repetition_penalty_over_no_tokens_changes_nothing(repetition: Repetition, is_neutral: bool) -> None:
    assert repetition.is_neutral == is_neutral
