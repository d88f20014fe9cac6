"""Spans of requests, made from their records: one trace per HTTP request.

    POST /v1/completions                     SERVER, continues the caller's trace
      relayline.tokenize
      relayline.queue                        per choice, from admission to a lane
      relayline.prefill                      per choice, to the first token
        relayline.prefill.chunk              levels batches and frames
      relayline.decode                       per choice, to the last token; links to the batches it was in

The spans of prefill and decode are started early because frames carry their context; everything they say is added at
the end, when the stages have summed up. A request that shares another's session has one decode span that links to the
session's own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode

from relayline.coordinator.sessions.request_log import (
    BATCHES_MAX,
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
LINKS_PER_TURN = 128  # some 2 ms of work


class Tracing:
    """Makes and ends the spans of one coordinator. Event loop only."""

    def __init__(self, telemetry: Telemetry, sampler_ratio: float = 1.0) -> None:
        self.telemetry = telemetry
        self.sampler_ratio = sampler_ratio  # of requests whose caller has not decided; may be changed at any time

    # --- the HTTP request ---------------------------------------------------------------------------------------------

    def received(self, record: RequestRecord, carrier: Mapping[str, str]) -> None:
        """Start the server span, under the caller's span if its headers name one, unless it is not to be traced."""
        if not self.telemetry.records(Level.SUMMARY):
            return
        parent = trace.get_current_span(propagate.extract(carrier, Context())).get_span_context()
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
                names.HTTP_X_REQUEST_ID: [record.request_id],
            },
        )
        if span.is_recording():
            record.span = span
            record.trace_id = trace.format_trace_id(span.get_span_context().trace_id)

    def describe(self, record: RequestRecord, attributes: Mapping[str, AttributeValue]) -> None:
        """Add what is known once the body has been read."""
        if record.span is not None:
            record.span.set_attributes(dict(attributes))

    def answered(self, record: RequestRecord) -> None:
        """End the server span."""
        span = record.span
        if span is None:
            return
        if record.tokenize_end_ns:
            self._child(record, names.SPAN_TOKENIZE, record.tokenize_start_ns, record.tokenize_end_ns)
        outcomes = [stream.outcome() for stream in record.streams]
        first_ns = [stream.session.first_token_ns for stream in record.streams if stream.session.first_token_ns]
        attributes: dict[str, AttributeValue] = {
            names.GEN_AI_USAGE_INPUT_TOKENS: record.n_prompt,
            names.GEN_AI_USAGE_OUTPUT_TOKENS: sum(stream.n_tokens for stream in record.streams),
            names.GEN_AI_RESPONSE_FINISH_REASONS: [reason or "abort" for reason, _ in outcomes],
        }
        if n_thought := sum(stream.n_thought for stream in record.streams):
            attributes[names.GEN_AI_USAGE_REASONING_TOKENS] = n_thought
        if record.status:
            attributes[names.HTTP_RESPONSE_STATUS_CODE] = record.status
        if record.completion_id:
            attributes[names.GEN_AI_RESPONSE_ID] = attributes[names.ATTR_REQUEST_ID] = record.completion_id
        if first_ns:
            first_chunk_ns = max(0, min(first_ns) - record.received_ns)
            attributes[names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] = first_chunk_ns * 1e-9
        span.set_attributes(attributes)
        if record.error:
            span.set_attribute(names.ERROR_TYPE, record.error)
            if not 400 <= record.status < SERVER_ERROR:
                span.set_status(Status(StatusCode.ERROR))
        span.end(record.ended_ns + record.unix_offset_ns)
        # The ring keeps the record; later spans need no more of this one than its context.
        record.span = trace.NonRecordingSpan(span.get_span_context())

    # --- sessions -----------------------------------------------------------------------------------------------------

    def started(self, session: SessionRecord) -> None:
        """A session has its lane: the span of its wait ends, the span of its prefill begins."""
        record = _request_of(session)
        if record is None or record.span is None or session.prefill_span is not None:
            return
        common = _identity(record, session)
        self._child(record, names.SPAN_QUEUE, session.admitted_ns, session.started_ns, common)
        session.prefill_span = self._child(record, names.SPAN_PREFILL, session.started_ns, 0, common)
        session.trace = context_of(session.prefill_span)

    def first_token(self, session: SessionRecord) -> None:
        """The span of the decode phase begins; frames carry its context from here on."""
        record = _request_of(session)
        if record is None or session.prefill_span is None:
            return
        identity = _identity(record, session)
        session.decode_span = self._child(record, names.SPAN_DECODE, session.first_token_ns, 0, identity)
        session.trace = context_of(session.decode_span)

    def final(self, session: SessionRecord, n_stages: int) -> Iterator[None]:
        """Everything is known: say it and end the session's spans at their true ends.

        Yields where somebody else may be served in between: thousands of links take a while.
        """
        record = _request_of(session)
        if record is None or record.span is None:
            return
        if session.prefill_span is None:  # never had a lane
            self._child(record, names.SPAN_QUEUE, session.admitted_ns, session.ended_ns, _identity(record, session))
            return
        self._end_prefill(record, session, session.prefill_span)
        last = session.decode_span or session.prefill_span
        last.set_attributes(_session_attributes(session) | _stage_attributes(session.stages, n_stages))
        yield from _link_batches(last, session)
        for event in session.events:
            detail = {"detail": event.detail} if event.detail else None
            last.add_event(event.name, detail, timestamp=event.at_ns + record.unix_offset_ns)
        _say_failure(last, session)
        last.end(session.ended_ns + record.unix_offset_ns)
        session.prefill_span = session.decode_span = None

    def _end_prefill(self, record: RequestRecord, session: SessionRecord, span: Span) -> None:
        end_ns = session.first_token_ns or session.ended_ns
        span.set_attributes(
            {
                names.GEN_AI_USAGE_INPUT_TOKENS: session.n_prompt,
                names.ATTR_CHUNKS: len(session.chunks) + session.n_chunks_dropped,
            }
        )
        if self.telemetry.records(Level.BATCHES):
            parent = span.get_span_context()
            for chunk in session.chunks:
                rows = {names.ATTR_CHUNK_POSITION: chunk.position, names.ATTR_CHUNK_ROWS: chunk.n_rows}
                until_ns = chunk.answered_ns or session.ended_ns
                self._child(record, names.SPAN_PREFILL_CHUNK, chunk.sent_ns, until_ns, rows, parent)
        if session.decode_span is not None:
            span.end(end_ns + record.unix_offset_ns)

    # --- requests that share a session --------------------------------------------------------------------------------

    def joined(self, stream: StreamRecord) -> None:
        """A request reads another's session: it gets a decode span of its own."""
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
        """A request that shared a session is done with it: link to the span that describes the session."""
        span, record = stream.span, stream.request
        if span is None or record is None:
            return
        context = trace_context.unpack(stream.session.trace)
        if context is not None:
            span.add_link(context, {names.ATTR_LINK: names.LINK_SESSION})
        reason, error = stream.outcome()
        span.set_attributes(
            {
                names.GEN_AI_USAGE_INPUT_TOKENS: stream.session.n_prompt,
                names.GEN_AI_USAGE_OUTPUT_TOKENS: stream.n_tokens,
                names.GEN_AI_RESPONSE_FINISH_REASONS: [reason],
            }
        )
        if error:
            span.set_attribute(names.ERROR_TYPE, error)
            span.set_status(Status(StatusCode.ERROR))
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
    """Return a session id as it stands in spans and in JSON: 16 hexadecimal digits."""
    return f"{session_id:016x}"


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
        names.GEN_AI_USAGE_INPUT_TOKENS: session.n_prompt,
        names.GEN_AI_USAGE_OUTPUT_TOKENS: session.n_tokens,
        names.ATTR_QUEUE_NS: session.started_ns - session.admitted_ns,
        names.ATTR_RECOVERIES: sum(event.name == names.EVENT_RESUMED for event in session.events),
    }
    if session.n_drafted:
        found[names.ATTR_DRAFTED] = session.n_drafted
        found[names.ATTR_ACCEPTED] = session.n_accepted
    if session.first_token_ns:
        found[names.ATTR_TTFT_NS] = session.first_token_ns - session.admitted_ns
    if session.gaps.n:
        found[names.ATTR_ITL_MEAN_NS] = session.gaps.mean_ns
        found[names.ATTR_ITL_P50_NS] = session.gaps.p50_ns
        found[names.ATTR_ITL_P95_NS] = session.gaps.p95_ns
        found[names.ATTR_ITL_MAX_NS] = session.gaps.max_ns
    return found


