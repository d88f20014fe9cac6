"""A TCP proxy that pauses a transfer once, after a number of bytes towards the client, and cuts it on request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

PIECE_BYTES = 16 * 1024


class CuttingProxy:
    """`held` is set when it has passed on its bytes and holds the rest; `address` is its listening address.

    The test says when to cut: a connection loses bytes that a client's library has read but not yet delivered, so the
    number of passed bytes is not the number of arrived ones.
    """

    def __init__(self, target: tuple[str, int], hold_after_bytes: int) -> None:
        self._target, self._left_bytes = target, hold_after_bytes
        self._writers: set[asyncio.StreamWriter] = set()
        self._cut = asyncio.Event()
        self.held = asyncio.Event()
        self.address = ""

    def cut(self) -> None:
        """Cut the open connections; later ones pass."""
        self._cut.set()
        for end in self._writers:
            end.transport.abort()

    async def serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection(*self._target)
        self._writers |= {writer, upstream_writer}
        try:
            await asyncio.gather(
                self._pump(reader, upstream_writer, counts=False), self._pump(upstream_reader, writer, counts=True)
            )
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            for end in (writer, upstream_writer):
                self._writers.discard(end)
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool) -> None:
        while data := await reader.read(PIECE_BYTES):
            if counts and not self._cut.is_set():
                self._left_bytes -= len(data)
                if self._left_bytes < 0:
                    self.held.set()
                    await self._cut.wait()
                    return
            writer.write(data)
            await writer.drain()


@contextlib.asynccontextmanager
async def cutting_proxy(target: str, hold_after_bytes: int) -> AsyncIterator[CuttingProxy]:
    """Run a proxy to host:port for the length of a with block."""
    host, _, port = target.rpartition(":")
    proxy = CuttingProxy((host, int(port)), hold_after_bytes)
    server = await asyncio.start_server(proxy.serve_one, "127.0.0.1", 0)
    proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        for end in list(proxy._writers):
            end.transport.abort()
        await server.wait_closed()
