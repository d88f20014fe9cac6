"""Guesses by an EAGLE-3 model: those of stages are the unsplit model's, wherever it is cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.split import split_model
from relayline.stage.engine.told_rows import Guess, Told
from relayline.wire.common.errors import RelaylineError
from tests.support.chain import Chain
from tests.support.tiny_eagle import WholeEagle, make_eagle
from tests.support.tiny_models import make_tiny

N_GUESSES = 3
FAMILIES = (
    "llama", "gpt-oss", "qwen3", "qwen3moe", "bailingmoe3", "gemma4", "hunyuan_vl", "lfm2", "lfm2moe", "mimo2",
    "minimax-m2", "nanbeige", "nemotron_h", "nemotron_h_moe", "qwen35", "qwen35moe",
)  # fmt: skip
KINDS = {
    "plain": {},
    "other tokens": {"maps_tokens": True},
    "normed": {"norm_before_residual": True, "norm_before_fc": True},
    "no head": {"own_head": False},
    "narrow": {"width": 32},
}
TEXT = [int(token) for token in np.random.default_rng(5).integers(1, 120, 40)]


class EagleChain(Chain):
    """All stages of a split, whose last one is told what follows each row."""

    def tell(self, tokens: Sequence[int], following: int) -> tuple[np.ndarray, list[list[Guess]]]:
        """Feed tokens, and then `following` as the one behind them; return each lane's inner rows and its guesses."""
        first, n_rows = self.position, len(tokens)
        self.step(tokens)
        predictor = self.engines[-1].rewinds.predictor
        assert predictor is not None
        rows = predictor.hidden(np.arange(n_rows * len(self.lanes))).reshape(len(self.lanes), n_rows, -1)
        behind = [*tokens[1:], following]
        told = [Told(lane, first + 1, behind, mine, N_GUESSES) for lane, mine in zip(self.lanes, rows, strict=True)]
        return rows, predictor.take(told)


@pytest.fixture(name="all_guesses", autouse=True)
def all_guesses_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relayline.stage.engine.prediction.CHANCE_MIN", 0.0)


def assert_as_whole(
    model: Path, eagle: Path, layers: tuple[int, ...], directory: Path, cuts: tuple[int, ...], kv_layout: str
) -> None:
    pipeline = split_model(model, directory, cuts=cuts)
    with EagleChain(
        directory, pipeline, lanes=(0, 2), kv_layout=kv_layout, inner_layers=layers, drafter=eagle
    ) as chain:
        whole = WholeEagle(model, eagle, layers, chain.flash_attn)
        for begin, end in itertools.pairwise((0, 1, 9, 30)):
            inner, found = chain.tell(TEXT[begin:end], TEXT[end])
            expected = whole.inner(TEXT[:end])[begin:]
            for rows, guesses in zip(inner, found, strict=True):
                np.testing.assert_allclose(rows, expected, atol=5e-3)
                like = whole.guesses(TEXT[: end + 1], N_GUESSES)
                assert [guess.token for guess in guesses] == [token for token, _ in like]
                np.testing.assert_allclose([guess.chance for guess in guesses], [each for _, each in like], rtol=1e-2)
        whole.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv_layout", ["unified", "per-lane"])
@pytest.mark.parametrize("family", FAMILIES)
def test_guesses_are_the_unsplit_models_at_every_legal_cut(family: str, kv_layout: str, tmp_path: Path) -> None:
    model = make_tiny(family, tmp_path / "model.gguf")
    facts = inspect_model(model)
    layers = (1, facts.n_layers // 2, facts.n_layers - 1)
    eagle = make_eagle(tmp_path / "eagle.gguf", layers)
    for cut in facts.legal_cuts[::2] if kv_layout == "per-lane" else facts.legal_cuts:
        assert_as_whole(model, eagle, layers, tmp_path / str(cut), (cut,), kv_layout)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_draft_model_guesses_over_many_stages(kind: str, tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model.gguf")
    layers = (4, 0, 2)  # in any order, as the model reads them
    eagle = make_eagle(tmp_path / "eagle.gguf", layers, **KINDS[kind])  # type: ignore[arg-type]
    for cuts in ((), (1, 2, 3, 4)):
        assert_as_whole(model, eagle, layers, tmp_path / str(len(cuts)), cuts, "unified")


def test_a_device_computes_the_last_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no hidden rows are captured there, and inner rows alone are taken out of the graph."""
    monkeypatch.setattr("relayline.stage.engine.native.computes_apart", lambda _: True)
    model = make_tiny("llama", tmp_path / "model.gguf")
    eagle = make_eagle(tmp_path / "eagle.gguf", (1, 3, 5))
    assert_as_whole(model, eagle, (1, 3, 5), tmp_path / "split", (2,), "unified")


def test_a_draft_model_without_a_token_table_is_refused_in_one_line(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model.gguf")
    eagle = make_eagle(tmp_path / "eagle.gguf", (1, 2, 3), own_table=False)
    pipeline = split_model(model, tmp_path / "split", cuts=(2,))
    with pytest.raises(RelaylineError, match="it has no token table; a coordinator adds the model's"):
        Chain(tmp_path / "split", pipeline, inner_layers=(1, 2, 3), drafter=eagle)


@pytest.mark.parametrize("family", ["deepseek4", "kimi-k3", "gemma4:e2b"])
def test_rows_that_have_other_parts_have_no_place_for_inner_rows(family: str, tmp_path: Path) -> None:
    model = make_tiny(family, tmp_path / "model.gguf")
    facts = inspect_model(model)
    pipeline = split_model(model, tmp_path / "split", cuts=facts.legal_cuts[:1])
    with pytest.raises(RelaylineError, match=f"rows of {facts.architecture} have no place for"):
        Chain(tmp_path / "split", pipeline, inner_layers=(1, 2, 3))
