"""Chooses the plan for the present streams and prompts, and learns from flights what plans rest on. Pure.

The plan is the curves' best one (`groups`), the configured one in mode fixed, or one flight of all streams while that
is tried or better (`one_flight`). While prompts are read it says how much of their pace running streams keep.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.coordinator.schedule.flights import PREFILL, Flight, Flights
from relayline.coordinator.schedule.groups import GroupPlan, GroupPlanner
from relayline.coordinator.schedule.one_flight import ONE_FLIGHT_STREAMS_MIN, OneFlight, may_be_better
from relayline.coordinator.schedule.overhead import Held, Overhead, RoundTrip
from relayline.coordinator.schedule.pool import Pool
from relayline.coordinator.schedule.prompt_line import BURST_PRESSURE, PromptLine

BURST_CYCLES = 32  # a burst takes no longer to read than all streams, its own included, take for so many tokens each
REPLAY_PRESSURE = 4  # what paused streams count per running one until they go on: the first to do so are as new to it


class PlanChoice:
    """The plans of one epoch. It reads the scheduler's queues and changes none of them."""

    def __init__(
        self, config: ScheduleConfig, planner: GroupPlanner, pool: Pool, prompts: PromptLine, flights: Flights
    ) -> None:
        self._config, self._base = config, planner
        self._pool, self._prompts, self._flights = pool, prompts, flights
        self._train = 0, 0  # prompt rows and prompts of a train while nothing decodes
        self._overhead, self._one_flight = Overhead(), OneFlight()

    @property
    def is_reading(self) -> bool:
        """Whether prompt rows wait or are under way."""
        return self._flights.n_with_chunks > 0 or bool(self._prompts)

    # --- observations -------------------------------------------------------------------------------------------------

    def decode_landed(self, flight: Flight, now_ns: int) -> None:
        """Note a decode flight that has landed: the trial of one flight counts its tokens."""
        n_streams = len(self._pool.streams) if self._may_be_one() else 0
        self._one_flight.landed(flight.n_streams, n_streams, now_ns)

    def learn_overhead(self, flight: Flight, took_ns: int) -> None:
        """Learn the overhead of a round trip from a flight that came back whole."""
        n_streams = max(flight.n_streams, len(self._pool.streams))
        self._overhead.landed(flight.n_streams, took_ns, n_streams)
        # With prefill in between, a prediction cannot tell queueing from overhead.
        if flight.way_ns and flight.n_chunks_before == self._flights.n_chunks:
            self._overhead.bounded(n_streams, took_ns, flight.way_ns, flight.ahead_ns)
        round_trip = self._overhead.revised(self._base.round_trip)
        if round_trip is not self._base.round_trip:
            self._base.round_trip = round_trip
            self._base.forget()

    def stages_held(self, held: Sequence[Held]) -> None:
        """Take how long the stages held frames."""
        self._overhead.stages_held(held)

    def round_trips(self) -> list[RoundTrip]:
        """Return the overhead of a round trip now, and as it was with other numbers of streams."""
        return self._overhead.known(self._base.round_trip)

    # --- decisions ----------------------------------------------------------------------------------------------------

    def planner(self) -> GroupPlanner:
        """Return the planner for the contexts of the running streams and of the next prompt.

        While streams run, the planner counts the prompt's next rows. Without running streams it counts all of its
        rows, sent ones included, with half of them as context. The whole train has one plan, so its chunks keep
        their size.
        """
        is_decoding = bool(self._pool.streams)
        decode_tokens = self._pool.context_tokens(is_longest=self._base.shares_longest)
        prompt_tokens = 0.0
        if self._prompts:
            prompt = self._prompts.upcoming()
            prompt_tokens = prompt.n_sent if is_decoding else (prompt.n_sent + prompt.prefill_left) / 2
        return self._base.at(decode_tokens, prompt_tokens)

    def plan(self, planner: GroupPlanner) -> GroupPlan:
        """Return the plan for the present streams and prompts, with what `planner()` has returned."""
        return self._by_hand(planner) if self._config.mode == "fixed" else self._automatic(planner)

    def keep_train(self) -> None:
        """Note the prompt rows of the train under way, before some of them leave."""
        self._train = (0, 0) if self._pool.streams else self._count_train()

    def _count_train(self) -> tuple[int, int]:
        """Return all prompt rows and prompts of the train under way, sent ones included: its chunks keep their size."""
        n_rows, n_prompts = self._train if self._flights.count(PREFILL) else (0, 0)
        return max(self._prompts.n_rows, n_rows), max(len(self._prompts), n_prompts)

    def _by_hand(self, planner: GroupPlanner) -> GroupPlan:
        """Return a plan with the configured flights and rows. Any other value fits the running streams."""
        n_decoding, rows_max = len(self._pool.streams), self._base.rows_max
        n_groups, rows = self._config.n_groups, self._config.group_rows
        rows = min(rows or math.ceil(n_decoding / (n_groups or 1)), rows_max) or 1
        n_groups = n_groups or math.ceil(n_decoding / rows) or 1
        # Prompt rows must fit the flights that are under way.
        auto = self._automatic(planner, (min(n_groups, math.ceil(n_decoding / rows)), min(rows, n_decoding)))
        ride_rows = max(0, min(auto.ride_rows, rows_max - rows))
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
        n_decoding, n_prompts = len(self._pool.streams), len(self._prompts)
        if n_decoding:
            if self._one_flight.is_chosen(n_decoding) and self._may_be_one(planner):
                by_hand = (1, n_decoding)
            pressure_min = self._pressure_min(planner) if n_prompts else 0
            return planner.plan(n_decoding, n_prompts=n_prompts, pressure_min=pressure_min, by_hand=by_hand)
        n_prompt_rows, n_prompts = self._count_train()
        return planner.plan(0, n_prompts=n_prompts, n_prompt_rows=n_prompt_rows)

    def _may_be_one(self, planner: GroupPlanner | None = None) -> bool:
        n_streams = len(self._pool.streams)
        if n_streams < ONE_FLIGHT_STREAMS_MIN or not self._base.shares_host or self._config.mode != "auto":
            return False  # without a planner, which is made anew for every token
        return not self.is_reading and may_be_better(planner or self.planner(), n_streams)

    def _pressure_min(self, planner: GroupPlanner) -> int:
        """Return how many prompts per running stream are assumed at least, while some wait."""
        if any(session.is_replay for session in self._prompts.sessions):
            return REPLAY_PRESSURE
        return BURST_PRESSURE if self._is_burst(planner) else 0

    def _is_burst(self, planner: GroupPlanner) -> bool:
        """Return whether a burst of prompts waits that can be read within BURST_CYCLES.

        Without this rule the first streams of a burst would gain weight with every stream that joins them. They would
        save themselves short waits, and the remaining prompts would wait longer.
        """
        if not (self._prompts.is_crowd and planner.is_known):
            return False
        n_rows, n_prompts = self._prompts.n_rows, len(self._prompts)
        chunk = planner.plan(0, n_prompts=n_prompts, n_prompt_rows=n_rows).chunk_rows
        chunk = min(chunk, self._config.chunk_rows or chunk)
        read_ns = math.ceil(n_rows / chunk) * planner.chunk_ns(chunk)
        return read_ns <= BURST_CYCLES * planner.plan(len(self._pool.streams) + n_prompts, n_prompts=0).period_ns
