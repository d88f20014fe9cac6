"""Coordinator and real stages on tiny artifacts in one event loop: equality with the unsplit model, lanes, recovery."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from coordinator.generation import GenerationRequest, SamplingParams, TokenEvent
from coordinator.pipeline import Phase, Pipeline, PipelineConfig
from coordinator.scheduler import ScheduleConfig
from coordinator.streams import SessionStream
from stage.config import StageConfig
from stage.process import serve
from tests.fakes import pipeline_file
from tests.reference import ReferenceModel
from tests.tiny_slices import TinyShape, write_pipeline, write_whole
from wire.envelope import DTYPE_F32
from wire.errors import (
    ContextLengthError,
    HandshakeError,
    NotReadyError,
    OverloadedError,
    RelaylineError,
    StageLostError,
    StartError,
)
from wire.pb.relayline.v1 import relayline_pb2 as pb

SHAPE = TinyShape(n_layers=4)
CTX = 256
GREEDY = SamplingParams(temperature=0.0)
# Batch shape moves the last bits of a logit (their deviation is about 2), so a token may be any whose logit is this
# close to the largest.
NEAR_TIE = 1e-3

Artifacts = Callable[[Sequence[int]], list[Path]]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    """Artifacts for given cuts, each split made once."""

    @functools.cache
    def made(cuts: tuple[int, ...]) -> list[Path]:
        return write_pipeline(tmp_path_factory.mktemp("split"), SHAPE, list(cuts))

    return lambda cuts: made(tuple(cuts))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReferenceModel]:
    with ReferenceModel(write_whole(tmp_path_factory.mktemp("whole") / "whole.gguf", SHAPE), CTX, 1) as model:
        yield model


def prompt_of(seed: int, n_tokens: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, SHAPE.n_vocab, n_tokens).tolist())


request_ids = itertools.count()


def request(prompt: tuple[int, ...], max_tokens: int, sampling: SamplingParams = GREEDY) -> GenerationRequest:
    return GenerationRequest(f"r{next(request_ids)}", prompt, max_tokens, sampling)


def assert_greedy(whole: ReferenceModel, prompt: tuple[int, ...], tokens: list[int]) -> None:
    """Every token is the unsplit model's choice after the tokens before it."""
    fed = [*prompt, *tokens[:-1]]
    whole.drop_from(0, 0)
    wants = [position >= len(prompt) - 1 for position in range(len(fed))]
    logits = whole.decode(fed, range(len(fed)), [0] * len(fed), wants)
    behind = logits.max(axis=1) - logits[np.arange(len(tokens)), tokens]
    assert behind.max() <= NEAR_TIE, f"token {int(behind.argmax())} of {len(tokens)} is {behind.max()} behind"


class Fleet:
    """Stages that can be stopped and started one by one, and the pipeline over them."""

    def __init__(self, paths: Sequence[Path], n_lanes: int) -> None:
        self._paths, self.n_lanes, self.ctx_tokens = paths, n_lanes, CTX
        self._running: dict[int, contextlib.AsyncExitStack] = {}
        self.addresses: list[str] = ["127.0.0.1:0"] * len(paths)
        self.pipeline: Pipeline
        self.recovering = asyncio.Event()

    async def start(self, index: int) -> None:
        """Start a stage, at its former address if it had one."""
        port = int(self.addresses[index].rsplit(":", 1)[1])
        config = StageConfig(
            self._paths[index],
            port=port,
            n_lanes=self.n_lanes,
            ctx_tokens=self.ctx_tokens,
            n_threads=1,
            max_rows=64,
            verify=False,
            calibrate=False,
        )
        stack = self._running[index] = contextlib.AsyncExitStack()
        self.addresses[index], _, _ = await stack.enter_async_context(serve(config))

    async def stop(self, index: int) -> None:
        await self._running.pop(index).aclose()

    async def stop_all(self) -> None:
        for index in list(self._running):
            await self.stop(index)

    async def lanes_used(self) -> list[int]:
        """Per stage, as the stages say."""
        stages = (await self.pipeline.describe())["stages"]
        assert isinstance(stages, list)
        return [stage["lanes_used"] for stage in stages]

    async def until_free(self) -> None:
        """Wait until no stage holds a lane: closes are under way when the last token arrives."""
        async with asyncio.timeout(20):
            while any(await self.lanes_used()):
                pass


