"""The scheduler decides which frames leave for stage 0, and when. Pure.

A *flight* is one envelope on its way through the stages. It has landed when each of its frames was answered (by a
sample or a progress note) or dropped. The plan sets how many decode flights may be under way and how many rows each
takes.

Streams whose token has come back wait in the *pool*. When the plan allows another decode flight, the oldest streams of
the pool leave together. No more flights than planned may leave, so fragments of groups meet in the pool and groups
re-form as streams join, leave and fall behind. There is no timer. A frame waits only while the planned number of
groups is under way, and only as long as the curves predict a gain, or as the latest flight took if that was longer.
After that, the next answer releases it in an extra flight. If flights took longer than rows are held, streams that once
left apart would never meet again.

Prompt rows (chunked prefill) travel in decode flights, in separate flights, or in both. The plan chooses, so that
running streams keep their pace. Several short prompts may share a flight. Two kinds of prompt are read before running
streams get their full pace back: a burst of short prompts, and the histories of streams that a loss paused. Opens and
closes never wait.

Guesses (speculative decoding) leave behind the rows of their streams or in extra flights. They leave only while no
prompt is read and stages would otherwise be idle.

Neighbours decide details: `plan_choice` chooses the plan that holds now. `pool` decides which streams' rows leave
together. `tiles` decides which rows may share a step, so that each row always gets the same bits. `prompt_line` decides
which prompt goes next. `draft_flights` decides which guesses leave. A session that copies from another session leaves
right behind it.

The *drain* mode sends everything at once and leaves batching to the queues of the stages. It is the reference for
comparisons, and the mode of a start without a plan.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.coordinator.schedule.draft_flights import DraftFlights
from relayline.coordinator.schedule.draft_plan import traffic
from relayline.coordinator.schedule.draft_wait import GuessWait
from relayline.coordinator.schedule.flights import DECODE, GUESS, PREFILL, Flight, Flights, Kind, mean_context, rows_of
from relayline.coordinator.schedule.groups import GroupPlan, GroupPlanner
from relayline.coordinator.schedule.overhead import Held
from relayline.coordinator.schedule.plan_choice import PlanChoice
from relayline.coordinator.schedule.pool import Pool
from relayline.coordinator.schedule.prompt_line import PromptLine
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.coordinator.schedule.tiles import FlightRoom, TilePace, TileRule
from relayline.coordinator.sessions.session import OutFrame, Session

DRAIN_CHUNK_ROWS = 64
HOLD_STRETCH_MAX = 4  # times its prediction that a row is held at most, however long the latest flight took
SPREAD_CYCLES = 2  # times that every flight has gone round with a prompt's rows until they have spread


class Scheduler:
    """Frames in, envelopes out. One per epoch."""

    def __init__(
        self,
        config: ScheduleConfig,
        planner: GroupPlanner,
        *,
        may_draft: bool = True,
        rewind_rows: int = 0,
        predictions: int = 0,
    ) -> None:
        """`may_draft`: whether the stages can drop wrongly guessed rows. `rewind_rows`: if not, how many of a step.
        `predictions`: tokens that the last stage guesses behind a sample where it is asked to.
        """
        self.config, self.planner = config, planner
        n_tokens = config.draft if may_draft or rewind_rows else 0
        self.drafts = DraftFlights(n_tokens, 0 if may_draft else rewind_rows, predictions)
        self.guess_wait = GuessWait()
        self._controls: list[OutFrame] = []
        self._pool, self._prompts, self._flights = Pool(), PromptLine(), Flights()
        self._plans = PlanChoice(config, planner, self._pool, self._prompts, self._flights)
        self._tile_pace = TilePace()
        self._slowest_flight_ns = self._latest_decode_ns = 0  # of those that have landed
        self.n_decode_landed = 0
        """Decode flights that have landed: each was a step of every stage."""

    @property
    def n_decoding(self) -> int:
        """The number of streams that decode now."""
        return len(self._pool.streams)

    @property
    def is_reading(self) -> bool:
        """Whether prompt rows wait or are under way."""
        return self._plans.is_reading

    # --- events -------------------------------------------------------------------------------------------------------

    def control(self, frames: Iterable[OutFrame]) -> None:
        """Send opens or closes with the next envelopes."""
        self._controls.extend(frames)

    def prompt(self, session: Session) -> None:
        """Queue a session with prompt rows. The scheduler asks it for chunks until none are left."""
        self.drafts.begin(session)
        self._prompts.add(session, self.n_decoding)

    def orphans(self) -> list[Session]:
        """Return the sessions that waited to copy from a session that is gone. The caller starts them again."""
        return self._prompts.orphans()

    def decode(self, frame: OutFrame) -> None:
        """Put a stream's next row into the pool."""
        self.drafts.forget(frame.session.session_id)
        self._pool.add(frame)

    def answered(self, session_id: int, position: int, now_ns: int) -> None:
        """Note the sample for the session's rows up to `position`. A repeated answer changes nothing."""
        if (flight := self._flights.answered(session_id, position)) is not None:
            self._landed(flight, now_ns, DECODE, GUESS)

    def passed(self, session_id: int, position: int, now_ns: int) -> None:
        """Note that rows up to `position` are done without a sample: prompt rows, or rows behind a wrong guess."""
        # Some stages may have skipped a flight that holds nothing but guesses.
        self._landed(self._flights.answered(session_id, position), now_ns, DECODE)

    def _landed(self, flight: Flight | None, now_ns: int, *telling: Kind) -> None:
        """Note a landed flight, if there is one. Decode flights also measure the overhead of a round trip."""
        if flight is None:
            return
        if flight.kind is DECODE:
            self.n_decode_landed += 1
            self._latest_decode_ns = now_ns - flight.sent_ns
            self._plans.decode_landed(flight, now_ns)
        took_ns = now_ns - flight.sent_ns
        self._slowest_flight_ns = max(self._slowest_flight_ns, took_ns)
        if flight.kind in telling and flight.is_whole:
            self._plans.learn_overhead(flight, took_ns)

    def forget(self, session_id: int) -> None:
        """Drop a session that has ended: none of its rows waits or counts any more."""
        self._flights.forget(session_id)
        self._prompts.forget(session_id)
        self.drafts.ended(session_id)
        self._pool.forget(session_id)

    def refresh(self, costs: Sequence[StageCost], held: Sequence[Held] = ()) -> None:
        """Take the stages' learned curves, and how long they held frames (from all stages or from none)."""
        self.planner.update(costs)
        if held:
            self._plans.stages_held(held)

    def under_way(self) -> dict[int, tuple[int, int]]:
        """Return for each session with rows under way which answer is due; `coordinator.sessions.silence` uses it."""
        return self._flights.under_way()

    # --- decisions ----------------------------------------------------------------------------------------------------

    def plan(self) -> GroupPlan:
        """Return the plan for the present streams and prompts."""
        return self._plans.plan(self._plans.planner())

    def describe(self) -> dict[str, object]:
        """Return the plan and the overhead of a round trip, for GET /v1/pipeline.

        `overheads`: the present one, and the latest with other numbers of streams: `ns` with `streams` of them, and
        `stream_ns` for each one more.
        """
        overheads = [dataclasses.asdict(each) for each in self._plans.round_trips()]
        return {
            **dataclasses.asdict(self.plan()),
            "overhead_ns": round(self.planner.round_trip.ns),
            "overheads": [{name: round(value) for name, value in each.items()} for each in overheads],
        }

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
        plans, pool = self._plans, self._pool
        planner = plans.planner()
        plan = plans.plan(planner)
        plans.keep_train()
        rows_max = min(self.config.chunk_rows or self.planner.rows_max, self.planner.rows_max)
        rule = planner.tile_rule.within(rows_max)
        waits = self.config.draft_model_tokens > 0
        self.guess_wait.left_ns = 0
        while pool and ((is_planned := self._flights.count(DECODE) < plan.n_groups) or self._is_overdue(plan, now_ns)):
            if waits and self._waits_for_guesses(plan, planner, now_ns):
                break
            frames = pool.take_group(
                plan.group_rows, is_per_lane=self.planner.is_per_lane, must_take_oldest=not is_planned
            )
            if self.drafts.are_of(frames, self.n_decoding) and not plans.is_reading:
                met = traffic(plan, planner, len(frames), self.n_decoding)
                self.drafts.extend(frames, planner, met, self.n_decoding)
            chunks = self._riding(plan, rule, frames, rows_max, now_ns) if self._prompts else []
            self._launch(envelopes, DECODE, frames, chunks, now_ns)
        pool.note_held(now_ns)
        chunk_rows = min(plan.chunk_rows, rows_max)
        while self._prompts:
            room = FlightRoom(chunk_rows, plan.prefill_flights, self._flights.count(PREFILL))
            n_rows = room.rows
            if rule.waits_for_tile(self._prompts.upcoming()):
                n_rows = self._tile_pace.flight_rows(room, is_decoding=bool(pool.streams))
            chunks = self._prompts.next_chunks(n_rows, rule) if n_rows else []
            if not chunks:
                break
            self._launch(envelopes, PREFILL, [], chunks, now_ns)
        self._take_guesses(plan, planner, envelopes, now_ns)

    def _riding(
        self, plan: GroupPlan, rule: TileRule, frames: Sequence[OutFrame], rows_max: int, now_ns: int
    ) -> list[OutFrame]:
        """Return the prompt rows that leave with a decode flight, while prompts wait."""
        # Prompt rows that a stage leaves behind must not pile up there.
        may_ride = self._flights.n_ridden < plan.n_groups
        ride_rows = min(self._ride_rows(plan, len(frames), now_ns), rows_max) if may_ride else 0
        n_decode = rows_of(frames)
        chunks = self._prompts.next_chunks(ride_rows, rule.for_step(n_decode), n_decode)
        if self._prompts and rule.waits_for_tile(self._prompts.upcoming()):
            left_rows = max(0, ride_rows - rows_of(chunks))
            self._tile_pace.save(left_rows + plan.prefill_flights * plan.chunk_rows / plan.n_groups)
        return chunks

    def _is_overdue(self, plan: GroupPlan, now_ns: int) -> bool:
        """Return whether the pool's oldest row has waited as long as a flight takes. By hand there is no such limit."""
        latest_ns = min(self._latest_decode_ns, HOLD_STRETCH_MAX * plan.hold_max_ns)
        hold_max_ns = max(plan.hold_max_ns, latest_ns) or self._slowest_flight_ns  # the latter while no curve is known
        return self.config.mode != "fixed" and 0 < hold_max_ns <= self._pool.held_ns(now_ns)

    def _take_guesses(
        self, plan: GroupPlan, planner: GroupPlanner, envelopes: list[list[OutFrame]], now_ns: int
    ) -> None:
        """Send guesses behind the rows under way, while stages would be idle."""
        if plan.group_rows > 1 or not self.drafts.may_follow or self._pool or self._plans.is_reading:
            return

        overhead_ns = planner.round_trip.of(self.n_decoding)

        def fits(rows: int) -> bool:
            return self._flights.is_time_for(planner.step_ns(rows), planner.way_ns(rows), overhead_ns)

        while (frame := self.drafts.following(fits)) is not None:
            self._pool.moved(frame)
            self._launch(envelopes, GUESS, [frame], [], now_ns)

    def _waits_for_guesses(self, plan: GroupPlan, planner: GroupPlanner, now_ns: int) -> bool:
        """Return whether the rows that are next had better wait for guesses."""
        frames = list(itertools.islice(self._pool, plan.group_rows))
        if self._plans.is_reading or not self.drafts.are_of(frames, self.n_decoding):
            return False
        return self.guess_wait.holds(frames, planner, traffic(plan, planner, len(frames), self.n_decoding), now_ns)

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
        fitting = self._plans.planner().ride_within(
            rows, ride_rows, plan.latency_max_ns - self._flights.queued_ns(now_ns), self.n_decoding
        )
        return fitting if 2 * fitting >= ride_rows else ride_rows

    def _take_everything(self, envelopes: list[list[OutFrame]], now_ns: int) -> None:
        if self._pool:
            self._launch(envelopes, DECODE, self._pool.take_all(), [], now_ns)
        rows = min(self.config.chunk_rows or DRAIN_CHUNK_ROWS, self.planner.rows_max)
        for chunks in self._prompts.all_chunks(rows):
            self._launch(envelopes, PREFILL, [], chunks, now_ns)

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
        n_rows, n_prompt_rows = rows_of(decode), rows_of(chunks)
        if self.planner.shares_longest:
            decode_tokens = float(max((frame.position for frame in decode), default=0))
        else:
            decode_tokens = mean_context(decode)
        planner = self.planner.at(decode_tokens, mean_context(chunks))
        step_ns = planner.mixed_ns(n_rows, n_prompt_rows) if decode else planner.chunk_ns(n_prompt_rows)
        self._flights.launch(kind, decode, chunks, now_ns, step_ns=step_ns, way_ns=planner.way_ns(n_rows))
        envelopes.append(decode + chunks)
