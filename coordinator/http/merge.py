"""Several token streams of one request read as one, with everything that is ready handed over together.

One task per stream pulls its events into a bounded queue. Whatever way the block around a `Merge` is left (end, error,
cancellation because the client went away), every stream is closed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from types import TracebackType

from relayline.coordinator.sessions.generation import TokenEvent, TokenStream
from relayline.wire.common.errors import InternalError, RelaylineError

log = logging.getLogger("relayline.http")

_CLOSING: set[asyncio.Task[None]] = set()  # the event loop itself holds tasks only weakly


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """One thing that came out of stream `index`: an event, or its end with or without an error."""

    index: int
    event: TokenEvent | None = None  # None: the stream has ended
    error: RelaylineError | None = None


class Merge:
    """An async context manager around the open streams of one request; it owns and closes them."""

    def __init__(self, streams: Sequence[TokenStream], backlog_events_max: int) -> None:
        """Reading pauses while `backlog_events_max` events wait, so a slow reader holds up its own streams only."""
        self._streams = streams
        self._queue: asyncio.Queue[Arrival] = asyncio.Queue(backlog_events_max)
        self._pumps: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Merge:
        self._pumps = [asyncio.create_task(self._pump(index, stream)) for index, stream in enumerate(self._streams)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A task of its own, so that a second cancellation (shutdown, say) cannot leave a stream open.
        closing = asyncio.create_task(self._close())
        _CLOSING.add(closing)
        closing.add_done_callback(_CLOSING.discard)
        await asyncio.shield(closing)

    async def next(self, timeout_s: float | None) -> list[Arrival]:
        """Wait for the next arrival and return it with all others that are ready.

        An empty list says that nothing came for `timeout_s`. None waits for ever.
        """
        if self._queue.empty():
            try:
                async with asyncio.timeout(timeout_s):
                    ready = [await self._queue.get()]
            except TimeoutError:
                return []
        else:
            ready = []
        while not self._queue.empty():
            ready.append(self._queue.get_nowait())
        return ready

    def drop(self, index: int) -> None:
        """Stop reading stream `index` and close it now. What it already gave may still arrive."""
        self._pumps[index].cancel()

    async def _close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for stream in self._streams:
            await _close_stream(stream)

    async def _pump(self, index: int, stream: TokenStream) -> None:
        error: RelaylineError | None = None
        try:
            async for event in stream:
                await self._queue.put(Arrival(index, event))
        except asyncio.CancelledError:
            await _close_stream(stream)
            raise
        except RelaylineError as caught:
            error = caught
        except Exception:
            log.exception("token stream failed")
            error = InternalError("internal error while generating; the server's log has the details")
        await self._queue.put(Arrival(index, error=error))


async def _close_stream(stream: TokenStream) -> None:
    try:
        await stream.aclose()
    except Exception:
        log.exception("closing a token stream failed")
