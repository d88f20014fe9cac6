"""Spans of requests, made from their records: one trace per HTTP request.

    POST /v1/completions       SERVER, continues the caller's trace; the only one with gen_ai.*
      tokenize
      media                    of a chat with images or audio; below it what each file took: fetch, count rows, encode
      grammar                  of an answer with a shape or tools
      queue                    per choice, from admission to a lane
      prefill                  per choice, to the first token; links to the seconds of passes that it was in
        prefill chunk          levels batches and frames
        batches                levels batches and frames: one of each stage, which makes it
        (stage.observe.request_spans)
        recovery               from the loss of a stage until the session goes on
      decode                   per choice, to the last token; links as prefill does
        prefill chunk          read again after a loss
        batches
        recovery

The spans of prefill and decode are started early, because frames carry their context. Their attributes are added at the
end, after the stages' summaries. A request that shares another's session has one decode span, which links to the
session's own.
"""

from __future__ import annotations

import random
import re
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from opentelemetry import baggage, propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode

from relayline.coordinator.observe.time_sums import decode_sums
from relayline.coordinator.sessions.media_record import MediaRecord
from relayline.coordinator.sessions.request_log import (
    BAGGAGE_BYTES_MAX,
    EventRecord,
    RequestRecord,
    SessionRecord,
    StageRecord,
    StreamRecord,
)
from relayline.wire.envelopes import trace_context
from relayline.wire.telemetry import names
from relayline.wire.telemetry.telemetry import Level, Telemetry, context_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span
    from opentelemetry.util.types import AttributeValue

SERVER_ERROR = 500
BAGGAGE_ENTRIES_MAX = 16
_BAGGAGE_KEY = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # a token, as W3C has it
S = 1e9  # nanoseconds in a second
OffsetsOf = Callable[[], Sequence[int | None]]
CANCELLED = "cancelled"  # error.type of a session that nobody waits for any more
CANCELLED_TEXT = "the client closed the connection, or cancelled the request"
CLIENT_GONE = "client_gone"  # error.type of a request whose client closed the connection


