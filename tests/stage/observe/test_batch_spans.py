"""Goal: a stage's spans, ring and summaries show which batch decoded which rows, with which others, and why.

Method: fake engines behind real gRPC. The spans are compared with what the engine really decoded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from relayline.deploy.testing.tiny_slices import TinyShape, write_pipeline
from relayline.stage.config import StageConfig
from relayline.stage.engine.artifact import open_artifact
from relayline.stage.observe.observer import _constants
from relayline.stage.queue_types import QueuedFrame
from relayline.wire.common.errors import NativeError
from relayline.wire.envelopes import trace_context
from relayline.wire.envelopes.frames import Flag, grant_argument
from relayline.wire.envelopes.session_ids import with_adapter
from relayline.wire.links import rpc
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.telemetry import names
from relayline.wire.telemetry.telemetry import Level, Role, Telemetry, TelemetryConfig
from tests.support.fakes import EPOCH, BlockedDecode, control, rows_frame, tokens_frame
from tests.support.served_stage import Coordinator, StageUnderTest, served

PREFILL, SAMPLE = Flag.PREFILL, Flag.WANTS_SAMPLE


class Store:
    """Telemetry of one stage that keeps its spans."""

    def __init__(self, level: Level, stage_index: int = 1) -> None:
        self._exporter = InMemorySpanExporter()
        self.telemetry = Telemetry.start(
            Role.STAGE, f"{stage_index}@test", TelemetryConfig(level=level), [self._exporter]
        )

    def spans(self, *wanted: str) -> list[ReadableSpan]:
        assert self.telemetry.flush(20)
        return [span for span in self._exporter.get_finished_spans() if span.name in wanted]

    def batches(self) -> list[ReadableSpan]:
        """Spans of native steps, frames' left out."""
        return [span for span in self.spans(*names.BATCH_NAMES) if names.ATTR_BATCH_STEP in (span.attributes or {})]

    def batch(self) -> ReadableSpan:
        (span,) = self.batches()
        return span

    def frames(self) -> list[ReadableSpan]:
        return [span for span in self.spans(*names.BATCH_NAMES) if names.ATTR_BATCH_STEP not in (span.attributes or {})]


@contextlib.contextmanager
def storing(level: Level, stage_index: int = 1) -> Iterator[Store]:
    store = Store(level, stage_index)
    yield store
    store.telemetry.shutdown()


def traced(frame: QueuedFrame, context: bytes) -> QueuedFrame:
    frame.trace = context
    return frame


