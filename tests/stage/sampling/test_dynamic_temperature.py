"""The temperature by entropy, compared with llama.cpp's own sampler and with a plain account of it."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import llama_cpp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayline.stage.sampling.draws import Draws, noise_keys
from relayline.stage.sampling.dynamic_temperature import dynamic_temperature
from relayline.stage.sampling.rows import Ask, can_draw_on_device, sample_rows
from relayline.stage.sampling.sampler import SamplingOptions, SessionSampler
from relayline.stage.sampling.sorting_filters import Filters
from relayline.wire.common.errors import ProtocolError
from tests.support.drawn_rows import LOGITS, logits_of

REACH = {"reach": st.sampled_from([0.2, 0.7, 1.0, 3.0]), "exponent": st.sampled_from([0.0, 0.5, 1.0, 2.3])}
N_VOCAB = 300
SIZES = {"n_tokens": st.sampled_from([1, 2, 7, N_VOCAB]), "temperature": st.sampled_from([0.1, 0.7, 1.0, 2.0])}


def plainly(logits: np.ndarray, temperature: float, reach: float, exponent: float) -> float:
    """The same in the words of llama.cpp's README, sums exact."""
    largest = max(map(float, logits))
    weights = [math.exp(float(logit) - largest) for logit in logits]
    total = math.fsum(weights)
    chances = [weight / total for weight in weights]
    entropy = -math.fsum(chance * math.log(chance) for chance in chances if chance)
    share = max(0.0, entropy) / math.log(len(chances))
    least, most = max(0.0, temperature - reach), temperature + reach
    return least + (most - least) * min(1.0, share) ** exponent


def scaled_natively(logits: np.ndarray, temperature: float, reach: float, exponent: float) -> np.ndarray:
    """Return the logits behind llama.cpp's sampler."""
    candidates = (llama_cpp.llama_token_data * logits.size)(
        *(llama_cpp.llama_token_data(token, float(logit), 0.0) for token, logit in enumerate(logits))
    )
    found = llama_cpp.llama_token_data_array(candidates, logits.size, -1, False)
    sampler = llama_cpp.llama_sampler_init_temp_ext(temperature, reach, exponent)
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(found))
    llama_cpp.llama_sampler_free(sampler)
    scaled = np.empty(logits.size)
    for at in range(found.size):
        scaled[found.data[at].id] = found.data[at].logit
    return scaled


@settings(max_examples=300)
@given(**SIZES, **LOGITS, **REACH)
def test_it_is_the_temperature_of_a_plain_account(
    n_tokens: int, temperature: float, seed: int, spread: float, step: float, lead: float, reach: float, exponent: float
) -> None:
    logits = logits_of(seed, n_tokens, spread, step, lead)
    ours = dynamic_temperature(logits, temperature, reach, exponent)
    if n_tokens == 1:
        assert ours == temperature
    else:
        assert ours == pytest.approx(plainly(logits, temperature, reach, exponent), rel=1e-6, abs=1e-9)


@settings(max_examples=200)
@given(**SIZES, **LOGITS, **REACH)
def test_it_is_llama_cpps(
    n_tokens: int, temperature: float, seed: int, spread: float, step: float, lead: float, reach: float, exponent: float
) -> None:
    logits = logits_of(seed, n_tokens, spread, step, lead)
    ours, native = (of(logits, temperature, reach, exponent) for of in (dynamic_temperature, scaled_natively))
    widest = int(np.abs(logits).argmax())
    if n_tokens == 1:
        assert native.tolist() == logits.tolist(), "one token is left as it is"
    elif np.isneginf(native).any():
        assert native.argmax() == logits.argmax()
        assert ours < 2e-3 * reach, "0 there, for the largest alone"
    elif logits[widest]:  # its sums are in f32, and a small power makes much of a little entropy
        assert float(logits[widest]) / native[widest] == pytest.approx(ours, rel=1e-4, abs=2e-3 * reach)


