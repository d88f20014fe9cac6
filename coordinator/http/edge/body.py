"""Reading a request's body: never more than its bound, never for ever, and never unpacked where others wait.

A body is read when a handler asks for it, so one of a request that is refused before is not read at all.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import hdrs, web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from relayline.coordinator.http.edge.errors import HttpRefusal
from relayline.coordinator.http.edge.limits import HttpLimits

if TYPE_CHECKING:
    from concurrent.futures import Executor

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
CODINGS = "gzip, deflate"
_MARK = codecs.BOM_UTF8  # that some senders put before their JSON
READ_AT_ONCE_BYTES_MAX = 16 * 1024  # of a body that is there already
SMALL_BYTES_MAX = 16 * 1024  # of a body of a few fields
_IDENTITY = ("", "identity")
_PIECE_BYTES = 64 * 1024  # packed bytes per call of the decompressor; for each gzip member the rest of them is copied
_UNPACKED_BYTES = 256 * 1024  # of unpacked bytes that are made at once
_MEMBERS_MAX = 1_024  # of one gzip body
_INLINE_BYTES = 256 * 1024  # pieces of this many bytes together are joined where they came in
_FRAMED_FREE_BYTES = 1024 * 1024
_FRAMED_SHARE_MAX = 1.5  # bytes on the wire for one of a body: chunks of ten bytes and more have less


class BodyRoom:
    """Counts the bytes of all bodies that are held, which have a bound together."""

    def __init__(self, n_max: int, n_free: int) -> None:
        """`n_free` bytes of each body are not counted."""
        self._n_max, self._n_free = n_max, n_free
        self.n_held = 0

    def grown(self, n_counted: int, n_bytes: int) -> int:
        """Return how many bytes of a body count now that it has `n_bytes`, of which `n_counted` counted before.

        Raises HttpRefusal if there is no room.
        """
        n_wanted = max(n_counted, n_bytes - self._n_free)
        if self.n_held + n_wanted - n_counted > self._n_max:
            text = f"the server is busy with {self._n_max} bytes of other requests' bodies; try again shortly"
            raise HttpRefusal(503, text, "overloaded", {"Retry-After": "1"})
        self.n_held += n_wanted - n_counted
        return n_wanted

    def give_back(self, n_counted: int) -> None:
        """A body has been released."""
        self.n_held -= n_counted


class Link(Protocol):
    """The parts of a connection and a server that reading a body needs."""

    limits: HttpLimits
    room: BodyRoom
    unpacking: Executor
    body_wire_bytes: int  # of the body that came last, framing included
    knock: Callable[[], None] | None  # sends a byte of an answer that is being streamed

    def waits(self, *, for_client: bool) -> None:
        """Say whether a request waits for its client now."""


# Routes that clients also ask for without /v1: their base URL ends with the host.
_WITHOUT_V1 = {
    "/chat/completions",
    "/completions",
    "/embeddings",
    "/messages",
    "/models",
    "/responses",
    "/conversations",
    "/files",
    "/batches",
}
_RESOURCES_WITHOUT_V1 = ("/responses/", "/conversations/", "/files/", "/batches/")


def usual_path(path: str) -> str:
    """Return the path of an API route in the router's form; all other paths unchanged.

    Clients join base URL and route in more than one way: `//v1/models`, `/v1/models/`, `/models`.
    """
    if path.startswith("/v1/") and not path.endswith("/"):
        return path
    bare, mark, query = path.partition("?")
    found = f"/{bare.strip('/')}"
    found = f"/v1{found}" if found in _WITHOUT_V1 or found.startswith(_RESOURCES_WITHOUT_V1) else found
    return f"{found}{mark}{query}" if found.startswith("/v1/") else path


class Request(web.Request):
    """A request whose `read` keeps the bounds of its server."""

    ATTRS = web.Request.ATTRS | {"expects", "_link", "_n_counted"}

    def __init__(self, message: Any, payload: Any, protocol: Any, *more: Any, **options: Any) -> None:
        """See web.Request. An `Expect` header is answered when the body is asked for, not before."""
        self.expects: str = message.headers.get(hdrs.EXPECT, "")
        if self.expects:
            headers = CIMultiDict(message.headers)
            del headers[hdrs.EXPECT]
            message = message._replace(headers=CIMultiDictProxy(headers))
        path = usual_path(message.path)
        if path != message.path:
            message = message._replace(path=path, url=URL(path, encoded=True))
        super().__init__(message, payload, protocol, *more, **options)
        self._link: Link = protocol
        self._n_counted = 0

    async def read(self) -> bytes:
        """Return the body, unpacked and without a mark of its byte order. Works once, since no copy is kept.

        Raises HttpRefusal, RequestPayloadError.
        """
        return await self.read_at_most(self._link.limits.body_bytes_max)

    async def read_at_most(self, n_max: int) -> bytes:
        """Return the body as `read` does, but refuse one of more than `n_max` bytes."""
        coding = self._coding()
        if (self.content_length or 0) > n_max:
            raise _too_large(n_max)
        with self.receiving():
            parts = await self._parts(n_max)
        if coding in _IDENTITY:
            return (await joined(parts)).removeprefix(_MARK)
        unpacked = await asyncio.get_running_loop().run_in_executor(self._link.unpacking, unpack, parts, coding, n_max)
        if unpacked is None:
            raise _too_large(n_max)
        self._count(len(unpacked))
        return unpacked.removeprefix(_MARK)

    @contextlib.contextmanager
    def receiving(self) -> Iterator[HttpLimits]:
        """Let the client send its body, which is read here within; gives the bounds of its speed."""
        if self.expects and self.version >= (1, 1) and not self.content.is_eof() and self.transport is not None:
            self.transport.write(CONTINUE)
        self._link.waits(for_client=True)
        try:
            yield self._link.limits
        finally:
            self._link.waits(for_client=False)

    def body_done(self) -> None:
        """The body's content has been taken over: release it."""
        self._link.room.give_back(self._n_counted)
        self._n_counted = 0

    def answers_knocks(self, knock: Callable[[], None]) -> None:
        """Say how to find out, amid a streamed answer, whether the client has gone: `knock` sends it a byte."""
        self._link.knock = knock

    def check_expected(self) -> None:
        """Raise HttpRefusal for an expectation that this server does not know."""
        if self.expects and self.version >= (1, 1) and self.expects.strip().lower() != "100-continue":
            raise HttpRefusal(417, f"Expect: {self.expects[:100]!r} is not supported", "expectation_failed")

    async def _parts(self, n_max: int) -> list[bytes]:
        limits, loop = self._link.limits, asyncio.get_running_loop()
        begun_s, n_bytes = loop.time(), 0
        parts: list[bytes] = []
        if self.content.is_eof() and 0 < self.content.total_bytes <= min(n_max, READ_AT_ONCE_BYTES_MAX):
            parts.append(self.content.read_nowait())  # it came with the head, as nearly all do: no timer, no turn
            n_bytes = len(parts[0])
            self._count(n_bytes)
            if self.content.at_eof():
                return parts
        while True:
            left_s = begun_s + limits.body_grace_s + n_bytes / limits.body_rate_min - loop.time()
            try:
                async with asyncio.timeout(min(limits.body_stall_s, left_s)):
                    part = await self.content.readany()
            except TimeoutError:
                raise HttpRefusal(408, f"the body came too slowly: {n_bytes} bytes so far", "timeout") from None
            if not part:
                return parts
            parts.append(part)
            n_bytes += len(part)
            if n_bytes > n_max:
                raise _too_large(n_max)
            self._count(n_bytes)
            if self._link.body_wire_bytes > n_bytes * _FRAMED_SHARE_MAX + _FRAMED_FREE_BYTES:
                raise HttpRefusal(400, "the body comes in chunks of a few bytes; send larger ones", "bad_body")
            await asyncio.sleep(0)  # where more is there already nothing else would let others run

    def _coding(self) -> str:
        codings = [each.strip().lower() for each in self.headers.getall(hdrs.CONTENT_ENCODING, [])]
        coding = ",".join(codings).removeprefix("x-")
        if coding not in (*_IDENTITY, "gzip", "deflate"):
            text = f"Content-Encoding: {coding[:100]!r} is not supported; send {CODINGS}, or the body uncompressed"
            raise HttpRefusal(415, text, "unsupported_encoding", {hdrs.ACCEPT_ENCODING: CODINGS})
        return coding

    def _count(self, n_bytes: int) -> None:
        self._n_counted = self._link.room.grown(self._n_counted, n_bytes)


