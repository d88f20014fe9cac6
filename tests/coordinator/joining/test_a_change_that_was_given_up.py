"""Goal: a model that is still being split for a change that was given up does not end up in the next change.

Method: a mover with the real `Moves`; the test says when each split is made, and reads which one the epoch gets.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from relayline.coordinator.engine.conductor import Conductor, ConductorConfig
from relayline.coordinator.engine.moves import Moves, MoveState
from relayline.coordinator.engine.pipeline import Pipeline
from relayline.coordinator.joining import mover as module
from relayline.coordinator.joining.mover import LayerMover
from relayline.coordinator.joining.service import JoinService
from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.wire.common.phase import Phase


class Service:
    """What a mover needs of the stages' port: three of them, a and b with layers."""

    def __init__(self) -> None:
        self.roster, self.split = SimpleNamespace(holders=(0, 1)), SimpleNamespace(directory=Path("4"))
        self.prepared: list[tuple[int, ...]] = []

    def unmovable(self, _holders: tuple[int, ...] = ()) -> list[str]:
        return []

    async def prepare(self, _number: int, split: Any, _keeps: Sequence[bool], _holders: tuple[int, ...]) -> None:
        self.prepared.append(split.file.cuts)

    async def drop(self, _number: int) -> None:
        pass

    def switch(self) -> list[int]:
        return []

    def place(self, at: int) -> SimpleNamespace:
        return SimpleNamespace(name="abc"[at])

    async def tell_switch(self, *_: object) -> None:
        pass


class Splitting:
    """A mover; each split is made when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = ConductorConfig(ScheduleConfig(), ("a", "b"), 100)
        conductor = Conductor(config, lambda _: False, itertools.count(1), 0)
        conductor.availability.enter(Phase.READY, 0)
        self.moves = Moves(conductor, ("a", "b", "c"), 8, (4,), (0, 1))
        self.made: dict[tuple[int, ...], asyncio.Future[Path]] = {}
        self.n_let_go = 0  # times that rows were let go
        balance = SimpleNamespace(on_reported=None, moves_in_s=None)
        self.epochs = SimpleNamespace(
            on_ended=None, on_stands=None, connection=None, balance=balance, file=None, stage_names=()
        )
        pipeline = SimpleNamespace(
            moves=self.moves, epochs=self.epochs, conductor=conductor, on_settling=None, planned=None,
            file=SimpleNamespace(cuts=(4,)), ready=asyncio.Event(), is_ready=lambda: True, dispatch=self._dispatch,
        )  # fmt: skip
        monkeypatch.setattr(module, "_next_split", self._next_split)
        monkeypatch.setattr(module, "hand_over_ns", lambda conductor: 0)
        self.mover, self.service = LayerMover(cast(Pipeline, pipeline), self._cut), Service()
        self.mover.attach(cast(JoinService, self.service))

    def _cut(self, cuts: tuple[int, ...]) -> asyncio.Future[Path]:
        return self.made.setdefault(cuts, asyncio.get_running_loop().create_future())

    def _dispatch(self) -> None:
        self.n_let_go += not self.moves._conductor.is_held

    def _next_split(
        self, _held: object, _directory: Path, cuts: tuple[int, ...], before: Sequence[int | None]
    ) -> tuple[Any, tuple[bool, ...]]:
        assert len(before) == len(cuts) + 1, "the holders are those of this change"
        return SimpleNamespace(file=SimpleNamespace(cuts=cuts)), (False,) * len(before)

    async def make(self, cuts: tuple[int, ...]) -> None:
        """Let a split be made, and what waits for it go on until all of it waits again."""
        self.made[cuts].set_result(Path("split"))
        cutting = [task for task in self.mover._tasks if "_cut" in repr(task.get_coro())]
        await asyncio.wait(cutting, return_when=asyncio.FIRST_COMPLETED)

    @property
    def state(self) -> MoveState | None:
        return self.moves.latest.state if self.moves.latest is not None else None


async def test_two_changes_in_one_tick_each_have_their_own_holders(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = Splitting(monkeypatch)
    try:
        world.mover.move((3, 6), (0, 1, 2))
        world.mover.left(2)
        world.mover.move((2,), (0, 1))
        await asyncio.sleep(0)
        for cuts in [(3, 6), (2,)]:
            await world.make(cuts)
        assert world.state is MoveState.PREPARING
        assert "splitting the model again failed" not in caplog.text
    finally:
        await world.mover.close()


async def test_a_switch_that_a_takeover_replaces_is_logged_and_told_the_rebalancer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = Splitting(monkeypatch)
    failed: list[tuple[int, ...]] = []
    own = SimpleNamespace(begun=lambda: None, failed=failed.append)
    world.mover._own = cast(Any, own)
    try:
        world.mover.move((2,), (0, 1))
        await asyncio.sleep(0)
        await world.make((2,))
        for index in (0, 1):
            world.mover.prepared(1, index)
        world.moves._conductor.availability.enter(Phase.RECOVERING, 1)
        world.moves.look(1 << 62)
        assert world.state is MoveState.SWITCHING
        world.mover.move((), (0,))
        assert failed == [(2,)]
        assert "layers moved to 2, but b did not come back with the new layers; others take them over" in caplog.text
    finally:
        await world.mover.close()


@pytest.mark.parametrize("is_late", [True, False], ids=["after the other's", "before the other's"])
async def test_the_next_change_gets_its_own_split(
    is_late: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = Splitting(monkeypatch)
    try:
        world.mover.move((3, 6), (0, 1, 2))
        await asyncio.sleep(0)
        world.mover.left(2)
        assert world.state is MoveState.FAILED, "a stage that was to have layers is gone"
        world.mover.move((2,), (0, 1))
        await asyncio.sleep(0)
        for cuts in [(2,), (3, 6)] if is_late else [(3, 6), (2,)]:
            await world.make(cuts)
        assert world.state is MoveState.PREPARING
        assert world.moves.latest is not None
        for index in (0, 1):
            world.mover.prepared(world.moves.latest.number, index)
        assert world.epochs.file.cuts == (2,)
        assert world.service.prepared == [(2,)]
        assert "splitting the model again failed" not in caplog.text
    finally:
        await world.mover.close()


async def test_rows_that_waited_for_a_switch_leave_when_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer may come any more that would let them go: of all that was under way the clients have left, say."""
    world = Splitting(monkeypatch)
    monkeypatch.setattr(world.moves._conductor.scheduler, "under_way", lambda: {1: (1, 1)})
    try:
        world.mover.move((3, 6), (0, 1, 2))
        await asyncio.sleep(0)
        await world.make((3, 6))
        for index in (0, 1, 2):
            world.mover.prepared(1, index)
        assert (world.state, world.n_let_go) == (MoveState.SETTLING, 0)
        world.mover.left(2)  # which held no layers yet, so the epoch stands
        assert (world.state, world.n_let_go) == (MoveState.FAILED, 1)
    finally:
        await world.mover.close()
