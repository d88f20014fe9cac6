"""One request on its way through a gateway: to a pipeline, and its answer back to the client, byte for byte.

Answers are not collected: the next piece is read when the client has taken the last one. So a slow client slows down
only its own answer. A client that leaves ends its request at the pipeline. Another replica is tried only while the
client has not been sent anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import re
from collections.abc import AsyncIterator, Sequence

import aiohttp
import msgspec
from aiohttp import hdrs, web
from multidict import CIMultiDict

from relayline.coordinator.gateway.bounds import ID_BYTES_MAX, PIECE_BYTES, REFUSAL_BYTES_MAX, TRIES_MAX
from relayline.coordinator.gateway.gate import PipelineLostError, wakes
from relayline.coordinator.gateway.links import Link, Links, is_refused
from relayline.coordinator.gateway.peek import Asked
from relayline.coordinator.gateway.router import LOST, Backend, maybe_at, no_replica
from relayline.coordinator.http.edge.body import Request
from relayline.coordinator.http.edge.clients import BEHALF, KEY
from relayline.coordinator.http.edge.errors import error_body
from relayline.coordinator.http.edge.middleware import REQUEST_ID, request_id
from relayline.coordinator.http.edge.sse import PING, ClientGoneError, data_frame, taken_by_client
from relayline.coordinator.http.messages.errors import PATH as MESSAGES_PATH
from relayline.coordinator.http.messages.errors import messages_error
from relayline.coordinator.http.ollama.dialect import CONTENT_TYPE as LINES_TYPE
from relayline.coordinator.http.ollama.errors import PREFIX as OLLAMA_PREFIX
from relayline.coordinator.http.requests.inner_form import named_frames
from relayline.wire.common.errors import RelaylineError, StageLostError

log = logging.getLogger("relayline.gateway")

PIPELINE_HEADER = "x-relayline-pipeline"  # of an answer: which pipeline gave it
RESPONSES_PATH, CONVERSATIONS_PATH = "/v1/responses", "/v1/conversations"
_HELD_ID = re.compile(rb'"id"\s*:\s*"((?:resp|conv)_[A-Za-z0-9_-]{1,128})"')  # of what the pipeline keeps from now on
_EVENT_NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d{1,18})\D')
_EVENT_NUMBER_BYTES = 64  # more than such a field has, which may come in two pieces
_TAIL_BYTES = 4096  # of a stream: more than the event has with which a pipeline says why it ends too early
_FAILURES = (b'data: {"error":', b"event: error\n", b'{"error":')  # how such an event begins
_FAILED = b"\nevent: response.failed\n"  # one of a response, which it holds whole
_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
     "upgrade"}
)  # fmt: skip
# Of requests: the body is sent unpacked and whole, and pages of other hosts have been looked at here.
_OWN_OF_REQUESTS = _HOP_BY_HOP | {"host", "content-length", "content-encoding", "expect", "origin", REQUEST_ID, BEHALF}
_OWN_OF_ANSWERS = _HOP_BY_HOP | {"date", "server", REQUEST_ID}
_KEYS = (hdrs.AUTHORIZATION, "X-Api-Key")
_SKIPPED = (hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE, hdrs.USER_AGENT)  # aiohttp's own are not the client's
_ELSEWHERE = (429, 503)  # another replica may have room, or be ready


@dataclasses.dataclass(slots=True)
class Outgoing:
    """A request as it is sent to a pipeline."""

    method: str
    path: str
    """With its query."""
    headers: CIMultiDict[str]
    body: bytes | None
    asked: Asked


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that has not been passed on, because another replica may give a better one."""

    status: int
    headers: CIMultiDict[str]
    body: bytes

    def response(self) -> web.Response:
        """Return it for the client."""
        return web.Response(status=self.status, headers=self.headers, body=self.body)


class _LostError(Exception):
    """The pipeline did not answer, and the client has not been sent anything."""


