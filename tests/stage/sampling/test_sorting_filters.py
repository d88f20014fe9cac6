"""Filters that sort tokens, compared with llama.cpp's own samplers of the same names."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import llama_cpp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayline.stage.sampling import sorting_filters
from relayline.stage.sampling.draws import Draws, noise_keys
from relayline.stage.sampling.sampler import SamplingOptions, SessionSampler
from relayline.stage.sampling.sorting_filters import Filters, kept_behind, xtc_acts
from relayline.wire.common.errors import ProtocolError
from relayline.wire.common.sampler_order import TEMPERATURE, USUAL, number_of, order_of

N_VOCAB = 200


def row(seed: int, spread: float, n_masked: int) -> np.ndarray:
    """A row of logits without ties, which llama.cpp ranks as it likes."""
    rng = np.random.default_rng(seed)
    logits = (spread * rng.standard_normal(N_VOCAB)).astype(np.float32)
    logits[rng.permutation(N_VOCAB)[:n_masked]] = -np.inf
    return logits


def kept_natively(logits: np.ndarray, samplers: list[Any]) -> list[int]:
    """Return the tokens that a chain of llama.cpp's samplers keeps of the finite ones, and free the samplers.

    What one has cut is taken out before the next: its typical-p takes the logarithm of a chance of 0.
    """
    left = {int(token): float(logits[token]) for token in np.flatnonzero(np.isfinite(logits))}
    for sampler in samplers:
        candidates = (llama_cpp.llama_token_data * len(left))(
            *(llama_cpp.llama_token_data(token, left[token], 0.0) for token in sorted(left))
        )
        found = llama_cpp.llama_token_data_array(candidates, len(left), -1, False)
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(found))
        llama_cpp.llama_sampler_free(sampler)
        left = {each.id: each.logit for each in found.data[: found.size] if np.isfinite(each.logit)}
    return sorted(left)


def is_near(ours: list[int], native: list[int]) -> bool:
    """Whether two sets differ by no more than one token at an edge, which sums in f32 may put on either side."""
    return len(set(ours) ^ set(native)) <= 1


@settings(max_examples=200)
@given(
    logits=st.builds(row, st.integers(0, 10**6), st.sampled_from([0.1, 1.0, 8.0]), st.sampled_from([0, 50, 199])),
    sigma=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 40]),
    typical=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    xtc=st.sampled_from([1.0, 0.5, 0.1, 0.001, 0.0]),
)
def test_filters_keep_what_the_native_chain_keeps(
    logits: np.ndarray, sigma: float, top_k: int, typical: float, min_p: float, xtc: float
) -> None:
    native: list[Any] = []
    if sigma:
        native.append(llama_cpp.llama_sampler_init_top_n_sigma(sigma))
    if top_k:
        native.append(llama_cpp.llama_sampler_init_top_k(top_k))
    if typical < 1:
        native.append(llama_cpp.llama_sampler_init_typical(typical, 1))
    if min_p:
        native.append(llama_cpp.llama_sampler_init_min_p(min_p, 1))
    if xtc <= 0.5:
        native.append(llama_cpp.llama_sampler_init_xtc(1.0, xtc, 1, 7))
    ours = Filters(sigma, top_k, typical, 1.0, min_p, xtc).kept(logits).tolist()
    assert ours
    assert is_near(ours, kept_natively(logits, native))


def test_the_filters_stand_in_the_order_that_is_promised() -> None:
    """Of ten tokens with falling chances: XTC comes behind min-p, so the least likely kept one is min-p's."""
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.06, 0.04])).astype(np.float32)
    assert Filters(min_p=0.4, xtc_threshold=0.1).kept(logits).tolist() == [2]
    assert Filters(top_p=0.5, xtc_threshold=0.1).kept(logits).tolist() == [1]
    assert Filters(xtc_threshold=0.5).kept(logits).tolist() == [0, 1, 2, 3, 4]
    assert Filters(xtc_threshold=0.35).kept(logits).tolist() == [0, 1, 2, 3, 4]


NATIVE = {  # by sampler: llama.cpp's, with the limits of OTHER
    "top_n_sigma": lambda: llama_cpp.llama_sampler_init_top_n_sigma(1.5),
    "top_k": lambda: llama_cpp.llama_sampler_init_top_k(60),
    "typ_p": lambda: llama_cpp.llama_sampler_init_typical(0.9, 1),
    "top_p": lambda: llama_cpp.llama_sampler_init_top_p(0.8, 1),
    "min_p": lambda: llama_cpp.llama_sampler_init_min_p(0.03, 1),
    "xtc": lambda: llama_cpp.llama_sampler_init_xtc(1.0, 0.1, 1, 7),
}
OTHER = Filters(1.5, 60, 0.9, 0.8, 0.03, 0.1)


def kept_in_order(order: tuple[str, ...], logits: np.ndarray, temperature: float) -> np.ndarray:
    if TEMPERATURE not in order:
        return dataclasses.replace(OTHER, order=order).kept(logits)
    before, behind = dataclasses.replace(OTHER, order=order).parts
    tokens = before.kept(logits)
    return kept_behind(behind, tokens, logits[tokens], temperature)


