"""What a simulation must never show, checked at every event.

The audit keeps books of its own and trusts none of the code under test. Its invariants:

* **Nothing lost, nothing doubled.** Every row frame that left the coordinator is on a link, in a queue, in a step,
  answered, or dropped because its session was closed. A session's frames are answered in the order in which they left.
  Its rows follow each other without a gap, each sent once, but for where a guess was wrong: there the true row is sent
  again, and stages forget what came behind. Nothing is sampled behind a wrong token, and clients get the model's own.
* **Ends once.** Every arrived request ends exactly once with all its tokens, or cancelled; then no stage, queue,
  flight or lane remembers it.
* **Caps.** Steps fit the engine; envelopes fit the plan; while an envelope is launched no more are under way than the
  plan says, but for decode flights with a row that has been held for as long as the plan allows. Guesses come on top:
  DRAFTED_ROWS_MAX in an envelope, and flights of their own while something that they follow is under way, no more
  than stages and links hold.
* **Holds are bounded by their prediction.** Whenever envelopes leave, no decode row stays at the coordinator that has
  been held for longer than the plan predicts a token of its stream to take, prompt rows beside it included.
* **No starvation.** With the group policy a row that waits at a stage runs within `(F + 1) c`: F is the largest number
  of envelopes that were under way at once, what cancelled sessions have left there included, c the stage's dearest
  step. A prompt's later chunks, which stand behind their predecessors, have that time each; stalls come on top. So
  every flight lands within the sum of that, of its own steps and of the links, W. At the coordinator decode rows leave
  in the order in which they became ready (where lanes have cells of their own at most PASSES_MAX flights pass over
  one); while prompts wait a chunk leaves within W of the last, and of any OLDEST_EVERY + 1 chunks in a row one is the
  oldest prompt's.
* **Progress.** The simulation does not run dry while a request is unfinished.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from relayline.coordinator.schedule.groups import GroupPlan
from relayline.coordinator.schedule.lane_groups import PASSES_MAX
from relayline.coordinator.schedule.prompt_line import OLDEST_EVERY
from relayline.coordinator.schedule.tiles import TILE_FLIGHTS_MAX
from relayline.coordinator.sessions.session import OutFrame, Session
from relayline.deploy.testing.simulation.figures import Trace
from relayline.deploy.testing.simulation.stage import SimStage, Violation
from relayline.stage.queue_types import Step
from relayline.wire.common.bounds import DRAFTED_ROWS_MAX
from relayline.wire.common.curve import ATTENTION_TILE_ROWS
from relayline.wire.envelopes.frames import Flag

if TYPE_CHECKING:
    from relayline.deploy.testing.simulation.run import Simulation


DECODE, PREFILL, GUESS = range(3)  # kinds of flights


class _Sent(NamedTuple):
    """A frame in flight."""

    position: int
    end: int
    flight: int


def _key(frame: OutFrame) -> tuple[int, int]:
    return frame.session.session_id, frame.position + len(frame.tokens)


def _is_guess(frame: OutFrame) -> bool:
    return frame.n_drafted == len(frame.tokens)


class TileBook:
    """Prompt rows that decode flights could have carried since the last tile larger than the plan, counted here."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._room_rows, self._n_flights = 0.0, 0

    def left(self, plan: GroupPlan, room_rows: int) -> None:
        """Count a decode flight with room for so many more prompt rows."""
        self._n_flights += 1
        self._room_rows += room_rows + plan.prefill_flights * plan.chunk_rows / plan.n_groups

    def allows(self, plan: GroupPlan, n_rows: int, n_flights: int) -> bool:
        """Return whether a flight of prompt rows is a tile that may exceed the plan: streams run, and enough room has
        passed.
        """
        if n_rows != ATTENTION_TILE_ROWS or not self._simulation.planner.tile_rule.is_apart:
            return False
        if not self._simulation.scheduler.n_decoding or (
            plan.chunk_rows >= n_rows and n_flights <= plan.prefill_flights
        ):
            return True
        if self._room_rows < n_rows and self._n_flights < TILE_FLIGHTS_MAX:
            raise Violation(f"a tile leaves after room for {self._room_rows:.1f} of its {n_rows} rows")
        self._room_rows, self._n_flights = 0.0, 0
        return True


