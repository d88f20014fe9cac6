"""Coordinator and real stages on tiny artifacts in one event loop: equality with the unsplit model, lanes, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from relayline.coordinator.engine.descriptions import check_stages
from relayline.coordinator.engine.pipeline import Pipeline, PipelineConfig
from relayline.coordinator.sessions.generation import SamplingParams
from relayline.coordinator.sessions.tenants import Tenant
from relayline.deploy.testing.reference import ReferenceModel
from relayline.stage.engine import ggml
from relayline.wire.common.errors import (
    ContextLengthError,
    HandshakeError,
    NotReadyError,
    OverloadedError,
    StartError,
)
from relayline.wire.envelopes.dtypes import DTYPE_F32
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.telemetry import names
from tests.support.fakes import WIDTH, pipeline_file
from tests.support.fleet import (
    SHAPE,
    Artifacts,
    Fleet,
    artifacts_fixture,
    assert_greedy,
    fleet,
    prompt_of,
    read,
    request,
    tokens_of,
    whole_fixture,
)

pytestmark = pytest.mark.kernels

LENGTHS = (5, 1, 40, 17, 3, 64, 90, 11)
FIXTURES = (artifacts_fixture, whole_fixture)  # pytest finds them in the modules that name them


@pytest.mark.sampled(5)
@pytest.mark.parametrize("n_sessions", [1, 3, 8])
@pytest.mark.parametrize("cuts", [[2], [1, 3], [1, 2, 3]], ids=["2 stages", "3 stages", "4 stages"])
async def test_split_equals_whole(
    cuts: list[int], n_sessions: int, artifacts: Artifacts, whole: ReferenceModel
) -> None:
    prompts = [prompt_of(index, LENGTHS[index]) for index in range(n_sessions)]
    async with fleet(artifacts(cuts)) as running:
        streams = [running.pipeline.open(request(prompt, 12 + index)) for index, prompt in enumerate(prompts)]
        outputs = await asyncio.gather(*map(tokens_of, streams))
        await running.until_free()
    for index, (prompt, tokens) in enumerate(zip(prompts, outputs, strict=True)):
        assert len(tokens) == 12 + index
        assert_greedy(whole, prompt, tokens)


@pytest.mark.parametrize("cut", [1, 3])
async def test_every_other_cut_equals_whole(cut: int, artifacts: Artifacts, whole: ReferenceModel) -> None:
    prompts = [prompt_of(index, LENGTHS[index]) for index in range(3)]
    async with fleet(artifacts([cut])) as running:
        outputs = await asyncio.gather(*(tokens_of(running.pipeline.open(request(p, 10))) for p in prompts))
    for prompt, tokens in zip(prompts, outputs, strict=True):
        assert_greedy(whole, prompt, tokens)


async def test_a_request_that_would_keep_awake_what_is_to_sleep_is_not_admitted(artifacts: Artifacts) -> None:
    def refuse(tenant: Tenant) -> None:
        raise NotReadyError(f"no {tenant.name}")

    async with fleet(artifacts([2])) as running:
        running.pipeline.check_awake = refuse
        with pytest.raises(NotReadyError, match="no batches"):
            running.pipeline.open(dataclasses.replace(request(prompt_of(0, 5), 10), tenant=Tenant("batches")))
        assert not len(running.pipeline.conductor.readers)


@pytest.mark.parametrize("mode", ["drain", "fixed"])
async def test_every_schedule_gives_the_same(mode: str, artifacts: Artifacts, whole: ReferenceModel) -> None:
    prompts = [prompt_of(index, LENGTHS[index]) for index in range(8)]
    async with fleet(artifacts([2]), mode=mode) as running:
        outputs = await asyncio.gather(*(tokens_of(running.pipeline.open(request(p, 30))) for p in prompts))
        stages = (await running.pipeline.describe())["stages"]
        await overlap_is_of_the_time_asked_for(running.pipeline)
    for prompt, tokens in zip(prompts, outputs, strict=True):
        assert_greedy(whole, prompt, tokens)
    assert isinstance(stages, list)
    assert [stage["kernels"] for stage in stages] == [ggml.kernels().split()] * 2
    if mode == "fixed":  # one group is under way, so a returning row meets the others
        for stage in stages:
            assert max(map(int, stage["steps_by_sessions"])) > 1, "no step held two sessions"


async def overlap_is_of_the_time_asked_for(pipeline: Pipeline) -> None:
    """After a run, while nothing runs."""
    seen = await pipeline.describe()
    assert seen["overlap"]
    assert "overlap_since_ns" not in seen
    assert isinstance(seen["now_ns"], int)
    since = await pipeline.describe(seen["now_ns"])
    assert (since["overlap"], since["overlap_since_ns"]) == ({}, seen["now_ns"])
    assert (await pipeline.describe(0))["overlap"], "all steps of the run, which are remembered"


async def test_a_cancelled_stream_frees_its_lane_and_the_others_go_on(
    artifacts: Artifacts, whole: ReferenceModel
) -> None:
    prompt = prompt_of(1, 20)
    async with fleet(artifacts([2])) as running:
        gone, stays = (running.pipeline.open(request(prompt, 200)) for _ in range(2))
        async with asyncio.timeout(60):
            await anext(gone)
            await anext(stays)
        await gone.aclose()
        await gone.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(gone)
        assert (await running.pipeline.describe())["running"] == 1
        tokens = [(await anext(stays)).token for _ in range(20)]
        await stays.aclose()
        await running.until_free()
    assert_greedy(whole, prompt, [whole_first(whole, prompt), *tokens])


def whole_first(whole: ReferenceModel, prompt: tuple[int, ...]) -> int:
    whole.drop_from(0, 0)
    return whole.greedy(prompt, 1)[0]


async def test_more_requests_than_lanes_wait_and_finish(artifacts: Artifacts, whole: ReferenceModel) -> None:
    prompts = [prompt_of(index, 3 + index) for index in range(7)]
    async with fleet(artifacts([2]), n_lanes=2) as running:
        streams = [running.pipeline.open(request(prompt, 6)) for prompt in prompts]
        described = await running.pipeline.describe()
        assert (described["running"], described["waiting"], described["lanes"]) == (2, 5, 2)
        outputs = await asyncio.gather(*map(tokens_of, streams))
        await running.until_free()
    for prompt, tokens in zip(prompts, outputs, strict=True):
        assert_greedy(whole, prompt, tokens)


@contextlib.asynccontextmanager
async def second_coordinator(running: Fleet) -> AsyncIterator[Pipeline]:
    """Another coordinator of the same stages."""
    other = Pipeline(running.pipeline.config, running.pipeline.file, lambda _: False)
    stopping = asyncio.Event()
    run = asyncio.create_task(other.run(stopping))
    try:
        async with asyncio.timeout(60):
            await other.ready.wait()
        yield other
    finally:
        stopping.set()
        async with asyncio.timeout(60):
            await run


async def test_streams_of_two_coordinators_wait_for_lanes_that_the_other_has(
    artifacts: Artifacts, whole: ReferenceModel
) -> None:
    prompts = [prompt_of(index, 9 + index) for index in range(3)]
    async with fleet(artifacts([2]), n_lanes=2) as running:
        async with second_coordinator(running) as other:
            theirs = other.open(request(prompts[0], 200))
            await read(theirs, 1)
            streams = [running.pipeline.open(request(prompt, 30)) for prompt in prompts[1:]]
            outputs = await asyncio.gather(*map(tokens_of, streams))
            rest = await tokens_of(theirs)
        await running.until_free()
    assert len(rest) == 199
    for prompt, tokens in zip(prompts[1:], outputs, strict=True):
        assert_greedy(whole, prompt, tokens)


async def test_kept_prefixes_make_room_for_streams_of_another_coordinator(
    artifacts: Artifacts, whole: ReferenceModel
) -> None:
    prompts = [prompt_of(index, 40) for index in range(3)]
    async with fleet(artifacts([2]), n_lanes=3, prefix_lanes=3) as running, second_coordinator(running) as other:
        for prompt in prompts[:2]:  # two kept, and one lane to run in
            await tokens_of(running.pipeline.open(request(prompt, 5)))
            await running.until_free()
        assert await running.lanes_kept() == [2, 2]
        theirs = [other.open(request(prompt, 5)) for prompt in prompts]
        for prompt, tokens in zip(prompts, await asyncio.gather(*map(tokens_of, theirs)), strict=True):
            assert_greedy(whole, prompt, tokens)
        assert running.pipeline.conductor.prefixes.figures()["lanes"] == 2, "it does not know"
        for end in (3, 4):  # the prefix to copy is gone: the first reads everything, and the next copies from it
            prompt = (*prompts[0][:36], end, end)
            assert_greedy(whole, prompt, await tokens_of(running.pipeline.open(request(prompt, 5))))
            await running.until_free()
        registry = running.pipeline._observer.metrics.registry
        assert registry.get_sample_value(f"{names.METRIC_REPLAYS}_total", {names.LABEL_MODEL: ""}) == 1
        assert (await running.pipeline.describe())["copied_tokens"] == 36


async def test_a_refusal_says_why_and_leaves_nothing_behind(artifacts: Artifacts) -> None:
    async with fleet(artifacts([2]), n_lanes=1, waiting_max=1) as running:
        pipeline = running.pipeline
        with pytest.raises(ContextLengthError, match=r"256 tokens. However, you requested 257 tokens \(250 in"):
            pipeline.open(request(prompt_of(0, 250), 7))
        streams = [pipeline.open(request(prompt_of(0, 3), 4)) for _ in range(2)]
        with pytest.raises(OverloadedError, match="1 request already waits"):
            pipeline.open(request(prompt_of(0, 3), 4))
        first, second = await asyncio.gather(*map(tokens_of, streams))
        assert first == second
        assert len(await tokens_of(pipeline.open(request(prompt_of(0, 250), 6)))) == 6, "a stream may fill its lane"
        await running.until_free()


async def test_identical_deterministic_requests_share_a_session(artifacts: Artifacts, whole: ReferenceModel) -> None:
    prompt = prompt_of(2, 9)
    async with fleet(artifacts([2]), n_lanes=1, waiting_max=0, share=True) as running:
        pipeline = running.pipeline
        first = pipeline.open(request(prompt, 30))
        begun = await read(first, 4)
        late, gone = pipeline.open(request(prompt, 30)), pipeline.open(request(prompt, 30))
        with pytest.raises(OverloadedError):
            pipeline.open(request(prompt, 31))
        with pytest.raises(OverloadedError):
            pipeline.open(request(prompt, 30, SamplingParams(temperature=1.0, seed=1)))
        assert await running.lanes_used() == [1, 1]
        await gone.aclose()
        assert await tokens_of(late) == begun + await tokens_of(first)
        await running.until_free()
        alone = pipeline.open(request(prompt, 200))
        await read(alone, 1)
        await alone.aclose()
        await running.until_free()


async def test_stages_in_the_wrong_order_are_refused_in_one_line(artifacts: Artifacts) -> None:
    paths = artifacts([1, 3])
    with pytest.raises(HandshakeError, match=r"wrong order.*is stage 1"):
        await start_only([paths[1], paths[0], paths[2]])


async def test_a_fleet_that_is_refused_leaves_no_stage_behind(
    artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that outlived the event loop of its test would take the process with it."""
    made: list[Fleet] = []

    class Kept(Fleet):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr("tests.support.fleet.Fleet", Kept)
    with pytest.raises(HandshakeError, match="wrong order"):
        async with fleet([*reversed(artifacts([2]))]):
            raise AssertionError("it is never ready")
    assert [fleet._running for fleet in made] == [{}]


