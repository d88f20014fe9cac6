"""Plain records of requests, and a bounded ring of the latest ones. Pure.

Three records, from the outside in: one HTTP request (`RequestRecord`) has one `StreamRecord` per choice, and each
stream reads one session (`SessionRecord`); identical deterministic requests may read the same session. Times are this
process's monotonic nanoseconds; 0 means not yet.

Nothing here holds a prompt or an answer. A record holds its span only as a handle: `coordinator.observe.tracing` makes
and ends spans.
"""

from __future__ import annotations

import array
import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from relayline.coordinator.sessions.media_record import MediaRecord
from relayline.coordinator.sessions.tenants import ANYONE, Tenant
from relayline.wire.common.errors import RelaylineError
from relayline.wire.envelopes.frames import TRACE_BYTES
from relayline.wire.telemetry.session_sums import SessionSums

if TYPE_CHECKING:
    from opentelemetry.trace import Span

RING_REQUESTS_MAX = 512  # requests that the ring remembers; with their chunks and events some 2 MB
# Choices of these together: a body of embeddings has as many. A short one takes 2 kB, one of thousands of tokens 20 kB.
RING_STREAMS_MAX = 2_048
CHUNKS_MAX = 256  # prefill chunks of one session that are remembered; later ones are only counted
EVENTS_MAX = 64  # pauses, resumptions and replays of one session that are remembered
PASSES_MAX = 128  # traces of passes that a phase of a session links to, the latest; about two minutes of them
GAPS_MAX = 2_048  # times between tokens of an ended session that are remembered, the latest; 16 kB
BAGGAGE_BYTES_MAX = 2_048  # of a request's W3C baggage; a longer one is not passed on
NO_TRACE = bytes(TRACE_BYTES)


@dataclasses.dataclass(slots=True)
class ChunkRecord:
    """One prefill chunk of a session."""

    position: int  # of its first row
    n_rows: int
    sent_ns: int
    answered_ns: int = 0


@dataclasses.dataclass(slots=True)
class PromptChunks:
    """The prefill chunks of a session, in order; beyond CHUNKS_MAX they are only counted."""

    chunks: list[ChunkRecord] = dataclasses.field(default_factory=list)
    n_dropped: int = 0

    def sent(self, position: int, n_rows: int, now_ns: int) -> None:
        """Note that rows of the prompt left."""
        if len(self.chunks) < CHUNKS_MAX:
            self.chunks.append(ChunkRecord(position, n_rows, now_ns))
        else:
            self.n_dropped += 1

    def answered(self, position: int, now_ns: int) -> None:
        """Note that the rows up to `position` have passed the last stage. An echo changes nothing."""
        for chunk in reversed(self.chunks):
            if chunk.position + chunk.n_rows == position and not chunk.answered_ns:
                chunk.answered_ns = now_ns
                return


@dataclasses.dataclass(slots=True)
class Guesses:
    """Draft tokens of a session."""

    n_sent: int = 0
    n_accepted: int = 0


@dataclasses.dataclass(slots=True)
class EventRecord:
    """Something that happened to a running session from outside: paused, resumed, replayed."""

    name: str
    at_ns: int
    detail: str = ""
    stage: int | None = None  # the lost stage, if known


@dataclasses.dataclass(slots=True)
class StageRecord(SessionSums):
    """The sums of one stage for a session, of all its summaries."""

    has_seen_end: bool = False  # it has summed up since the session ended

    @property
    def batch_rows_mean(self) -> float:
        """Rows of its decode steps, batch mates included, on average."""
        return self.batch_rows_sum / self.n_decode_steps if self.n_decode_steps else 0.0


@dataclasses.dataclass(slots=True)
class PassRoots:
    """Roots of the traces of passes in which rows of a session left, 25 bytes each: those of one phase."""

    roots: list[bytes] = dataclasses.field(default_factory=list)
    n_dropped: int = 0

    def add(self, root: bytes) -> None:
        """Note that a row left in a pass of this trace; the oldest beyond PASSES_MAX are forgotten."""
        if self.roots and self.roots[-1] is root:
            return  # nearly always
        self.roots.append(root)
        if len(self.roots) > PASSES_MAX:
            del self.roots[0]
            self.n_dropped += 1


@dataclasses.dataclass(slots=True)
class Trace:
    """A session's own trace, see coordinator.observe.tracing."""

    context: bytes = NO_TRACE
    """The trace context that its frames carry: of its current span. Made once per phase, not per token."""
    baggage: str = ""  # of its request, as W3C's header says it; travels with its opens
    prefill_span: Span | None = None
    decode_span: Span | None = None
    passes: PassRoots = dataclasses.field(default_factory=PassRoots)
    prefill_passes: tuple[bytes, ...] = ()  # roots of the phase before
    back_ns: int = 0  # of its decode answers: arrival here less departure on the last stage's clock, summed
    n_back: int = 0  # of how many answers

    def next_phase(self) -> None:
        """The prompt has been read; later frames belong to the next phase."""
        self.prefill_passes = tuple(self.passes.roots)
        self.passes.roots = []


