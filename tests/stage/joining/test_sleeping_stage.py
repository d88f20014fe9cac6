"""Goal: a member frees its engine on order, stays a member, loads again on order, and survives a load that fails."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from relayline.coordinator.joining.config import JoinConfig, JoiningStage
from relayline.coordinator.joining.port import make_roster, serve_joining
from relayline.coordinator.joining.service import JoinService
from relayline.deploy.machine.ports import free_port
from relayline.stage.engine.loading import WEIGHTS, Load
from relayline.stage.joining import join
from relayline.stage.joining.client import Member, introduction
from relayline.wire.common.errors import NativeError
from relayline.wire.common.process import first_of
from relayline.wire.links.security import PLAINTEXT
from relayline.wire.pb.relayline.v1 import join_pb2 as pb
from relayline.wire.settings.table import EngineSettings
from tests.stage.joining.test_joined_stage import WAIT_S, Engines, Living, serves
from tests.stage.joining.test_joined_stage import engines as engines
from tests.support.join_support import NAMES, JoinPort, write_split


class RestingPort(JoinPort):
    """A join port with the pipeline's sleep."""

    service: JoinService

    async def old(self, process_id: str) -> Member:
        """Join as a stage that knows no sleep."""
        hello = introduction("box1", process_id)
        hello.sleeps = False
        return await Member.join(self.address, PLAINTEXT, hello)

    async def rest(self, *, is_asleep: bool) -> None:
        await self.service.resting.tell(is_asleep=is_asleep, route_id=7)

    async def until(self, state: str) -> None:
        while self.roster.describe()[0]["state"] != state:  # noqa: ASYNC110 - the roster tells nobody but the pipeline
            await asyncio.sleep(0)

    async def asleep(self) -> None:
        """Wait until box1 has freed its memory."""
        await self.service.resting.done.wait()
        await self.until("sleeping")


class Heard:
    """What stages say about their sleep."""

    def __init__(self) -> None:
        self.failures: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.gone: list[str] = []

    def failed(self, name: str, why: str) -> None:
        self.failures.put_nowait((name, why))

    def left(self, name: str) -> None:
        self.gone.append(name)


@contextlib.asynccontextmanager
async def resting(split: Path) -> AsyncIterator[RestingPort]:
    settings = JoinConfig(tuple(JoiningStage(name, EngineSettings()) for name in NAMES))
    roster, services = make_roster(settings), list[JoinService]()
    joining = serve_joining(settings, split, write_split(split), roster, PLAINTEXT, services.append)
    async with asyncio.timeout(WAIT_S), joining as (address, _):
        made = RestingPort(address, roster, settings)
        made.service = services[0]
        yield made


async def test_a_stage_frees_its_engine_on_order_and_loads_it_again_without_measuring(
    tmp_path: Path, engines: Engines
) -> None:
    async with resting(tmp_path / "split") as port:
        stage = Living(port.address, tmp_path)
        await serves(port, engines)
        await port.rest(is_asleep=True)
        assert port.roster.missing() == list(NAMES), "from the order on nothing can be sent there"
        await engines.ended.wait()
        await port.asleep()
        assert not engines.serving.is_set()
        assert port.roster.places[0].member is not None, "it is still a member"
        await port.rest(is_asleep=False)
        await serves(port, engines)
        assert [like and like.curves for like in engines.like] == [None, "learned"]
        await stage.stop()


async def test_memory_counts_as_taken_from_the_moment_that_stages_are_to_free_it(
    tmp_path: Path, engines: Engines
) -> None:
    async with resting(tmp_path / "split") as port:
        stage = Living(port.address, tmp_path)
        await serves(port, engines)
        sending = port.service.resting.tell(is_asleep=True, route_id=7)
        assert not port.service.resting.done.is_set(), "though nothing is sent yet"
        await sending
        await port.asleep()
        await stage.stop()


async def test_a_stage_that_sleeps_has_nothing_left_of_its_engine(tmp_path: Path, engines: Engines) -> None:
    async with resting(tmp_path / "split") as port:
        stage = Living(port.address, tmp_path)
        await serves(port, engines)
        gc.disable()  # Python would find it at some time, and an idle process may never come to that
        try:
            assert engines.handle is not None
            assert engines.handle() is not None
            await port.rest(is_asleep=True)
            await port.asleep()
            assert engines.handle() is None
        finally:
            gc.enable()
        await stage.stop()


