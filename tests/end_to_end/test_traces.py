"""Traces of real stages and a real pipeline in one process: from every token to its batches, and back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.trace import ReadableSpan

from relayline.coordinator.engine import stage_client
from relayline.coordinator.engine.pipeline import Pipeline, PipelineConfig
from relayline.coordinator.engine.telemetry_control import TelemetryControl
from relayline.coordinator.observe import passes
from relayline.coordinator.observe.observer import Observer
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.request_log import RequestRecord
from relayline.coordinator.sessions.streams import SessionStream
from relayline.deploy.machine.ports import free_port
from relayline.deploy.testing.engines import stage_config
from relayline.deploy.testing.tiny_slices import TinyShape, write_pipeline
from relayline.stage import process
from relayline.wire.envelopes.dtypes import DTYPE_F32
from relayline.wire.settings.table import ServingSettings
from relayline.wire.telemetry import names
from relayline.wire.telemetry.config import Level
from relayline.wire.telemetry.telemetry import Role
from tests.support.fakes import pipeline_file
from tests.support.spans import Kept, attributes_of

SHAPE = TinyShape(n_layers=4)
N_STAGES = 3
TIMEOUT_S = 120.0
GREEDY = SamplingParams(temperature=0.0)
numbers = itertools.count()


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_pipeline(tmp_path_factory.mktemp("split"), SHAPE, [1, 3])


class World:
    """Stages, pipeline and observer, and the spans that each kept."""

    def __init__(self, artifacts: Sequence[Path], level: Level) -> None:
        self.kept = Kept(level=level)
        self.stage_kept = [Kept(Role.STAGE, level, name=f"{index}@test") for index in range(N_STAGES)]
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(N_STAGES)]
        self.pipeline: Pipeline
        self.observer = Observer(self.kept.telemetry, later=asyncio.get_running_loop().call_later)
        self.control = TelemetryControl(self.observer, lambda: self.pipeline.stages)
        self._artifacts = artifacts
        self._running: dict[int, contextlib.AsyncExitStack] = {}

    async def start(self, index: int) -> None:
        port = int(self.addresses[index].rsplit(":", 1)[1])
        config = stage_config(self._artifacts[index], port=port, n_lanes=8, ctx_tokens=256, n_threads=1, max_rows=64,
                             verify=False, calibrate=False)  # fmt: skip
        stack = self._running[index] = contextlib.AsyncExitStack()
        self.addresses[index], _, _ = await stack.enter_async_context(process.serve(config))

    async def stop(self, index: int) -> None:
        await self._running.pop(index).aclose()

    async def stop_all(self) -> None:
        for index in list(self._running):
            await self.stop(index)

    def open(self, n_prompt: int, n_tokens: int, seed: int | None = None) -> tuple[RequestRecord, SessionStream]:
        number = next(numbers)
        record = RequestRecord(f"req-{number}", "POST", "/v1/completions", 1, 1_000, f"cmpl-{number}", "tiny")
        self.observer.received(record, {})
        prompt = np.random.default_rng(number if seed is None else seed).integers(0, SHAPE.n_vocab, n_prompt)
        request = GenerationRequest(f"cmpl-{number}-0", tuple(prompt.tolist()), n_tokens, GREEDY)
        return record, self.pipeline.open(request, record)

    async def run(self, n_prompt: int, n_tokens: int, seed: int | None = None) -> RequestRecord:
        """Ask for tokens and read all of them."""
        record, stream = self.open(n_prompt, n_tokens, seed)
        async with asyncio.timeout(TIMEOUT_S):
            n_read = len([event async for event in stream])
        await stream.aclose()
        assert n_read == n_tokens
        self.observer.answered(record, record.streams[0].ended_ns)
        return record

    async def settled(self, records: Sequence[RequestRecord]) -> None:
        """Wait until the stages have summed up every session."""
        async with asyncio.timeout(TIMEOUT_S):
            while not all(stream.session.is_final for record in records for stream in record.streams):
                await self.control.describe()  # a round trip to every stage


@contextlib.asynccontextmanager
async def world_of(
    artifacts: Sequence[Path], monkeypatch: pytest.MonkeyPatch, level: Level = Level.BATCHES, *, share: bool = False
) -> AsyncIterator[World]:
    world = World(artifacts, level)
    monkeypatch.setattr(stage_client, "STATUS_TIMEOUT_S", TIMEOUT_S)  # a busy host takes longer for a stage's answer
    monkeypatch.setattr(
        process, "start_telemetry", lambda facts: world.stage_kept[facts.artifact.stage_index].telemetry
    )
    for index in range(N_STAGES):
        await world.start(index)
    file = pipeline_file(N_STAGES, pipeline_id="tiny", n_embd=SHAPE.n_embd, n_vocab=SHAPE.n_vocab)
    config = PipelineConfig(tuple(world.addresses), DTYPE_F32, serving=ServingSettings(share=share, prefix_lanes=0))
    world.pipeline = Pipeline(config, file, lambda _: False, observer=world.observer)
    stopping = asyncio.Event()
    running = asyncio.create_task(world.pipeline.run(stopping))
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await world.pipeline.ready.wait()
        yield world
    finally:
        stopping.set()
        async with asyncio.timeout(TIMEOUT_S):
            await running
            await world.stop_all()


def context_of(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


async def test_every_token_is_found_in_its_batch_at_every_stage(
    artifacts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = (5, 1, 40, 17, 3, 64)
    async with world_of(artifacts, monkeypatch) as world:
        records = await asyncio.gather(*(world.run(n_prompt, 12) for n_prompt in lengths))
        await world.settled(records)
        found: list[Any] = [await world.control.trace(record.completion_id, 0) for record in records]
        spans = [
            {context_of(s): s for s in kept.spans() if names.ATTR_BATCH_STEP in attributes_of(s)}
            for kept in world.stage_kept
        ]
    by_id = {view["streams"][0]["id"]: view["streams"][0] for view in found}
    for n_prompt, view in zip(lengths, found, strict=True):
        (stream,) = view["streams"]
        for stage in stream["stages"]:
            rows = [(b["position"], b["own_rows"], b["phase"]) for b in stage["batches"]]
            covered = [position + row for position, n_rows, _ in rows for row in range(n_rows)]
            assert covered == list(range(n_prompt + 11))  # each row once, the last token is never fed back
            assert [position for position, _, phase in rows if phase == "decode"] == list(
                range(n_prompt, n_prompt + 11)
            )
            assert stage["summary"]["decode_steps"] == 11
            for batch in stage["batches"]:
                assert batch["rows"] >= batch["own_rows"]
                for mate in batch["mates"]:  # a stream that shares a batch with me has the same record of it
                    theirs = {b["id"]: b["mates"] for b in by_id[mate]["stages"][stage["stage"]]["batches"]}
                    assert stream["id"] in theirs[batch["id"]]
    assert any(batch["mates"] for view in found for batch in view["streams"][0]["stages"][0]["batches"])
    assert_links_both_ways(world, records, spans)


def assert_links_both_ways(
    world: World, records: Sequence[RequestRecord], spans: list[dict[tuple[int, int], ReadableSpan]]
) -> None:
    """A request's phases link to their seconds of passes; batches there link back to spans of the same trace."""
    decodes = {f"{span.context.trace_id:032x}": span for span in world.kept.spans(names.SPAN_DECODE) if span.context}
    assert set(decodes) == {record.trace_id for record in records}
    batches = {context: span for by_stage in spans for context, span in by_stage.items()}
    for trace_id, decode in decodes.items():
        (prefill,) = (
            span for span in world.kept.spans(names.SPAN_PREFILL) if f"{context_of(span)[0]:032x}" == trace_id
        )
        linked = [link.context.trace_id for span in (prefill, decode) for link in span.links]
        mine = {
            passes
            for (passes, _), span in batches.items()
            if any(f"{link.context.trace_id:032x}" == trace_id for link in span.links)
        }
        assert set(linked) == mine
        assert attributes_of(decode)[names.ATTR_STAGES_REPORTED] == tuple(range(N_STAGES))


