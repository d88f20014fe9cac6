"""A stage's spans in the traces of requests: one span per phase and session, with an event per batch.

The span stands below the coordinator's span of the phase, whose context every frame carries. It is made once the phase
is over here: when a frame carries another context, the session is closed, or its epoch ends. Its ids are chosen when it
begins, because at level frames every frame gets a span below it.

A span has at most EVENTS_MAX events. The latest LATEST_MAX batches have one each. Older ones are merged, and those
again as they become many: the older an event of a long answer is, the more batches it is of, and it says how many.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from opentelemetry.trace import SpanKind

from relayline.stage.queue_types import QueuedFrame
from relayline.stage.steps.step_types import StepResult
from relayline.wire.common import bounds
from relayline.wire.common.texts import counted
from relayline.wire.envelopes import trace_context
from relayline.wire.envelopes.frames import Flag
from relayline.wire.telemetry import names
from relayline.wire.telemetry.spans import Event, Finished, Link
from relayline.wire.telemetry.telemetry import Level, Telemetry

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

EVENTS_MAX = 128  # what many backends keep of a span's events
LATEST_MAX = 96  # batches that have an event each
FOLDED, TOGETHER = 32, 8  # when there are more, this many of the oldest are merged, this many into one event
LINKS_MAX = 128  # traces of passes that one span links to, the latest; about two minutes of them
BAGGAGE_MAX = 16  # entries of a request's baggage that its spans show
MS = 1e-6


class Moment(NamedTuple):
    """One batch of a session, or several merged."""

    at_ns: int  # when the batch was taken
    first: int  # positions of the session that it holds
    last: int
    n_batches: int
    wait_ns: int
    wait_max_ns: int
    decode_ns: int
    streams: int  # these and the rows: summed over the batches
    rows: int
    rows_max: int
    step: int  # of the first

    def merged(self, later: Moment) -> Moment:
        """Return this one and a later one as one."""
        return Moment(
            self.at_ns,
            min(self.first, later.first),
            max(self.last, later.last),
            self.n_batches + later.n_batches,
            self.wait_ns + later.wait_ns,
            max(self.wait_max_ns, later.wait_max_ns),
            self.decode_ns + later.decode_ns,
            self.streams + later.streams,
            self.rows + later.rows,
            max(self.rows_max, later.rows_max),
            self.step,
        )

    def words(self) -> str:
        """Return the event's name, as a person reads it in a list."""
        waited, decoded = f"waited {self.wait_ns * MS:.2f} ms", f"decoded {self.decode_ns * MS:.2f} ms"
        where = f"position {self.first}" if self.first == self.last else f"positions {self.first}-{self.last}"
        if self.n_batches == 1:
            streams = f"{counted(self.streams, 'stream')}"
            return f"{where}: {waited}, {decoded}, {streams} in {counted(self.rows, 'row')}"
        mates = f"{self.streams / self.n_batches:.1f} streams in {self.rows / self.n_batches:.1f} rows on average"
        return (
            f"{where}: {self.n_batches} batches, {waited} (at most {self.wait_max_ns * MS:.2f} ms), {decoded}, {mates}"
        )


def thinned(moments: list[Moment]) -> list[Moment]:
    """Return fewer moments: the older half merged two by two, the newer half as it was."""
    half = len(moments) // 2
    older = [moments[at].merged(moments[at + 1]) for at in range(0, half - 1, 2)]
    return [*older, *moments[half - half % 2 :]]


class _Batch(NamedTuple):
    """A batch, kept once for all of its sessions; the fields of one that are the same for each."""

    taken_ns: int
    ended_ns: int
    decode_ns: int
    streams: int
    rows: int
    step: int


# One batch as a session was in it: the position of its first row there, how many rows, when they arrived. Sums and
# words are made of it once the phase is over, or the batch has become one of many: it costs every frame of every step.
_Kept: TypeAlias = "tuple[int, int, int, _Batch]"


def _moment(kept: Sequence[_Kept]) -> Moment:
    """Return some batches of a session, which follow one another, as one moment."""
    position, _, _, batch = kept[0]
    taken_ns, step, end = batch.taken_ns, batch.step, 0
    wait_ns = wait_max_ns = decode_ns = streams = rows = rows_max = 0
    for first, n_rows, arrived_ns, batch in kept:
        waited_ns = batch.taken_ns - arrived_ns
        wait_ns += waited_ns
        decode_ns += batch.decode_ns
        streams += batch.streams
        rows += batch.rows
        if waited_ns > wait_max_ns:
            wait_max_ns = waited_ns
        if batch.rows > rows_max:
            rows_max = batch.rows
        if first < position:
            position = first
        if first + n_rows > end:
            end = first + n_rows
    n_batches = len(kept)
    return Moment(
        taken_ns, position, end - 1, n_batches, wait_ns, wait_max_ns, decode_ns, streams, rows, rows_max, step
    )


