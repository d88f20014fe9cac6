"""Server-sent events to one client: one write for everything that is ready, and no write that waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from aiohttp import web

from relayline.coordinator.http.edge.body import Request

PING = b": ping\n\n"
DONE = b"[DONE]"

HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would otherwise collect the stream
}


class StreamForm(NamedTuple):
    """What a stream is sent as."""

    content_type: str
    ping: bytes  # lines that say nothing to a client that waits


SSE = StreamForm("text/event-stream; charset=utf-8", PING)


_RESET_ON_CLOSE, _CLOSE_IN_ORDER = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)
_LAST_READ_S = 0.2  # for a client to take the last events, before the end of the connection may take them from it
_NEVER_WAITS_BYTES = 32_768  # in a transport's buffer; writers wait from 65,536 on


class ClientGoneError(Exception):
    """The client closed the connection or stopped reading. The client has gone."""


def data_frame(event: bytes) -> bytes:
    """Return the lines of an event that has no name."""
    return b"data: " + event + b"\n\n"


@contextlib.asynccontextmanager
async def taken_by_client(request: web.Request, n_bytes: int, timeout_s: float) -> AsyncIterator[None]:
    """Write so many bytes of an answer within. Raises ClientGoneError; a client that reads nothing is cut off."""
    transport = request.transport
    is_timed = transport is None or transport.get_write_buffer_size() + n_bytes >= _NEVER_WAITS_BYTES
    try:
        async with asyncio.timeout(timeout_s if is_timed else None):  # nearly always None, and no timer is needed
            yield
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ClientGoneError("the client stopped reading") from None
    except ConnectionError as error:
        raise ClientGoneError("the client closed the connection") from error


class _Response(web.StreamResponse):
    _send_headers_immediately = False  # aiohttp's own


class EventWriter:
    """Writes the events of one reply."""

    def __init__(
        self,
        request: web.Request,
        write_timeout_s: float,
        ping_interval_s: float,
        frame: Callable[[bytes], bytes] = data_frame,
        form: StreamForm = SSE,
    ) -> None:
        """`frame` writes one event as its lines."""
        self._ping = form.ping
        self._request, self._frame = request, frame
        self._write_timeout_s, self._ping_interval_s = write_timeout_s, ping_interval_s
        self._loop = asyncio.get_running_loop()
        self._written_s = self._loop.time()
        self._is_ended = False  # nothing may follow the last events
        self._is_chunked = request.version >= (1, 1)
        self.response = _Response(headers={"Content-Type": form.content_type, **HEADERS})

    async def start(self) -> None:
        """Begin with status 200 and the headers. They leave with the first write, which may be one of no events."""
        if not self._is_chunked:
            self._on_close(_RESET_ON_CLOSE)
        await self.response.prepare(self._request)
        if isinstance(self._request, Request):
            self._request.answers_knocks(self._knock)

    def send_at_once(self, events: Sequence[bytes]) -> bool:
        """Send events in one write, without waiting; returns False, and sends nothing, if that is not possible: the
        client reads slowly, or has gone.
        """
        transport = self._request.transport
        if transport is None or transport.is_closing():
            return False
        payload = self._framed(events)
        if transport.get_write_buffer_size() + len(payload) >= _NEVER_WAITS_BYTES:
            return False
        if payload:
            self._written_s = self._loop.time()
            transport.write(b"%x\r\n%b\r\n" % (len(payload), payload) if self._is_chunked else payload)
        return True

    async def send(self, events: Iterable[bytes]) -> None:
        """Send events in one write. Raises ClientGoneError; a client that reads nothing is cut off."""
        await self._write(self._framed(events))

    def silent_in_s(self) -> float:
        """Return in how many seconds nothing will have been sent for the ping interval; 0.0 or less: now."""
        return self._written_s + self._ping_interval_s - self._loop.time()

    async def ping(self) -> None:
        """Send what clients skip and proxies count as life: of server-sent events, a comment."""
        await self._write(self._ping)

    async def finish(self, events: Iterable[bytes]) -> None:
        """Send the last events and end the reply in the same write: a client that has the last event has the whole
        reply.
        """
        self._is_ended = True
        if not self._is_chunked:
            self._on_close(_CLOSE_IN_ORDER)
        await self._write(self._framed(events), is_last=True)

    async def cut(self, events: Iterable[bytes]) -> None:
        """Send the last events of an incomplete answer, and end the connection so that no client takes it for complete.

        The final chunk is never sent. In HTTP/1.0 the end of the connection is the end of the answer: there the
        connection is reset, even if this process ends first. Browsers drop what they have not yet given to their page
        when a connection breaks, so the client has a while to read the last events.
        """
        self._is_ended = True
        await self._write(self._framed(events))
        transport = self._request.transport
        if transport is None:
            return
        await asyncio.sleep(_LAST_READ_S)
        transport.close()

    def _knock(self) -> None:
        """Send a ping without waiting: a client that has gone answers it with a reset."""
        transport = self._request.transport
        if not self._is_ended and transport is not None and not transport.is_closing():
            ping = self._ping
            transport.write(b"%x\r\n%b\r\n" % (len(ping), ping) if self._is_chunked else ping)

    def _on_close(self, linger: bytes) -> None:
        """Choose how the connection ends, whoever ends it: the system obeys this even if the process is killed."""
        transport = self._request.transport
        link = transport.get_extra_info("socket") if transport is not None else None
        if link is not None:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    async def _write(self, payload: bytes, *, is_last: bool = False) -> None:
        self._written_s = self._loop.time()
        async with taken_by_client(self._request, len(payload), self._write_timeout_s):
            await (self.response.write_eof(payload) if is_last else self.response.write(payload))

    def _framed(self, events: Iterable[bytes]) -> bytes:
        return b"".join(map(self._frame, events))