class Forwarder:
    """Sends requests to the pipelines of one gateway."""

    def __init__(self, links: Links, write_timeout_s: float) -> None:
        self.links = links
        self._write_timeout_s = write_timeout_s
        self._numbers = itertools.count()
        self._ended = asyncio.Event()  # some request has
        self.checks_keys = False
        """Whether clients have shown a key of this gateway, so that a pipeline may be shown its own instead."""

    async def idle(self, *only: Backend) -> None:
        """Wait until no request runs or waits, or none at these pipelines."""
        router = self.links.router
        while any(each.n_outstanding or router.awake.counts(each).n_waiting for each in only or router.backends):
            ended = self._ended = asyncio.Event() if self._ended.is_set() else self._ended
            await ended.wait()

    def outgoing(self, request: web.Request, path: str, body: bytes, asked: Asked) -> Outgoing:
        """Return a client's request as it is sent on."""
        headers = CIMultiDict(
            (name, value) for name, value in request.headers.items() if name.lower() not in _OWN_OF_REQUESTS
        )
        headers[REQUEST_ID] = request_id(request)
        if (key := request.get(KEY)) is not None:
            headers[BEHALF] = key.behalf
        headers.add("X-Forwarded-For", request.remote or "unknown")
        return Outgoing(request.method, path, headers, body or None, asked)

    async def to_best(self, request: web.Request, outgoing: Outgoing) -> web.StreamResponse:
        """Answer from the most suitable replica, or from another if that one does not answer. Raises as the router."""
        router, tried = self.links.router, list[Backend]()
        refusal: Refusal | None = None
        while True:
            try:
                backend = router.choose(outgoing.asked, tried)
            except RelaylineError:
                if refusal is not None:
                    return refusal.response()
                raise
            tried.append(backend)
            try:
                found = await self._sent(request, self.links.links[backend], outgoing, is_last=len(tried) == TRIES_MAX)
            except _LostError:
                if len(tried) == TRIES_MAX:
                    raise no_replica(outgoing.asked.model, tried) from None
                found = None
            if isinstance(found, web.StreamResponse):
                return found
            refusal = found or refusal
            backend.n_retried += 1

    async def to_one(self, request: web.Request, link: Link, outgoing: Outgoing) -> web.StreamResponse:
        """Answer from this pipeline. Raises NotReadyError where it does not answer."""
        try:
            found = await self._sent(request, link, outgoing, is_last=True)
        except _LostError:
            raise no_replica(outgoing.asked.model, [link.backend]) from None
        assert isinstance(found, web.StreamResponse)
        return found

    async def to_holder(self, request: web.Request, outgoing: Outgoing, *, is_kept: bool = False) -> web.StreamResponse:
        """Answer from the first pipeline that does not say 404.

        What is kept for clients (`is_kept`) may be at a pipeline that does not answer now, as while it starts again.
        Raises NotReadyError then: 404 would say that it is gone.
        """
        staying = self.links.router.staying
        alive = [each for each in staying if each.answers]
        silent = [each for each in staying if not each.answers]
        for backend in alive:
            link = self.links.links.get(backend)
            if link is None:  # it has been removed in the meantime
                continue
            is_last = backend is alive[-1] and not (is_kept and silent)
            try:
                found = await self._sent(request, link, outgoing, is_last=is_last, passed=(404,))
            except _LostError:
                silent.append(backend)
                continue
            if isinstance(found, web.StreamResponse):
                return found
        raise maybe_at(silent) if is_kept and silent else no_replica(None, silent or staying)

    async def knows(self, link: Link, path: str, headers: CIMultiDict[str]) -> bool | None:
        """Return whether a pipeline has the resource at a path; None if it does not answer."""
        try:
            async with (
                link.until_lost(),
                self.links.request(link, hdrs.METH_GET, path, self._keyed(link, headers)) as answer,
            ):
                return None if answer.status in _ELSEWHERE else answer.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    async def _sent(
        self,
        request: web.Request,
        link: Link,
        outgoing: Outgoing,
        *,
        is_last: bool,
        passed: Sequence[int] = _ELSEWHERE,
    ) -> web.StreamResponse | Refusal:
        """Send a request to one pipeline once that may be awake, and pass its answer on; answers with a status in
        `passed` are returned, unless it is the last pipeline that is tried. Raises _LostError, NotReadyError.
        """
        async with self._place(link, outgoing.method, outgoing.path):
            return await self._passed(request, link, outgoing, is_last=is_last, passed=passed)

    @contextlib.asynccontextmanager
    async def _place(self, link: Link, method: str, path: str) -> AsyncIterator[None]:
        """Within the context a request may be at a pipeline. Raises _LostError, NotReadyError."""
        try:
            if not wakes(method, path):
                yield
                return
            async with self.links.gate.place(link.backend):
                yield
        except PipelineLostError:
            raise _LostError from None
        finally:
            self._ended.set()

    async def _passed(
        self, request: web.Request, link: Link, outgoing: Outgoing, *, is_last: bool, passed: Sequence[int]
    ) -> web.StreamResponse | Refusal:
        backend, key = link.backend, next(self._numbers)
        answering = _Answering(self, request, link, key)
        backend.sent(key, outgoing.asked)
        try:
            async with (
                link.until_lost(),
                self.links.request(
                    link,
                    outgoing.method,
                    outgoing.path,
                    self._keyed(link, outgoing.headers),
                    data=outgoing.body,
                    skip_auto_headers=_SKIPPED,
                ) as answer,
            ):
                if answer.status in passed and not is_last:
                    return await _refusal(answer)
                return await answering.run(answer, outgoing)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if answering.has_said_why:
                return answering.closed()
            problem = "it stopped answering" if isinstance(error, TimeoutError) else LOST
            self._note_trouble(link, error)
            if answering.response is None:
                raise _LostError from None
            backend.n_broken += 1
            log.warning("pipeline %s: %s in the middle of an answer [%s]", backend.name, problem, request_id(request))
            return await answering.cut(StageLostError(f"pipeline {backend.name}: {problem}; send the request again"))
        finally:
            backend.ended(key)
            self._ended.set()

    async def told(self, link: Link, path: str, headers: CIMultiDict[str]) -> Refusal:
        """POST to a route of a pipeline that takes no body, once it may be awake if that wakes it; return the answer.

        Raises NotReadyError where it does not answer, or where its turn to wake does not come.
        """
        try:
            async with self._place(link, hdrs.METH_POST, path):
                return await self._answer_to(link, path, headers)
        except _LostError:
            raise no_replica(None, [link.backend]) from None

    async def _answer_to(self, link: Link, path: str, headers: CIMultiDict[str]) -> Refusal:
        key = next(self._numbers)
        link.backend.sent(key, Asked(output_tokens=0))
        try:
            async with (
                link.until_lost(),
                self.links.request(
                    link, hdrs.METH_POST, path, self._keyed(link, headers), skip_auto_headers=_SKIPPED
                ) as answer,
            ):
                return await _refusal(answer)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._note_trouble(link, error)
            raise _LostError from None
        finally:
            link.backend.ended(key)

    def _note_trouble(self, link: Link, error: Exception) -> None:
        if isinstance(error, aiohttp.ClientConnectorError):
            self.links.failed(link, "it refuses connections", is_refused=is_refused(error))

    def _keyed(self, link: Link, headers: CIMultiDict[str]) -> CIMultiDict[str]:
        """Return the headers with the pipeline's own key, where the client has been asked for one here already."""
        if not (self.checks_keys and link.config.key):
            return headers
        own = headers.copy()
        for name in _KEYS:
            own.popall(name, None)
        own[hdrs.AUTHORIZATION] = f"Bearer {link.config.key}"
        return own

    async def write(self, request: web.Request, response: web.StreamResponse, piece: bytes) -> None:
        """Send a piece to the client. Raises ClientGoneError; a client that reads nothing is cut off."""
        async with taken_by_client(request, len(piece), self._write_timeout_s):
            await response.write(piece)


