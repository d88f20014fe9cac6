"""A TCP proxy that cuts all its connections once after so many bytes towards the client, and is well behaved after."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

PIECE_BYTES = 16 * 1024


class CuttingProxy:
    """`cut` is set when the cut has happened; `address` is where it listens."""

    def __init__(self, target: tuple[str, int], cut_after_bytes: int) -> None:
        self._target, self._left_bytes = target, cut_after_bytes
        self._writers: set[asyncio.StreamWriter] = set()
        self.cut = asyncio.Event()
        self.address = ""

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
            if counts and not self.cut.is_set():
                self._left_bytes -= len(data)
                if self._left_bytes < 0:
                    self.cut.set()
                    for end in self._writers:
                        end.close()  # what is on its way arrives, and then the line is dead
                    return
            writer.write(data)
            await writer.drain()


@contextlib.asynccontextmanager
async def cutting_proxy(target: str, cut_after_bytes: int) -> AsyncIterator[CuttingProxy]:
    """Run a proxy to host:port for the length of a with block."""
    host, _, port = target.rpartition(":")
    proxy = CuttingProxy((host, int(port)), cut_after_bytes)
    server = await asyncio.start_server(proxy.serve_one, "127.0.0.1", 0)
    proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        for end in list(proxy._writers):
            end.transport.abort()
        await server.wait_closed()