@contextlib.asynccontextmanager
async def fleet(
    paths: Sequence[Path],
    *,
    n_lanes: int = 8,
    waiting_max: int = 64,
    recovery_timeout_s: float = 60.0,
    mode: str = "auto",
    share: bool = False,
) -> AsyncIterator[Fleet]:
    """A ready pipeline; at its end it drains, and everything has gone."""
    made = Fleet(paths, n_lanes)
    for index in range(len(paths)):
        await made.start(index)
    config = PipelineConfig(
        tuple(made.addresses),
        DTYPE_F32,
        ScheduleConfig(mode, n_groups=1, group_rows=8, chunk_rows=16),
        waiting_max=waiting_max,
        recovery_timeout_s=recovery_timeout_s,
        share=share,
    )
    file = pipeline_file(len(paths), pipeline_id="tiny", n_embd=SHAPE.n_embd, n_vocab=SHAPE.n_vocab)
    pipeline = made.pipeline = Pipeline(config, file, lambda _: False)
    disconnect = pipeline._disconnect

    async def noticed(error: RelaylineError) -> None:
        made.recovering.set()
        await disconnect(error)

    pipeline._disconnect = noticed  # type: ignore[method-assign]
    stopping = asyncio.Event()
    run = asyncio.create_task(pipeline.run(stopping))
    try:
        async with asyncio.timeout(20):
            await pipeline.ready.wait()
        yield made
    finally:
        stopping.set()
        async with asyncio.timeout(40):
            await run
            await made.stop_all()


async def tokens_of(stream: SessionStream) -> list[int]:
    """Read a stream to its end and hold it to its contract."""
    events: list[TokenEvent] = []
    async with asyncio.timeout(60):
        async for event in stream:
            events.append(event)
    await stream.aclose()
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]
    return [event.token for event in events]


LENGTHS = (5, 1, 40, 17, 3, 64, 90, 11)


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
    if mode == "fixed":  # one group is under way, so whoever comes back meets the others
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
        async with asyncio.timeout(20):
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


async def test_streams_of_two_coordinators_wait_for_lanes_that_the_other_has(
    artifacts: Artifacts, whole: ReferenceModel
) -> None:
    prompts = [prompt_of(index, 9 + index) for index in range(3)]
    async with fleet(artifacts([2]), n_lanes=2) as running:
        other = Pipeline(running.pipeline.config, running.pipeline.file, lambda _: False)
        stopping = asyncio.Event()
        run = asyncio.create_task(other.run(stopping))
        async with asyncio.timeout(20):
            await other.ready.wait()
        theirs = other.open(request(prompts[0], 200))
        await read(theirs, 1)
        streams = [running.pipeline.open(request(prompt, 30)) for prompt in prompts[1:]]
        outputs = await asyncio.gather(*map(tokens_of, streams))
        rest = await tokens_of(theirs)
        stopping.set()
        async with asyncio.timeout(40):
            await run
        await running.until_free()
    assert len(rest) == 199
    for prompt, tokens in zip(prompts[1:], outputs, strict=True):
        assert_greedy(whole, prompt, tokens)


async def test_a_refusal_says_why_and_leaves_nothing_behind(artifacts: Artifacts) -> None:
    async with fleet(artifacts([2]), n_lanes=1, waiting_max=1) as running:
        pipeline = running.pipeline
        with pytest.raises(ContextLengthError, match=r"256 tokens, but 257 were requested \(250 in the prompt, 7"):
            pipeline.open(request(prompt_of(0, 250), 7))
        streams = [pipeline.open(request(prompt_of(0, 3), 4)) for _ in range(2)]
        with pytest.raises(OverloadedError, match="1 requests already wait"):
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


