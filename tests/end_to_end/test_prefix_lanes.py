"""Chats over real stages: rows of an ended turn are not computed again, and no token changes."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from relayline.coordinator.model.split import split_model
from relayline.coordinator.sessions.generation import SamplingParams
from relayline.deploy.testing.reference import ReferenceModel
from relayline.wire.telemetry import names
from tests.support.fleet import (
    CTX,
    SHAPE,
    Artifacts,
    Fleet,
    artifacts_fixture,
    assert_greedy,
    assert_seeded,
    fleet,
    logits_along,
    prompt_of,
    read,
    request,
    tokens_of,
    whole_fixture,
)
from tests.support.tiny_models import make_tiny

FIXTURES = (artifacts_fixture, whole_fixture)  # pytest finds them in the modules that name them
LAYOUTS = ["unified", "per-lane"]


async def rows_of(running: Fleet) -> list[int]:
    """The number of rows that each stage has computed."""
    stages = (await running.pipeline.describe())["stages"]
    assert isinstance(stages, list)
    return [stage["rows"] for stage in stages]


def replays(running: Fleet) -> float | None:
    """How many sessions were restarted after a fault: faults would heal unseen."""
    registry = running.pipeline._observer.metrics.registry
    return registry.get_sample_value(f"{names.METRIC_REPLAYS}_total", {names.LABEL_MODEL: ""})


async def until_kept(running: Fleet, n_lanes: int) -> None:
    """Wait until every stage keeps this number of lanes and nothing runs: closes are under way at the last token."""
    await running.until_free()
    async with asyncio.timeout(60):
        while set(await running.lanes_kept()) != {n_lanes}:
            pass


@pytest.mark.parametrize("kv_layout", LAYOUTS)
async def test_each_turn_of_a_chat_reads_only_new_text(
    kv_layout: str, artifacts: Artifacts, whole: ReferenceModel
) -> None:
    history = prompt_of(1, 60)
    prefix_lanes = 1 if kv_layout == "unified" else None
    async with fleet(artifacts([1, 3]), n_lanes=3, prefix_lanes=prefix_lanes, kv_layout=kv_layout) as running:
        for turn in range(4):
            before = await rows_of(running)
            tokens = await tokens_of(running.pipeline.open(request(history, 12)))
            await until_kept(running, 1)
            n_rows = len(history) if turn == 0 else 1 + 8
            assert [now - then for now, then in zip(await rows_of(running), before, strict=True)] == [n_rows + 11] * 3
            assert_greedy(whole, history, tokens)
            history += (*tokens, *prompt_of(2 + turn, 8))
        assert replays(running) == 0


@pytest.mark.parametrize("kv_layout", LAYOUTS)
async def test_chats_side_by_side_that_share_a_beginning_stay_apart(
    kv_layout: str, artifacts: Artifacts, whole: ReferenceModel
) -> None:
    histories = [prompt_of(1, 40) + prompt_of(10 + chat, 3 * chat + 1) for chat in range(4)]
    async with fleet(artifacts([2]), n_lanes=7, prefix_lanes=3, kv_layout=kv_layout) as running:
        for _ in range(3):
            streams = [running.pipeline.open(request(history, 9)) for history in histories]
            outputs = await asyncio.gather(*map(tokens_of, streams))
            for chat, tokens in enumerate(outputs):
                assert_greedy(whole, histories[chat], tokens)
                histories[chat] += (*tokens, *prompt_of(20 + chat, 5))
        await until_kept(running, 3)
        assert replays(running) == 0
        registry = running.pipeline._observer.metrics.registry
    n_copied = registry.get_sample_value(f"{names.METRIC_PREFIX_HITS}_total", {names.LABEL_MODEL: ""})
    assert n_copied is not None
    assert n_copied >= 2 * 3 * 40, "at least three of four chats, in two of three turns"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kv_layout", "window_cells"), [("unified", "all"), ("unified", "window"), ("per-lane", "all")]
)
async def test_beginnings_that_windows_have_lost_are_read_again(
    kv_layout: str, window_cells: str, tmp_path: Path
) -> None:
    """Requests that share 40 tokens; concurrent ones take cells that no next row of a lane would read.

    Where stages keep windows alone, the coordinator knows and asks for no such beginning.
    """
    model = make_tiny("gemma3:pattern", tmp_path / "model.gguf", n_layers=6, vocab=SHAPE.n_vocab)
    pipeline = split_model(model, tmp_path / "out", cuts=(2, 4))
    paths = [tmp_path / "out" / stage.file for stage in pipeline.stages]
    prompts = [prompt_of(1, 40) + prompt_of(10 + chat, 3 * chat + 20) for chat in range(8)]
    with ReferenceModel(model, CTX, 1) as whole:
        async with fleet(
            paths, n_lanes=6, prefix_lanes=3, kv_layout=kv_layout, file=pipeline, window_cells=window_cells
        ) as running:
            for round_, alike in enumerate(prompts):
                others = [prompt_of(100 + 3 * round_ + other, 60) for other in range(3)]
                asked = [request(alike, 9)]
                asked += [dataclasses.replace(request(other, 9), cache_prompt=False) for other in others]
                outputs = await asyncio.gather(*(tokens_of(running.pipeline.open(one)) for one in asked))
                for prompt, tokens in zip((alike, *others), outputs, strict=True):
                    logits = logits_along(whole, prompt, tokens)
                    behind = logits.max(axis=1) - logits[range(len(tokens)), tokens]
                    assert behind.max() < 0.02 * logits.std(), "the copy lacks something"
                await running.until_free()
            n_replays = replays(running)
    assert n_replays is not None
    assert (n_replays > 0) == ((kv_layout, window_cells) == ("unified", "all"))


async def test_kept_lanes_yield_to_streams(artifacts: Artifacts, whole: ReferenceModel) -> None:
    prompts = [prompt_of(seed, 40) for seed in range(6)]
    async with fleet(artifacts([2]), n_lanes=2, prefix_lanes=2) as running:
        outputs = await asyncio.gather(*(tokens_of(running.pipeline.open(request(prompt, 6))) for prompt in prompts))
        again = await tokens_of(running.pipeline.open(request(prompts[-1], 6)))
        assert replays(running) == 0
    for prompt, tokens in zip(prompts, outputs, strict=True):
        assert_greedy(whole, prompt, tokens)
    assert_greedy(whole, prompts[-1], again)


async def test_kept_prefixes_end_with_the_epoch(artifacts: Artifacts, whole: ReferenceModel) -> None:
    prompt = prompt_of(1, 60)
    async with fleet(artifacts([2]), prefix_lanes=2) as running:
        first = await tokens_of(running.pipeline.open(request(prompt, 10)))
        await until_kept(running, 1)
        await running.lose(1)
        await running.start(1)
        async with asyncio.timeout(60):
            await running.pipeline.ready.wait()
        longer = (*prompt, *first, 5, 6)
        tokens = await tokens_of(running.pipeline.open(request(longer, 10)))
        assert replays(running) == 0
    assert_greedy(whole, longer, tokens)


async def test_a_stopped_answer_is_continued_from_its_text(artifacts: Artifacts, whole: ReferenceModel) -> None:
    prompt = prompt_of(1, 60)
    async with fleet(artifacts([2]), prefix_lanes=2) as running:
        stream = running.pipeline.open(request(prompt, 100))
        said = await read(stream, 10)
        await stream.aclose()
        await until_kept(running, 1)
        before = await rows_of(running)
        longer = (*prompt, *said, 5, 6)
        tokens = await tokens_of(running.pipeline.open(request(longer, 10)))
        await until_kept(running, 1)
        after = await rows_of(running)
        assert replays(running) == 0
    assert_greedy(whole, longer, tokens)
    assert all(now - then < len(prompt) for now, then in zip(after, before, strict=True))


async def test_chats_that_take_turns_in_all_lanes_copy_their_own_prefix(
    artifacts: Artifacts, whole: ReferenceModel
) -> None:
    """Only kept lanes are free when they come back: each takes another's before its own."""
    histories = [prompt_of(20 + chat, 60) for chat in range(3)]
    async with fleet(artifacts([2]), n_lanes=4, prefix_lanes=3) as running:
        for turn in range(2):
            streams = [running.pipeline.open(request(history, 9)) for history in histories[: 3 - turn]]
            outputs = await asyncio.gather(*map(tokens_of, streams))
            for chat, tokens in enumerate(outputs):
                assert_greedy(whole, histories[chat], tokens)
                histories[chat] += (*tokens, 7, 7)
            await running.until_free()
        assert replays(running) == 0
        assert (await running.pipeline.describe())["copied_tokens"] == 2 * (60 + 8)


