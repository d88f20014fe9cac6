"""The book of the pool: decode rows that wait at the coordinator, in which order they leave, and for how long they are
held.
"""

from __future__ import annotations

import collections
from collections.abc import Container
from typing import TYPE_CHECKING

from relayline.coordinator.schedule.groups import GroupPlan
from relayline.coordinator.schedule.lane_groups import PASSES_MAX
from relayline.coordinator.schedule.scheduler import HOLD_STRETCH_MAX
from relayline.deploy.testing.simulation.flight_book import FlightBook
from relayline.deploy.testing.simulation.stage import Violation

if TYPE_CHECKING:
    from relayline.deploy.testing.simulation.run import Simulation

Key = tuple[int, int]  # session id, position


class PoolBook:
    """Decode rows in the order in which they became ready."""

    def __init__(self, ended: Container[int], *, is_per_lane: bool) -> None:
        self._ended = ended  # ids of sessions that are over: their rows leave the pool without a flight
        self._is_per_lane = is_per_lane
        self._line: collections.deque[Key] = collections.deque()
        self._came_ns: dict[Key, int] = {}
        self._n_passes = 0

    def came(self, key: Key, now_ns: int) -> None:
        """A row became ready."""
        self._line.append(key)
        self._came_ns[key] = now_ns

    def oldest(self) -> Key | None:
        """Return the row that has waited longest, or None if none waits."""
        return next((key for key in self._line if key[0] not in self._ended), None)

    def held_ns(self, key: Key | None, now_ns: int) -> int:
        """Return how long a row has been held; 0 for none."""
        return now_ns - self._came_ns[key] if key else 0

    def take(self, key: Key, now_ns: int) -> int:
        """A row leaves; returns how long it was held. Raises Violation if it overtook another."""
        while self._line and self._line[0][0] in self._ended:
            self._line.popleft()
        if self._is_per_lane and key in self._line:
            self._line.remove(key)  # neighbouring lanes travel together; see flight_left
        elif not self._line or self._line.popleft() != key:
            raise Violation(f"session {key[0]} overtook another in the pool, or was never in it")
        return now_ns - self._came_ns.pop(key)

    def flight_left(self, oldest: Key | None) -> None:
        """A decode flight has left; this row had waited longest. Raises Violation if too many passed it over."""
        self._n_passes = self._n_passes + 1 if oldest is not None and oldest in self._line else 0
        if self._n_passes > PASSES_MAX:
            raise Violation(f"{self._n_passes} flights left before session {oldest and oldest[0]}, which came first")

    def check_holds(self, hold_max_ns: float, now_ns: int) -> None:
        """Raise Violation if a row is held for longer than this."""
        for key in self._line:
            held_ns = now_ns - self._came_ns[key]
            if key[0] not in self._ended and held_ns > hold_max_ns:
                raise Violation(
                    f"session {key[0]} is held for {held_ns / 1e6:.1f} ms, {hold_max_ns / 1e6:.1f} are predicted"
                )


class HoldBound:
    """How long the coordinator may hold a decode row: as long as the plan predicts a token to take, or some more where
    flights take longer."""

    def __init__(self, simulation: Simulation, flights: FlightBook) -> None:
        self._simulation, self._flights = simulation, flights

    def planned_ns(self, plan: GroupPlan) -> float:
        """Return for how long the plan itself lets a row be held."""
        return plan.hold_max_ns or self._flights.slowest_ns

    def check(self, pool: PoolBook, plan: GroupPlan) -> None:
        """Raise Violation if a row has stayed in the pool for longer than a plan predicts."""
        if self._simulation.setup.schedule.mode in ("drain", "fixed"):
            return
        plans = (plan, self._simulation.scheduler.plan())  # it changes as prompts leave
        hold_max_ns = max(min(self.planned_ns(each), self._predicted_ns(each)) for each in plans)
        if hold_max_ns:  # 0: no curve is known, and no flight has landed
            hold_max_ns = max(hold_max_ns, min(self._flights.latest_decode_ns, HOLD_STRETCH_MAX * hold_max_ns))
            waits_ns = self._simulation.scheduler.guess_wait.longest_ns  # for a draft model, before or behind that
            pool.check_holds(hold_max_ns + waits_ns, self._simulation.now_ns)

    def _predicted_ns(self, plan: GroupPlan) -> float:
        """Return the longest time that a plan may predict for a token: without prompts, or with them."""
        turns = max(1.0, self._simulation.scheduler.n_decoding / (plan.n_groups * plan.group_rows))
        return max(plan.period_ns, plan.latency_max_ns * turns) * (1 + 1e-9) or self._flights.slowest_ns
