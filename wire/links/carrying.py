"""Carries the bytes of one TCP connection over one call of relayline.v1.TunnelService, the same at both its ends.

The bytes are TLS between two others. gRPC's flow control holds back a fast sender. From a connection
nothing is read before the call has taken the last piece, and from the call nothing before the connection has taken it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable
from typing import Any, Protocol

import grpc
import grpc.aio

from relayline.wire.common import bounds
from relayline.wire.common.errors import ProtocolError
from relayline.wire.common.tasks import end_task, to_its_end
from relayline.wire.envelopes import messages

MESSAGE_BYTES_MAX = bounds.RELAY_PIECE_BYTES + 64
# Of each connection that carries, at both ends. Without the probe the window stays as it is.
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.http2.lookahead_bytes", bounds.RELAY_WINDOW_BYTES),
    ("grpc.http2.bdp_probe", 0),
)
# What a call or a connection raises once its other end is gone.
BROKEN = (OSError, grpc.aio.AioRpcError, grpc.aio.UsageError, grpc.aio.InternalError, asyncio.InvalidStateError)


class Call(Protocol):
    """A two-way call without serializers: a client's, or a server's context."""

    async def read(self) -> Any:
        """Return the next message, or grpc.aio.EOF."""

    async def write(self, message: bytes) -> None:
        """Send a message; returns once gRPC has taken it."""


@dataclasses.dataclass(slots=True)
class Carried:
    """Counts of what was carried, of one connection or several."""

    to_stage_bytes: int = 0
    from_stage_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    """One of the two ends of a tunnel: which messages it sends and reads, and where it counts."""

    sends: Any
    reads: Any
    sent: str
    """Field of Carried that counts what this end sends."""
    received: str


async def carry(
    call: Call, end: End, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counts: Carried
) -> None:
    """Carry bytes both ways until both have ended, each with the end of its sender's bytes.

    Raises one of BROKEN where the call or the connection breaks, ProtocolError for a message that makes no sense.
    """
    ways = {
        asyncio.create_task(_send(call, end, reader, counts)),
        asyncio.create_task(_receive(call, end, writer, counts)),
    }
    for each in ways:  # also where this is cancelled while it ends one of them
        each.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    try:
        done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
        for way in done:
            way.result()
    finally:
        await to_its_end(_end(ways))  # gRPC cancels a call that broke once more: no way may be left behind


async def _end(ways: Iterable[asyncio.Task[None]]) -> None:
    for way in ways:
        await end_task(way)


async def _send(call: Call, end: End, reader: asyncio.StreamReader, counts: Carried) -> None:
    while data := await reader.read(bounds.RELAY_PIECE_BYTES):
        await call.write(end.sends(data=data).SerializeToString())
        setattr(counts, end.sent, getattr(counts, end.sent) + len(data))
    await call.write(end.sends(ended=True).SerializeToString())


async def _receive(call: Call, end: End, writer: asyncio.StreamWriter, counts: Carried) -> None:
    while isinstance(message := await call.read(), bytes):
        piece = messages.read(end.reads, message, "piece of a connection", bytes_max=MESSAGE_BYTES_MAX)
        if piece.ended:
            if writer.can_write_eof():
                writer.write_eof()
            return
        if not piece.data:
            raise ProtocolError("a piece of a connection is empty")
        writer.write(piece.data)
        setattr(counts, end.received, getattr(counts, end.received) + len(piece.data))
        await writer.drain()
    raise ConnectionResetError("the other end of the tunnel closed this connection")


def prepare(writer: asyncio.StreamWriter) -> None:
    """Bound what is written to a connection and not sent yet."""
    writer.transport.set_write_buffer_limits(high=bounds.RELAY_BUFFER_BYTES)
