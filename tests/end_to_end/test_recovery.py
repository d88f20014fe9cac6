"""A lost stage is a pause: running, waiting and new requests go on, or end with an error in time."""

from __future__ import annotations

import asyncio

import pytest

from relayline.coordinator.engine.pipeline import Phase
from relayline.coordinator.engine.stage_client import StageClient
from relayline.coordinator.sessions.generation import SamplingParams
from relayline.deploy.testing.reference import ReferenceModel
from relayline.wire.common import bounds
from relayline.wire.common.errors import (
    ContextLengthError,
    NotReadyError,
    StageLostError,
)
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.fleet import (
    Artifacts,
    artifacts_fixture,
    assert_greedy,
    assert_seeded,
    fleet,
    prompt_of,
    read,
    request,
    tokens_of,
    whole_fixture,
)

SEEDED = SamplingParams(temperature=1.0, top_k=40, seed=7)
FIXTURES = (artifacts_fixture, whole_fixture)  # pytest finds them in the modules that name them


async def test_a_shared_session_goes_on_after_a_loss_for_those_that_stay(
    artifacts: Artifacts, whole: ReferenceModel
) -> None:
    prompt, n_tokens = prompt_of(4, 21), 40
    async with fleet(artifacts([1, 3]), share=True) as running:
        opener, stays = (running.pipeline.open(request(prompt, n_tokens, SEEDED)) for _ in range(2))
        begun = await read(opener, 5)
        await running.lose(1)
        await opener.aclose()
        await running.start(1)
        async with asyncio.timeout(60):
            await running.pipeline.ready.wait()
        late = running.pipeline.open(request(prompt, n_tokens, SEEDED))
        tokens = await tokens_of(stays)
        assert await tokens_of(late) == tokens
        assert begun == tokens[:5]
        assert running.pipeline.conductor.readers.n_joined == 2
        await running.until_free()
    assert len(tokens) == n_tokens
    assert_seeded(whole, prompt, tokens, SEEDED)


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_a_lost_stage_is_a_pause_and_no_more(lost: int, artifacts: Artifacts, whole: ReferenceModel) -> None:
    paths, prompt, n_tokens = artifacts([1, 3]), prompt_of(3, 37), 40
    async with fleet(paths) as running:
        greedy = running.pipeline.open(request(prompt, n_tokens))
        seeded = running.pipeline.open(request(prompt, n_tokens, SEEDED))
        before = [await read(greedy, 5), await read(seeded, 9)]
        epoch = running.pipeline.epoch
        await running.lose(lost)
        assert not running.pipeline.is_ready()
        await running.start(lost)
        after = [await tokens_of(greedy), await tokens_of(seeded)]
        assert running.pipeline.epoch > epoch
        assert running.pipeline.phase is Phase.READY
        await running.until_free()
        assert len(await tokens_of(running.pipeline.open(request(prompt, 3)))) == 3
    assert len(before[0] + after[0]) == n_tokens
    assert_greedy(whole, prompt, before[0] + after[0])
    assert len(before[1] + after[1]) == n_tokens
    assert_seeded(whole, prompt, before[1] + after[1], SEEDED)


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
        await running.lose(0)
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
    prompts, n_tokens = [prompt_of(index, 9 + index) for index in range(4)], 60
    async with fleet(artifacts([2]), n_lanes=3, waiting_max=1) as running:
        streams = [running.pipeline.open(request(prompt, n_tokens)) for prompt in prompts[:3]]
        begun = [await read(stream, 3) for stream in streams]
        await running.lose(0)
        streams.append(running.pipeline.open(request(prompts[3], n_tokens)))  # one at least is there when it is back
        running.n_lanes = 1
        await running.start(0)
        async with asyncio.timeout(60):
            await running.pipeline.ready.wait()
        assert running.pipeline.n_lanes == 1
        outputs = await asyncio.gather(*map(tokens_of, streams))
        await running.until_free()
    for prompt, before, after in zip(prompts, [*begun, []], outputs, strict=True):
        assert len(before + after) == n_tokens
        assert_greedy(whole, prompt, before + after)


