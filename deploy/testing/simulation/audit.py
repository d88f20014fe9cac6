"""Invariants of a simulation, checked at every event.

The audit keeps separate books and trusts none of the code under test. It hears the events of the simulation and enters
them in its books; each book checks what it holds. Its invariants:

* **Nothing lost, nothing doubled.** Every row frame that left the coordinator is on a link, in a queue, in a step,
  answered, or dropped because its session was closed. A session's frames are answered in the order in which they left.
  Its rows follow each other without a gap, each sent once, but for where a guess was wrong: there the true row is sent
  again, and stages forget what came behind. Nothing is sampled behind a wrong token, and clients get the model's own.
* **Ends once.** Every arrived request ends exactly once with all its tokens, or cancelled; then no stage, queue,
  flight or lane remembers it.
* **Caps.** Steps fit the engine, and envelopes fit the plan. While an envelope is launched, no more are under way than
  the plan says, but for decode flights with a row that has been held as long as the plan allows. Guesses come on top:
  DRAFTED_ROWS_MAX in an envelope, and flights of their own while something that they follow is under way, no more
  than stages and links hold.
* **Holds are bounded by their prediction.** Whenever envelopes leave, no decode row stays at the coordinator that has
  been held for longer than the plan predicts a token of its stream to take, including concurrent prompt rows.
* **No starvation.** With the group policy a row that waits at a stage runs within `(F + 1) c`. F is the largest number
  of envelopes that were under way at once, what cancelled sessions have left there included. c is the stage's dearest
  step. A prompt's later chunks, which stand behind their predecessors, have that time each; stalls come on top. So
  every flight lands within the sum of that, of its own steps and of the links, W. At the coordinator decode rows leave
  in the order in which they became ready; where lanes have cells of their own, at most PASSES_MAX flights pass over
  one. While prompts wait, a chunk leaves within W of the last, and of any OLDEST_EVERY + 1 chunks in a row one is the
  oldest prompt's.
* **Progress.** The simulation does not run dry while a request is unfinished.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from relayline.coordinator.schedule.groups import GroupPlan
from relayline.coordinator.sessions.session import OutFrame, Session
from relayline.deploy.testing.simulation.caps import Caps
from relayline.deploy.testing.simulation.figures import Trace
from relayline.deploy.testing.simulation.flight_book import DECODE, GUESS, FlightBook, kind_of
from relayline.deploy.testing.simulation.frame_book import FrameBook
from relayline.deploy.testing.simulation.pool_book import HoldBound, PoolBook
from relayline.deploy.testing.simulation.prompt_book import PromptBook
from relayline.deploy.testing.simulation.row_book import RowBook
from relayline.deploy.testing.simulation.stage import SimStage, Violation
from relayline.deploy.testing.simulation.waits import Waits
from relayline.stage.queue_types import Step
from relayline.wire.envelopes.frames import Flag

if TYPE_CHECKING:
    from relayline.deploy.testing.simulation.run import Simulation


class Audit(Trace):
    """Books and checks of one simulation."""

    def __init__(self, simulation: Simulation) -> None:
        stages = simulation.world.stages
        super().__init__(len(stages))
        self._simulation = simulation
        self.ends: dict[int, bool] = {}  # session id -> whether it was cancelled
        self.frames = FrameBook(len(stages))
        self.flights = FlightBook()
        self.rows = RowBook()
        self._pool = PoolBook(self.ends, is_per_lane=any(model.is_per_lane for model in stages))
        self._prompts = PromptBook()
        self._hold_bound = HoldBound(simulation, self.flights)
        self._caps = Caps(simulation, self.flights)
        self._waits = Waits(simulation, self.flights, self._prompts)
        self._begun: dict[int, int] = {}  # stage -> start of its step

    # --- events of the simulation ------------------------------------------------------------------------------------

    def arrived(self, session: Session) -> None:
        """A request came in."""
        self.arrivals_ns[session.session_id] = self._simulation.now_ns

    def prompted(self, session: Session) -> None:
        """A session's prompt was handed to the scheduler."""
        self._prompts.came(session.session_id, self._simulation.now_ns)

    def pooled(self, frame: OutFrame) -> None:
        """A decode row was handed to the scheduler."""
        self._pool.came((frame.session.session_id, frame.position), self._simulation.now_ns)

    def stalled(self, stall_ns: int) -> None:
        """A stage stalls for a while."""
        self._waits.stalled(stall_ns)

    def sent(self, envelopes: Sequence[Sequence[OutFrame]], plan: GroupPlan) -> None:
        """Envelopes left the coordinator under this plan."""
        for envelope in envelopes:
            rows = [frame for frame in envelope if frame.tokens]
            if rows:
                self._left(rows, plan)
        self._hold_bound.check(self._pool, plan)

    def passed(self, session_id: int, position: int) -> None:
        """A frame came back without a sample after its last row."""
        self._settle(session_id, position)

    def sampled(self, session_id: int, position: int) -> None:
        """A sample came back, after any row of a frame."""
        if self.flights.settles(session_id, position):
            self._settle(session_id, position)

    def token(self, session: Session) -> None:
        """A client got a token."""
        self.note_token(session.session_id, self._simulation.now_ns)

    def ended(self, session: Session, is_cancelled: bool) -> None:
        """A request ended."""
        if session.session_id in self.ends:
            raise Violation(f"session {session.session_id} ended twice")
        if not is_cancelled and session.n_generated != session.request.max_tokens:
            raise Violation(f"session {session.session_id} ended after {session.n_generated} tokens")
        self.ends[session.session_id] = is_cancelled
        self._prompts.over(session.session_id)
        if is_cancelled:
            self.flights.cancel(session.session_id)

    def step_begins(self, stage: SimStage, step: Step) -> None:
        """A stage computes."""
        self.frames.n_in_steps += len(step.frames)
        self._begun[stage.index] = self._simulation.now_ns
        for frame in step.frames:
            self._waits.check_frame(stage, frame.arrived_ns, is_prefill=frame.is_prefill)

    def step_ends(self, stage: SimStage, step: Step) -> None:
        """A stage has computed."""
        self.frames.n_in_steps -= len(step.frames)
        for control in step.controls if stage.is_last else ():
            if control.flags & Flag.CLOSE:  # its frames in flight have left every earlier stage
                self.flights.closed(control.session_id)
        if stage.placed:
            self.steps.append((self._begun[stage.index], self._simulation.now_ns, stage.index, stage.n_placed))

    # --- checks -------------------------------------------------------------------------------------------------------

    def event(self, touched: SimStage | None) -> None:
        """Check the books after an event: those of the stage it touched, or of all stages if it was the coordinator's.

        No other stage's queue can have changed, and a stage with waiting frames will have its own event.
        """
        for stage in self._simulation.stages if touched is None else (touched,):
            self.frames.count_queue(stage)
            if stage.n_waiting:
                self._waits.check_frame(stage, stage.oldest_arrival_ns(), is_prefill=True)
        self._waits.check_flow()
        self.frames.check()

    def end(self) -> None:
        """Check that nothing is left of any request."""
        simulation = self._simulation
        missing = self.arrivals_ns.keys() - self.ends.keys()
        if missing:
            raise Violation(f"{len(missing)} requests never ended, the first is session {min(missing)}")
        for stage in simulation.stages:
            if len(stage.lanes) or len(stage.batcher):
                raise Violation(f"stage {stage.index} still holds {len(stage.lanes)} lanes")
        if simulation.admission.running or simulation.admission.waiting or simulation.scheduler.n_decoding:
            raise Violation("the coordinator still holds a session")
        if self.flights.under_way:
            raise Violation("a flight is still under way")

    def _left(self, rows: Sequence[OutFrame], plan: GroupPlan) -> None:
        """Enter one envelope with these row frames into the books."""
        now_ns, kind = self._simulation.now_ns, kind_of(rows)
        self.frames.n_sent += len(rows)
        oldest = self._pool.oldest()
        held_ns = self._pool.held_ns(oldest, now_ns)
        for frame in rows if kind != GUESS else ():
            self._take(frame)
        if kind == DECODE:
            self._pool.flight_left(oldest)
        flight = self.flights.open(rows, kind, now_ns)
        for frame in rows:
            self.rows.left(frame, kind, has_frames=self.flights.has_frames(frame.session.session_id))
            self.flights.board(frame, flight)
        has_oldest = any((frame.session.session_id, frame.position) == oldest for frame in rows)
        is_overdue = has_oldest and held_ns >= self._hold_bound.planned_ns(plan) > 0
        self._caps.check(rows, kind, plan, is_overdue=is_overdue)

    def _take(self, frame: OutFrame) -> None:
        """Remove a frame from the books of frames that wait at the coordinator."""
        session_id, now_ns = frame.session.session_id, self._simulation.now_ns
        if frame.flags & Flag.PREFILL:
            self._prompts.chunk_left(session_id, now_ns, is_last=bool(frame.flags & Flag.WANTS_SAMPLE))
        else:
            self.holds.append((now_ns, self._pool.take((session_id, frame.position), now_ns)))

    def _settle(self, session_id: int, position: int) -> None:
        self.flights.settle(session_id, position, self._simulation.now_ns, is_over=session_id in self.ends)
        self.frames.n_answered += 1
