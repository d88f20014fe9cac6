"""Goal: the join port announces planned changes to members, serves the next artifacts, and switches only on order."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from relayline.coordinator.engine.moves import Fetch
from relayline.coordinator.joining.config import JoinConfig, JoiningStage
from relayline.coordinator.joining.members import OpenMembership
from relayline.coordinator.joining.port import make_roster, serve_joining
from relayline.coordinator.joining.service import JoinService, Split
from relayline.coordinator.model.pipeline_file import load_pipeline, store_pipeline
from relayline.stage.joining.client import Member, introduction
from relayline.wire.common.errors import ArtifactError, HandshakeError
from relayline.wire.links.security import PLAINTEXT
from relayline.wire.pb.relayline.v1 import join_pb2 as pb
from tests.support.join_support import NAMES, JoinPort, write_split

NEXT = b"other layers"


class Heard:
    """The stages' reports of a change."""

    def __init__(self) -> None:
        self.lines: asyncio.Queue[tuple[object, ...]] = asyncio.Queue()

    def prepared(self, number: int, index: int) -> None:
        self.lines.put_nowait(("prepared", number, index))

    def fetching(self, number: int, index: int, fetch: Fetch) -> None:
        self.lines.put_nowait(("fetching", number, index, *fetch))

    def failed(self, number: int, why: str) -> None:
        self.lines.put_nowait(("failed", number, why))

    def left(self, index: int) -> None:
        self.lines.put_nowait(("left", index))

    def came(self, index: int) -> None:
        pass


class ChangingPort(JoinPort):
    """A join port whose split can be followed by another."""

    service: JoinService
    heard: Heard
    next: Split


@pytest_asyncio.fixture
async def port(tmp_path: Path) -> AsyncIterator[ChangingPort]:
    file = write_split(tmp_path / "split")
    other = tmp_path / "other"
    write_split(other)
    (other / "stage-1.gguf").write_bytes(NEXT)
    described = load_pipeline(other, stages_here=False)
    last = msgspec.structs.replace(
        described.stages[1], size_bytes=len(NEXT), sha256=hashlib.sha256(NEXT).hexdigest(), layer_start=3
    )
    first = msgspec.structs.replace(described.stages[0], layer_end=3)
    store_pipeline(other, msgspec.structs.replace(described, pipeline_id="next", cuts=(3,), stages=(first, last)))
    config = JoinConfig(tuple(JoiningStage(name) for name in NAMES))
    roster, services = make_roster(config), list[JoinService]()
    joining = serve_joining(config, tmp_path / "split", file, roster, PLAINTEXT, services.append)
    async with joining as (address, _):
        made = ChangingPort(address, roster, config)
        made.service, made.heard = services[0], Heard()
        made.service.changes, made.next = made.heard, Split.at(other, load_pipeline(other))
        yield made


async def fetched(member: Member, sha256: str) -> bytes:
    return b"".join([piece.data async for piece in member.fetch(0, sha256)])


async def serving(member: Member, instance: str) -> None:
    await member.report(serving=pb.StageServing(host="127.0.0.1", port=4000, instance_id=instance))


async def test_members_get_the_next_artifact_while_the_order_still_holds(port: ChangingPort) -> None:
    one, two = await port.join("box1"), await port.join("box2", "p2")
    assert port.service.unmovable() == []
    await port.service.prepare(1, port.next, (True, False))
    keeps, changed = await one.changes.get(), await two.changes.get()
    assert (keeps.change.keeps, changed.change.keeps) == (True, False)
    assert (changed.pipeline_id, changed.stage_index, changed.artifact.size_bytes) == ("next", 1, len(NEXT))
    assert await fetched(two, changed.artifact.sha256) == NEXT
    assert await fetched(two, "") != NEXT, "artifacts of the order before can still be fetched"
    again = await port.join("box1", "p1")
    assert again.order.pipeline_id == "a-pipeline", "a stage that joins before the switch gets the present order"
    assert await port.heard.lines.get() == ("left", 0)
    for member in (one, two, again):
        await member.close()


async def test_reports_of_stages_reach_the_mover(port: ChangingPort) -> None:
    one, two = await port.join("box1"), await port.join("box2", "p2")
    await port.service.prepare(1, port.next, (True, False))
    trouble = "hf://org/repo/f.gguf: " + 20 * "the hub stalls, "
    await one.report(prepared=pb.StagePrepared(change=1, done_bytes=1, total_bytes=2, trouble=trouble))
    await one.report(prepared=pb.StagePrepared(change=1, is_ready=True))
    failure = pb.StageFailure(label="start", message="the disk is full")
    await two.report(prepared=pb.StagePrepared(change=1, failure=failure))
    heard = sorted([await port.heard.lines.get() for _ in range(3)], key=str)
    assert heard == [
        ("failed", 1, "box2: the disk is full"), ("fetching", 1, 0, 1, 2, trouble), ("prepared", 1, 0)
    ]  # fmt: skip
    await port.service.drop(1)
    orders = [await two.changes.get() for _ in range(2)]
    assert orders[1].change.step == pb.LAYER_CHANGE_STEP_DROP
    with pytest.raises(ArtifactError, match="was cancelled"):
        await fetched(two, orders[0].artifact.sha256)
    for member in (one, two):
        await member.close()