class _Phase:
    """One phase of one session at this stage, while it lasts."""

    __slots__ = (
        "_latest",
        "_older",
        "links",
        "n_links_dropped",
        "own",
        "parent",
        "session_id",
        "started_ns",
        "trace_id",
    )

    def __init__(self, frame: QueuedFrame) -> None:
        self.parent, self.own = frame.trace, trace_context.new_below(frame.trace)
        self.session_id, self.started_ns = frame.session_id, frame.arrived_ns
        self.links: dict[bytes, bytes] = {}  # id of a trace of passes -> its first batch that held the session
        self.trace_id = b""  # of the latest
        self.n_links_dropped = 0
        self._latest: list[_Kept] = []
        self._older: list[Moment] = []

    def batch(self, frame: QueuedFrame, batch: _Batch) -> None:
        """Note a batch that the session was in."""
        self._latest.append((frame.position, frame.n_rows, frame.arrived_ns, batch))
        if len(self._latest) > LATEST_MAX:
            oldest, self._latest = self._latest[:FOLDED], self._latest[FOLDED:]
            self._older += [_moment(oldest[at : at + TOGETHER]) for at in range(0, FOLDED, TOGETHER)]
            if len(self._older) > EVENTS_MAX - LATEST_MAX:
                self._older = thinned(self._older)

    def passed(self, context: bytes, trace_id: bytes) -> None:
        """Note that the batch is in another trace of passes than the one before."""
        self.trace_id = trace_id
        if trace_id in self.links:
            return
        if len(self.links) == LINKS_MAX:
            del self.links[next(iter(self.links))]
            self.n_links_dropped += 1
        self.links[trace_id] = context

    @property
    def ended_ns(self) -> int:
        """When its last batch was ready to leave."""
        return self._latest[-1][3].ended_ns

    def moments(self) -> list[Moment]:
        """Return its batches, at most EVENTS_MAX moments."""
        return [*self._older, *(_moment([kept]) for kept in self._latest)]


