"""Goal: whatever connects to a relayed stage's port talks to the stage as if it had been dialled, and to no one else.

Method: the relay and stages' tunnels in this process, on loopback; the servers behind them are asyncio's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path

import grpc
import grpc.aio
import pytest

from relayline.deploy.machine.ports import free_port
from relayline.stage.joining.tunnel import CARRY, Tunnel
from relayline.wire.common import bounds
from relayline.wire.common.errors import UnauthenticatedError
from relayline.wire.links import rpc, way
from relayline.wire.links.roles import Role
from relayline.wire.links.security import PLAINTEXT, LinkSecurity
from relayline.wire.pb.relayline.v1 import tunnel_pb2 as pb
from tests.support.identities import make_identities, security_of
from tests.support.polling import pause
from tests.support.relays import RelayUnderTest, echo, running_relay, serving

WAIT_S = 60
LOCAL = "127.0.0.1"


async def ask(port: int, data: bytes) -> bytes:
    """Send, end sending, and return all that comes back."""
    reader, writer = await asyncio.open_connection(LOCAL, port)
    sending = asyncio.create_task(_send(writer, data))
    answer = await reader.read(-1)
    await sending
    writer.close()
    return answer


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()
    writer.write_eof()


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Wait for the end of a connection; return whether it came without a byte."""
    async with asyncio.timeout(WAIT_S):
        try:
            return not await reader.read(1)
        except ConnectionError:
            return True


async def test_bytes_pass_both_ways_and_each_end_may_end_first() -> None:
    data = os.urandom(3 * bounds.RELAY_PIECE_BYTES + 17)
    async with running_relay() as relay, serving(echo) as target, relay.stage("a", target) as tunnel:
        assert await ask(tunnel.port, data) == data, "the server answers after the client has ended its half"
        await relay.until("a", "connections", 0)
        assert relay.figure("a", "to_stage_bytes") == relay.figure("a", "from_stage_bytes") == len(data)
        assert (tunnel.counts.to_stage_bytes, tunnel.counts.from_stage_bytes) == (len(data), len(data))

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"first")
        writer.write_eof()  # the server ends first, and still reads
        heard.set_result(await reader.read(-1))
        writer.close()

    heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    async with running_relay() as relay, serving(greet) as target, relay.stage("a", target) as tunnel:
        assert await ask(tunnel.port, b"second") == b"first"
        assert await heard == b"second"


async def test_many_connections_to_many_stages_at_once() -> None:
    async with running_relay() as relay, serving(echo) as target, contextlib.AsyncExitStack() as stack:
        tunnels = [await stack.enter_async_context(relay.stage(f"s{n}", target)) for n in range(8)]
        assert len({tunnel.port for tunnel in tunnels}) == 8
        wanted = [os.urandom(50_000) for _ in range(4 * 8)]
        found = await asyncio.gather(*(ask(tunnels[n % 8].port, data) for n, data in enumerate(wanted)))
        assert found == wanted


async def test_a_slow_reader_holds_back_its_sender_and_no_other() -> None:
    may_read = asyncio.Event()
    total = 64 << 20

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readexactly(1) == b"s":
            await may_read.wait()
        n_bytes = 1
        while data := await reader.read(1 << 20):
            n_bytes += len(data)
        writer.write(str(n_bytes).encode())
        writer.close()

    async with running_relay() as relay, serving(slow) as target, relay.stage("a", target) as tunnel:
        sending = asyncio.create_task(ask(tunnel.port, b"s" * total))
        n_before, n_same = -1, 0
        while n_same < 20:  # nothing moves any more
            await pause()
            n_now = relay.figure("a", "to_stage_bytes")
            n_same, n_before = (n_same + 1 if n_now == n_before and n_now else 0), n_now
        assert n_before < total // 2, "windows and sockets hold some; the rest waits at the sender"
        assert await ask(tunnel.port, b"f" * 100_000) == b"100000", "another connection goes on"
        may_read.set()
        assert await sending == str(total).encode()


async def test_a_tunnel_that_is_cut_ends_its_connections_and_comes_back_at_the_same_port() -> None:
    async with running_relay() as relay, serving(echo) as target, relay.stage("a", target) as tunnel:
        port = tunnel.port
        reader, writer = await asyncio.open_connection(LOCAL, port)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        cut = relay.relay._doors["a"]._tunnel
        assert cut is not None
        relay.relay._doors["a"].end(cut)
        assert await is_closed(reader)
        writer.close()
        while not tunnel.is_open or relay.relay._doors["a"]._tunnel in (None, cut):
            await pause()
        assert tunnel.port == port
        assert await ask(port, b"again") == b"again"


async def test_a_stage_that_is_gone_is_answered_for_by_nobody() -> None:
    async with running_relay() as relay, serving(echo) as target:
        async with relay.stage("a", target) as tunnel:
            port = tunnel.port
        await relay.until("a", "connected", 0)
        reader, writer = await asyncio.open_connection(LOCAL, port)
        assert await is_closed(reader)
        writer.close()
        assert relay.figure("a", "refused") == 1
        async with relay.stage("a", target, port=port) as tunnel:
            assert tunnel.port == port, "it was kept"


