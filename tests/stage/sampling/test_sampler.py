from __future__ import annotations

import math

import numpy as np
import pytest

from relayline.stage.sampling.sampler import SamplingOptions, SessionSampler
from relayline.wire.common.errors import NativeError, NumericError, ProtocolError

N_VOCAB = 1500


def logits_of(seed: int = 0, n_vocab: int = N_VOCAB, spread: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(n_vocab) * spread).astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    return weights / weights.sum()


def draws(options: SamplingOptions, logits: np.ndarray, n_draws: int, first_position: int = 0) -> list[int]:
    sampler = SessionSampler(options, logits.size)
    try:
        return [sampler.sample(logits, first_position + index).token for index in range(n_draws)]
    finally:
        sampler.close()


def surprise(tokens: list[int], probabilities: np.ndarray) -> float:
    """Pearson's chi-square in standard deviations from its mean; rare tokens pooled to expect at least 8."""
    counts = np.bincount(tokens, minlength=probabilities.size).astype(np.float64)
    expected = probabilities * len(tokens)
    large = expected >= 8
    cells = [*zip(counts[large], expected[large], strict=True), (counts[~large].sum(), expected[~large].sum())]
    cells = [(count, mean) for count, mean in cells if mean > 0]
    n_degrees = len(cells) - 1
    return (sum((count - mean) ** 2 / mean for count, mean in cells) - n_degrees) / math.sqrt(2 * n_degrees)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_unfiltered_draws_follow_the_softmax(temperature: float) -> None:
    logits = logits_of(1)
    tokens = draws(SamplingOptions(temperature=temperature, seed=99), logits, 20_000)
    assert surprise(tokens, softmax(logits / np.float32(temperature))) < 4


def test_the_chi_square_would_see_a_wrong_temperature() -> None:
    logits = logits_of(1)
    tokens = draws(SamplingOptions(temperature=1.1, seed=99), logits, 20_000)
    assert surprise(tokens, softmax(logits)) > 8


def kept_by(options: SamplingOptions, logits: np.ndarray) -> np.ndarray:
    """The definition of the filters, written out plainly."""
    order = np.argsort(-logits, kind="stable")
    if options.top_k:
        order = order[: options.top_k]
    probabilities = softmax(logits[order])
    if options.top_p < 1:
        n_kept = int(np.searchsorted(np.cumsum(probabilities), options.top_p)) + 1
        order, probabilities = order[:n_kept], probabilities[:n_kept]
    return order[probabilities >= options.min_p * probabilities.max()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(temperature=1.0, top_k=12, seed=5),
        SamplingOptions(temperature=1.3, top_k=300, seed=5),
        SamplingOptions(temperature=0.8, top_p=0.6, seed=5),
        SamplingOptions(temperature=1.0, min_p=0.1, seed=5),
        SamplingOptions(temperature=0.9, top_k=60, top_p=0.9, min_p=0.05, seed=5),
    ],
)
def test_filtered_draws_follow_the_softmax_over_the_kept_tokens(options: SamplingOptions) -> None:
    logits = logits_of(2)
    kept = kept_by(options, logits)
    expected = np.zeros(logits.size)
    expected[kept] = softmax(logits[kept] / np.float32(options.temperature))
    tokens = draws(options, logits, 8_000)
    assert set(tokens) <= set(kept.tolist())
    assert surprise(tokens, expected) < 4


def test_a_position_draws_the_same_token_whatever_was_drawn_before() -> None:
    for options in (SamplingOptions(seed=7), SamplingOptions(seed=7, top_k=40, top_p=0.95, temperature=0.8)):
        logits = logits_of(3)
        straight = draws(options, logits, 40)
        assert draws(options, logits, 15, first_position=25) == straight[25:]
        assert len(set(straight)) > 5


@pytest.mark.sampled(1)
@pytest.mark.parametrize("edge", [{"top_p": 0.7}, {"top_k": 40}, {"min_p": 0.05}], ids=str)
def test_a_token_moved_over_the_edge_of_a_filter_changes_only_its_own_picks(edge: dict[str, float]) -> None:
    """The last token that a filter keeps is pushed out, and the first that it drops is pulled in."""
    logits = logits_of(12)
    options = SamplingOptions(temperature=1.0, seed=21, **edge)  # type: ignore[arg-type]
    kept = kept_by(options, logits)
    last, outside = int(kept[-1]), int(np.argsort(-logits, kind="stable")[kept.size])
    moved = logits.copy()
    moved[[last, outside]] = logits[[outside, last]]
    before, after = draws(options, logits, 3_000), draws(options, moved, 3_000)
    assert outside not in before
    assert last not in after
    changed = {pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]}
    assert changed, "each of the two was sampled at times"
    assert all(one == last or other == outside for one, other in changed)


def test_seed_and_position_both_matter() -> None:
    logits = logits_of(3)
    by_seed = {tuple(draws(SamplingOptions(seed=seed), logits, 6)) for seed in (0, 1, 2, 2**32, 2**63, 2**64 - 1)}
    assert len(by_seed) == 6


