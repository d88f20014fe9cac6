"""The observer, driven by hand: the spans of a request and their content, and that nothing waits for ever."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client.parser import text_string_to_metric_families

from relayline.coordinator.observe.observer import SUMMARY_WAIT_S, Observer
from relayline.coordinator.observe.tracing import BAGGAGE_ENTRIES_MAX, CANCELLED_TEXT
from relayline.coordinator.sessions.frame import Frame
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.media_record import FileRecord, MediaRecord
from relayline.coordinator.sessions.request_log import (
    BAGGAGE_BYTES_MAX,
    NO_TRACE,
    PASSES_MAX,
    EventRecord,
    RequestRecord,
    SessionRecord,
    StreamRecord,
)
from relayline.wire.envelopes import trace_context
from relayline.wire.envelopes.frames import Flag
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.telemetry import names
from relayline.wire.telemetry.config import Level
from tests.support.spans import Kept, attributes_of

OFFSET_NS = 1_700_000_000_000_000_000
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
N_STAGES = 2


@dataclasses.dataclass(slots=True)
class Opened:
    """A session as telemetry sees it."""

    session_id: int
    request: GenerationRequest
    record: SessionRecord = dataclasses.field(default_factory=SessionRecord)


class World:
    """An observer with its own clock, and timers that a test fires."""

    def __init__(self, level: Level = Level.BATCHES, *, sampler_ratio: float = 1.0) -> None:
        self.kept = Kept(level=level)
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.observer = Observer(
            self.kept.telemetry,
            model_name="m",
            sampler_ratio=sampler_ratio,
            later=lambda delay_s, call: self.timers.append((delay_s, call)),
        )
        self.observer.connected(N_STAGES)
        self.n_sessions = 0

    def receive(self, name: str = "r", at_ns: int = 1_000, **headers: str) -> RequestRecord:
        record = RequestRecord(name, "POST", "/v1/completions", at_ns, OFFSET_NS, completion_id=f"cmpl-{name}")
        self.observer.received(record, headers)
        return record

    def open(
        self,
        record: RequestRecord,
        at_ns: int = 2_000,
        choice: int = 0,
        *,
        cache_prompt: bool = True,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  (frozen)
    ) -> Opened:
        name = f"{record.completion_id}-{choice}"
        request = GenerationRequest(name, (1, 2, 3), 8, sampling, cache_prompt=cache_prompt)
        self.n_sessions += 1
        session = Opened(self.n_sessions, request)
        self.observer.admitted(session.record, session.session_id, request, at_ns, record)
        return session

    def run(self, session: Opened, *, n_tokens: int = 3, start_ns: int = 3_000, reason: str = "length") -> None:
        """Start, prefill in two chunks, generate a token every 100 ns, and end."""
        record = session.record
        self.observer.started(record, start_ns)
        for position, rows in ((0, 2), (2, 1)):
            frame = Frame(session.session_id, position, (0,) * rows, Flag.PREFILL)
            self.observer.sent([Frame(session.session_id, 0, (), Flag.OPEN), frame], start_ns + position)
        self.observer.progressed(session.session_id, 2, start_ns + 50)
        for index in range(n_tokens):
            last = reason if index == n_tokens - 1 else None
            self.observer.token(record, 3 + index, last, start_ns + 100 * (index + 1))
        self.observer.ended(record, start_ns + 100 * n_tokens)

    def summary(self, session: Opened, stage: int, **more: int) -> None:
        self.observer.summarised([pb.SessionSummary(session_id=session.session_id, stage_index=stage, **more)])

    @property
    def waits(self) -> list[Callable[[], None]]:
        """Timers that wait for summaries."""
        return [call for delay_s, call in self.timers if delay_s == SUMMARY_WAIT_S]

    def figures(self) -> dict[tuple[str, ...], float]:
        return {
            (sample.name, *(value for label, value in sample.labels.items() if label != "model_name")): sample.value
            for family in text_string_to_metric_families(self.observer.metrics.render().decode())
            for sample in family.samples
        }


def times_of(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time - OFFSET_NS, span.end_time - OFFSET_NS


def test_an_embedding_is_no_generated_token() -> None:
    world = World()
    record = world.receive()
    session = world.open(record, sampling=SamplingParams(0.0, numbers=(("pooling", 1.0),)))
    world.run(session, n_tokens=1)
    world.observer.left(record.streams[0], 3_400)
    figures = world.figures()
    assert figures[f"{names.METRIC_GENERATION_TOKENS}_total",] == 0
    assert figures[f"{names.METRIC_TTFT}_count",] == figures[f"{names.METRIC_REQUEST_GENERATION}_count",] == 0
    assert figures[f"{names.METRIC_REQUEST_PROMPT}_count",] == 1
    counts = world.observer.figures()
    assert (counts["generated_tokens"], counts["prompt_tokens"]) == (0, 3)
    assert record.streams[0].n_tokens == 0
    world.observer.answered(record, 3_500)
    world.observer.close()
    spans = {span.name: span for span in world.kept.spans()}
    assert names.SPAN_DECODE not in spans
    recorded = attributes_of(spans[names.SPAN_PREFILL])
    assert recorded[names.ATTR_PROMPT_TOKENS] == 3
    of_tokens = {names.ATTR_GENERATED_TOKENS, names.ATTR_TTFT, names.ATTR_FINISH_REASON}
    assert of_tokens & set(recorded) == set()
    of_answers = {
        names.GEN_AI_USAGE_OUTPUT_TOKENS,
        names.GEN_AI_RESPONSE_FINISH_REASONS,
        names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK,
    }
    assert of_answers & set(attributes_of(spans["POST /v1/completions"])) == set()


def test_one_request_is_one_trace_with_its_phases() -> None:
    world = World()
    record = world.receive()
    record.n_prompt, record.tokenize_start_ns, record.tokenize_end_ns = 3, 1_100, 1_200
    record.grammar_start_ns, record.grammar_end_ns = 1_300, 1_900
    steps = {names.SPAN_FETCH: (1_205, 1_220), names.SPAN_ENCODE: (1_230, 1_250)}
    encoded = FileRecord("image", 9, 4, wait_ns=10, steps=steps)
    record.media = MediaRecord(1_200, 1_290, [FileRecord("image", 7, 3, is_kept=True), encoded])
    session = world.open(record)
    world.run(session)
    world.summary(session, 0)
    world.summary(session, 1)
    record.status, record.streams[0].n_thought, record.streams[0].n_cached = 200, 2, 1
    world.observer.left(record.streams[0], 3_400)
    world.observer.answered(record, 3_500)

    spans = {span.name: span for span in world.kept.spans() if span.name != names.SPAN_PREFILL_CHUNK}
    root = spans["POST /v1/completions"]
    assert root.kind is SpanKind.SERVER
    assert root.parent is None
    assert {span.context.trace_id for span in spans.values() if span.context} == {root.context.trace_id}
    assert record.trace_id == f"{root.context.trace_id:032x}"
    assert times_of(root) == (1_000, 3_500)
    assert times_of(spans[names.SPAN_TOKENIZE]) == (1_100, 1_200)
    assert times_of(spans[names.SPAN_GRAMMAR]) == (1_300, 1_900)
    media = spans[names.SPAN_MEDIA]
    assert times_of(media) == (1_200, 1_290)
    assert attributes_of(media) == {
        names.ATTR_MEDIA_FILES: 2,
        names.ATTR_MEDIA_ROWS: 7,
        names.ATTR_MEDIA_KEPT: 1,
        names.ATTR_MEDIA_WAIT: 10e-9,
    }
    for name, times in encoded.steps.items():
        assert times_of(spans[name]) == times
        assert spans[name].parent is not None
        assert spans[name].parent.span_id == media.context.span_id
        assert attributes_of(spans[name])[names.ATTR_MEDIA_FILE] == 1
    assert times_of(spans[names.SPAN_QUEUE]) == (2_000, 3_000)
    assert times_of(spans[names.SPAN_PREFILL]) == (3_000, 3_100)
    assert times_of(spans[names.SPAN_DECODE]) == (3_100, 3_300)
    for name in (names.SPAN_TOKENIZE, names.SPAN_GRAMMAR, names.SPAN_QUEUE, names.SPAN_PREFILL, names.SPAN_DECODE):
        assert spans[name].parent is not None
        assert spans[name].parent.span_id == root.context.span_id
    recorded = attributes_of(root)
    assert recorded[names.HTTP_REQUEST_METHOD] == "POST"
    assert recorded[names.HTTP_ROUTE] == "/v1/completions"
    assert recorded[names.HTTP_RESPONSE_STATUS_CODE] == 200
    assert recorded[names.GEN_AI_USAGE_INPUT_TOKENS] == 3
    assert recorded[names.GEN_AI_USAGE_OUTPUT_TOKENS] == 3
    assert recorded[names.GEN_AI_USAGE_REASONING_TOKENS] == 2
    assert recorded[names.GEN_AI_USAGE_CACHE_READ_TOKENS] == 1
    assert recorded[names.GEN_AI_RESPONSE_FINISH_REASONS] == ("length",)
    assert recorded[names.GEN_AI_RESPONSE_ID] == "cmpl-r"
    assert recorded[names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] == pytest.approx(2_100e-9)
    decode = attributes_of(spans[names.SPAN_DECODE])
    assert decode[names.ATTR_SESSION_ID] == f"{session.session_id:016x}"
    assert decode[names.ATTR_REQUEST_ID] == "cmpl-r"
    assert decode[names.ATTR_TTFT] == 1_900e-9, "from the first work on its images on"
    assert decode[names.ATTR_QUEUE] == 1_000e-9
    assert (decode[names.ATTR_ITL_MEAN], decode[names.ATTR_ITL_MAX]) == (100e-9, 100e-9)
    assert names.ERROR_TYPE not in recorded


def test_the_ring_keeps_no_ended_span_and_later_spans_still_find_their_parent() -> None:
    world = World()
    record = world.receive()
    session = world.open(record)
    record.span.set_attribute(names.GEN_AI_INPUT_MESSAGES, "a long prompt")  # type: ignore[union-attr]
    world.observer.left(record.streams[0], 3_400)
    world.observer.answered(record, 3_500)
    assert world.observer.log.last() is record
    assert not hasattr(record.span, "attributes"), "the span's content stays in memory with the record"
    world.run(session)
    world.observer.close()
    (root,) = [span for span in world.kept.spans() if span.name == "POST /v1/completions"]
    assert attributes_of(root)[names.GEN_AI_INPUT_MESSAGES] == "a long prompt"
    (decode,) = [span for span in world.kept.spans() if span.name == names.SPAN_DECODE]
    assert decode.parent is not None
    assert root.context is not None
    assert decode.parent.span_id == root.context.span_id


def test_chunks_are_spans_below_prefill_from_level_batches_on() -> None:
    for level, n_chunks in ((Level.SUMMARY, 0), (Level.BATCHES, 2)):
        world = World(level)
        session = world.open(world.receive())
        world.run(session)
        world.observer.close()
        chunks = world.kept.spans(names.SPAN_PREFILL_CHUNK)
        assert len(chunks) == n_chunks
        if chunks:
            prefill = world.kept.one(names.SPAN_PREFILL)
            assert {chunk.parent.span_id for chunk in chunks if chunk.parent} == {prefill.context.span_id}
            assert [times_of(chunk) for chunk in chunks] == [(3_000, 3_050), (3_002, 3_100)]


def test_the_queue_span_says_that_the_request_waited_for_a_wake() -> None:
    world = World()
    record = world.receive()
    started, never = world.open(record), world.open(record, choice=1)
    world.observer.woke(4.5, 2_900)
    world.run(started)
    world.observer.ended(never.record, 3_400)
    world.observer.answered(record, 3_500)
    world.observer.close()
    spans = world.kept.spans()
    queues = [span for span in spans if span.name == names.SPAN_QUEUE]
    assert len(queues) == 2
    for span in queues:
        (event,) = span.events
        assert (event.name, event.timestamp - OFFSET_NS) == (names.EVENT_WOKEN, 2_900)
        assert dict(event.attributes or {}) == {"detail": "the stages loaded in 4.5 s"}
    assert not any(span.events for span in spans if span.name == names.SPAN_PREFILL), "it had not begun"


def test_the_queue_span_says_that_the_request_waited_for_a_lost_stage() -> None:
    world = World()
    record = world.receive()
    before = world.open(record, 1_500)
    world.observer.lost("stage 1 is gone", 1_700, 1)
    after = world.open(record, 2_000, 1)
    world.observer.connected(N_STAGES)
    later = world.open(record, 2_500, 2)
    for session in (before, after, later):
        world.run(session)
    world.observer.answered(record, 3_500)
    world.observer.close()
    queues = sorted((span for span in world.kept.spans() if span.name == names.SPAN_QUEUE), key=times_of)
    assert [[(event.name, event.timestamp - OFFSET_NS) for event in span.events] for span in queues] == [
        [(names.EVENT_HELD, 1_700)],
        [(names.EVENT_HELD, 2_000)],
        [],
    ]
    assert dict(queues[0].events[0].attributes or {}) == {"detail": "stage 1 is gone"}
    assert names.SPAN_RECOVERY not in {span.name for span in world.kept.spans()}, "it did not run"


def test_losses_and_what_is_read_again_stand_in_their_phase() -> None:
    world = World()
    session = world.open(world.receive())
    world.observer.started(session.record, 3_000)
    prompt, events = session.record.prompt, session.record.events
    prompt.sent(0, 2, 3_010)
    events.append(EventRecord(names.EVENT_PAUSED, 3_020, "stage 1: gone", 1))
    events.append(EventRecord(names.EVENT_RESUMED, 3_040))
    prompt.sent(0, 3, 3_050)
    world.observer.token(session.record, 3, None, 3_100)
    events.append(EventRecord(names.EVENT_PAUSED, 3_150, "stage 1: gone", 1))
    events.append(EventRecord(names.EVENT_RESUMED, 3_160))
    prompt.sent(0, 4, 3_170)
    prompt.answered(4, 3_180)
    session.record.finish_reason = "length"
    world.observer.ended(session.record, 3_300)
    world.observer.close()
    prefill, decode = world.kept.one(names.SPAN_PREFILL), world.kept.one(names.SPAN_DECODE)
    found = {times_of(chunk): chunk.parent for chunk in world.kept.spans(names.SPAN_PREFILL_CHUNK)}
    assert [parent.span_id for parent in found.values() if parent] == [
        prefill.context.span_id, prefill.context.span_id, decode.context.span_id,
    ]  # fmt: skip
    assert list(found) == [(3_010, 3_020), (3_050, 3_100), (3_170, 3_180)]
    recoveries = {times_of(span): span.parent for span in world.kept.spans(names.SPAN_RECOVERY)}
    assert [parent.span_id for parent in recoveries.values() if parent] == [
        prefill.context.span_id, decode.context.span_id,
    ]  # fmt: skip
    assert list(recoveries) == [(3_020, 3_040), (3_150, 3_160)]
    assert [event.name for event in prefill.events] == [names.EVENT_PAUSED, names.EVENT_RESUMED]
    assert [event.name for event in decode.events] == [names.EVENT_PAUSED, names.EVENT_RESUMED]


def test_the_callers_trace_is_continued() -> None:
    world = World()
    record = world.receive(traceparent=PARENT, tracestate="vendor=1")
    assert record.trace_id == PARENT.split("-")[1]
    session = world.open(record)
    world.run(session)
    world.observer.close()
    world.observer.answered(record, 9_000)
    root = world.kept.one("POST /v1/completions")
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == PARENT.split("-")[2]
    decode = world.kept.one(names.SPAN_DECODE)
    assert decode.context.trace_state.get("vendor") == "1"


@pytest.mark.parametrize("header", ["junk", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_bad_traceparent_begins_a_new_trace(header: str) -> None:
    world = World()
    record = world.receive(traceparent=header)
    assert record.trace_id
    world.observer.answered(record, 2_000)
    assert world.kept.one("POST /v1/completions").parent is None


def test_drafts_and_how_many_of_them_were_right() -> None:
    world = World()
    record = world.receive()
    session = world.open(record)
    world.observer.started(session.record, 3_000)
    for position in (3, 4, 5):
        world.observer.token(session.record, position, None, 3_100, is_drafted=position > 3)
    row = Frame(session.session_id, 5, (9, 10, 11), Flag.WANTS_SAMPLE | Flag.DRAFTED, n_drafted=2)
    following = Frame(session.session_id, 8, (12,), Flag.WANTS_SAMPLE | Flag.DRAFTED, n_drafted=1)
    world.observer.sent([Frame(session.session_id, 4, (8,), Flag.WANTS_SAMPLE), row], 3_200)
    world.observer.sent([following], 3_200)
    assert (session.record.guesses.n_sent, session.record.guesses.n_accepted) == (3, 2)
    counts = world.observer.figures()
    assert (counts["generated_tokens"], counts["drafted_tokens"], counts["accepted_tokens"]) == (3, 3, 2)
    assert counts["prompt_tokens"] == 3, "tokens that come together are not each the first"
    figures = world.figures()
    for stem, value in (("drafts", 2), ("draft_tokens", 3), ("accepted_tokens", 2)):
        assert figures[f"relayline_spec_decode_num_{stem}_total",] == value
    assert figures["relayline_inter_token_latency_seconds_count",] == 2
    world.observer.ended(session.record, 3_300)
    world.observer.close()
    found = attributes_of(world.kept.one(names.SPAN_DECODE))
    assert (found[names.ATTR_DRAFTED], found[names.ATTR_ACCEPTED]) == (3, 2)


def test_frames_carry_the_context_of_the_phase_they_belong_to() -> None:
    world = World()
    session = world.open(world.receive())
    assert session.record.trace.context == NO_TRACE
    world.observer.started(session.record, 3_000)
    in_prefill = session.record.trace.context
    world.observer.token(session.record, 3, None, 3_100)
    in_decode = session.record.trace.context
    world.observer.token(session.record, 4, "stop", 3_200)
    assert session.record.trace.context is in_decode  # the same bytes for every token
    world.observer.ended(session.record, 3_200)
    world.observer.close()
    for context, name in ((in_prefill, names.SPAN_PREFILL), (in_decode, names.SPAN_DECODE)):
        assert trace_context.is_sampled(context)
        named = trace_context.unpack(context)
        assert named is not None
        assert named.span_id == world.kept.one(name).context.span_id


@pytest.mark.parametrize(
    ("level", "ratio", "headers"),
    [
        (Level.OFF, 1.0, {}),
        (Level.SUMMARY, 0.0, {}),
        (Level.FRAMES, 1.0, {"traceparent": PARENT[:-2] + "00"}),  # the caller decided against it
    ],
    ids=["off", "not sampled", "caller says no"],
)
def test_an_untraced_request_makes_no_span_and_carries_zeros(
    level: Level, ratio: float, headers: dict[str, str]
) -> None:
    world = World(level, sampler_ratio=ratio)
    record = world.receive(**headers)
    session = world.open(record)
    world.run(session)
    assert session.record.trace.context == NO_TRACE
    world.observer.left(record.streams[0], 9_000)
    world.observer.answered(record, 9_000)
    world.observer.close()
    # Seconds of passes are sampled independently, whatever a caller decided for a request.
    assert [span for span in world.kept.spans() if span.name not in names.PASSES_NAMES] == []
    assert record.trace_id == ""
    assert len(world.observer.log) == (0 if level is Level.OFF else 1)
    assert world.figures()["relayline_generation_tokens_total",] == 3  # figures do not depend on the level


def test_a_sampled_caller_wins_over_the_ratio() -> None:
    world = World(sampler_ratio=0.0)
    assert world.receive(traceparent=PARENT).trace_id


def test_the_decode_span_sums_up_the_stages_reports() -> None:
    world = World()
    session = world.open(world.receive())
    world.run(session)
    assert len(world.waits) == 1
    more = {"n_decode_steps": 4, "batch_rows_sum": 10, "batch_rows_max": 5, "decode_wait_ns": 70, "wait_max_ns": 40}
    world.summary(session, 1, n_prefill_steps=2, prefill_wait_ns=9, decode_ns=500, **more)
    assert world.kept.spans(names.SPAN_DECODE) == []  # one stage has yet to say
    world.summary(session, 0)
    decode = world.kept.one(names.SPAN_DECODE)
    assert times_of(decode) == (3_100, 3_300)  # the wait for summaries is not part of it
    recorded = attributes_of(decode)
    assert recorded[names.ATTR_STAGE_STEPS] == (0, 6)
    assert recorded[names.ATTR_STAGE_BATCH_ROWS_MEAN] == (0.0, 2.5)
    assert recorded[names.ATTR_STAGE_BATCH_ROWS_MAX] == (0, 5)
    assert recorded[names.ATTR_STAGE_WAIT_SUM] == (0, 79e-9)
    assert recorded[names.ATTR_STAGE_DECODE_WAIT] == (0, 70e-9)
    assert recorded[names.ATTR_STAGE_WAIT_MAX] == (0, 40e-9)
    assert recorded[names.ATTR_STAGES_REPORTED] == (0, 1)
    assert names.ATTR_TIME_COMPUTE not in recorded, "a stage without decode steps does not cover the phase"
    world.waits[0]()  # too late to matter
    assert len(world.kept.spans(names.SPAN_DECODE)) == 1


@pytest.mark.parametrize("skews_ns", [(0, 0), (5 * 10**9, -3 * 10**9)])
def test_the_decode_span_says_where_its_time_went(skews_ns: tuple[int, int]) -> None:
    world = World()
    world.observer.connected(2, offsets_ns=lambda: [-skew_ns for skew_ns in skews_ns])
    session = world.open(world.receive())
    world.observer.back_ns = 9 - skews_ns[1]
    world.run(session)
    one = {"n_decode_steps": 2, "n_hops": 2, "decode_wait_ns": 10, "decode_ns": 80, "prefill_decode_ns": 30}
    world.summary(session, 0, handle_ns=6, hop_ns=14 + 2 * skews_ns[0], **one)
    world.summary(session, 1, handle_ns=8, hop_ns=16 + 2 * (skews_ns[1] - skews_ns[0]), **one)
    recorded = attributes_of(world.kept.one(names.SPAN_DECODE))
    times = (names.ATTR_TIME_QUEUE, names.ATTR_TIME_COMPUTE, names.ATTR_TIME_HANDLE, names.ATTR_TIME_HOPS)
    assert [recorded[name] for name in times] == [20e-9, 100e-9, 14e-9, 30e-9]
    assert recorded[names.ATTR_STAGE_HOP] == (14e-9, 16e-9)
    assert recorded[names.ATTR_STAGE_HANDLE] == (6e-9, 8e-9)
    assert (recorded[names.ATTR_TIME_BACK], recorded[names.ATTR_TIME_COORDINATOR]) == (18e-9, pytest.approx(18e-9))
    whole = [*times, names.ATTR_TIME_BACK, names.ATTR_TIME_COORDINATOR]
    assert sum(recorded[name] for name in whole) == pytest.approx(200e-9)  # type: ignore[misc]


def test_sums_that_do_not_cover_the_decode_phase_are_not_shown() -> None:
    cases: list[tuple[list[int | None], str]] = [([None, 0], ""), ([0, 0], names.EVENT_RESUMED)]
    for offsets_ns, event in cases:
        world = World()
        world.observer.connected(2, offsets_ns=functools.partial(list, offsets_ns))
        session = world.open(world.receive())
        if event:
            session.record.event(event, 3_150)
        world.run(session)
        world.summary(session, 0, n_decode_steps=2)
        world.summary(session, 1, n_decode_steps=2)
        assert names.ATTR_TIME_COMPUTE not in attributes_of(world.kept.one(names.SPAN_DECODE))


def test_a_phase_links_to_the_latest_seconds_of_passes_that_it_was_in() -> None:
    world = World()
    session = world.open(world.receive())
    roots = [trace_context.new_root() for _ in range(PASSES_MAX + 5)]
    world.observer.started(session.record, 3_000)
    session.record.trace.passes.add(roots[0])
    world.observer.token(session.record, 3, None, 3_100)
    for root in roots:
        session.record.trace.passes.add(root)
        session.record.trace.passes.add(root)  # a second of passes has many of them
    world.observer.token(session.record, 4, "length", 3_200)
    world.observer.ended(session.record, 3_200)
    world.observer.close()
    prefill, decode = world.kept.one(names.SPAN_PREFILL), world.kept.one(names.SPAN_DECODE)
    linked = [[trace_context.pack(link.context) for link in span.links] for span in (prefill, decode)]
    assert linked == [roots[:1], roots[5:]]
    assert {dict(link.attributes or {})[names.ATTR_LINK] for link in decode.links} == {names.LINK_PASSES}
    assert attributes_of(decode)[names.ATTR_LINKS_DROPPED] == 5
    assert not [key for key in attributes_of(decode) if key.startswith("gen_ai.")]


def test_the_prefill_of_an_embedding_links_to_its_seconds_of_passes() -> None:
    world = World()
    session = world.open(world.receive(), sampling=SamplingParams(0.0, numbers=(("pooling", 1.0),)))
    root = trace_context.new_root()
    world.observer.started(session.record, 3_000)
    session.record.trace.passes.add(root)
    world.observer.token(session.record, 3, "length", 3_100)
    world.observer.ended(session.record, 3_100)
    world.observer.close()
    links = world.kept.one(names.SPAN_PREFILL).links
    assert [trace_context.pack(link.context) for link in links] == [root]


def test_a_silent_stage_delays_the_span_once_and_not_its_end() -> None:
    world = World()
    session = world.open(world.receive())
    world.run(session)
    world.summary(session, 0)
    world.waits[0]()
    decode = world.kept.one(names.SPAN_DECODE)
    assert times_of(decode) == (3_100, 3_300)
    assert attributes_of(decode)[names.ATTR_STAGES_REPORTED] == (0,)
    world.summary(session, 1)  # afterwards: no client is there any more
    assert len(world.kept.spans(names.SPAN_DECODE)) == 1


def test_a_cancelled_session_says_so() -> None:
    world = World()
    record = world.receive()
    session = world.open(record)
    world.observer.started(session.record, 3_000)
    world.observer.ended(session.record, 3_500)
    world.observer.left(record.streams[0], 3_500)
    world.observer.close()
    prefill = world.kept.one(names.SPAN_PREFILL)
    assert times_of(prefill) == (3_000, 3_500)
    assert prefill.status.status_code is StatusCode.ERROR
    assert attributes_of(prefill)[names.ERROR_TYPE] == "cancelled"
    assert prefill.status.description == CANCELLED_TEXT
    assert [event.name for event in prefill.events] == ["cancelled"]
    assert world.figures()["relayline_request_success_total", "abort"] == 1


def test_a_failed_session_names_its_error_and_the_request_too() -> None:
    world = World()
    record = world.receive()
    session = world.open(record)
    world.observer.started(session.record, 3_000)
    world.observer.token(session.record, 3, None, 3_100)
    session.record.error, session.record.error_text = "stage_lost", "stage 1 is gone"
    world.observer.ended(session.record, 3_200)
    world.observer.left(record.streams[0], 3_200)
    world.observer.close()
    record.status, record.error, record.error_text = 503, "stage_lost", "stage 1 is gone"
    world.observer.answered(record, 3_300)
    for name in (names.SPAN_DECODE, "POST /v1/completions"):
        span = world.kept.one(name)
        assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "stage 1 is gone")
        assert attributes_of(span)[names.ERROR_TYPE] == "stage_lost"
        (event,) = span.events
        assert (event.name, dict(event.attributes or {})) == ("failed", {names.EVENT_ATTR_CAUSE: "stage 1 is gone"})
    assert world.figures()["relayline_request_success_total", "error"] == 1


def test_a_request_that_never_had_a_lane_has_waited() -> None:
    world = World()
    session = world.open(world.receive())
    world.observer.ended(session.record, 7_000)
    assert times_of(world.kept.one(names.SPAN_QUEUE)) == (2_000, 7_000)
    assert world.waits == []  # no stage knows it
    assert world.figures()["relayline_request_queue_time_seconds_sum",] == pytest.approx(5_000e-9)


def test_a_clients_mistake_is_no_error_of_the_server() -> None:
    world = World()
    record = world.receive()
    record.status, record.error, record.error_text = 400, "invalid_request", "max_tokens: 0 is too few"
    world.observer.answered(record, 2_000)
    root = world.kept.one("POST /v1/completions")
    assert root.status.status_code is StatusCode.UNSET
    assert attributes_of(root)[names.ERROR_TYPE] == "invalid_request"
    (event,) = root.events
    assert (event.name, dict(event.attributes or {})) == (
        "refused", {names.EVENT_ATTR_CAUSE: "max_tokens: 0 is too few"},
    )  # fmt: skip


def test_losses_and_replays_are_events_of_the_running_phase() -> None:
    world = World()
    session = world.open(world.receive())
    world.observer.started(session.record, 3_000)
    world.observer.token(session.record, 3, None, 3_100)
    world.observer.lost("stage 1 is gone", 3_150, 1)
    world.observer.connected(N_STAGES)  # with fewer lanes, say: the session waits for one
    world.observer.lost("stage 2 is gone", 3_200)
    world.observer.connected(N_STAGES)
    world.observer.started(session.record, 3_400)  # starts again: not a second start
    world.observer.replayed(session.record, "checksum", 3_450)
    world.observer.started(session.record, 3_450)
    world.observer.token(session.record, 4, "length", 3_500)
    world.observer.ended(session.record, 3_500)
    world.observer.close()
    decode = world.kept.one(names.SPAN_DECODE)
    assert [(event.name, event.timestamp - OFFSET_NS) for event in decode.events] == [
        ("paused", 3_150), ("resumed", 3_400), ("replayed", 3_450),
    ]  # fmt: skip
    assert attributes_of(decode)[names.ATTR_RECOVERIES] == 1
    pause = world.kept.one(names.SPAN_RECOVERY)
    assert times_of(pause) == (3_150, 3_400)
    assert pause.parent is not None
    assert (pause.parent.span_id, attributes_of(pause)[names.ATTR_LOST_STAGE]) == (decode.context.span_id, 1)
    assert attributes_of(pause)[names.ATTR_LOST_CAUSE] == "stage 1 is gone"
    assert session.record.started_ns == 3_000
    assert world.figures()["relayline_recoveries_total",] == 2
    assert world.figures()["relayline_request_replays_total",] == 1


def test_nobody_waits_for_summaries_of_a_lost_connection() -> None:
    world = World()
    session = world.open(world.receive())
    world.run(session)
    world.observer.lost("gone", 4_000)
    assert world.kept.one(names.SPAN_DECODE)


def test_requests_that_share_a_session_each_have_their_trace() -> None:
    world = World()
    first, second = world.receive("a"), world.receive("b", at_ns=2_500)
    session = world.open(first)
    request = dataclasses.replace(session.request, request_id="cmpl-b-0")
    joined = world.observer.joined(session.record, request, 2_600, second)
    world.run(session)
    world.summary(session, 0)
    world.summary(session, 1)
    joined.n_tokens = 3
    for stream in (first.streams[0], joined):
        world.observer.left(stream, 3_400)
    world.observer.answered(first, 3_500)
    world.observer.answered(second, 3_500)
    assert first.trace_id != second.trace_id
    own, shared = sorted(world.kept.spans(names.SPAN_DECODE), key=lambda span: span.start_time or 0, reverse=True)
    assert f"{shared.context.trace_id:032x}" == second.trace_id
    assert attributes_of(shared)[names.ATTR_SHARED_WITH] == "cmpl-a-0"
    assert times_of(shared) == (2_600, 3_400)
    (link,) = shared.links
    assert link.context.span_id == own.context.span_id
    assert dict(link.attributes or {})[names.ATTR_LINK] == names.LINK_SESSION
    figures = world.figures()
    assert figures["relayline_generation_tokens_total",] == 3  # computed once
    assert figures["relayline_request_success_total", "length"] == 2


def test_each_choice_has_its_own_spans() -> None:
    world = World()
    record = world.receive()
    sessions = [world.open(record, choice=choice) for choice in range(3)]
    for session in sessions:
        world.run(session)
    world.observer.close()
    decodes = world.kept.spans(names.SPAN_DECODE)
    assert sorted(attributes_of(span)[names.ATTR_CHOICE] for span in decodes) == [0, 1, 2]
    assert {attributes_of(span)[names.ATTR_REQUEST_ID] for span in decodes} == {"cmpl-r"}


@pytest.mark.parametrize("cache_prompt", [True, False])
def test_an_answer_that_calls_a_tool_has_stopped(cache_prompt: bool) -> None:
    world = World(Level.OFF)
    record = world.receive()
    session = world.open(record, cache_prompt=cache_prompt)
    world.run(session)
    (stream,) = record.streams
    stream.finish_reason = "tool_calls"  # which only the HTTP side sees
    world.observer.left(stream, 4_000)
    figures = world.figures()
    assert figures["relayline_request_success_total", "stop"] == 1
    assert figures["relayline_request_success_total", "error"] == 0
    assert figures["relayline_e2e_request_latency_seconds_count",] == 1
    assert figures["relayline_prefix_cache_queries_total",] == (3 if cache_prompt else 0)


def test_histograms_observe_each_request_once() -> None:
    world = World(Level.OFF)
    record = world.receive()
    session = world.open(record)
    world.run(session, n_tokens=5)
    stream = record.streams[0]
    assert isinstance(stream, StreamRecord)
    world.observer.left(stream, 4_000)
    figures = world.figures()
    for stem in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time",
                 "request_decode_time"):  # fmt: skip
        assert figures[f"relayline_{stem}_seconds_count",] == 1, stem
    assert figures["relayline_inter_token_latency_seconds_count",] == 4
    assert figures["relayline_inter_token_latency_seconds_sum",] == pytest.approx(400e-9)
    assert figures["relayline_time_to_first_token_seconds_sum",] == pytest.approx(1_100e-9)
    assert figures["relayline_prompt_tokens_total",] == 3
    assert figures["relayline_request_generation_tokens_sum",] == 5
    assert figures["relayline_request_success_total", "length"] == 1
    assert world.timers == []  # at level off no stage sends a summary


def test_baggage_is_passed_on_and_malformed_entries_are_left_out() -> None:
    world = World()
    header = "tenant=blue%20team,bad key=1,odd=\udcff%ff," + ",".join(f"k{n}={'v' * 50}" for n in range(100))
    record = world.receive(baggage=header)
    session = world.open(record)
    world.observer.answered(record, 2_000)
    recorded = attributes_of(world.kept.one("POST /v1/completions"))
    found = {key: value for key, value in recorded.items() if key.startswith(names.BAGGAGE)}
    assert found["baggage.tenant"] == "blue team"
    assert "baggage.bad key" not in found
    assert len(found) == BAGGAGE_ENTRIES_MAX
    assert session.record.trace.baggage.startswith("tenant=blue%20team,")
    assert session.record.trace.baggage.isascii()
    assert len(session.record.trace.baggage) <= BAGGAGE_BYTES_MAX
