"""Token streams for the HTTP side, and their fan-out: identical deterministic requests may share one session.

Two requests are identical when they must produce the same tokens: same prompt, same limits, greedy or the same seed
and filters. The later one joins the running session, gets what was generated so far at once and then every token as
it comes; the session ends early only when its last stream is closed.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Hashable

from relayline.coordinator.sessions.generation import GenerationRequest, TokenEvent
from relayline.coordinator.sessions.request_log import StreamRecord
from relayline.coordinator.sessions.session import Session
from relayline.wire.common.errors import RelaylineError

AUDIENCE_MAX = 1_024  # streams that share one session; the next identical request gets a session of its own


class SessionStream:
    """Token events of one request; see coordinator.sessions.generation.TokenStream."""

    def __init__(self, leave: Callable[[SessionStream], None]) -> None:
        # Bounded by the session's max_tokens: the pipeline never waits for a slow reader.
        self._events: asyncio.Queue[TokenEvent | RelaylineError] = asyncio.Queue()
        self._leave = leave
        self._ended = False

    def put(self, event: TokenEvent | RelaylineError) -> None:
        """Hand an event over; an error is the last."""
        self._events.put_nowait(event)

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
        self._ended = True
        self._leave(self)


class Audience:
    """One session and everybody who listens to it."""

    def __init__(self, session: Session, key: Hashable, opener: StreamRecord) -> None:
        self.session, self.key, self.opener = session, key, opener
        self.streams: list[SessionStream] = []
        self._past: list[TokenEvent] = []  # bounded by the session's max_tokens

    def join(self, stream: SessionStream) -> None:
        """Add a stream and give it what has been generated so far."""
        for event in self._past:
            stream.put(event)
        self.streams.append(stream)

    def put(self, event: TokenEvent | RelaylineError) -> None:
        """Hand an event to every stream."""
        if isinstance(event, TokenEvent):
            self._past.append(event)
        for stream in self.streams:
            stream.put(event)


def sharing_key(request: GenerationRequest) -> Hashable:
    """Return what must be equal for two requests to have the same answer, and the same told of their predictions."""
    sampling = request.sampling
    if sampling.temperature == 0:
        sampling = dataclasses.replace(sampling, seed=0, top_k=0, top_p=1.0, min_p=0.0)
    return dataclasses.replace(request, request_id="", record=None, sampling=sampling)