def ids_of(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def named(context: bytes) -> tuple[int, int]:
    return int.from_bytes(context[:16], "big"), int.from_bytes(context[16:24], "big")


def links(span: ReadableSpan, kind: str) -> list[tuple[tuple[int, int], dict[str, Any]]]:
    return [
        ((link.context.trace_id, link.context.span_id), dict(link.attributes or {}))
        for link in span.links
        if (link.attributes or {})[names.ATTR_LINK] == kind
    ]


async def batches(stage: StageUnderTest, **asked: Any) -> pb.BatchesResponse:
    async with rpc.open_channel(stage.address) as channel:
        answer = await rpc.call(channel, "Batches", pb.BatchesRequest(**asked), pb.BatchesResponse, "stage", 20)
    assert isinstance(answer, pb.BatchesResponse)
    return answer


async def level(stage: StageUnderTest, asked: pb.SetTelemetryRequest) -> Level | None:
    async with rpc.open_channel(stage.address) as channel:
        answer = await rpc.call(channel, "SetTelemetry", asked, pb.SetTelemetryResponse, "stage", 20)
    return Level.from_wire(answer.level)


async def run_together(
    monkeypatch: pytest.MonkeyPatch, stage: StageUnderTest, one: Coordinator, *frames: QueuedFrame
) -> None:
    """Have the frames decoded in one native step: they arrive while another one runs."""
    blocked = BlockedDecode(stage.engine)
    await one.send(control(99, Flag.OPEN), rows_frame(99, 0, 1, PREFILL))
    with contextlib.ExitStack() as stack:
        stack.callback(blocked.release)
        assert await asyncio.to_thread(blocked.entered.wait, 20)
        arrived = asyncio.Event()
        runner = stage.service.runner
        push = runner.push

        def noted(queued: list[QueuedFrame]) -> list[QueuedFrame]:
            arrived.set()
            return push(queued)

        monkeypatch.setattr(runner, "push", noted)
        await one.send(*frames)
        async with asyncio.timeout(20):
            await arrived.wait()


@contextlib.asynccontextmanager
async def one_stage(store: Store | None, index: int = 1) -> AsyncIterator[tuple[StageUnderTest, Coordinator]]:
    telemetry = store.telemetry if store else None
    async with served(index, index + 1, telemetry=telemetry) as stage, Coordinator(stage) as one:
        await one.start()
        yield stage, one


async def test_a_batch_span_is_linked_to_its_requests_and_says_how_the_batch_came_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = trace_context.new_root(), trace_context.new_root()
    with storing(Level.BATCHES) as store:
        async with one_stage(store) as (stage, one):
            opens = [control(session_id, Flag.OPEN) for session_id in (5, 6, 7)]
            await run_together(
                monkeypatch,
                stage,
                one,
                *opens,
                traced(rows_frame(5, 0, 3, PREFILL | SAMPLE), first),
                traced(rows_frame(6, 0, 1, SAMPLE), second),
                rows_frame(7, 0, 1, SAMPLE),
            )
            while len((await one.reply()).samples) != 3:
                pass
            ring = await batches(stage)
        span = store.batch()
    assert span.parent is not None, "a coordinator that makes no traces of passes: below the first request"
    assert (span.parent.trace_id, span.parent.span_id) in (named(first), named(second))
    assert span.name == "mixed ×3"
    assert span.kind is SpanKind.CONSUMER
    given = dict(span.attributes or {})
    assert given[names.ATTR_BATCH_ID] == "1:2"
    assert given[names.ATTR_BATCH_STEP] == 2
    assert (given[names.ATTR_BATCH_ROWS], given[names.ATTR_BATCH_FRAMES], given[names.ATTR_BATCH_SESSIONS]) == (5, 3, 3)
    assert (given[names.ATTR_BATCH_PREFILL_ROWS], given[names.ATTR_BATCH_PHASE]) == (3, "mixed")
    assert given[names.ATTR_BATCH_PADDED_ROWS] == 0
    assert given[names.ATTR_BATCH_CLOSE_REASON] == "queue_drained"
    assert (given[names.ATTR_BATCH_QUEUED_ROWS_BEFORE], given[names.ATTR_BATCH_QUEUED_ROWS_AFTER]) == (5, 0)
    assert (given[names.ATTR_LAYER_START], given[names.ATTR_LAYER_END], given[names.ATTR_STAGE_COUNT]) == (1, 2, 2)
    assert given[names.ATTR_STAGE_NAME] == "stage-1"
    assert (given[names.ATTR_POLICY], given[names.ATTR_POLICY_LANES_USED]) == ("auto", 4)
    assert given[names.ATTR_BATCH_DECODE_NS] > 0
    assert given[names.ATTR_BATCH_ENCODE_NS] > 0
    assert set(given[names.ATTR_MEMBER_SESSIONS]) == {f"{session_id:016x}" for session_id in (5, 6, 7)}
    assert sum(given[names.ATTR_MEMBER_ROWS]) == 5
    waits = given[names.ATTR_MEMBER_WAITS_NS]
    assert min(waits) > 0
    assert given[names.ATTR_BATCH_WAIT_MAX_NS] == max(waits)

    members = links(span, names.LINK_MEMBER)
    assert {context for context, _ in members} == {named(first), named(second)}, "the third is not sampled"
    by_context = dict(members)
    assert by_context[named(first)][names.ATTR_FRAME_PREFILL]
    assert by_context[named(first)][names.ATTR_FRAME_ROWS] == 3
    at = given[names.ATTR_MEMBER_SESSIONS].index(f"{6:016x}")
    assert by_context[named(second)][names.ATTR_FRAME_WAIT_NS] == waits[at]
    assert links(span, names.LINK_UPSTREAM_BATCH) == []

    newest = ring.batches[-1]
    assert named(newest.context) == ids_of(span)
    assert [member.wait_ns for member in newest.members] == list(waits)
    assert (newest.step, newest.decode_ns) == (2, given[names.ATTR_BATCH_DECODE_NS])
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time - span.start_time >= max(waits) + newest.decode_ns + newest.encode_ns
    closed, decoded = span.events
    assert (closed.name, decoded.name) == (names.EVENT_CLOSED, names.EVENT_DECODED)
    assert abs(closed.timestamp - span.start_time - max(waits)) < 1_000, "the bar begins when its first row arrived"
    assert closed.timestamp < decoded.timestamp <= span.end_time
    assert dict(closed.attributes or {}) == {
        names.EVENT_ATTR_REASON: "queue_drained",
        names.EVENT_ATTR_ROWS: 5,
        names.EVENT_ATTR_WAITED: pytest.approx(max(waits) / 1e9),
    }
    assert dict(decoded.attributes or {})[names.EVENT_ATTR_MEASURED] == newest.decode_ns / 1e9


async def test_the_batches_of_one_envelope_are_connected_through_the_pipeline() -> None:
    request = trace_context.new_root()
    with storing(Level.BATCHES, 0) as upper, storing(Level.BATCHES, 1) as lower:
        async with (
            served(1, 2, telemetry=lower.telemetry) as second,
            served(0, 2, telemetry=upper.telemetry) as first,
            Coordinator(second) as end,
            Coordinator(first) as begin,
        ):
            await end.configure()
            await end.listen()
            await begin.start(next_address=second.address)
            await begin.send(control(5, Flag.OPEN), traced(tokens_frame(5, 0, [1, 2], PREFILL | SAMPLE), request))
            while not (await end.reply()).samples:
                pass
        above, below = upper.batch(), lower.batch()
    assert [context for context, _ in links(above, names.LINK_MEMBER)] == [named(request)]
    assert [context for context, _ in links(below, names.LINK_MEMBER)] == [named(request)]
    assert links(below, names.LINK_UPSTREAM_BATCH) == [], "there is one, and that is the parent"
    assert below.parent is not None
    assert (below.parent.trace_id, below.parent.span_id) == ids_of(above)
    assert dict(above.attributes or {})[names.ATTR_BATCH_BYTES_OUT] > 0
    assert ids_of(above)[0] == ids_of(below)[0], "all batches of a pass are in one trace"


async def one_token(one: Coordinator, session_id: int, context: bytes) -> pb.SessionSummary:
    """Run a session of one token; returns the summary that follows its close."""
    await one.send(control(session_id, Flag.OPEN), traced(rows_frame(session_id, 0, 2, PREFILL | SAMPLE), context))
    assert (await one.reply()).samples
    await one.send(control(session_id, Flag.CLOSE))
    (summary,) = (await one.reply()).summaries
    return summary


async def test_a_summary_follows_the_close() -> None:
    with storing(Level.BATCHES) as store:
        async with one_stage(store) as (_, one):
            summary = await one_token(one, 5, trace_context.new_root())
            await one.send(control(6, Flag.OPEN), control(6, Flag.CLOSE))
            (idle,) = (await one.reply()).summaries
    assert (summary.session_id, summary.stage_index, summary.n_prefill_steps, summary.n_decode_steps) == (5, 1, 1, 0)
    assert (idle.session_id, idle.n_prefill_steps) == (6, 0)


@pytest.mark.parametrize("at", [Level.OFF, Level.SUMMARY])
async def test_below_batches_no_span_is_made_and_no_context_leaves(at: Level) -> None:
    with storing(at) as store:
        async with one_stage(store) as (stage, one):
            await one.send(
                control(5, Flag.OPEN), traced(rows_frame(5, 0, 2, PREFILL | SAMPLE), trace_context.new_root())
            )
            assert (await one.reply()).samples
            ring = await batches(stage)
            assert len(ring.batches) == (0 if at is Level.OFF else 1)
            assert [record.context for record in ring.batches] == [b""] * len(ring.batches)
        assert store.spans(names.SPAN_BATCHES, *names.BATCH_NAMES) == []


async def test_at_level_off_no_summary_is_sent() -> None:
    with storing(Level.OFF) as store:
        async with one_stage(store) as (_, one):
            await one.send(control(5, Flag.OPEN), control(5, Flag.CLOSE))
            await one.send(control(6, Flag.OPEN), rows_frame(6, 0, 2, PREFILL | SAMPLE))
            reply = await one.reply()
            assert (len(reply.samples), len(reply.summaries)) == (1, 0)


async def test_an_unsampled_batch_leaves_no_span() -> None:
    with storing(Level.FRAMES) as store:
        async with one_stage(store) as (stage, one):
            await one_token(one, 5, trace_context.new_root()[:-1] + b"\x00")
            assert [record.context for record in (await batches(stage)).batches] == [b""]
        assert store.spans(names.SPAN_BATCHES, *names.BATCH_NAMES) == []


async def test_without_a_collector_the_ring_and_the_summaries_are_there_all_the_same() -> None:
    async with one_stage(None) as (stage, one):
        summary = await one_token(one, 5, trace_context.new_root())
        ring = await batches(stage)
    assert summary.n_prefill_steps == 1
    (record,) = ring.batches
    assert (record.step, record.n_rows, [member.session_id for member in record.members]) == (1, 2, [5])
    assert (ring.stage_index, ring.instance_id, ring.n_forgotten) == (1, "fake-1", 0)
    assert ring.now_ns > record.start_ns


async def test_level_frames_shows_every_frame_in_its_request_s_own_trace() -> None:
    request = trace_context.new_root()
    with storing(Level.FRAMES) as store:
        async with one_stage(store) as (_, one):
            await one.send(control(5, Flag.OPEN), traced(rows_frame(5, 0, 2, PREFILL | SAMPLE), request))
            assert (await one.reply()).samples
        (frame,) = store.frames()
        batch = store.batch()
        (of_stage,) = store.spans(names.SPAN_BATCHES)
    assert frame.parent is not None
    assert of_stage.parent is not None
    assert (frame.parent.trace_id, frame.parent.span_id) == ids_of(of_stage)
    assert (of_stage.parent.trace_id, of_stage.parent.span_id) == named(request)
    assert frame.name == batch.name == "prefill ×1"
    (waited,) = frame.events
    assert waited.name.startswith("waited ")
    given = dict(frame.attributes or {})
    assert (given[names.ATTR_FRAME_POSITION], given[names.ATTR_FRAME_ROWS], given[names.ATTR_BATCH_ID]) == (0, 2, "1:1")
    assert given[names.ATTR_STAGE_INDEX] == 1
    assert given[names.ATTR_FRAME_UPSTREAM_WAIT_NS] >= 0
    assert [context for context, _ in links(frame, names.LINK_BATCH)] == [ids_of(batch)]
    assert frame.start_time is not None
    assert batch.start_time is not None
    assert abs(waited.timestamp - frame.start_time - given[names.ATTR_FRAME_WAIT_NS]) < 1000
    assert frame.start_time == pytest.approx(batch.start_time, abs=1000)
    assert frame.end_time == pytest.approx(batch.end_time, abs=1000)


async def test_a_batch_names_the_adapter_that_its_requests_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relayline.stage.observe.observer.adapter_names", lambda adapters: ("sql", "style"))
    with storing(Level.BATCHES) as store:
        async with one_stage(store) as (_, one):
            for adapter in (0, 2):
                session_id = with_adapter(5, adapter)
                row = traced(rows_frame(session_id, 0, 1, PREFILL | SAMPLE), trace_context.new_root())
                await one.send(control(session_id, Flag.OPEN), row)
                await one.reply()
        spans = store.spans(*names.BATCH_NAMES)
    assert [dict(span.attributes or {}).get(names.ATTR_BATCH_ADAPTER) for span in spans] == [None, "style"]


async def test_a_batch_says_how_many_rows_are_under_a_grant() -> None:
    with storing(Level.BATCHES) as store:
        async with one_stage(store) as (_, one):
            await one.send(
                control(5, Flag.OPEN), traced(rows_frame(5, 0, 2, PREFILL | SAMPLE), trace_context.new_root())
            )
            assert not (await one.reply()).samples[0].grant
            row = traced(rows_frame(5, 2, 1, SAMPLE), trace_context.new_root())
            row.argument = grant_argument(9, 7)
            await one.send(row)
            assert (await one.reply()).samples[0].grant == 9
        spans = store.spans(*names.BATCH_NAMES)
    assert [dict(span.attributes or {}).get(names.ATTR_BATCH_GRANTED) for span in spans] == [None, 1]


async def test_a_failed_decode_is_an_error_on_its_span() -> None:
    with storing(Level.BATCHES) as store:
        async with one_stage(store) as (stage, one):
            stage.engine.fail_next = NativeError("out of memory")
            await one.send(
                control(5, Flag.OPEN), traced(rows_frame(5, 0, 2, PREFILL | SAMPLE), trace_context.new_root())
            )
            assert [fault.label for fault in (await one.reply()).faults] == ["native"]
        span = store.batch()
    assert span.status.status_code is StatusCode.ERROR
    assert dict(span.attributes or {})[names.ATTR_BATCH_ERROR] == "native"


async def test_the_level_changes_while_serving_and_a_new_epoch_leaves_it() -> None:
    with storing(Level.SUMMARY) as store:
        async with one_stage(store) as (stage, one):
            assert await level(stage, pb.SetTelemetryRequest()) is Level.SUMMARY
            await one_token(one, 5, trace_context.new_root())
            assert await level(stage, pb.SetTelemetryRequest(level=Level.FRAMES.to_wire())) is Level.FRAMES
            await one_token(one, 6, trace_context.new_root())
            await one.configure(epoch=EPOCH + 1)
            assert await level(stage, pb.SetTelemetryRequest()) is Level.FRAMES
            assert await level(stage, pb.SetTelemetryRequest(level=Level.OFF.to_wire())) is Level.OFF
            assert len((await batches(stage)).batches) == 2, "the ring's content stays for later reading"
        span = store.batch()
    assert dict(span.attributes or {})[names.ATTR_BATCH_ID] == "1:2"


async def test_batches_are_asked_for_by_session_and_number() -> None:
    async with one_stage(None) as (stage, one):
        for session_id in (5, 6, 7):
            await one_token(one, session_id, trace_context.NONE)
        assert [record.step for record in (await batches(stage, session_ids=[6, 7])).batches] == [2, 3]
        assert [record.step for record in (await batches(stage, limit=1)).batches] == [3]


def test_a_stage_that_joined_has_the_name_that_it_joined_by(tmp_path: Path) -> None:
    (path,) = write_pipeline(tmp_path, TinyShape(), [])
    constants = _constants(open_artifact(path), StageConfig(path, name="laptop"))
    assert constants[names.ATTR_STAGE_NAME] == "laptop"