def test_stages_that_lay_out_their_cells_differently_are_refused_in_one_line() -> None:
    facts = [
        pb.DescribeResponse(pipeline_id="fake", stage_index=index, n_embd=WIDTH, kv_per_lane=index == 1)
        for index in range(2)
    ]
    with pytest.raises(HandshakeError, match=r"^b:1 and a:1 lay out their KV cells differently.*--kv-layout"):
        check_stages(["a:1", "b:1"], facts, pipeline_file(2))
    check_stages(["a:1"], facts[:1], pipeline_file(1))


async def test_a_stage_that_never_comes_is_an_error_at_the_start(artifacts: Artifacts) -> None:
    with pytest.raises(StartError, match=r"127.0.0.1:1\b.*gave up"):
        await start_only(artifacts([2])[:1], ["127.0.0.1:1"])


async def test_a_pipeline_that_was_never_connected_says_that_it_loads() -> None:
    pipeline = Pipeline(PipelineConfig(("127.0.0.1:1",), DTYPE_F32), pipeline_file(1), lambda _: False)
    assert (pipeline.ctx_tokens, pipeline.is_ready()) == (0, False)
    with pytest.raises(NotReadyError, match="loading"):
        pipeline.check_ready()
    with pytest.raises(NotReadyError, match="loading"):
        pipeline.open(request((1, 2), 3))