async def test_a_stage_that_joins_while_the_pipeline_sleeps_loads_nothing(tmp_path: Path, engines: Engines) -> None:
    async with resting(tmp_path / "split") as port:
        await port.rest(is_asleep=True)
        stage = Living(port.address, tmp_path)
        await port.until("sleeping")
        assert engines.loaded == []
        await port.rest(is_asleep=False)
        await serves(port, engines)
        await stage.stop()


async def test_a_stage_that_cannot_load_says_why_and_can_be_woken_again(tmp_path: Path, engines: Engines) -> None:
    def no_room(load: Load) -> None:
        raise NativeError("no memory")

    async with resting(tmp_path / "split") as port:
        port.service.resting.listener = heard = Heard()
        stage = Living(port.address, tmp_path)
        await serves(port, engines)
        await port.rest(is_asleep=True)
        await port.asleep()
        load, engines.load = engines.load, no_room
        await port.rest(is_asleep=False)
        assert await heard.failures.get() == ("box1", "no memory")
        await port.rest(is_asleep=True)
        assert not stage.task.done()
        assert heard.gone == [], "it is still a member"
        engines.load = load
        await port.rest(is_asleep=False)
        await serves(port, engines)
        await stage.stop()


async def test_a_stage_whose_port_is_taken_while_it_sleeps_says_so_and_can_be_woken_again(
    tmp_path: Path, engines: Engines
) -> None:
    async with resting(tmp_path / "split") as port:
        port.service.resting.listener = heard = Heard()
        own = free_port()
        stage = Living(port.address, tmp_path, host="127.0.0.1", port=own)
        await serves(port, engines)
        await port.rest(is_asleep=True)
        await port.asleep()
        with socket.create_server(("127.0.0.1", own)):
            await port.rest(is_asleep=False)
            failed = asyncio.create_task(heard.failures.get())
            await first_of(failed, stage.task)
            assert failed.done(), "it stays: whoever holds the port may go"
            assert failed.result()[0] == "box1"
            assert f"127.0.0.1:{own} is taken by another process" in failed.result()[1]
            await port.rest(is_asleep=True)
        await port.rest(is_asleep=False)
        await serves(port, engines)
        assert [like and like.curves for like in engines.like] == [None, "learned"]
        await stage.stop()


async def test_an_order_to_sleep_ends_a_load(tmp_path: Path, engines: Engines) -> None:
    def endless(load: Load) -> None:
        while True:
            load.at(WEIGHTS, 0.5)

    async with resting(tmp_path / "split") as port:
        await port.rest(is_asleep=True)
        stage = Living(port.address, tmp_path)
        await port.until("sleeping")
        engines.load = endless
        await port.rest(is_asleep=False)
        await port.until("loading")
        await port.rest(is_asleep=True)
        await port.asleep()
        assert not stage.task.done()
        await stage.stop()


async def test_a_stage_that_another_coordinator_uses_stays_loaded_and_says_so_once_per_order(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks, n_looks = asyncio.Queue[None](), 3
    monkeypatch.setattr(join, "USED_LOOK_S", 0.0)
    monkeypatch.setattr(engines, "on_look", lambda: looks.put_nowait(None))

    def lines() -> list[str]:
        return [each for each in caplog.messages if each.startswith("stays loaded")]

    async with resting(tmp_path / "split") as port:
        stage = Living(port.address, tmp_path)
        await serves(port, engines)
        engines.is_used = True
        for n_orders in (1, 2):
            await port.rest(is_asleep=True)
            await serves(port, engines)
            while not looks.empty():
                looks.get_nowait()
            for _ in range(n_looks):
                await looks.get()
            assert len(lines()) == n_orders
            await port.rest(is_asleep=False)
            await serves(port, engines)
        assert len(engines.loaded) == 1
        await stage.stop()


async def test_a_stage_of_an_older_version_is_not_told_to_sleep(tmp_path: Path, engines: Engines) -> None:
    async with resting(tmp_path / "split") as port:
        old = await port.old("p1")
        assert not old.rest.is_asleep
        await port.rest(is_asleep=True)
        assert port.service.resting.done.is_set(), "nobody is waited for"
        await old.close()
        again = await port.old("p2")
        assert not again.order.HasField("rest")
        await again.close()


async def test_a_stage_that_leaves_is_not_waited_for(tmp_path: Path, engines: Engines) -> None:
    async with resting(tmp_path / "split") as port:
        port.service.resting.listener = heard = Heard()
        member = await port.join("box1")
        await member.report(serving=pb.StageServing(host="127.0.0.1", port=4000, instance_id="i"))
        await port.until("ready")
        await port.rest(is_asleep=True)
        assert not port.service.resting.done.is_set()
        await member.close()
        await port.service.resting.done.wait()
        assert heard.gone == ["box1"]
