"""A relayed stage's side of its tunnel: be reached at the relay's port, and dial out for each connection that comes.

Each is carried over a connection of its own to the relay, so that no data of one delays heartbeats of another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from relayline.wire.common import bounds
from relayline.wire.common.backoff import Backoff
from relayline.wire.common.errors import HandshakeError, ProtocolError, RelaylineError, StageLostError
from relayline.wire.common.process import first_of
from relayline.wire.common.tasks import end_task, start_among
from relayline.wire.envelopes import messages
from relayline.wire.links import rpc
from relayline.wire.links.carrying import BROKEN, MESSAGE_BYTES_MAX, Carried, End, carry, prepare
from relayline.wire.links.roles import Role
from relayline.wire.links.security import LinkSecurity
from relayline.wire.links.silence import Silence, silent_text
from relayline.wire.links.trouble import first_call
from relayline.wire.links.watch import beat, until_silent
from relayline.wire.pb.relayline.v1 import tunnel_pb2 as pb

log = logging.getLogger("relayline.stage")

OPEN = "/relayline.v1.TunnelService/Open"
CARRY = "/relayline.v1.TunnelService/Carry"
LOCALHOST = "127.0.0.1"  # where a relayed stage listens
AGAIN_FIRST_S, AGAIN_MAX_S = 0.2, 5.0
STAGE_END = End(pb.CarryRequest, pb.CarryResponse, "from_stage_bytes", "to_stage_bytes")

# One that had to make room at the relay may still be ending here.
CARRYING_MAX = bounds.RELAYED_CONNECTIONS_MAX + bounds.RELAYED_UNANSWERED_MAX

OnPort = Callable[[int], Awaitable[None]]
OnMeasured = Callable[[pb.WayMeasured], None]


class Tunnel:
    """The tunnel of one stage to the relay at one address. Event loop only."""

    def __init__(self, address: str, name: str, security: LinkSecurity, target: int, port: int = 0) -> None:
        """`address`: the relay's, host:port. `target`: the port where this stage itself listens, on loopback.

        `port`: where it was reached at the relay's host before, and would be again.
        """
        self.counts = Carried()
        self.port = port
        """Where the stage is reached at the relay's host; 0 until a tunnel was open."""
        self.is_open = False
        self.address = address
        self._name, self._security, self._target = name, security, target
        self._peer = f"the relay at {address}"
        self._carrying: set[asyncio.Task[None]] = set()

    async def keep_open(self, on_port: OnPort) -> None:
        """Hold the tunnel open, again and again; never returns.

        `on_port` is called with the port where others reach the stage, each time that the tunnel is open. Raises
        what the relay refuses, where asking again does not help.
        """
        backoff, said = Backoff(AGAIN_FIRST_S, AGAIN_MAX_S), ""
        while True:
            try:
                was_open = await self._hold(on_port)
                backoff.reset()
                said = ""
                log.warning("the tunnel broke: %s; opening it again", was_open.message)
            except RelaylineError as error:
                if not error.retryable:
                    raise
                if error.message != said:
                    log.warning("no tunnel to the relay yet: %s", error.message)
                said = error.message
            await asyncio.sleep(backoff.apart_s())

    async def measured(self) -> pb.WayMeasured:
        """Return how long the way from the relay to this stage is. Raises as `keep_open`, or StageLostError."""
        found: asyncio.Future[pb.WayMeasured] = asyncio.get_running_loop().create_future()

        async def nothing(_: int) -> None: ...

        def take(way: pb.WayMeasured) -> None:
            if not found.done():
                found.set_result(way)

        holding = asyncio.create_task(self._hold(nothing, take))
        try:
            await first_of(holding, found)
            if not found.done():
                raise holding.result()
            return found.result()
        finally:
            await end_task(holding)

    async def _hold(self, on_port: OnPort, on_measured: OnMeasured | None = None) -> RelaylineError:
        """Hold the tunnel open until it breaks; return why. Raises where it could not be opened."""
        channel = rpc.open_channel(self.address, self._security, Role.COORDINATOR)
        call: Any = None
        try:
            async with first_call(channel, self.address, self._security, f"{self._peer} did not answer"):
                call, first = await self._open(channel, measure=on_measured is not None)
            self.port, self.is_open = first.port, True
            await on_port(first.port)
            return await self._serve(call, on_measured)
        finally:
            self.is_open = False
            if call is not None:
                rpc.end_call(call)
            for task in list(self._carrying):
                await end_task(task)
            await channel.close()

    async def _open(self, channel: grpc.aio.Channel, *, measure: bool) -> tuple[Any, pb.OpenResponse]:
        hello = pb.OpenRequest(name=self._name, wanted_port=self.port, measure=measure)
        try:
            call, data = await rpc.first_reply(channel, OPEN, rpc.serialize(hello))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise HandshakeError(f"{self._peer} is none of this version") from error
            raise rpc.typed(error, self._peer) from error
        if not isinstance(data, bytes):
            raise StageLostError(f"{self._peer} ended the tunnel")
        first = self._read(data)
        if not 0 < first.port <= 65_535:
            call.cancel()
            raise ProtocolError(f"{self._peer} names no port")
        return call, first

    async def _serve(self, call: Any, on_measured: OnMeasured | None) -> RelaylineError:
        """Take connections until the call ends; return why it did."""
        silence = Silence()
        reading = asyncio.create_task(self._take(call, silence, on_measured))
        others = [
            asyncio.create_task(until_silent(silence)),
            asyncio.create_task(beat(lambda message: call.write(rpc.serialize(message)), pb.OpenRequest())),
        ]
        try:
            await first_of(reading, *others)
            if reading.done():
                return reading.result()
            return StageLostError(silent_text(self._peer))
        finally:
            for task in (reading, *others):
                await end_task(task)

    async def _take(self, call: Any, silence: Silence, on_measured: OnMeasured | None) -> RelaylineError:
        try:
            while isinstance(data := await call.read(), bytes):
                silence.heard()
                said = self._read(data)
                if said.ticket and len(self._carrying) < CARRYING_MAX:
                    start_among(self._carrying, self._carry(said.ticket))
                if said.HasField("measured") and on_measured is not None:
                    on_measured(said.measured)
        except grpc.aio.AioRpcError as error:
            return rpc.typed(error, self._peer)
        except ProtocolError as error:
            return error
        return StageLostError(f"{self._peer} ended the tunnel")

    def _read(self, data: bytes) -> pb.OpenResponse:
        return messages.read(pb.OpenResponse, data, "message of a tunnel", who=self._peer)

    async def _carry(self, ticket: bytes) -> None:
        """Carry one connection between the relay and this stage's own port."""
        channel = rpc.open_channel(self.address, self._security, Role.COORDINATOR, receive_bytes_max=MESSAGE_BYTES_MAX)
        call: Any = None
        writer: asyncio.StreamWriter | None = None
        try:
            call = channel.stream_stream(CARRY, request_serializer=None, response_deserializer=None)()
            await call.write(rpc.serialize(pb.CarryRequest(ticket=ticket)))
            limit = bounds.RELAY_BUFFER_BYTES // 2  # asyncio reads up to twice as much
            try:
                reader, writer = await asyncio.open_connection(LOCALHOST, self._target, limit=limit)
            except OSError:
                await call.done_writing()  # the relay closes the connection that nobody takes
                await call.read()
                raise
            prepare(writer)
            await carry(call, STAGE_END, reader, writer, self.counts)
            await call.done_writing()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            while isinstance(await call.read(), bytes):
                pass  # its status follows
        except (*BROKEN, ProtocolError) as error:
            log.debug("a connection to this stage broke: %s", error)
        finally:
            if writer is not None:
                writer.transport.abort()  # does nothing to one that was closed in order
            if call is not None:
                rpc.end_call(call)
            await channel.close()