async def test_summaries_agree_with_the_rings(artifacts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    async with world_of(artifacts, monkeypatch, Level.SUMMARY) as world:
        records = await asyncio.gather(*(world.run(n_prompt, 9) for n_prompt in (9, 30, 2)))
        await world.settled(records)
        found: list[Any] = [await world.control.trace(record.request_id, 0) for record in records]
        assert [kept.spans() for kept in world.stage_kept] == [[]] * N_STAGES
    for view in found:
        for stage in view["streams"][0]["stages"]:
            decode = [batch for batch in stage["batches"] if batch["phase"] == "decode"]
            summary = stage["summary"]
            assert summary["decode_steps"] == len(decode)
            assert summary["prefill_steps"] == len(stage["batches"]) - len(decode)
            assert summary["batch_rows_max"] == max(batch["rows"] for batch in decode)
            assert summary["decode_wait_ms"] == pytest.approx(sum(batch["wait_ms"] for batch in decode), abs=0.02)
            assert summary["batch_rows_mean"] == pytest.approx(
                sum(batch["rows"] for batch in decode) / len(decode), abs=0.01
            )
    for decode_span in world.kept.spans(names.SPAN_DECODE):
        assert decode_span.links == ()


async def test_off_leaves_nothing_and_may_change_while_it_runs(
    artifacts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "WINDOW_NS", round(TIMEOUT_S * 1e9))  # a busy host takes seconds for a few passes
    async with world_of(artifacts, monkeypatch, Level.OFF) as world:
        await world.run(5, 6)
        assert await world.control.trace(None, 0) is None
        assert world.kept.spans() == []
        answer = await world.control.change("batches", None)
        assert answer["stages"] == ["batches"] * N_STAGES
        record = await world.run(5, 6)
        await world.settled([record])
        assert len(world.kept.one(names.SPAN_DECODE).links) == 1, "one window of passes"
        rhythm = [kept.spans(names.SPAN_BATCHES) for kept in world.stage_kept]
        assert [[len(span.events) for span in spans] for spans in rhythm] == [[1, 5]] * N_STAGES
        await world.control.change("off", None)
        n_spans = len(world.kept.spans())
        await world.run(5, 6)
        assert len(world.kept.spans()) == n_spans


async def test_requests_that_share_a_session_have_a_trace_each(
    artifacts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world_of(artifacts, monkeypatch, share=True) as world:
        first, second = await asyncio.gather(world.run(9, 20, seed=77), world.run(9, 20, seed=77))
        await world.settled([first, second])
        found: Any = await world.control.trace(second.completion_id, 0)
    assert world.pipeline.conductor.readers.n_joined == 1
    assert found["streams"][0]["shared_with"] == first.streams[0].request_id
    assert found["streams"][0]["tokens"] == 20
    assert len(found["streams"][0]["stages"][0]["batches"]) >= 20
    own, shared = (
        next(span for span in world.kept.spans(names.SPAN_DECODE) if f"{context_of(span)[0]:032x}" == record.trace_id)
        for record in (first, second)
    )
    assert [(link.context.trace_id, link.context.span_id) for link in shared.links] == [context_of(own)]


async def test_a_lost_stage_is_an_event_and_the_new_one_gets_the_level(
    artifacts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world_of(artifacts, monkeypatch, Level.SUMMARY) as world:
        await world.control.change("frames", None)
        record, stream = world.open(9, 60)
        n_read = 0
        async with asyncio.timeout(TIMEOUT_S):
            async for _ in stream:
                n_read += 1
                if n_read == 5:
                    await world.stop(1)
                    # The returning stage is a new process, so it starts at the level of its own configuration.
                    world.stage_kept[1] = Kept(Role.STAGE, Level.SUMMARY, name="1@test")
                    await world.start(1)
        await stream.aclose()
        world.observer.answered(record, record.streams[0].ended_ns)
        await world.settled([record])
        assert world.stage_kept[1].telemetry.level is Level.FRAMES
        found: Any = await world.control.trace(None, 0)
    assert n_read == 60
    assert [event["name"] for event in found["streams"][0]["events"]] == ["paused", "resumed"]
    decode = world.kept.one(names.SPAN_DECODE)
    assert [event.name for event in decode.events] == ["paused", "resumed"]
    pause = world.kept.one(names.SPAN_RECOVERY)
    assert attributes_of(pause)[names.ATTR_LOST_STAGE] == 1
    assert pause.parent is not None
    assert pause.parent.span_id == context_of(decode)[1]
    assert attributes_of(decode)[names.ATTR_RECOVERIES] == 1


async def test_a_client_that_leaves_ends_its_spans(artifacts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    async with world_of(artifacts, monkeypatch) as world:
        record, stream = world.open(9, 200)
        async with asyncio.timeout(TIMEOUT_S):
            await anext(stream)
        await stream.aclose()
        world.observer.answered(record, record.streams[0].ended_ns)
        await world.settled([record])
    assert attributes_of(world.kept.one(names.SPAN_DECODE))[names.ERROR_TYPE] == "cancelled"
    assert record.streams[0].outcome() == ("abort", "cancelled")
