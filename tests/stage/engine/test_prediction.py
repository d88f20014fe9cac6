"""Guesses by prediction layers: a slice's are those of the unsplit model, whatever became of its lanes before."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.split import split_model
from relayline.stage.engine.told_rows import Guess, Told
from tests.support.chain import Chain
from tests.support.tiny_models import make_tiny
from tests.support.whole_predictions import WholePredictions

N_GUESSES = 3
FAMILIES = (
    "qwen35:mtp", "hy_v3", "qwen35moe:mtp", "deepseek2:mtp", "deepseek32:mtp", "glm-dsa",
    "step35:mtp", "cohere2moe:prediction",
)  # fmt: skip
TEXT = [int(token) for token in np.random.default_rng(5).integers(1, 120, 40)]


class PredictingChain(Chain):
    """All stages of a split, whose last one is told what follows each row."""

    def tell(self, tokens: Sequence[int], following: int, n_drafts: int = 0) -> list[list[Guess]]:
        """Feed tokens, and then `following` as the one behind them; return the guesses of each lane."""
        first, n_rows = self.position, len(tokens)
        self.step(tokens)
        last = self.engines[-1]
        predictor = last.rewinds.predictor
        assert predictor is not None
        rows = predictor.hidden(np.arange(n_rows * len(self.lanes))).reshape(len(self.lanes), n_rows, -1)
        told = []
        for lane, mine in zip(self.lanes, rows, strict=True):
            behind = [*tokens[1:], following]
            if first == 0:
                mine, behind = np.concatenate([np.zeros_like(mine[:1]), mine]), [tokens[0], *behind]
            told.append(Told(lane, first + 1 - (first == 0), behind, mine, n_drafts))
        return predictor.take(told)


@pytest.fixture(scope="module", name="models", params=FAMILIES)
def models_fixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    return make_tiny(request.param, directory / f"{request.param}.gguf")


def same(found: Sequence[Guess], expected: Sequence[tuple[int, float]]) -> None:
    n = len(found)
    assert [guess.token for guess in found] == [token for token, _ in expected[:n]]
    np.testing.assert_allclose([guess.chance for guess in found], [chance for _, chance in expected[:n]], rtol=1e-2)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kv_layout", ["unified", "per-lane"])
def test_a_slices_guesses_are_the_unsplit_models_at_every_legal_cut(
    models: Path, kv_layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relayline.stage.engine.prediction.CHANCE_MIN", 0.0)
    for cut in inspect_model(models).legal_cuts:
        pipeline = split_model(models, tmp_path / str(cut), cuts=(cut,))
        with PredictingChain(
            tmp_path / str(cut), pipeline, lanes=(0, 2), kv_layout=kv_layout, mtp_drafts=N_GUESSES
        ) as chain:
            whole = WholePredictions(models, chain.flash_attn)
            for begin, end in itertools.pairwise((0, 1, 9, 10, 30)):
                found = chain.tell(TEXT[begin:end], TEXT[end], N_GUESSES)
                expected = whole.guesses(TEXT[: end + 1], N_GUESSES)
                for guesses in found:
                    assert len(guesses) == (1 if "step35" in models.name else N_GUESSES)
                    same(guesses, expected)
            whole.close()