async def test_a_change_that_is_given_up_while_stages_are_told_is_prepared_by_no_further_one(
    port: ChangingPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would keep a second slice in memory for nothing, or take the next change's for this one's."""
    one, two = await port.join("box1"), await port.join("box2", "p2")
    say, is_told, goes_on = port.service._say, asyncio.Event(), asyncio.Event()

    async def slow(member: OpenMembership, order: pb.JoinResponse) -> None:
        await say(member, order)
        is_told.set()
        await goes_on.wait()

    monkeypatch.setattr(port.service, "_say", slow)
    preparing = asyncio.create_task(port.service.prepare(1, port.next, (False, False)))
    await is_told.wait()
    monkeypatch.setattr(port.service, "_say", say)
    await port.service.drop(1)
    goes_on.set()
    await preparing
    steps = [(await two.changes.get()).change.step, *[(await one.changes.get()).change.step for _ in range(2)]]
    assert steps == [pb.LAYER_CHANGE_STEP_DROP, pb.LAYER_CHANGE_STEP_PREPARE, pb.LAYER_CHANGE_STEP_DROP]
    assert two.changes.empty()
    for member in (one, two):
        await member.close()


async def test_after_the_switch_every_stage_is_waited_for_and_gets_the_new_order(port: ChangingPort) -> None:
    one, two = await port.join("box1"), await port.join("box2", "p2")
    await serving(one, "i1")
    await serving(two, "i2")
    await port.roster.present()
    lost: list[str] = []
    port.roster.watch(lambda error: lost.append(error.message))
    await port.service.prepare(1, port.next, (True, False))
    assert port.service.switch() == [0, 1]
    await port.service.tell_switch(1, [0, 1])
    assert port.roster.missing() == list(NAMES)
    orders = [await two.changes.get() for _ in range(2)]
    assert orders[1].change.step == pb.LAYER_CHANGE_STEP_SWITCH
    await serving(one, "i1")
    await serving(two, "i3")
    await port.roster.present()
    assert lost == [], "a stage that takes up its layers is not lost"
    await one.close()
    again = await port.join("box1", "p9")
    assert again.order.pipeline_id == "next"
    for member in (two, again):
        await member.close()


async def test_a_spare_gets_layers_and_a_freed_stage_stands_by(tmp_path: Path) -> None:
    file = write_split(tmp_path / "split")
    config = JoinConfig((*(JoiningStage(name) for name in NAMES), JoiningStage("spare", is_spare=True)))
    roster, services = make_roster(config), list[JoinService]()
    joining = serve_joining(config, tmp_path / "split", file, roster, PLAINTEXT, services.append)
    async with asyncio.timeout(60), joining as (address, _):
        port, service = JoinPort(address, roster, config), services[0]
        one, two, spare = await port.join("box1"), await port.join("box2", "p2"), await port.join("spare", "p3")
        assert (spare.order.stands_by, one.order.stands_by) == (True, False)
        with pytest.raises(ArtifactError):
            await fetched(spare, "")
        same = Split.at(tmp_path / "split", load_pipeline(tmp_path / "split"))
        await service.prepare(1, same, (True, False), (0, 2))
        orders = [await member.changes.get() for member in (one, two, spare)]
        assert [order.change.keeps for order in orders] == [True, False, False]
        assert [order.stands_by for order in orders] == [False, True, False]
        assert (orders[2].stage_index, orders[2].artifact.sha256) == (1, file.stages[1].sha256)
        assert len(await fetched(spare, orders[2].artifact.sha256)) == file.stages[1].size_bytes
        assert service.switch() == [0, 1, 2]
        assert roster.holders == (0, 2)
        assert [entry["state"] for entry in roster.describe_idle()] == ["spare"]
        await serving(two, "late")
        assert roster.missing() == ["box1", "spare"], "the freed stage's own report does not count"
        assert service.unmovable((0, 1)) == []
        for member in (one, two, spare):
            await member.close()


async def test_a_stage_that_cannot_stand_by_is_no_spare(tmp_path: Path) -> None:
    file = write_split(tmp_path / "split")
    config = JoinConfig((*(JoiningStage(name) for name in NAMES), JoiningStage("spare", is_spare=True)))
    roster = make_roster(config)
    async with asyncio.timeout(60), serve_joining(config, tmp_path / "split", file, roster, PLAINTEXT) as (address, _):
        hello = introduction("spare", "p1")
        hello.stands_by = False
        with pytest.raises(HandshakeError, match="its version cannot wait without layers"):
            await Member.join(address, PLAINTEXT, hello)


async def test_a_stage_of_a_version_that_cannot_move_is_named(port: ChangingPort) -> None:
    hello = await port.join("box1")
    assert port.service.unmovable() == ["box2"]
    await hello.close()