class Tracing:
    """Makes and ends the spans of one coordinator. Event loop only."""

    def __init__(self, telemetry: Telemetry, sampler_ratio: float = 1.0) -> None:
        self.telemetry = telemetry
        self.sampler_ratio = sampler_ratio  # of requests whose caller has not decided; may be changed at any time

    # --- the HTTP request ---------------------------------------------------------------------------------------------

    def received(self, record: RequestRecord, carrier: Mapping[str, str]) -> None:
        """Start the server span if the request is traced, below the caller's span if its headers name one."""
        if not self.telemetry.records(Level.SUMMARY):
            return
        # A header may hold bytes that are no UTF-8; propagators raise for Python's decoding of them.
        readable = {name: value.encode("utf-8", "replace").decode() for name, value in carrier.items()}
        context = propagate.extract(readable, Context())
        parent, entries = trace.get_current_span(context).get_span_context(), _baggage_of(context)
        if not parent.is_valid and random.random() >= self.sampler_ratio:
            return
        span = self.telemetry.start_span(
            f"{record.method} {record.route}",
            start_ns=record.received_ns + record.unix_offset_ns,
            parent=parent if parent.is_valid else None,
            kind=SpanKind.SERVER,
            attributes={
                names.HTTP_REQUEST_METHOD: record.method,
                names.HTTP_ROUTE: record.route,
                names.URL_PATH: record.route,
                names.HTTP_RESPONSE_ID: record.request_id,
                **{f"{names.BAGGAGE}{key}": value for key, value in entries.items()},
            },
        )
        if carrier.get("x-request-id") == record.request_id:
            span.set_attribute(names.HTTP_REQUEST_ID, record.request_id)
        if span.is_recording():
            record.baggage = _header_of(entries)
            record.span = span
            record.trace_id = trace.format_trace_id(span.get_span_context().trace_id)

    def describe(self, record: RequestRecord, attributes: Mapping[str, AttributeValue]) -> None:
        """Add the attributes that come from the body."""
        if record.span is not None:
            record.span.set_attributes(dict(attributes))

    def answered(self, record: RequestRecord) -> None:
        """End the server span."""
        span = record.span
        if span is None:
            return
        if record.tokenize_end_ns:
            self._child(record, names.SPAN_TOKENIZE, record.tokenize_start_ns, record.tokenize_end_ns)
        if record.media is not None:
            self._media(record, record.media)
        if record.grammar_end_ns:
            self._child(record, names.SPAN_GRAMMAR, record.grammar_start_ns, record.grammar_end_ns)
        outcomes = [stream.outcome() for stream in record.streams]
        first_ns = [stream.session.first_token_ns for stream in record.streams if stream.session.first_token_ns]
        attributes: dict[str, AttributeValue] = {names.GEN_AI_USAGE_INPUT_TOKENS: record.n_prompt}
        is_embedding = any(stream.session.is_embedding for stream in record.streams)
        if not is_embedding:
            attributes[names.GEN_AI_USAGE_OUTPUT_TOKENS] = sum(stream.n_tokens for stream in record.streams)
            attributes[names.GEN_AI_RESPONSE_FINISH_REASONS] = [reason or "abort" for reason, _ in outcomes]
        if n_cached := sum(stream.n_cached for stream in record.streams):
            attributes[names.GEN_AI_USAGE_CACHE_READ_TOKENS] = n_cached
        if n_thought := sum(stream.n_thought for stream in record.streams):
            attributes[names.GEN_AI_USAGE_REASONING_TOKENS] = n_thought
        if record.status:
            attributes[names.HTTP_RESPONSE_STATUS_CODE] = record.status
        if record.completion_id:
            attributes[names.GEN_AI_RESPONSE_ID] = attributes[names.ATTR_REQUEST_ID] = record.completion_id
        if first_ns and not is_embedding:
            first_chunk_ns = max(0, min(first_ns) - record.received_ns)
            attributes[names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] = first_chunk_ns / 1e9
        span.set_attributes(attributes)
        if record.error:
            self._say_error(record, span)
        span.end(record.ended_ns + record.unix_offset_ns)
        # The ring keeps the record; later spans need no more of this one than its context.
        record.span = trace.NonRecordingSpan(span.get_span_context())

    def _media(self, record: RequestRecord, media: MediaRecord) -> None:
        """Make the spans of images and audio. What was under way when the request ended has none of its own."""
        sums: dict[str, AttributeValue] = {
            names.ATTR_MEDIA_FILES: len(media.files),
            names.ATTR_MEDIA_ROWS: sum(file.n_rows for file in media.files),
            names.ATTR_MEDIA_KEPT: sum(file.is_kept for file in media.files),
            names.ATTR_MEDIA_WAIT: media.wait_ns / S,
        }
        span = self._child(record, names.SPAN_MEDIA, media.start_ns, media.end_ns or record.ended_ns, sums)
        for number, file in enumerate(media.files):
            facts: dict[str, AttributeValue] = {
                names.ATTR_MEDIA_FILE: number,
                names.ATTR_MEDIA_KIND: file.kind,
                names.ATTR_MEDIA_BYTES: file.n_bytes,
                names.ATTR_MEDIA_ROWS: file.n_rows,
            }
            for name, (start_ns, end_ns) in file.steps.items():
                self._child(record, name, start_ns, end_ns, facts, span.get_span_context())

    @staticmethod
    def _say_error(record: RequestRecord, span: Span) -> None:
        cause = record.error_text or record.error
        span.set_attribute(names.ERROR_TYPE, record.error)
        is_refusal = 400 <= record.status < SERVER_ERROR
        if record.error == CLIENT_GONE:
            what, cause = "cancelled", "the client closed the connection"
        else:
            what = "refused" if is_refusal or not record.streams else "failed"
        span.add_event(what, {names.EVENT_ATTR_CAUSE: cause}, timestamp=record.ended_ns + record.unix_offset_ns)
        if not is_refusal:  # that is the caller's error, as the conventions have it, not the server's
            span.set_status(Status(StatusCode.ERROR, cause))

    # --- sessions -----------------------------------------------------------------------------------------------------

    def started(self, session: SessionRecord) -> None:
        """A session has its lane: the span of its wait ends, the span of its prefill begins."""
        record = _request_of(session)
        if record is None or record.span is None or session.trace.prefill_span is not None:
            return
        common = _identity(record, session)
        self._queue(record, session, session.started_ns, common)
        session.trace.prefill_span = self._child(record, names.SPAN_PREFILL, session.started_ns, 0, common)
        session.trace.context = context_of(session.trace.prefill_span)

    def first_token(self, session: SessionRecord) -> None:
        """The span of the decode phase begins; frames carry its context from here on."""
        record = _request_of(session)
        if record is None or session.trace.prefill_span is None or session.is_embedding:
            return
        identity = _identity(record, session)
        session.trace.decode_span = self._child(record, names.SPAN_DECODE, session.first_token_ns, 0, identity)
        session.trace.context = context_of(session.trace.decode_span)

    def final(self, session: SessionRecord, n_stages: int, offsets_ns: OffsetsOf = tuple) -> None:
        """Add the final attributes, and end the session's spans at their true times.

        offsets_ns: returns what to add to each stage's clock to get this process's (None: not known).
        """
        record = _request_of(session)
        if record is None or record.span is None:
            return
        if session.trace.prefill_span is None:  # never had a lane
            self._queue(record, session, session.ended_ns, _identity(record, session))
            return
        for event in session.events:
            if event.at_ns > session.started_ns:  # `queue` has the earlier ones
                _add_event(_phase_of(session, event.at_ns), event, record)
        self._end_prefill(record, session, session.trace.prefill_span)
        last = session.trace.decode_span or session.trace.prefill_span
        last.set_attributes(_session_attributes(session) | _stage_attributes(session.stages, n_stages))
        if session.trace.decode_span is not None:
            last.set_attributes(_time_attributes(session, offsets_ns()))
        _link_passes(last, session.trace.passes.roots)
        if session.trace.passes.n_dropped:
            last.set_attribute(names.ATTR_LINKS_DROPPED, session.trace.passes.n_dropped)
        self._recoveries(record, session)
        _say_failure(last, session, record)
        last.end(session.ended_ns + record.unix_offset_ns)
        session.trace.prefill_span = session.trace.decode_span = None

    def _queue(
        self, record: RequestRecord, session: SessionRecord, end_ns: int, identity: Mapping[str, AttributeValue]
    ) -> None:
        """Make the span of the wait for a lane, with what the session waited for besides, such as a wake."""
        span = self._child(record, names.SPAN_QUEUE, session.admitted_ns, 0, identity)
        for event in session.events:
            _add_event(span, event, record)
        span.end(end_ns + record.unix_offset_ns)

    def _end_prefill(self, record: RequestRecord, session: SessionRecord, span: Span) -> None:
        end_ns = session.first_token_ns or session.ended_ns
        span.set_attributes(
            {
                names.ATTR_PROMPT_TOKENS: session.n_prompt,
                names.ATTR_CHUNKS: len(session.prompt.chunks) + session.prompt.n_dropped,
            }
        )
        if self.telemetry.records(Level.BATCHES):
            self._chunks(record, session)
        _link_passes(span, session.trace.prefill_passes)
        if session.trace.decode_span is not None:
            span.end(end_ns + record.unix_offset_ns)

    def _chunks(self, record: RequestRecord, session: SessionRecord) -> None:
        """Make a span of each chunk. After a loss in the decode phase, prompt and answer are read again: in that phase.

        What was under way at a loss ends there.
        """
        losses_ns = [event.at_ns for event in session.events if event.name == names.EVENT_PAUSED]
        for chunk in session.prompt.chunks:
            phase = _phase_of(session, chunk.sent_ns)
            lost_ns = next((at_ns for at_ns in losses_ns if at_ns >= chunk.sent_ns), session.ended_ns)
            rows = {names.ATTR_CHUNK_POSITION: chunk.position, names.ATTR_CHUNK_ROWS: chunk.n_rows}
            until_ns = chunk.answered_ns or lost_ns
            self._child(record, names.SPAN_PREFILL_CHUNK, chunk.sent_ns, until_ns, rows, phase.get_span_context())

    def _recoveries(self, record: RequestRecord, session: SessionRecord) -> None:
        """Make a span of each pause: from a loss until the session resumes, or its end."""
        paused: EventRecord | None = None
        for event in [*session.events, EventRecord(names.EVENT_RESUMED, session.ended_ns)]:
            if event.name == names.EVENT_PAUSED:
                paused = event
            elif event.name == names.EVENT_RESUMED and paused is not None:
                attributes: dict[str, AttributeValue] = {names.ATTR_LOST_CAUSE: paused.detail}
                if paused.stage is not None:
                    attributes[names.ATTR_LOST_STAGE] = paused.stage
                name, parent = names.SPAN_RECOVERY, _phase_of(session, paused.at_ns).get_span_context()
                self._child(record, name, paused.at_ns, max(event.at_ns, paused.at_ns + 1), attributes, parent)
                paused = None

    # --- requests that share a session --------------------------------------------------------------------------------

    def joined(self, stream: StreamRecord) -> None:
        """A request reads another's session: start its own decode span."""
        record = stream.request
        if record is None or record.span is None:
            return
        identity: dict[str, AttributeValue] = {
            names.ATTR_REQUEST_ID: record.completion_id,
            names.ATTR_SESSION_ID: session_text(stream.session.session_id),
            names.ATTR_CHOICE: _choice_of(record, stream),
            names.ATTR_SHARED_WITH: stream.session.request_id,
        }
        stream.span = self._child(record, names.SPAN_DECODE, stream.opened_ns, 0, identity)

    def left(self, stream: StreamRecord) -> None:
        """A request has left a shared session: end its span, with a link to the session's own."""
        span, record = stream.span, stream.request
        if span is None or record is None:
            return
        context = trace_context.unpack(stream.session.trace.context)
        if context is not None:
            span.add_link(context, {names.ATTR_LINK: names.LINK_SESSION})
        reason, error = stream.outcome()
        span.set_attributes(
            {
                names.ATTR_PROMPT_TOKENS: stream.session.n_prompt,
                names.ATTR_GENERATED_TOKENS: stream.n_tokens,
                names.ATTR_FINISH_REASON: reason,
            }
        )
        if error:
            _fail(span, error, stream.session.error_text or error, stream.ended_ns + record.unix_offset_ns)
        span.end(stream.ended_ns + record.unix_offset_ns)
        stream.span = None

    def _child(
        self,
        record: RequestRecord,
        name: str,
        start_ns: int,
        end_ns: int = 0,
        attributes: Mapping[str, AttributeValue] | None = None,
        parent: trace.SpanContext | None = None,
    ) -> Span:
        """Start a span below the request's own (or `parent`), and end it at once if its end is known."""
        assert record.span is not None
        span = self.telemetry.start_span(
            name,
            start_ns=start_ns + record.unix_offset_ns,
            parent=parent or record.span.get_span_context(),
            attributes=attributes,
        )
        if end_ns:
            span.end(end_ns + record.unix_offset_ns)
        return span


