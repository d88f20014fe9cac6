"""Bounds of the waits of frames, flights and prompts, by the costs and flights seen so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relayline.deploy.testing.simulation.flight_book import FlightBook
from relayline.deploy.testing.simulation.prompt_book import PromptBook
from relayline.deploy.testing.simulation.stage import SimStage, Violation

if TYPE_CHECKING:
    from relayline.deploy.testing.simulation.run import Simulation


class Waits:
    """The bounds of waiting. They hold for the policy of groups; other policies have none."""

    def __init__(self, simulation: Simulation, flights: FlightBook, prompts: PromptBook) -> None:
        self._simulation, self._flights, self._prompts = simulation, flights, prompts
        self._has_bound = simulation.setup.stage_policy == "auto" and simulation.setup.schedule.mode != "drain"
        self._stalls_ns = 0
        self._way_max_ns = 0

    def stalled(self, stall_ns: int) -> None:
        """A stage stalls for a while: everything may wait for that much longer."""
        self._stalls_ns += stall_ns

    def check_frame(self, stage: SimStage, since_ns: int, *, is_prefill: bool) -> None:
        """Raise Violation if a frame has waited at a stage since too long ago."""
        bound_ns = self._stage_max_ns(stage, is_prefill=is_prefill) + self._stalls_ns
        waited_ns = self._simulation.now_ns - since_ns
        if self._has_bound and waited_ns > bound_ns:
            raise Violation(
                f"a frame waits {waited_ns / 1e6:.1f} ms at stage {stage.index}, at most {bound_ns / 1e6:.1f}"
            )

    def check_flow(self) -> None:
        """Raise Violation if a flight does not land, or if prompts wait and no chunk leaves."""
        if not self._has_bound:
            return
        now_ns, sent_ns = self._simulation.now_ns, self._flights.oldest_sent_ns()
        under_way_ns = 0 if sent_ns is None else now_ns - sent_ns
        waited_ns = self._prompts.waited_ns(now_ns)
        longest_ns = max(under_way_ns, waited_ns)
        if longest_ns > self._way_max_ns:  # the bound only grows
            self._way_max_ns = self._bound_way_ns()
        if longest_ns > self._way_max_ns:
            what = "a flight is under way" if under_way_ns > waited_ns else "prompts wait and none has left"
            raise Violation(f"{what} for {longest_ns / 1e6:.1f} ms, at most {self._way_max_ns / 1e6:.1f}")

    def _stage_max_ns(self, stage: SimStage, *, is_prefill: bool) -> int:
        n_turns = 1 + self._flights.most_with_chunks if is_prefill else 1
        return (self._flights.most + 1) * stage.cost_max_ns * n_turns

    def _bound_way_ns(self) -> int:
        simulation = self._simulation
        waits_ns = sum(self._stage_max_ns(stage, is_prefill=True) + stage.cost_max_ns for stage in simulation.stages)
        return waits_ns + simulation.links_max_ns + self._stalls_ns