class Audit(Trace):
    """Books and checks of one simulation."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(len(simulation.world.stages))
        self._simulation = simulation
        self._tiles = TileBook(simulation)
        self._has_bound = simulation.setup.stage_policy == "auto" and simulation.setup.schedule.mode != "drain"
        self.n_sent = self.n_answered = self.n_dropped = self.n_on_links = self.n_in_steps = 0
        self._waiting = [0] * len(simulation.world.stages)  # frames in the queue of each, after its latest event
        self._n_waiting = 0  # and in all of them
        self._flights: dict[int, set[tuple[int, int]]] = {}  # flight -> waiting frames: (session id, end of rows)
        self._flight_decoding: dict[int, set[tuple[int, int]]] = {}  # the same for rows of streams, without prompts
        self._flight_kinds: dict[int, int] = {}
        self._flights_sent_ns: dict[int, int] = {}
        self._is_ridden: dict[int, bool] = {}  # whether prompt rows left with decode rows
        self._left_behind: dict[int, int] = {}  # cancelled session, its close in flight -> its frames in flight
        self._n_flights = [0, 0, 0]  # by these kinds
        self._under_way: dict[int, collections.deque[_Sent]] = {}  # session id -> its frames, oldest first
        self._latest: dict[int, _Sent] = {}  # session id -> its last answered frame
        self._rows: dict[int, list[int]] = {}  # session id -> its sent tokens
        self.n_drafted = self.n_guess_flights = 0
        self._prefill_flights_most = 0
        self._flights_most = 0
        self._stalls_ns = 0
        self._n_passes = 0
        self._slowest_flight_ns = 0  # of answered frames
        self._way_max_ns = 0.0
        self._is_per_lane = any(model.is_per_lane for model in simulation.world.stages)
        self._prompts: dict[int, Session] = {}
        self._chunk_left_ns = 0  # or since the first waiting prompt came
        self._chunks_since_oldest = 0
        self._pool: collections.deque[tuple[int, int]] = collections.deque()
        self._pooled_ns: dict[tuple[int, int], int] = {}
        self.ends: dict[int, bool] = {}  # session id -> whether it was cancelled
        self._begun: dict[int, int] = {}

    # --- events of the simulation ------------------------------------------------------------------------------------

    def arrived(self, session: Session) -> None:
        """A request came in."""
        self.arrivals_ns[session.session_id] = self._simulation.now_ns

    def prompted(self, session: Session) -> None:
        """A session's prompt was handed to the scheduler."""
        if not self._prompts:
            self._chunk_left_ns = self._simulation.now_ns
        self._prompts[session.session_id] = session

    def pooled(self, frame: OutFrame) -> None:
        """A decode row was handed to the scheduler."""
        key = (frame.session.session_id, frame.position)
        self._pool.append(key)
        self._pooled_ns[key] = self._simulation.now_ns

    def stalled(self, stall_ns: int) -> None:
        """A stage stalls for a while."""
        self._stalls_ns += stall_ns

    def sent(self, envelopes: Sequence[Sequence[OutFrame]], plan: GroupPlan) -> None:
        """Envelopes left the coordinator under this plan."""
        for envelope in envelopes:
            rows = [frame for frame in envelope if frame.tokens]
            self.n_sent += len(rows)
            if not rows:
                continue
            # Prompt rows in a decode flight come after the decode rows.
            kind = PREFILL if rows[0].flags & Flag.PREFILL else GUESS if _is_guess(rows[0]) else DECODE
            oldest = next((key for key in self._pool if key[0] not in self.ends), None)
            held_ns = self._simulation.now_ns - self._pooled_ns[oldest] if oldest else 0
            self._check_order(rows, kind)
            if kind == DECODE:
                self._check_passes(oldest)
            self._open_flight(rows, kind)
            if self._simulation.setup.schedule.mode != "drain":
                self._check_caps(rows, kind, plan, oldest, held_ns)
        self._check_holds(plan)

    def passed(self, session_id: int, position: int) -> None:
        """A frame came back without a sample after its last row."""
        self._settle(session_id, position)

    def sampled(self, session_id: int, position: int) -> None:
        """A sample came back, after any row of a frame."""
        oldest = self._under_way.get(session_id, ())
        # Those of a frame with a wrong guess come after the frame's own answer.
        first = next(iter(oldest), None)
        of_it = filter(None, (first, self._latest.get(session_id)))
        is_last = first is not None and first.end == position
        if is_last or not any(sent.position < position < sent.end for sent in of_it):
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
        self._prompts.pop(session.session_id, None)
        under_way = self._under_way.get(session.session_id, ()) if is_cancelled else ()
        for sent in under_way:
            self._land(session.session_id, sent)
        if under_way:
            self._left_behind[session.session_id] = len(under_way)

    def step_begins(self, stage: SimStage, step: Step) -> None:
        """A stage computes."""
        self.n_in_steps += len(step.frames)
        self._begun[stage.index] = self._simulation.now_ns
        for frame in step.frames:
            self._check_wait(stage, frame.arrived_ns, frame.is_prefill)

    def step_ends(self, stage: SimStage, step: Step) -> None:
        """A stage has computed."""
        self.n_in_steps -= len(step.frames)
        for control in step.controls if stage.is_last else ():
            if control.flags & Flag.CLOSE:  # its frames in flight have left every earlier stage
                self._left_behind.pop(control.session_id, None)
        if stage.placed:
            self.steps.append((self._begun[stage.index], self._simulation.now_ns, stage.index, stage.n_placed))

    # --- checks -------------------------------------------------------------------------------------------------------

    def event(self, touched: SimStage | None) -> None:
        """Check the books after an event: those of the stage it touched, or of all stages if it was the coordinator's.

        No other stage's queue can have changed, and a stage whose frames wait has an event of its own to come.
        """
        for stage in self._simulation.stages if touched is None else (touched,):
            n_waiting = stage.n_waiting
            self._n_waiting += n_waiting - self._waiting[stage.index]
            self._waiting[stage.index] = n_waiting
            if not n_waiting:
                continue
            if not stage.is_busy:
                raise Violation(f"stage {stage.index} holds frames while its engine is free")
            self._check_wait(stage, stage.oldest_arrival_ns(), True)
        self._check_flow()
        here = self.n_on_links + self.n_in_steps + self._n_waiting
        if self.n_sent != self.n_answered + self.n_dropped + here:
            raise Violation(
                f"{self.n_sent} frames were sent, {self.n_answered} answered, {self.n_dropped} dropped, {here} remain"
            )

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
        if self._flights:
            raise Violation("a flight is still under way")

    def _check_wait(self, stage: SimStage, since_ns: int, is_prefill: bool) -> None:
        bound_ns = self._wait_max_ns(stage, is_prefill) + self._stalls_ns
        waited_ns = self._simulation.now_ns - since_ns
        if self._has_bound and waited_ns > bound_ns:
            raise Violation(
                f"a frame waits {waited_ns / 1e6:.1f} ms at stage {stage.index}, at most {bound_ns / 1e6:.1f}"
            )

    def _wait_max_ns(self, stage: SimStage, is_prefill: bool) -> int:
        n_turns = 1 + self._prefill_flights_most if is_prefill else 1
        return (self._flights_most + 1) * stage.cost_max_ns * n_turns

    def _check_flow(self) -> None:
        """Check that flights land, and that chunks leave while prompts wait."""
        if not self._has_bound:
            return
        now_ns, oldest = self._simulation.now_ns, next(iter(self._flights), None)
        under_way_ns = 0 if oldest is None else now_ns - self._flights_sent_ns[oldest]
        waited_ns = now_ns - self._chunk_left_ns if self._prompts else 0
        longest_ns = max(under_way_ns, waited_ns)
        if longest_ns > self._way_max_ns:  # the bound only grows
            self._way_max_ns = self._bound_way_ns()
        if longest_ns > self._way_max_ns:
            what = "a flight is under way" if under_way_ns > waited_ns else "prompts wait and none has left"
            raise Violation(f"{what} for {longest_ns / 1e6:.1f} ms, at most {self._way_max_ns / 1e6:.1f}")

    def _bound_way_ns(self) -> int:
        simulation = self._simulation
        waits_ns = sum(self._wait_max_ns(stage, True) + stage.cost_max_ns for stage in simulation.stages)
        return waits_ns + simulation.links_max_ns + self._stalls_ns

    def _check_holds(self, plan: GroupPlan) -> None:
        """Check that no row has stayed in the pool for longer than a plan predicts."""
        if self._simulation.setup.schedule.mode in ("drain", "fixed"):
            return
        plans = (plan, self._simulation.scheduler.plan())  # it changes as prompts leave
        hold_max_ns = max(min(self._hold_max_ns(each), self._predicted_most_ns(each)) for each in plans)
        for key in self._pool if hold_max_ns else ():  # 0: no curve is known, and no flight has landed
            held_ns = self._simulation.now_ns - self._pooled_ns[key]
            if key[0] not in self.ends and held_ns > hold_max_ns:
                raise Violation(
                    f"session {key[0]} is held for {held_ns / 1e6:.1f} ms, {hold_max_ns / 1e6:.1f} are predicted"
                )

    def _check_order(self, rows: Sequence[OutFrame], kind: int) -> None:
        for frame in rows if kind != GUESS else ():
            key = frame.session.session_id
            if not frame.flags & Flag.PREFILL:
                self._take_from_pool(key, frame.position)
                now_ns = self._simulation.now_ns
                self.holds.append((now_ns, now_ns - self._pooled_ns.pop((key, frame.position))))
                continue
            oldest = next(iter(self._prompts), None)
            self._chunk_left_ns = self._simulation.now_ns
            self._chunks_since_oldest = 0 if key == oldest else self._chunks_since_oldest + 1
            if self._chunks_since_oldest > OLDEST_EVERY:
                raise Violation(f"the oldest prompt, session {oldest}, is passed over")
            if frame.flags & Flag.WANTS_SAMPLE:  # its last chunk
                self._prompts.pop(key, None)

    def _take_from_pool(self, session_id: int, position: int) -> None:
        while self._pool and self._pool[0][0] in self.ends:
            self._pool.popleft()
        if self._is_per_lane and (session_id, position) in self._pool:
            self._pool.remove((session_id, position))  # neighbouring lanes travel together; see _check_passes
        elif not self._pool or self._pool.popleft() != (session_id, position):
            raise Violation(f"session {session_id} overtook another in the pool, or was never in it")

    def _check_passes(self, oldest: tuple[int, int] | None) -> None:
        """A decode flight has left; this row had waited longest."""
        self._n_passes = self._n_passes + 1 if oldest is not None and oldest in self._pool else 0
        if self._n_passes > PASSES_MAX:
            raise Violation(f"{self._n_passes} flights left before session {oldest and oldest[0]}, which came first")

    def _open_flight(self, rows: Sequence[OutFrame], kind: int) -> None:
        flight = len(self._flight_kinds)
        self._flights[flight] = set(map(_key, rows))
        self._flight_decoding[flight] = {_key(frame) for frame in rows if not frame.flags & Flag.PREFILL}
        self._is_ridden[flight] = kind == DECODE and any(frame.flags & Flag.PREFILL for frame in rows)
        self._flight_kinds[flight] = kind
        for frame in rows:
            self._check_rows(frame, kind)
            sent = _Sent(frame.position, frame.position + len(frame.tokens), flight)
            self._under_way.setdefault(frame.session.session_id, collections.deque()).append(sent)
            self.n_drafted += frame.n_drafted
        self._n_flights[kind] += 1
        self.n_guess_flights += kind == GUESS
        self._flights_sent_ns[flight] = self._simulation.now_ns
        self._flights_most = max(self._flights_most, sum(self._n_flights) + sum(self._left_behind.values()))
        n_chunk_flights = self._n_flights[PREFILL] + self._n_flights[DECODE]  # decode flights may carry chunks too
        self._prefill_flights_most = max(self._prefill_flights_most, n_chunk_flights)

    def _check_rows(self, frame: OutFrame, kind: int) -> None:
        """Check that a session's rows follow each other, and that true rows repeat only where a guess was wrong."""
        key, sent = frame.session.session_id, self._rows.setdefault(frame.session.session_id, [])
        is_new = frame.position == len(sent)
        if frame.position > len(sent) or not (is_new or sent[frame.position] != frame.tokens[0]):
            raise Violation(f"session {key} sends position {frame.position}, {len(sent)} rows have left")
        if not is_new and (frame.session.acceptance is None or kind != DECODE):
            raise Violation(f"session {key} sends position {frame.position} twice")
        if kind == GUESS and not (_is_guess(frame) and self._under_way.get(key)):
            raise Violation(f"session {key} guesses at position {frame.position} without a row to follow")
        sent[frame.position :] = frame.tokens

    def _predicted_most_ns(self, plan: GroupPlan) -> float:
        """Return the longest time that a plan may predict for a token: without prompts, or with them."""
        turns = max(1.0, self._simulation.scheduler.n_decoding / (plan.n_groups * plan.group_rows))
        return max(plan.period_ns, plan.latency_max_ns * turns) * (1 + 1e-9) or self._slowest_flight_ns

    def _hold_max_ns(self, plan: GroupPlan) -> float:
        return plan.hold_max_ns or self._slowest_flight_ns

    def _check_caps(
        self, rows: Sequence[OutFrame], kind: int, plan: GroupPlan, oldest: tuple[int, int] | None, held_ns: int
    ) -> None:
        n_prompt_rows = sum(len(frame.tokens) for frame in rows if frame.flags & Flag.PREFILL)
        n_drafted = sum(frame.n_drafted for frame in rows)
        n_decode_rows = sum(len(frame.tokens) for frame in rows) - n_prompt_rows - n_drafted
        if n_drafted > DRAFTED_ROWS_MAX or (n_drafted and n_prompt_rows):
            raise Violation(f"an envelope has {n_drafted} guesses and {n_prompt_rows} rows of prompts")
        is_tile = kind == PREFILL and self._tiles.allows(plan, n_prompt_rows, self._n_flights[PREFILL])
        prompt_flights = max(plan.prefill_flights, int(is_tile))
        flights = self._guesses_max() if kind == GUESS else (plan.n_groups, prompt_flights)[kind]
        taken = {(frame.session.session_id, frame.position) for frame in rows}
        is_overdue = held_ns >= self._hold_max_ns(plan) > 0 and oldest in taken
        may_be_more = kind == DECODE and is_overdue and self._simulation.setup.schedule.mode == "auto"
        if self._n_flights[kind] > flights and not may_be_more:
            raise Violation(f"{self._n_flights[kind]} flights are under way, the plan allows {flights}")
        if kind == DECODE and n_prompt_rows:
            self._check_rides(plan)
        room = plan.ride_rows and plan.group_rows + plan.ride_rows - n_decode_rows
        chunk_rows = max(plan.chunk_rows, ATTENTION_TILE_ROWS) if is_tile else plan.chunk_rows
        most_prompt_rows = chunk_rows if kind == PREFILL else room
        if kind == DECODE:
            self._tiles.left(plan, max(0, room - n_prompt_rows))
        if n_decode_rows > plan.group_rows or n_prompt_rows > most_prompt_rows:
            raise Violation(
                f"an envelope has {n_decode_rows} + {n_prompt_rows} rows, the plan allows {plan.group_rows} + "
                f"{most_prompt_rows}"
            )

    def _check_rides(self, plan: GroupPlan) -> None:
        n_ridden = sum(1 for flight in self._flights if self._is_ridden[flight])
        if n_ridden > plan.n_groups:
            raise Violation(f"prompt rows ride in {n_ridden} flights, the plan has {plan.n_groups}")

    def _guesses_max(self) -> int:
        """Return how many flights of the cheapest step all stages and links hold, by the coordinator's books."""
        planner = self._simulation.planner
        cheapest_ns = min(planner.step_ns(rows) for rows in range(1, 1 + min(32, planner.rows_max)))
        return len(planner.stages) + math.ceil(planner.overhead_ns / cheapest_ns) if cheapest_ns else 0

    def _settle(self, session_id: int, position: int) -> None:
        waiting = self._under_way.get(session_id)
        if session_id in self.ends:  # a stage that has learned of it may have dropped later frames
            while waiting and waiting[0].end != position:
                waiting.popleft()
        if not waiting or waiting[0].end != position:
            raise Violation(f"session {session_id} was answered twice, or out of turn, at position {position}")
        self.n_answered += 1
        self._latest[session_id] = waiting.popleft()
        if self._land(session_id, sent := self._latest[session_id]):
            took_ns = self._simulation.now_ns - self._flights_sent_ns[sent.flight]
            self._slowest_flight_ns = max(self._slowest_flight_ns, took_ns)

    def _land(self, session_id: int, sent: _Sent) -> bool:
        """Cross a frame off; returns whether its flight is complete for all decoding streams."""
        waiting, decoding = self._flights.get(sent.flight, set()), self._flight_decoding[sent.flight]
        if (session_id, sent.end) in waiting:
            waiting.discard((session_id, sent.end))
            decoding.discard((session_id, sent.end))
            kind = self._flight_kinds[sent.flight]
            if not waiting:
                del self._flights[sent.flight]
                self._n_flights[kind] -= 1
                return kind != PREFILL or not self._is_ridden[sent.flight]
            if kind == DECODE and not decoding:  # prompt rows in it come later
                self._flight_kinds[sent.flight] = PREFILL
                self._n_flights[DECODE] -= 1
                self._n_flights[PREFILL] += 1
                return True
        return False
