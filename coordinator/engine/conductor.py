"""Every decision about requests, lanes and epochs: start, replay, give up, keep. Pure.

An event is a method call, with the time where time matters. It returns instructions in order
(`coordinator.engine.instructions`). Nothing here waits, sends, logs or looks at a clock. Two shells carry instructions
out: `coordinator.engine.pipeline` with futures, tasks and gRPC, and the simulation of a cluster
(`deploy.testing.cluster`) on virtual time.

It uses these parts: `admission` (lanes, and the line of waiting requests), `readers` (sessions and their readers),
`suspects` (requests that crash stages), `prefixes` (the prefix cache), `availability` (the state that clients see). One
`scheduler` per epoch chooses the rows that leave for stage 0, and when.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from relayline.coordinator.engine.availability import Availability
from relayline.coordinator.engine.epoch_facts import EpochFacts
from relayline.coordinator.engine.instructions import (
    Dispatch,
    Draft,
    Ended,
    Generated,
    Instruction,
    Log,
    Lose,
    Note,
    Progressed,
    Replayed,
    Send,
    Started,
    Tell,
    TryLanes,
    Wake,
)
from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.coordinator.schedule.grants import Grants
from relayline.coordinator.schedule.groups import GroupPlanner
from relayline.coordinator.schedule.prompt_time import read_time
from relayline.coordinator.schedule.scheduler import Scheduler
from relayline.coordinator.sessions.admission import ANYONE, LANE_TRY_S, Admission, Tenant
from relayline.coordinator.sessions.drafted import Drafted
from relayline.coordinator.sessions.generation import GenerationRequest, PromptScore
from relayline.coordinator.sessions.prefixes import Prefixes
from relayline.coordinator.sessions.readers import Readers, sharing_key
from relayline.coordinator.sessions.session import OutFrame, Session, State, take_guesses, take_score
from relayline.coordinator.sessions.silence import SILENT_S
from relayline.coordinator.sessions.slots import progress_of
from relayline.coordinator.sessions.suspects import Suspects
from relayline.coordinator.sessions.turnover import Turnover, holdings
from relayline.wire.common.errors import (
    InternalError,
    LaneLimitError,
    ProtocolError,
    RelaylineError,
    StageLostError,
    from_wire,
)
from relayline.wire.common.phase import Phase
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

_DONE = State.DONE  # asked for with every token, see coordinator.sessions.session


@dataclasses.dataclass(frozen=True, slots=True)
class ConductorConfig:
    """The settings behind the decisions; coordinator.engine.pipeline_config explains each."""

    schedule: ScheduleConfig
    stage_names: tuple[str, ...]
    """In layer order, for people."""
    n_vocab: int
    share: bool = True
    prefix_lanes: int | None = 0
    waiting_max: int = 256
    lost_wait_s: float = 15.0


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    """A request was admitted: with its own session, or as another reader of a running session."""

    session_id: int
    is_joined: bool


class Conductor:
    """Decides for one pipeline."""

    def __init__(
        self,
        config: ConductorConfig,
        is_end: Callable[[int], bool],
        session_ids: Iterator[int],
        now_ns: int,
        ends_message: Callable[[int], bool] | None = None,
    ) -> None:
        """`is_end` says of a token whether it ends an answer; `session_ids` gives each session its own, ascending.

        `ends_message`: whether it ends a message of any role; by default those tokens do that end an answer.
        """
        self._config, self._is_end, self._session_ids = config, is_end, session_ids
        self.availability = Availability(config.stage_names, config.lost_wait_s, now_ns)
        admission = self.admission = Admission(1, 0, config.waiting_max, lambda new: self.prefixes.lanes_before(new))
        self.prefixes = Prefixes(
            config.prefix_lanes, session_ids, admission.free_lanes, admission.running, ends_message or is_end
        )
        self.readers, self.suspects, self._turnover = Readers(), Suspects(), Turnover()
        self.scheduler, self.grants = Scheduler(config.schedule, GroupPlanner(())), Grants(config.schedule.grant_steps)
        drafts = config.schedule.draft and config.schedule.mode != "drain"
        self.drafted = Drafted(
            drafts=bool(drafts), model_tokens=config.schedule.draft_model_tokens, n_vocab=config.n_vocab
        )
        self.epoch = 0  # the epoch that is connected or connecting; events of any other epoch are ignored
        self._is_connected = False
        self.is_held = False
        """Whether nothing leaves until the next epoch: see coordinator.engine.moves."""
        self._is_trying = self._is_dispatching = False
        self._out: list[Instruction] = []

    def _instructions(self) -> list[Instruction]:
        tier = self.prefixes.tier
        if tier.new_notes:
            notes, tier.new_notes = tier.new_notes, {}
            self._out.append(Note(notes))
        if self.drafted.news:
            news, self.drafted.news = self.drafted.news, []
            self._out.append(Draft(news))
        out, self._out = self._out, []
        return out

    # --- requests -----------------------------------------------------------------------------------------------------

    def check_room(self, now_ns: int, tenant: Tenant = ANYONE) -> None:
        """Raise OverloadedError where the line is full for this tenant."""
        self.admission.check_room(lambda: self._wait_s(now_ns), tenant)

    def open(self, request: GenerationRequest, now_ns: int) -> tuple[Opened, list[Instruction]]:
        """Admit a request, or raise its refusal, which changes nothing: see Generator.open."""
        self.availability.check(now_ns)
        if (error := self.availability.not_served(request)) is not None:
            raise error
        key = sharing_key(request) if self._config.share else request.request_id
        if (session := self.readers.join(key)) is not None:
            return Opened(session.session_id, is_joined=True), self._instructions()
        is_whole = request.wants_logits or request.sampling.number("pooling")
        acceptance = None if is_whole else self.drafted.acceptance
        session = Session(next(self._session_ids), request, self._is_end, acceptance=acceptance, admitted_ns=now_ns)
        starting = self.admission.admit(session, lambda: self._wait_s(now_ns))
        self.readers.add(session, key)
        self._start_all(starting, now_ns)
        return Opened(session.session_id, is_joined=False), self._instructions()

    def _wait_s(self, now_ns: int) -> int:
        """Return when a request that comes now is expected to get a lane."""
        admission = self.admission
        token_ns = self.scheduler.planner.plan(len(admission.running), n_prompts=0).period_ns
        running = holdings(admission.running.values(), now_ns, token_ns)
        return self._turnover.wait_s(len(admission.waiting), admission.n_ours, running)

    def left(self, session_id: int, now_ns: int) -> list[Instruction]:
        """One reader of a session has gone. The last one to go ends the session."""
        if (session := self.readers.leave(session_id)) is not None:
            self._finish(session, [*self.prefixes.keep(session), *session.cancel()], now_ns)
        return self._instructions()

    def fail_all(self, error: RelaylineError, now_ns: int) -> list[Instruction]:
        """End every request with this error."""
        error = error if error.retryable else StageLostError(error.message)
        for session in self.readers:
            self._fail(session, error, now_ns)
        return self._instructions()

    # --- epochs -------------------------------------------------------------------------------------------------------

    def begin_epoch(self) -> int:
        """Another attempt to connect is made; returns the number of its epoch."""
        self.epoch += 1
        return self.epoch

    def connected(self, facts: EpochFacts, now_ns: int) -> list[Instruction]:
        """All stages are connected in the epoch begun last. Running sessions restart; rows that all stages still hold
        stay.
        """
        schedule, admission = self._config.schedule, self.admission
        for session, error in self.suspects.guilty(admission.running, facts.instances):
            self._fail(session, error, now_ns)
        planner = GroupPlanner(facts.costs, schedule.itl_stretch)
        self.prefixes.renew(
            facts.n_lanes,
            is_per_lane=planner.is_per_lane,
            left_rows=facts.held,
            keeps_state=facts.keeps_state,
            tier=facts.tier,
            read_ns=read_time(facts.costs),
        )
        for session in admission.running.values():
            session.give_way()  # silently: this epoch has not opened it
        admission.resize(facts.n_lanes, facts.ctx_tokens)
        for session in admission.unfit():
            self._fail(session, admission.too_long(session), now_ns)
        self.availability.options, self.availability.mutual_rows_max = facts.options, facts.mutual_rows_max
        self.availability.takes_grids = facts.takes_grids
        for session in [*admission.running.values(), *admission.waiting]:
            if (reason := self.availability.not_served(session.request)) is not None:
                self._fail(session, reason, now_ns)
        self.scheduler = Scheduler(
            schedule,
            planner,
            may_draft=facts.rewinds,
            rewind_rows=facts.rewind_rows,
            predictions=facts.predictions,
        )
        self._is_connected, self.is_held = True, False
        self.grants.connected(self.epoch, takes_back=facts.rewinds)
        self.availability.enter(Phase.READY, now_ns)
        starting = self.suspects.starting(admission.running.values())
        self.scheduler.control(self.prefixes.left_behind(self.suspects.trusted(starting)))
        self._start_all(starting, now_ns)
        self._want_dispatch()  # leftover routes are closed whether or not anything starts
        fields = {"epoch": self.epoch, "stages": len(facts.instances), "resumed": len(admission.running)}
        self._out.append(Log(logging.INFO, "pipeline ready", fields))
        return self._instructions()

    def lost(self, error: RelaylineError, now_ns: int, *, is_planned: bool = False) -> list[Instruction]:
        """The epoch is over: running sessions pause until the next one. If it was planned, it counts against no
        session."""
        running = self.admission.running.values()
        self.availability.lost(now_ns, error)
        fields = {"epoch": self.epoch, "reason": error.message, "paused": len(running)}
        level, text = (
            (logging.INFO, "pipeline pauses") if is_planned else (logging.WARNING, "pipeline lost, recovering")
        )
        self._out.append(Log(level, text, fields))
        self._is_connected = False
        self.grants.lost()
        self.suspects.lost(() if is_planned else running, error)
        return self._instructions()

    def look(self, now_ns: int) -> list[Instruction]:
        """Look at stages and clock, every BEAT_EVERY_S: requests that waited too long for a stage are refused."""
        lines, is_over = self.availability.look(now_ns)
        self._out += [Log(logging.WARNING, line) for line in lines]
        if is_over:
            refusal = self.availability.refusal(now_ns)
            self._out.append(Log(logging.WARNING, f"requests are refused: {refusal.message}"))
            for session in self.readers:
                if self.availability.came_while_lost(session.admitted_ns) and not session.n_generated:
                    self._fail(session, refusal, now_ns)
        return self._instructions()

    # --- frames out ---------------------------------------------------------------------------------------------------

    def _start_all(self, sessions: Iterable[Session], now_ns: int) -> None:
        phase = self.availability.phase
        if not (phase.is_paused or phase.rests):  # otherwise the next epoch starts every session that has a lane
            for session in sessions:
                self._start(session, now_ns)

    def _start(self, session: Session, now_ns: int) -> None:
        session.started_ns = session.started_ns or now_ns
        frames = self.prefixes.start(session)
        if self.scheduler.drafts.may_draft:
            self.drafted.began(session)
        self._out.append(Started(session.session_id, session.n_copied))
        self._out += _progress(session, session.n_copied)
        self.scheduler.control(frames)
        self.scheduler.prompt(session)
        self._want_dispatch()

    def _want_dispatch(self) -> None:
        """Dispatch once for everything that arrives at the same moment."""
        if not self._is_dispatching:
            self._is_dispatching = True
            self._out.append(Dispatch())

    def dispatch(self, now_ns: int) -> list[Instruction]:
        """All events of this moment were delivered: dispatch the frames that may go."""
        self._is_dispatching = False
        self._take((), now_ns)
        return self._instructions()

    # --- answers in ---------------------------------------------------------------------------------------------------

    def returned(self, message: pb.ReturnResponse, now_ns: int) -> list[Instruction]:
        """A stage answers: tokens, progress notes, faults. Answers of another epoch change nothing."""
        if message.epoch != self.epoch:
            return []
        for passed in message.progress:
            self.scheduler.passed(passed.session_id, passed.position, now_ns)
            session = self.readers.get(passed.session_id)
            if session is not None and session.state is State.PREFILL:
                self._out += _progress(session, passed.position)
                self._start_all(self.suspects.passed(passed.session_id, passed.position), now_ns)
        if message.feeds_back:
            self.grants.feeds_back(message.epoch)
        self._take(message.samples, now_ns)
        for fault in message.faults:
            self._on_fault(fault, now_ns)
            self._want_dispatch()
        if message.dropped_keys:
            self.scheduler.control(self.prefixes.lost(message.dropped_keys))
            self._want_dispatch()
        return self._instructions()

    def _take(self, samples: Sequence[pb.Sampled], now_ns: int) -> None:
        """Take tokens and send what follows, and so on with tokens that have come before their rows were decided."""
        later: list[Instruction] = []
        what = ""
        try:
            while True:
                what = "taking an answer failed"
                for sample in samples:
                    if self.grants.takes(sample):
                        self._on_sample(sample, now_ns, later)
                if not self._is_connected or self.is_held:
                    break
                what = "deciding what leaves failed"
                if orphans := self.scheduler.orphans():
                    self._start_all(orphans, now_ns)
                # Frames first: stages must not wait while readers write their answers.
                for envelope in self.scheduler.take(now_ns):
                    if frames := self.grants.leave(envelope, is_calm=not self.scheduler.is_reading):
                        self._out.append(Send(frames))
                if wait_ns := self.scheduler.guess_wait.left_ns:
                    self._out.append(Wake(wait_ns / 1e9))
                if not (samples := self.grants.due()):
                    break
        except Exception as error:  # a bug of ours: the next epoch begins with a new scheduler
            # The tokens counted so far are delivered, because a replay does not repeat them.
            self._out.append(Log(logging.ERROR, what, bug=error))
            self._out.append(Lose(InternalError(f"{what}: {error}")))
        self._out += later

    def silent(self, session_ids: Iterable[int], n_stages: int, now_ns: int) -> list[Instruction]:
        """No stage holds these sessions any more. Each is handled as if it had failed by itself."""
        text = f"no answer came for {SILENT_S:.0f} s, and no stage has this session any more"
        label = StageLostError.label
        for session_id in session_ids:
            fault = pb.SessionFault(session_id=session_id, stage_index=n_stages - 1, label=label, message=text)
            fault.retryable = True
            self._on_fault(fault, now_ns)
        self._want_dispatch()
        return self._instructions()

    def _on_sample(self, sample: pb.Sampled, now_ns: int, later: list[Instruction]) -> None:
        """Take a token. `later` gets the instructions that may wait until frames have left."""
        session_id, position, token = sample.session_id, sample.position, sample.token
        session = self.readers.get(session_id)
        if session is not None and session.request.scores_prompt:
            score = PromptScore(token, sample.logprob, _top_of(sample))
            if take_score(session, position, score):
                return  # `progress` reports its row
        self.scheduler.answered(session_id, position, now_ns)
        if session is None:
            return
        if token >= self._config.n_vocab:
            self._out.append(Lose(ProtocolError(f"the last stage sampled token {token} of {self._config.n_vocab}")))
            return
        event, frames = session.sampled(position, token, *_more_of(sample, session.request))
        if event is not None:
            if self.drafted.has_model:
                self.drafted.took(session, position, token, now_ns)
            is_first = len(session.history) - 1 == len(session.request.prompt_tokens)
            if is_first:
                self._out += _progress(session, len(session.request.prompt_tokens))
            generated = Generated(session_id, position, event.finish_reason, event.is_drafted)
            # With its first token a session's frames change their trace, and nothing may follow its end.
            is_last = event.finish_reason is not None
            if is_last:
                self._out += _taken_out(later, session_id)
            (self._out if is_first or is_last else later).append(generated)
            later.append(Tell(session_id, event))
            if sample.guesses and self.scheduler.drafts.predicts:
                facts = self.drafted.predicted_facts
                take_guesses(session, position + 1, sample.guesses, sample.guess_chances, facts, now_ns)
            if cleared := self.suspects.cleared(session):
                self._start_all(cleared, now_ns)
        if session.state is _DONE:
            self._finish(session, [*self.prefixes.keep(session), *frames], now_ns)
        else:
            for frame in frames:
                self.scheduler.decode(frame)

    def _on_fault(self, fault: pb.SessionFault, now_ns: int) -> None:
        error = from_wire(fault.label, f"stage {fault.stage_index}: {fault.message}")
        if fault.session_id == 0:  # of the whole route
            self._out.append(Lose(error))
        session = self.readers.get(fault.session_id)
        bad = (fault.session_id, session.copied_from if session is not None else 0)
        self.scheduler.control(self.prefixes.refused(bad, is_full=isinstance(error, LaneLimitError)))
        if session is None or session.state is State.WAITING:  # a session that has sent nothing has no fault
            return
        # Another coordinator had the lane that its open was to get.
        waits = isinstance(error, LaneLimitError) and not fault.position and self.admission.put_back(session)
        if not waits and not session.may_replay(error, is_retryable=fault.retryable):
            self._fail(session, error, now_ns)
            return
        if not waits or session.n_refused == 1:  # it may be refused for minutes
            fields = {"request": session.request.request_id, "reason": str(error)}
            self._out.append(Log(logging.INFO, "session waits for a lane" if waits else "session replayed", fields))
            self._out.append(Replayed(session.session_id, error.message))
        self.scheduler.forget(session.session_id)
        self.grants.forget(session.session_id)
        if waits:
            self._keep_trying()
            self.scheduler.control(session.give_way())
            self._start_all(self.suspects.gave_way(session), now_ns)
        else:
            session.count_replay()
            self._start(session, now_ns)

    # --- lanes that another coordinator has ---------------------------------------------------------------------------

    def _keep_trying(self) -> None:
        if not self._is_trying and self.admission.is_short:
            self._is_trying = True
            self._out.append(TryLanes(LANE_TRY_S))

    def try_lanes(self, now_ns: int) -> list[Instruction]:
        """LANE_TRY_S have passed since `TryLanes` was asked for."""
        self._is_trying = False
        for session in self.admission.try_lanes():
            self._start_all(self.suspects.joining(session), now_ns)
        self._keep_trying()
        return self._instructions()

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _fail(self, session: Session, error: RelaylineError, now_ns: int) -> None:
        self._out.append(Tell(session.session_id, error))
        self._finish(session, session.cancel(), now_ns, error)

    def _finish(
        self, session: Session, frames: Sequence[OutFrame], now_ns: int, error: RelaylineError | None = None
    ) -> None:
        """Send the session's last frames, give its lane to the next in line."""
        self.readers.end(session.session_id)
        self.prefixes.tier.ended(session.session_id)
        self.drafted.ended(session.session_id)
        self._out.append(Ended(session.session_id, error))
        held_ns = now_ns - session.started_ns if session.started_ns else 0
        if session.started_ns:
            self._turnover.left(held_ns)
        self.scheduler.forget(session.session_id)
        self.grants.forget(session.session_id)
        self.scheduler.control(frames)
        self._want_dispatch()
        for following in self.admission.leave(session, held_ns):
            self._start_all(self.suspects.joining(following), now_ns)
        self._start_all(self.suspects.cleared(session), now_ns)


