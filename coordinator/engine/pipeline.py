"""The coordinator's engine room: admits requests, drives sessions through the stages, survives the loss of one.

Decisions live in `session` (one request) and `admission` (who runs); this module carries their frames out and the
stages' answers in. Everything here runs on the event loop.

Losing a link or a stage ends an epoch, not a request: running sessions pause, a new connection is made at the next
epoch, and each starts again from its history, with what came meanwhile. After `recovery_timeout_s` they are failed.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Hashable, Iterable, Sequence

from relayline.coordinator.engine.availability import Availability
from relayline.coordinator.engine.connection import Connection
from relayline.coordinator.engine.pipeline_config import PipelineConfig as PipelineConfig
from relayline.coordinator.engine.reconnect import Reconnector
from relayline.coordinator.engine.roster import Roster, StaticRoster
from relayline.coordinator.engine.stage_client import StageClient
from relayline.coordinator.engine.telemetry_control import greet
from relayline.coordinator.engine.token_sender import TokenSender
from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.coordinator.observe.description import describe_pipeline, describe_stages, overlap_since
from relayline.coordinator.observe.losses import lost_stage
from relayline.coordinator.observe.observer import Observer
from relayline.coordinator.schedule.groups import GroupPlanner
from relayline.coordinator.schedule.scheduler import Scheduler
from relayline.coordinator.sessions.admission import LANE_TRY_S, Admission
from relayline.coordinator.sessions.drafts import Acceptance
from relayline.coordinator.sessions.generation import GenerationRequest
from relayline.coordinator.sessions.prefixes import Prefixes
from relayline.coordinator.sessions.request_log import StreamRecord
from relayline.coordinator.sessions.session import OutFrame, Session, State
from relayline.coordinator.sessions.silence import SILENT_S
from relayline.coordinator.sessions.streams import AUDIENCE_MAX, Audience, SessionStream, sharing_key
from relayline.coordinator.sessions.suspects import Suspects, given_up
from relayline.coordinator.sessions.turnover import Turnover
from relayline.wire.common import bounds
from relayline.wire.common.errors import (
    InternalError,
    LaneLimitError,
    NotReadyError,
    ProtocolError,
    RelaylineError,
    StageLostError,
    from_wire,
)
from relayline.wire.common.phase import Phase as Phase
from relayline.wire.common.process import first_of
from relayline.wire.links.revocation import Revocations
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

log = logging.getLogger("relayline.coordinator")


class Pipeline:
    """One served pipeline; implements coordinator.sessions.generation.Generator."""

    def __init__(
        self,
        config: PipelineConfig,
        file: PipelineFile,
        is_end: Callable[[int], bool],
        roster: Roster | None = None,
        observer: Observer | None = None,
    ) -> None:
        """Raises UsageError for a list of revoked credentials that cannot be used."""
        self.config, self.file, self._is_end = config, file, is_end
        self._roster = roster or StaticRoster(config.addresses, config.names)
        self._revocations = Revocations(config.security)
        self._observer = observer or Observer()
        self._roster.watch(self._on_lost, self._on_heard)
        names = [str(stage.get("name") or f"stage {index}") for index, stage in enumerate(self._roster.describe())]
        lost_wait_s = min(config.lost_wait_s, config.recovery_timeout_s)
        self._availability = Availability(names, lost_wait_s, time.monotonic_ns())
        self._reconnector = Reconnector(config, self._roster, self._open, lambda: bool(self._audiences), self._fail_all)
        self.ready, self.epoch = asyncio.Event(), 0
        self._route_id = secrets.randbits(63)
        self._session_ids = itertools.count(secrets.randbits(31) << 32)
        self._audiences: dict[int, Audience] = {}  # by session id
        self._shared: dict[Hashable, Audience] = {}
        self.n_shared = 0  # requests that joined another's session
        admission = self._admission = Admission(1, 0, config.waiting_max, lambda new: self._prefixes.lanes_before(new))
        self._prefixes = Prefixes(config.prefix_lanes, self._session_ids, admission.free_lanes, admission.running)
        self._connection: Connection | None = None
        self._sender: TokenSender | None = None
        self._suspects, self._scheduler = Suspects(), Scheduler(config.schedule, GroupPlanner(()))
        self._instances: tuple[str, ...] = ()  # of the stages of the latest epoch
        self._paused: list[Session] = []  # sessions that ran when it was lost, and how that was
        self._paused_by: RelaylineError = StageLostError("")
        self._trying: asyncio.TimerHandle | None = None
        self._turnover = Turnover()
        self._dispatching, self._idle = False, asyncio.Event()
        self._acceptance = Acceptance() if config.schedule.draft and config.schedule.mode != "drain" else None
        self._lost: asyncio.Future[RelaylineError] = asyncio.get_running_loop().create_future()
        self._idle.set()

    # --- what the HTTP side sees --------------------------------------------------------------------------------------

    @property
    def ctx_tokens(self) -> int:
        """Tokens that one stream may hold; 0 until the stages have been connected."""
        return self._admission.ctx_tokens

    @property
    def n_lanes(self) -> int:
        """Streams that may run at once."""
        return self._admission.n_lanes

    @property
    def phase(self) -> Phase:
        """What clients get now."""
        return self._availability.phase

    def is_ready(self) -> bool:
        """Return whether a request would start now."""
        return self.phase is Phase.READY

    def check_ready(self) -> None:
        """Raise NotReadyError unless a request would be admitted now: also while a lost stage is waited for."""
        self._availability.check(time.monotonic_ns())

    def check_room(self) -> None:
        """Raise OverloadedError where the line is full."""
        self._admission.check_room(self._wait_s)

    def open(self, request: GenerationRequest) -> SessionStream:
        """Admit and start a request; see Generator.open."""
        self.check_ready()
        key = sharing_key(request) if self.config.share else request.request_id
        if (audience := self._shared.get(key)) is None or len(audience.streams) >= AUDIENCE_MAX:
            audience = self._admit(request, key)
            record = audience.opener
        else:
            self.n_shared += 1
            record = self._observer.joined(audience.session.record, request, time.monotonic_ns())
        stream = SessionStream(functools.partial(self._leave, audience, record))
        audience.join(stream)
        return stream

    def _admit(self, request: GenerationRequest, key: Hashable) -> Audience:
        acceptance = None if request.wants_logits else self._acceptance
        session = Session(next(self._session_ids), request, self._is_end, acceptance=acceptance)
        has_lane = self._admission.admit(session, self._wait_s)
        opener = self._observer.admitted(session.record, session.session_id, request, time.monotonic_ns())
        audience = self._audiences[session.session_id] = self._shared[key] = Audience(session, key, opener)
        self._idle.clear()
        if has_lane:
            self._start_all([session])
        return audience

    def _wait_s(self) -> int:
        """Return when a request that comes now is expected to get a lane."""
        now_ns, admission = time.monotonic_ns(), self._admission
        started = (session.record.started_ns for session in admission.running.values())
        running_ns = [now_ns - started_ns for started_ns in started if started_ns]
        return self._turnover.wait_s(len(admission.waiting), admission.n_ours, running_ns)

    def _leave(self, audience: Audience, record: StreamRecord, stream: SessionStream) -> None:
        if stream in audience.streams:
            audience.streams.remove(stream)
            self._observer.left(record, time.monotonic_ns())
        if not audience.streams and audience.session.session_id in self._audiences:
            self._finish(audience.session, [*self._prefixes.keep(audience.session), *audience.session.cancel()])

    @property
    def stages(self) -> Sequence[StageClient]:
        """The stages that are connected now, in layer order."""
        return self._connection.stages if self._connection else ()

    async def describe(self, since_ns: int | None = None, *, with_recent: bool = True) -> dict[str, object]:
        """Return topology and live counters; see Generator.describe."""
        asking = (self._status(index, stage, with_recent) for index, stage in enumerate(self.stages))
        statuses = await asyncio.gather(*asking)
        now_ns = time.monotonic_ns()
        live = {
            "now_ns": now_ns,
            **self._observer.figures(),
            **self._availability.describe(now_ns),
            "epoch": self.epoch,
            **self._admission.figures(),
            "shared_requests": self.n_shared,
            "prefixes": self._prefixes.figures(),
            "plan": self._scheduler.describe(),
            "link": self._connection.link.figures() if self._connection else {},
            "missing": self._roster.missing(),
        }
        known = [
            self._availability.describe_stage(index, now_ns) | entry
            for index, entry in enumerate(self._roster.describe())
        ]
        stages = describe_stages(self.file, self._roster.addresses(), statuses, known)
        return describe_pipeline(self.file, live, stages, statuses) | overlap_since(statuses, since_ns, now_ns)

    async def _status(self, index: int, stage: StageClient, with_recent: bool) -> pb.StatusResponse | None:
        is_doubted = self._availability.is_doubted(index)
        return None if is_doubted else await stage.status(with_recent=with_recent, with_memory=True)

    # --- life of the connection ---------------------------------------------------------------------------------------

    async def run(self, stopping: asyncio.Event) -> None:
        """Connect, serve and recover until `stopping` is set; then drain.

        Raises StartError or HandshakeError if the pipeline never became ready.
        """
        stop = asyncio.ensure_future(stopping.wait())
        looking = asyncio.create_task(self._look())
        try:
            while not stop.done():
                connected = asyncio.ensure_future(self._connect())
                try:
                    await first_of(stop, connected)
                finally:
                    if not connected.done():
                        connected.cancel()
                        await asyncio.gather(connected, return_exceptions=True)
                if connected.cancelled():
                    break
                connected.result()
                await first_of(stop, self._lost)
                if self._lost.done():
                    await self._disconnect(self._lost.result())
            await self._drain()
        finally:
            stop.cancel()
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            await self._teardown()

    async def _look(self) -> None:
        """Say which stages do not answer, and refuse those who have waited for one for long enough."""
        while True:
            await asyncio.sleep(bounds.BEAT_EVERY_S)
            now_ns = time.monotonic_ns()
            lines, is_over = self._availability.look(now_ns)
            for line in lines:
                log.warning("%s", line)
            if is_over:
                refusal = self._availability.refusal(now_ns)
                log.warning("requests are refused: %s", refusal.message)
                self._fail_if(self._came_while_lost, refusal)

    def _came_while_lost(self, session: Session) -> bool:
        is_new = self._availability.came_while_lost(session.record.admitted_ns)
        return is_new and not session.n_generated

    def _on_heard(self, index: int) -> None:
        if line := self._availability.heard(index, time.monotonic_ns()):
            log.info("%s", line)

    async def _connect(self) -> None:
        self._connection = await self._reconnector.connect(is_first=self.phase is Phase.LOADING)
        for index, facts in enumerate(self._connection.facts):
            self._on_heard(index)
            self._availability.serves(index, facts.instance_id)
        await greet(self._connection.stages, self._observer.pushed_level)
        self._resume(self._connection)

    async def _open(self, addresses: tuple[str, ...]) -> Connection:
        """Begin the next epoch: one attempt to connect."""
        self.epoch += 1
        self._lost = asyncio.get_running_loop().create_future()
        return await Connection.open(
            addresses,
            self.file,
            route_id=self._route_id,
            epoch=self.epoch,
            wire_dtype=self.config.wire_dtype,
            security=self.config.security,
            who=self._roster.identities(),
            revocations=self._revocations,
            name=self.config.name,
            stage_names=self.config.stage_names,
            on_return=self._on_return,
            on_lost=self._on_lost,
            on_heard=self._on_heard,
        )

    def _resume(self, connection: Connection) -> None:
        self._give_up_guilty(connection)
        planner = GroupPlanner(connection.stage_costs(), self.config.schedule.itl_stretch)
        self._prefixes.renew(connection.n_lanes, is_per_lane=planner.is_per_lane, there=connection.held)
        for session in self._admission.running.values():
            session.give_way()  # without a word: nothing of it is open in this epoch
        self._admission.resize(connection.n_lanes, connection.ctx_tokens)
        for session in self._admission.unfit():
            self._fail(session, self._admission.too_long(session))
        self._sender = TokenSender(connection.link, self.epoch, self._on_lost, self._observer.passes.sent)
        self._scheduler = Scheduler(self.config.schedule, planner, may_draft=connection.rewinds)
        connection.keep_costs(self._audiences, self._scheduler.refresh)
        connection.keep_watch(self._route_id, self._scheduler.under_way, self._is_sent, self._on_silent, self._on_lost)
        self._observer.connected(len(self.file.stages), connection.statuses)
        self._availability.enter(Phase.READY, time.monotonic_ns())
        self.ready.set()
        starting = self._suspects.starting(self._admission.running.values())
        self._scheduler.control(self._prefixes.left_behind(self._suspects.trusted(starting)))
        self._start_all(starting)
        self._dispatch()  # what is left behind is closed whether anybody starts or not
        fields = {"epoch": self.epoch, "stages": len(self.file.stages), "resumed": len(self._admission.running)}
        log.info("pipeline ready", extra={"fields": fields})

    async def _disconnect(self, error: RelaylineError) -> None:
        self._availability.lost(time.monotonic_ns())
        self.ready.clear()
        fields = {"epoch": self.epoch, "reason": error.message, "paused": len(self._admission.running)}
        log.warning("pipeline lost, recovering", extra={"fields": fields})
        stage = lost_stage(error, [stage.address for stage in self.stages], self.config.stage_names)
        self._observer.lost(error.message, time.monotonic_ns(), stage)
        self._pause(error)
        await self._teardown()

    def _pause(self, error: RelaylineError) -> None:
        self._paused, self._paused_by = self._suspects.paused(self._admission.running.values()), error

    def _give_up_guilty(self, connection: Connection) -> None:
        """End the requests that have brought stages down too often, see coordinator.sessions.suspects."""
        before, self._instances = self._instances, connection.instances
        paused = [session for session in self._paused if session.session_id in self._admission.running]
        self._paused, error = [], self._paused_by
        if self._instances != before or isinstance(error, InternalError):
            for session in self._suspects.accuse(paused):
                self._fail(session, given_up(error))

    async def _teardown(self) -> None:
        if self._sender is not None:
            await self._sender.close()
            self._sender = None
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    async def _drain(self) -> None:
        """Let running requests end, bounded by DRAIN_TIMEOUT_S, then end the rest."""
        self._availability.enter(Phase.DRAINING, time.monotonic_ns())
        self.ready.clear()
        if self._sender is not None:  # else nobody is left to end them
            idle = asyncio.ensure_future(self._idle.wait())
            await asyncio.wait((idle, self._lost), timeout=bounds.DRAIN_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            idle.cancel()
        self._fail_all(NotReadyError("the server is shutting down"))
        if self._sender is not None and not self._lost.done():
            await self._sender.flush(bounds.HANDSHAKE_TIMEOUT_S)

    # --- frames out, answers in ---------------------------------------------------------------------------------------

    def _start_all(self, sessions: Iterable[Session]) -> None:
        if not self.phase.is_paused:  # else the next epoch starts whoever has a lane
            for session in sessions:
                self._start(session)

    def _start(self, session: Session) -> None:
        self._observer.started(session.record, time.monotonic_ns())
        self._scheduler.control(self._prefixes.start(session))
        self._scheduler.prompt(session)
        self._dispatch()

    def _dispatch(self) -> None:
        """Send what the scheduler lets go, once for everything that this turn of the loop brings."""
        if not self._dispatching:
            self._dispatching = True
            asyncio.get_running_loop().call_soon(self._dispatch_now)

    def _dispatch_now(self) -> None:
        self._dispatching = False
        if self._sender is None:
            return
        now_ns = time.monotonic_ns()
        try:
            self._start_all(self._scheduler.orphans())
            for envelope in self._scheduler.take(now_ns):
                context = self._observer.sent(envelope, now_ns)
                self._sender.push(envelope, context, now_ns)
        except Exception as error:  # a bug of ours: the next epoch begins with a new scheduler
            log.exception("deciding what leaves failed")
            self._on_lost(InternalError(f"deciding what leaves failed: {error}"))

    def _on_lost(self, error: RelaylineError) -> None:
        if not self._lost.done():
            self._lost.set_result(error)

    def _on_return(self, message: pb.ReturnEnvelope) -> None:
        if message.epoch != self.epoch:
            return
        now_ns = time.monotonic_ns()
        for passed in message.progress:
            self._scheduler.passed(passed.session_id, passed.position, now_ns)
            self._observer.progressed(passed.session_id, passed.position, now_ns)
            audience = self._audiences.get(passed.session_id)
            if audience is not None and audience.session.state is State.PREFILL:
                self._start_all(self._suspects.passed(passed.session_id, passed.position))
        tellings: list[Callable[[], None]] = []
        try:
            for sample in message.samples:
                self._on_sample(sample, now_ns, tellings)
            self._dispatch_now()  # what the stages wait for leaves before audiences are told and write their answers
        finally:
            for tell in tellings:
                tell()
        self._observer.returned(message, now_ns)
        self._observer.summarised(message.summaries)
        for fault in message.faults:
            self._on_fault(fault)
            self._dispatch()

    def _on_sample(self, sample: pb.Sampled, now_ns: int, tellings: list[Callable[[], None]]) -> None:
        self._scheduler.answered(sample.session_id, sample.position, now_ns)
        if (audience := self._audiences.get(sample.session_id)) is None:
            return
        if sample.token >= self.file.n_vocab:
            self._on_lost(ProtocolError(f"the last stage sampled token {sample.token} of {self.file.n_vocab}"))
            return
        session = audience.session
        logprob = sample.logprob if session.request.sampling.n_logprobs >= 0 else None
        top = tuple((entry.token, entry.logprob) for entry in sample.top)
        event, frames = session.sampled(sample.position, sample.token, logprob, top, sample.logits)
        if event is not None:
            tellings.append(functools.partial(audience.put, event))
            reason, is_drafted = event.finish_reason, event.is_drafted
            self._observer.token(session.record, sample.position, reason, now_ns, is_drafted=is_drafted)
            self._start_all(self._suspects.cleared(session))
        if session.state is State.DONE:
            self._finish(session, [*self._prefixes.keep(session), *frames])
        else:
            for frame in frames:
                self._scheduler.decode(frame)

    def _on_fault(self, fault: pb.SessionFault) -> None:
        error = from_wire(fault.label, f"stage {fault.stage_index}: {fault.message}")
        if fault.session_id == 0:  # of the whole route
            self._on_lost(error)
        audience = self._audiences.get(fault.session_id)
        bad = (fault.session_id, audience.session.copied_from if audience else 0)
        self._scheduler.control(self._prefixes.refused(bad, is_full=isinstance(error, LaneLimitError)))
        if audience is None or audience.session.state is State.WAITING:  # a session that has sent nothing has no fault
            return
        session = audience.session
        # Another coordinator had the lane that its open was to get.
        waits = isinstance(error, LaneLimitError) and not fault.position and self._admission.put_back(session)
        if waits or session.may_replay(error, is_retryable=fault.retryable):
            if not waits or session.n_refused == 1:  # it may be refused for minutes
                fields = {"request": session.request.request_id, "why": str(error)}
                log.info("session waits for a lane" if waits else "session replayed", extra={"fields": fields})
                self._observer.replayed(session.record, error.message, time.monotonic_ns())
            self._scheduler.forget(session.session_id, time.monotonic_ns())
            if waits:
                self._keep_trying()
                self._scheduler.control(session.give_way())
                self._start_all(self._suspects.gave_way(session))
            else:
                session.count_replay()
                self._start(session)
            return
        self._fail(session, error)

    def _is_sent(self) -> bool:
        return self._sender is not None and self._sender.is_idle()

    def _on_silent(self, session_ids: Iterable[int]) -> None:
        """Take it for a fault of theirs that nobody has anything of these sessions any more."""
        text = f"nothing came for {SILENT_S:.0f} s and no stage has anything of it any more"
        for session_id in session_ids:
            last, label = len(self.file.stages) - 1, StageLostError.label
            self._on_fault(
                pb.SessionFault(session_id=session_id, stage_index=last, label=label, message=text, retryable=True)
            )
        self._dispatch()

    def _keep_trying(self) -> None:
        if self._trying is None and self._admission.is_short:
            self._trying = asyncio.get_running_loop().call_later(LANE_TRY_S, self._try_lanes)

    def _try_lanes(self) -> None:
        self._trying = None
        for session in self._admission.try_lanes():
            self._start_all(self._suspects.joining(session))
        self._keep_trying()

    def _fail(self, session: Session, error: RelaylineError) -> None:
        session.record.error, session.record.error_text = error.label, error.message
        self._audiences[session.session_id].put(error)
        self._finish(session, session.cancel())

    def _finish(self, session: Session, frames: Sequence[OutFrame]) -> None:
        """Send the session's last frames, give its lane to the next in line."""
        if (audience := self._audiences.pop(session.session_id, None)) and self._shared.get(audience.key) is audience:
            del self._shared[audience.key]
        self._observer.ended(session.record, now_ns := time.monotonic_ns())
        if session.record.started_ns:
            self._turnover.left(now_ns - session.record.started_ns)
        self._scheduler.forget(session.session_id, now_ns)
        self._scheduler.control(frames)
        self._dispatch()
        for following in self._admission.leave(session):
            self._start_all(self._suspects.joining(following))
        self._start_all(self._suspects.cleared(session))
        if not self._audiences:
            self._idle.set()

    def _fail_all(self, error: RelaylineError) -> None:
        self._fail_if(lambda _: True, error if error.retryable else StageLostError(error.message))

    def _fail_if(self, chosen: Callable[[Session], bool], error: RelaylineError) -> None:
        for audience in list(self._audiences.values()):
            if chosen(audience.session):
                self._fail(audience.session, error)