def session_text(session_id: int) -> str:
    """Return a session id as spans and JSON show it: 16 hexadecimal digits."""
    return f"{session_id:016x}"


def _add_event(span: Span, event: EventRecord, record: RequestRecord) -> None:
    detail = {"detail": event.detail} if event.detail else None
    span.add_event(event.name, detail, timestamp=event.at_ns + record.unix_offset_ns)


def _phase_of(session: SessionRecord, at_ns: int) -> Span:
    """Return the span of the phase that a session with a lane was in at a time."""
    prefill, decode = session.trace.prefill_span, session.trace.decode_span
    assert prefill is not None
    return prefill if decode is None or at_ns < session.first_token_ns else decode


def _request_of(session: SessionRecord) -> RequestRecord | None:
    return session.origin.request if session.origin is not None else None


def _choice_of(record: RequestRecord, stream: StreamRecord) -> int:
    return record.streams.index(stream) if stream in record.streams else 0


def _identity(record: RequestRecord, session: SessionRecord) -> dict[str, AttributeValue]:
    assert session.origin is not None
    return {
        names.ATTR_REQUEST_ID: record.completion_id,
        names.ATTR_SESSION_ID: session_text(session.session_id),
        names.ATTR_CHOICE: _choice_of(record, session.origin),
    }


