"""Mirostat compared with llama.cpp's own samplers, row for row; and a session that is rebuilt or samples a position
again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from llama_cpp import llama_cpp as llama

from relayline.stage.sampling.mirostat import Mirostat
from relayline.stage.sampling.sampler import SamplingOptions, SessionSampler
from relayline.wire.common.errors import InternalError

N_VOCAB = 500
N_ROWS = 60
SETTINGS = [(1, 5.0, 0.1, 1.0), (1, 3.0, 0.4, 0.7), (2, 5.0, 0.1, 1.0), (2, 2.0, 0.5, 1.4), (2, 0.0, 1.0, 1.0)]
Row = npt.NDArray[np.float32]


def rows() -> Iterator[Row]:
    rng = np.random.default_rng(7)
    for at in range(N_ROWS):
        yield (rng.standard_normal(N_VOCAB) * (0.3 + at % 6)).astype(np.float32)


class Llama:
    """llama.cpp's sampler, which draws by itself."""

    def __init__(self, version: int, tau: float, eta: float) -> None:
        if version == 1:
            self._sampler = llama.llama_sampler_init_mirostat(N_VOCAB, 1, tau, eta, 100)
        else:
            self._sampler = llama.llama_sampler_init_mirostat_v2(1, tau, eta)

    def apply(self, logits: Row) -> tuple[set[int], int]:
        """Return the tokens that it kept, and the one that it picked."""
        entries = (llama.llama_token_data * N_VOCAB)()
        for token, logit in enumerate(logits):
            entries[token] = llama.llama_token_data(token, float(logit), 0.0)
        array = llama.llama_token_data_array(entries, N_VOCAB, -1, False)
        llama.llama_sampler_apply(self._sampler, ctypes.byref(array))
        return {array.data[at].id for at in range(array.size)}, array.data[array.selected].id

    def close(self) -> None:
        llama.llama_sampler_free(self._sampler)


@pytest.mark.parametrize(("version", "tau", "eta", "temperature"), SETTINGS)
def test_the_tokens_that_may_be_drawn_are_llama_cpps(version: int, tau: float, eta: float, temperature: float) -> None:
    """Its mu is not to be seen; that sets agree over many rows, after its own picks, says that the mus do."""
    theirs, ours = Llama(version, tau, eta), Mirostat(version, tau, eta, temperature, None)
    sizes = set[int]()
    for position, logits in enumerate(rows()):
        kept, picked = theirs.apply(logits / np.float32(temperature))
        tokens = ours.kept(logits, position)
        # f32 against f64: a token at the very edge may fall on either side.
        assert len(kept ^ set(tokens.tolist())) <= 1, (position, len(kept), tokens.size)
        if picked not in tokens:
            break
        ours.said(picked, tokens, logits[tokens])
        sizes.add(tokens.size)
    theirs.close()
    assert position == N_ROWS - 1
    assert len(sizes) > 3 or tau == 0


def options(version: int, mu: float | None = None) -> SamplingOptions:
    numbers = {"mirostat": float(version), "mirostat_tau": 3.0, "mirostat_eta": 0.3}
    if mu is not None:
        numbers["mirostat_mu"] = mu
    return SamplingOptions(temperature=0.9, seed=5, top_k=2, frequency_penalty=1.0, numbers=numbers)


@pytest.mark.parametrize("version", [1, 2])
def test_a_session_that_is_rebuilt_at_any_token_goes_on_exactly(version: int) -> None:
    sampler = SessionSampler(options(version), N_VOCAB)
    picked = [sampler.sample(logits, position) for position, logits in enumerate(rows())]
    assert len({sample.token for sample in picked}) > 10, "neither top-k nor penalties act"
    for lost in (1, 17, N_ROWS - 1):
        mu = picked[lost - 1].mirostat_mu
        assert mu == np.float32(mu), "as it travels"
        again = SessionSampler(options(version, mu), N_VOCAB, [sample.token for sample in picked[:lost]])
        for position, logits in enumerate(rows()):
            if position >= lost:
                assert again.sample(logits, position) == picked[position]


def test_a_position_that_is_picked_again_counts_once() -> None:
    all_rows = list(rows())
    sampler, plain = SessionSampler(options(2), N_VOCAB), SessionSampler(options(2), N_VOCAB)
    expected = [plain.sample(logits, position) for position, logits in enumerate(all_rows)]
    for position in (0, 1, 2, 3, 1, 2, 3, 4, 0, 1):
        assert sampler.sample(all_rows[position], position) == expected[position]
    with pytest.raises(InternalError, match="position 3"):
        sampler.sample(all_rows[3], 3)


def test_banned_tokens_are_never_kept_and_one_is_always() -> None:
    logits = np.full(N_VOCAB, -np.inf, np.float32)
    logits[[7, 9]] = 1.0, -2.0
    for version in (1, 2):
        for mu in (-5.0, 0.0, 50.0):
            kept = Mirostat(version, 3.0, 0.1, 1.0, mu).kept(logits, 0).tolist()
            assert 7 in kept
            assert set(kept) <= {7, 9}
    logits[9] = -np.inf
    assert Mirostat(1, 3.0, 0.1, 1.0, None).kept(logits, 0).tolist() == [7]


def test_with_temperature_0_the_largest_logit_is_picked_and_no_mu_is_reported() -> None:
    greedy = SamplingOptions(temperature=0.0, numbers={"mirostat": 2.0})
    sampler = SessionSampler(greedy, N_VOCAB)
    for position, logits in enumerate(rows()):
        assert sampler.sample(logits, position)[:] == (int(logits.argmax()), None, [], None)


def test_a_mu_that_rises_without_end_keeps_every_token_and_comes_back() -> None:
    """Each token adds some 90 bits. Two to that power leaves the range of a float behind token 11."""
    numbers = {"mirostat": 1, "mirostat_tau": 100.0, "mirostat_eta": 1.0}
    options = SamplingOptions(seed=3, numbers=numbers)
    sampler, logits = SessionSampler(options, N_VOCAB), next(rows())
    assert [sampler.sample(logits, position).mirostat_mu for position in range(30)][-1] > 2_000
    kept = Mirostat(1, 100.0, 1.0, 1.0, 2_000.0).kept(logits, 0)
    assert kept.size == N_VOCAB
    last = SessionSampler(SamplingOptions(seed=3, numbers=numbers | {"mirostat_mu": 1e6}), N_VOCAB)
    SamplingOptions(numbers=numbers | {"mirostat_mu": last.sample(logits, 0).mirostat_mu})


@pytest.mark.parametrize("version", [1, 2])
def test_an_infinite_temperature_allows_no_forbidden_token(version: int) -> None:
    logits = next(rows())
    logits[:450] = -np.inf
    sampler = SessionSampler(SamplingOptions(temperature=np.inf, numbers={"mirostat": version}), N_VOCAB)
    hottest = SessionSampler(SamplingOptions(temperature=1e300, numbers={"mirostat": version}), N_VOCAB)
    picked = [sampler.sample(logits, position).token for position in range(20)]
    assert min(picked) >= 450
    assert picked == [hottest.sample(logits, position).token for position in range(20)]
