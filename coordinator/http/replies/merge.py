"""Several token streams of one request read as one, passing on everything that is ready together.

A stream that can forward its events does so, without a task that wakes for each token. It holds no more of them than it
would in its own queue, which its answer's length bounds. For any other stream one task pulls the events, and pauses
while too many wait. `pass_on` calls a function with all ready events, once a turn of the event loop: so all tokens of a
step are handed over together, and no task wakes for them either. However the block around a `Merge` ends (normally, by
an error, or by cancellation because the client went away), every stream is closed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, TypeAlias, TypeGuard

import msgspec

from relayline.coordinator.sessions.generation import PromptProgress, TokenEvent, TokenStream
from relayline.wire.common.errors import InternalError, RelaylineError
from relayline.wire.common.tasks import cancel_all, start_among

log = logging.getLogger("relayline.http")

_CLOSING: set[asyncio.Task[None]] = set()


class Arrival(msgspec.Struct, frozen=True):  # seen by the garbage collector: errors know the frames that know it
    """One thing that came out of a stream: an event, or its end with or without an error."""

    stream: int  # which of the streams
    event: TokenEvent | None = None  # None: the stream has ended
    error: RelaylineError | None = None
    progress: PromptProgress | None = None  # in place of an event: how far the prompt has been read


Take: TypeAlias = "Callable[[list[Arrival]], bool]"


class Progressing(Protocol):
    """A stream that reports how far its prompt has been read."""

    def follow(self, read: Callable[[PromptProgress], None]) -> None:
        """Have this called now, where something is known, and from now on."""


class Forwarding(Protocol):
    """A stream that hands its events over itself."""

    def forward(self, take: Callable[[TokenEvent | RelaylineError], None]) -> None:
        """Pass every event on at once, those already waiting first."""

    def leave(self) -> None:
        """Leave the session, and take no more events."""


class Merge:
    """An async context manager around the open streams of one request; it owns and closes them."""

    def __init__(self, streams: Sequence[TokenStream], backlog_events_max: int) -> None:
        """Pulling pauses while `backlog_events_max` events wait, so a slow reader holds up its own streams only."""
        self._streams = streams
        self._ready: list[Arrival] = []
        self._waiter: asyncio.Future[None] | None = None
        self._take_all: Take | None = None  # of `pass_on`
        self._is_due = False  # whether it will be called in this turn of the event loop
        self._backlog_max = backlog_events_max
        self._room = asyncio.Event()  # fewer wait than may
        self._room.set()
        self._pumps: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> Merge:
        for index, stream in enumerate(self._streams):
            if _progresses(stream):
                stream.follow(functools.partial(self._read, index))
            if _forwards(stream):
                stream.forward(functools.partial(self._take, index))
            else:
                self._pumps[index] = asyncio.create_task(self._pump(index, stream))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._pumps:
            for stream in self._streams:
                if _forwards(stream):
                    _leave(stream)
            return
        # A separate task, so that a second cancellation (shutdown, say) cannot leave a stream open.
        await asyncio.shield(start_among(_CLOSING, self._close()))

    async def next(self, timeout_s: float | None) -> list[Arrival]:
        """Wait for the next arrival and return it with all others that are ready.

        An empty list says that nothing came for `timeout_s`. None waits for ever.
        """
        if not self._ready:
            await self._woken(timeout_s)
        return self._taken()

    async def pass_on(self, take: Take, timeout_s: float | None) -> None:
        """Give `take` all arrivals that are ready, now and whenever some come, until it returns False or the time is
        over. Raises what `take` raises.
        """
        while self._ready:  # also what comes while it takes
            if not take(self._taken()):
                return
        self._take_all = take
        try:
            await self._woken(timeout_s)
        finally:
            self._take_all = None

    async def _woken(self, timeout_s: float | None) -> None:
        self._waiter = self._loop.create_future()
        timer = None if timeout_s is None else self._loop.call_later(timeout_s, self._wake)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _taken(self) -> list[Arrival]:
        ready, self._ready = self._ready, []
        self._room.set()
        return ready

    def _pass_on(self) -> None:
        self._is_due = False
        take = self._take_all
        if take is None or not self._ready:
            return
        try:
            if take(self._taken()):
                return
        except Exception as error:
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(error)
        self._take_all = None  # later events wait for the next call
        self._wake()

    def drop(self, index: int) -> None:
        """Stop reading stream `index` and close it now. Events that it already gave may still arrive."""
        if not self._streams:  # all that comes was said before
            return
        stream = self._streams[index]
        if _forwards(stream):
            stream.leave()
        else:
            self._pumps[index].cancel()

    def _take(self, index: int, event: TokenEvent | RelaylineError) -> None:
        if isinstance(event, RelaylineError):
            self._put(Arrival(index, error=event))
            return
        self._put(Arrival(index, event))
        if event.finish_reason is not None:
            self._put(Arrival(index))

    def _read(self, index: int, progress: PromptProgress) -> None:
        self._put(Arrival(index, progress=progress))

    def _put(self, arrival: Arrival) -> None:
        self._ready.append(arrival)
        if len(self._ready) >= self._backlog_max:
            self._room.clear()
        if self._take_all is None:
            self._wake()
        elif not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._pass_on)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _close(self) -> None:
        await cancel_all(self._pumps.values())
        for stream in self._streams:
            await _close_stream(stream)

    async def _pump(self, index: int, stream: TokenStream) -> None:
        error: RelaylineError | None = None
        try:
            async for event in stream:
                await self._room.wait()
                self._put(Arrival(index, event))
        except asyncio.CancelledError:
            await _close_stream(stream)
            raise
        except RelaylineError as caught:
            error = caught
        except Exception:
            log.exception("token stream failed")
            error = InternalError("internal error while generating; the server's log has the details")
        await self._room.wait()
        self._put(Arrival(index, error=error))


# What `isinstance` takes 5 us to find out of a protocol.
def _progresses(stream: object) -> TypeGuard[Progressing]:
    return hasattr(stream, "follow")


def _forwards(stream: object) -> TypeGuard[Forwarding]:
    return hasattr(stream, "forward")


def _leave(stream: Forwarding) -> None:
    try:
        stream.leave()
    except Exception:
        log.exception("leaving a token stream failed")


async def _close_stream(stream: TokenStream) -> None:
    try:
        await stream.aclose()
    except Exception:
        log.exception("closing a token stream failed")