# --- recovery ---------------------------------------------------------------------------------------------------------

SEEDED = SamplingParams(temperature=1.0, top_k=40, seed=7)


async def read(stream: SessionStream, n_tokens: int) -> list[int]:
    async with asyncio.timeout(30):
        return [(await anext(stream)).token for _ in range(n_tokens)]


async def test_a_shared_session_goes_on_after_a_loss_for_those_that_stay(artifacts: Artifacts) -> None:
    prompt, n_tokens = prompt_of(4, 21), 40
    async with fleet(artifacts([1, 3]), share=True) as running:
        undisturbed = await tokens_of(running.pipeline.open(request(prompt, n_tokens, SEEDED)))
        opener, stays = (running.pipeline.open(request(prompt, n_tokens, SEEDED)) for _ in range(2))
        begun = await read(opener, 5)
        await running.stop(1)
        async with asyncio.timeout(20):
            await running.recovering.wait()
        await opener.aclose()
        await running.start(1)
        async with asyncio.timeout(20):
            await running.pipeline.ready.wait()
        late = running.pipeline.open(request(prompt, n_tokens, SEEDED))
        assert await tokens_of(stays) == await tokens_of(late) == undisturbed
        assert begun == undisturbed[:5]
        assert running.pipeline.n_shared == 2
        await running.until_free()


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_a_lost_stage_is_a_pause_and_no_more(lost: int, artifacts: Artifacts, whole: ReferenceModel) -> None:
    paths, prompt, n_tokens = artifacts([1, 3]), prompt_of(3, 37), 40
    async with fleet(paths) as running:
        undisturbed = await tokens_of(running.pipeline.open(request(prompt, n_tokens, SEEDED)))
        greedy = running.pipeline.open(request(prompt, n_tokens))
        seeded = running.pipeline.open(request(prompt, n_tokens, SEEDED))
        before = [await read(greedy, 5), await read(seeded, 9)]
        epoch = running.pipeline.epoch
        await running.stop(lost)
        async with asyncio.timeout(20):
            await running.recovering.wait()
        assert not running.pipeline.is_ready()
        await running.start(lost)
        after = [await tokens_of(greedy), await tokens_of(seeded)]
        assert running.pipeline.epoch > epoch
        assert running.pipeline.phase is Phase.READY
        await running.until_free()
        assert len(await tokens_of(running.pipeline.open(request(prompt, 3)))) == 3
    assert len(before[0] + after[0]) == n_tokens
    assert_greedy(whole, prompt, before[0] + after[0])
    assert before[1] + after[1] == undisturbed


async def test_a_stage_lost_during_prefill_is_a_pause_too(artifacts: Artifacts, whole: ReferenceModel) -> None:
    prompts = [prompt_of(index, 200) for index in range(3)]
    async with fleet(artifacts([2])) as running:
        streams = [running.pipeline.open(request(prompt, 5)) for prompt in prompts]
        await running.stop(1)
        await running.start(1)
        outputs = await asyncio.gather(*map(tokens_of, streams))
    for prompt, tokens in zip(prompts, outputs, strict=True):
        assert_greedy(whole, prompt, tokens)


async def test_waiting_requests_survive_a_lost_stage(artifacts: Artifacts, whole: ReferenceModel) -> None:
    prompts = [prompt_of(index, 9) for index in range(4)]
    async with fleet(artifacts([2]), n_lanes=1) as running:
        streams = [running.pipeline.open(request(prompt, 8)) for prompt in prompts]
        first = await read(streams[0], 1)
        await running.stop(0)
        async with asyncio.timeout(20):
            await running.recovering.wait()
        await streams[1].aclose()
        await running.start(0)
        outputs = [first + await tokens_of(streams[0]), await tokens_of(streams[2]), await tokens_of(streams[3])]
        await running.until_free()
    for prompt, tokens in zip((prompts[0], prompts[2], prompts[3]), outputs, strict=True):
        assert len(tokens) == 8
        assert_greedy(whole, prompt, tokens)