@settings(max_examples=300)
@given(
    logits=st.builds(row, st.integers(0, 10**6), st.sampled_from([0.1, 1.0, 4.0]), st.sampled_from([0, 50, 199])),
    order=st.permutations(USUAL).map(tuple),
    temperature=st.sampled_from([0.5, 0.8, 1.0, 1.7]),  # lower ones leave chances that are 0 in f32, see kept_natively
)
def test_each_filter_in_another_order_keeps_what_the_native_one_keeps(
    logits: np.ndarray, order: tuple[str, ...], temperature: float
) -> None:
    """Each gets what ours before it have kept, so that a token at one edge is not a matter of others."""
    left = logits.copy()
    for at, name in enumerate(order, start=1):
        if name == TEMPERATURE:
            left /= np.float32(temperature)
            continue
        ours = kept_in_order(order[:at], logits, temperature).tolist()
        assert is_near(ours, kept_natively(left, [NATIVE[name]()]))
        left[np.setdiff1d(np.arange(N_VOCAB), ours)] = -np.inf


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 1e30, float("inf")])
def test_filters_behind_any_temperature_keep_a_token(temperature: float) -> None:
    for order in (USUAL[::-1], (TEMPERATURE, *USUAL[:-1])):
        logits = row(3, 5.0, 10)
        kept = kept_in_order(order, logits, temperature)
        assert kept.size
        assert np.isfinite(logits[kept]).all()


@pytest.mark.parametrize("order", [("xtc", "top_p"), (TEMPERATURE, "top_p", "top_k"), USUAL[::-1]])
def test_a_sample_in_another_order_is_the_keyed_draw_among_what_it_keeps(order: tuple[str, ...]) -> None:
    number = number_of(order)
    numbers = {"top_n_sigma": 1.5, "typical_p": 0.9, "xtc_probability": 1.0, "xtc_threshold": 0.1}
    options = SamplingOptions(
        temperature=1.7, seed=11, top_k=60, top_p=0.8, min_p=0.03, numbers=numbers | {"sampler_order": number}
    )
    usual = dataclasses.replace(options, numbers=numbers)
    sampler, draws, n_other = SessionSampler(options, N_VOCAB), Draws(N_VOCAB), 0
    for position in range(60):
        logits = row(position, 2.0, 0)
        kept = kept_in_order(order_of(number), logits, 1.7)
        expected = draws.draw(logits[kept], float(logits[kept].max()), 1.7, noise_keys(11, position), kept)
        assert sampler.sample(logits, position).token == expected
        n_other += SessionSampler(usual, N_VOCAB).sample(logits, position).token != expected
    assert n_other


def test_another_order_alone_is_no_plain_draw() -> None:
    plain = SamplingOptions(temperature=0.5, top_p=0.9)
    ordered = dataclasses.replace(plain, numbers={"sampler_order": number_of((TEMPERATURE, "top_p"))})
    assert [SessionSampler(each, N_VOCAB).draws_plainly for each in (plain, ordered)] == [True, False]


@pytest.mark.parametrize(
    "numbers", [{"typical_p": 0.6}, {"top_n_sigma": 1.0}, {"xtc_probability": 0.5, "xtc_threshold": 0.05}]
)
def test_a_sample_is_the_keyed_draw_among_the_kept_tokens(numbers: dict[str, float]) -> None:
    options = SamplingOptions(temperature=0.8, seed=11, top_k=50, numbers=numbers)
    sampler, draws, n_acted = SessionSampler(options, N_VOCAB), Draws(N_VOCAB), 0
    assert options.sorting_filters is not None
    for position in range(60):
        logits = row(position, 2.0, 0)
        filters = options.sorting_filters
        if not xtc_acts(11, position, options.number("xtc_probability")):
            filters = Filters(filters.top_n_sigma, filters.top_k, filters.typical_p, filters.top_p, filters.min_p)
        n_acted += filters.xtc_threshold < 1
        kept = filters.kept(logits)
        expected = draws.draw(logits[kept], float(logits[kept].max()), 0.8, noise_keys(11, position), kept)
        assert sampler.sample(logits, position).token == expected
        assert SessionSampler(options, N_VOCAB).sample(logits, position).token == expected, "whichever samples it again"
    assert "xtc_probability" not in numbers or 15 < n_acted < 45


@pytest.mark.parametrize("numbers", [{"typical_p": 2.0}, {"mirostat": 3.0}, {"xtc_probability": float("nan")}])
def test_numbers_that_no_coordinator_sends_are_refused(numbers: dict[str, float]) -> None:
    with pytest.raises(ProtocolError, match=next(iter(numbers))):
        SamplingOptions(numbers=numbers)


@pytest.mark.parametrize("spread", [0.001, 1.0, 6.0])
@pytest.mark.parametrize(
    "filters",
    [Filters(typical_p=0.9), Filters(typical_p=0.3), Filters(typical_p=1 - 1e-9, top_p=0.7), Filters(top_p=0.9)],
)
def test_a_large_vocabulary_is_cut_where_a_whole_ranking_cuts_it(
    filters: Filters, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = (spread * np.random.default_rng(5).standard_normal(20_000)).astype(np.float32)
    logits[::7] = np.round(logits[::7], 1)  # ties
    found = filters.kept(logits)
    monkeypatch.setattr(sorting_filters, "SORTED_FIRST", logits.size)
    np.testing.assert_array_equal(found, filters.kept(logits))
