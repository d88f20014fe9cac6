"""One client's connection: its time limits, its end, and its errors where no handler is reached.

aiohttp parses requests and writes answers, and leaves these to its user. Beyond its documented hooks this module needs
`_messages`, the requests that have been parsed and not begun, and the two bounds of their number.
"""

from __future__ import annotations

import asyncio
import http
import resource
import socket
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar, cast

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.http_writer import StreamWriter

from relayline.coordinator.http.edge.body import BodyRoom, Request
from relayline.coordinator.http.edge.crowd import Crowd, Full
from relayline.coordinator.http.edge.errors import HttpRefusal
from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.edge.middleware import REQUEST_ID, refused
from relayline.wire.common.texts import counted
from relayline.wire.links.security import address_group, is_loopback
from relayline.wire.links.tls_door import Shaking

T = TypeVar("T")

READ_BYTES = 16 * 1024  # of a body that are parsed ahead of its reader; bodies in tiny chunks cost 3 ms then
KEPT_FILES = 128  # open files that are left to links, logs and artifacts
_CONNECTIONS_MIN = 2  # for any limit of open files
MESSAGE_CHARS_MAX = 200  # of the client's mistake, in the error that it gets
_BUFFERED_BYTES = 64 * 1024  # a transport's buffer, without waiting for its client
_FIRST_LOOK_S, _LAST_LOOK_S, _KNOCK_S = 0.01, 2.0, 5.0

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Server(web.Server):
    """Makes the connections of one listening address, and holds their shared state."""

    def __init__(self, app: web.Server, limits: HttpLimits, loop: asyncio.AbstractEventLoop) -> None:
        """Serve what `app`, the server that aiohttp made of the application, would."""
        super().__init__(
            self._handled(app.request_handler),
            request_factory=self._request,
            handler_cancellation=True,
            loop=loop,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=limits.idle_timeout_s,
            lingering_time=0.0,
            read_bufsize=READ_BYTES,
        )
        self.limits = limits
        self.crowd: Crowd[Connection | Shaking] = Crowd()
        self.room = BodyRoom(limits.bodies_bytes_max, limits.body_free_bytes)
        self.unpacking: Executor = ThreadPoolExecutor(1, "unpack")

    def __call__(self) -> Connection:
        """Return the protocol of a new connection."""
        return Connection(self, self._loop, **self._kwargs)

    def shakes(self, shaking: Shaking) -> bool:
        """Take in a connection that begins its TLS handshake; return whether there is room."""
        return self.enters(shaking, shaking.host) is None

    def shaken(self, shaking: Shaking) -> Connection:
        """Return the protocol of a connection that will have done its handshake."""
        connection = self()
        connection.shaking = shaking
        return connection

    def enters(self, newcomer: Connection | Shaking, host: str) -> Full | None:
        """Count a new connection; end the one that has to go for it. Return why there is no room, or None."""
        n_address_max = 0 if is_loopback(host) else self.limits.connections_per_address_max
        verdict = self.crowd.enter(newcomer, address_group(host), self.n_connections_max(), n_address_max)
        if isinstance(verdict, Full):
            return verdict
        if verdict is not None:
            verdict.end()
        return None

    async def shutdown(self, timeout: float | None = None) -> None:
        """End all connections; requests that run may take `timeout` seconds."""
        await super().shutdown(timeout)
        self.unpacking.shutdown(wait=False, cancel_futures=True)

    def n_connections_max(self) -> int:
        """Return the allowed number of connections with the present limit of open files."""
        n_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if n_files == resource.RLIM_INFINITY:
            return self.limits.connections_max
        return min(self.limits.connections_max, max(_CONNECTIONS_MIN, n_files - KEPT_FILES))

    def _handled(self, handle: Handle) -> Handle:
        async def handled(request: web.BaseRequest) -> web.StreamResponse:
            try:
                return await handle(request)
            finally:
                if isinstance(request, Request):
                    request.body_done()

        return handled

    def _request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> Request:
        own = _Writer(protocol, self._loop)
        protocol.begins(message, payload, own)
        return Request(message, payload, protocol, own, task, self._loop, client_max_size=self.limits.body_bytes_max)


class _Writer(StreamWriter):
    """Writes one answer, but for the characters of it that have been sent already."""

    n_knocks = 0
    has_begun = False

    def knock(self, version: tuple[int, int]) -> bytes:
        """Return the next byte of the answer while it is the same for all answers, and none after."""
        known = b"HTTP/%d.%d " % version
        if self.has_begun or self.n_knocks == len(known):
            return b""
        self.n_knocks += 1
        return known[self.n_knocks - 1 : self.n_knocks]

    async def write_headers(self, status_line: str, headers: Any) -> None:
        """Take the first line and the headers."""
        self.has_begun = True
        await super().write_headers(status_line[self.n_knocks :], headers)