def _stage_attributes(stages: Mapping[int, StageRecord], n_stages: int) -> dict[str, AttributeValue]:
    """Return what the stages summed up as arrays in stage order; zeros for one that said nothing."""
    if not stages:
        return {}
    rows = [stages.get(index, StageRecord()) for index in range(max(n_stages, max(stages) + 1))]
    return {
        names.ATTR_STAGES_REPORTED: sorted(stages),
        names.ATTR_STAGE_STEPS: [row.n_prefill_steps + row.n_decode_steps for row in rows],
        names.ATTR_STAGE_BATCH_ROWS_MEAN: [row.batch_rows_mean for row in rows],
        names.ATTR_STAGE_BATCH_ROWS_MAX: [row.batch_rows_max for row in rows],
        names.ATTR_STAGE_WAIT_SUM_NS: [row.prefill_wait_ns + row.decode_wait_ns for row in rows],
        names.ATTR_STAGE_PREFILL_WAIT_NS: [row.prefill_wait_ns for row in rows],
        names.ATTR_STAGE_DECODE_WAIT_NS: [row.decode_wait_ns for row in rows],
        names.ATTR_STAGE_WAIT_MAX_NS: [row.wait_max_ns for row in rows],
        names.ATTR_STAGE_DECODE_NS: [row.decode_ns for row in rows],
    }


