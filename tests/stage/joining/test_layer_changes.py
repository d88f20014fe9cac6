"""Goal: a member prepares new layers while it serves, reports failures, and switches only to prepared layers."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from relayline.stage.hand_over import HandOver
from relayline.stage.joining import changes as layer_changes
from relayline.stage.joining.artifact_fetch import Files
from relayline.stage.joining.changes import LayerChanges
from relayline.wire.common.errors import NativeError, RelaylineError, StaleEpochError
from relayline.wire.pb.relayline.v1 import join_pb2 as pb


class FakeMember:
    """A membership whose other end the test holds."""

    def __init__(self) -> None:
        self.peer = "the coordinator"
        self.lost: asyncio.Future[RelaylineError] = asyncio.get_running_loop().create_future()
        self.changes: asyncio.Queue[pb.JoinResponse] = asyncio.Queue()
        self.reports: asyncio.Queue[pb.StagePrepared] = asyncio.Queue()

    async def report(self, prepared: pb.StagePrepared) -> None:
        self.reports.put_nowait(prepared)

    def order(self, step: int, number: int = 1, *, keeps: bool = False) -> None:
        change = pb.LayerChange(number=number, step=step, keeps=keeps)  # type: ignore[arg-type]
        self.changes.put_nowait(pb.JoinResponse(pipeline_id="next", change=change))


class FakeServed:
    """Records its calls; `error` is raised by preparing."""

    def __init__(self, error: Exception | None = None) -> None:
        self.done: list[str] = []
        self.hand_over: HandOver | None = None
        self.error, self.facts = (
            error,
            type("Facts", (), {"artifact": type("A", (), {"layer_start": 2, "layer_end": 4, "layers_text": "2-3"})}),
        )

    async def prepare(self, config: object, load: object) -> None:
        if self.error is not None:
            raise self.error
        self.done.append("prepared")

    async def drop(self) -> None:
        self.done.append("dropped")

    def switch(self, within_s: float) -> None:
        self.done.append("switched")

    def expect(self, hand_over: HandOver | None) -> None:
        self.hand_over = hand_over

    def rename(self, pipeline_id: str) -> None:
        self.done.append(f"renamed {pipeline_id}")


class World:
    """One membership and what follows its orders."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        async def obtain(source: Any, cache: Path, load: object, *, always_fetch: bool) -> Files:
            return Files(cache / source.order.artifact.file)

        monkeypatch.setattr(layer_changes, "obtain", obtain)
        self.member, self.served = FakeMember(), FakeServed(error)
        served: Any = self.served
        self.changes = LayerChanges(served, lambda path, order: Any, Path("cache"), always_fetch=False)

    @contextlib.asynccontextmanager
    async def following(self) -> Any:
        member: Any = self.member
        task = asyncio.create_task(self.changes.next_switch(member))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.changes.drop()


async def test_a_slice_is_prepared_and_then_served(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    async with asyncio.timeout(20), world.following() as task:
        world.member.order(pb.LAYER_CHANGE_STEP_PREPARE)
        assert (await world.member.reports.get()).is_ready
        assert not task.done()
        world.member.order(pb.LAYER_CHANGE_STEP_SWITCH)
        assert (await task).pipeline_id == "next"
        assert world.served.done == ["dropped", "prepared", "switched"]


async def test_a_slice_that_is_on_the_way_is_reported_with_what_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)

    async def obtain(source: Any, cache: Path, load: object, *, always_fetch: bool) -> Files:
        await source.report_progress(pb.ARTIFACT_PHASE_FETCHING, 3, 9, "the hub stalls")
        return Files(cache / source.order.artifact.file)

    monkeypatch.setattr(layer_changes, "obtain", obtain)
    async with asyncio.timeout(20), world.following():
        world.member.order(pb.LAYER_CHANGE_STEP_PREPARE, number=4)
        told = pb.StagePrepared(change=4, done_bytes=3, total_bytes=9, trouble="the hub stalls")
        assert await world.member.reports.get() == told
        assert (await world.member.reports.get()).is_ready


async def test_a_slice_that_stays_is_renamed_and_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    async with asyncio.timeout(20), world.following() as task:
        world.member.order(pb.LAYER_CHANGE_STEP_PREPARE, keeps=True)
        assert (await world.member.reports.get()).is_ready
        world.member.order(pb.LAYER_CHANGE_STEP_SWITCH)
        await task
        assert world.served.done == ["dropped", "renamed next"]


@pytest.mark.parametrize(
    ("error", "label", "words"),
    [
        (NativeError("no memory for it"), NativeError.label, "no memory for it"),
        (ValueError("x"), "internal", "ValueError"),
    ],
)
async def test_a_failed_preparation_is_reported_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, error: Exception, label: str, words: str
) -> None:
    world = World(monkeypatch, error)
    async with asyncio.timeout(20), world.following() as task:
        world.member.order(pb.LAYER_CHANGE_STEP_PREPARE)
        report = await world.member.reports.get()
        assert (report.is_ready, report.failure.label) == (False, label)
        assert words in report.failure.message
        world.member.order(pb.LAYER_CHANGE_STEP_SWITCH)
        with pytest.raises(StaleEpochError, match="had not prepared"):
            await task
        assert world.served.done == ["dropped"]


async def test_dropped_layers_cannot_be_switched_to(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    async with asyncio.timeout(20), world.following() as task:
        world.member.order(pb.LAYER_CHANGE_STEP_PREPARE)
        await world.member.reports.get()
        world.member.order(pb.LAYER_CHANGE_STEP_DROP)
        world.member.order(pb.LAYER_CHANGE_STEP_SWITCH)
        with pytest.raises(StaleEpochError):
            await task
        assert "switched" not in world.served.done