async def read_small(request: web.Request) -> bytes:
    """Return the body of a request that has a few fields: it is decoded on the event loop. Raises as `Request.read`."""
    assert isinstance(request, Request)
    return await request.read_at_most(SMALL_BYTES_MAX)


def _too_large(n_max: int) -> HttpRefusal:
    return HttpRefusal(413, f"the body is larger than {n_max} bytes", "body_too_large")


async def joined(parts: Sequence[bytes]) -> bytes:
    """Return pieces as one."""
    if len(parts) == 1:
        return parts[0]
    if sum(map(len, parts)) <= _INLINE_BYTES:
        return b"".join(parts)
    return await asyncio.to_thread(b"".join, parts)  # copying megabytes takes milliseconds, without Python's lock


def unpack(parts: list[bytes], coding: str, n_max: int) -> bytes | None:
    """Return the unpacked gzip or deflate body; None once it exceeds `n_max` bytes.

    For a thread. Raises HttpRefusal for bytes of another coding, or an incomplete body. `parts` is emptied.
    """
    if not parts:
        return b""
    make = _inflaters(coding, parts)
    inflater, n_members = make(), 1
    unpacked: list[bytes] = []
    n_unpacked = 0
    for packed in _pieces(parts):
        while packed or not inflater.eof:
            if inflater.eof:
                n_members += 1
                if coding != "gzip" or n_members > _MEMBERS_MAX:
                    raise _not_packed(coding)
                inflater = make()
            try:
                part = inflater.decompress(packed, _UNPACKED_BYTES)
            except zlib.error:
                raise _not_packed(coding) from None
            n_unpacked += len(part)
            if n_unpacked > n_max:
                return None
            unpacked.append(part)
            packed = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
            if not (part or packed):
                break  # it wants the next piece
    if not inflater.eof:
        raise _not_packed(coding)
    return b"".join(unpacked)


def _inflaters(coding: str, parts: list[bytes]) -> Callable[[], Any]:
    if coding == "gzip":
        return lambda: zlib.decompressobj(16 + zlib.MAX_WBITS)
    # RFC 9110's deflate has zlib's header, but some senders leave it out.
    has_header = bool(parts) and parts[0][0] & 0x0F == 8
    return lambda: zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)


def _pieces(parts: list[bytes]) -> Any:
    parts.reverse()
    while parts:
        part = parts.pop()
        for at in range(0, len(part), _PIECE_BYTES):
            yield part[at : at + _PIECE_BYTES]


def _not_packed(coding: str) -> HttpRefusal:
    text = f"Can not decode content-encoding: {coding}; is the body complete, and in that encoding?"
    return HttpRefusal(400, text, "bad_body")
