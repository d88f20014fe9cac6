"""A member without layers prepares some on order, and serves them after the switch and not before."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from relayline.stage.engine.loading import Load, LoadStoppedError
from relayline.stage.hand_over import HandOver
from relayline.stage.joining import stand_by
from relayline.stage.joining.artifact_fetch import Files
from relayline.stage.joining.stand_by import StandBy
from relayline.wire.common.errors import NativeError, RelaylineError, StageLostError, StartError
from relayline.wire.pb.relayline.v1 import join_pb2 as pb

PREPARE, SWITCH, DROP = pb.LAYER_CHANGE_STEP_PREPARE, pb.LAYER_CHANGE_STEP_SWITCH, pb.LAYER_CHANGE_STEP_DROP


class FakeMember:
    """A membership whose other end the test holds."""

    def __init__(self) -> None:
        self.peer, self.order = "the coordinator", pb.JoinResponse(stands_by=True)
        self.lost: asyncio.Future[RelaylineError] = asyncio.get_running_loop().create_future()
        self.changes: asyncio.Queue[pb.JoinResponse] = asyncio.Queue()
        self.reports: asyncio.Queue[pb.StagePrepared] = asyncio.Queue()

    async def report(self, prepared: pb.StagePrepared) -> None:
        self.reports.put_nowait(prepared)

    def tell(self, step: int, number: int = 1) -> None:
        change = pb.LayerChange(number=number, step=step)  # type: ignore[arg-type]
        self.changes.put_nowait(pb.JoinResponse(pipeline_id=f"split {number}", change=change))


class FakeConfig(str):
    """A configuration by the name of its file; its ports are free unless there is a problem."""

    problem: StartError | None = None

    def check_ports(self) -> None:
        if self.problem is not None:
            raise self.problem


class FakeServed(str):
    """The served engine, by the name of its configuration."""

    def expect(self, hand_over: HandOver | None) -> None:
        assert hand_over is None, "lanes are not mentioned"


class World:
    """One spare member; its services are recorded, and loading lasts as long as the test says."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None, *, is_slow: bool = False
    ) -> None:
        self.member, self.stop = FakeMember(), asyncio.get_running_loop().create_future()
        self.log: list[str] = []
        self.is_loading = asyncio.Event()

        async def obtain(source: Any, cache: Path, load: object, *, always_fetch: bool) -> Files:
            return Files(cache / source.order.pipeline_id)

        @contextlib.asynccontextmanager
        async def serve(config: str, load: Load) -> AsyncIterator[FakeServed]:
            self.log.append(f"loads {config}")
            if error is not None:
                raise error
            self.is_loading.set()
            if is_slow:
                await asyncio.to_thread(load._stopped.wait, 20)
            if load.is_stopped:
                raise LoadStoppedError(config)
            yield FakeServed(config)
            self.log.append(f"closes {config}")

        monkeypatch.setattr(stand_by, "obtain", obtain)
        monkeypatch.setattr(stand_by, "serve_changing", serve)
        member: Any = self.member
        config_of: Any = lambda files, order: FakeConfig(files.artifact.name)  # noqa: E731
        self.standing = StandBy(member, self.stop, config_of, Path("cache"), always_fetch=False)

    async def served(self) -> Any:
        """The layers that it serves in the end, None for none."""
        async with asyncio.timeout(20), self.standing.layers() as served:
            return served


async def test_new_layers_are_loaded_while_the_old_serve_until_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    serving = asyncio.create_task(world.served())
    world.member.tell(PREPARE)
    assert (await world.member.reports.get()).is_ready
    assert not serving.done()
    world.member.tell(SWITCH)
    assert await serving == "split 1"
    assert world.member.order.pipeline_id == "split 1"
    assert world.log == ["loads split 1", "closes split 1"]


async def test_a_change_that_is_off_is_given_back_and_the_next_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    serving = asyncio.create_task(world.served())
    world.member.tell(PREPARE)
    await world.member.reports.get()
    world.member.tell(DROP)
    world.member.tell(PREPARE, 2)
    assert (await world.member.reports.get()).change == 2
    world.member.tell(SWITCH, 2)
    assert await serving == "split 2"
    assert world.log == ["loads split 1", "closes split 1", "loads split 2", "closes split 2"]


async def test_a_load_is_given_up_as_soon_as_the_change_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, is_slow=True)
    serving = asyncio.create_task(world.served())
    world.member.tell(PREPARE)
    await world.is_loading.wait()
    world.member.tell(DROP)
    world.member.lost.set_result(StageLostError("gone"))
    assert await serving is None
    assert world.member.reports.empty(), "an unwanted result is not reported"


@pytest.mark.parametrize(
    ("error", "label"), [(NativeError("no memory"), NativeError.label), (ValueError(), "internal")]
)
async def test_a_failed_preparation_is_reported_and_the_spare_stands_by(
    monkeypatch: pytest.MonkeyPatch, error: Exception, label: str
) -> None:
    world = World(monkeypatch, error)
    serving = asyncio.create_task(world.served())
    world.member.tell(PREPARE)
    report = await world.member.reports.get()
    assert (report.is_ready, report.failure.label) == (False, label)
    world.stop.set_result(None)
    assert await serving is None


async def test_a_taken_port_is_found_before_layers_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    async def obtain(*_: object, **__: object) -> Files:
        raise AssertionError("it fetches")

    world = World(monkeypatch)
    monkeypatch.setattr(stand_by, "obtain", obtain)
    monkeypatch.setattr(FakeConfig, "problem", StartError("the port is taken"))
    serving = asyncio.create_task(world.served())
    world.member.tell(PREPARE)
    assert (await world.member.reports.get()).failure.message == "the port is taken"
    world.stop.set_result(None)
    assert await serving is None


async def test_a_spare_that_has_not_prepared_its_layers_joins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.member.tell(SWITCH)
    assert await world.served() is None
    assert world.log == []