async def test_a_stage_that_comes_back_with_fewer_lanes_makes_streams_wait(
    artifacts: Artifacts, whole: ReferenceModel
) -> None:
    prompts = [prompt_of(index, 9 + index) for index in range(4)]
    async with fleet(artifacts([2]), n_lanes=3, waiting_max=1) as running:
        streams = [running.pipeline.open(request(prompt, 30)) for prompt in prompts]
        begun = [await read(stream, 3) for stream in streams[:3]]
        await running.stop(0)
        running.n_lanes = 1
        await running.start(0)
        outputs = await asyncio.gather(*map(tokens_of, streams))
        assert running.pipeline.n_lanes == 1
        await running.until_free()
    for prompt, before, after in zip(prompts, [*begun, []], outputs, strict=True):
        assert len(before + after) == 30
        assert_greedy(whole, prompt, before + after)


async def test_who_no_longer_fits_a_stage_that_came_back_with_less_context_is_told(
    artifacts: Artifacts, whole: ReferenceModel
) -> None:
    prompt = prompt_of(1, 9)
    async with fleet(artifacts([2]), n_lanes=2) as running:
        fits, too_long, waits = (running.pipeline.open(request(prompt, n)) for n in (20, 100, 20))
        begun = await read(fits, 3)
        await read(too_long, 3)
        await running.stop(0)
        async with asyncio.timeout(20):
            await running.recovering.wait()
        newcomer = running.pipeline.open(request(prompt, 90))
        running.ctx_tokens = 64
        await running.start(0)
        for stream in (too_long, newcomer):
            with pytest.raises(ContextLengthError, match="64 tokens"):
                await read(stream, 100)
            await stream.aclose()
        outputs = await asyncio.gather(tokens_of(fits), tokens_of(waits))
        assert running.pipeline.ctx_tokens == 64
        await running.until_free()
    assert_greedy(whole, prompt, begun + outputs[0])
    assert_greedy(whole, prompt, outputs[1])


async def test_a_stage_that_stays_away_ends_requests_with_an_error(artifacts: Artifacts) -> None:
    async with fleet(artifacts([2]), n_lanes=1, recovery_timeout_s=0.0) as running:
        streams = [running.pipeline.open(request(prompt_of(0, 9), 200)) for _ in range(2)]
        await read(streams[0], 2)
        await running.stop(1)
        for stream in streams:
            with pytest.raises(StageLostError):
                await read(stream, 200)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            await stream.aclose()
        await running.start(1)
        async with asyncio.timeout(20):
            await running.pipeline.ready.wait()
        assert len(await tokens_of(running.pipeline.open(request(prompt_of(0, 9), 3)))) == 3


async def test_a_request_that_comes_during_a_pause_begins_after_it(artifacts: Artifacts, whole: ReferenceModel) -> None:
    prompts = [prompt_of(index, 20) for index in range(4)]
    async with fleet(artifacts([2]), n_lanes=2) as running:
        paused = running.pipeline.open(request(prompts[0], 12))
        begun = await read(paused, 4)
        await running.stop(1)
        async with asyncio.timeout(20):
            await running.recovering.wait()
        newcomers = [running.pipeline.open(request(prompt, 8)) for prompt in prompts[1:]]  # one lane for three
        await running.start(1)
        outputs = await asyncio.gather(tokens_of(paused), *map(tokens_of, newcomers))
        await running.until_free()
    assert [len(tokens) for tokens in outputs] == [8, 8, 8, 8]
    assert_greedy(whole, prompts[0], begun + outputs[0])
    for prompt, tokens in zip(prompts[1:], outputs[1:], strict=True):
        assert_greedy(whole, prompt, tokens)


