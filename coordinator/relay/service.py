"""The calls of relayline.v1.TunnelService: tunnels of stages that can only dial out, and the connections to these."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, TypeAlias

import grpc
import grpc.aio

from relayline.coordinator.relay.config import RelayConfig
from relayline.coordinator.relay.door import Arrival, Door, Tunnel, lend
from relayline.wire.common import bounds
from relayline.wire.common.errors import (
    NotReadyError,
    OverloadedError,
    ProtocolError,
    RelaylineError,
    StaleEpochError,
    StartError,
    UnauthenticatedError,
)
from relayline.wire.common.process import first_of
from relayline.wire.common.tasks import cancel_all
from relayline.wire.common.texts import named_stage
from relayline.wire.envelopes import messages
from relayline.wire.links import rpc, way
from relayline.wire.links.carrying import BROKEN, MESSAGE_BYTES_MAX
from relayline.wire.links.guard import caller
from relayline.wire.links.refusals import peer_of
from relayline.wire.links.roles import NAME, Identity
from relayline.wire.links.security import is_loopback
from relayline.wire.links.silence import Silence, silent_text
from relayline.wire.links.watch import beat, until_silent
from relayline.wire.pb.relayline.v1 import tunnel_pb2 as pb

log = logging.getLogger("relayline.relay")

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

SERVICE = "relayline.v1.TunnelService"
STAGE_PORTS = range(50_051, 50_051 + bounds.RELAYED_STAGES_MAX)  # of stages for which no port is given
EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # and where this process meets itself there


class Relay:
    """All tunnels and ports of one relay. Event loop only."""

    def __init__(self, config: RelayConfig, before: Mapping[str, int] | None = None) -> None:
        """`before`: the port of each stage, by name, at the relay that this one replaces."""
        self._config, self._before = config, before or {}
        self._doors: dict[str, Door] = {}
        self._opening = asyncio.Lock()  # two stages may not choose the same port
        self._measuring = asyncio.Lock()  # one way at a time: they share this host's link

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the generic handler to register with a server."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Open": grpc.stream_stream_rpc_method_handler(self.open, None, rpc.serialize),
                "Carry": grpc.stream_stream_rpc_method_handler(self.carry),
            },
        )

    def figures(self) -> dict[str, dict[str, int]]:
        """Return what the relay carries for each stage, by name."""
        return {
            name: {
                "port": door.port,
                "connected": int(door.is_connected),
                "connections": door.n_open,
                "taken": door.n_taken,
                "refused": door.n_refused,
                "to_stage_bytes": door.counts.to_stage_bytes,
                "from_stage_bytes": door.counts.from_stage_bytes,
            }
            for name, door in self._doors.items()
        }

    async def close(self) -> None:
        """Listen no more, and end all tunnels."""
        for door in self._doors.values():
            await door.close()

    # --- tunnels ------------------------------------------------------------------------------------------------------

    async def open(self, requests: Any, context: Context) -> None:
        """Be reached in a stage's place until its call ends, or falls silent."""
        try:
            hello = await _first(context)
            owner = caller()
            door = await self._door_of(hello, owner)
        except RelaylineError as error:
            log.warning(
                "tunnel refused", extra={"fields": {"from": peer_of(context.peer())[0], "reason": error.message}}
            )
            await rpc.abort(context, error)
        tunnel = Tunnel(owner, _one_by_one(context))
        reason: RelaylineError = ProtocolError("the tunnel was closed")
        silence = Silence()
        door.begin(tunnel)
        work: list[asyncio.Task[Any]] = []
        try:
            await tunnel.write(pb.OpenResponse(port=door.port))
            log.info("tunnel open", extra={"fields": {"stage": door.name, "port": door.port}})
            reading = asyncio.create_task(_read(context, silence))
            work += [reading, asyncio.create_task(until_silent(silence)), asyncio.create_task(tunnel.ended.wait())]
            ends = list(work)
            work.append(asyncio.create_task(beat(tunnel.write, pb.OpenResponse())))
            if hello.measure:
                work.append(asyncio.create_task(self._measure(door, tunnel)))
            await first_of(*ends)
            if reading.done():
                reading.result()
                return
            reason = StaleEpochError("another tunnel of this stage was opened, or the relay stops")
            if not tunnel.ended.is_set():
                reason = StaleEpochError(silent_text("it"))
            await rpc.abort(context, reason)
        except ProtocolError as error:
            reason = error
            await rpc.abort(context, error)
        finally:
            door.end(tunnel)
            log.info("tunnel closed", extra={"fields": {"stage": door.name, "reason": reason.message}})
            await cancel_all(work)

    async def _door_of(self, hello: pb.OpenRequest, owner: Identity | None) -> Door:
        """Return the port of a stage, which listens.

        Raises UnauthenticatedError, ProtocolError, OverloadedError, StartError.
        """
        if owner is not None and hello.name != owner.name:
            raise UnauthenticatedError(f"this credential is for {owner}; it cannot be relayed as {hello.name}")
        if not NAME.fullmatch(hello.name):
            raise ProtocolError("a tunnel names no stage")
        async with self._opening:
            door = self._doors.get(hello.name)
            if door is None:
                if len(self._doors) >= bounds.RELAYED_STAGES_MAX:
                    await self._drop_one()
                door = Door(hello.name)
                await self._listen(door, hello.wanted_port)
                self._doors[hello.name] = door
            return door

    async def _drop_one(self) -> None:
        """Give up the port of a stage that has left long ago. Raises OverloadedError where there is none."""
        left = [door for door in self._doors.values() if not (door.is_connected or self._config.ports.get(door.name))]
        oldest = min(left, key=lambda door: door.left_ns, default=None)
        if oldest is None or time.monotonic_ns() - oldest.left_ns < bounds.RELAY_DOOR_KEPT_S * 1e9:
            raise OverloadedError(f"this relay already has {len(self._doors)} stages, which is the limit")
        del self._doors[oldest.name]
        await oldest.close()

    async def _listen(self, door: Door, wanted: int) -> None:
        """Have a door listen where it is to, else where it did before, else on the first free port."""
        given, why = self._config.ports.get(door.name, 0), ""
        for port in ports_for(self._config, door.name, self._before.get(door.name, 0), wanted):
            try:
                await door.listen(self._config.host, port)
            except OSError as error:
                log.debug("port %d is not free: %s", port, error.strerror or error)
                why = why or str(error.strerror or error)
                continue
            if given not in (0, door.port):
                line = "port %d of relayed stage %s cannot be listened on (%s); others reach the stage at port %d"
                log.warning(line, given, door.name, why, door.port)
            return
        raise StartError(f"no port is free on {self._config.host} for relayed {named_stage(door.name)}")

    async def _measure(self, door: Door, tunnel: Tunnel) -> None:
        found = pb.WayMeasured()
        host = EVERY_ADDRESS.get(self._config.host, self._config.host)
        async with self._measuring:
            try:
                reader, writer = await asyncio.open_connection(host, door.port)
                try:
                    found.round_trip_ns, found.bytes_per_s = await way.measure(reader, writer)
                finally:
                    writer.transport.abort()
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                log.warning("the way to stage %s could not be measured: %s", door.name, error or type(error).__name__)
        await tunnel.write(pb.OpenResponse(measured=found))

    # --- connections --------------------------------------------------------------------------------------------------

    async def carry(self, requests: Any, context: Context) -> None:
        """Carry one connection until both its ends are done."""
        try:
            arrival, door = await self._arrival(context)
        except RelaylineError as error:
            await rpc.abort(context, error)
        try:
            await lend(context, arrival)
        except BROKEN as error:
            log.debug("a connection to stage %s broke: %s", door.name, error)
            await rpc.abort(context, StaleEpochError("the connection broke"))
        except ProtocolError as error:
            await rpc.abort(context, error)

    async def _arrival(self, context: Context) -> tuple[Arrival, Door]:
        try:
            async with asyncio.timeout(bounds.HANDSHAKE_TIMEOUT_S):
                message = await context.read()
        except TimeoutError as error:
            raise ProtocolError("no ticket came on this call") from error
        if not isinstance(message, bytes):
            raise ProtocolError("the first message of a connection must be its ticket")
        ticket = messages.read(pb.CarryRequest, message, "ticket", bytes_max=MESSAGE_BYTES_MAX, who="a stage").ticket
        for door in self._doors.values():
            if (arrival := door.take(ticket, caller())) is not None:
                return arrival, door
        raise NotReadyError("the connection of this ticket has gone")