class Connection(web.RequestHandler):
    """One client's connection."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop, **options: Any) -> None:
        """See web.RequestHandler."""
        super().__init__(server, loop=loop, **options)
        self._server = server
        self.limits = server.limits
        self.room = server.room
        self.unpacking = server.unpacking
        self.body_wire_bytes = 0
        self.shaking: Shaking | None = None  # the protocol before its TLS handshake was done
        self.knock: Callable[[], None] | None = None  # of an answer that is being streamed
        # One request is parsed ahead of the one that is being answered: clients that send more wait.
        self._max_msg_queue_size, self._msg_queue_resume_size = 2, 0
        self._link: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._writer: _Writer | None = None  # of the request that is being answered
        self._version = (1, 1)
        self._payload: Any = None  # body of the request that was parsed last
        self._head_bytes = 0
        self._is_half_closed = False
        self._is_unreadable = False
        self._n_discarded: int | None = None  # bytes since the answer that nothing more is read

    # --- beginning and end ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection in, where there is room."""
        self._link = link = cast(asyncio.Transport, transport)  # uvloop's are none by class
        peer = link.get_extra_info("peername")
        host = peer[0] if isinstance(peer, tuple) else ""
        if self.shaking is not None:
            self._server.crowd.leave(self.shaking)
        full = self._server.enters(self, host)
        if full is not None:
            self._turn_away(full)
            return
        super().connection_made(transport)
        self._wait(self.limits.head_timeout_s, self._head_late)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Release the connection's resources."""
        self._server.crowd.leave(self)
        self._wait(None)
        self._link = self._writer = self.knock = None
        super().connection_lost(exc)

    async def start(self) -> None:
        """Answer requests until the connection ends."""
        try:
            await super().start()
        finally:
            self._closes()

    def force_close(self) -> None:
        """End the connection once its written bytes have been sent, or cannot be sent."""
        super().force_close()
        self._closes()

    def end(self) -> None:
        """End the connection now."""
        if self._link is not None:
            self._link.abort()

    def _closes(self) -> None:
        if self._link is not None:
            self._wait(self.limits.close_timeout_s, self.end)

    def _wait(self, delay_s: float | None, then: Callable[[], None] | None = None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None
        if delay_s is not None and then is not None:
            self._deadline = self._loop.call_later(delay_s, then)

    # --- incoming ---

    def data_received(self, data: bytes) -> None:
        """Parse incoming bytes, unless they belong to a refused request."""
        if self._n_discarded is not None:
            self._n_discarded += len(data)
            if self._n_discarded > self.limits.linger_bytes_max:
                self.end()
            return
        in_body = self._payload is not None and not self._payload.is_eof()
        if in_body:
            self.body_wire_bytes += len(data)
        n_known = len(self._messages)
        super().data_received(data)
        if len(self._messages) > n_known:
            self._parsed(in_body)
        elif not in_body and (self._head_bytes or data.strip(b"\r\n")):  # some send an empty line after a body
            self._head_grows(len(data))

    def _parsed(self, in_body: bool) -> None:
        message, payload = self._messages[-1]
        if hasattr(message, "exc"):  # aiohttp's note of a request that cannot be parsed
            if in_body:  # aiohttp does not notify the reader of the body
                self._payload.set_exception(web.RequestPayloadError("the body's framing is broken"))
            return
        self._payload = payload
        self._head_bytes = self.body_wire_bytes = 0

    def _head_grows(self, n_bytes: int) -> None:
        is_first = not self._head_bytes
        self._head_bytes += n_bytes
        if self._writer is not None:
            if self._head_bytes > self.limits.head_bytes_max:
                self.close()
        elif self._head_bytes > self.limits.head_bytes_max:
            self._say(431, f"the headers are larger than {self.limits.head_bytes_max} bytes", "headers_too_large")
        elif is_first:
            self._wait(self.limits.head_timeout_s, self._head_late)

    def _head_late(self) -> None:
        if self._head_bytes:
            self._say(408, f"no whole request within {self.limits.head_timeout_s:g} s", "timeout")
        else:
            self.force_close()

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio.Protocol's, which aiohttp narrows
        """Continue requests that came whole: their client sends no more, and may still read.

        It may also be gone, which looks alike: see `_look`.
        """
        is_whole = self._payload is not None and self._payload.is_eof() and not self._head_bytes
        if self._n_discarded is not None or self.ssl_context is not None or not is_whole:
            return False
        if self._writer is None and not self._messages:
            return False
        self._is_half_closed = True
        self._look(_FIRST_LOOK_S, self._loop.time())
        return True

    def _look(self, delay_s: float, knock_s: float) -> None:
        """Find out whether a client that sends no more has gone, and end the connection then.

        A byte sent to it reveals that: a system resets a connection whose program has closed it. That byte is the
        answer's own next one, or a comment where that is a stream.
        """
        if self._link is None:
            return
        link = self._link.get_extra_info("socket")
        if link is not None and link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.end()
            return
        now_s = self._loop.time()
        if self._writer is not None and now_s >= knock_s:
            knock_s = now_s + _KNOCK_S
            if not self._writer.has_begun:
                self._link.write(self._writer.knock(self._version))
            elif self.knock is not None:
                self.knock()
        self._loop.call_later(delay_s, self._look, min(2 * delay_s, _LAST_LOOK_S), knock_s)

    # --- outgoing ---

    def waits(self, *, for_client: bool) -> None:
        """Say whether the request waits for its client now."""
        if for_client:
            self._server.crowd.wait(self)
        else:
            self._server.crowd.work(self)

    def begins(self, message: Any, payload: Any, writer: _Writer) -> None:
        """A request is being answered from now on."""
        self._writer, self._version = writer, tuple(message.version)
        self._wait(None)
        self._server.crowd.work(self)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send the rest of an answer; after one to a request whose body has not come, or is not wanted, close."""
        is_whole = request.content.is_eof()
        if isinstance(resp, web.StreamResponse) and (not is_whole or (self._is_half_closed and not self._messages)):
            resp.force_close()
        resp, is_lost = await self._unless_stalled(super().finish_response(request, resp, start_time), resp)
        self._writer = self.knock = None
        self._server.crowd.wait(self)
        if not is_lost and (self._is_unreadable or not is_whole):
            await self._linger()
        return resp, is_lost

    async def _unless_stalled(self, writing: Coroutine[Any, Any, T], resp: web.StreamResponse) -> T:
        """Return the result of `writing`; cut off a client that takes none of a long answer for the write timeout."""
        link = self._link
        if link is None or not isinstance(resp, web.Response) or (resp.content_length or 0) <= _BUFFERED_BYTES:
            return await writing
        task = asyncio.ensure_future(writing)
        try:
            n_left = resp.content_length or 0
            while not (await asyncio.wait({task}, timeout=self.limits.write_timeout_s))[0]:
                n_before, n_left = n_left, link.get_write_buffer_size()
                if n_left >= n_before:
                    link.abort()
            return task.result()
        finally:
            task.cancel()

    async def _linger(self) -> None:
        """Let the client send for a moment longer, and drop what comes: closing at once would reset the connection, and
        the client might lose its answer."""
        self._discard()
        await asyncio.sleep(self.limits.linger_s)  # ended early when the client closes its end

    def _discard(self) -> None:
        """Mark the connection: no more answers, and no more reading."""
        self._n_discarded = 0
        if self._link is None or self._link.is_closing():
            return
        if self._link.can_write_eof():
            self._link.write_eof()
        self._link.resume_reading()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return and log the reply to a request that cannot be parsed, or that no middleware has answered."""
        super().handle_error(request, status, exc, message)
        if isinstance(exc, HttpProcessingError):
            is_long = isinstance(exc, LineTooLong) or "Too many headers" in exc.message
            text = " ".join((exc.message or "it is not HTTP").split("\n\n")[0].split())[:MESSAGE_CHARS_MAX]
            code = "headers_too_large" if is_long else "bad_request"
            refusal = HttpRefusal(431 if is_long else 400, f"the request cannot be read: {text}", code)
        else:
            refusal = HttpRefusal(status, http.HTTPStatus(status).phrase.lower(), "internal")
        self._is_unreadable = True
        reply = refused(refusal)
        reply.headers[REQUEST_ID] = uuid.uuid4().hex
        reply.force_close()
        return reply

    def _turn_away(self, full: Full) -> None:
        whose = "from your address" if full.of_address else "at this server"
        busy = counted(full.n_busy, "request is", "requests are")
        text = f"{busy} already running {whose}, which is the limit; try again shortly"
        self._say(429 if full.of_address else 503, text, "overloaded", is_final=True)

    def _say(self, status: int, message: str, code: str, *, is_final: bool = False) -> None:
        """Answer where there is no request that could be, and read nothing more; `is_final` closes at once."""
        if self._link is None:
            return
        body = msgspec.json.encode(HttpRefusal(status, message, code).body)
        self._link.write(
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\nContent-Type: application/json; charset=utf-8\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n{REQUEST_ID}: {uuid.uuid4().hex}\r\n"
            f"{'Retry-After: 1' if is_final else 'Cache-Control: no-store'}\r\n\r\n".encode()
            + body
        )
        self._discard()
        if is_final:
            self._link.close()
            self._closes()
        else:
            self._wait(self.limits.linger_s, self.end)