def _session_attributes(session: SessionRecord) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {
        names.ATTR_PROMPT_TOKENS: session.n_prompt,
        names.ATTR_QUEUE: (session.started_ns - session.admitted_ns) / S,
        names.ATTR_RECOVERIES: sum(event.name == names.EVENT_RESUMED for event in session.events),
    }
    if session.is_embedding:
        return found
    found[names.ATTR_GENERATED_TOKENS] = session.n_tokens
    if session.guesses.n_sent:
        found[names.ATTR_DRAFTED] = session.guesses.n_sent
        found[names.ATTR_ACCEPTED] = session.guesses.n_accepted
    if session.origin is not None and session.origin.ttft_ns is not None:
        found[names.ATTR_TTFT] = session.origin.ttft_ns / S
    if session.gaps.n:
        found[names.ATTR_ITL_MEAN] = session.gaps.mean_ns / S
        found[names.ATTR_ITL_P50] = session.gaps.p50_ns / S
        found[names.ATTR_ITL_P95] = session.gaps.p95_ns / S
        found[names.ATTR_ITL_MAX] = session.gaps.max_ns / S
    return found


def _stage_attributes(stages: Mapping[int, StageRecord], n_stages: int) -> dict[str, AttributeValue]:
    """Return the stages' summaries as arrays in stage order, with zeros for a stage without one."""
    if not stages:
        return {}
    rows = [stages.get(index, StageRecord()) for index in range(max(n_stages, max(stages) + 1))]
    return {
        names.ATTR_STAGES_REPORTED: sorted(stages),
        names.ATTR_STAGE_STEPS: [row.n_prefill_steps + row.n_decode_steps for row in rows],
        names.ATTR_STAGE_BATCH_ROWS_MEAN: [row.batch_rows_mean for row in rows],
        names.ATTR_STAGE_BATCH_ROWS_MAX: [row.batch_rows_max for row in rows],
        names.ATTR_STAGE_WAIT_SUM: [(row.prefill_wait_ns + row.decode_wait_ns) / S for row in rows],
        names.ATTR_STAGE_PREFILL_WAIT: [row.prefill_wait_ns / S for row in rows],
        names.ATTR_STAGE_DECODE_WAIT: [row.decode_wait_ns / S for row in rows],
        names.ATTR_STAGE_WAIT_MAX: [row.wait_max_ns / S for row in rows],
        names.ATTR_STAGE_DECODE: [row.decode_ns / S for row in rows],
    }


