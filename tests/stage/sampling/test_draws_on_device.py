"""Draws from rows that stay on a device: the tokens that whole rows give, or the word that a whole row is needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayline.stage.sampling.device_draws import DEVICE_ROWS
from relayline.stage.sampling.draws import BLOCK, BLOCKS_FROM
from relayline.stage.sampling.rows import ON_DEVICE_FROM, DeviceRow, can_draw_on_device, prepare_noise, sample_on_device
from relayline.stage.sampling.sampler import SamplingOptions, SessionSampler
from tests.support.drawn_rows import FILTERS, LOGITS, logits_of

N_VOCAB = BLOCKS_FROM + 3 * BLOCK


class FakeDevice:
    """Has rows of logits, and counts what is fetched of them."""

    def __init__(self, rows: Sequence[np.ndarray]) -> None:
        self.rows, self.gives_parts = np.stack(rows), True
        self.n_fetched = self.n_questions = 0

    def token(self, row: int) -> int | None:
        return int(self.rows[row].argmax()) if np.isfinite(self.rows[row].sum()) else None

    def maxima(self, rows: Sequence[int]) -> np.ndarray:
        self.n_questions += 1
        return self.rows[[*rows]].reshape(len(rows), BLOCK, -1).max(1)

    def gathered(self, rows: Sequence[int], at: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        self.n_questions += 1
        self.n_fetched += tokens.size
        return self.rows[np.array([*rows])[at], tokens]


OPTIONS = st.builds(
    SamplingOptions,
    temperature=st.sampled_from([0.01, 0.7, 1.0, 3.0, 1e6]),
    **FILTERS,
)


@settings(max_examples=150)
@given(
    options=st.lists(OPTIONS, min_size=1, max_size=5),
    n_rows=st.integers(1, 40),
    is_prepared=st.booleans(),
    **LOGITS,
)
def test_any_rows_say_what_whole_rows_say(
    options: list[SamplingOptions],
    n_rows: int,
    seed: int,
    spread: float,
    step: float,
    lead: float,
    is_prepared: bool,
) -> None:
    rows = [logits_of(seed + row, N_VOCAB, spread, step, lead) for row in range(n_rows)]
    asked = [
        DeviceRow(SessionSampler(options[row % len(options)], N_VOCAB), row, seed + row)
        for row in np.random.default_rng(seed).permutation(n_rows).tolist()
    ]
    if is_prepared:
        prepare_noise(N_VOCAB, [(each.sampler, each.position) for each in asked])
    answers = sample_on_device(FakeDevice(rows), asked)
    for each, answer in zip(asked, answers, strict=True):
        if answer is None:
            assert each.sampler.last is None
        else:
            whole = SessionSampler(each.sampler.options, N_VOCAB)
            assert answer == whole.sample(rows[each.row], each.position)
            assert each.sampler.last == whole.last
    if n_rows >= ON_DEVICE_FROM and {each.sampler.options.top_p for each in asked} == {1.0}:
        assert answers.count(None) <= n_rows / 4, "most draws need no whole row"


def test_little_is_asked_and_little_is_fetched() -> None:
    """Of rows like a model's: three questions for all rows of a step, and a small part of each row."""
    n_rows = 40
    device = FakeDevice([logits_of(row, N_VOCAB, 2.0, 0.0, 14.0) for row in range(n_rows)])
    options = [SamplingOptions(temperature=0.7, top_p=0.9, seed=row) for row in range(n_rows)]
    answers = sample_on_device(
        device, [DeviceRow(SessionSampler(each, N_VOCAB), row, 3) for row, each in enumerate(options)]
    )
    assert answers.count(None) <= 4
    assert device.n_questions <= 4
    assert device.n_fetched < n_rows * N_VOCAB / 4


def test_more_rows_than_one_question_is_for() -> None:
    n_rows = DEVICE_ROWS + ON_DEVICE_FROM
    device = FakeDevice([logits_of(row, N_VOCAB, 8.0) for row in range(n_rows)])
    device.rows[5, 7] = np.nan
    samplers = [SessionSampler(SamplingOptions(seed=row), N_VOCAB) for row in range(n_rows)]
    answers = sample_on_device(device, [DeviceRow(sampler, row, 3) for row, sampler in enumerate(samplers)])
    assert [row for row, answer in enumerate(answers) if answer is None] == [5, *range(n_rows - 3, n_rows)]


@pytest.mark.parametrize(
    ("options", "may"),
    [
        (SamplingOptions(top_p=0.5, min_p=0.1), True),
        (SamplingOptions(top_k=N_VOCAB), True),
        (SamplingOptions(top_k=N_VOCAB - 1), False),
        (SamplingOptions(temperature=0), False),
        (SamplingOptions(n_logprobs=0), False),
        (SamplingOptions(presence_penalty=0.1), False),
        (SamplingOptions(numbers={"typical_p": 0.5}), False),
    ],
)
def test_which_rows_may_stay_there(options: SamplingOptions, may: bool) -> None:
    assert can_draw_on_device(SessionSampler(options, N_VOCAB)) is may
