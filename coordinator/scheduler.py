"""Which frames leave for stage 0, and when: groups of decode rows and flights of prefill rows. Pure.

Theory of operation. A *flight* is one envelope on its way through the stages; it has landed when every frame in it has
been answered (a sample, a progress note) or given up. The plan says how many decode flights may be under way and how
many rows each takes. Streams whose token has come back wait in the *pool*; whenever a decode flight is free the oldest
of them leave together. So groups re-form by themselves as streams join, leave and fall behind: fragments meet in the
pool because no more flights than planned may leave. There is no timer; a frame waits only while as many groups as the
curves ask for are already under way.

Prompt rows ride in decode flights, in flights of their own, or in both, as the plan says, so that running streams keep
their pace; several short prompts may share a flight. A burst of short prompts, and the histories of streams that a loss
has paused, are read through before running streams get their whole pace back. Opens and closes never wait.

Which prompt's rows go next `coordinator.prompt_line` decides. Who copies what another reads leaves right behind it.

The *drain* mode sends everything at once and leaves batching to the stages' queues; it is the reference to compare
with, and what a plan-less start falls back to.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence

from coordinator.groups import ITL_STRETCH, GroupPlan, GroupPlanner
from coordinator.lane_groups import next_group
from coordinator.overhead import Held, Overhead
from coordinator.prompt_line import BURST_PRESSURE, PromptLine
from coordinator.session import OutFrame, Session
from coordinator.stage_cost import StageCost

DRAIN_CHUNK_ROWS = 64
SPREAD_CYCLES = 2  # times that every flight has gone round with a prompt's rows until they have spread
BURST_CYCLES = 32  # a burst takes no longer to read than all streams, its own included, take for so many tokens each
REPLAY_PRESSURE = 4  # what paused streams count per running one until they go on: the first to do so are as new to it


@dataclasses.dataclass(slots=True, eq=False)
class Flight:
    """One envelope under way."""

    waiting_for: set[tuple[int, int]]  # (session id, position after its rows) not answered yet
    n_rows: int  # decode rows; 0 when it carries prompt rows alone
    has_chunks: bool  # whether prompt rows are in it
    sent_ns: int
    ahead_ns: float  # predicted work of the busiest stage on the flights under way, this one included
    step_ns: float  # its own part of that
    way_ns: float  # predicted native steps of its decode rows on their way through idle stages; 0.0 not known
    n_chunks_before: int  # flights with prompt rows launched until then; -1 while one is under way
    is_whole: bool = True  # until one of its sessions ends while it is under way


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """How frames are grouped."""

    mode: str = "auto"
    """auto: groups from the curves; drain: send at once; fixed: n_groups x group_rows by hand."""
    n_groups: int = 0
    """Decode flights under way, in mode fixed; 0: as many as `group_rows` takes."""
    group_rows: int = 0
    """Rows of one decode flight, in mode fixed; 0: the running streams shared among the flights."""
    chunk_rows: int = 0
    """Largest prefill chunk; 0 leaves it to the plan."""
    itl_stretch: float = ITL_STRETCH
    """How many times longer running streams' inter-token latency may become while prompts are read; BURST_PRESSURE
    times that, at most for BURST_CYCLES tokens, while a burst of short ones is, and REPLAY_PRESSURE times that until
    all streams go on after a loss."""


class Scheduler:
    """Frames in, envelopes out. One per epoch."""

    def __init__(self, config: ScheduleConfig, planner: GroupPlanner) -> None:
        self.config, self.planner = config, planner
        self._controls: list[OutFrame] = []
        self._pool: collections.deque[OutFrame] = collections.deque()
        self._prompts = PromptLine()
        self._flights: dict[tuple[int, int], Flight] = {}
        self._under_way: dict[int, list[int]] = {}  # session id -> its keys' positions
        self._n_decode_flights = self._n_prefill_flights = 0
        self._under_way_ns = 0.0  # predicted work of the busiest stage on all flights under way
        self._queue_ns, self._queue_at_ns = 0.0, 0  # predicted work before the busiest stage, and when that was
        self._train_rows = 0  # prompt rows of a train while nothing decodes
        self._n_chunk_flights = 0  # flights with prompt rows under way
        self._n_chunks = 0  # and launched so far
        self._n_chunks_before = 0  # and launched before the first of those that have followed without a pause
        self._overhead = Overhead()
        # Sessions that decode, in the pool or under way -> (their lane, their latest position).
        self._decoding: dict[int, tuple[int, int]] = {}
        self._n_passes = 0  # decode flights that left before the oldest row of the pool
        self._decoding_tokens = 0  # sum of these positions

    @property
    def n_decoding(self) -> int:
        """Streams that decode now."""
        return len(self._decoding)

    # --- events -------------------------------------------------------------------------------------------------------

    def control(self, frames: Iterable[OutFrame]) -> None:
        """Send opens or closes with the next envelopes."""
        self._controls.extend(frames)

    def prompt(self, session: Session) -> None:
        """A session has prompt rows to send; it is asked for chunks until none are left."""
        self._prompts.add(session, self.n_decoding)

    def orphans(self) -> list[Session]:
        """Return the sessions that were to copy from one that is gone: they are to be started again."""
        return self._prompts.orphans()

    def decode(self, frame: OutFrame) -> None:
        """A stream's next row is ready."""
        session_id = frame.session.session_id
        self._decoding_tokens += frame.position - self._decoding.get(session_id, (0, 0))[1]
        self._decoding[session_id] = (frame.session.lane, frame.position)
        self._pool.append(frame)

    def answered(self, session_id: int, position: int, now_ns: int) -> None:
        """The session's rows up to `position` have been answered. An echo changes nothing."""
        flight = self._flights.pop((session_id, position), None)
        if flight is None:
            return
        positions = self._under_way[session_id]
        positions.remove(position)
        if not positions:
            del self._under_way[session_id]
        flight.waiting_for.discard((session_id, position))
        if not flight.waiting_for:
            self._land(flight, now_ns)

    def forget(self, session_id: int, now_ns: int) -> None:
        """The session ended, however: nothing of it waits or counts any more."""
        for position in list(self._under_way.get(session_id, ())):
            self._flights[session_id, position].is_whole = False
            self.answered(session_id, position, now_ns)
        self._prompts.forget(session_id)
        if session_id in self._decoding:
            self._decoding_tokens -= self._decoding.pop(session_id)[1]
            self._pool = collections.deque(f for f in self._pool if f.session.session_id != session_id)

    def refresh(self, costs: Sequence[StageCost], held: Sequence[Held] = ()) -> None:
        """The stages say what they have learned of their speed and, all or none, how long they have held frames."""
        self.planner.update(costs)
        if held:
            self._overhead.stages_held(held)

    # --- decisions ----------------------------------------------------------------------------------------------------

    def plan(self) -> GroupPlan:
        """Return the plan for what runs now."""
        return self._by_hand() if self.config.mode == "fixed" else self._automatic()

    def describe(self) -> dict[str, object]:
        """Return the plan, and what a round trip takes beyond steps, for who looks at the pipeline."""
        return {**dataclasses.asdict(self.plan()), "overhead_ns": round(self.planner.overhead_ns)}

    def _by_hand(self) -> GroupPlan:
        """Return the plan with flights and rows as configured; what is not configured suits the streams that run."""
        n_groups, rows = self.config.n_groups, self.config.group_rows
        rows = min(rows or math.ceil(self.n_decoding / (n_groups or 1)), self.planner.rows_max) or 1
        n_groups = n_groups or math.ceil(self.n_decoding / rows) or 1
        # Those that fly are what prompt rows must suit.
        auto = self._automatic((min(n_groups, math.ceil(self.n_decoding / rows)), min(rows, self.n_decoding)))
        ride_rows = max(0, min(auto.ride_rows, self.planner.rows_max - rows))
        return dataclasses.replace(
            auto,
            n_groups=n_groups,
            group_rows=rows,
            ride_rows=ride_rows,
            # Prompts always have a way: where none can ride, as many rows in a flight of their own as would have.
            prefill_flights=auto.prefill_flights or int(not ride_rows),
            chunk_rows=auto.chunk_rows if auto.prefill_flights else max(1, auto.ride_rows),
        )

    def _automatic(self, by_hand: tuple[int, int] | None = None) -> GroupPlan:
        n_prompts, planner = len(self._prompts), self._planner()
        if self._decoding:
            pressure_min = self._pressure_min(planner)
            return planner.plan(self.n_decoding, n_prompts=n_prompts, pressure_min=pressure_min, by_hand=by_hand)
        return planner.plan(0, n_prompts=n_prompts, n_prompt_rows=self._count_train_rows())

    def _pressure_min(self, planner: GroupPlanner) -> int:
        if any(session.is_replay for session in self._prompts.sessions):
            return REPLAY_PRESSURE
        return BURST_PRESSURE if self._is_burst(planner) else 0

    def _is_burst(self, planner: GroupPlanner) -> bool:
        """Return whether prompts of a crowd wait, and all that wait can be read within BURST_CYCLES.

        The first of a burst to have their token would otherwise outweigh the others ever more as these join them, and
        spare themselves short waits now for a longer one of those that are left.
        """
        if not (self._prompts.is_crowd and planner.is_known):
            return False
        n_rows, n_prompts = self._prompts.n_rows, len(self._prompts)
        chunk = planner.plan(0, n_prompts=n_prompts, n_prompt_rows=n_rows).chunk_rows
        chunk = min(chunk, self.config.chunk_rows or chunk)
        read_ns = math.ceil(n_rows / chunk) * planner.chunk_ns(chunk)
        return read_ns <= BURST_CYCLES * planner.plan(self.n_decoding + n_prompts, n_prompts=0).period_ns

    def _planner(self) -> GroupPlanner:
        """Return the planner for the contexts of those that run and of the prompt that goes next.

        While others run, its next rows count. Alone all of them do, those that have left included, half of which stand
        before an average one: its train is planned as a whole, so that its chunks stay as they are.
        """
        decode_tokens = 0.0
        if self._decoding and self.planner.shares_longest:
            decode_tokens = max(position for _, position in self._decoding.values())
        elif self._decoding:
            decode_tokens = self._decoding_tokens / len(self._decoding)
        prompt_tokens = 0.0
        if self._prompts:
            prompt = self._prompts.upcoming()
            prompt_tokens = prompt.n_sent if self._decoding else (prompt.n_sent + prompt.prefill_left) / 2
        return self.planner.at(decode_tokens, prompt_tokens)

    def _count_train_rows(self) -> int:
        """Return the prompt rows of the train under way, those that have left included: its chunks stay as they are."""
        return max(self._prompts.n_rows, self._train_rows if self._n_prefill_flights else 0)

    def take(self, now_ns: int) -> list[list[OutFrame]]:
        """Return the envelopes that leave now, in order."""
        envelopes = self._take_once(now_ns)
        while copies := self._prompts.catch_up():
            self._controls += copies
            envelopes += self._take_once(now_ns)
        return envelopes

    def _take_once(self, now_ns: int) -> list[list[OutFrame]]:
        envelopes: list[list[OutFrame]] = []
        controls, self._controls = self._controls, []
        if self.config.mode == "drain":
            self._take_everything(envelopes, now_ns)
        else:
            self._take_groups(envelopes, now_ns)
        if controls and envelopes:
            envelopes[0] = controls + envelopes[0]  # controls ride with the first rows
        elif controls:
            envelopes.append(controls)
        return envelopes

    def _take_groups(self, envelopes: list[list[OutFrame]], now_ns: int) -> None:
        plan = self.plan()
        self._train_rows = 0 if self._decoding else self._count_train_rows()
        rows_max = min(self.config.chunk_rows or self.planner.rows_max, self.planner.rows_max)
        while self._pool and self._n_decode_flights < plan.n_groups:
            frames = self._next_group(plan.group_rows)
            ride_rows = min(self._ride_rows(plan, len(frames), now_ns), rows_max)
            self._launch(envelopes, frames, self._prompts.next_chunks(ride_rows), now_ns)
        while self._prompts and self._n_prefill_flights < plan.prefill_flights:
            chunks = self._prompts.next_chunks(min(plan.chunk_rows, rows_max))
            if not chunks:
                break
            self._launch(envelopes, [], chunks, now_ns)

    def _next_group(self, rows_max: int) -> list[OutFrame]:
        """Take the decode rows of one flight out of the pool."""
        if not self.planner.is_per_lane or len(self._pool) == 1:
            return [self._pool.popleft() for _ in range(min(len(self._pool), rows_max))]
        oldest, lanes = self._pool[0], [lane for lane, _ in self._decoding.values()]
        frames = next_group(self._pool, lanes, rows_max, self._n_passes)
        self._n_passes = 0 if oldest in frames else self._n_passes + 1
        chosen = set(map(id, frames))
        self._pool = collections.deque(frame for frame in self._pool if id(frame) not in chosen)
        return frames

    def _ride_rows(self, plan: GroupPlan, rows: int, now_ns: int) -> int:
        """Return how many prompt rows a decode flight takes along now.

        What the plan says holds for flights that have spread over the stages, as they have soon after the first rows of
        a prompt. Until then one that has to wait behind others which became longer takes fewer, so that its streams'
        next token is not later than the plan allows; unless that leaves less than half, for where the curve has no step
        in between the flights would never spread.
        """
        ride_rows = plan.ride_rows
        if ride_rows and not self.planner.is_per_lane:  # else they are computed apart, and fill tiles by themselves
            ride_rows += plan.group_rows - rows
        n_chunks = self._n_chunks - self._n_chunks_before if self._n_chunk_flights else 0
        if not plan.latency_max_ns or n_chunks >= SPREAD_CYCLES * plan.n_groups:
            return ride_rows
        fitting = self._planner().ride_within(rows, ride_rows, plan.latency_max_ns - self._queued_ns(now_ns))
        return fitting if 2 * fitting >= ride_rows else ride_rows

    def _take_everything(self, envelopes: list[list[OutFrame]], now_ns: int) -> None:
        if self._pool:
            self._launch(envelopes, list(self._pool), [], now_ns)
            self._pool.clear()
        rows = min(self.config.chunk_rows or DRAIN_CHUNK_ROWS, self.planner.rows_max)
        for chunks in self._prompts.all_chunks(rows):
            self._launch(envelopes, [], chunks, now_ns)

    # --- flights ------------------------------------------------------------------------------------------------------

    def _launch(
        self, envelopes: list[list[OutFrame]], decode: list[OutFrame], chunks: list[OutFrame], now_ns: int
    ) -> None:
        """Send decode rows with prompt rows riding, or prompt rows alone, as one flight."""
        frames = decode + chunks
        keys = {(frame.session.session_id, frame.position + len(frame.tokens)) for frame in frames}
        n_rows, n_prompt_rows = len(decode), sum(len(frame.tokens) for frame in chunks)
        decode_tokens = _mean_context(decode)
        if self.planner.shares_longest:
            decode_tokens = max((frame.position for frame in decode), default=0)
        planner = self.planner.at(decode_tokens, _mean_context(chunks))
        step_ns = planner.mixed_ns(n_rows, n_prompt_rows) if decode else planner.chunk_ns(n_prompt_rows)
        self._under_way_ns += step_ns
        self._queue_ns, self._queue_at_ns = self._queued_ns(now_ns) + step_ns, now_ns
        is_quiet = not chunks and not self._n_chunk_flights
        flight = Flight(
            keys, n_rows, bool(chunks), now_ns, self._under_way_ns, step_ns, planner.way_ns(n_rows),
            self._n_chunks if is_quiet else -1,
        )  # fmt: skip
        for session_id, position in keys:
            self._flights[session_id, position] = flight
            self._under_way.setdefault(session_id, []).append(position)
        if chunks:
            if not self._n_chunk_flights:
                self._n_chunks_before = self._n_chunks
            self._n_chunk_flights += 1
            self._n_chunks += 1
        if decode:
            self._n_decode_flights += 1
        else:
            self._n_prefill_flights += 1
        envelopes.append(frames)

    def _queued_ns(self, now_ns: int) -> float:
        """Predict how long a flight that leaves now waits at the busiest stage for those that left before it."""
        return max(0.0, self._queue_ns - (now_ns - self._queue_at_ns))

    def _land(self, flight: Flight, now_ns: int) -> None:
        self._under_way_ns = max(0.0, self._under_way_ns - flight.step_ns)
        self._n_chunk_flights -= flight.has_chunks
        if flight.n_rows == 0:
            self._n_prefill_flights -= 1
            return
        self._n_decode_flights -= 1
        if flight.is_whole:
            self._learn_overhead(flight, now_ns - flight.sent_ns)

    def _learn_overhead(self, flight: Flight, took_ns: int) -> None:
        self._overhead.landed(flight.n_rows, took_ns)
        # Beside prefill nobody can tell queueing from overhead by predictions.
        if flight.way_ns and flight.n_chunks_before == self._n_chunks:
            self._overhead.bounded(took_ns, flight.way_ns, flight.ahead_ns)
        overhead_ns = self._overhead.revised_ns(self.planner.overhead_ns)
        if overhead_ns != self.planner.overhead_ns:
            self.planner.overhead_ns = overhead_ns
            self.planner.forget()


def _mean_context(frames: list[OutFrame]) -> float:
    """Return how many tokens stand before the frame of an average row."""
    n_rows = sum(len(frame.tokens) for frame in frames)
    return sum(len(frame.tokens) * frame.position for frame in frames) / n_rows if n_rows else 0.0
