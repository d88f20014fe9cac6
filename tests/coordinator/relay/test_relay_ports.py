"""Goal: a stage is reached at a port of its own, and can neither choose one of another listener nor take another's."""

from __future__ import annotations

import asyncio

import pytest

from relayline.coordinator.relay.child import RelayChild
from relayline.coordinator.relay.config import RelayConfig
from relayline.coordinator.relay.process import Event
from relayline.coordinator.relay.service import STAGE_PORTS, ports_for
from relayline.deploy.machine.ports import free_port
from relayline.wire.common import bounds
from relayline.wire.common.errors import NotReadyError, OverloadedError
from relayline.wire.links.security import PLAINTEXT
from tests.support.polling import pause
from tests.support.relays import echo, running_relay, serving

BEYOND = RelayConfig("0.0.0.0", ports={"named": STAGE_PORTS[0], "far": 7_000})
GATEWAY = 8_080


@pytest.mark.parametrize(
    ("name", "before", "wanted", "first"),
    [
        ("new", 0, 0, STAGE_PORTS[1]),
        ("new", 0, STAGE_PORTS[0], STAGE_PORTS[1]),  # that of a stage which has not come yet
        ("new", 0, STAGE_PORTS[9], STAGE_PORTS[9]),
        ("new", 0, GATEWAY, STAGE_PORTS[1]),
        ("new", 0, 7_000, STAGE_PORTS[1]),
        ("new", GATEWAY, GATEWAY, GATEWAY),  # the relay itself had given it that one
        ("named", 0, STAGE_PORTS[9], STAGE_PORTS[0]),
        ("far", 0, 0, 7_000),
    ],
)
def test_a_stage_is_reached_where_no_one_else_may_be(name: str, before: int, wanted: int, first: int) -> None:
    found = ports_for(BEYOND, name, before, wanted)
    assert found[0] == first
    assert not {*found} & ({*BEYOND.ports.values()} - {BEYOND.ports.get(name)})
    assert {*found} <= {*STAGE_PORTS, before, BEYOND.ports.get(name, 0)}


async def test_a_stage_does_not_get_any_free_port_that_it_asks_for() -> None:
    wanted = free_port()
    async with running_relay() as relay, serving(echo) as target, relay.stage("a", target, port=wanted) as tunnel:
        assert tunnel.port not in (0, wanted)


async def test_names_that_nobody_uses_any_more_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "RELAYED_STAGES_MAX", 2)
    async with running_relay() as relay, serving(echo) as target, relay.stage("stays", target):
        async with relay.stage("made-up", target):
            pass
        await relay.until("made-up", "connected", 0)
        with pytest.raises(OverloadedError, match="already has 2 stages"):
            await relay.relay._drop_one()
        monkeypatch.setattr(bounds, "RELAY_DOOR_KEPT_S", 0.0)
        async with relay.stage("new", target) as tunnel:
            assert tunnel.port
            assert {*relay.relay.figures()} == {"stays", "new"}


async def test_a_stage_that_names_another_port_than_the_relays_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relayline.coordinator.relay.child.FIGURES_S", 0.05)
    child = RelayChild(RelayConfig(), PLAINTEXT)
    await child.check_port("a", 5_000)  # nothing is known of it
    child._take(Event(stages={"a": {"port": 5_000}}))
    await child.check_port("a", 5_000)
    with pytest.raises(NotReadyError, match="a says that it is reached at port 6000, but the relay has port 5000"):
        await child.check_port("a", 6_000)


async def test_a_figure_that_comes_late_is_waited_for() -> None:
    child = RelayChild(RelayConfig(), PLAINTEXT)
    child._take(Event(stages={"a": {"port": 5_000}}))
    checking = asyncio.create_task(child.check_port("a", 6_000))
    await pause()
    assert not checking.done()
    child._take(Event(stages={"a": {"port": 6_000}}))
    await checking


def test_a_stage_hears_that_there_is_no_relay_before_it_gives_up() -> None:
    assert bounds.RELAY_START_S < bounds.HANDSHAKE_TIMEOUT_S