class _Answering:
    """One answer on its way to the client."""

    def __init__(self, forwarder: Forwarder, request: web.Request, link: Link, key: int) -> None:
        self._forwarder, self._request, self._link, self._key = forwarder, request, link, key
        self.response: web.StreamResponse | None = None
        self._is_stream = self._is_writing = False
        self._has_lines = False  # it streams lines of JSON, which know no comments
        self._tail = b""
        self._numbered, self._next_number, self._has_failed = b"", 0, False

    async def run(self, answer: aiohttp.ClientResponse, outgoing: Outgoing) -> web.StreamResponse:
        """Pass an answer on. The client gets nothing before the first bytes have come."""
        content = answer.content
        piece = await content.readany()
        self._link.backend.began(self._key)
        outgoing.body = None  # no other replica gets it now
        if isinstance(self._request, Request):
            self._request.body_done()
        if outgoing.method == hdrs.METH_POST and (
            outgoing.path.startswith(RESPONSES_PATH) or outgoing.path.partition("?")[0] == CONVERSATIONS_PATH
        ):
            self._learn(piece)
        response = web.StreamResponse(status=answer.status, headers=_answered(answer, self._link.backend.name))
        self._has_lines = answer.content_type == LINES_TYPE
        self._is_stream = self._has_lines or answer.content_type == "text/event-stream"
        try:
            await response.prepare(self._request)
        except ConnectionError as error:
            raise ClientGoneError("the client closed the connection") from error
        self.response = response
        if self._is_stream and not self._has_lines and isinstance(self._request, Request):
            self._request.answers_knocks(self._knock)
        is_numbered = self._is_stream and self._request.path.startswith(RESPONSES_PATH)
        while piece:
            if is_numbered:
                self._count(piece)
            tail, self._is_writing = (self._tail + piece[-_TAIL_BYTES:])[-_TAIL_BYTES:], True
            for at in range(0, len(piece), PIECE_BYTES):
                await self._forwarder.write(self._request, response, piece[at : at + PIECE_BYTES])
            self._tail, self._is_writing = tail, False
            piece = await content.readany()
        self._is_writing = True  # aiohttp writes the end
        return response

    def _knock(self) -> None:
        """Send a comment between two events, without waiting: a client that has gone answers it with a reset."""
        transport = self._request.transport
        if self._is_writing or not self._tail.endswith(b"\n\n") or transport is None or transport.is_closing():
            return
        transport.write(b"%x\r\n%b\r\n" % (len(PING), PING) if self._request.version >= (1, 1) else PING)

    def _learn(self, piece: bytes) -> None:
        found = _HELD_ID.search(piece[:ID_BYTES_MAX])
        if found is not None:
            self._forwarder.links.router.learn(found[1].decode(), self._link.backend)

    def _count(self, piece: bytes) -> None:
        """Note which number the next event of a response has, for `cut`, and whether the response has failed."""
        held = self._numbered + piece
        self._has_failed = self._has_failed or _FAILED in held
        self._numbered = held[-_EVENT_NUMBER_BYTES:]
        numbers = _EVENT_NUMBER.findall(held)
        if numbers:
            self._next_number = int(numbers[-1]) + 1

    @property
    def has_said_why(self) -> bool:
        """Whether the pipeline has ended a stream too early itself: its last event is an error."""
        if not self._is_stream or self._is_writing or not self._tail.endswith(self._end):
            return False
        last = self._tail.removesuffix(self._end).rpartition(self._end)[2]
        return self._has_failed or last.startswith(_FAILURES)

    @property
    def _end(self) -> bytes:
        """What follows each event."""
        return b"\n" if self._has_lines else b"\n\n"

    def closed(self) -> web.StreamResponse:
        """End an incomplete answer whose last event says why: without the bytes that would end it."""
        response, transport = self.response, self._request.transport
        assert response is not None
        if transport is not None:
            transport.close() if self._request.version >= (1, 1) else transport.abort()
        return response

    async def cut(self, error: RelaylineError) -> web.StreamResponse:
        """End an incomplete answer so that no client takes it for complete: a stream with an event that says why, then
        without the bytes that would end it."""
        response, transport = self.response, self._request.transport
        assert response is not None
        if transport is None:
            return response
        if not self._is_stream or self._request.version < (1, 1):
            transport.abort()
            return response
        begin = b"" if self._tail.endswith(self._end) else self._end  # half an event is none
        await self._forwarder.write(self._request, response, begin + _failure(self._request, error, self._next_number))
        transport.close()
        return response