def test_one_sure_token_is_drawn_cold_and_equal_ones_hot() -> None:
    sure = np.array([60.0, -60.0, -60.0], np.float32)
    assert dynamic_temperature(sure, 1.0, 0.4, 1.0) == pytest.approx(0.6)
    assert dynamic_temperature(sure, 0.5, 0.8, 1.0) == pytest.approx(0.0), "not below 0"
    assert dynamic_temperature(np.zeros(9, np.float32), 1.0, 0.4, 3.0) == pytest.approx(1.4)
    assert dynamic_temperature(sure, 1.0, 0.4, 0.0) == pytest.approx(1.4), "any share to the power of 0 is 1"
    assert math.isfinite(dynamic_temperature(np.arange(9, dtype=np.float32), math.inf, 2.0, 1.0))


NUMBERS = {"dynatemp_range": 0.6, "dynatemp_exponent": 1.7}


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 20}, {"top_p": 0.8, "min_p": 0.05}, {"numbers": {"typical_p": 0.7}}, {"top_k": 1}]
)
def test_a_sample_is_the_keyed_draw_at_that_temperature(filters: dict[str, object]) -> None:
    more = filters.get("numbers", {})
    assert isinstance(more, dict)
    arguments: dict[str, Any] = {**filters, "numbers": {**NUMBERS, **more}}
    options = SamplingOptions(temperature=0.8, seed=11, **arguments)
    sampler, draws, n_changed = SessionSampler(options, N_VOCAB), Draws(N_VOCAB), 0
    limits = Filters(0.0, options.top_k, options.number("typical_p"), options.top_p, options.min_p)
    for position in range(60):
        logits = logits_of(position, N_VOCAB, 2.0)
        tokens = limits.kept(logits)
        kept, keys = logits[tokens], noise_keys(11, position)
        largest = float(kept.max())
        expected = draws.draw(kept, largest, dynamic_temperature(kept, 0.8, 0.6, 1.7), keys, tokens)
        n_changed += expected != draws.draw(kept, largest, 0.8, keys, tokens)
        assert sampler.sample(logits, position).token == expected
        assert SessionSampler(options, N_VOCAB).sample(logits, position).token == expected, "whichever samples it again"
    assert n_changed > 5 or options.top_k == 1


def test_a_temperature_of_0_picks_the_first_of_the_largest() -> None:
    logits = np.zeros(N_VOCAB, np.float32)
    logits[[7, 9]] = 200.0
    logits[9] += 0.01
    options = SamplingOptions(temperature=0.3, numbers={"dynatemp_range": 0.3, "dynatemp_exponent": 90.0})
    assert dynamic_temperature(logits, 0.3, 0.3, 90.0) < 1e-60
    assert {SessionSampler(options, N_VOCAB).sample(logits, at).token for at in range(20)} == {9}


def test_rows_with_it_are_drawn_alone_and_greedy_ones_are_as_before() -> None:
    options = [SamplingOptions(seed=row, temperature=0.9, top_k=5 * (row % 2), numbers=NUMBERS) for row in range(6)]
    rows = [logits_of(row, N_VOCAB, 2.0) for row in range(6)]
    asks = [Ask(SessionSampler(each, N_VOCAB), row, 4) for each, row in zip(options, rows, strict=True)]
    assert not any(ask.sampler.draws_plainly or can_draw_on_device(ask.sampler) for ask in asks)
    alone = [SessionSampler(each, N_VOCAB).sample(row, 4) for each, row in zip(options, rows, strict=True)]
    assert list(sample_rows(asks)) == alone
    greedy = SessionSampler(SamplingOptions(temperature=0, numbers=NUMBERS), N_VOCAB)
    assert greedy.is_greedy
    assert greedy.sample(rows[0], 4).token == int(rows[0].argmax())


@pytest.mark.parametrize("numbers", [{"dynatemp_range": -0.5}, {"dynatemp_exponent": math.nan}])
def test_numbers_that_no_coordinator_sends_are_refused(numbers: dict[str, float]) -> None:
    with pytest.raises(ProtocolError, match=next(iter(numbers))):
        SamplingOptions(numbers=numbers)
