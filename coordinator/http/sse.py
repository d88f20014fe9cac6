"""Server-sent events to one client: one write for everything that is ready, and no write that waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping

from aiohttp import web

PING = b": ping\n\n"
DONE = b"[DONE]"

HEADERS: Mapping[str, str] = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would otherwise collect the stream
}


class ClientGoneError(Exception):
    """The client closed the connection or stopped reading. There is nobody left to answer."""


class EventWriter:
    """Writes the events of one reply."""

    def __init__(self, request: web.Request, write_timeout_s: float, ping_interval_s: float) -> None:
        self._request = request
        self._write_timeout_s, self._ping_interval_s = write_timeout_s, ping_interval_s
        self._written_s = asyncio.get_running_loop().time()
        self.response = web.StreamResponse(headers=HEADERS)

    async def start(self) -> None:
        """Send status 200 and the headers at once."""
        async with self._bounded():
            await self.response.prepare(self._request)

    async def send(self, events: Iterable[bytes]) -> None:
        """Send events in one write. Raises ClientGoneError; a client that reads nothing is cut off.

        Without any, when nothing has been sent for the ping interval, a ping: text may be held back for long.
        """
        payload = _framed(events)
        if not payload and asyncio.get_running_loop().time() - self._written_s >= self._ping_interval_s:
            payload = PING
        if payload:
            await self._write(payload)

    async def ping(self) -> None:
        """Send a comment, which clients skip and proxies count as life."""
        await self._write(PING)

    async def finish(self, events: Iterable[bytes]) -> None:
        """Send the last events and end the reply in the same write: who has read the last event has all of it."""
        await self._write(_framed(events), is_last=True)

    async def _write(self, payload: bytes, *, is_last: bool = False) -> None:
        self._written_s = asyncio.get_running_loop().time()
        async with self._bounded():
            await (self.response.write_eof(payload) if is_last else self.response.write(payload))

    @contextlib.asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                yield
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientGoneError("the client stopped reading") from None
        except ConnectionError as error:
            raise ClientGoneError("the client closed the connection") from error


def _framed(events: Iterable[bytes]) -> bytes:
    return b"".join([b"data: " + event + b"\n\n" for event in events])
