"""Another coordinator comes, and stages restart: stored prefixes come back, also a part that ends in the middle."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from relayline.coordinator.engine.pipeline import Pipeline
from relayline.deploy.testing.reference import ReferenceModel
from relayline.stage.epochs import Epochs
from relayline.stage.steps.lane_states import LaneStates
from relayline.wire.common.process import first_of
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.fleet import (
    Artifacts,
    Fleet,
    artifacts_fixture,
    assert_greedy,
    fleet,
    prompt_of,
    request,
    tokens_of,
    whole_fixture,
)
from tests.support.polling import pause

FIXTURES = (artifacts_fixture, whole_fixture)  # pytest finds them in the modules that name them
N_CHATS, N_TOKENS, N_PROMPT = 3, 6, 100
TIER_BYTES = 64 << 20


@contextlib.asynccontextmanager
async def another_coordinator(running: Fleet) -> AsyncIterator[Pipeline]:
    """A coordinator of the same stages, wherever they are now, which knows nothing of earlier ones."""
    pipeline = Pipeline(running.pipeline.config, running.pipeline.file, lambda _: False)
    stopping = asyncio.Event()
    run = asyncio.create_task(pipeline.run(stopping))
    ready = asyncio.create_task(pipeline.ready.wait())
    try:
        async with asyncio.timeout(60):
            await first_of(ready, run)
        yield pipeline
    finally:
        ready.cancel()
        stopping.set()
        async with asyncio.timeout(60):
            await run


async def first_turns(running: Fleet) -> list[tuple[int, ...]]:
    """Three chats' first turns; returns their second prompts, whose answers come back as other tokens."""
    prompts = [prompt_of(1 + chat, N_PROMPT) for chat in range(N_CHATS)]
    for prompt in (*prompts, prompt_of(90, N_PROMPT)):  # after the last one, no kept lane has a chat's prefix
        await tokens_of(running.pipeline.open(request(prompt, N_TOKENS)))
        await running.until_free()
    async with asyncio.timeout(60):
        while any(len(held) < N_CHATS for held in await notes_and_states(running)):
            await pause()
    return [(*prompt, *prompt_of(30 + chat, N_TOKENS + 3)) for chat, prompt in enumerate(prompts)]


async def notes_and_states(running: Fleet) -> list[list[object]]:
    """Return stage 0's notes, and what each stage has stored."""
    stages = running.pipeline.stages
    return [[*await stages[0].notes()], *[[*(await stage.describe()).stored] for stage in stages]]


async def copied(pipeline: Pipeline, prompt: tuple[int, ...], whole: ReferenceModel) -> int:
    """Return how many tokens of a prompt came back, its answer being the whole model's."""
    before = pipeline.conductor.prefixes.tier.figures()["restored"]
    stream = pipeline.open(request(prompt, N_TOKENS))
    session = next(iter(pipeline.conductor.admission.running.values()))
    n_copied = session.n_copied
    assert_greedy(whole, prompt, await tokens_of(stream))
    assert pipeline.conductor.prefixes.tier.figures()["restored"] == before + (n_copied > 0)
    assert session.replays == 0
    return n_copied


@pytest.mark.parametrize("kv_layout", ["per-lane", "unified"])
async def test_another_coordinator_reads_only_what_is_new(
    kv_layout: str, artifacts: Artifacts, whole: ReferenceModel
) -> None:
    stages = artifacts([1, 3])
    async with fleet(stages, n_lanes=2, prefix_lanes=None, kv_layout=kv_layout, tier_bytes=TIER_BYTES) as running:
        seconds = await first_turns(running)
        async with another_coordinator(running) as later:
            assert [await copied(later, prompt, whole) for prompt in seconds] == [N_PROMPT] * N_CHATS
            middle = (*seconds[0][:80], *prompt_of(50, 30))
            assert await copied(later, middle, whole) >= 64, "of what lies behind a mark"