class RequestSpans:
    """Spans of this stage in the traces of requests. Event loop only. Bounded by open sessions."""

    def __init__(self, telemetry: Telemetry, stage_index: int) -> None:
        self._telemetry, self._stage_index = telemetry, stage_index
        self._phases: dict[tuple[int, int], _Phase] = {}
        self._baggage: dict[tuple[int, int], dict[str, AttributeValue]] = {}

    def step_done(self, result: StepResult, name: str, offset_ns: int) -> None:
        """Record a step whose batch has this name.

        A step applies its controls first. offset_ns: the clock offset applied to its batch's times; only for a step
        whose batch is recorded.
        """
        records = self._telemetry.records(Level.BATCHES)
        for control in result.step.controls:  # in their order: a session may be opened and closed by one step
            if records and control.flags & Flag.OPEN:
                self._open(control)
            if control.flags & Flag.CLOSE:
                self._end(control.session_key)
        if not records:
            if self._phases:
                self.finish()
            return
        if result.context == trace_context.NONE:
            return
        streams = len({frame.session_id for frame in result.members})
        batch = _Batch(result.step.taken_ns, result.ended_ns, result.decode_ns, streams, result.n_rows, result.number)
        trace_id = result.context[: trace_context.TRACE_ID_BYTES]
        with_frames = self._telemetry.records(Level.FRAMES)
        for frame in result.members:
            if not trace_context.is_sampled(frame.trace):
                continue
            phase = self._phases.get(frame.session_key)
            if phase is None or phase.parent != frame.trace:
                if phase is not None:
                    self._emit(phase, frame.session_key)
                phase = self._phases[frame.session_key] = _Phase(frame)
            phase.batch(frame, batch)
            if phase.trace_id != trace_id:
                phase.passed(result.context, trace_id)
            if with_frames:
                self._frame(phase, frame, result, name, offset_ns)

    def _open(self, control: QueuedFrame) -> None:
        """Remember the baggage. That of a refused session stays until its close, which may never come."""
        is_full = len(self._baggage) >= bounds.SESSIONS_PER_LINK_MAX and control.session_key not in self._baggage
        if control.options is not None and control.options.baggage and not is_full:
            self._baggage[control.session_key] = read_baggage(control.options.baggage)

    def finish(self, route_id: int | None = None) -> None:
        """End the spans of a route whose epoch is over, or of all."""
        for key in [key for key in (*self._phases, *self._baggage) if route_id is None or key[0] == route_id]:
            self._end(key)

    def _end(self, key: tuple[int, int]) -> None:
        phase = self._phases.pop(key, None)
        if phase is not None:
            self._emit(phase, key)
        self._baggage.pop(key, None)

    def _emit(self, phase: _Phase, key: tuple[int, int]) -> None:
        offset_ns = self._telemetry.wall_offset_ns()
        moments = phase.moments()
        n_batches = sum(moment.n_batches for moment in moments)
        attributes: dict[str, AttributeValue] = {
            names.ATTR_SESSION_ID: f"{phase.session_id:016x}",
            names.ATTR_STAGE_INDEX: self._stage_index,
            names.ATTR_BATCHES: n_batches,
            names.ATTR_WAIT: sum(moment.wait_ns for moment in moments) / 1e9,
            names.ATTR_WAIT_MAX: max(moment.wait_max_ns for moment in moments) / 1e9,
            names.ATTR_DECODE: sum(moment.decode_ns for moment in moments) / 1e9,
            names.ATTR_ROWS_MEAN: sum(moment.rows for moment in moments) / n_batches,
            names.ATTR_ROWS_MAX: max(moment.rows_max for moment in moments),
            names.ATTR_STREAMS_MEAN: sum(moment.streams for moment in moments) / n_batches,
            **self._baggage.get(key, {}),
        }
        if n_grouped := sum(moment.n_batches for moment in moments if moment.n_batches > 1):
            attributes[names.ATTR_BATCHES_GROUPED] = n_grouped
        if phase.n_links_dropped:
            attributes[names.ATTR_LINKS_DROPPED] = phase.n_links_dropped
        self._telemetry.emit(
            Finished(
                names.SPAN_BATCHES,
                phase.own,
                phase.parent,
                phase.started_ns + offset_ns,
                phase.ended_ns + offset_ns,
                attributes,
                [
                    Event(m.words(), m.at_ns + offset_ns, {names.ATTR_BATCH_ID: f"{self._stage_index}:{m.step}"})
                    for m in moments
                ],
                [Link(context, {names.ATTR_LINK: names.LINK_BATCH}) for context in phase.links.values()],
            )
        )

    def _frame(self, phase: _Phase, frame: QueuedFrame, result: StepResult, name: str, offset_ns: int) -> None:
        taken_ns = result.step.taken_ns
        wait_ns = taken_ns - frame.arrived_ns
        attributes: dict[str, AttributeValue] = {
            names.ATTR_SESSION_ID: f"{frame.session_id:016x}",
            names.ATTR_STAGE_INDEX: self._stage_index,
            names.ATTR_BATCH_ID: f"{self._stage_index}:{result.number}",
            names.ATTR_BATCH_ROWS: result.n_rows,
            names.ATTR_FRAME_POSITION: frame.position,
            names.ATTR_FRAME_ROWS: frame.n_rows,
            names.ATTR_FRAME_PREFILL: frame.is_prefill,
            names.ATTR_FRAME_WAIT_NS: wait_ns,
            names.ATTR_FRAME_UPSTREAM_WAIT_NS: frame.upstream_wait_ns,
        }
        self._telemetry.emit(
            Finished(
                name,
                trace_context.new_below(phase.own),
                phase.own,
                frame.arrived_ns + offset_ns,
                result.ended_ns + offset_ns,
                attributes,
                [Event(f"waited {wait_ns * MS:.2f} ms", taken_ns + offset_ns)],
                [Link(result.context, {names.ATTR_LINK: names.LINK_BATCH})],
                SpanKind.CONSUMER,
                result.error,
            )
        )


def read_baggage(header: str) -> dict[str, AttributeValue]:
    """Return the entries of a W3C baggage header as attributes; unreadable ones are left out."""
    found: dict[str, AttributeValue] = {}
    for entry in header.split(","):
        key, equals, value = entry.partition(";")[0].partition("=")
        if equals and key.strip() and len(found) < BAGGAGE_MAX:
            found[f"{names.BAGGAGE}{key.strip()}"] = urllib.parse.unquote(value.strip())
    return found