@pytest.mark.parametrize("kv_layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["auto", "drain"])
async def test_a_burst_with_one_system_prompt_reads_it_once(
    kv_layout: str, mode: str, artifacts: Artifacts, whole: ReferenceModel
) -> None:
    system = prompt_of(1, 70)
    prompts = [(*system, index, *prompt_of(30 + index, 3 * index)) for index in range(6)]
    async with fleet(artifacts([1, 3]), prefix_lanes=None, kv_layout=kv_layout, mode=mode) as running:
        outputs = await asyncio.gather(*(tokens_of(running.pipeline.open(request(prompt, 7))) for prompt in prompts))
        n_rows = await rows_of(running)
        assert replays(running) == 0
        assert running.pipeline._observer.figures()["copied_tokens"] == 5 * 70
    for prompt, tokens in zip(prompts, outputs, strict=True):
        assert_greedy(whole, prompt, tokens)
    assert n_rows == [70 + sum(len(prompt) - 70 + 6 for prompt in prompts)] * 3


async def test_a_stream_that_arrives_during_an_answer_copies_its_prompt(
    artifacts: Artifacts, whole: ReferenceModel
) -> None:
    prompt = prompt_of(1, 60)
    async with fleet(artifacts([2]), prefix_lanes=None) as running:
        stream = running.pipeline.open(request(prompt, 60))
        said = await read(stream, 10)
        before = await rows_of(running)
        longer = (*prompt, *said[:5], 3, 4)
        tokens = await tokens_of(running.pipeline.open(request(longer, 1)))
        assert replays(running) == 0
        assert running.pipeline._observer.figures()["copied_tokens"] == 65
        said += await read(stream, 50)
        await stream.aclose()
    assert_greedy(whole, longer, tokens)
    assert_greedy(whole, prompt, said)
    assert before[0] >= 60


@pytest.mark.parametrize("n_read", [0, 1, 120])
@pytest.mark.parametrize("kv_layout", LAYOUTS)
async def test_another_stream_reads_the_prompt_where_the_first_leaves(
    kv_layout: str, n_read: int, artifacts: Artifacts, whole: ReferenceModel
) -> None:
    system = prompt_of(1, 200)
    prompts = [(*system, index, *prompt_of(40 + index, 3)) for index in range(5)]
    async with fleet(artifacts([1, 3]), prefix_lanes=None, kv_layout=kv_layout, mode="fixed") as running:
        streams = [running.pipeline.open(request(prompt, 6)) for prompt in prompts]
        async with asyncio.timeout(60):
            while (await rows_of(running))[0] < n_read:
                pass
        await streams[0].aclose()
        outputs = await asyncio.gather(*map(tokens_of, streams[1:]))
        n_rows = await rows_of(running)
        assert replays(running) == 0, "rows for copies are computed although their first reader has left"
    for prompt, tokens in zip(prompts[1:], outputs, strict=True):
        assert_greedy(whole, prompt, tokens)
    assert max(n_rows) <= 2 * (200 + 4 + 6) + 4 * (4 + 5)


async def test_a_loss_while_streams_wait_for_a_prefix_that_others_read(
    artifacts: Artifacts, whole: ReferenceModel
) -> None:
    system = prompt_of(1, 200)
    prompts = [(*system, index, *prompt_of(50 + index, 3)) for index in range(5)]
    async with fleet(artifacts([1, 3]), prefix_lanes=None, mode="fixed") as running:
        streams = [running.pipeline.open(request(prompt, 6)) for prompt in prompts]
        async with asyncio.timeout(60):
            while (await rows_of(running))[1] < 20:
                pass
        await running.lose(1)
        await running.start(1)
        outputs = await asyncio.gather(*map(tokens_of, streams))
        stages = (await rows_of(running))[1]
        assert replays(running) == 0
    for prompt, tokens in zip(prompts, outputs, strict=True):
        assert_greedy(whole, prompt, tokens)
    assert stages == 200 + 5 * (4 + 5), "the stage that came back has read the system prompt once"


async def test_choices_of_one_prompt_read_it_once(artifacts: Artifacts, whole: ReferenceModel) -> None:
    prompt = prompt_of(1, 90)
    choices = [SamplingParams(temperature=0.8, seed=seed) for seed in range(4)]
    async with fleet(artifacts([2]), prefix_lanes=None) as running:
        streams = [running.pipeline.open(request(prompt, 8, sampling)) for sampling in choices]
        outputs = await asyncio.gather(*map(tokens_of, streams))
        n_rows = await rows_of(running)
        assert replays(running) == 0
    assert n_rows == [90 + 3 + 4 * 7] * 2
    for sampling, tokens in zip(choices, outputs, strict=True):
        assert_seeded(whole, prompt, tokens, sampling)
    assert len({tuple(tokens) for tokens in outputs}) > 1
