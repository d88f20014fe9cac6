"""Goal: every stage that can sleep is told to, also one that joins later, and each answer is heard once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from relayline.coordinator.joining.resting import Resting
from relayline.wire.common import bounds
from relayline.wire.common.phase import HostState
from relayline.wire.pb.relayline.v1 import join_pb2 as pb
from tests.coordinator.engine.test_reconnect import joined, serve

NAMES = ("a", "b")
ROUTE = 7


class World:
    """Two stages that serve, the orders that they got, and what is told of them."""

    def __init__(self, *, all_sleep: bool = True) -> None:
        self.roster = joined(*NAMES)
        tickets = [serve(self.roster, name) for name in NAMES]
        self.members: dict[int, Any] = {
            index: SimpleNamespace(index=index, ticket=ticket, sleeps=all_sleep or index == 0)
            for index, ticket in enumerate(tickets)
        }
        self.orders: list[tuple[int, bool]] = []
        self.told: list[tuple[str, ...]] = []
        self.resting = Resting(self.roster, self.members, self._say)
        self.resting.listener = SimpleNamespace(
            failed=lambda name, why: self.told.append(("failed", name, why)),
            left=lambda name: self.told.append(("left", name)),
        )

    async def _say(self, member: Any, order: pb.JoinResponse) -> None:
        assert order.rest.route_id == ROUTE
        self.orders.append((member.index, order.rest.is_asleep))

    async def tell(self, is_asleep: bool) -> None:
        await self.resting.tell(is_asleep=is_asleep, route_id=ROUTE)

    @property
    def states(self) -> list[HostState]:
        return [place.state for place in self.roster.places]


async def test_it_is_done_once_all_have_freed_their_memory() -> None:
    world = World()
    assert world.resting.done.is_set(), "nobody was told anything"
    sending = world.resting.tell(is_asleep=True, route_id=ROUTE)
    assert not world.resting.done.is_set(), "before the first order has left"
    assert world.states == [HostState.SLEEPING] * 2, "nothing can be sent there from now on"
    await sending
    assert world.orders == [(0, True), (1, True)]
    world.resting.sleeps(world.members[0], pb.StageSleeping())
    assert not world.resting.done.is_set()
    world.resting.answered(1)  # it goes on serving
    assert world.resting.done.is_set()
    assert world.told == []
    await world.tell(False)
    assert world.orders[2:] == [(0, False), (1, False)]
    assert world.resting.done.is_set(), "nobody frees memory"


async def test_a_stage_that_knows_no_sleep_is_told_nothing_and_waited_for_by_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(all_sleep=False)
    await world.tell(True)
    assert world.orders == [(0, True)]
    assert (world.states[0], world.states[1]) == (HostState.SLEEPING, HostState.READY)
    assert "b stays loaded" in caplog.text
    world.resting.answered(0)
    assert world.resting.done.is_set()
    caplog.clear()
    assert not world.resting.first(world.members[1], pb.JoinResponse()).HasField("rest")
    assert "b stays loaded" in caplog.text, "it is said of one that joins later, too"


async def test_one_that_joins_later_is_told_in_its_first_order() -> None:
    world = World()
    asleep = world.members.pop(1)
    assert not world.resting.first(asleep, pb.JoinResponse()).HasField("rest"), "the pipeline is awake"
    await world.tell(True)
    assert world.orders == [(0, True)]
    rest = world.resting.first(asleep, pb.JoinResponse()).rest
    assert (rest.is_asleep, rest.route_id) == (True, ROUTE)
    await world.tell(False)
    assert not world.resting.first(asleep, pb.JoinResponse()).HasField("rest")


async def test_a_stage_that_cannot_load_sleeps_again_and_says_why() -> None:
    world = World()
    report = pb.StageSleeping()
    report.failure.message = "not enough memory: " + "x" * bounds.ERROR_TEXT_BYTES_MAX
    world.resting.sleeps(world.members[1], report)
    assert world.states == [HostState.READY, HostState.SLEEPING]
    ((what, name, why),) = world.told
    assert (what, name, len(why)) == ("failed", "b", bounds.ERROR_TEXT_BYTES_MAX)
    world.resting.listener = None
    world.resting.sleeps(world.members[1], report)


async def test_nobody_waits_for_a_stage_that_has_left() -> None:
    world = World()
    await world.tell(True)
    for index in (0, 1):
        world.resting.left(index)
    assert world.resting.done.is_set()
    assert world.told == [("left", "a"), ("left", "b")]
    world.resting.left(2)  # a place without layers
    assert len(world.told) == 2
