"""Goal: strangers who hold connections to a relayed stage keep no one else out, and nothing is left of any of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from relayline.coordinator.relay.door import TICKET_BYTES, Door, Tunnel
from relayline.deploy.machine.ports import free_port
from relayline.wire.common import bounds
from relayline.wire.links.roles import Identity, Role
from relayline.wire.pb.relayline.v1 import tunnel_pb2 as pb
from tests.coordinator.relay.test_relay import LOCAL, WAIT_S, ask, is_closed
from tests.support.ipv6 import need_ipv6
from tests.support.polling import pause
from tests.support.relays import echo, running_relay, serving


async def test_idle_connections_shut_no_stage_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "RELAYED_CONNECTIONS_MAX", 6)
    monkeypatch.setattr(bounds, "RELAYED_UNANSWERED_MAX", 3, raising=False)
    async with running_relay() as relay, serving(echo) as target, relay.stage("a", target) as tunnel:
        reader, writer = await asyncio.open_connection(LOCAL, tunnel.port)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x", "a neighbour"
        idle = []
        for n in range(8):
            idle.append(await asyncio.open_connection(LOCAL, tunnel.port))
            await relay.until("a", "taken", n + 2)
        assert await ask(tunnel.port, b"another neighbour") == b"another neighbour"
        assert await is_closed(idle[0][0]), "the oldest made room"
        writer.write(b"y")
        assert await reader.readexactly(1) == b"y"
        for _, each in idle:
            each.close()
        writer.close()


@contextlib.asynccontextmanager
async def a_door(owner: Identity | None = None) -> AsyncIterator[tuple[Door, list[bytes]]]:
    door, tickets = Door("a"), list[bytes]()

    async def write(message: pb.OpenResponse) -> None:
        tickets.append(message.ticket)

    await door.listen(LOCAL, 0)
    door.begin(Tunnel(owner, write))
    try:
        yield door, tickets
    finally:
        await door.close()


def coming(
    door: Door, tickets: list[bytes], stack: contextlib.AsyncExitStack
) -> Callable[[str], Awaitable[asyncio.StreamReader]]:
    """Return a function that connects from an address, and waits until the door has let it in or refused it."""

    async def come(address: str) -> asyncio.StreamReader:
        n_before = len(tickets) + door.n_refused
        reader, writer = await asyncio.open_connection(LOCAL, door.port, local_addr=(address, 0))
        stack.callback(writer.close)
        while len(tickets) + door.n_refused == n_before:
            await pause()
        return reader

    return come


async def test_a_ticket_is_good_once_and_for_the_stage_that_it_was_given_to() -> None:
    own, other = Identity(Role.STAGE, "box", "a"), Identity(Role.STAGE, "box", "b")
    async with a_door(own) as (door, tickets), contextlib.AsyncExitStack() as stack:
        for n in (1, 2):
            _, writer = await asyncio.open_connection(LOCAL, door.port)
            stack.callback(writer.close)
            while len(tickets) < n:
                await pause()
        first, second = tickets
        assert first != second
        assert len(first) == TICKET_BYTES
        for ticket, caller in ((first, other), (first, None), (bytes(TICKET_BYTES), own)):
            assert door.take(ticket, caller) is None
        assert door.take(first, own) is not None
        assert door.take(first, own) is None, "once"
        assert door._tunnel is not None
        assert door.is_connected
        door._tunnel.ended.set()
        assert door.take(second, own) is None, "its tunnel has ended"


async def test_a_tunnel_takes_the_place_of_the_one_before_which_ends_nothing_then() -> None:
    async with a_door() as (door, _):
        before, left_ns = door._tunnel, door.left_ns
        assert before is not None
        after = Tunnel(None, before.write)
        door.begin(after)
        assert before.ended.is_set()
        door.end(before)
        assert (door.is_connected, door.left_ns, after.ended.is_set()) == (True, left_ns, False)
        door.end(after)
        assert not door.is_connected
        assert door.left_ns > left_ns
        reader, writer = await asyncio.open_connection(LOCAL, door.port)
        assert await is_closed(reader), "the port stays open without a tunnel, and takes nobody in"
        writer.close()
        assert (door.n_refused, door.n_open) == (1, 0)


async def test_a_door_at_every_address_takes_connections_by_both_families() -> None:
    need_ipv6()
    door, port = Door("a"), free_port()
    await door.listen("0.0.0.0", port)
    try:
        for n, host in enumerate((LOCAL, "::1"), 1):
            reader, writer = await asyncio.open_connection(host, port)
            assert await is_closed(reader), "it has no tunnel"
            writer.close()
            assert (door.port, door.n_refused) == (port, n)
    finally:
        await door.close()


async def test_bytes_of_ended_connections_still_count() -> None:
    async with a_door() as (door, tickets):
        reader, writer = await asyncio.open_connection(LOCAL, door.port)
        while not tickets:
            await pause()
        arrival = door.take(tickets[0], None)
        assert arrival is not None
        arrival.counts.to_stage_bytes, arrival.counts.from_stage_bytes = 5, 7
        assert (door.counts.to_stage_bytes, door.counts.from_stage_bytes, door.n_open) == (5, 7, 1)
        arrival.done.set()
        assert await is_closed(reader)
        writer.close()
        while door.n_open:
            await pause()
        assert (door.counts.to_stage_bytes, door.counts.from_stage_bytes, door.n_taken) == (5, 7, 1)


async def test_one_address_has_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "RELAYED_PER_ADDRESS_MAX", 2)
    monkeypatch.setattr("relayline.coordinator.relay.door.is_loopback", lambda host: host == "127.0.0.1")
    async with a_door() as (door, tickets), contextlib.AsyncExitStack() as stack:
        come = coming(door, tickets, stack)
        kept = [await come("127.0.0.2") for _ in range(2)]
        for ticket in tickets:
            arrival = door.take(ticket, None)
            assert arrival is not None
            arrival.counts.from_stage_bytes = 1
        assert await is_closed(await come("127.0.0.2"))
        assert door.n_refused == 1
        await come("127.0.0.3")
        for _ in range(4):
            await come("127.0.0.1")
        assert door.n_open == 7, "this machine's own have the bound of all"
        assert not any(reader.at_eof() for reader in kept)


async def test_an_address_with_too_many_makes_room_among_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "RELAYED_PER_ADDRESS_MAX", 2)
    monkeypatch.setattr("relayline.coordinator.relay.door.is_loopback", lambda host: False)
    async with a_door() as (door, tickets), contextlib.AsyncExitStack() as stack:
        come = coming(door, tickets, stack)
        neighbour = await come("127.0.0.3")
        own = [await come("127.0.0.2") for _ in range(3)]
        assert await is_closed(own[0]), "its oldest that is silent"
        assert (door.n_open, neighbour.at_eof()) == (3, False)
        while len(door._lending) > door.n_open:
            await pause()  # nothing waits on behalf of one that is gone
        monkeypatch.setattr(bounds, "RELAYED_CONNECTIONS_MAX", 3)
        for arrival in door._open.values():
            arrival.counts.from_stage_bytes = 1
        assert await is_closed(await come("127.0.0.4")), "all of the stage's are in use"
        assert (door.n_open, door.n_refused) == (3, 1)


async def test_nothing_is_left_of_a_connection_that_was_not_taken_or_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    before = asyncio.all_tasks()
    monkeypatch.setattr(bounds, "RELAY_PICK_UP_S", 0.05)
    async with a_door() as (door, tickets):
        reader, writer = await asyncio.open_connection(LOCAL, door.port)
        assert await is_closed(reader)
        writer.close()
        monkeypatch.setattr(bounds, "RELAY_PICK_UP_S", 30.0)
        reader, writer = await asyncio.open_connection(LOCAL, door.port)
        while len(tickets) < 2:
            await pause()
        assert door.take(tickets[1], None) is not None
        await pause()
        await door.close()  # cancels
        assert await is_closed(reader)
        writer.close()
    async with asyncio.timeout(WAIT_S):
        while asyncio.all_tasks() != before:
            await pause()


async def test_the_address_with_most_silent_connections_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "RELAYED_UNANSWERED_MAX", 4)
    monkeypatch.setattr("relayline.coordinator.relay.door.is_loopback", lambda host: False)
    async with a_door() as (door, tickets), contextlib.AsyncExitStack() as stack:
        come = coming(door, tickets, stack)
        neighbour = await come("127.0.0.3")
        crowd = [await come("127.0.0.2") for _ in range(6)]
        assert [await is_closed(reader) for reader in crowd[:3]] == [True] * 3
        assert door.n_open == 4
        assert not neighbour.at_eof()
