"""Adaptive-p compared with llama.cpp's own sampler, token for token; and a session that is rebuilt."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import pytest
from llama_cpp import llama_cpp as llama

from relayline.stage.sampling.adaptive import AdaptiveP
from relayline.stage.sampling.draws import Draws, noise_keys
from relayline.stage.sampling.rows import Ask, sample_rows
from relayline.stage.sampling.sampler import SamplingOptions, SessionSampler
from relayline.wire.common.errors import InternalError
from tests.support.drawn_rows import logits_of

N_VOCAB = 60
N_ROWS = 40
SETTINGS = [(0.5, 0.9), (0.1, 0.5), (0.9, 0.99), (0.0, 0.0), (1.0, 0.9)]


def rows() -> list[npt.NDArray[np.float32]]:
    return [logits_of(at, N_VOCAB, 0.5 + at % 4, lead=2.0 * (at % 3)) for at in range(N_ROWS)]


def softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    return weights / weights.sum()


@pytest.mark.parametrize(("target", "decay"), SETTINGS)
def test_the_chances_of_each_draw_are_llama_cpps(target: float, decay: float) -> None:
    """Each is told of the token that llama.cpp has picked."""
    theirs, ours = llama.llama_sampler_init_adaptive_p(target, decay, 1), AdaptiveP(target, decay, None)
    totals = set[float]()
    for position, logits in enumerate(rows()):
        entries = (llama.llama_token_data * N_VOCAB)(
            *(llama.llama_token_data(token, float(logit), 0.0) for token, logit in enumerate(logits))
        )
        array = llama.llama_token_data_array(entries, N_VOCAB, -1, False)
        llama.llama_sampler_apply(theirs, ctypes.byref(array))
        native = np.array([array.data[at].p for at in range(N_VOCAB)])
        chances = softmax(logits)
        np.testing.assert_allclose(softmax(ours.logits(chances, position)), native, rtol=1e-3, atol=1e-6)
        picked = array.data[array.selected].id
        llama.llama_sampler_accept(theirs, picked)
        ours.said(float(chances[picked]))
        totals.add(ours.total)
    llama.llama_sampler_free(theirs)
    assert len(totals) == N_ROWS


def options(total: float | None = None, **more: float) -> SamplingOptions:
    numbers = {"adaptive_target": 0.3, "adaptive_decay": 0.8, **more}
    if total is not None:
        numbers["mirostat_mu"] = total
    return SamplingOptions(temperature=0.9, seed=5, top_k=30, numbers=numbers)


@pytest.mark.parametrize("more", [{}, {"dynatemp_range": 0.9}])
def test_a_session_that_is_rebuilt_at_any_token_goes_on_exactly(more: dict[str, float]) -> None:
    sampler = SessionSampler(options(**more), N_VOCAB)
    assert not sampler.draws_plainly, "it is not drawn together with others"
    picked = [sampler.sample(logits, position) for position, logits in enumerate(rows())]
    for lost in (1, 17, N_ROWS - 1):
        total = picked[lost - 1].mirostat_mu
        assert total is not None
        assert total == np.float32(total), "as it travels"
        again = SessionSampler(options(total, **more), N_VOCAB, [sample.token for sample in picked[:lost]])
        for position, logits in enumerate(rows()):
            if position >= lost:
                assert again.sample(logits, position) == picked[position]


def test_a_sample_is_the_keyed_draw_among_what_top_k_leaves() -> None:
    sampler, state, draws = SessionSampler(options(), N_VOCAB), AdaptiveP(0.3, 0.8, None), Draws(N_VOCAB)
    for position, logits in enumerate(rows()):
        tokens = np.sort(np.argsort(-logits, kind="stable")[:30]).astype(np.int32)
        chances = softmax(logits[tokens] / np.float32(0.9))
        adapted = state.logits(chances, position)
        token = draws.draw(adapted, float(adapted.max()), 1.0, noise_keys(5, position), tokens)
        (found,) = sample_rows([Ask(sampler, logits, position)])
        assert found.token == token  # type: ignore[union-attr]
        state.said(float(chances[tokens.tolist().index(token)]))
    assert sampler.sample(rows()[3], 3).token < N_VOCAB, "a position may come again"
    with pytest.raises(InternalError, match="position 20"):
        sampler.sample(rows()[20], 20)


def test_temperature_0_and_mirostat_go_before_it() -> None:
    logits = rows()[0]
    greedy = SessionSampler(SamplingOptions(temperature=0.0, numbers={"adaptive_target": 0.3}), N_VOCAB)
    assert greedy.is_greedy
    assert greedy.sample(logits, 0)[:] == (int(logits.argmax()), None, [], None)
    both = SessionSampler(options(mirostat=2.0), N_VOCAB).sample(logits, 0)
    alone = SessionSampler(SamplingOptions(temperature=0.9, seed=5, numbers={"mirostat": 2.0}), N_VOCAB)
    assert both == alone.sample(logits, 0)
    cold = options(dynatemp_range=0.9, dynatemp_exponent=90.0)
    sure = np.zeros(N_VOCAB, np.float32)
    sure[7] = 200.0
    assert SessionSampler(cold, N_VOCAB).sample(sure, 0).token == 7
