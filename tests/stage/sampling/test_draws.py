"""Goal: a draw follows the softmax exactly, depends on no other session, and is rarely moved by float noise."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from relayline.stage.sampling.draws import BLOCK, BLOCKS_FROM, Draws, noise_keys

N_VOCAB = 1_200
U64 = 2**64 - 1
Floats = npt.NDArray[np.float32]


def logits_of(seed: int, n_tokens: int = N_VOCAB, spread: float = 2.0) -> Floats:
    return (np.random.default_rng(seed).standard_normal(n_tokens) * spread).astype(np.float32)


def softmax(logits: Floats) -> npt.NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    return weights / weights.sum()


def drawn(draws: Draws, logits: Floats, position: int, temperature: float = 1.0, tokens: object = None) -> int:
    return draws.draw(logits, float(logits.max()), temperature, noise_keys(5, position), tokens)  # type: ignore[arg-type]


def splitmix64(x: int) -> int:
    x &= U64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & U64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & U64
    return x ^ (x >> 31)


def noise(keys: tuple[int, int], n_tokens: int) -> npt.NDArray[np.float64]:
    """The definition, token by token, in Python's integers."""
    block = BLOCK if n_tokens >= BLOCKS_FROM else 1
    n_blocks = -(-n_tokens // block)
    found = []
    for token in range(n_tokens):
        of_block, of_token = (
            splitmix64(number * 0x9E3779B97F4A7C15 + key)
            for number, key in zip((token % n_blocks, token), keys, strict=True)
        )
        least, more = (-np.log1p(-((hashed >> 12) + 0.5) / 2**52) for hashed in (of_block, of_token))
        is_first = (of_block >> 6) % block == token // n_blocks
        found.append(least / block + (0.0 if is_first else more))
    return np.array(found)


def drawn_plainly(logits: Floats, temperature: float, keys: tuple[int, int]) -> int:
    """Every token's arrival time, and the first token."""
    arrivals = np.log(noise(keys, logits.size))
    return int((arrivals - (logits.astype(np.float64) - float(logits.max())) / temperature).argmin())


@settings(max_examples=60)
@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**31),
    st.floats(0.01, 30.0),
    st.sampled_from([0.0, 0.01, 0.5, 3.0, 40.0]),
    st.integers(0, N_VOCAB - 1),
)
@example(seed=0, position=0, temperature=1.0, spread=0.0, n_masked=0)
@example(seed=1, position=0, temperature=0.01, spread=40.0, n_masked=N_VOCAB - 1)
def test_the_draw_is_the_plain_definition_in_any_order(
    seed: int, position: int, temperature: float, spread: float, n_masked: int
) -> None:
    rng, draws, keys = np.random.default_rng(position), Draws(N_VOCAB), noise_keys(seed, position)
    logits = logits_of(position, spread=spread)
    logits[rng.permutation(N_VOCAB)[:n_masked]] = -np.inf
    largest, wanted = float(logits.max()), drawn_plainly(logits, temperature, keys)
    assert draws.draw(logits, largest, temperature, keys) == wanted
    for n_others in (0, 3, N_VOCAB - 1):
        others = rng.permutation(np.delete(np.arange(N_VOCAB), [wanted]))[:n_others]
        tokens = rng.permutation([wanted, *others]).astype(np.int32)
        least = float(logits[tokens].max())
        assert draws.draw(logits[tokens], least, temperature, keys, tokens) == wanted, "whichever token is left out"


@pytest.mark.parametrize("n_vocab", [500, BLOCKS_FROM + 100])
def test_the_noise_is_the_plain_definition(n_vocab: int) -> None:
    keys = noise_keys(9, 4)
    assert np.array_equal(Draws(n_vocab).noise(np.arange(n_vocab), keys), noise(keys, n_vocab))