async def test_what_was_in_kept_lanes_comes_back_too(artifacts: Artifacts, whole: ReferenceModel) -> None:
    """Of a coordinator that is gone without a word: the stages store its kept lanes as its epoch ends."""
    async with fleet(
        artifacts([1, 3]), n_lanes=8, prefix_lanes=None, kv_layout="per-lane", tier_bytes=TIER_BYTES
    ) as running:
        async with another_coordinator(running) as gone:
            prompts = [prompt_of(1 + chat, N_PROMPT) for chat in range(N_CHATS)]
            for prompt in prompts:
                await tokens_of(gone.open(request(prompt, N_TOKENS)))
                await running.until_free()
            assert gone.conductor.prefixes.figures()["lanes"] == N_CHATS
            assert gone.conductor.prefixes.tier.figures()["stored"] == 0
        async with asyncio.timeout(60):
            while any(len(held) < N_CHATS for held in await notes_and_states(running)):
                await pause()
        async with another_coordinator(running) as later:
            for chat, prompt in enumerate(prompts):
                assert await copied(later, (*prompt, *prompt_of(30 + chat, N_TOKENS)), whole) == N_PROMPT


async def test_a_kept_lane_that_another_coordinators_stream_takes_is_stored(
    artifacts: Artifacts, whole: ReferenceModel
) -> None:
    async with fleet(artifacts([2]), n_lanes=2, prefix_lanes=1, tier_bytes=TIER_BYTES) as running:
        prompt = prompt_of(1, N_PROMPT)
        await tokens_of(running.pipeline.open(request(prompt, N_TOKENS)))
        await running.until_free()
        async with another_coordinator(running) as other:
            both = [other.open(request(prompt_of(seed, 40), 3)) for seed in (7, 8)]
            await asyncio.gather(*map(tokens_of, both))
            async with asyncio.timeout(60):
                while not all([(await stage.describe()).stored for stage in running.pipeline.stages]):
                    await pause()
        async with another_coordinator(running) as later:
            assert await copied(later, (*prompt, *prompt_of(30, N_TOKENS)), whole) == N_PROMPT


@pytest.mark.parametrize("is_long", [False, True])
async def test_after_a_restart_of_everything_the_disk_tells(
    is_long: bool, artifacts: Artifacts, whole: ReferenceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_long:  # lanes are filled in pieces
        monkeypatch.setitem(LaneStates.__init__.__kwdefaults__, "long_bytes", 0)  # type: ignore[misc]
    async with fleet(
        artifacts([1, 3]), n_lanes=2, tier_bytes=TIER_BYTES, prefix_lanes=None, tier_dir=tmp_path
    ) as running:
        seconds = await first_turns(running)
        await running.lose(0)
        await running.stop(1)
        await running.stop(2)
        for index in range(3):
            await running.start(index)
        async with another_coordinator(running) as later:
            assert [await copied(later, prompt, whole) for prompt in seconds] == [N_PROMPT] * N_CHATS


async def test_a_stage_0_of_an_older_release_is_not_asked(
    artifacts: Artifacts, whole: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = LaneStates.tell

    def told(self: LaneStates, message: pb.DescribeResponse) -> None:
        tell(self, message)
        message.keeps_notes = False

    def asked(self: LaneStates, _: pb.NotesRequest) -> pb.NotesResponse:
        raise AssertionError("it does not know the call")

    monkeypatch.setattr(LaneStates, "tell", told)
    monkeypatch.setattr(LaneStates, "notes", asked)
    async with fleet(artifacts([2]), n_lanes=2, prefix_lanes=None, tier_bytes=TIER_BYTES) as running:
        prompt = prompt_of(1, N_PROMPT)
        for seed in (1, 2, 3):
            await tokens_of(running.pipeline.open(request(prompt_of(seed, N_PROMPT), N_TOKENS)))
            await running.until_free()
        async with another_coordinator(running) as later:
            assert later.conductor.prefixes.tier.figures()["prefixes"] > 0
            assert await copied(later, (*prompt, 5, 6), whole) == 0, "only whole ones are known"


async def test_a_description_before_kept_lanes_are_stored_costs_no_prefix(
    artifacts: Artifacts, whole: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link breaks. The stages describe themselves, and only Configure ends the epoch before."""
    async with fleet(
        artifacts([1, 3]), n_lanes=8, prefix_lanes=None, kv_layout="per-lane", tier_bytes=TIER_BYTES, proxied=True
    ) as running:
        prompt = prompt_of(1, N_PROMPT)
        await tokens_of(running.pipeline.open(request(prompt, N_TOKENS)))
        await running.until_free()
        with monkeypatch.context() as late:
            late.setattr(Epochs, "upstream_left", lambda self, route: None)
            await running.cut(0)
            async with asyncio.timeout(60):
                await running.pipeline.ready.wait()
        middle = (*prompt[: N_PROMPT - 5], *prompt_of(50, 30))
        assert await copied(running.pipeline, middle, whole) == N_PROMPT - 5, "its tokens are known, not marks alone"