def test_sessions_do_not_disturb_each_other() -> None:
    options = [
        SamplingOptions(seed=1, top_k=30),
        SamplingOptions(seed=2, top_p=0.8, temperature=1.4),
        SamplingOptions(seed=3),
        SamplingOptions(temperature=0),
    ]
    logits = [logits_of(10 + step) for step in range(20)]
    alone = [draws_over(each, logits) for each in options]
    samplers = [SessionSampler(each, N_VOCAB) for each in options]
    together: list[list[int]] = [[] for _ in options]
    for position, row in enumerate(logits):
        for index, sampler in enumerate(samplers):
            together[index].append(sampler.sample(row, position).token)
        if position == 10:
            samplers[1].close()  # one that ends takes nothing with it
            samplers[1] = SessionSampler(options[1], N_VOCAB)
    assert together == alone


def draws_over(options: SamplingOptions, rows: list[np.ndarray]) -> list[int]:
    sampler = SessionSampler(options, N_VOCAB)
    return [sampler.sample(row, position).token for position, row in enumerate(rows)]


def test_greedy_takes_the_largest_logit_and_the_lowest_token_of_a_tie() -> None:
    logits = logits_of(4)
    logits[[700, 30, 1200]] = 50.0
    assert draws(SamplingOptions(temperature=0, top_k=5, seed=3), logits, 3) == [30, 30, 30]


def test_the_logits_are_left_as_they_were() -> None:
    logits = logits_of(5)
    before = logits.copy()
    for options in (SamplingOptions(n_logprobs=3), SamplingOptions(top_k=4, n_logprobs=3), SamplingOptions(0.0)):
        draws(options, logits, 2)
    assert np.array_equal(logits, before)


def test_a_vocabulary_of_another_size_in_the_same_thread() -> None:
    for n_vocab in (40, 5000, 40):
        logits = np.full(n_vocab, -20.0, np.float32)
        logits[n_vocab - 1] = 20.0
        assert draws(SamplingOptions(seed=1), logits, 4) == [n_vocab - 1] * 4


def test_masked_tokens_are_never_drawn() -> None:
    logits = logits_of(6, 600)
    logits[:520] = -np.inf
    assert min(draws(SamplingOptions(seed=1, temperature=2.0), logits, 500)) >= 520


def test_logprobs_are_those_of_the_raw_softmax() -> None:
    logits = logits_of(7)
    expected = np.log(softmax(logits))
    options = SamplingOptions(temperature=0.3, top_k=3, seed=1, n_logprobs=5)
    sampled = SessionSampler(options, N_VOCAB).sample(logits, 9)
    assert sampled.logprob == pytest.approx(expected[sampled.token], abs=1e-5)
    order = np.argsort(-logits, kind="stable")[:5]
    assert [token for token, _ in sampled.top] == order.tolist()
    assert [logprob for _, logprob in sampled.top] == pytest.approx(expected[order].tolist(), abs=1e-5)


def test_top_logprobs_cut_a_tie_by_token_id() -> None:
    logits = np.zeros(50, np.float32)
    sampled = SessionSampler(SamplingOptions(temperature=0, n_logprobs=3), 50).sample(logits, 0)
    assert [token for token, _ in sampled.top] == [0, 1, 2]
    assert sampled.logprob == pytest.approx(-math.log(50))


@pytest.mark.parametrize(("n_logprobs", "has_logprob", "n_top"), [(-1, False, 0), (0, True, 0), (2, True, 2)])
def test_as_many_logprobs_as_asked_for(n_logprobs: int, has_logprob: bool, n_top: int) -> None:
    sampled = SessionSampler(SamplingOptions(n_logprobs=n_logprobs), N_VOCAB).sample(logits_of(8), 0)
    assert (sampled.logprob is not None, len(sampled.top)) == (has_logprob, n_top)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_an_error(bad: float, temperature: float) -> None:
    logits = logits_of(9)
    logits[77] = bad
    with pytest.raises(NumericError, match="position 5 "):
        SessionSampler(SamplingOptions(temperature=temperature), N_VOCAB).sample(logits, 5)


def test_a_closed_sampler_refuses() -> None:
    for options in (SamplingOptions(), SamplingOptions(top_k=3)):
        sampler = SessionSampler(options, N_VOCAB)
        sampler.close()
        sampler.close()
        with pytest.raises(NativeError, match="closed"):
            sampler.sample(logits_of(), 0)


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 1.1},
        {"min_p": -0.5},
        {"seed": -1},
        {"seed": 1 << 64},
        {"n_logprobs": -2},
        {"n_logprobs": 21},
    ],
)
def test_options_out_of_range_are_refused(field: dict[str, float]) -> None:
    with pytest.raises(ProtocolError, match=next(iter(field))):
        SamplingOptions(**field)  # type: ignore[arg-type]
