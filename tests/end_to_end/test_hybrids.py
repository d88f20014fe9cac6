"""Models with recurrent states over real stages: chats, retries, choices and losses, with the whole model's tokens.

Rows that cannot be rewound are read again, so a fault would only show as repeated work: rows and replays are counted.
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
from tests.support.fleet import CTX, SHAPE, assert_greedy, fleet, prompt_of, read, request, tokens_of
from tests.support.tiny_models import make_tiny

LAYOUTS = ["unified", "per-lane"]
N_STAGES = 3
Split = tuple[PipelineFile, list[Path]]


@pytest.fixture(scope="module", name="hybrid")
def hybrid_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Split, ReferenceModel]]:
    """A hot qwen35 of 12 layers in three stages, and the same in one piece."""
    directory = tmp_path_factory.mktemp("hybrid")
    model = make_tiny("qwen35", directory / "model.gguf", n_layers=12, vocab=SHAPE.n_vocab)
    pipeline = split_model(model, directory / "out", n_stages=N_STAGES)
    paths = [directory / "out" / stage.file for stage in pipeline.stages]
    with ReferenceModel(model, CTX, 1) as whole:
        yield (pipeline, paths), whole


@pytest.mark.parametrize("kv_layout", LAYOUTS)
async def test_each_turn_of_a_chat_reads_only_new_text(kv_layout: str, hybrid: tuple[Split, ReferenceModel]) -> None:
    """The kept lane is copied whole, state and all."""
    ((file, paths), whole), history = hybrid, prompt_of(1, 60)
    async with fleet(paths, n_lanes=3, prefix_lanes=1, kv_layout=kv_layout, file=file) as running:
        for turn in range(4):
            before = await rows_of(running)
            tokens = await tokens_of(running.pipeline.open(request(history, 12)))
            await until_kept(running, 1)
            n_rows = len(history) if turn == 0 else 1 + 8
            now = await rows_of(running)
            assert [after - then for after, then in zip(now, before, strict=True)] == [n_rows + 11] * N_STAGES
            assert_greedy(whole, history, tokens)
            history += (*tokens, *prompt_of(2 + turn, 8))
        assert replays(running) == 0


@pytest.mark.parametrize("kv_layout", LAYOUTS)
async def test_a_lane_resumes_at_a_checkpoint_that_it_has_passed(
    kv_layout: str, hybrid: tuple[Split, ReferenceModel]
) -> None:
    """The same prompt again, and one that agrees with it except for the answer."""
    ((file, paths), whole), prompt = hybrid, prompt_of(1, 60)
    async with fleet(paths, n_lanes=3, prefix_lanes=1, kv_layout=kv_layout, file=file) as running:
        for asked, n_read in ((prompt, 60), (prompt, 1), ((*prompt, *prompt_of(5, 9)), 10), (prompt[:40], 40)):
            before = await rows_of(running)
            tokens = await tokens_of(running.pipeline.open(request(asked, 12)))
            await until_kept(running, 1)
            now = await rows_of(running)
            assert [after - then for after, then in zip(now, before, strict=True)] == [n_read + 11] * N_STAGES
            assert_greedy(whole, asked, tokens)
        assert replays(running) == 0


@pytest.mark.parametrize("kv_layout", LAYOUTS)
async def test_of_requests_that_begin_alike_one_reads_for_all(
    kv_layout: str, hybrid: tuple[Split, ReferenceModel]
) -> None:
    """Eight at once: four are equal, as choices of one request are, and four agree for 40 tokens."""
    ((file, paths), whole), common = hybrid, prompt_of(1, 40)
    prompts = [common + prompt_of(9, 30)] * 4 + [common + prompt_of(10 + chat, 3 * chat + 2) for chat in range(4)]
    async with fleet(paths, n_lanes=8, prefix_lanes=None, kv_layout=kv_layout, file=file) as running:
        outputs = await asyncio.gather(*(tokens_of(running.pipeline.open(request(prompt, 9))) for prompt in prompts))
        rows = await rows_of(running)
        assert replays(running) == 0
    for prompt, tokens in zip(prompts, outputs, strict=True):
        assert_greedy(whole, prompt, tokens)
    n_own = 40 + 30 + 3 + sum(3 * chat + 2 for chat in range(4))
    assert rows == [n_own + 8 * len(prompts)] * N_STAGES


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv_layout", LAYOUTS)
@pytest.mark.parametrize("wrong_every", [0, 2])
async def test_drafts_change_no_answer_and_wrong_ones_are_taken_back(
    wrong_every: int, kv_layout: str, hybrid: tuple[Split, ReferenceModel]
) -> None:
    """Two streams at once, each with a prediction that has a wrong token at regular intervals."""
    ((file, paths), whole), prompts = hybrid, [prompt_of(3, 37), prompt_of(4, 50)]
    async with fleet(paths, prefix_lanes=2, kv_layout=kv_layout, file=file) as plain:
        asked = [request(prompt, 40) for prompt in prompts]
        said = [await tokens_of(plain.pipeline.open(each)) for each in asked]
    guessing = [predicting(*each, wrong_every) for each in zip(asked, said, strict=True)]
    async with fleet(paths, prefix_lanes=2, kv_layout=kv_layout, file=file, draft=4, rewind_rows=4) as running:
        outputs = await asyncio.gather(*(tokens_of(running.pipeline.open(each)) for each in guessing))
        figures = await running.pipeline.describe()
        assert replays(running) == 0
        rows = await rows_of(running)
    for prompt, tokens in zip(prompts, outputs, strict=True):
        assert_greedy(whole, prompt, tokens)
    n_drafted, n_right = int(str(figures["drafted_tokens"])), int(str(figures["accepted_tokens"]))
    assert n_right > 5
    assert (n_drafted > n_right) == bool(wrong_every)
    assert max(rows) == sum(map(len, prompts)) + 2 * 39 + (n_drafted - n_right), "each row is computed once"


@pytest.mark.parametrize("kv_layout", LAYOUTS)
async def test_a_next_turn_goes_on_from_an_answer_with_guesses_behind_its_end(
    kv_layout: str, hybrid: tuple[Split, ReferenceModel]
) -> None:
    ((file, paths), whole), prompt = hybrid, prompt_of(1, 60)
    async with fleet(paths, kv_layout=kv_layout, file=file) as plain:
        said = await tokens_of(plain.pipeline.open(request(prompt, 20)))
    n_said = next(at for at in range(12, 20) if said[at] not in said[:at]) + 1
    async with fleet(
        paths, n_lanes=3, prefix_lanes=1, kv_layout=kv_layout, file=file, draft=4, rewind_rows=4,
        is_end=lambda token: token == said[n_said - 1],
    ) as running:  # fmt: skip
        stream = running.pipeline.open(predicting(request(prompt, 40), said[: n_said - 1] + said[:10]))
        tokens = [event.token async for event in stream]
        await stream.aclose()
        assert tokens[: n_said - 1] == said[: n_said - 1]
        await until_kept(running, 1)
        before = await rows_of(running)
        assert before[0] > 60 + n_said, "guesses went beyond the end"
        further = (*prompt, *said[:n_said], *prompt_of(2, 9))
        answer = await read(running.pipeline.open(request(further, 6)), 5)
        n_rows = max(now - then for now, then in zip(await rows_of(running), before, strict=True))
        assert n_rows < 30, "only new text is read"
        assert replays(running) == 0
    assert_greedy(whole, further, answer)


@pytest.mark.parametrize("lost", range(N_STAGES))
async def test_a_lost_stage_is_a_pause_and_no_more(lost: int, hybrid: tuple[Split, ReferenceModel]) -> None:
    """A long answer and a chat's next turn are in their midst."""
    ((file, paths), whole), prompts = hybrid, [prompt_of(3, 37), prompt_of(4, 50)]
    async with fleet(paths, prefix_lanes=2, file=file) as running:
        streams = [running.pipeline.open(request(prompt, 40)) for prompt in prompts]
        before = [await read(stream, 5) for stream in streams]
        await running.lose(lost)
        await running.start(lost)
        after = [await tokens_of(stream) for stream in streams]
    for prompt, begun, rest in zip(prompts, before, after, strict=True):
        assert len(begun + rest) == 40
        assert_greedy(whole, prompt, begun + rest)


async def test_after_a_lost_link_an_answer_goes_on_from_its_prompt(hybrid: tuple[Split, ReferenceModel]) -> None:
    """Stages remember the checkpoint before the prompt's last token: none of it is read again."""
    ((file, paths), whole), prompt = hybrid, prompt_of(3, 100)
    async with fleet(paths, prefix_lanes=2, file=file, proxied=True) as running:
        stream = running.pipeline.open(request(prompt, 20))
        begun = await read(stream, 3)
        before = await rows_of(running)
        await cut(running, 1)
        tokens = begun + await tokens_of(stream)
        rows = [now - then for now, then in zip(await rows_of(running), before, strict=True)]
        assert replays(running) == 0
    assert len(tokens) == 20
    assert_greedy(whole, prompt, tokens)
    assert max(rows) < 2 * 20, "all 100 tokens of the prompt are still there"
