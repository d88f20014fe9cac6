"""Token streams for the HTTP side, and their fan-out: all readers of a session get every token of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from relayline.coordinator.sessions.generation import PromptProgress, TokenEvent
from relayline.wire.common.errors import RelaylineError


class SessionStream:
    """Token events of one request; see coordinator.sessions.generation.TokenStream."""

    def __init__(self, leave: Callable[[SessionStream], None]) -> None:
        # Bounded by the session's max_tokens: the pipeline never waits for a slow reader.
        self._events: asyncio.Queue[TokenEvent | RelaylineError] = asyncio.Queue()
        self._leave = leave
        self._take: Callable[[TokenEvent | RelaylineError], None] | None = None
        self._ended = False
        self._progress: PromptProgress | None = None  # the latest, until a client follows it
        self._read: Callable[[PromptProgress], None] | None = None

    def progressed(self, progress: PromptProgress) -> None:
        """Say how far the prompt has been read."""
        if self._read is None:
            self._progress = progress
        else:
            self._read(progress)

    def follow(self, read: Callable[[PromptProgress], None]) -> None:
        """Have `read` called with how far the prompt has been read, now and from now on."""
        self._read = read
        if self._progress is not None:
            read(self._progress)

    def put(self, event: TokenEvent | RelaylineError) -> None:
        """Hand an event over; an error is the last."""
        if self._take is None:
            self._events.put_nowait(event)
        else:
            self._take(event)

    def forward(self, take: Callable[[TokenEvent | RelaylineError], None]) -> None:
        """Pass every event on at once, those already waiting first, instead of iterating over them."""
        self._take = take
        while not self._events.empty():
            take(self._events.get_nowait())

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._ended:
            raise StopAsyncIteration
        event = await self._events.get()
        if isinstance(event, RelaylineError):
            self._ended = True
            raise event
        self._ended = event.finish_reason is not None
        return event

    async def aclose(self) -> None:
        """Leave the session; the last stream to leave cancels it."""
        self.leave()

    def stop(self, error: RelaylineError) -> None:
        """End the stream with an error, for its reader too: somebody else wants it to end."""
        self.put(error)
        self._leave(self)

    def leave(self) -> None:
        """Leave the session, and take no more events."""
        self._ended = True
        self._leave(self)


class Reader(Protocol):
    """Takes the events of a session."""

    def put(self, event: TokenEvent | RelaylineError) -> None:
        """Take an event; an error, or one with a finish reason, is the last."""


class Audience:
    """All readers of one session, and the events that they have been given."""

    def __init__(self, session_id: int) -> None:
        self.session_id = session_id
        self.streams: list[Reader] = []
        self._past: list[TokenEvent] = []  # bounded by the session's max_tokens

    def join(self, stream: Reader) -> None:
        """Add a stream and give it all tokens generated so far."""
        for event in self._past:
            stream.put(event)
        self.streams.append(stream)

    def progressed(self, progress: PromptProgress) -> None:
        """Tell every stream that takes it how far the prompt has been read."""
        for stream in self.streams:
            if isinstance(stream, SessionStream):
                stream.progressed(progress)

    def put(self, event: TokenEvent | RelaylineError) -> None:
        """Hand an event to every stream."""
        if isinstance(event, TokenEvent):
            self._past.append(event)
        for stream in self.streams:
            stream.put(event)