async def test_a_newcomer_waits_for_a_lost_stage_as_long_as_the_others(artifacts: Artifacts) -> None:
    async with fleet(artifacts([2]), recovery_timeout_s=1.0) as running:
        await running.stop(1)
        async with asyncio.timeout(20):
            await running.recovering.wait()
        newcomer, leaver = (running.pipeline.open(request(prompt_of(0, 9), 3)) for _ in range(2))
        await leaver.aclose()
        with pytest.raises(StageLostError):
            await read(newcomer, 1)
        with pytest.raises(NotReadyError, match="recovering"):
            running.pipeline.open(request(prompt_of(0, 9), 3))
        await running.start(1)
        async with asyncio.timeout(20):
            await running.pipeline.ready.wait()
        assert len(await tokens_of(running.pipeline.open(request(prompt_of(0, 9), 3)))) == 3
        await running.until_free()


async def test_samples_of_an_old_epoch_and_echoes_are_ignored(artifacts: Artifacts, whole: ReferenceModel) -> None:
    prompt = prompt_of(5, 12)
    async with fleet(artifacts([2])) as running:
        pipeline = running.pipeline
        stream = pipeline.open(request(prompt, 20))
        tokens = await read(stream, 3)
        (session_id,) = pipeline._audiences
        length = len(pipeline._audiences[session_id].session.history)
        for epoch, position in (
            (pipeline.epoch - 1, length),
            (pipeline.epoch, length - 1),
            (pipeline.epoch, length + 1),
        ):
            sample = pb.Sampled(session_id=session_id, position=position, token=1)
            pipeline._on_return(pb.ReturnEnvelope(epoch=epoch, samples=[sample]))
        gone = pb.SessionFault(session_id=0, label="stage_lost", message="long ago", retryable=True)
        pipeline._on_return(pb.ReturnEnvelope(epoch=pipeline.epoch - 1, faults=[gone]))
        tokens += await tokens_of(stream)
        assert pipeline.epoch == 1
    assert len(tokens) == 20
    assert_greedy(whole, prompt, tokens)


async def test_a_session_is_replayed_after_a_fault_of_its_own(artifacts: Artifacts, whole: ReferenceModel) -> None:
    prompt = prompt_of(5, 40)
    async with fleet(artifacts([2])) as running:
        stream = running.pipeline.open(request(prompt, 20))
        tokens = await read(stream, 3)
        (session_id,) = running.pipeline._audiences
        fault = pb.SessionFault(session_id=session_id, label="no_lane", message="m", retryable=True)
        running.pipeline._on_return(pb.ReturnEnvelope(epoch=running.pipeline.epoch, faults=[fault]))
        tokens += await tokens_of(stream)
        await running.until_free()
    assert_greedy(whole, prompt, tokens)


# --- start and end ----------------------------------------------------------------------------------------------------


async def test_stages_in_the_wrong_order_are_refused_in_one_line(artifacts: Artifacts) -> None:
    paths = artifacts([1, 3])
    with pytest.raises(HandshakeError, match=r"wrong order.*is stage 1"):
        await start_only([paths[1], paths[0], paths[2]])


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
        async with asyncio.timeout(20):
            await pipeline.run(asyncio.Event())
    finally:
        await stages.stop_all()


async def test_draining_lets_requests_end_and_takes_no_new_ones(artifacts: Artifacts) -> None:
    async with fleet(artifacts([2])) as running:
        stream = running.pipeline.open(request(prompt_of(0, 9), 30))
        await read(stream, 1)
        drain = asyncio.create_task(running.pipeline._drain())
        rest = await tokens_of(stream)
        async with asyncio.timeout(20):
            await drain
        assert len(rest) == 29
        with pytest.raises(NotReadyError, match="draining"):
            running.pipeline.open(request(prompt_of(0, 9), 1))


async def test_a_stop_during_recovery_ends_requests_at_once(artifacts: Artifacts) -> None:
    async with fleet(artifacts([2])) as running:
        stream = running.pipeline.open(request(prompt_of(0, 9), 200))
        await read(stream, 1)
        await running.stop(0)
        async with asyncio.timeout(20):
            await running.recovering.wait()
    with pytest.raises(NotReadyError, match="shutting down"):
        await read(stream, 200)
