"""Models with sidebands or tables by token id, over real stages: streams, chats, losses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.coordinator.model.split import split_model
from relayline.deploy.testing.reference import ReferenceModel
from tests.end_to_end.test_going_on import cut
from tests.end_to_end.test_prefix_lanes import rows_of, until_kept
from tests.support.fleet import (
    CTX,
    SHAPE,
    answers_over_losses,
    assert_greedy,
    fleet,
    prompt_of,
    read,
    request,
    tokens_of,
)
from tests.support.tiny_models import make_tiny

# Each with the layout in which its streams can resume anywhere.
MODELS = {
    "gemma4:e2b": ((2, 4, 6), "per-lane"),
    "deepseek4:hash": ((3, 5), "per-lane"),
    "kimi-k3": ((4, 5, 8), "unified"),
}
Served = tuple[PipelineFile, list[Path], ReferenceModel, str]


@pytest.fixture(scope="module", params=MODELS, name="served")
def served_fixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model in three or four stages, and in one piece."""
    directory = tmp_path_factory.mktemp("model")
    cuts, layout = MODELS[request.param]
    model = make_tiny(request.param, directory / "model.gguf", vocab=SHAPE.n_vocab)
    file = split_model(model, directory / "out", cuts=cuts)
    paths = [directory / "out" / stage.file for stage in file.stages]
    with ReferenceModel(model, CTX, 1) as whole:
        yield file, paths, whole, layout


@pytest.mark.sampled(1)
async def test_streams_at_once_and_the_next_turn_of_a_chat(served: Served) -> None:
    file, paths, whole, layout = served
    prompts = [prompt_of(seed, 40 + 7 * seed) for seed in range(4)]
    async with fleet(paths, prefix_lanes=4, kv_layout=layout, file=file) as running:
        outputs = await asyncio.gather(*(tokens_of(running.pipeline.open(request(each, 10))) for each in prompts))
        await until_kept(running, 4)
        before = await rows_of(running)
        history = (*prompts[3], *outputs[3], *prompt_of(9, 5))
        answer = await tokens_of(running.pipeline.open(request(history, 6)))
        n_read = [now - then for now, then in zip(await rows_of(running), before, strict=True)]
    for prompt, tokens in zip(prompts, outputs, strict=True):
        assert_greedy(whole, prompt, tokens)
    assert_greedy(whole, history, answer)
    assert n_read == [1 + 5 + 5] * len(paths), "only new text is read"


@pytest.mark.sampled(1)
async def test_a_lost_stage_is_a_pause_and_no_more(served: Served) -> None:
    file, paths, whole, layout = served
    prompts = [prompt_of(3, 37), prompt_of(4, 50)]
    async with fleet(paths, kv_layout=layout, file=file) as running:
        tokens = await answers_over_losses(running, prompts, 30)
    for prompt, answer in zip(prompts, tokens, strict=True):
        assert_greedy(whole, prompt, answer)


@pytest.mark.sampled(1)
async def test_rows_keep_their_sidebands_after_a_lost_link(served: Served) -> None:
    """Steps are sent again, and lanes are taken back to where all stages agree."""
    file, paths, whole, layout = served
    prompt = prompt_of(5, 60)
    async with fleet(paths, kv_layout=layout, file=file, proxied=True) as running:
        stream = running.pipeline.open(request(prompt, 20))
        tokens = await read(stream, 3)
        for where in range(1, len(paths)):
            await cut(running, where)
            tokens += await read(stream, 2)
        tokens += await tokens_of(stream)
    assert len(tokens) == 20
    assert_greedy(whole, prompt, tokens)
