"""Rows of a step that are drawn together give what each row's own sampler gives, answers and faults."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayline.stage.sampling import rows as sampling_rows
from relayline.stage.sampling.draws import BLOCKS_FROM, Draws, noise_keys
from relayline.stage.sampling.noise import PREPARED_MAX, ROWS, Noise
from relayline.stage.sampling.rows import Ask, prepare_noise, sample_rows
from relayline.stage.sampling.sampler import SamplingOptions, SessionSampler
from relayline.stage.sampling.together import DrawsTogether
from relayline.wire.common.errors import InternalError, NumericError, RelaylineError
from tests.support.drawn_rows import FILTERS, LOGITS, logits_of

SMALL, WHOLE, RAGGED = 700, BLOCKS_FROM + 64, BLOCKS_FROM + 101


def alone(asks: list[Ask]) -> list[object]:
    """The results of new samplers with the same options."""
    found: list[object] = []
    for sampler, logits, position in asks:
        try:
            found.append(SessionSampler(sampler.options, logits.size).sample(logits, position))
        except RelaylineError as error:
            found.append(repr(error))
    return found


def comparable(answers: list[object]) -> list[object]:
    return [repr(each) if isinstance(each, RelaylineError) else each for each in answers]


OPTIONS = st.builds(
    SamplingOptions,
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0, 1e6]),
    top_k=st.sampled_from([0, 0, 0, 1, 40, 600, 5_000]),
    n_logprobs=st.sampled_from([-1, -1, 2]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    logit_bias=st.sampled_from([(), (), ((5, 9.0), (6, -100.0))]),
    numbers=st.sampled_from(
        [{}, {}, {"typical_p": 0.8}, {"dynatemp_range": 0.5}, {"mirostat": 2, "mirostat_tau": 5.0, "mirostat_eta": 0.1}]
    ),
    allowed_tokens=st.sampled_from([(), (), (), (3, 7, 699)]),
    **FILTERS,
)


@settings(max_examples=120)
@given(
    n_vocab=st.sampled_from([SMALL, WHOLE, RAGGED]),
    options=st.lists(OPTIONS, min_size=1, max_size=6),
    n_rows=st.integers(1, 2 * ROWS + 3),
    is_prepared=st.booleans(),
    **LOGITS,
)
def test_any_rows_say_what_each_says_alone(
    n_vocab: int,
    options: list[SamplingOptions],
    n_rows: int,
    seed: int,
    spread: float,
    step: float,
    lead: float,
    is_prepared: bool,
) -> None:
    asks = [
        Ask(
            SessionSampler(options[row % len(options)], n_vocab),
            logits_of(seed + row, n_vocab, spread, step, lead),
            seed + row // 2,
        )
        for row in range(n_rows)
    ]
    if is_prepared:  # in another order, and not for all
        prepare_noise(n_vocab, [(ask.sampler, ask.position) for ask in asks[::-2]])
    assert comparable(list(sample_rows(asks))) == alone(asks)


@pytest.mark.parametrize("n_vocab", [SMALL, RAGGED])
def test_streams_with_penalties_remember_what_they_said_together(n_vocab: int) -> None:
    options = [
        SamplingOptions(seed=row, top_p=0.9, frequency_penalty=0.4 * (row % 3), presence_penalty=0.3 * (row % 2))
        for row in range(ROWS + 2)
    ]
    together, one_by_one = ([SessionSampler(each, n_vocab) for each in options] for _ in range(2))
    for position in range(6):
        rows = [logits_of(position * 100 + row, n_vocab, 2.0) for row in range(len(options))]
        pairs = list(zip(together, rows, strict=True))
        answers = sample_rows([Ask(sampler, logits, position) for sampler, logits in pairs])
        assert answers == [s.sample(row, position) for s, row in zip(one_by_one, rows, strict=True)]
    assert [sampler.last for sampler in together] == [sampler.last for sampler in one_by_one]


def test_a_row_that_fails_is_the_only_one() -> None:
    plain = SamplingOptions(seed=4, top_p=0.9)
    nothing_left = dataclasses.replace(plain, allowed_tokens=(7,))
    asks = [Ask(SessionSampler(plain, RAGGED), logits_of(row, RAGGED, 2.0), 9) for row in range(7)]
    asks[1].logits[17] = np.nan
    asks[2].logits[18] = np.inf
    asks[3].logits[:] = -np.inf
    asks[4] = Ask(SessionSampler(nothing_left, RAGGED), asks[4].logits, 9)
    asks[4].logits[7] = -np.inf
    asks[5].sampler.close()
    answers = sample_rows(asks)
    assert [isinstance(each, RelaylineError) for each in answers] == [False, True, True, True, True, True, False]
    assert all(isinstance(each, NumericError) for each in answers[1:5])
    assert "no token allowed" in str(answers[4])
    assert "closed" in str(answers[5])
    assert [ask.sampler.last is None for ask in asks] == [False, True, True, True, True, True, False]
    assert [answers[0], answers[6]] == alone([asks[0], asks[6]])


def test_rows_that_draw_plainly_share_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[int] = []
    draw = DrawsTogether.draw
    monkeypatch.setattr(DrawsTogether, "draw", lambda draws: groups.append(len(draws._rows)) or draw(draws))
    monkeypatch.setattr(SessionSampler, "sample", lambda sampler, *_: pytest.fail(f"{sampler.options} went alone"))
    kinds = [SamplingOptions(seed=1), SamplingOptions(top_p=0.9), SamplingOptions(frequency_penalty=1.0, n_logprobs=1)]
    asks = [Ask(SessionSampler(kinds[row % 3], WHOLE), logits_of(row, WHOLE, 3.0), 5) for row in range(ROWS + 2)]
    sample_rows(asks)
    assert groups == [ROWS, 2]


def test_one_row_alone_is_left_to_its_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DrawsTogether, "draw", lambda _: pytest.fail("drawn together with nobody"))
    narrow, wide = SamplingOptions(top_k=5), SamplingOptions()
    sample_rows([Ask(SessionSampler(each, WHOLE), logits_of(1, WHOLE, 2.0), 3) for each in (narrow, wide)])


def keys_of(numbers: range) -> list[int]:
    return [noise_keys(3, number)[0] for number in numbers]


@pytest.mark.parametrize("asked", [range(4), range(3, 12), range(5, 1, -1), range(18, 22), range(30, 40)], ids=str)
def test_noise_is_the_same_prepared_or_not(asked: range) -> None:
    draws = Draws(RAGGED)
    fresh, prepared = Noise(draws), Noise(draws)
    prepared.prepare(keys_of(range(20)))
    n_keys = len(asked)
    for one, other in zip(fresh.of(keys_of(asked)), prepared.of(keys_of(asked)), strict=True):
        assert np.array_equal(one[:n_keys], other[:n_keys])


def test_prepared_noise_is_bounded_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    noise, n_made = Noise(Draws(SMALL)), [0]
    block_noise = Draws.block_noise

    def counted(draws: Draws, keys: np.ndarray, *rest: np.ndarray) -> None:
        n_made[0] += keys.size
        block_noise(draws, keys, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Draws, "block_noise", counted)
    noise.prepare(keys_of(range(PREPARED_MAX + 50)))
    assert n_made[0] == PREPARED_MAX
    noise.of(keys_of(range(PREPARED_MAX - 5, PREPARED_MAX)))
    assert n_made[0] == PREPARED_MAX, "they were there"
    noise.of(keys_of(range(PREPARED_MAX - 5, PREPARED_MAX + 5)))
    assert n_made[0] == PREPARED_MAX + 10
    noise.prepare(keys_of(range(1)))
    noise.of(keys_of(range(5)))
    assert n_made[0] == PREPARED_MAX + 16


def test_noise_for_rows_that_need_none_is_not_prepared() -> None:
    kinds = [SamplingOptions(temperature=0), SamplingOptions(top_k=4), SamplingOptions(seed=1), SamplingOptions(seed=2)]
    samplers = [SessionSampler(each, SMALL) for each in kinds]
    prepare_noise(SMALL, [(sampler, 8) for sampler in samplers])
    scratch = sampling_rows.scratch_of(SMALL)
    assert list(scratch.noise._places) == [noise_keys(1, 8)[0], noise_keys(2, 8)[0]]


def test_a_fault_of_ours_in_one_sampler_is_its_sessions_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asks = [
        Ask(SessionSampler(SamplingOptions(numbers={"typical_p": 0.8}), SMALL), logits_of(at, SMALL, 1.0), 3)
        for at in range(3)
    ]
    expected = alone(asks)

    def fail(logits: object, position: int) -> None:
        raise ValueError("nan")

    monkeypatch.setattr(asks[1].sampler, "sample", fail)
    first, second, third = sample_rows(asks)
    assert [first, third] == [expected[0], expected[2]]
    assert isinstance(second, InternalError)
    assert "ValueError: nan" in caplog.text
