"""What a simulation must never show, checked at every event, and the figures that come out of it.

The audit keeps books of its own and trusts none of the code under test. Its invariants:

* **Nothing lost, nothing doubled.** Every row frame that left the coordinator is on a link, in a queue, in a step,
  answered, or dropped because its session was closed. A session's frames are answered in the order in which they left.
  Its rows follow each other without a gap, each sent once, but for where a guess was wrong: there the true row is sent
  again, and stages forget what came behind. Nothing is sampled behind a wrong token, and clients get the model's own.
* **Ends once.** Every arrived request ends exactly once with all its tokens, or cancelled; then no stage, queue,
  flight or lane remembers it.
* **Caps.** Steps fit the engine; envelopes fit the plan; while an envelope is launched no more are under way than the
  plan says. Guesses come on top: DRAFTED_ROWS_MAX in an envelope, and flights of their own while something that they
  follow is under way, no more than stages and links hold.
* **No starvation.** With the group policy a row that waits at a stage runs within `(F + 1) c`: F is the largest number
  of envelopes that were under way at once, c the stage's dearest step. A prompt's later chunks, which stand behind
  their predecessors, have that time each; stalls come on top. At the coordinator decode rows leave in the order in
  which they became ready (where lanes have cells of their own at most PASSES_MAX flights pass over one), and of any
  OLDEST_EVERY + 1 chunks in a row one is the oldest prompt's.
* **Progress.** The simulation does not run dry while a request is unfinished.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from benches.simulate_stage import SimStage, Violation
from coordinator.groups import GroupPlan
from coordinator.lane_groups import PASSES_MAX
from coordinator.prompt_line import OLDEST_EVERY
from coordinator.session import OutFrame, Session
from stage.queue_types import Step
from wire.bounds import DRAFTED_ROWS_MAX
from wire.frames import Flag

if TYPE_CHECKING:
    from benches.simulate_run import Simulation


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """What happened between two moments."""

    tokens_per_s: float
    overlap: float  # share of the time in which two or more stages compute
    utilisation: float  # mean share of the stages that compute
    itl_mean_ms: float
    itl_p99_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    rows_mean: float  # rows of a native step


DECODE, PREFILL, GUESS = range(3)  # kinds of flights


class _Sent(NamedTuple):
    """A frame under way."""

    position: int
    end: int
    flight: int


def _is_guess(frame: OutFrame) -> bool:
    return frame.n_drafted == len(frame.tokens)


class Audit:
    """Books and checks of one simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._has_plan = simulation.setup.schedule.mode != "drain"
        self._has_bound = simulation.setup.stage_policy == "auto" and self._has_plan
        self.n_sent = self.n_answered = self.n_dropped = self.n_on_links = self.n_in_steps = 0
        self._flights: dict[int, set[tuple[int, int]]] = {}  # flight -> what waits for it: (session id, end of rows)
        self._flight_kinds: dict[int, int] = {}
        self._n_flights = [0, 0, 0]  # by these kinds
        self._under_way: dict[int, collections.deque[_Sent]] = {}  # session id -> its frames, oldest first
        self._latest: dict[int, _Sent] = {}  # session id -> its frame that was answered last
        self._rows: dict[int, list[int]] = {}  # session id -> the tokens that were sent
        self.n_drafted = self.n_guess_flights = 0
        self._prefill_flights_most = 0
        self._flights_most = 0
        self._stalls_ns = 0
        self._n_cancelled = self._n_passes = 0
        self._is_per_lane = any(model.is_per_lane for model in simulation.world.stages)
        self._prompts: dict[int, Session] = {}
        self._chunks_since_oldest = 0
        self._pool: collections.deque[tuple[int, int]] = collections.deque()
        self._pooled_ns: dict[tuple[int, int], int] = {}
        self.ends: dict[int, bool] = {}  # session id -> was cancelled
        self.arrivals_ns: dict[int, int] = {}
        self.firsts: list[tuple[int, int]] = []  # (arrival, time to first token)
        self.itls: list[tuple[int, int, int]] = []  # (when, latency, session id)
        self.holds: list[tuple[int, int]] = []  # (when, how long a decode row was held at the coordinator)
        self.token_times_ns: list[int] = []
        self.steps: list[tuple[int, int, int, int]] = []  # (start, end, stage, rows)
        self._last_ns: dict[int, int] = {}
        self._begun: dict[int, int] = {}

    # --- what the simulation tells ------------------------------------------------------------------------------------

    def arrived(self, session: Session) -> None:
        """A request came in."""
        self.arrivals_ns[session.session_id] = self._simulation.now_ns

    def prompted(self, session: Session) -> None:
        """A session's prompt was handed to the scheduler."""
        self._prompts[session.session_id] = session

    def pooled(self, frame: OutFrame) -> None:
        """A decode row was handed to the scheduler."""
        key = (frame.session.session_id, frame.position)
        self._pool.append(key)
        self._pooled_ns[key] = self._simulation.now_ns

    def stalled(self, stall_ns: int) -> None:
        """A stage does nothing for a while."""
        self._stalls_ns += stall_ns

    def sent(self, envelopes: Sequence[Sequence[OutFrame]], plan: GroupPlan) -> None:
        """Envelopes left the coordinator under this plan."""
        for envelope in envelopes:
            rows = [frame for frame in envelope if frame.tokens]
            self.n_sent += len(rows)
            if not rows:
                continue
            # Prompt rows that ride come after the decode rows.
            kind = PREFILL if rows[0].flags & Flag.PREFILL else GUESS if _is_guess(rows[0]) else DECODE
            oldest = next((key for key in self._pool if key[0] not in self.ends), None)
            self._check_order(rows, kind)
            if kind == DECODE:
                self._check_passes(oldest)
            self._open_flight(rows, kind)
            if self._has_plan:
                self._check_caps(rows, kind, plan)

    def passed(self, session_id: int, position: int) -> None:
        """A frame came back that has no sample behind its last row."""
        self._settle(session_id, position)

    def sampled(self, session_id: int, position: int) -> None:
        """A sample came back, behind any row of a frame."""
        oldest = self._under_way.get(session_id, ())
        # Of a frame with a wrong guess they come after what says that it has passed.
        of_it = (*itertools.islice(oldest, 1), *filter(None, [self._latest.get(session_id)]))
        is_last = bool(oldest) and oldest[0].end == position
        if is_last or not any(sent.position < position < sent.end for sent in of_it):
            self._settle(session_id, position)

    def token(self, session: Session) -> None:
        """A client got a token."""
        now_ns, key = self._simulation.now_ns, session.session_id
        self.token_times_ns.append(now_ns)
        if key in self._last_ns:
            self.itls.append((now_ns, now_ns - self._last_ns[key], key))
        else:
            self.firsts.append((self.arrivals_ns[key], now_ns - self.arrivals_ns[key]))
        self._last_ns[key] = now_ns

    def ended(self, session: Session, is_cancelled: bool) -> None:
        """A request ended."""
        if session.session_id in self.ends:
            raise Violation(f"session {session.session_id} ended twice")
        if not is_cancelled and session.n_generated != session.request.max_tokens:
            raise Violation(f"session {session.session_id} ended after {session.n_generated} tokens")
        self.ends[session.session_id] = is_cancelled
        self._n_cancelled += is_cancelled
        self._prompts.pop(session.session_id, None)
        for sent in self._under_way.get(session.session_id, ()) if is_cancelled else ():
            self._land(session.session_id, sent)

    def step_begins(self, stage: SimStage, step: Step) -> None:
        """A stage computes."""
        self.n_in_steps += len(step.frames)
        self._begun[stage.index] = self._simulation.now_ns
        for frame in step.frames:
            self._check_wait(stage, frame.arrived_ns, frame.is_prefill)

    def step_ends(self, stage: SimStage, step: Step) -> None:
        """A stage has computed."""
        self.n_in_steps -= len(step.frames)
        if stage.placed:
            self.steps.append((self._begun[stage.index], self._simulation.now_ns, stage.index, stage.n_placed))

    # --- checks -------------------------------------------------------------------------------------------------------

    def event(self) -> None:
        """Hold the books after every event."""
        waiting = 0
        for stage in self._simulation.stages:
            waiting += stage.n_waiting
            if stage.n_waiting and not stage.is_busy:
                raise Violation(f"stage {stage.index} holds frames while its engine is free")
            oldest_ns = stage.oldest_arrival_ns()
            if oldest_ns is not None:
                self._check_wait(stage, oldest_ns, True)
        here = self.n_on_links + self.n_in_steps + waiting
        if self.n_sent != self.n_answered + self.n_dropped + here:
            raise Violation(
                f"{self.n_sent} frames were sent, {self.n_answered} answered, {self.n_dropped} dropped, {here} remain"
            )

    def end(self) -> None:
        """Hold that nothing is left of any request."""
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
        if not self._has_bound:
            return
        bound_ns = (self._flights_most + self._n_cancelled + 1) * stage.cost_max_ns
        bound_ns = bound_ns * (1 + self._prefill_flights_most if is_prefill else 1) + self._stalls_ns
        waited_ns = self._simulation.now_ns - since_ns
        if waited_ns > bound_ns:
            raise Violation(
                f"a frame waits {waited_ns / 1e6:.1f} ms at stage {stage.index}, at most {bound_ns / 1e6:.1f}"
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
            self._chunks_since_oldest = 0 if key == oldest else self._chunks_since_oldest + 1
            if self._chunks_since_oldest > OLDEST_EVERY:
                raise Violation(f"the oldest prompt, session {oldest}, is passed over")
            if frame.flags & Flag.WANTS_SAMPLE:  # its last chunk
                self._prompts.pop(key, None)

    def _take_from_pool(self, session_id: int, position: int) -> None:
        while self._pool and self._pool[0][0] in self.ends:
            self._pool.popleft()
        if self._is_per_lane and (session_id, position) in self._pool:
            self._pool.remove((session_id, position))  # neighbouring lanes go together; see _check_passes
        elif not self._pool or self._pool.popleft() != (session_id, position):
            raise Violation(f"session {session_id} overtook another in the pool, or was never in it")

    def _check_passes(self, oldest: tuple[int, int] | None) -> None:
        """A decode flight has left, before which this row had waited longest."""
        self._n_passes = self._n_passes + 1 if oldest is not None and oldest in self._pool else 0
        if self._n_passes > PASSES_MAX:
            raise Violation(f"{self._n_passes} flights left before session {oldest and oldest[0]}, which came first")

    def _open_flight(self, rows: Sequence[OutFrame], kind: int) -> None:
        flight = len(self._flight_kinds)
        self._flights[flight] = {(frame.session.session_id, frame.position + len(frame.tokens)) for frame in rows}
        self._flight_kinds[flight] = kind
        for frame in rows:
            self._check_rows(frame, kind)
            sent = _Sent(frame.position, frame.position + len(frame.tokens), flight)
            self._under_way.setdefault(frame.session.session_id, collections.deque()).append(sent)
            self.n_drafted += frame.n_drafted
        self._n_flights[kind] += 1
        self.n_guess_flights += kind == GUESS
        self._flights_most = max(self._flights_most, sum(self._n_flights))
        n_chunk_flights = self._n_flights[PREFILL] + self._n_flights[DECODE]  # decode flights may carry chunks too
        self._prefill_flights_most = max(self._prefill_flights_most, n_chunk_flights)

    def _check_rows(self, frame: OutFrame, kind: int) -> None:
        """Hold that a session's rows follow each other, that true ones are repeated only where a guess was wrong."""
        key, sent = frame.session.session_id, self._rows.setdefault(frame.session.session_id, [])
        is_new = frame.position == len(sent)
        if frame.position > len(sent) or not (is_new or sent[frame.position] != frame.tokens[0]):
            raise Violation(f"session {key} sends position {frame.position}, {len(sent)} rows have left")
        if not is_new and (frame.session.acceptance is None or kind != DECODE):
            raise Violation(f"session {key} sends position {frame.position} twice")
        if kind == GUESS and not (_is_guess(frame) and self._under_way.get(key)):
            raise Violation(f"session {key} guesses at position {frame.position} without a row to follow")
        sent[frame.position :] = frame.tokens

    def _check_caps(self, rows: Sequence[OutFrame], kind: int, plan: GroupPlan) -> None:
        n_prompt_rows = sum(len(frame.tokens) for frame in rows if frame.flags & Flag.PREFILL)
        n_drafted = sum(frame.n_drafted for frame in rows)
        n_decode_rows = sum(len(frame.tokens) for frame in rows) - n_prompt_rows - n_drafted
        if n_drafted > DRAFTED_ROWS_MAX or (n_drafted and n_prompt_rows):
            raise Violation(f"an envelope has {n_drafted} guesses and {n_prompt_rows} rows of prompts")
        flights = (plan.n_groups, plan.prefill_flights, self._guesses_max())[kind]
        if self._n_flights[kind] > flights:
            raise Violation(f"{self._n_flights[kind]} flights are under way, the plan allows {flights}")
        room = plan.ride_rows and plan.group_rows + plan.ride_rows - n_decode_rows
        most_prompt_rows = plan.chunk_rows if kind == PREFILL else room
        if n_decode_rows > plan.group_rows or n_prompt_rows > most_prompt_rows:
            raise Violation(
                f"an envelope has {n_decode_rows} + {n_prompt_rows} rows, the plan allows {plan.group_rows} + "
                f"{most_prompt_rows}"
            )

    def _guesses_max(self) -> int:
        """Return how many flights of the cheapest step all stages and links hold, by the book of the coordinator."""
        planner = self._simulation.planner
        cheapest_ns = min(planner.step_ns(rows) for rows in range(1, 1 + min(32, planner.rows_max)))
        return len(planner.stages) + math.ceil(planner.overhead_ns / cheapest_ns) if cheapest_ns else 0

    def _settle(self, session_id: int, position: int) -> None:
        waiting = self._under_way.get(session_id)
        if session_id in self.ends:  # a stage that had heard of it may have dropped frames behind
            while waiting and waiting[0].end != position:
                waiting.popleft()
        if not waiting or waiting[0].end != position:
            raise Violation(f"session {session_id} was answered twice, or out of turn, at position {position}")
        self.n_answered += 1
        self._latest[session_id] = waiting.popleft()
        self._land(session_id, self._latest[session_id])

    def _land(self, session_id: int, sent: _Sent) -> None:
        waiting = self._flights.get(sent.flight, set())
        if (session_id, sent.end) in waiting:
            waiting.discard((session_id, sent.end))
            if not waiting:
                del self._flights[sent.flight]
                self._n_flights[self._flight_kinds[sent.flight]] -= 1

    # --- figures ------------------------------------------------------------------------------------------------------

    def figures(self, from_ns: int = 0, to_ns: int | None = None) -> Figures:
        """Return the figures of a window of virtual time, by default until the last token so far."""
        if to_ns is None:
            to_ns = max(self.token_times_ns, default=self._simulation.now_ns)
        span_ns = max(1, to_ns - from_ns)
        itls = sorted(latency for when, latency, _ in self.itls if from_ns <= when <= to_ns)
        ttfts = sorted(latency for when, latency in self.firsts if from_ns <= when <= to_ns)
        overlap, utilisation = self._overlap(from_ns, to_ns)
        steps = [rows for start, end, _, rows in self.steps if start >= from_ns and end <= to_ns]
        return Figures(
            tokens_per_s=1e9 * sum(from_ns < when <= to_ns for when in self.token_times_ns) / span_ns,
            overlap=overlap,
            utilisation=utilisation,
            itl_mean_ms=sum(itls) / max(1, len(itls)) / 1e6,
            itl_p99_ms=percentile(itls, 99) / 1e6,
            ttft_p50_ms=percentile(ttfts, 50) / 1e6,
            ttft_p99_ms=percentile(ttfts, 99) / 1e6,
            rows_mean=sum(steps) / max(1, len(steps)),
        )

    def steady_window(self, n_warm_tokens: int) -> tuple[int, int]:
        """Return (after the first n_warm_tokens tokens, before the last as many): everybody runs meanwhile."""
        times = self.token_times_ns
        return times[n_warm_tokens], times[-n_warm_tokens - 1]

    def common_window(self) -> tuple[int, int]:
        """Return (when the last stream had its first token, when the first one had its last)."""
        return max(arrived_ns + ttft_ns for arrived_ns, ttft_ns in self.firsts), min(self._last_ns.values())

    def _overlap(self, from_ns: int, to_ns: int) -> tuple[float, float]:
        changes: list[tuple[int, int]] = []
        for start, end, _, _ in self.steps:
            if end > from_ns and start < to_ns:
                changes += [(max(start, from_ns), 1), (min(end, to_ns), -1)]
        busy = at_ns = together_ns = work_ns = 0
        for when, change in sorted(changes):
            together_ns += (when - at_ns) * (busy >= 2)
            work_ns += (when - at_ns) * busy
            at_ns, busy = when, busy + change
        span_ns = max(1, to_ns - from_ns)
        return together_ns / span_ns, work_ns / span_ns / len(self._simulation.stages)


def percentile(ascending: Sequence[int], percent: float) -> float:
    """Return the smallest value that at least `percent` of the values do not exceed; 0 without values."""
    if not ascending:
        return 0.0
    return float(ascending[max(0, math.ceil(len(ascending) * percent / 100) - 1)])
