"""Spans of a stage: one per native batched decode, in the coordinator's trace of passes.

The envelope tells where a batch belongs. At stage 0 its trace context is the root of the coordinator's trace of passes,
at every other the batch of the stage before that computed the same rows. That is the batch's parent. So a trace viewer
draws a pass as a diagonal through the stages, without any comparison of clocks. Where rows of several batches come
together, the first is the parent and the others are links. Further links lead to each sampled member's request.

A batch's ids are chosen in the decode thread, because they leave with the envelope before the event loop comes to make
the span. `stage.observe.request_spans` makes a batch's spans in the traces of its requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from opentelemetry.trace import SpanKind

from relayline.stage.observe.request_spans import RequestSpans
from relayline.stage.queue_types import QueuedFrame
from relayline.stage.steps.step_types import StepResult
from relayline.wire.envelopes import trace_context
from relayline.wire.envelopes.frames import Flag
from relayline.wire.telemetry import names
from relayline.wire.telemetry.spans import Event, Finished, Link
from relayline.wire.telemetry.telemetry import Level, Telemetry

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue


class BatchSpans:
    """Makes the spans of a stage's steps. `mark` runs in the decode thread, the rest on the event loop."""

    def __init__(
        self,
        telemetry: Telemetry,
        stage_index: int,
        constant: dict[str, AttributeValue],
        adapters: Sequence[str] = (),
    ) -> None:
        """constant: attributes that every batch of this stage has. adapters: names of the choices of LoRA adapters."""
        self._telemetry, self._stage_index, self._adapters = telemetry, stage_index, adapters
        self._constant = constant
        self._requests = RequestSpans(telemetry, stage_index)

    def mark(self, members: list[QueuedFrame]) -> bytes:
        """Return the context of the span that a batch of these frames will have; NONE when it will have none."""
        if not self._telemetry.records(Level.BATCHES):
            return trace_context.NONE
        parent = _parent_of(members)
        return trace_context.NONE if parent == trace_context.NONE else trace_context.new_below(parent)

    def step_done(self, result: StepResult, lanes_used: int) -> None:
        """Make the spans of a step that was marked, and of the sessions that it closed."""
        if result.context == trace_context.NONE:
            self._requests.step_done(result, names.PHASE_DECODE, 0)
            return
        streams = len({frame.session_key for frame in result.members})
        prefill_rows = sum([frame.n_rows for frame in result.members if frame.is_prefill])
        name = names.sized(_phase(prefill_rows, result.n_rows), streams)
        offset_ns = self._telemetry.wall_offset_ns()
        arrived_ns = min([frame.arrived_ns for frame in result.members])
        self._telemetry.emit(
            Finished(
                name,
                result.context,
                _parent_of(result.members),
                arrived_ns + offset_ns,
                result.ended_ns + offset_ns,
                self._attributes(result, lanes_used, streams, prefill_rows),
                self._events(result, arrived_ns, offset_ns),
                self._links(result),
                SpanKind.CONSUMER,
                result.error,
            )
        )
        self._requests.step_done(result, name, offset_ns)

    def batch_id(self, result: StepResult) -> str:
        """Return the id by which a person searches a batch."""
        return f"{self._stage_index}:{result.number}"

    def finish(self, route_id: int | None = None) -> None:
        """End the spans of requests of a route, or of all, since their sessions will not be closed."""
        self._requests.finish(route_id)

    @staticmethod
    def _events(result: StepResult, arrived_ns: int, offset_ns: int) -> list[Event]:
        taken_ns = result.step.taken_ns
        closed: dict[str, AttributeValue] = {
            names.EVENT_ATTR_REASON: result.close_reason,
            names.EVENT_ATTR_ROWS: result.n_rows,
            names.EVENT_ATTR_WAITED: (taken_ns - arrived_ns) / 1e9,
        }
        decoded: dict[str, AttributeValue] = {names.EVENT_ATTR_MEASURED: result.decode_ns / 1e9}
        if result.predicted_ns:
            decoded[names.EVENT_ATTR_PREDICTED] = result.predicted_ns / 1e9
        return [
            Event(names.EVENT_CLOSED, taken_ns + offset_ns, closed),
            Event(names.EVENT_DECODED, max(arrived_ns, result.started_ns + result.decode_ns) + offset_ns, decoded),
        ]

    def _links(self, result: StepResult) -> list[Link]:
        taken_ns = result.step.taken_ns
        links = [
            Link(
                frame.trace,
                {
                    names.ATTR_LINK: names.LINK_MEMBER,
                    names.ATTR_SESSION_ID: f"{frame.session_id:016x}",
                    names.ATTR_FRAME_POSITION: frame.position,
                    names.ATTR_FRAME_ROWS: frame.n_rows,
                    names.ATTR_FRAME_PREFILL: frame.is_prefill,
                    names.ATTR_FRAME_WAIT_NS: taken_ns - frame.arrived_ns,
                },
            )
            for frame in result.members
            if trace_context.is_sampled(frame.trace)
        ]
        upstream = dict.fromkeys([frame.upstream_trace for frame in result.members])
        upstream.pop(_parent_of(result.members), None)
        links += [
            Link(context, {names.ATTR_LINK: names.LINK_UPSTREAM_BATCH})
            for context in upstream
            if trace_context.is_sampled(context)
        ]
        return links

    def _attributes(
        self, result: StepResult, lanes_used: int, streams: int, prefill_rows: int
    ) -> dict[str, AttributeValue]:
        step, members = result.step, result.members
        waits_ns = [step.taken_ns - frame.arrived_ns for frame in members]
        attributes: dict[str, AttributeValue] = {
            **self._constant,
            names.ATTR_BATCH_ID: self.batch_id(result),
            names.ATTR_BATCH_STEP: result.number,
            names.ATTR_BATCH_ROWS: result.n_rows,
            names.ATTR_BATCH_FRAMES: len(members),
            names.ATTR_BATCH_SESSIONS: streams,
            names.ATTR_BATCH_PREFILL_ROWS: prefill_rows,
            names.ATTR_BATCH_PADDED_ROWS: result.padded_rows,
            names.ATTR_BATCH_PHASE: _phase(prefill_rows, result.n_rows),
            names.ATTR_BATCH_CLOSE_REASON: result.close_reason,
            names.ATTR_BATCH_QUEUED_ROWS_BEFORE: step.queued_rows_before,
            names.ATTR_BATCH_QUEUED_ROWS_AFTER: step.queued_rows_after,
            names.ATTR_BATCH_PREDICTED_NS: result.predicted_ns,
            names.ATTR_BATCH_DECODE_NS: result.decode_ns,
            names.ATTR_BATCH_ENCODE_NS: result.encode_ns,
            names.ATTR_BATCH_BYTES_OUT: sum([len(output.message) for output in result.outputs]),
            names.ATTR_BATCH_WAIT_MAX_NS: max(waits_ns),
            names.ATTR_MEMBER_SESSIONS: [f"{frame.session_id:016x}" for frame in members],
            names.ATTR_MEMBER_POSITIONS: [frame.position for frame in members],
            names.ATTR_MEMBER_ROWS: [frame.n_rows for frame in members],
            names.ATTR_MEMBER_WAITS_NS: waits_ns,
            names.ATTR_POLICY_LANES_USED: lanes_used,
            names.ATTR_POLICY_PAD_TARGET: result.n_rows + result.padded_rows,
        }
        if n_granted := sum(1 for frame in members if frame.argument and frame.flags == Flag.WANTS_SAMPLE):
            attributes[names.ATTR_BATCH_GRANTED] = n_granted
        if 0 < (adapter := members[0].adapter) <= len(self._adapters):  # of all of them, see stage.steps.batcher
            attributes[names.ATTR_BATCH_ADAPTER] = self._adapters[adapter - 1]
        if result.is_ahead:
            attributes[names.ATTR_BATCH_AHEAD] = True
        if result.computed_in:
            attributes[names.ATTR_BATCH_COMPUTED_IN] = result.computed_in
        if result.error:
            attributes[names.ATTR_BATCH_ERROR] = result.error
        return attributes


def _parent_of(members: list[QueuedFrame]) -> bytes:
    """Return the context that a batch of these frames is below; NONE when it is not recorded.

    From a coordinator that makes no traces of passes, it is below the first request of it that is recorded.
    """
    first = members[0].upstream_trace  # nearly always that of all
    if trace_context.is_sampled(first):
        return first
    return trace_context.sampled_of((*(frame.upstream_trace for frame in members), *(frame.trace for frame in members)))


def _phase(prefill_rows: int, n_rows: int) -> str:
    if not prefill_rows:
        return names.PHASE_DECODE
    return names.PHASE_PREFILL if prefill_rows == n_rows else names.PHASE_MIXED