def _failure(request: web.Request, error: RelaylineError, number: int) -> bytes:
    """Return the event of an answer that ends too early, as its client reads it. `number`: of events before it."""
    if request.path.startswith(MESSAGES_PATH):
        return named_frames([messages_error(error, request_id(request))])
    if request.path.startswith(RESPONSES_PATH):
        detail = error_body(error).error
        event = {"type": "error", "sequence_number": number, "code": "server_error", "message": detail.message}
        return named_frames([msgspec.json.encode({**event, "param": None})])
    if request.path.startswith(OLLAMA_PREFIX):
        return msgspec.json.encode({"error": error_body(error).error.message}) + b"\n"
    return data_frame(msgspec.json.encode(error_body(error)))


async def _refusal(answer: aiohttp.ClientResponse) -> Refusal:
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > REFUSAL_BYTES_MAX:
            break
    headers = _answered(answer, "")
    headers.popall(hdrs.CONTENT_LENGTH, None)
    return Refusal(answer.status, headers, bytes(body[:REFUSAL_BYTES_MAX]))


def _answered(answer: aiohttp.ClientResponse, name: str) -> CIMultiDict[str]:
    """Return the headers of an answer for the client."""
    found = CIMultiDict((key, value) for key, value in answer.headers.items() if _passes(key))
    if name:
        found[PIPELINE_HEADER] = name
    return found


def _passes(name: str) -> bool:
    lower = name.lower()
    return lower not in _OWN_OF_ANSWERS and not lower.startswith("access-control-")
