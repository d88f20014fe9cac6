"""Drafts by a model's own prediction layers over real stages: the answers are the same as without, also after losses.

The guesses that the coordinator is told are those of the unsplit model behind the same tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from relayline.coordinator.engine import conductor
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.coordinator.model.split import split_model
from relayline.coordinator.sessions.session import Session, take_guesses
from relayline.coordinator.sessions.told_guesses import ToldFacts
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.paths import DEMO, HYBRID_DEMO_MODEL
from relayline.deploy.testing.reference import ReferenceModel
from tests.support.fleet import GREEDY, answers_over_losses, fleet, logits_along, request, tokens_of
from tests.support.tiny_models import make_tiny
from tests.support.whole_predictions import WholePredictions

FAMILIES = ("qwen35:mtp", "deepseek2:mtp", "hy_v3", "qwen35moe:mtp")
N_DRAFTS, N_TOKENS = 3, 30
PROMPTS = [tuple(np.random.default_rng(seed).integers(1, 120, n).tolist()) for seed, n in ((1, 5), (2, 21))]
Told = list[tuple[list[int], list[int], list[float]]]


@pytest.fixture(name="told")
def told_fixture(monkeypatch: pytest.MonkeyPatch) -> Told:
    """The guesses that coordinators are told, each behind its history."""
    found: Told = []

    def noted(
        session: Session, position: int, tokens: Sequence[int], chances: Sequence[float], facts: ToldFacts, now_ns: int
    ) -> None:
        if position == len(session.history):
            found.append((list(session.history), list(tokens), list(chances)))
        take_guesses(session, position, tokens, chances, facts, now_ns)

    monkeypatch.setattr(conductor, "take_guesses", noted)
    return found


def split(model: Path, directory: Path, cuts: tuple[int, ...]) -> tuple[list[Path], PipelineFile]:
    pipeline = split_model(model, directory, cuts=cuts)
    return [directory / stage.file for stage in pipeline.stages], pipeline


def assert_guessed_by_the_whole(model: Path, told: Told, flash_attn: str = "auto") -> None:
    assert told
    whole = WholePredictions(model, flash_attn)
    for history, tokens, chances in told:
        expected = whole.guesses(history, len(tokens))
        assert tokens == [token for token, _ in expected]
        np.testing.assert_allclose(chances, [chance for _, chance in expected], rtol=0.02, atol=1e-3)
    whole.close()


def assert_said_by_the_whole(model: Path, prompts: Sequence[tuple[int, ...]], answers: Sequence[list[int]]) -> None:
    with ReferenceModel(model, 256, 1) as whole:
        for prompt, tokens in zip(prompts, answers, strict=True):
            logits = logits_along(whole, prompt, tokens)
            behind = logits.max(axis=1) - logits[np.arange(len(tokens)), tokens]
            assert behind.max() < 0.02 * logits.std()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", FAMILIES)
async def test_answers_are_the_same_and_guesses_those_of_the_whole_at_every_legal_cut(
    family: str, told: Told, tmp_path: Path
) -> None:
    model = make_tiny(family, tmp_path / "model.gguf")
    plain: list[list[int]] = []
    for cut in inspect_model(model).legal_cuts:
        paths, file = split(model, tmp_path / str(cut), (cut,))
        for n_drafts in (0, N_DRAFTS):
            told.clear()
            async with fleet(
                paths, file=file, draft=N_DRAFTS, rewind_rows=N_DRAFTS, mtp_drafts=n_drafts, kv_layout="unified"
            ) as running:
                asked = [request(prompt, N_TOKENS, GREEDY) for prompt in PROMPTS]
                answers = [await tokens_of(running.pipeline.open(each)) for each in asked]
            plain = plain or answers
            assert answers == plain
            assert bool(told) == bool(n_drafts)
        assert_guessed_by_the_whole(model, told)
    assert_said_by_the_whole(model, PROMPTS, plain)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv_layout", ["unified", "per-lane"])
@pytest.mark.parametrize("family", ["qwen35:mtp", "deepseek2:mtp"])
async def test_losses_change_no_answer(family: str, kv_layout: str, told: Told, tmp_path: Path) -> None:
    model = make_tiny(family, tmp_path / "model.gguf")
    paths, file = split(model, tmp_path / "split", (4,))
    async with fleet(
        paths, file=file, draft=N_DRAFTS, rewind_rows=N_DRAFTS, mtp_drafts=N_DRAFTS, kv_layout=kv_layout
    ) as running:
        answers = await answers_over_losses(running, PROMPTS, N_TOKENS)
    assert told
    assert_said_by_the_whole(model, PROMPTS, answers)


async def test_a_trained_models_guesses_are_mostly_right(told: Told, tmp_path: Path) -> None:
    """Also where a stream begins with the cells of another one, and where several decode at once."""
    paths, file = split(HYBRID_DEMO_MODEL, tmp_path, (5, 10))
    tokenizer = Tokenizer.load(tmp_path / file.tokenizer.file)
    text = (DEMO / "heldout.txt").read_text(encoding="utf-8")
    prompts = [tuple(tokenizer.encode(text[at : at + 300])) for at in range(0, 2_800, 700)]
    async with fleet(
        paths, file=file, draft=N_DRAFTS, rewind_rows=N_DRAFTS, mtp_drafts=N_DRAFTS, ctx_tokens=256, prefix_lanes=2
    ) as running:
        alone = [await tokens_of(running.pipeline.open(request(prompt, 40, GREEDY))) for prompt in prompts]
        figures = await running.pipeline.describe()
        together = await asyncio.gather(
            *(tokens_of(running.pipeline.open(request(prompt, 40, GREEDY))) for prompt in prompts[:2])
        )
        longer = [*prompts[0], *alone[0], *prompts[1][:9]]
        await tokens_of(running.pipeline.open(request(tuple(longer), 20, GREEDY)))
    assert figures["accepted_tokens"] > 0.4 * figures["drafted_tokens"]  # type: ignore[operator]
    assert figures["accepted_tokens"] > 0.35 * 40 * len(prompts)  # type: ignore[operator]
    assert together == alone[:2]