async def test_a_stage_replaced_before_its_configuration_is_asked_again_for_its_rows(
    artifacts: Artifacts, whole: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, n_tokens, restarted = [prompt_of(index, 9) for index in range(3)], 40, asyncio.Event()
    configure = StageClient.configure
    async with fleet(artifacts([2]), n_lanes=3) as running:

        async def configure_another(client: StageClient, asked: pb.ConfigureRequest) -> dict[int, int]:
            if asked.stage_index == 0 and not restarted.is_set():  # it has just reported three lanes
                restarted.set()
                await running.stop(0)
                running.n_lanes = 1
                await running.start(0)
            return await configure(client, asked)

        streams = [running.pipeline.open(request(prompt, n_tokens)) for prompt in prompts]
        begun = [await read(stream, 3) for stream in streams]
        monkeypatch.setattr(StageClient, "configure", configure_another)
        await running.stop(1)
        await running.start(1)
        async with asyncio.timeout(60):
            await restarted.wait()
            await running.pipeline.ready.wait()
        assert running.pipeline.n_lanes == 1
        outputs = await asyncio.gather(*map(tokens_of, streams))
        await running.until_free()
    for prompt, before, after in zip(prompts, begun, outputs, strict=True):
        assert_greedy(whole, prompt, before + after)


async def test_a_stream_too_long_for_a_restarted_stage_gets_a_clear_error(
    artifacts: Artifacts, whole: ReferenceModel
) -> None:
    prompt = prompt_of(1, 9)
    async with fleet(artifacts([2]), n_lanes=2) as running:
        fits, too_long, waits = (running.pipeline.open(request(prompt, n)) for n in (20, 100, 20))
        begun = await read(fits, 3)
        await read(too_long, 3)
        await running.lose(0)
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
        async with asyncio.timeout(60):
            await running.pipeline.ready.wait()
        assert len(await tokens_of(running.pipeline.open(request(prompt_of(0, 9), 3)))) == 3


async def test_a_request_that_comes_during_a_pause_begins_after_it(artifacts: Artifacts, whole: ReferenceModel) -> None:
    prompts = [prompt_of(index, 20) for index in range(4)]
    async with fleet(artifacts([2]), n_lanes=2) as running:
        paused = running.pipeline.open(request(prompts[0], 12))
        begun = await read(paused, 4)
        await running.lose(1)
        newcomers = [running.pipeline.open(request(prompt, 8)) for prompt in prompts[1:]]  # one lane for three
        await running.start(1)
        outputs = await asyncio.gather(tokens_of(paused), *map(tokens_of, newcomers))
        await running.until_free()
    assert [len(tokens) for tokens in outputs] == [8, 8, 8, 8]
    assert_greedy(whole, prompts[0], begun + outputs[0])
    for prompt, tokens in zip(prompts[1:], outputs[1:], strict=True):
        assert_greedy(whole, prompt, tokens)


async def test_new_requests_wait_for_a_lost_stage_for_a_while_and_running_ones_longer(
    artifacts: Artifacts, whole: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "BEAT_EVERY_S", 0.01)
    async with fleet(artifacts([2]), lost_wait_s=30.0) as running:
        paused = running.pipeline.open(request(prompt_of(0, 9), 20))
        begun = await read(paused, 3)
        await running.lose(1)
        newcomer, leaver = (running.pipeline.open(request(prompt_of(n, 9), 3)) for n in (1, 2))
        await leaver.aclose()
        look = running.pipeline.conductor.look  # half a minute passes once both have come, however slow the host is
        monkeypatch.setattr(running.pipeline.conductor, "look", lambda now_ns: look(now_ns + 30 * 10**9))
        with pytest.raises(NotReadyError, match=r"unreachable: a stage was lost \d\d s ago"):
            await read(newcomer, 1)
        assert running.pipeline.phase is Phase.UNREACHABLE
        with pytest.raises(NotReadyError, match="unreachable"):
            running.pipeline.open(request(prompt_of(3, 9), 3))
        await running.start(1)
        tokens = begun + await tokens_of(paused)
        assert len(await tokens_of(running.pipeline.open(request(prompt_of(3, 9), 3)))) == 3
        await running.until_free()
    assert_greedy(whole, prompt_of(0, 9), tokens)


async def test_samples_of_an_old_epoch_and_echoes_are_ignored(artifacts: Artifacts, whole: ReferenceModel) -> None:
    prompt = prompt_of(5, 12)
    async with fleet(artifacts([2])) as running:
        pipeline = running.pipeline
        stream = pipeline.open(request(prompt, 20))
        tokens = await read(stream, 3)
        (session_id,) = pipeline._audiences
        (session,) = pipeline.conductor.readers
        length = len(session.history)
        for epoch, position in (
            (pipeline.epoch - 1, length),
            (pipeline.epoch, length - 1),
            (pipeline.epoch, length + 1),
        ):
            sample = pb.Sampled(session_id=session_id, position=position, token=1)
            pipeline.on_return(pb.ReturnResponse(epoch=epoch, samples=[sample]))
        gone = pb.SessionFault(session_id=0, label="stage_lost", message="long ago", retryable=True)
        pipeline.on_return(pb.ReturnResponse(epoch=pipeline.epoch - 1, faults=[gone]))
        tokens += await tokens_of(stream)
        assert pipeline.epoch == 1
    assert len(tokens) == 20
    assert_greedy(whole, prompt, tokens)


async def test_a_session_is_replayed_after_its_own_fault(artifacts: Artifacts, whole: ReferenceModel) -> None:
    prompt = prompt_of(5, 40)
    async with fleet(artifacts([2])) as running:
        stream = running.pipeline.open(request(prompt, 20))
        tokens = await read(stream, 3)
        (session_id,) = running.pipeline._audiences
        fault = pb.SessionFault(session_id=session_id, label="no_lane", message="m", retryable=True)
        running.pipeline.on_return(pb.ReturnResponse(epoch=running.pipeline.epoch, faults=[fault]))
        tokens += await tokens_of(stream)
        await running.until_free()
    assert_greedy(whole, prompt, tokens)


async def test_a_stop_during_recovery_ends_requests_at_once(artifacts: Artifacts) -> None:
    async with fleet(artifacts([2])) as running:
        stream = running.pipeline.open(request(prompt_of(0, 9), 200))
        await read(stream, 1)
        await running.lose(0)
    with pytest.raises(NotReadyError, match="shutting down"):
        await read(stream, 200)
