"""A background response of the coordinator before this one: what its clients see until it is asked for again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from aiohttp import web

from relayline.coordinator.http.conversations.store import Turn
from relayline.coordinator.http.replies import shapes
from relayline.coordinator.http.responses.orders import Sent, Unfinished
from relayline.coordinator.http.responses.recording import Recording
from relayline.coordinator.http.responses.store import Stored
from relayline.coordinator.sessions.generation import TokenEvent

_QUEUED, _IN_PROGRESS = b'"status":"queued"', b'"status":"in_progress"'


class Waiting:
    """One response that waits to be asked for again."""

    task: asyncio.Task[None] | None = None
    is_whole = False

    def __init__(self, unfinished: Unfinished, turn: Turn | None = None) -> None:
        order = self.order = unfinished.order
        self.id, self.owner, self.turn = order.id, order.owner, turn
        self.n_starts = unfinished.n_starts
        self.recording = Recording() if order.is_stream else None
        self.is_going = asyncio.Event()
        """It has said something new, or has ended."""
        self.sent: Sent | None = None
        """What was asked for, while it is asked for."""
        self.said: Sequence[TokenEvent] = ()
        """What the model had said, then."""
        self._has_begun = unfinished.has_begun

    def as_stored(self) -> Stored:
        """Return it as far as it is known."""
        body = self.order.queued
        # The first such words are its own: only an id and a time go before them.
        return self._stored(body.replace(_QUEUED, _IN_PROGRESS, 1) if self._has_begun else body)

    def cancel(self) -> Stored:
        """End it because its client wishes so: without the text that it had."""
        return self._ended(status="cancelled")

    def fail(self, message: str) -> Stored:
        """End it because it cannot be asked for again."""
        return self._ended(status="failed", error={"code": "server_error", "message": message})

    def without_output(self) -> Stored:
        """Return it as what is stored where its events are too large."""
        return self.fail("the request is larger than what is stored of it")

    def leave(self) -> None:
        """This coordinator ends, too."""
        if self.recording is not None:
            self.recording.end()

    def _ended(self, **fields: object) -> Stored:
        self.is_going.set()
        self.leave()
        return self._stored(shapes.encode(msgspec.json.decode(self.order.queued, type=dict[str, object]) | fields))

    def _stored(self, body: bytes) -> Stored:
        order = self.order
        return Stored(order.id, order.owner, body, order.input_items, (), order.previous_id, True, self.recording)


AGAIN = web.RequestKey("again", Waiting)  # of a request that asks for it again