async def test_a_stage_whose_port_is_closed_ends_the_connection_at_once() -> None:
    with socket.socket() as taken:
        taken.bind((LOCAL, 0))  # and does not listen
        async with running_relay() as relay, relay.stage("a", taken.getsockname()[1]) as tunnel:
            reader, writer = await asyncio.open_connection(LOCAL, tunnel.port)
            assert await is_closed(reader)
            writer.close()


async def test_a_connection_that_a_stage_does_not_take_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "RELAY_PICK_UP_S", 0.1)
    async with running_relay() as relay:
        channel = rpc.open_channel(relay.address)
        hello = rpc.serialize(pb.OpenRequest(name="a"))
        call, first = await rpc.first_reply(channel, "/relayline.v1.TunnelService/Open", hello)
        reader, writer = await asyncio.open_connection(LOCAL, pb.OpenResponse.FromString(first).port)
        assert await is_closed(reader)
        writer.close()
        call.cancel()
        await channel.close()


async def test_the_newest_tunnel_of_a_stage_is_the_one_that_counts() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"new")
        writer.close()

    async with running_relay() as relay, serving(echo) as old, serving(greet) as new, relay.stage("a", old) as first:
        port = first.port
        reader, writer = await asyncio.open_connection(LOCAL, port)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        hello = pb.OpenRequest(name="a", wanted_port=port)
        channel = rpc.open_channel(relay.address)
        call, _ = await rpc.first_reply(channel, "/relayline.v1.TunnelService/Open", rpc.serialize(hello))
        assert await is_closed(reader), "its connections ended with it"
        writer.close()
        call.cancel()
        await channel.close()
        async with relay.stage("a", new) as second:
            assert second.port == port


async def test_no_more_connections_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "RELAYED_CONNECTIONS_MAX", 2)
    async with running_relay() as relay, serving(echo) as target, relay.stage("a", target) as tunnel:
        kept = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection(LOCAL, tunnel.port)
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            kept.append(writer)
        reader, writer = await asyncio.open_connection(LOCAL, tunnel.port)
        assert await is_closed(reader)
        writer.close()
        kept.pop().close()
        await relay.until("a", "connections", 1)
        assert await ask(tunnel.port, b"room") == b"room"
        kept.pop().close()


async def test_only_a_stages_own_certificate_opens_its_tunnel_and_takes_its_connections(tmp_path: Path) -> None:
    ids = make_identities(tmp_path)
    own, other = security_of(ids.box1), security_of(ids.box2)
    async with running_relay(security_of(ids.coordinator)) as relay, serving(echo) as target:
        with pytest.raises(
            UnauthenticatedError, match=r"this credential is for stage box2 .* cannot be relayed as box1"
        ):
            async with relay.stage("box1", target, other):
                pass
        for wrong in (ids.stranger, ids.monitor):
            with pytest.raises(UnauthenticatedError):
                await Tunnel(relay.address, "box1", security_of(wrong), target).measured()
        hello = pb.OpenRequest(name="box1")
        channel = rpc.open_channel(relay.address, own, Role.COORDINATOR)
        call, first = await rpc.first_reply(channel, "/relayline.v1.TunnelService/Open", rpc.serialize(hello))
        _, writer = await asyncio.open_connection(LOCAL, pb.OpenResponse.FromString(first).port)
        ticket = b""
        while not ticket:
            ticket = pb.OpenResponse.FromString(await call.read()).ticket
        assert await _carried(relay, ticket, other) is grpc.StatusCode.UNAVAILABLE, "another stage's certificate"
        assert await _carried(relay, bytes(16), own) is grpc.StatusCode.UNAVAILABLE, "no such ticket"
        writer.close()
        call.cancel()
        await channel.close()
        async with relay.stage("box1", target, own) as tunnel:
            assert await ask(tunnel.port, b"mine") == b"mine"


async def _carried(relay: RelayUnderTest, ticket: bytes, security: LinkSecurity) -> grpc.StatusCode:
    channel = rpc.open_channel(relay.address, security, Role.COORDINATOR)
    call = channel.stream_stream(CARRY, request_serializer=None, response_deserializer=None)()
    try:
        await call.write(rpc.serialize(pb.CarryRequest(ticket=ticket)))
        await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        call.cancel()
        await channel.close()
    return grpc.StatusCode.OK


async def test_the_way_is_measured_through_all_that_carries_it() -> None:
    async with running_relay() as relay, serving(way.answer) as target:
        found = await Tunnel(relay.address, "a", PLAINTEXT, target).measured()
        assert 0 < found.round_trip_ns < WAIT_S * 1e9
        assert found.bytes_per_s > 0
        assert relay.figure("a", "to_stage_bytes") >= 2 * way.FRAME_BYTES


async def test_a_stage_gets_the_port_that_is_given_for_it_unless_it_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind((LOCAL, 0))
        taken.listen()
        ports = {"a": taken.getsockname()[1], "b": free_port()}
        async with (
            running_relay(ports=ports) as relay,
            serving(echo) as target,
            relay.stage("a", target) as a,
            relay.stage("b", target) as b,
        ):
            assert b.port == ports["b"]
            assert a.port not in (0, ports["a"])
            assert await ask(a.port, b"a") == b"a"
