"""Spans of a stage: one per native batched decode, linked to every request in it; at level frames one per frame too.

A batch span is the root of a trace of its own, since a batch belongs to all its members and to none. Its links, given
at creation, lead to each sampled member's request and to the batches upstream that computed its rows; so one envelope
can be followed through the pipeline. Its ids are chosen in the decode thread, because they leave with the envelope
before the event loop comes to make the span.

At level frames every sampled member also gets a span in its request's own trace: from the frame's arrival here until
it was ready to leave, with its waits, linked to the batch.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode

from relayline.stage.queue_types import QueuedFrame
from relayline.stage.steps.step_types import StepResult
from relayline.wire.envelopes import trace_context
from relayline.wire.telemetry import names
from relayline.wire.telemetry.telemetry import Level, Telemetry

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

# Requests and upstream batches whose parsed context is kept: a request links to hundreds of batches.
CONTEXTS_KEPT_MAX = 4_096


class BatchSpans:
    """Makes the spans of a stage's steps. `mark` runs in the decode thread, the rest on the event loop."""

    def __init__(self, telemetry: Telemetry, stage_index: int, constant: dict[str, AttributeValue]) -> None:
        """constant: attributes that every batch of this stage has."""
        self._telemetry, self._stage_index = telemetry, stage_index
        self._constant = constant
        self._unpack = functools.lru_cache(CONTEXTS_KEPT_MAX)(trace_context.unpack)

    def mark(self, members: list[QueuedFrame]) -> bytes:
        """Return the context of the span that a batch of these frames will have; NONE when it will have none."""
        if not self._telemetry.records(Level.BATCHES):
            return trace_context.NONE
        if not any(trace_context.is_sampled(frame.trace) for frame in members):
            return trace_context.NONE
        return trace_context.new_root()

    def step_done(self, result: StepResult, lanes_used: int) -> None:
        """Make the spans of a step that was marked."""
        if result.context == trace_context.NONE:
            return
        offset_ns = self._telemetry.wall_offset_ns()
        span = self._telemetry.start_span(
            names.SPAN_BATCH,
            start_ns=result.step.taken_ns + offset_ns,
            own=result.context,
            kind=SpanKind.CONSUMER,
            links=self._links(result),
            attributes=self._attributes(result, lanes_used),
        )
        if result.error:
            span.set_status(Status(StatusCode.ERROR, result.error))
        span.end(result.ended_ns + offset_ns)
        if self._telemetry.records(Level.FRAMES):
            self._frame_spans(result, offset_ns)

    def batch_id(self, result: StepResult) -> str:
        """Return the id by which a person searches a batch."""
        return f"{self._stage_index}:{result.number}"

    def _sampled(self, frame: QueuedFrame) -> SpanContext | None:
        return self._unpack(frame.trace) if trace_context.is_sampled(frame.trace) else None

    def _links(self, result: StepResult) -> list[Link]:
        links: list[Link] = []
        for frame in result.members:
            context = self._sampled(frame)
            if context is not None:
                links.append(Link(context, {names.ATTR_LINK: names.LINK_MEMBER, **_frame_attributes(frame, result)}))
        upstream = dict.fromkeys(frame.upstream_trace for frame in result.members)
        for packed in upstream:
            context = self._unpack(packed)
            if context is not None:
                links.append(Link(context, {names.ATTR_LINK: names.LINK_UPSTREAM_BATCH}))
        return links

    def _attributes(self, result: StepResult, lanes_used: int) -> dict[str, AttributeValue]:
        step, members = result.step, result.members
        waits_ns = [step.taken_ns - frame.arrived_ns for frame in members]
        prefill_rows = sum(frame.n_rows for frame in members if frame.is_prefill)
        attributes: dict[str, AttributeValue] = {
            **self._constant,
            names.ATTR_BATCH_ID: self.batch_id(result),
            names.ATTR_BATCH_STEP: result.number,
            names.ATTR_BATCH_ROWS: result.n_rows,
            names.ATTR_BATCH_FRAMES: len(members),
            names.ATTR_BATCH_SESSIONS: len({frame.session_key for frame in members}),
            names.ATTR_BATCH_PREFILL_ROWS: prefill_rows,
            names.ATTR_BATCH_PADDED_ROWS: result.padded_rows,
            names.ATTR_BATCH_PHASE: _phase(prefill_rows, result.n_rows),
            names.ATTR_BATCH_CLOSE_REASON: result.close_reason,
            names.ATTR_BATCH_QUEUED_ROWS_BEFORE: step.queued_rows_before,
            names.ATTR_BATCH_QUEUED_ROWS_AFTER: step.queued_rows_after,
            names.ATTR_BATCH_PREDICTED_NS: result.predicted_ns,
            names.ATTR_BATCH_DECODE_NS: result.decode_ns,
            names.ATTR_BATCH_ENCODE_NS: result.encode_ns,
            names.ATTR_BATCH_BYTES_OUT: sum(len(output.message) for output in result.outputs),
            names.ATTR_BATCH_WAIT_MAX_NS: max(waits_ns),
            names.ATTR_MEMBER_SESSIONS: [f"{frame.session_id:016x}" for frame in members],
            names.ATTR_MEMBER_POSITIONS: [frame.position for frame in members],
            names.ATTR_MEMBER_ROWS: [frame.n_rows for frame in members],
            names.ATTR_MEMBER_WAITS_NS: waits_ns,
            names.ATTR_POLICY_LANES_USED: lanes_used,
            names.ATTR_POLICY_PAD_TARGET: result.n_rows + result.padded_rows,
        }
        if result.error:
            attributes[names.ATTR_BATCH_ERROR] = result.error
        return attributes

    def _frame_spans(self, result: StepResult, offset_ns: int) -> None:
        batch = trace_context.unpack(result.context)
        assert batch is not None  # it was marked
        links = [Link(batch, {names.ATTR_LINK: names.LINK_BATCH})]
        for frame in result.members:
            request = self._sampled(frame)
            if request is None:
                continue
            attributes = {
                names.ATTR_STAGE_INDEX: self._stage_index,
                names.ATTR_STAGE_NAME: self._constant.get(names.ATTR_STAGE_NAME, ""),
                names.ATTR_BATCH_ID: self.batch_id(result),
                names.ATTR_BATCH_ROWS: result.n_rows,
                names.ATTR_FRAME_UPSTREAM_WAIT_NS: frame.upstream_wait_ns,
                **_frame_attributes(frame, result),
            }
            span = self._telemetry.start_span(
                names.SPAN_FRAME,
                start_ns=frame.arrived_ns + offset_ns,
                parent=request,
                kind=SpanKind.CONSUMER,
                links=links,
                attributes=attributes,
            )
            span.end(result.ended_ns + offset_ns)


def _frame_attributes(frame: QueuedFrame, result: StepResult) -> dict[str, AttributeValue]:
    return {
        names.ATTR_SESSION_ID: f"{frame.session_id:016x}",
        names.ATTR_FRAME_POSITION: frame.position,
        names.ATTR_FRAME_ROWS: frame.n_rows,
        names.ATTR_FRAME_PREFILL: frame.is_prefill,
        names.ATTR_FRAME_WAIT_NS: result.step.taken_ns - frame.arrived_ns,
    }


def _phase(prefill_rows: int, n_rows: int) -> str:
    if not prefill_rows:
        return "decode"
    return "prefill" if prefill_rows == n_rows else "mixed"