def _top_of(sample: pb.Sampled) -> tuple[tuple[int, float], ...]:
    return tuple([(entry.token, entry.logprob) for entry in sample.top])


def _taken_out(later: list[Instruction], session_id: int) -> list[Instruction]:
    """Take a session's counts of tokens out of the instructions that wait: of right drafts that came with its last one.

    All samples of a session stand together in a message.
    """
    at = len(later)
    while at and isinstance(one := later[at - 1], Generated | Tell) and one.session_id == session_id:
        at -= 1
    own = later[at:]
    later[at:] = [each for each in own if isinstance(each, Tell)]
    return [each for each in own if isinstance(each, Generated)]


def _more_of(sample: pb.Sampled, request: GenerationRequest) -> tuple[Any, ...]:
    """Return a sample's details apart from its token, as `Session.sampled` takes them; for most requests none."""
    sampling = request.sampling
    if sampling.n_logprobs < 0 and not sampling.numbers and not request.wants_logits:
        return ()
    logprob = sample.logprob if sampling.n_logprobs >= 0 else None
    mu = sample.mirostat_mu if sample.HasField("mirostat_mu") else None
    return logprob, _top_of(sample), sample.logits, sample.embedding, mu


def _progress(session: Session, n_read: int) -> list[Instruction]:
    progress = progress_of(session, n_read)
    return [] if progress is None else [Progressed(session.session_id, progress)]
