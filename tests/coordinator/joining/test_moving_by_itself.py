"""Automatic moves of layers take the same way as all moves, and their outcome is remembered."""

from __future__ import annotations

import itertools
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from relayline.coordinator.engine.balance import Balance
from relayline.coordinator.engine.conductor import Conductor, ConductorConfig
from relayline.coordinator.engine.moves import Moves, MoveState
from relayline.coordinator.engine.pipeline import Pipeline
from relayline.coordinator.joining.mover import LayerMover
from relayline.coordinator.joining.service import JoinService
from relayline.coordinator.planner.imbalance import Imbalance
from relayline.coordinator.planner.rebalance import Rebalancer
from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.deploy.cli.unequal import unequal_line
from relayline.wire.common.errors import ArtifactError
from relayline.wire.common.phase import Phase

S = 1_000_000_000
FOUND = Imbalance(1, ((0, 6), (6, 8)), 0.5, 0)


class Placed:
    """A mover of two stages with 4 layers each; splitting fails if the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        conductor = Conductor(
            ConductorConfig(ScheduleConfig(), ("a", "b"), 100), lambda _: False, itertools.count(1), 0
        )
        conductor.availability.enter(Phase.READY, 0)
        self.moves = Moves(conductor, ("a", "b"), 8, (4,))
        self.balance = Balance(lambda: ("a", "b"))
        self.asked: list[tuple[int, ...]] = []
        self.unmovable: list[str] = []
        epochs = SimpleNamespace(balance=self.balance, on_ended=None, on_stands=None)
        pipeline = SimpleNamespace(
            moves=self.moves, epochs=epochs, on_settling=None, file=SimpleNamespace(cuts=(4,)), is_ready=lambda: True
        )
        self.rebalancer = Rebalancer(600 * S)
        self.now_ns = S
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.now_ns)
        self.mover = LayerMover(cast(Pipeline, pipeline), self._cut, rebalancer=self.rebalancer)
        service = SimpleNamespace(unmovable=lambda holders=(): self.unmovable, changes=None)
        self.mover.attach(cast(JoinService, service))

    async def _cut(self, cuts: tuple[int, ...]) -> Path:
        self.asked.append(cuts)
        raise ArtifactError("no room on the disk")

    async def report(self) -> None:
        """A look at which the imbalance is reported, and all that it begins."""
        self.balance.on_reported(FOUND)
        for task in list(self.mover._tasks):
            await task

    @property
    def state(self) -> MoveState | None:
        return self.moves.latest.state if self.moves.latest is not None else None


async def test_a_report_begins_a_move_and_a_failure_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    placed = Placed(monkeypatch)
    with caplog.at_level(logging.INFO, "relayline.coordinator"):
        await placed.report()
    assert placed.asked == [(6,)]
    assert placed.state is MoveState.FAILED
    assert caplog.messages == [
        "moving layers for about 50 % more tokens",
        "moving layers",
        "layers were not moved, and nothing has changed: no room on the disk",
    ]
    placed.now_ns += 1_100 * S
    await placed.report()
    assert placed.asked == [(6,)], "after a failure it waits twice as long"
    assert placed.mover.describe()["rebalance"] == {"every_s": 600.0, "wait_s": 100.0, "moves": 0, "failed": [6]}
    placed.now_ns += 100 * S
    await placed.report()
    assert placed.asked == [(6,), (6,)]


async def test_stages_that_are_not_here_are_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = Placed(monkeypatch)
    placed.unmovable = ["b"]
    await placed.report()
    assert placed.state is None
    placed.unmovable = []
    await placed.report()
    assert placed.asked == [(6,)], "nothing was counted against it"


@pytest.mark.parametrize(
    ("moves_in_s", "end"),
    [(None, "relayline move --cuts 6"), (90.0, "layers move automatically in 90 s"),
     (0.0, "layers move automatically now")],
)  # fmt: skip
def test_the_line_for_people_names_the_stages_that_move_layers(moves_in_s: float | None, end: str) -> None:
    found: dict[str, Any] = FOUND.describe(75 * S) | {"moves_in_s": moves_in_s}
    described = {"imbalance": found, "stages": [{"name": "desk"}, {"name": "laptop"}]}
    assert (
        unequal_line(described)
        == f"laptop has slowed the pipeline down for 75 s: layers 0-5, 6-7 would give 50% more; {end}"
    )
    assert unequal_line({"imbalance": None, "stages": []}) == ""