def _link_batches(span: Span, session: SessionRecord) -> Iterator[None]:
    """Link to the recorded batches and name them; Jaeger shows a link only on the span that holds it.

    Where there are more than a span may hold, every stage keeps its share of the oldest.
    """
    if not session.stages:
        return
    share = BATCHES_MAX // len(session.stages)
    found = [(index, step, ids) for index, stage in sorted(session.stages.items()) for step, ids in stage.batches]
    linked = [
        (index, step, ids)
        for index, stage in sorted(session.stages.items())
        for step, ids in stage.batches[:share]
    ]  # fmt: skip
    for number, (index, step, ids) in enumerate(linked, start=1):
        if number % LINKS_PER_TURN == 0:
            yield
        context = trace_context.unpack(ids)
        if context is not None:
            batch_id = f"{index}:{step}"
            span.add_link(context, {names.ATTR_LINK: names.LINK_BATCH, names.ATTR_BATCH_ID: batch_id})
    if found:
        span.set_attribute(names.ATTR_BATCH_IDS, [f"{index}:{step}" for index, step, _ in found])
    n_dropped = len(found) - len(linked) + sum(stage.n_batches_dropped for stage in session.stages.values())
    if n_dropped:
        span.set_attribute(names.ATTR_LINKS_DROPPED, n_dropped)


def _say_failure(span: Span, session: SessionRecord) -> None:
    origin = session.origin
    reason = (origin.finish_reason if origin is not None else "") or session.finish_reason
    error = "" if reason else session.error or "cancelled"
    span.set_attribute(names.GEN_AI_RESPONSE_FINISH_REASONS, [reason or ("error" if session.error else "abort")])
    if error:
        span.set_attribute(names.ERROR_TYPE, error)
        span.set_status(Status(StatusCode.ERROR))
