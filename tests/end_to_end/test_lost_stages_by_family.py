"""Every family over real stages: two answers keep the whole model's tokens after the loss of each stage in turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.split import split_model
from relayline.deploy.testing.reference import ReferenceModel
from relayline.wire.common.kv_layout import UNIFIED_ARCHITECTURES
from tests.support.fleet import (
    CTX,
    SHAPE,
    answers_over_losses,
    assert_greedy,
    fleet,
    prompt_of,
)
from tests.support.tiny_families import RECIPES
from tests.support.tiny_models import make_tiny

N_TOKENS = 16


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", RECIPES)
async def test_answers_go_on_after_each_stage_was_lost(name: str, tmp_path: Path) -> None:
    model = make_tiny(name, tmp_path / "model.gguf", vocab=SHAPE.n_vocab)
    legal = inspect_model(model).legal_cuts
    file = split_model(model, tmp_path / "out", cuts=(legal[len(legal) // 2],))
    paths = [tmp_path / "out" / stage.file for stage in file.stages]
    layout = "unified" if RECIPES[name].architecture in UNIFIED_ARCHITECTURES else "per-lane"
    prompts = [prompt_of(3, 17), prompt_of(4, 23)]
    async with fleet(paths, kv_layout=layout, file=file) as running:
        tokens = await answers_over_losses(running, prompts, N_TOKENS)
    with ReferenceModel(model, CTX, 1) as whole:
        for prompt, answer in zip(prompts, tokens, strict=True):
            assert_greedy(whole, prompt, answer)