def _time_attributes(session: SessionRecord, offsets_ns: Sequence[int | None]) -> dict[str, AttributeValue]:
    """Return where the time of a decode phase went; nothing if the sums do not cover it."""
    sums = decode_sums(session, offsets_ns)
    if sums is None:
        return {}
    return {
        names.ATTR_STAGE_HOP: [ns / S for ns in sums.hop_ns],
        names.ATTR_STAGE_HANDLE: [ns / S for ns in sums.handle_ns],
        names.ATTR_TIME_COMPUTE: sum(sums.compute_ns) / S,
        names.ATTR_TIME_QUEUE: sum(sums.queue_ns) / S,
        names.ATTR_TIME_HANDLE: sum(sums.handle_ns) / S,
        names.ATTR_TIME_HOPS: sum(sums.hop_ns) / S,
        names.ATTR_TIME_BACK: sums.back_ns / S,
        names.ATTR_TIME_COORDINATOR: sums.coordinator_ns / S,
    }


def _link_passes(span: Span, roots: Sequence[bytes]) -> None:
    """Link to the traces of passes that a phase was in; Jaeger shows a link only on the span that holds it."""
    for root in roots:
        context = trace_context.unpack(root)
        if context is not None:
            span.add_link(context, {names.ATTR_LINK: names.LINK_PASSES})


def _say_failure(span: Span, session: SessionRecord, record: RequestRecord) -> None:
    origin = session.origin
    reason = (origin.finish_reason if origin is not None else "") or session.finish_reason
    error = "" if reason else session.error or CANCELLED
    if error or not session.is_embedding:
        span.set_attribute(names.ATTR_FINISH_REASON, reason or ("error" if session.error else "abort"))
    cause = CANCELLED_TEXT if error == CANCELLED else error
    if error:
        _fail(span, error, session.error_text or record.error_text or cause, session.ended_ns + record.unix_offset_ns)


def _fail(span: Span, error: str, cause: str, at_ns: int) -> None:
    """Say that a session failed or was cancelled, and why."""
    span.set_attribute(names.ERROR_TYPE, error)
    what = "cancelled" if error == CANCELLED else "failed"
    span.add_event(what, {names.EVENT_ATTR_CAUSE: cause}, timestamp=at_ns)
    span.set_status(Status(StatusCode.ERROR, cause))


def _baggage_of(context: Context) -> dict[str, str]:
    """Return the caller's baggage without malformed entries and entries that do not fit: headers may hold any bytes."""
    found: dict[str, str] = {}
    n_bytes = 0
    for key, value in baggage.get_all(context).items():
        text = str(value).encode("utf-8", "replace").decode()
        n_bytes += len(key) + len(urllib.parse.quote(text)) + len("=,")
        if _BAGGAGE_KEY.fullmatch(key) and len(found) < BAGGAGE_ENTRIES_MAX and n_bytes <= BAGGAGE_BYTES_MAX:
            found[key] = text
    return found


def _header_of(entries: Mapping[str, str]) -> str:
    """Return baggage in the form of W3C's header."""
    return ",".join(f"{key}={urllib.parse.quote(value)}" for key, value in entries.items())
