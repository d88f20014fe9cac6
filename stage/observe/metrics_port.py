"""The HTTP port of a stage's metrics. It shares the event loop with the links, so that one client costs little.

A connection has one request and a few seconds, and there are a few of them. Bodies are neither read nor unpacked.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

from aiohttp import web

from relayline.wire.common.errors import StartError
from relayline.wire.common.texts import system_reason
from relayline.wire.links.security import address_of
from relayline.wire.links.tls_door import Door, Shaking

CONNECTIONS_MAX = 32  # one more, and the oldest ends; scrapers come some times a minute
CONNECTION_S = 10.0  # for the TLS handshake, and again for a request and its answer
PATH = "/metrics"

Answer = Callable[[web.BaseRequest], Awaitable[web.Response]]


class _Server(web.Server):
    """Makes the connections of the port, and ends the oldest where there are too many."""

    def __init__(self, answer: Answer) -> None:
        async def routed(request: web.BaseRequest) -> web.StreamResponse:
            response = await _routed(request, answer)
            response.force_close()
            return response

        super().__init__(routed, access_log=None, auto_decompress=False, lingering_time=0.0)
        self._open: dict[_Connection | Shaking, None] = {}

    def __call__(self) -> _Connection:
        """Return the protocol of a new connection."""
        return _Connection(self, self._loop, **self._kwargs)

    def came(self, newcomer: _Connection | Shaking) -> bool:
        """Take a connection in."""
        self._open[newcomer] = None
        if len(self._open) > CONNECTIONS_MAX:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.end()
        return True

    def left(self, leaver: _Connection | Shaking) -> None:
        """A connection has ended, or is another now that its handshake is done. Idempotent."""
        self._open.pop(leaver, None)

    def shaken(self, shaking: Shaking) -> _Connection:
        """Return the protocol of a connection that will have done its handshake."""
        connection = self()
        connection.shaking = shaking
        return connection


class _Connection(web.RequestHandler):
    """One client's connection."""

    def __init__(self, server: _Server, loop: asyncio.AbstractEventLoop, **options: Any) -> None:
        super().__init__(server, loop=loop, **options)
        self._server = server
        self.shaking: Shaking | None = None
        self._link: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection in."""
        self._link = cast(asyncio.Transport, transport)
        if self.shaking is not None:
            self._server.left(self.shaking)
        self._server.came(self)
        self._deadline = self._loop.call_later(CONNECTION_S, self.end)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Release the connection's resources."""
        self._server.left(self)
        if self._deadline is not None:
            self._deadline.cancel()
        self._link = None
        super().connection_lost(exc)

    def end(self) -> None:
        """End the connection now."""
        if self._link is not None:
            self._link.abort()


@contextlib.asynccontextmanager
async def serving(
    host: str, port: int, answer: Answer, context: ssl.SSLContext | None
) -> AsyncIterator[tuple[str, int]]:
    """Answer GET /metrics on host:port, over TLS with a `context`, for the length of a with block; yields the address.

    Raises StartError when the port cannot be taken.
    """
    server = _Server(answer)
    runner = web.ServerRunner(server)
    await runner.setup()
    door = Door(server.shaken, server.came, server.left, context) if context is not None else None
    try:
        try:
            if door is not None:
                await door.listen([host], port)
            else:
                await web.TCPSite(runner, host, port).start()
        except OSError as error:
            reason = system_reason(error) or str(error)
            raise StartError(
                f"cannot serve metrics on {address_of(host, port)}: {reason}; take another port "
                "(--metrics HOST:PORT, or the stage's metricsPort in the manifest)"
            ) from error
        yield host, door.sockets[0].getsockname()[1] if door is not None else runner.addresses[0][1]
    finally:
        if door is not None:
            door.close()
            await door.wait_closed()
        await runner.cleanup()


async def _routed(request: web.BaseRequest, answer: Answer) -> web.Response:
    if request.path != PATH:
        return web.Response(status=404, text=f"metrics are at {PATH}\n")
    if request.method not in ("GET", "HEAD"):
        return web.Response(status=405, text="metrics are read with GET\n", headers={"Allow": "GET, HEAD"})
    return await answer(request)
