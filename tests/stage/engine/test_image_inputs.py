"""Rows of images and audio in models that do more with them than take them: the logits behind them are the whole
model's, wherever it is cut. Answers alone would hide inputs of another token, or another scale.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from relayline.coordinator.model.split import split_model
from relayline.stage.engine import artifact, embedding
from tests.stage.engine.test_mutual_rows import BEFORE, BEHIND, CTX, END, IMAGE, NEAR, Stages, Whole
from tests.support.tiny_models import make_tiny

E2B = "gemma4:e2b"


@pytest.fixture(scope="module", name="model")
def model_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(E2B, tmp_path_factory.mktemp("model") / "model.gguf")


def _whole_logits(model: Path, *, is_mutual: bool) -> np.ndarray:
    with Whole(model, CTX, 1) as whole:
        whole.read(BEFORE, 0)
        whole.see(IMAGE, len(BEFORE), is_mutual=is_mutual)
        return whole.read(BEHIND, END)


def _split_logits(model: Path, cuts: tuple[int, ...], out: Path, *, is_mutual: bool) -> np.ndarray:
    file = split_model(model, out, cuts=cuts)
    stages = Stages([out / stage.file for stage in file.stages], "per-lane")
    try:
        stages.read(BEFORE, 0)
        stages.read(IMAGE, len(BEFORE), is_mutual=is_mutual)
        return stages.read(BEHIND, END)
    finally:
        for engine in stages.engines:
            engine.close()


@pytest.mark.parametrize(("family", "cuts"), [("granite", (1, 2, 3, 4)), ("gemma2", (2, 4)), ("lfm2", (3, 5))])
def test_rows_are_scaled_as_the_whole_model_scales_them(family: str, cuts: tuple[int, ...], tmp_path: Path) -> None:
    model = make_tiny(family, tmp_path / "model.gguf")
    expected = _whole_logits(model, is_mutual=False)
    assert np.abs(_split_logits(model, cuts, tmp_path / "out", is_mutual=False) - expected).max() < NEAR
    assert expected.std() > 1


def test_rows_left_as_they_are_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny("granite", tmp_path / "model.gguf")
    monkeypatch.setattr(artifact.StageArtifact, "scales_media", False)
    found = _split_logits(model, (2,), tmp_path / "out", is_mutual=False)
    assert np.abs(found - _whole_logits(model, is_mutual=False)).max() > 10 * NEAR


@pytest.mark.parametrize("is_mutual", [False, True])
@pytest.mark.parametrize("cuts", [(2, 4, 6), (3, 5)])
def test_logits_behind_an_image_are_the_whole_models(
    cuts: tuple[int, ...], is_mutual: bool, model: Path, tmp_path: Path
) -> None:
    expected = _whole_logits(model, is_mutual=is_mutual)
    found = _split_logits(model, cuts, tmp_path / "out", is_mutual=is_mutual)
    assert np.abs(found - expected).max() < NEAR
    assert expected.std() > 1


def test_inputs_of_another_token_would_show(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "_PADDING", 1)
    found = _split_logits(model, (4,), tmp_path / "out", is_mutual=False)
    assert np.abs(found - _whole_logits(model, is_mutual=False)).max() > 10 * NEAR