async def start_only(paths: Sequence[Path], more: Sequence[str] = ()) -> None:
    """Serve these artifacts and run a pipeline over them that is expected to fail."""
    stages = Fleet(paths, 2)
    try:
        for index in range(len(paths)):
            await stages.start(index)
        addresses = (*stages.addresses, *more)
        file = pipeline_file(len(addresses), pipeline_id="tiny", n_embd=SHAPE.n_embd)
        pipeline = Pipeline(PipelineConfig(addresses, DTYPE_F32, start_timeout_s=0.0), file, lambda _: False)
        async with asyncio.timeout(60):
            await pipeline.run(asyncio.Event())
    finally:
        await stages.stop_all()


async def test_draining_lets_requests_end_and_takes_no_new_ones(artifacts: Artifacts) -> None:
    async with fleet(artifacts([2])) as running:
        stream = running.pipeline.open(request(prompt_of(0, 9), 30))
        await read(stream, 1)
        drain = asyncio.create_task(running.pipeline.epochs.drain(running.pipeline._idle))
        rest = await tokens_of(stream)
        async with asyncio.timeout(60):
            await drain
        assert len(rest) == 29
        with pytest.raises(NotReadyError, match="draining"):
            running.pipeline.open(request(prompt_of(0, 9), 1))


@pytest.mark.parametrize(
    ("theirs", "ours", "fits"),
    [
        ((), ("",), True),
        (("",), ("",), True),
        (("", "a"), ("", "a"), True),
        ((), ("", "a"), False),
        (("", "b"), ("", "a"), False),
    ],
)
def test_stages_must_have_the_coordinators_adapters(theirs: tuple[str, ...], ours: tuple[str, ...], fits: bool) -> None:
    facts = [pb.DescribeResponse(pipeline_id="fake", n_embd=WIDTH, adapters=theirs)]
    if fits:
        check_stages(["a:1"], facts, pipeline_file(1), adapters=ours)
        return
    with pytest.raises(HandshakeError, match=r"^a:1 has other LoRA adapters .* the same --lora and one version$"):
        check_stages(["a:1"], facts, pipeline_file(1), adapters=ours)
