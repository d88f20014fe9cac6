"""The coordinator's one entry to telemetry: turns events of requests into spans, metrics and ring entries.

The pipeline and the HTTP side call a method here for each event of a request, with its time. Nothing here affects
serving or raises into it. At any level a token costs one cached observation and a few attribute writes. Everything else
happens once per request.

A session's spans stay open for at most SUMMARY_WAIT_S after its end, until every stage has summed it up.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence

from relayline.coordinator.observe.pass_traces import PassTraces, StatusesOf
from relayline.coordinator.observe.request_metrics import RequestMetrics
from relayline.coordinator.observe.tracing import OffsetsOf, Tracing
from relayline.coordinator.observe.usage import UsageByKey
from relayline.coordinator.sessions.frame import Frame
from relayline.coordinator.sessions.generation import GenerationRequest
from relayline.coordinator.sessions.request_log import UNKNOWN, RequestLog, RequestRecord, SessionRecord, StreamRecord
from relayline.wire.envelopes.frames import Flag
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.telemetry import names
from relayline.wire.telemetry.telemetry import Level, Telemetry

SUMMARY_WAIT_S = 5.0  # for the stages' summaries of an ended session, which come with their next step
ARRIVALS_MAX = 16_384  # answers of stages whose arrival is remembered; half a megabyte
AWAITED_MAX = 4_096  # ended sessions that wait for summaries; the next one does not wait

Later = Callable[[float, Callable[[], None]], object]
"""Calls a function after so many seconds, unless the process ends before: loop.call_later."""


class Observer:
    """Sees every request of one pipeline. Event loop only."""

    def __init__(
        self,
        telemetry: Telemetry | None = None,
        *,
        model_name: str = "",
        sampler_ratio: float = 1.0,
        later: Later | None = None,
        pushed_level: Level | None = None,
    ) -> None:
        """Without `later` sessions do not wait for the stages' summaries.

        `pushed_level` is the level that stages are set to when they connect; None leaves their own.
        """
        self.telemetry = telemetry or Telemetry()
        self.tracing = Tracing(self.telemetry, sampler_ratio)
        self.passes = PassTraces(self.telemetry, later, lambda: self.tracing.sampler_ratio)
        self.metrics = RequestMetrics(model_name)
        self.log, self.usage = RequestLog(), UsageByKey()
        self.pushed_level = pushed_level
        self._later = later
        self._sessions: dict[int, SessionRecord] = {}  # running ones and those that wait for summaries
        self._awaited: set[int] = set()
        self.arrivals_ns: collections.deque[int] = collections.deque(maxlen=ARRIVALS_MAX)
        """When the latest answers of stages came, ascending."""
        self.back_ns: int | None = None
        """Of the answer that is being taken: arrival here less departure on the stage's clock. None: not known."""
        self._offsets_ns: OffsetsOf = tuple
        self._n_stages = 0
        self.n_connections = 0
        self.loss: tuple[int | None, str] | None = None
        """Which stage was lost, where it is known, and why; None while all stand."""
        self.n_tokens = 0  # generated since the start
        self.n_drafted = self.n_accepted = 0  # guesses that left, and those of them that were right
        self.n_prompt_tokens = self.n_copied_tokens = 0  # of prompts that have brought their first token

    # --- the HTTP side ------------------------------------------------------------------------------------------------

    def received(self, record: RequestRecord, carrier: Mapping[str, str]) -> None:
        """A request that will generate has arrived. `carrier` holds its headers, with lower-case names."""
        if self.telemetry.level > Level.OFF:
            self.log.add(record)
        self.tracing.received(record, carrier)

    def answered(self, record: RequestRecord, now_ns: int) -> None:
        """The last byte of its answer has been handed over, or its client has left."""
        record.ended_ns = now_ns
        self.tracing.answered(record)

    # --- the pipeline side: life of a session -------------------------------------------------------------------------

    def admitted(
        self,
        session: SessionRecord,
        session_id: int,
        request: GenerationRequest,
        now_ns: int,
        record: RequestRecord | None = None,
    ) -> StreamRecord:
        """A request was admitted with a new session, which may still wait for a lane.

        `record` is the record of its HTTP request, as in `joined`.
        """
        session.session_id, session.request_id = session_id, request.request_id
        session.n_prompt = len(request.prompt_tokens)
        session.looks_for_prefix = request.cache_prompt
        session.is_embedding = bool(request.sampling.number("pooling"))
        session.admitted_ns = now_ns
        session.origin = self._stream(session, request, now_ns, record)
        if record is not None and record.span is not None:
            session.trace.baggage = record.baggage
        if self.loss is not None:
            stage, why = self.loss
            session.event(names.EVENT_HELD, now_ns, why, stage)
        self._sessions[session_id] = session
        return session.origin

    def joined(
        self, session: SessionRecord, request: GenerationRequest, now_ns: int, record: RequestRecord | None = None
    ) -> StreamRecord:
        """A request was admitted as a further reader of a running session."""
        stream = self._stream(session, request, now_ns, record)
        stream.is_shared = True
        self.tracing.joined(stream)
        return stream

    @staticmethod
    def _stream(
        session: SessionRecord, request: GenerationRequest, now_ns: int, record: RequestRecord | None
    ) -> StreamRecord:
        stream = StreamRecord(request.request_id, session, now_ns, request=record)
        if record is not None:
            record.streams.append(stream)
        return stream

    def started(self, session: SessionRecord, now_ns: int) -> None:
        """The session has a lane and sends its first rows. Starting again ends a pause and changes nothing else."""
        if not session.started_ns:
            session.started_ns = now_ns
            self.tracing.started(session)
        elif session.is_paused:
            session.event(names.EVENT_RESUMED, now_ns)
        session.is_paused = False

    def sent(self, frames: Sequence[Frame], now_ns: int) -> bytes:
        """An envelope leaves for stage 0; returns the trace context that it carries."""
        for frame in frames:
            if not frame.flags & (Flag.PREFILL | Flag.DRAFTED):
                continue
            session = self._sessions.get(frame.session_id)
            if session is not None and frame.flags & Flag.PREFILL:
                session.prompt.sent(frame.position, len(frame.tokens), now_ns)
            elif session is not None:
                self._drafted(session, frame.n_drafted)
        return self.passes.leaves(frames, now_ns, self.record_of)

    def record_of(self, session_id: int) -> SessionRecord:
        """Return the record of a session that runs or has just ended; UNKNOWN for any other."""
        return self._sessions.get(session_id, UNKNOWN)

    def _drafted(self, session: SessionRecord, n_tokens: int) -> None:
        session.guesses.n_sent += n_tokens
        self.n_drafted += n_tokens
        self.metrics.drafted(n_tokens)

    def progressed(self, session_id: int, position: int, now_ns: int) -> None:
        """Prompt rows up to `position` have passed the last stage."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.prompt.answered(position, now_ns)

    def token(
        self,
        session: SessionRecord,
        position: int,
        finish_reason: str | None,
        now_ns: int,
        *,
        is_drafted: bool = False,
    ) -> None:
        """The token for `position` has arrived, or an embedding has. The last one has a finish reason."""
        if finish_reason is not None:
            session.finish_reason = finish_reason
        self.n_tokens += not session.is_embedding
        if is_drafted:
            session.guesses.n_accepted += 1
            self.n_accepted += 1
            self.metrics.accepted.inc()
        gap_ns = session.token(position, now_ns)
        if not session.is_embedding:
            self.metrics.token(gap_ns)
        if gap_ns and self.back_ns is not None:  # the first token of an answer
            session.trace.back_ns += self.back_ns
            session.trace.n_back += 1
        if gap_ns is None:
            self.n_prompt_tokens += session.n_prompt
            self.n_copied_tokens += session.n_copied
            self.metrics.read(session.n_prompt if session.looks_for_prefix else 0, session.n_copied)
            self.tracing.first_token(session)
            session.trace.next_phase()

    def figures(self) -> dict[str, int]:
        """Return the token counts since the start, for GET /v1/pipeline.

        `copied_tokens`: prompt tokens copied from the prefix cache. `accepted_tokens`: right guesses among the drafted.
        """
        return {
            "generated_tokens": self.n_tokens,
            "prompt_tokens": self.n_prompt_tokens,
            "copied_tokens": self.n_copied_tokens,
            "drafted_tokens": self.n_drafted,
            "accepted_tokens": self.n_accepted,
        }

    def replayed(self, session: SessionRecord, why: str, now_ns: int) -> None:
        """The session starts again, because a stage refused one of its frames."""
        session.event(names.EVENT_REPLAYED, now_ns, why)
        self.metrics.replays.inc()

    def ended(self, session: SessionRecord, now_ns: int) -> None:
        """The session has ended, for any reason. The stages send its summary after they have applied its close."""
        if session.ended_ns:
            return
        session.end(now_ns)
        self.passes.session_ended(session.session_id)
        self.metrics.session_ended(session)
        waits = (
            self._later is not None
            and self._n_stages
            and session.started_ns
            and self.telemetry.level > Level.OFF
            and len(self._awaited) < AWAITED_MAX
        )
        if not waits or self._later is None:
            self._finalize(session)
            return
        self._awaited.add(session.session_id)
        self._later(SUMMARY_WAIT_S, lambda: self._finalize(session))

    def left(self, stream: StreamRecord, now_ns: int) -> None:
        """A reader has left its session, which may continue for others."""
        stream.ended_ns = now_ns
        stream.n_tokens = stream.n_tokens or stream.session.n_tokens
        self.metrics.stream_ended(stream)
        if stream.is_shared:
            self.tracing.left(stream)

    def summarised(self, summaries: Iterable[pb.SessionSummary]) -> None:
        """A stage has applied the close of sessions."""
        for summary in summaries:
            session = self._sessions.get(summary.session_id)
            if session is None:
                continue
            stage = session.stage(summary.stage_index)
            stage.add(summary)
            if session.ended_ns:
                stage.has_seen_end = True
                if sum(stage.has_seen_end for stage in session.stages.values()) >= self._n_stages:
                    self._finalize(session)

    def _finalize(self, session: SessionRecord) -> None:
        if session.is_final:
            return
        session.is_final = True
        self._sessions.pop(session.session_id, None)
        self._awaited.discard(session.session_id)
        self.tracing.final(session, self._n_stages, self._offsets_ns)

    # --- the pipeline side: life of the connection --------------------------------------------------------------------

    def returned(self, message: pb.ReturnResponse, now_ns: int) -> None:
        """A stage's message that arrived at now_ns has been handled, and the frames that follow from it have left."""
        self.arrivals_ns.append(now_ns)
        self.passes.returned(message, now_ns)

    def connected(self, n_stages: int, statuses: StatusesOf | None = None, offsets_ns: OffsetsOf = tuple) -> None:
        """All stages are connected in a new epoch. Paused sessions will start again from their history, one by one.

        offsets_ns: returns what to add to each stage's clock to get this process's (None: not known).
        """
        self._n_stages, self._offsets_ns = n_stages, offsets_ns
        self.loss = None
        self.passes.connected(n_stages, statuses)
        self.n_connections += 1
        if self.n_connections > 1:
            self.metrics.recoveries.inc()

    def lost(self, why: str, now_ns: int, stage: int | None = None) -> None:
        """The connection is lost. Running sessions pause, and no summary will come.

        `stage` is the index of the lost stage, if known.
        """
        self.loss = (stage, why)
        self.passes.lost(why, now_ns)
        for session in self._sessions.values():
            if session.started_ns and not session.ended_ns and not session.is_paused:
                session.is_paused = True
                session.event(names.EVENT_PAUSED, now_ns, why, stage)
            elif not (session.started_ns or session.ended_ns):
                session.event(names.EVENT_HELD, now_ns, why, stage)
        self._finalize_all()

    def slept(self) -> None:
        """The connection was ended so that the stages can free their memory: the next one is no recovery."""
        self.loss, self.n_connections = None, 0

    def woke(self, took_s: float, now_ns: int) -> None:
        """The stages have loaded again, which the sessions of this moment have waited for."""
        for session in self._sessions.values():
            if not session.ended_ns:
                session.event(names.EVENT_WOKEN, now_ns, f"the stages loaded in {took_s:.1f} s")

    def close(self) -> None:
        """End sessions that wait for summaries, and windows that wait for answers."""
        self._finalize_all()
        self.passes.close()

    def _finalize_all(self) -> None:
        for session_id in list(self._awaited):
            self._finalize(self._sessions[session_id])