def ports_for(config: RelayConfig, name: str, before: int, wanted: int) -> list[int]:
    """Return the ports to try for a stage, the best first; 0 is any free one.

    A stage that has been reached at `wanted` is so again only where a relay may have given that port to it: on any
    other it could answer in place of a listener of this host. No stage gets a port that is given to another one.
    """
    given = config.ports.get(name, 0)
    others = {port for other, port in config.ports.items() if port and other != name}
    again = [port for port in (before, wanted) if port in (before, *STAGE_PORTS)]
    usual = [0] if is_loopback(config.host) else STAGE_PORTS
    found = [given] if given else []
    found += [port for port in again if port and port not in others]
    found += [port for port in usual if port not in others]
    return list(dict.fromkeys(found))


async def _first(context: Context) -> pb.OpenRequest:
    try:
        async with asyncio.timeout(bounds.HANDSHAKE_TIMEOUT_S):
            hello = _parse(await context.read())
    except TimeoutError as error:
        raise ProtocolError("no introduction came on this tunnel") from error
    if hello is None:
        raise ProtocolError("the first message of a tunnel must name its stage")
    return hello


async def _read(context: Context, silence: Silence) -> None:
    while _parse(await context.read()) is not None:
        silence.heard()


def _parse(message: Any) -> pb.OpenRequest | None:
    """Read one request; None at the end of the stream. Raises ProtocolError."""
    if not isinstance(message, bytes):
        return None
    return messages.read(pb.OpenRequest, message, "request of a tunnel", who="a stage")


def _one_by_one(context: Context) -> Any:
    """Return how to write to a call for several at once; gRPC allows only one."""
    writing = asyncio.Lock()

    async def write(message: pb.OpenResponse) -> None:
        async with writing:
            await context.write(message)

    return write
