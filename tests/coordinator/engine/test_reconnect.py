"""Goal: a failed start is final with given addresses only, and requests wait for a bounded time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from relayline.coordinator.engine import reconnect
from relayline.coordinator.engine.membership import Introduction, Membership
from relayline.coordinator.engine.pipeline_config import PipelineConfig
from relayline.coordinator.engine.reconnect import Reconnector
from relayline.coordinator.engine.roster import JoinedRoster, Roster, StaticRoster
from relayline.wire.common import bounds
from relayline.wire.common.errors import HandshakeError, RelaylineError, StageLostError, StartError
from relayline.wire.envelopes.dtypes import DTYPE_F16

WAIT_S = 60
CONNECTED: Any = object()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnect, "RECONNECT_FIRST_S", 0.0)
    monkeypatch.setattr(reconnect, "RECONNECT_MAX_S", 0.0)


class World:
    """Attempts that end as the test says, and requests that wait until they are ended."""

    def __init__(self, roster: Roster, *outcomes: RelaylineError, waiting: bool = False, **times: float) -> None:
        self.outcomes, self.waiting = list(outcomes), waiting
        self.tried: list[tuple[str, ...]] = []
        self.ended: list[str] = []
        config = PipelineConfig((), DTYPE_F16, **times)  # type: ignore[arg-type]
        self.reconnector = Reconnector(config, roster, self._open, lambda: self.waiting, self._fail)

    async def _open(self, addresses: tuple[str, ...]) -> Any:
        self.tried.append(addresses)
        if self.outcomes:
            raise self.outcomes.pop(0)
        return CONNECTED

    def _fail(self, error: RelaylineError) -> None:
        self.ended.append(error.message)
        self.waiting = False


def joined(*names: str) -> JoinedRoster:
    return JoinedRoster(Membership(names, "1.0.0", 0))


def serve(roster: JoinedRoster, name: str) -> int:
    ticket = roster.join(Introduction(name, name, bounds.PROTOCOL_VERSION, "1.0.0", "h"))
    roster.serving(ticket, f"{name}:1", "engine")
    return ticket


async def test_given_addresses_are_tried_until_they_answer() -> None:
    world = World(StaticRoster(["a:1", "b:1"]), StageLostError("x"), StageLostError("y"))
    assert await world.reconnector.connect(is_first=True) is CONNECTED
    assert world.tried == [("a:1", "b:1")] * 3


async def test_a_first_start_ends_at_a_misfit_or_a_timeout() -> None:
    with pytest.raises(HandshakeError):
        await World(StaticRoster(["a:1"]), HandshakeError("misfit")).reconnector.connect(is_first=True)
    slow = World(StaticRoster(["a:1"]), *[StageLostError("nobody there")] * 3, start_timeout_s=0.0)
    with pytest.raises(StartError, match="nobody there; gave up after"):
        await slow.reconnector.connect(is_first=True)


async def test_joining_stages_are_waited_for_without_end_and_no_misfit_is_final() -> None:
    roster = joined("a", "b")
    world = World(roster, HandshakeError("misfit"), StageLostError("x"), start_timeout_s=0.0)
    connecting = asyncio.create_task(world.reconnector.connect(is_first=True))
    serve(roster, "b")
    await asyncio.sleep(0)
    assert world.tried == []
    serve(roster, "a")
    async with asyncio.timeout(WAIT_S):
        assert await connecting is CONNECTED
    assert world.tried == [("a:1", "b:1")] * 3


async def test_requests_that_wait_for_a_joining_stage_too_long_are_ended_and_the_waiting_goes_on() -> None:
    roster = joined("a", "b")
    serve(roster, "a")
    world = World(roster, waiting=True, recovery_timeout_s=0.0)
    connecting = asyncio.create_task(world.reconnector.connect(is_first=False))
    async with asyncio.timeout(WAIT_S):
        while not world.ended:  # noqa: ASYNC110 - ends with the timeout of zero seconds
            await asyncio.sleep(0)
        assert world.ended == ["stages did not come back in time: b"]
        assert not connecting.done()
        serve(roster, "b")
        assert await connecting is CONNECTED


async def test_requests_that_came_after_the_loss_are_ended_too() -> None:
    roster = joined("a")
    world = World(roster, waiting=False, recovery_timeout_s=0.05)
    connecting = asyncio.create_task(world.reconnector.connect(is_first=False))
    await asyncio.sleep(0)
    world.waiting = True
    async with asyncio.timeout(WAIT_S):
        while not world.ended:  # noqa: ASYNC110 - ends with the timeout
            await asyncio.sleep(0)
        assert world.ended == ["stages did not come back in time: a"]
        serve(roster, "a")
        assert await connecting is CONNECTED


async def test_requests_survive_a_stage_that_comes_back_in_time() -> None:
    roster = joined("a")
    world = World(roster, waiting=True, recovery_timeout_s=WAIT_S)
    connecting = asyncio.create_task(world.reconnector.connect(is_first=False))
    await asyncio.sleep(0)
    serve(roster, "a")
    async with asyncio.timeout(WAIT_S):
        assert await connecting is CONNECTED
    assert world.ended == []


async def test_a_member_that_left_again_is_waited_for() -> None:
    roster = joined("a", "b")
    ticket = serve(roster, "a")
    waiting = asyncio.create_task(roster.present())
    await asyncio.sleep(0)
    roster.leave(ticket, "gone")
    serve(roster, "b")
    await asyncio.sleep(0)
    assert not waiting.done()
    serve(roster, "a")
    async with asyncio.timeout(WAIT_S):
        assert await waiting == ("a:1", "b:1")
