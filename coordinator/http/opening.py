"""Opens a coordinator's API: its keys, what it keeps on the disk, and its port."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web

from relayline.coordinator.http.batches.begin import keep_batches
from relayline.coordinator.http.batches.keeper import Keeper
from relayline.coordinator.http.edge.api_keys import protect_http
from relayline.coordinator.http.edge.inside import Inside
from relayline.coordinator.http.edge.listener import HttpListener
from relayline.coordinator.http.edge.server import start_http
from relayline.coordinator.http.responses.begin import keep_responses
from relayline.coordinator.sessions.generation import Generator
from relayline.wire.settings.table import ServingSettings


@contextlib.asynccontextmanager
async def opened(
    app: web.Application,
    listener: HttpListener,
    serving: ServingSettings,
    generator: Generator,
    *,
    stopping: asyncio.Event,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[tuple[int, Keeper | None]]:
    """Serve an application within; gives the port that it got, and what keeps its files and batches, if anything does.

    Work on batches ends with `stopping`. Raises UsageError for keys or a directory that cannot be used, and StartError
    for an address that cannot be listened on.
    """
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(protect_http(app, listener))
        inside = Inside(app)
        batches = await keep_batches(app, serving, generator, inside)
        responses = await keep_responses(app, serving, generator, inside)
        if responses is not None:
            stack.push_async_callback(responses.keeper.close)
        runner, port = await start_http(app, listener.host, listener.port, context=tls)
        stack.push_async_callback(runner.cleanup)
        working = [each for each in (batches, responses) if each is not None]
        if working:
            socket = await stack.enter_async_context(inside.listening(runner))
        for each in working:
            each.start(socket)
            await stack.enter_async_context(_closed_at(stopping, each.close))
        yield port, batches


@contextlib.asynccontextmanager
async def _closed_at(stopping: asyncio.Event, close: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Close something once `stopping` is set, at the latest after the context: nothing that drains waits for it."""

    async def wait() -> None:
        await stopping.wait()
        await close()

    closing = asyncio.create_task(wait())
    try:
        yield
    finally:
        stopping.set()
        await closing