@dataclasses.dataclass(slots=True)
class Gaps:
    """Times between tokens, condensed."""

    n: int = 0
    mean_ns: int = 0
    p50_ns: int = 0
    p95_ns: int = 0
    max_ns: int = 0
    latest_ns: array.array[int] = dataclasses.field(default_factory=lambda: array.array("q"), compare=False)
    """The latest GAPS_MAX themselves."""


@dataclasses.dataclass(slots=True, eq=False)
class SessionRecord:
    """One generation on the stages."""

    session_id: int = 0
    request_id: str = ""  # of the stream that opened it
    n_prompt: int = 0
    n_copied: int = 0  # tokens of it that were copied from a kept lane
    looks_for_prefix: bool = True  # whether any of it may be copied
    n_tokens: int = 0
    guesses: Guesses = dataclasses.field(default_factory=Guesses)
    admitted_ns: int = 0
    started_ns: int = 0  # got its lane
    first_token_ns: int = 0
    last_token_ns: int = 0
    ended_ns: int = 0
    finish_reason: str = ""
    error: str = ""  # label of the error that ended it
    error_text: str = ""  # the error's message
    trace: Trace = dataclasses.field(default_factory=Trace)
    prompt: PromptChunks = dataclasses.field(default_factory=PromptChunks)
    events: list[EventRecord] = dataclasses.field(default_factory=list)
    stages: dict[int, StageRecord] = dataclasses.field(default_factory=dict)
    gaps_ns: array.array[int] = dataclasses.field(default_factory=lambda: array.array("q"))
    """Times between its tokens while it runs, at most max_tokens; condensed and emptied at the end."""
    gaps: Gaps = dataclasses.field(default_factory=Gaps)
    is_final: bool = False  # nothing will be added
    is_paused: bool = False  # the epoch in which it ran was lost, and it has not started again
    origin: StreamRecord | None = None  # the stream that opened it
    is_embedding: bool = False  # its only answer is not a token

    def token(self, position: int, now_ns: int) -> int | None:
        """Note the token for `position`; returns the time since the one before it, None for the first."""
        self.n_tokens += not self.is_embedding
        if (chunks := self.prompt.chunks) and not chunks[-1].answered_ns:
            self.prompt.answered(position, now_ns)  # the token is the answer to the last chunk
        gap_ns = None
        if self.last_token_ns:
            gap_ns = now_ns - self.last_token_ns  # 0 for one that came together with the one before it
            self.gaps_ns.append(gap_ns)
        else:
            self.first_token_ns = now_ns
        self.last_token_ns = now_ns
        return gap_ns

    def event(self, name: str, now_ns: int, detail: str = "", stage: int | None = None) -> None:
        """Note an event; beyond EVENTS_MAX they are forgotten."""
        if len(self.events) < EVENTS_MAX:
            self.events.append(EventRecord(name, now_ns, detail, stage))

    def end(self, now_ns: int) -> None:
        """Note the end and condense the times between tokens."""
        self.ended_ns = now_ns
        self.gaps = condense(self.gaps_ns)
        self.gaps_ns = array.array("q")

    def stage(self, index: int) -> StageRecord:
        """Return the record of one stage, made when it is first asked for."""
        return self.stages.setdefault(index, StageRecord())


UNKNOWN = SessionRecord()
"""Placeholder for a session without a record. Nothing is ever written into it."""


@dataclasses.dataclass(slots=True, eq=False)
class StreamRecord:
    """One choice of a request, or one request that did not come over HTTP."""

    request_id: str
    session: SessionRecord
    opened_ns: int
    is_shared: bool = False  # reads a session that another request opened
    ended_ns: int = 0
    finish_reason: str = ""
    error: str = ""
    n_tokens: int = 0  # as the client counts: up to a stop string
    n_thought: int = 0  # of those
    n_cached: int = 0  # of the prompt, tokens that were copied; counted for the first choice of each prompt
    first_token_ns: int = 0
    request: RequestRecord | None = None
    span: Span | None = None  # of a joiner; the opener has the session's spans
    stop: Callable[[RelaylineError], None] | None = None  # ends it with an error; None once it has ended

    @property
    def asked_ns(self) -> int:
        """When times that its client waits count from: admission, or earlier, where its images and audio came first."""
        media = self.request.media if self.request is not None else None
        return self.opened_ns if media is None else min(media.start_ns, self.opened_ns)

    @property
    def ttft_ns(self) -> int | None:
        """Time to the first token; None while there is none. It is there already where a shared session has one."""
        first_ns = self.session.first_token_ns
        return max(first_ns, self.opened_ns) - self.asked_ns if first_ns else None

    def outcome(self) -> tuple[str, str]:
        """Return (finish reason, label of the error); both empty while it runs."""
        if self.finish_reason:
            return self.finish_reason, ""
        if self.error or self.session.error:
            return "error", self.error or self.session.error
        if self.session.finish_reason and self.ended_ns:
            return self.session.finish_reason, ""
        return ("abort", "cancelled") if self.ended_ns else ("", "")