def test_the_noise_of_blocks_is_independent_and_exponential(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of a block and its other values: uniform, and pairs of one block's tokens as well."""
    monkeypatch.setattr("relayline.stage.sampling.draws.BLOCKS_FROM", 1)
    draws, tokens = Draws(640), np.arange(640)
    keys = [noise_keys(seed, position) for seed in range(10) for position in range(40)]
    grid = -np.expm1(-np.array([draws.noise(tokens, each) for each in keys]))
    counts, _ = np.histogram(grid, bins=64, range=(0, 1))
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() / 63 < 1.6
    for shift in (1, draws.n_blocks, 3 * draws.n_blocks):  # the next token, and others of the same block
        pairs, _, _ = np.histogram2d(np.roll(grid, shift, 1).ravel(), grid.ravel(), bins=8, range=((0, 1), (0, 1)))
        assert ((pairs - pairs.mean()) ** 2 / pairs.mean()).sum() / 63 < 1.7, shift


@pytest.mark.parametrize("n_vocab", [1, 65, BLOCKS_FROM - 1, BLOCKS_FROM, BLOCKS_FROM + 1])
@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0, 8.0])
def test_bounds_over_blocks_leave_the_winner_in(n_vocab: int, spread: float) -> None:
    """Against the noise of all tokens at once, with and without a floor, for whole and for broken blocks."""
    draws = Draws(n_vocab)
    for position in range(40):
        keys, temperature = noise_keys(1, position), (0.05, 0.8, 1.0, 50.0)[position % 4]
        logits = logits_of(position, n_vocab, spread)
        largest, floor = float(logits.max()), float(np.quantile(logits, (0.0, 0.5, 0.999, 1.0)[position // 4 % 4]))
        arrivals = np.log(draws.noise(np.arange(n_vocab), keys)) - (logits.astype(np.float64) - largest) / temperature
        assert draws.draw(logits, largest, temperature, keys) == int(arrivals.argmin())
        arrivals[logits < np.float32(floor)] = np.inf
        assert draws.draw(logits, largest, temperature, keys, floor=floor) == int(arrivals.argmin())
        above = np.flatnonzero(logits >= np.float32(floor)).astype(np.int32)
        assert draws.draw(logits[above], largest, temperature, keys, above) == int(arrivals.argmin())


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e30, math.inf])
def test_the_coldest_and_the_hottest(temperature: float) -> None:
    logits = logits_of(3)
    logits[::2] = -np.inf
    found = {drawn(Draws(N_VOCAB), logits, position, temperature) for position in range(50)}
    assert all(token % 2 for token in found)
    assert found == {int(logits.argmax())} if temperature < 1 else len(found) > 40


def test_noise_is_flat_and_independent_between_neighbours() -> None:
    """Of tokens, positions and seeds: singly and in pairs."""
    draws, tokens = Draws(200), np.arange(200)
    keys = [[noise_keys(seed, position) for position in range(40)] for seed in range(10)]
    grid = -np.expm1(-np.array([[draws.noise(tokens, each) for each in row] for row in keys]))
    counts, _ = np.histogram(grid, bins=64, range=(0, 1))
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() / 63 < 1.6
    for axis in range(3):
        for shift in (1, 2, 8):
            one, other = np.roll(grid, shift, axis).ravel(), grid.ravel()
            pairs, _, _ = np.histogram2d(one, other, bins=8, range=((0, 1), (0, 1)))
            assert ((pairs - pairs.mean()) ** 2 / pairs.mean()).sum() / 63 < 1.7, (axis, shift)
    assert 0 < grid.min() < grid.max() < 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("n_tokens", [2, 3, 17])
def test_few_tokens_are_drawn_as_often_as_they_should_be(n_tokens: int) -> None:
    logits, draws = logits_of(n_tokens, n_tokens, spread=1.0), Draws(N_VOCAB)
    tokens = np.random.default_rng(n_tokens).permutation(N_VOCAB)[:n_tokens].astype(np.int32)
    picks = [drawn(draws, logits, position, tokens=tokens) for position in range(12_000)]
    expected = softmax(logits) * len(picks)
    counts = np.array([picks.count(int(token)) for token in tokens])
    surprise = ((counts - expected) ** 2 / expected).sum()
    assert surprise < (n_tokens - 1) + 4 * math.sqrt(2 * (n_tokens - 1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("moved_by", [0.003, 0.03])
def test_logits_that_move_a_little_move_few_draws(moved_by: float) -> None:
    """Not many more than two such distributions require; a draw along the cumulative sum moves far more."""
    draws, rng, n_draws = Draws(N_VOCAB), np.random.default_rng(8), 3_000
    n_moved = n_moved_by_sum = 0
    distance = 0.0
    for position in range(n_draws):
        logits = logits_of(position % 50, spread=3.0)
        other = logits + (rng.standard_normal(N_VOCAB) * moved_by).astype(np.float32)
        n_moved += drawn(draws, logits, position) != drawn(draws, other, position)
        uniform = rng.random()
        sums = [np.cumsum(softmax(each)) for each in (logits, other)]
        n_moved_by_sum += np.searchsorted(sums[0], uniform) != np.searchsorted(sums[1], uniform)
        distance += float(np.abs(softmax(logits) - softmax(other)).sum()) / 2
    assert distance > 1
    assert n_moved < 2.5 * distance + 10
    assert n_moved_by_sum > 3 * n_moved
