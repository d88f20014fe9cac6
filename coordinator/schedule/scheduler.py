"""The scheduler decides which frames leave for stage 0, and when. Pure.

A *flight* is one envelope on its way through the stages. It has landed when each of its frames was answered (by a
sample or a progress note) or given up. The plan sets how many decode flights may be under way and how many rows each
takes.

Streams whose token has come back wait in the *pool*. When the plan allows another decode flight, the oldest streams of
the pool leave together. No more flights than planned may leave, so fragments of groups meet in the pool and groups
re-form as streams join, leave and fall behind. There is no timer. A frame waits only while the planned number of
groups is under way, and only as long as the curves predict a gain. After that, the next answer releases it in an extra
flight.

Prompt rows (chunked prefill) travel in decode flights, in flights of their own, or in both. The plan chooses, so that
running streams keep their pace. Several short prompts may share a flight. Two kinds of prompt are read before running
streams get their full pace back: a burst of short prompts, and the histories of streams that a loss paused. Opens and
closes never wait.

Guesses (speculative decoding) leave behind the rows of their streams or in extra flights. They leave only while no
prompt is read and stages would otherwise be idle.

Three neighbours decide details: `tiles` decides which rows may share a step, so that each row always gets the same
bits. `prompt_line` decides which prompt goes next. `draft_flights` decides which guesses leave. A session that copies
from another session leaves right behind it.

The *drain* mode sends everything at once and leaves batching to the queues of the stages. It is the reference for
comparisons, and the mode of a start without a plan.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence

from relayline.coordinator.schedule.draft_flights import DraftFlights
from relayline.coordinator.schedule.draft_plan import Traffic
from relayline.coordinator.schedule.flights import Flight, Flights, Kind, mean_context
from relayline.coordinator.schedule.groups import ITL_STRETCH, GroupPlan, GroupPlanner
from relayline.coordinator.schedule.lane_groups import PASSES_MAX, next_group
from relayline.coordinator.schedule.one_flight import OneFlight, may_be_better
from relayline.coordinator.schedule.overhead import Held, Overhead
from relayline.coordinator.schedule.prompt_line import BURST_PRESSURE, PromptLine
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.coordinator.schedule.tiles import FlightRoom, TilePace
from relayline.coordinator.sessions.session import OutFrame, Session
from relayline.wire.settings.table import DRAFT_AUTO

DRAIN_CHUNK_ROWS = 64
SPREAD_CYCLES = 2  # times that every flight has gone round with a prompt's rows until they have spread
BURST_CYCLES = 32  # a burst takes no longer to read than all streams, its own included, take for so many tokens each
REPLAY_PRESSURE = 4  # what paused streams count per running one until they go on: the first to do so are as new to it


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
    draft: int = DRAFT_AUTO
    """Tokens that may be drafted behind a stream's next row: DRAFT_AUTO leaves it to the curves and to how often drafts
    have been right, 0 is none, and more are always so many, where there are drafts. With mode drain there are none."""
    itl_stretch: float = ITL_STRETCH
    """How many times longer running streams' inter-token latency may become while prompts are read; BURST_PRESSURE
    times that, at most for BURST_CYCLES tokens, while a burst of short ones is, and REPLAY_PRESSURE times that until
    all streams go on after a loss."""


class Scheduler:
    """Frames in, envelopes out. One per epoch."""

    def __init__(
        self, config: ScheduleConfig, planner: GroupPlanner, *, may_draft: bool = True, rewind_rows: int = 0
    ) -> None:
        """`may_draft`: whether the stages can drop wrongly guessed rows. `rewind_rows`: if not, how many of a step."""
        self.config, self.planner = config, planner
        self._drafts = DraftFlights(config.draft if may_draft or rewind_rows else 0, 0 if may_draft else rewind_rows)
        self._controls: list[OutFrame] = []
        self._pool: collections.deque[OutFrame] = collections.deque()
        self._prompts = PromptLine()
        self._flights = Flights()
        self._train_rows = 0  # prompt rows of a train while nothing decodes
        self._overhead, self._one_flight, self._tile_pace = Overhead(), OneFlight(), TilePace()
        # Decoding sessions, in the pool or under way -> (lane, latest position).
        self._decoding: dict[int, tuple[int, int]] = {}
        # Waiting rows of the pool, by session id and position -> the time when they first stayed behind.
        self._held_since_ns: dict[tuple[int, int], int] = {}
        self._slowest_flight_ns = 0  # of those that have landed
        self._n_passes = 0  # decode flights that left before the oldest row of the pool
        self._decoding_tokens = 0  # sum of these positions

    @property
    def n_decoding(self) -> int:
        """The number of streams that decode now."""
        return len(self._decoding)

    # --- events -------------------------------------------------------------------------------------------------------

    def control(self, frames: Iterable[OutFrame]) -> None:
        """Send opens or closes with the next envelopes."""
        self._controls.extend(frames)

    def prompt(self, session: Session) -> None:
        """Queue a session with prompt rows. The scheduler asks it for chunks until none are left."""
        self._prompts.add(session, self.n_decoding)

    def orphans(self) -> list[Session]:
        """Return the sessions that waited to copy from a session that is gone. The caller starts them again."""
        return self._prompts.orphans()

    def decode(self, frame: OutFrame) -> None:
        """Put a stream's next row into the pool."""
        self._drafts.forget(frame.session.session_id)
        self._moved(frame)
        self._pool.append(frame)

    def _moved(self, frame: OutFrame) -> None:
        session_id = frame.session.session_id
        self._decoding_tokens += frame.position - self._decoding.get(session_id, (0, 0))[1]
        self._decoding[session_id] = (frame.session.lane, frame.position)

    def answered(self, session_id: int, position: int, now_ns: int) -> None:
        """Note the sample for the session's rows up to `position`. A repeated answer changes nothing."""
        self._landed(self._flights.answered(session_id, position), now_ns, Kind.DECODE, Kind.GUESS)

    def passed(self, session_id: int, position: int, now_ns: int) -> None:
        """Note that rows up to `position` are done without a sample: prompt rows, or rows behind a wrong guess."""
        # Some stages may have skipped a flight that holds nothing but guesses.
        self._landed(self._flights.answered(session_id, position), now_ns, Kind.DECODE)

    def _landed(self, flight: Flight | None, now_ns: int, *telling: Kind) -> None:
        """Note a landed flight, if there is one. Decode flights also measure the overhead of a round trip."""
        if flight is None:
            return
        if flight.kind is Kind.DECODE:
            n_streams = self.n_decoding if self._may_be_one(self._planner()) else 0
            self._one_flight.landed(flight.n_streams, n_streams, now_ns)
        took_ns = now_ns - flight.sent_ns
        self._slowest_flight_ns = max(self._slowest_flight_ns, took_ns)
        if flight.kind in telling and flight.is_whole:
            self._learn_overhead(flight, took_ns)

    def forget(self, session_id: int, now_ns: int) -> None:
        """Drop a session that has ended: none of its rows waits or counts any more."""
        self._flights.forget(session_id)
        self._prompts.forget(session_id)
        self._drafts.ended(session_id)
        if session_id in self._decoding:
            self._decoding_tokens -= self._decoding.pop(session_id)[1]
            self._pool = collections.deque(f for f in self._pool if f.session.session_id != session_id)
            self._held_since_ns = {key: since for key, since in self._held_since_ns.items() if key[0] != session_id}

    def refresh(self, costs: Sequence[StageCost], held: Sequence[Held] = ()) -> None:
        """Take the stages' learned curves, and how long they held frames (from all stages or from none)."""
        self.planner.update(costs)
        if held:
            self._overhead.stages_held(held)

    def under_way(self) -> dict[int, tuple[int, int]]:
        """Return for each session with rows under way which answer is due; `coordinator.sessions.silence` uses it."""
        return self._flights.under_way()

    # --- decisions ----------------------------------------------------------------------------------------------------

    def plan(self) -> GroupPlan:
        """Return the plan for the present streams and prompts."""
        return self._plan(self._planner())

    def _plan(self, planner: GroupPlanner) -> GroupPlan:
        return self._by_hand(planner) if self.config.mode == "fixed" else self._automatic(planner)

    def describe(self) -> dict[str, object]:
        """Return the plan and the overhead of a round trip, for GET /v1/pipeline."""
        return {**dataclasses.asdict(self.plan()), "overhead_ns": round(self.planner.overhead_ns)}

    def _by_hand(self, planner: GroupPlanner) -> GroupPlan:
        """Return a plan with the configured flights and rows. Any other value fits the running streams."""
        n_groups, rows = self.config.n_groups, self.config.group_rows
        rows = min(rows or math.ceil(self.n_decoding / (n_groups or 1)), self.planner.rows_max) or 1
        n_groups = n_groups or math.ceil(self.n_decoding / rows) or 1
        # Prompt rows must fit the flights that are under way.
        auto = self._automatic(planner, (min(n_groups, math.ceil(self.n_decoding / rows)), min(rows, self.n_decoding)))
        ride_rows = max(0, min(auto.ride_rows, self.planner.rows_max - rows))
        return dataclasses.replace(
            auto,
            n_groups=n_groups,
            group_rows=rows,
            ride_rows=ride_rows,
            # A prompt can always progress: if no rows can ride, the same number leaves in a separate flight.
            prefill_flights=auto.prefill_flights or int(not ride_rows),
            chunk_rows=auto.chunk_rows if auto.prefill_flights else max(1, auto.ride_rows),
        )

    def _automatic(self, planner: GroupPlanner, by_hand: tuple[int, int] | None = None) -> GroupPlan:
        n_prompts = len(self._prompts)
        if self._decoding:
            if self._one_flight.is_chosen(self.n_decoding) and self._may_be_one(planner):
                by_hand = (1, self.n_decoding)
            if any(session.is_replay for session in self._prompts.sessions):
                pressure_min = REPLAY_PRESSURE
            else:
                pressure_min = BURST_PRESSURE if self._is_burst(planner) else 0
            return planner.plan(self.n_decoding, n_prompts=n_prompts, pressure_min=pressure_min, by_hand=by_hand)
        return planner.plan(0, n_prompts=n_prompts, n_prompt_rows=self._count_train_rows())

    def _may_be_one(self, planner: GroupPlanner) -> bool:
        return self.config.mode == "auto" and not self._is_reading and may_be_better(planner, self.n_decoding)

    def _is_burst(self, planner: GroupPlanner) -> bool:
        """Return whether a burst of prompts waits that can be read within BURST_CYCLES.

        Without this rule the first streams of a burst would gain weight with every stream that joins them. They would
        save themselves short waits, and the remaining prompts would wait longer.
        """
        if not (self._prompts.is_crowd and planner.is_known):
            return False
        n_rows, n_prompts = self._prompts.n_rows, len(self._prompts)
        chunk = planner.plan(0, n_prompts=n_prompts, n_prompt_rows=n_rows).chunk_rows
        chunk = min(chunk, self.config.chunk_rows or chunk)
        read_ns = math.ceil(n_rows / chunk) * planner.chunk_ns(chunk)
        return read_ns <= BURST_CYCLES * planner.plan(self.n_decoding + n_prompts, n_prompts=0).period_ns

    def _planner(self) -> GroupPlanner:
        """Return the planner for the contexts of the running streams and of the next prompt.

        While streams run, the planner counts the prompt's next rows. Without running streams it counts all of its
        rows, sent ones included, with half of them as context. The whole train has one plan, so its chunks keep
        their size.
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
        """Return all prompt rows of the train under way, sent ones included, so that its chunks keep their size."""
        return max(self._prompts.n_rows, self._train_rows if self._flights.count(Kind.PREFILL) else 0)

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
        planner = self._planner()
        plan = self._plan(planner)
        self._train_rows = 0 if self._decoding else self._count_train_rows()
        rows_max = min(self.config.chunk_rows or self.planner.rows_max, self.planner.rows_max)
        rule, pace = planner.tile_rule.within(rows_max), self._tile_pace
        while self._pool and (
            (is_planned := self._flights.count(Kind.DECODE) < plan.n_groups) or self._is_overdue(plan, now_ns)
        ):
            frames = self._next_group(plan.group_rows, must_take_oldest=not is_planned)
            # Prompt rows that a stage leaves behind must not pile up there.
            may_ride = self._flights.n_ridden < plan.n_groups
            ride_rows = min(self._ride_rows(plan, len(frames), now_ns), rows_max) if may_ride else 0
            if not self._is_reading and self._drafts.are_of(frames, self.n_decoding):
                self._drafts.extend(frames, planner, self._traffic(plan, len(frames), planner))
            n_decode = sum(len(frame.tokens) for frame in frames)
            chunks = self._prompts.next_chunks(ride_rows, rule.beside(n_decode), n_decode)
            if self._prompts and rule.waits_for_tile(self._prompts.upcoming()):
                left_rows = max(0, ride_rows - sum(len(chunk.tokens) for chunk in chunks))
                pace.save(left_rows + plan.prefill_flights * plan.chunk_rows / plan.n_groups)
            self._launch(envelopes, Kind.DECODE, frames, chunks, now_ns)
        self._note_held(now_ns)
        chunk_rows = min(plan.chunk_rows, rows_max)
        while self._prompts:
            room = FlightRoom(chunk_rows, plan.prefill_flights, self._flights.count(Kind.PREFILL))
            n_rows = room.rows
            if rule.waits_for_tile(self._prompts.upcoming()):
                n_rows = pace.flight_rows(room, is_decoding=bool(self._decoding))
            chunks = self._prompts.next_chunks(n_rows, rule) if n_rows else []
            if not chunks:
                break
            self._launch(envelopes, Kind.PREFILL, [], chunks, now_ns)
        self._take_guesses(plan, planner, envelopes, now_ns)

    def _note_held(self, now_ns: int) -> None:
        """Note which rows, the latest of the pool, did not leave with the first flights after they came."""
        for key in map(_key, reversed(self._pool)):
            if key in self._held_since_ns:
                break
            self._held_since_ns[key] = now_ns

    def _is_overdue(self, plan: GroupPlan, now_ns: int) -> bool:
        """Return whether the pool's oldest row has waited as long as predicted. Hand-set flights have no such limit."""
        hold_max_ns = plan.hold_max_ns or self._slowest_flight_ns  # the latter while no curve is known
        held_ns = now_ns - self._held_since_ns.get(_key(self._pool[0]), now_ns)
        return self.config.mode != "fixed" and 0 < hold_max_ns <= held_ns

    @property
    def _is_reading(self) -> bool:
        return bool(self._prompts) or self._flights.n_with_chunks > 0

    def _take_guesses(
        self, plan: GroupPlan, planner: GroupPlanner, envelopes: list[list[OutFrame]], now_ns: int
    ) -> None:
        """Send guesses behind the rows under way, while stages would be idle."""
        if plan.group_rows > 1 or self._pool or self._is_reading or not self._drafts.may_follow:
            return

        def fits(rows: int) -> bool:
            return self._flights.is_time_for(planner.step_ns(rows), planner.way_ns(rows), planner.overhead_ns)

        while (frame := self._drafts.following(fits)) is not None:
            self._moved(frame)
            self._launch(envelopes, Kind.GUESS, [frame], [], now_ns)

    def _traffic(self, plan: GroupPlan, n_streams: int, planner: GroupPlanner) -> Traffic:
        """Return the traffic that a flight of this many streams meets once all decoding streams are under way."""
        n_flights = min(plan.n_groups, math.ceil(self.n_decoding / n_streams))
        n_idle = planner.saturating(n_streams) - n_flights
        # If streams take turns in the flights, some of them wait in the pool.
        n_beside = max(0, min(self.n_decoding - n_streams, (n_flights - 1) * plan.group_rows))
        return Traffic(n_flights, n_beside, max(0, n_idle))

    def _next_group(self, rows_max: int, *, must_take_oldest: bool) -> list[OutFrame]:
        """Take the decode rows of one flight out of the pool."""
        frames = self._next_rows(rows_max, PASSES_MAX if must_take_oldest else self._n_passes)
        for frame in frames:
            self._held_since_ns.pop(_key(frame), None)
        return frames

    def _next_rows(self, rows_max: int, n_passes: int) -> list[OutFrame]:
        if not self.planner.is_per_lane or len(self._pool) == 1:
            return [self._pool.popleft() for _ in range(min(len(self._pool), rows_max))]
        oldest, lanes = self._pool[0], [lane for lane, _ in self._decoding.values()]
        frames = next_group(self._pool, lanes, rows_max, n_passes)
        self._n_passes = 0 if oldest in frames else self._n_passes + 1
        chosen = set(map(id, frames))
        self._pool = collections.deque(frame for frame in self._pool if id(frame) not in chosen)
        return frames

    def _ride_rows(self, plan: GroupPlan, rows: int, now_ns: int) -> int:
        """Return how many prompt rows a decode flight takes along now.

        The plan assumes that flights have spread over the stages, which takes one round after a prompt's first rows.
        Until then a flight may wait behind others that became longer. It then takes fewer prompt rows, so that its
        streams' next tokens meet the plan's bound. There is one exception: where less than half would be left, it
        takes all. On a curve without a step in between, flights would otherwise never spread.
        """
        ride_rows = plan.ride_rows
        if ride_rows and not self.planner.is_per_lane:  # else they are computed apart, and fill tiles by themselves
            ride_rows += plan.group_rows - rows
        if not plan.latency_max_ns or self._flights.n_chunks_running >= SPREAD_CYCLES * plan.n_groups:
            return ride_rows
        fitting = self._planner().ride_within(rows, ride_rows, plan.latency_max_ns - self._flights.queued_ns(now_ns))
        return fitting if 2 * fitting >= ride_rows else ride_rows

    def _take_everything(self, envelopes: list[list[OutFrame]], now_ns: int) -> None:
        if self._pool:
            self._launch(envelopes, Kind.DECODE, list(self._pool), [], now_ns)
            self._pool.clear()
        rows = min(self.config.chunk_rows or DRAIN_CHUNK_ROWS, self.planner.rows_max)
        for chunks in self._prompts.all_chunks(rows):
            self._launch(envelopes, Kind.PREFILL, [], chunks, now_ns)

    # --- flights ------------------------------------------------------------------------------------------------------

    def _launch(
        self,
        envelopes: list[list[OutFrame]],
        kind: Kind,
        decode: list[OutFrame],
        chunks: list[OutFrame],
        now_ns: int,
    ) -> None:
        """Send decode rows or guesses, prompt rows or both as one flight."""
        n_rows, n_prompt_rows = (sum(len(frame.tokens) for frame in part) for part in (decode, chunks))
        decode_tokens = mean_context(decode)
        if self.planner.shares_longest:
            decode_tokens = max((frame.position for frame in decode), default=0)
        planner = self.planner.at(decode_tokens, mean_context(chunks))
        step_ns = planner.mixed_ns(n_rows, n_prompt_rows) if decode else planner.chunk_ns(n_prompt_rows)
        self._flights.launch(kind, decode, chunks, now_ns, step_ns=step_ns, way_ns=planner.way_ns(n_rows))
        envelopes.append(decode + chunks)

    def _learn_overhead(self, flight: Flight, took_ns: int) -> None:
        self._overhead.landed(flight.n_streams, took_ns)
        # With prefill in between, a prediction cannot tell queueing from overhead.
        if flight.way_ns and flight.n_chunks_before == self._flights.n_chunks:
            self._overhead.bounded(took_ns, flight.way_ns, flight.ahead_ns)
        overhead_ns = self._overhead.revised_ns(self.planner.overhead_ns)
        if overhead_ns != self.planner.overhead_ns:
            self.planner.overhead_ns = overhead_ns
            self.planner.forget()


def _key(frame: OutFrame) -> tuple[int, int]:
    return frame.session.session_id, frame.position
