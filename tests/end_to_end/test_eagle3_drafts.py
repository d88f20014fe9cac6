"""Drafts by an EAGLE-3 model over real stages: answers are the same as without, whatever becomes of stages and streams.

The guesses that the coordinator is told are those of the unsplit model behind the same tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relayline.coordinator.engine.pipeline import PipelineConfig
from relayline.coordinator.model.eagle3 import served
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.coordinator.model.split import split_model
from relayline.wire.common.errors import HandshakeError
from relayline.wire.model_files.eagle3 import InnerRows, read_eagle3
from tests.end_to_end.test_mtp_drafts import Told, assert_said_by_the_whole, split, told_fixture
from tests.support.fleet import GREEDY, answers_over_losses, fleet, read, request, tokens_of
from tests.support.tiny_eagle import WholeEagle, make_copying, make_eagle
from tests.support.tiny_models import make_tiny

FIXTURES = (told_fixture,)  # pytest finds it in the modules that name it
N_DRAFTS, N_TOKENS = 4, 30
LAYERS = (1, 2, 4)
PROMPTS = [tuple(np.random.default_rng(seed).integers(1, 120, n).tolist()) for seed, n in ((1, 5), (2, 21))]


def assert_guessed_by_the_whole(model: Path, eagle: Path, told: Told, layers: Sequence[int] = LAYERS) -> None:
    assert told
    whole = WholeEagle(model, eagle, layers)
    for history, tokens, chances in told:
        expected = whole.guesses(history, len(tokens))
        assert tokens == [token for token, _ in expected]
        np.testing.assert_allclose(chances, [chance for _, chance in expected], rtol=0.02, atol=1e-3)
    whole.close()


def completed(eagle: Path, directory: Path, file: PipelineFile) -> InnerRows:
    drafter = served(read_eagle3(eagle), directory, file, None)
    return InnerRows(drafter.layers, drafter.path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["llama", "gpt-oss", "qwen3", "qwen35"])
async def test_answers_are_the_same_and_guesses_those_of_the_whole_at_every_legal_cut(
    family: str, told: Told, tmp_path: Path
) -> None:
    model, plain = make_tiny(family, tmp_path / "model.gguf"), []
    facts = inspect_model(model)
    layers = (1, 2, facts.n_layers - 1)
    eagle = make_eagle(tmp_path / "eagle.gguf", layers)
    back = N_DRAFTS if any(facts.state_bytes_per_lane) else 0
    kv_layout = "per-lane" if facts.window_tokens else "unified"  # windows are not taken back in shared cells
    for cut in facts.legal_cuts:
        paths, file = split(model, tmp_path / str(cut), (cut,))
        for inner in (None, InnerRows(layers, eagle)):
            told.clear()
            async with fleet(
                paths, file=file, draft=N_DRAFTS, inner=inner, rewind_rows=back, kv_layout=kv_layout, window_cells="all"
            ) as running:
                asked = [request(prompt, N_TOKENS, GREEDY) for prompt in PROMPTS]
                answers = [await tokens_of(running.pipeline.open(each)) for each in asked]
            plain = plain or answers
            assert answers == plain
            assert bool(told) == (inner is not None)
        assert_guessed_by_the_whole(model, eagle, told, layers)
    assert_said_by_the_whole(model, PROMPTS, plain)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kv_layout", ["unified", "per-lane"])
async def test_losses_change_no_answer(kv_layout: str, told: Told, tmp_path: Path) -> None:
    model = make_tiny("qwen3", tmp_path / "model.gguf")
    eagle = make_eagle(tmp_path / "eagle.gguf", LAYERS, own_table=False)
    paths, file = split(model, tmp_path / "split", (2, 4))
    inner = completed(eagle, tmp_path / "split", file)
    async with fleet(paths, file=file, draft=N_DRAFTS, inner=inner, kv_layout=kv_layout) as running:
        answers = await answers_over_losses(running, PROMPTS, N_TOKENS)
    assert told
    assert_said_by_the_whole(model, PROMPTS, answers)


async def test_a_model_that_copies_is_right_also_after_turns_cancelled_streams_and_in_company(
    told: Told, tmp_path: Path
) -> None:
    model = make_tiny("llama:faint", tmp_path / "model.gguf", vocab=8_000)  # so many that texts repeat nothing
    eagle = make_copying(model, tmp_path / "eagle.gguf", LAYERS)
    paths, file = split(model, tmp_path / "split", (2, 3))
    inner = completed(eagle, tmp_path / "split", file)
    async with fleet(paths, file=file, draft=N_DRAFTS, inner=inner, prefix_lanes=2) as running:
        open_stream = running.pipeline.open
        alone = [await tokens_of(open_stream(request(prompt, N_TOKENS, GREEDY))) for prompt in PROMPTS]
        assert n_right(told, PROMPTS, alone) > 0.9
        together = await asyncio.gather(*(tokens_of(open_stream(request(each, N_TOKENS, GREEDY))) for each in PROMPTS))
        assert together == alone
        cancelled = open_stream(request(PROMPTS[0], N_TOKENS, GREEDY))
        await read(cancelled, 4)
        await cancelled.aclose()
        turn = (*PROMPTS[1], *alone[1], *PROMPTS[0])
        told.clear()
        again = await tokens_of(open_stream(request(turn, N_TOKENS, GREEDY)))
        assert n_right(told, [turn], [again]) > 0.9
        figures = await running.pipeline.describe()
    assert figures["accepted_tokens"] > max(30, 0.5 * figures["drafted_tokens"])  # type: ignore[operator, call-overload]
    assert_said_by_the_whole(model, [*PROMPTS, turn], [*alone, again])


def n_right(told: Told, prompts: Sequence[tuple[int, ...]], answers: Sequence[list[int]]) -> float:
    """The share of guesses that the answers went on with."""
    n_said = n_guessed = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        text = [*prompt, *answer]
        for history, tokens, _ in told:
            if len(history) > len(prompt) and history == text[: len(history)]:
                behind = text[len(history) : len(history) + len(tokens)]
                n_guessed += len(behind)
                n_said += sum(said == guess for said, guess in zip(behind, tokens, strict=False))
    assert n_guessed
    return n_said / n_guessed


@pytest.mark.parametrize("knows", ["stages", "coordinator"])
async def test_one_without_the_draft_model_is_refused_in_one_line(
    knows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny("llama", tmp_path / "model.gguf")
    paths, file = split(model, tmp_path / "split", (2,))
    inner = InnerRows(LAYERS, make_eagle(tmp_path / "eagle.gguf", LAYERS)) if knows == "stages" else None
    layers = () if knows == "stages" else LAYERS

    def config(*args: Any, inner_layers: object, **more: Any) -> PipelineConfig:
        return PipelineConfig(*args, inner_layers=layers, **more)

    monkeypatch.setattr("tests.support.fleet.PipelineConfig", config)
    says = "hands on inner rows for an EAGLE-3 model" if inner is not None else "does not hand on the inner rows"
    with pytest.raises(HandshakeError, match=says):
        async with fleet(paths, file=file, inner=inner):
            raise AssertionError("it is never ready")


def test_a_completed_file_is_made_once(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model.gguf", quant="q8_0")
    eagle = read_eagle3(make_eagle(tmp_path / "eagle.gguf", LAYERS, own_table=False, maps_tokens=True))
    file = split_model(model, tmp_path / "split", cuts=(2,))
    first = served(eagle, tmp_path / "split", file, None)
    before = first.path.stat().st_mtime_ns
    assert served(eagle, tmp_path / "split", file, None) == first
    assert first.path.stat().st_mtime_ns == before
    made = read_eagle3(first.path)
    assert made.has_table
    assert made.layers == LAYERS
