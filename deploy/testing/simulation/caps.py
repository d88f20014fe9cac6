"""The plan's bounds: how many flights are under way, and how many rows each carries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from relayline.coordinator.schedule.groups import GroupPlan
from relayline.coordinator.schedule.tiles import TILE_FLIGHTS_MAX
from relayline.coordinator.sessions.session import OutFrame
from relayline.deploy.testing.simulation.flight_book import DECODE, GUESS, PREFILL, FlightBook
from relayline.deploy.testing.simulation.stage import Violation
from relayline.wire.common.bounds import DRAFTED_ROWS_MAX
from relayline.wire.common.curve import ATTENTION_TILE_ROWS
from relayline.wire.envelopes.frames import Flag

if TYPE_CHECKING:
    from relayline.deploy.testing.simulation.run import Simulation


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


class Caps:
    """Checks envelopes against the plan under which they left."""

    def __init__(self, simulation: Simulation, flights: FlightBook) -> None:
        self._simulation, self._flights = simulation, flights
        self._tiles = TileBook(simulation)

    def check(self, rows: Sequence[OutFrame], kind: int, plan: GroupPlan, *, is_overdue: bool) -> None:
        """Raise Violation if an envelope that has just left, or the number of its kind, exceeds the plan.

        `is_overdue`: it carries the row that had waited longest, for as long as the plan allows.
        """
        if self._simulation.setup.schedule.mode == "drain":
            return
        n_prompt_rows = sum(len(frame.tokens) for frame in rows if frame.flags & Flag.PREFILL)
        n_drafted = sum(frame.n_drafted for frame in rows)
        n_decode_rows = sum(len(frame.tokens) for frame in rows) - n_prompt_rows - n_drafted
        if n_drafted > DRAFTED_ROWS_MAX or (n_drafted and n_prompt_rows):
            raise Violation(f"an envelope has {n_drafted} guesses and {n_prompt_rows} rows of prompts")
        n_of_kind = self._flights.n_of_kind
        is_tile = kind == PREFILL and self._tiles.allows(plan, n_prompt_rows, n_of_kind[PREFILL])
        prompt_flights = max(plan.prefill_flights, int(is_tile))
        flights = self._guesses_max() if kind == GUESS else (plan.n_groups, prompt_flights)[kind]
        may_be_more = kind == DECODE and is_overdue and self._simulation.setup.schedule.mode == "auto"
        if n_of_kind[kind] > flights and not may_be_more:
            raise Violation(f"{n_of_kind[kind]} flights are under way, the plan allows {flights}")
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
        n_ridden = self._flights.n_ridden
        if n_ridden > plan.n_groups:
            raise Violation(f"prompt rows ride in {n_ridden} flights, the plan has {plan.n_groups}")

    def _guesses_max(self) -> int:
        """Return how many flights of the cheapest step all stages and links hold, by the coordinator's books."""
        planner = self._simulation.planner
        cheapest_ns = min(planner.step_ns(rows) for rows in range(1, 1 + min(32, planner.rows_max)))
        return len(planner.stages) + math.ceil(planner.round_trip.ns / cheapest_ns) if cheapest_ns else 0
