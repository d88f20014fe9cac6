"""Draws behind filters, compared with plainly written filters: sort, cut, then race."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayline.stage.sampling.draws import Draws, noise_keys
from relayline.stage.sampling.filters import FilteredDraws, largest_tokens

N_VOCAB = 400
DRAWS = Draws(N_VOCAB)
FILTERED = FilteredDraws(DRAWS, N_VOCAB)


def kept_by(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> tuple[np.ndarray, float]:
    """Return the kept tokens in f64, ascending, and how near top-p's edge came to one of the cumulative sums."""
    order = np.lexsort((np.arange(logits.size), -logits.astype(np.float64)))
    if top_k:
        order = order[:top_k]
    weights = np.exp(logits[order].astype(np.float64) - float(logits.max()))
    distance = 1.0
    if top_p < 1:
        before = np.concatenate([[0.0], np.cumsum(weights)[:-1]]) / weights.sum()
        distance = float(np.abs(before[1:] - top_p).min(initial=1.0))
        n_kept = max(1, int((before < top_p).sum()))
        order, weights = order[:n_kept], weights[:n_kept]
    if min_p > 0:
        order = order[logits[order] >= np.float32(float(logits.max()) + np.log(min_p))]
    return np.sort(order).astype(np.int32), distance


def row(seed: int, spread: float, step: float, n_masked: int) -> np.ndarray:
    """A row of logits; `step` above 0 rounds them, which makes ties."""
    rng = np.random.default_rng(seed)
    logits = (spread * rng.standard_normal(N_VOCAB)).astype(np.float32)
    if step:
        logits = (np.round(logits / step) * step).astype(np.float32)
    logits[rng.permutation(N_VOCAB)[:n_masked]] = -np.inf
    return logits


@settings(max_examples=300)
@given(
    logits=st.builds(
        row, st.integers(0, 10**6), st.sampled_from([0.0, 0.01, 1.0, 8.0]), st.sampled_from([0.0, 0.5, 2.0]),
        st.sampled_from([0, 50, 399]),
    ),
    temperature=st.sampled_from([0.01, 0.7, 1.0, 3.0, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 399, 400, 5000]),
    top_p=st.one_of(st.sampled_from([0.0, 1e-9, 0.5, 0.999999, 1.0]), st.floats(0, 1)),
    min_p=st.one_of(st.sampled_from([0.0, 1e-9, 0.05, 1.0]), st.floats(0, 1)),
    position=st.integers(0, 1000),
)  # fmt: skip
def test_every_combination_draws_as_the_plain_filters(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, position: int
) -> None:
    kept, distance = kept_by(logits, top_k, top_p, min_p)
    if distance < 1e-6:
        return  # sums in another order may come out on the other side of the edge
    keys, largest = noise_keys(3, position), float(logits.max())
    expected = DRAWS.draw(logits[kept], largest, temperature, keys, kept)
    given_away = FILTERED.draw(logits, largest, temperature, keys, top_k=top_k, top_p=top_p, min_p=min_p)
    assert given_away == expected


def test_a_winner_that_is_not_kept_gives_way_to_the_first_kept_one() -> None:
    """At a high temperature most winners are not kept, so this is the loop at work."""
    logits = row(1, 1.0, 0.0, 0)
    kept, _ = kept_by(logits, 0, 0.05, 0.0)
    picks = [FILTERED.draw(logits, float(logits.max()), 1e6, noise_keys(1, at), top_p=0.05) for at in range(400)]
    assert set(picks) == set(kept.tolist())
    assert np.bincount(picks)[kept].min() > 0.3 * 400 / kept.size, "an even draw over the kept tokens"


@pytest.mark.parametrize("n", [1, 3, 7, 8])
def test_ties_among_the_largest_are_cut_by_token(n: int) -> None:
    logits = np.array([1, 3, 2, 3, 2, 2, 0, 3], np.float32)
    ranked = sorted(range(8), key=lambda token: (-logits[token], token))
    assert largest_tokens(logits, n).tolist() == sorted(ranked[:n])
