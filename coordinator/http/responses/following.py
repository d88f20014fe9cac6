"""Sends recorded events to a client that may come late, or behind others.

It is woken for each step's tokens, unlike the writer of a plain stream, which writes where they are published.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.edge.sse import ClientGoneError, EventWriter
from relayline.coordinator.http.responses.recording import Reader, Recording
from relayline.wire.common.tasks import set_within

EVENTS_AT_ONCE_MAX = 256  # of one write to a reader that is behind


async def follow(request: web.Request, recording: Recording, first: int, limits: HttpLimits) -> web.StreamResponse:
    """Stream recorded events from sequence number `first` on, to the end. Raises ClientGoneError."""
    writer = EventWriter(request, limits.write_timeout_s, limits.ping_interval_s, lambda event: event)
    has_more = asyncio.Event()
    reader = Reader(first, has_more.set)
    recording.follow(reader)
    try:
        await writer.start()
        await writer.send(())
        while True:
            has_more.clear()
            is_over = recording.is_over
            events = recording.since(reader.number, EVENTS_AT_ONCE_MAX)
            if events is None:
                await writer.cut(())
                raise ClientGoneError("the client reads too slowly: events that it has not read are no longer kept")
            if events:
                await writer.send(events)
                reader.number += len(events)
            elif is_over:
                await writer.finish(())
                return writer.response
            else:
                await _woken(has_more, writer)
    finally:
        recording.leave(reader)


async def _woken(has_more: asyncio.Event, writer: EventWriter) -> None:
    """Wait for more events; a client that gets none for long gets a ping."""
    if not await set_within(has_more, max(0.0, writer.silent_in_s())):
        await writer.ping()
