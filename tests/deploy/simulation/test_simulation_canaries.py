"""Broken batchers, policies and schedulers, each of which the simulation's audit must catch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from relayline.coordinator.schedule.flights import Kind
from relayline.coordinator.schedule.groups import GroupPlan, GroupPlanner
from relayline.coordinator.schedule.plan_choice import PlanChoice
from relayline.coordinator.schedule.scheduler import Scheduler
from relayline.coordinator.schedule.tiles import TilePace
from relayline.coordinator.sessions.session import OutFrame
from relayline.deploy.testing.simulation import stage as simulate_stage
from relayline.deploy.testing.simulation.run import Setup, Simulation, fixed
from relayline.deploy.testing.simulation.scenarios import (
    burst,
)
from relayline.deploy.testing.simulation.stage import Violation
from relayline.deploy.testing.simulation.world import (
    MS,
    Disturbance,
    Request,
    World,
    equal_stages,
    streams,
)
from relayline.stage.queue_types import QueuedFrame, Step
from relayline.stage.steps import policy
from relayline.stage.steps.batcher import Batcher
from relayline.stage.steps.policy import Choice, GroupPolicy
from relayline.wire.common.curve import ATTENTION_TILE_ROWS
from tests.deploy.simulation.test_simulation import churning
from tests.deploy.simulation.test_simulation_lanes import per_lane


class LosesFrames(Batcher):
    """Drops the last frame of every larger step."""

    def take(self, now_ns: int) -> Step | None:
        step = super().take(now_ns)
        if step is not None and len(step.frames) > 1:
            step.frames.pop()
        return step


class NeverPrefills(GroupPolicy):
    """Serves only decode rows while there are any."""

    def choose(self, decode: Sequence[QueuedFrame], prefill: Sequence[QueuedFrame], **_: bool) -> Choice:
        return Choice(len(decode), 0, "broken") if decode else Choice(0, 0, "broken")


class LastComeFirst(GroupPolicy):
    """Holds prefill back while any decoder waits: starvation under load, not deadlock."""

    def choose(self, decode: Sequence[QueuedFrame], prefill: Sequence[QueuedFrame], **_: bool) -> Choice:
        return Choice(1, 0, "broken") if decode else Choice(0, 1, "broken")


class Overbooks(Scheduler):
    """Ignores the number of flights."""

    def _take_groups(self, envelopes: list[list[OutFrame]], now_ns: int) -> None:
        self._flights._n[Kind.DECODE] = 0
        super()._take_groups(envelopes, now_ns)


class HoldsOn(Scheduler):
    """Holds rows until a flight lands, however long that takes."""

    def _is_overdue(self, plan: GroupPlan, now_ns: int) -> bool:
        return False


class NeverReads(PlanChoice):
    """Lets no prompt row leave while a stream decodes."""

    def plan(self, planner: GroupPlanner) -> GroupPlan:
        plan = super().plan(planner)
        return dataclasses.replace(plan, prefill_flights=0, ride_rows=0) if self._pool.streams else plan


class PilesUp(Scheduler):
    """Has prompt rows ride with every flight, however many are still under way that left with others."""

    def _take_groups(self, envelopes: list[list[OutFrame]], now_ns: int) -> None:
        self._flights.n_ridden = 0
        super()._take_groups(envelopes, now_ns)


class HastyTiles(TilePace):
    """Lets every tile leave during decode as soon as no other flight of prompt rows is under way."""

    def save(self, n_rows: float) -> None:
        super().save(ATTENTION_TILE_ROWS)


def test_a_lost_frame_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_stage, "Batcher", LosesFrames)
    with pytest.raises(Violation, match=r"lost|sent"):
        Simulation(World(equal_stages(2), streams(8, 8))).run()


def test_prefill_that_is_never_served_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "GroupPolicy", NeverPrefills)
    with pytest.raises(Violation, match="holds frames while its engine is free"):
        Simulation(World(equal_stages(2), streams(2, 8))).run()


def test_starved_prefill_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "GroupPolicy", LastComeFirst)
    requests = (*(Request(0, 1, 400) for _ in range(24)), Request(500 * MS, 400, 2))
    setup = dataclasses.replace(fixed(24, 1))
    with pytest.raises(Violation, match="a frame waits"):
        Simulation(World(equal_stages(2), requests), setup).run()


def test_too_many_flights_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relayline.deploy.testing.simulation.run.Scheduler", Overbooks)
    with pytest.raises(Violation, match="the plan allows"):
        Simulation(World(equal_stages(2), streams(12, 30)), fixed(1, 4)).run()


def test_rows_that_are_held_for_too_long_are_caught_although_no_curve_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage stalls; answers to other flights release rows that have waited as long as flights take."""
    early = tuple(Request(7 * MS * index, 4, 60) for index in range(5))
    late = tuple(Request((56 + 100 * index) * MS, 4, 4) for index in range(1, 12))
    stall = Disturbance(168 * MS, 0, stall_ns=2_000 * MS)
    world = World(equal_stages(2, "smooth"), early + late, disturbances=(stall,))
    Simulation(world, Setup(is_calibrated=False)).run()
    monkeypatch.setattr("relayline.deploy.testing.simulation.run.Scheduler", HoldsOn)
    with pytest.raises(Violation, match=r"is held for [0-9.]+ ms, [0-9.]+ are predicted"):
        Simulation(world, Setup(is_calibrated=False)).run()


@pytest.mark.parametrize("says", ["nothing", "that it may"])
def test_rows_that_are_held_for_longer_than_predicted_are_caught(says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the plan itself permits them."""
    world = burst(equal_stages(2, "smooth"), 16, 16, 16, link_ns=MS // 2)
    Simulation(world).run()
    if says == "nothing":
        monkeypatch.setattr("relayline.deploy.testing.simulation.run.Scheduler", HoldsOn)
    else:
        plan = GroupPlanner._plan
        monkeypatch.setattr(
            GroupPlanner, "_plan", lambda *given: dataclasses.replace(plan(*given), hold_max_ns=1e18)
        )  # fmt: skip
    with pytest.raises(Violation, match=r"is held for [0-9.]+ ms, [0-9.]+ are predicted"):
        Simulation(world).run()


def test_prompts_that_nobody_reads_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(equal_stages(2), (*streams(4, 400), Request(2_000 * MS, 40, 2)))
    Simulation(world).run()
    monkeypatch.setattr("relayline.coordinator.schedule.scheduler.PlanChoice", NeverReads)
    with pytest.raises(Violation, match="prompts wait and none has left"):
        Simulation(world).run()


def test_prompt_rows_that_pile_up_behind_decode_rows_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relayline.deploy.testing.simulation.run.Scheduler", PilesUp)
    with pytest.raises(Violation, match="prompt rows ride in"):
        Simulation(churning(0)).run()


def test_a_tile_that_does_not_wait_for_its_room_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = (*(Request(0, 4, 120) for _ in range(8)), Request(60 * MS, 1_000, 2))
    world = World(per_lane(2, "matrix"), requests)
    Simulation(world).run()
    monkeypatch.setattr("relayline.coordinator.schedule.scheduler.TilePace", HastyTiles)
    with pytest.raises(Violation, match="a tile leaves after room for"):
        Simulation(world).run()