@dataclasses.dataclass(slots=True, eq=False)
class RequestRecord:
    """One HTTP request that generates."""

    request_id: str  # x-request-id
    method: str
    route: str
    received_ns: int
    unix_offset_ns: int = 0  # what turns monotonic times of this request into unix times
    completion_id: str = ""  # `id` in the reply's body
    model: str = ""
    status: int = 0
    error: str = ""
    error_text: str = ""  # the message that the client gets
    baggage: str = ""  # W3C's, as a header says it
    is_detached: bool = False  # its answer goes on after the reply: a background response's
    is_whole: bool = False  # all of a streamed answer has been handed over; closing the connection loses nothing now
    n_prompt: int = 0
    tokenize_start_ns: int = 0
    tokenize_end_ns: int = 0
    media: MediaRecord | None = None  # of a request with images or audio, once it has been read
    grammar_start_ns: int = 0  # asked for; 0 where the request needs none
    grammar_end_ns: int = 0
    ended_ns: int = 0
    trace_id: str = ""  # 32 hexadecimal digits; empty when it is not traced
    streams: list[StreamRecord] = dataclasses.field(default_factory=list)
    span: Span | None = None
    tenant: Tenant = ANYONE  # whose key it has shown

    def stop(self, error: RelaylineError) -> int:
        """End all choices that run or wait, with this error for the client; returns how many these were."""
        stops = [stream.stop for stream in self.streams if stream.stop is not None]
        for stop in stops:
            stop(error)
        return len(stops)

    def stream(self, request_id: str) -> StreamRecord | None:
        """Return the choice with this id, if it was opened."""
        return next((stream for stream in self.streams if stream.request_id == request_id), None)


class RequestLog:
    """The latest requests, found by any of their ids."""

    def __init__(self, requests_max: int = RING_REQUESTS_MAX, streams_max: int = RING_STREAMS_MAX) -> None:
        self._requests_max, self._streams_max = requests_max, streams_max
        self._records: collections.deque[RequestRecord] = collections.deque()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(self._records)

    def add(self, record: RequestRecord) -> None:
        """Remember a request; the oldest is forgotten when the ring is full. Where the choices of all are too many, the
        oldest go that have ended: admission bounds those that run.
        """
        if len(self._records) >= self._requests_max:
            self._records.popleft()
        n_surplus = sum([len(each.streams) for each in self._records]) - self._streams_max
        if n_surplus > 0:
            self._forget_ended(n_surplus)
        self._records.append(record)

    def _forget_ended(self, n_streams: int) -> None:
        kept: collections.deque[RequestRecord] = collections.deque()
        for record in self._records:
            if n_streams > 0 and record.ended_ns:
                n_streams -= len(record.streams)
            else:
                kept.append(record)
        self._records = kept

    def find(self, wanted: str) -> RequestRecord | None:
        """Return the latest request with this x-request-id, completion id, or id of one of its choices."""
        for record in reversed(self._records):
            if wanted in (record.request_id, record.completion_id) or record.stream(wanted) is not None:
                return record
        return None

    def last(self) -> RequestRecord | None:
        """Return the request that ended last, or the latest one if none has ended."""
        ended = [record for record in self._records if record.ended_ns]
        if ended:
            return max(ended, key=lambda record: record.ended_ns)
        return self._records[-1] if self._records else None

    def sessions(self) -> dict[int, SessionRecord]:
        """Return each remembered session by its id."""
        return {stream.session.session_id: stream.session for record in self._records for stream in record.streams}

    def owners(self) -> dict[int, str]:
        """Return the id of the stream that opened each remembered session, by session id."""
        return {
            stream.session.session_id: stream.session.request_id
            for record in self._records
            for stream in record.streams
        }


def condense(gaps_ns: array.array[int]) -> Gaps:
    """Return count, mean, median and 95th percentile (nearest rank) and maximum, and the latest themselves."""
    if not gaps_ns:
        return Gaps()
    ordered = sorted(gaps_ns)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    mean, latest = sum(ordered) // len(ordered), gaps_ns[-GAPS_MAX:]
    return Gaps(len(ordered), mean, ordered[len(ordered) // 2], p95, ordered[-1], latest)
