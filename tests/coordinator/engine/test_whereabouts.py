"""Goal: a stage is reached at its real address, whatever address it reports, or one line says what to do."""

from __future__ import annotations

import asyncio
import socket

import pytest

from relayline.coordinator.engine import whereabouts as module
from relayline.coordinator.engine.whereabouts import whereabouts
from relayline.deploy.machine.ports import free_port
from relayline.wire.links.security import PLAINTEXT
from tests.support.served_stage import served

ELSEWHERE = "127.0.0.77"  # an address of this machine where nothing listens


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that is there answers, however busy the host is. A closed port refuses at once."""
    monkeypatch.setattr(module, "LOOK_S", 60.0)


async def test_a_stage_of_this_host_is_where_it_says() -> None:
    for reported in ("", "127.0.0.1"):
        assert await whereabouts("laptop", reported, "127.0.0.1", 5, PLAINTEXT) == ("127.0.0.1:5", "")
    assert await whereabouts("laptop", "", "::1", 5, PLAINTEXT) == ("[::1]:5", "")


@pytest.mark.parametrize("reported", ["", ELSEWHERE])
async def test_a_stage_behind_a_closed_port_is_told_of_the_relay(
    reported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_loopback", lambda host: False)  # as if it were another machine
    port = free_port()
    address, line = await whereabouts("laptop", reported, ELSEWHERE, port, PLAINTEXT)
    assert address == f"{ELSEWHERE}:{port}"
    assert line.startswith(f"stage laptop cannot be reached at {address} (")
    assert f"open port {port} on its host" in line
    assert line.endswith("if it is behind NAT or a firewall, start it with --relay")
    assert "\n" not in line
    async with served() as stage:
        host, _, there = stage.address.rpartition(":")
        assert await whereabouts("laptop", reported and host, host, int(there), PLAINTEXT) == (stage.address, "")


async def test_a_stages_own_address_is_used_where_it_is_right() -> None:
    async with served() as stage:
        port = int(stage.address.rpartition(":")[2])
        assert await whereabouts("laptop", "127.0.0.1", ELSEWHERE, port, PLAINTEXT) == (stage.address, "")
        assert await whereabouts("laptop", "localhost", ELSEWHERE, port, PLAINTEXT) == (f"localhost:{port}", "")


async def test_a_stage_that_is_where_it_says_is_asked_nowhere_else() -> None:
    """No certificate for a name holds for the address: the stage would warn of a caller who left without a call."""
    async with served() as stage:
        port = int(stage.address.rpartition(":")[2])
        with socket.socket() as other:
            other.bind((ELSEWHERE, port))
            other.listen()
            other.setblocking(False)
            assert await whereabouts("laptop", "127.0.0.1", ELSEWHERE, port, PLAINTEXT) == (stage.address, "")
            with pytest.raises(BlockingIOError):
                other.accept()


async def test_a_stage_that_has_moved_is_reached_where_it_joins_from() -> None:
    async with served() as stage:
        port = int(stage.address.rpartition(":")[2])
        address, line = await whereabouts("laptop", ELSEWHERE, "127.0.0.1", port, PLAINTEXT)
    assert address == stage.address
    assert line.startswith(f"stage laptop reports the address {ELSEWHERE}:{port}, but it is not there (")
    assert f"the coordinator reaches it at {address}, the address that it joins from." in line
    assert line.endswith("start it with --advertise 127.0.0.1")
    assert "\n" not in line


async def test_a_stage_that_cannot_be_found_gets_a_remedy() -> None:
    port = free_port()
    address, line = await whereabouts("laptop", ELSEWHERE, "127.0.0.1", port, PLAINTEXT)
    assert address == f"{ELSEWHERE}:{port}"
    assert "joins from 127.0.0.1, but it is at neither" in line
    assert "start it again with --advertise HOST and --listen HOST:PORT" in line


async def test_an_address_that_swallows_everything_takes_no_longer_than_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.2)
    with socket.socket() as deaf:  # accepts nothing and answers nothing
        deaf.bind((ELSEWHERE, 0))
        deaf.listen()
        port = deaf.getsockname()[1]
        async with asyncio.timeout(60):
            _, line = await whereabouts("laptop", ELSEWHERE, "127.0.0.1", port, PLAINTEXT)
    assert "did not answer in time" in line


async def test_this_very_host_is_no_place_for_neighbours_on_others() -> None:
    async with served() as stage:
        port = int(stage.address.rpartition(":")[2])
        assert await whereabouts("desk", "192.0.2.1", "127.0.0.1", port, PLAINTEXT) == (f"192.0.2.1:{port}", "")
