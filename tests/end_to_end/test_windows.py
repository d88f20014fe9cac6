"""Models with sliding windows over stages that keep a window's cells alone, with the tokens of the whole model.

Rows that cannot be taken back are read again. A fault would only show as repeated work: rows and replays are counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.coordinator.model.split import split_model
from relayline.deploy.testing.reference import ReferenceModel
from tests.end_to_end.test_drafts_pipeline import predicting
from tests.end_to_end.test_going_on import cut
from tests.end_to_end.test_prefix_lanes import replays, rows_of, until_kept
from tests.support.fleet import SHAPE, Fleet, assert_greedy, fleet, prompt_of, read, request, tokens_of
from tests.support.tiny_models import make_tiny

LAYOUTS = ["unified", "per-lane"]
NAMES = ["gpt-oss", "gemma3"]
N_STAGES = 2
CTX = 1_024  # with steps of 64 rows, a window of 8 tokens takes 256 cells
Split = tuple[PipelineFile, list[Path]]


@pytest.fixture(scope="module", params=NAMES)
def windowed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Split, ReferenceModel]]:
    """A model in two stages, and the same in one piece with all cells."""
    directory = tmp_path_factory.mktemp("windows")
    model = make_tiny(request.param, directory / "model.gguf", vocab=SHAPE.n_vocab)
    pipeline = split_model(model, directory / "out", n_stages=N_STAGES)
    paths = [directory / "out" / stage.file for stage in pipeline.stages]
    with ReferenceModel(model, CTX, 1) as whole:
        yield (pipeline, paths), whole


async def read_of(running: Fleet, before: list[int]) -> list[int]:
    """The rows that each stage has computed since."""
    return [now - then for now, then in zip(await rows_of(running), before, strict=True)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv_layout", LAYOUTS)
async def test_each_turn_of_a_chat_reads_only_new_text(kv_layout: str, windowed: tuple[Split, ReferenceModel]) -> None:
    ((file, paths), whole), history = windowed, prompt_of(1, 400)
    async with fleet(paths, n_lanes=3, prefix_lanes=1, kv_layout=kv_layout, file=file, ctx_tokens=CTX) as running:
        assert running.pipeline.conductor.prefixes._keeps_state, "the stages keep windows alone"
        for turn in range(3):
            before = await rows_of(running)
            tokens = await tokens_of(running.pipeline.open(request(history, 12)))
            await until_kept(running, 1)
            n_rows = len(history) if turn == 0 else 1 + 8
            assert await read_of(running, before) == [n_rows + 11] * N_STAGES
            assert_greedy(whole, history, tokens)
            history += (*tokens, *prompt_of(2 + turn, 8))
        assert replays(running) == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv_layout", LAYOUTS)
async def test_a_prompt_without_the_last_answer_reads_only_what_is_new(
    kv_layout: str, windowed: tuple[Split, ReferenceModel]
) -> None:
    """As a chat template makes it that leaves out thoughts: far behind it, the window of its beginning is gone."""
    ((file, paths), whole), prompt = windowed, prompt_of(1, 300)
    async with fleet(paths, n_lanes=3, prefix_lanes=1, kv_layout=kv_layout, file=file, ctx_tokens=CTX) as running:
        for asked, n_said, n_read in ((prompt, 400, 300), (prompt, 12, 1), ((*prompt, *prompt_of(5, 9)), 12, 10)):
            before = await rows_of(running)
            tokens = await tokens_of(running.pipeline.open(request(asked, n_said)))
            await until_kept(running, 1)
            assert await read_of(running, before) == [n_read + n_said - 1] * N_STAGES
            assert_greedy(whole, asked, tokens[:12])
        assert replays(running) == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv_layout", LAYOUTS)
async def test_of_requests_that_begin_alike_one_reads_for_all(
    kv_layout: str, windowed: tuple[Split, ReferenceModel]
) -> None:
    """Eight at once: four are equal, as choices of one request are, and four agree for 340 tokens."""
    ((file, paths), whole), common = windowed, prompt_of(1, 340)
    prompts = [common + prompt_of(9, 30)] * 4 + [common + prompt_of(10 + chat, 3 * chat + 2) for chat in range(4)]
    async with fleet(paths, prefix_lanes=None, kv_layout=kv_layout, file=file, ctx_tokens=CTX) as running:
        outputs = await asyncio.gather(*(tokens_of(running.pipeline.open(request(prompt, 9))) for prompt in prompts))
        rows = await rows_of(running)
        assert replays(running) == 0
    for prompt, tokens in zip(prompts, outputs, strict=True):
        assert_greedy(whole, prompt, tokens)
    n_own = 340 + 30 + 3 + sum(3 * chat + 2 for chat in range(4))
    assert rows == [n_own + 8 * len(prompts)] * N_STAGES


@pytest.mark.sampled(2)
@pytest.mark.parametrize("wrong_every", [0, 2])
async def test_wrong_drafts_are_taken_back(wrong_every: int, windowed: tuple[Split, ReferenceModel]) -> None:
    """Two streams at once, each with a prediction that has a wrong token at regular intervals, and a next turn."""
    ((file, paths), whole), prompts = windowed, [prompt_of(3, 237), prompt_of(4, 350)]
    more = {"kv_layout": "per-lane", "file": file, "ctx_tokens": 2 * CTX, "max_rows": 256, "n_lanes": 4}
    async with fleet(paths, prefix_lanes=2, **more) as plain:
        asked = [request(prompt, 40) for prompt in prompts]
        said = [await tokens_of(plain.pipeline.open(each)) for each in asked]
    guessing = [predicting(*each, wrong_every) for each in zip(asked, said, strict=True)]
    async with fleet(paths, prefix_lanes=2, draft=8, **more) as running:
        outputs = await asyncio.gather(*(tokens_of(running.pipeline.open(each)) for each in guessing))
        await until_kept(running, 2)
        figures, before = await running.pipeline.describe(), await rows_of(running)
        further = (*prompts[0], *outputs[0], *prompt_of(5, 7))
        last = await tokens_of(running.pipeline.open(request(further, 6)))
        assert max(await read_of(running, before)) <= 1 + 7 + 5 + 8, "only new text is read"
        assert replays(running) == 0
    for prompt, tokens in zip([*prompts, further], [*outputs, last], strict=True):
        assert_greedy(whole, prompt, tokens)
    n_drafted, n_right = int(str(figures["drafted_tokens"])), int(str(figures["accepted_tokens"]))
    assert n_right > 5
    assert (n_drafted > n_right) == bool(wrong_every)


async def test_grants_end_without_a_replay(windowed: tuple[Split, ReferenceModel]) -> None:
    """Rows that a grant computed too many are taken back."""
    ((file, paths), whole), prompts = windowed, [prompt_of(seed, 250 + 30 * seed) for seed in range(3)]
    more = {"kv_layout": "per-lane", "file": file, "ctx_tokens": 2 * CTX, "max_rows": 256, "n_lanes": 4}
    async with fleet(paths, prefix_lanes=2, grant_steps=16, **more) as running:
        outputs = await asyncio.gather(*(tokens_of(running.pipeline.open(request(each, 30))) for each in prompts))
        further = (*prompts[0], *outputs[0], *prompt_of(5, 7))
        last = await tokens_of(running.pipeline.open(request(further, 6)))
        assert replays(running) == 0
    for prompt, tokens in zip([*prompts, further], [*outputs, last], strict=True):
        assert_greedy(whole, prompt, tokens)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv_layout", LAYOUTS)
async def test_broken_links_cause_no_replay(kv_layout: str, windowed: tuple[Split, ReferenceModel]) -> None:
    ((file, paths), whole), prompts = windowed, [prompt_of(seed, 260 + seed) for seed in range(3)]
    async with fleet(paths, kv_layout=kv_layout, file=file, ctx_tokens=CTX, proxied=True) as running:
        streams = [running.pipeline.open(request(prompt, 40)) for prompt in prompts]
        tokens = [await read(stream, 3) for stream in streams]
        for where in range(N_STAGES):
            await cut(running, where)
            for stream, begun in zip(streams, tokens, strict=True):
                begun += await read(stream, 3)
        for stream, begun in zip(streams, tokens, strict=True):
            begun += await tokens_of(stream)
    for prompt, answer in zip(prompts, tokens, strict=True):
        assert len(answer) == 40
        assert_greedy(whole, prompt, answer)


@pytest.mark.parametrize("kv_layout", LAYOUTS)
async def test_a_prefix_comes_back_from_the_tier(kv_layout: str, windowed: tuple[Split, ReferenceModel]) -> None:
    """Two chats take turns on one lane: whole, and up to the end of the prompt."""
    ((file, paths), whole), prompts = windowed, [prompt_of(seed, 300) for seed in range(2)]
    async with fleet(
        paths, n_lanes=1, prefix_lanes=None, kv_layout=kv_layout, file=file, ctx_tokens=CTX, tier_bytes=1 << 28
    ) as running:
        said = [await tokens_of(running.pipeline.open(request(prompt, 50))) for prompt in prompts]
        for prompt, tokens in zip(prompts, said, strict=True):
            assert_greedy(whole, prompt, tokens)
            before = await rows_of(running)
            further = (*prompt, *tokens, *prompt_of(7, 5))
            answer = await tokens_of(running.pipeline.open(request(further, 4)))
            assert max(await read_of(running, before)) <= 1 + 5 + 3
            assert_greedy(whole, further, answer)
            before = await rows_of(running)
            again = (*prompt, *prompt_of(8, 5))
            answer = await tokens_of(running.pipeline.open(request(again, 4)))
            assert max(await read_of(running, before)) <= 1 + 5 + 3
            assert_greedy(whole, again, answer)
        assert replays(running) == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv_layout", LAYOUTS)
@pytest.mark.parametrize(("before", "after"), [("window", "all"), ("all", "window")])
async def test_prefixes_of_other_window_cells_are_not_taken(
    before: str, after: str, kv_layout: str, windowed: tuple[Split, ReferenceModel], tmp_path: Path
) -> None:
    """Stages restart with another --window-cells and the same disk, whose lanes lack cells, or have too many."""
    ((file, paths), whole), prompts = windowed, [prompt_of(seed, 300) for seed in range(3)]
    async with fleet(
        paths, n_lanes=2, prefix_lanes=1, kv_layout=kv_layout, file=file, ctx_tokens=CTX,
        window_cells=before, tier_bytes=64 << 20, tier_dir=tmp_path,
    ) as running:  # fmt: skip
        for prompt in prompts:
            await tokens_of(running.pipeline.open(request(prompt, 6)))
            await running.until_free()
        assert running.pipeline.conductor.prefixes.tier.figures()["prefixes"] > 0
        running._window_cells = after
        await running.lose(0)
        await running.stop(1)
        for index in range(N_STAGES):
            await running.start(index)
        async with asyncio.timeout(60):
            await running.pipeline.ready.wait()
        for n_common in (300, 200):
            asked = (*prompts[0][:n_common], *prompt_of(50 + n_common, 20))
            assert_greedy(whole, asked, await tokens_of(running.pipeline.open(request(asked, 6))))
        assert running.pipeline.conductor.prefixes.tier.figures()["restored"] == 0
        assert replays(running) == 0
