"""Waiting for a place in a fair line: the tasks of `fair_line`'s tickets. Event loop only."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from relayline.coordinator.http.workers.fair_line import FairLine, Ticket


class Turns:
    """A line before `n_places` places, fair between clients."""

    def __init__(self, n_places: int) -> None:
        self._line = FairLine(n_places)
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}

    async def enter(self, client: str, size_bytes: int) -> Ticket:
        """Wait for a place; `leave` gives it back. Raises OverloadedError where the line is full for this client."""
        ticket = self._line.enter(client, size_bytes)
        turn = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        self._begin()
        try:
            await turn
        except BaseException:
            self.leave(ticket)
            raise
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Give a place back. Once for each ticket."""
        del self._waiting[ticket]
        self._line.leave(ticket)
        self._begin()

    @contextlib.asynccontextmanager
    async def turn(self, client: str, size_bytes: int) -> AsyncIterator[None]:
        """Hold a place for a block. Raises as `enter`."""
        ticket = await self.enter(client, size_bytes)
        try:
            yield
        finally:
            self.leave(ticket)

    def _begin(self) -> None:
        for ticket in self._line.begin():
            turn = self._waiting[ticket]
            if not turn.done():  # one that was cancelled is about to leave
                turn.set_result(None)
