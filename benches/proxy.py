"""A TCP relay that delays every byte by a fixed time in each direction, to emulate a link between two processes. It
delays and does not throttle: any number of pieces may be in flight, and each leaves at its own time. The event loop's
timers are coarse (about a millisecond), so the relay records the real delay.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

PIECE_BYTES = 1 << 16
PIECES_MAX = 1_024  # in flight in one direction; a faster sender waits, as for a full pipe


class DelayProxy:
    """Listens on 127.0.0.1 and forwards every connection to one address."""

    def __init__(self, target: str, delay_s: float) -> None:
        """`target` is HOST:PORT; `delay_s` applies to each direction."""
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self.delay_s = delay_s
        self.n_pieces = 0
        self.held_s = 0.0  # sum over these, for `mean_delay_s`
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """HOST:PORT in place of the target."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    @property
    def mean_delay_s(self) -> float:
        """How long a piece was held on average; 0.0 before the first."""
        return self.held_s / self.n_pieces if self.n_pieces else 0.0

    def measure_anew(self) -> None:
        """Forget the delays so far, such as those of a model on its way to the workers."""
        self.n_pieces, self.held_s = 0, 0.0

    async def start(self) -> None:
        """Begin to listen on a free port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def cut(self) -> None:
        """Close every connection; later ones pass."""
        for connection in list(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def stop(self) -> None:
        """Close every connection and stop listening."""
        assert self._server is not None
        self._server.close()
        await self.cut()
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.close()
            self._connections.discard(task)
            return
        try:
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._pass(reader, far_writer))
                ways.create_task(self._pass(far_reader, writer))
        except* (OSError, asyncio.CancelledError):
            pass  # either end left, or the proxy stops: both sides are closed below
        finally:
            for end in (writer, far_writer):
                end.close()
            self._connections.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one direction until its sender closes."""
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(PIECES_MAX)

        async def deliver() -> None:
            while True:
                read_s, piece = await pieces.get()
                if (wait_s := read_s + self.delay_s - loop.time()) > 0:
                    await asyncio.sleep(wait_s)
                self.n_pieces += 1
                self.held_s += loop.time() - read_s
                if not piece:
                    if writer.can_write_eof():
                        writer.write_eof()
                    return
                writer.write(piece)
                await writer.drain()

        async with asyncio.TaskGroup() as both:
            both.create_task(deliver())
            while piece := await reader.read(PIECE_BYTES):
                await pieces.put((loop.time(), piece))
            await pieces.put((loop.time(), b""))


@contextlib.asynccontextmanager
async def delayed(targets: list[str], delay_s: float) -> AsyncIterator[list[DelayProxy]]:
    """Run one proxy before each target for the length of a with block."""
    proxies = [DelayProxy(target, delay_s) for target in targets]
    try:
        for proxy in proxies:
            await proxy.start()
        yield proxies
    finally:
        await asyncio.gather(*(proxy.stop() for proxy in proxies if proxy._server is not None))
