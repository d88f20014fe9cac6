"""A request's record: from the first byte of the request to the last of its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from relayline.coordinator.http.edge.clients import tenant_of
from relayline.coordinator.http.edge.route_names import RERANK_PATHS, SCORE_PATHS, TRANSCRIPTION_PATHS
from relayline.coordinator.observe.observer import Observer
from relayline.coordinator.observe.tracing import CLIENT_GONE
from relayline.coordinator.sessions.request_log import RequestRecord

RECORD = web.RequestKey("record", RequestRecord)
OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/completion": "text_completion",
    "/infill": "text_completion",
    "/v1/embeddings": "embeddings",
    "/embedding": "embeddings",
    **dict.fromkeys((*RERANK_PATHS, *SCORE_PATHS), "rerank"),
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
    **dict.fromkeys(TRANSCRIPTION_PATHS, "chat"),
}
ERROR_CHARS_MAX = 1_000  # of an error's text, on spans

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def observing(observer: Observer, id_of: Callable[[web.Request], str]) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Return the outermost middleware, which keeps the record of every request that generates."""

    @web.middleware
    async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method != "POST" or request.path not in OPERATIONS:
            return await handler(request)
        record = request[RECORD] = RequestRecord(
            request_id=id_of(request),
            method=request.method,
            route=request.path,
            received_ns=time.monotonic_ns(),
            tenant=tenant_of(request),
        )
        record.unix_offset_ns = time.time_ns() - record.received_ns
        observer.received(record, {name.lower(): value for name, value in request.headers.items()})
        try:
            response = await handler(request)
            record.status = response.status
            if response.status >= 400 and not record.error:
                record.error = str(response.status)
            return response
        except asyncio.CancelledError:
            if not (record.is_whole or record.is_detached):
                record.error = record.error or CLIENT_GONE
            raise
        finally:
            if not record.is_detached:
                observer.answered(record, time.monotonic_ns())

    return observe


async def note_status(request: web.Request, response: web.StreamResponse) -> None:
    """Keep the status once it is sent (on_response_prepare): a client may be gone before the handler returns."""
    record = request.get(RECORD)
    if record is not None:
        record.status = response.status


def note_whole(request: web.Request) -> None:
    """Record that the whole answer has been handed over: a client that closes its connection now has everything."""
    record = request.get(RECORD)
    if record is not None:
        record.is_whole = True


def note_failure(request: web.Request, label: str, text: str = "") -> None:
    """Record why a request fails: the error's label and message."""
    record = request.get(RECORD)
    if record is not None and not record.is_detached:
        set_failure(record, label, text)


def set_failure(record: RequestRecord, label: str, text: str) -> None:
    """Put an error's label and message into a record."""
    # It may quote the caller: a lone surrogate would spoil the export of a whole batch of spans.
    record.error, record.error_text = label, text[:ERROR_CHARS_MAX].encode("utf-8", "replace").decode()
