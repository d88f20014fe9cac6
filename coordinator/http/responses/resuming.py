"""Goes on with the background responses of the coordinator before: each is asked for again, over the inner door.

So it is a request like any other: for its key, in its line, with what the model has said before as a beginning.

A response may be the reason why a coordinator crashed. So those that ran again in one that was killed or crashed come
last and one by one, see `in_turn`. The first of them with STARTS_MAX starts is not tried again; then the others are
free of suspicion.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from relayline.coordinator.http.edge.clients import CLIENT, PAYER, Payer
from relayline.coordinator.http.edge.errors import ErrorBody
from relayline.coordinator.http.edge.inside import Inside
from relayline.coordinator.http.responses.background import Background
from relayline.coordinator.http.responses.keeper import ResponseKeeper
from relayline.coordinator.http.responses.waiting import AGAIN, Waiting
from relayline.coordinator.sessions.generation import Generator

log = logging.getLogger("relayline.http")

RESPONSE_HEADER = "x-relayline-response"
STARTS_MAX = 5  # of one response, by coordinators that were killed or crashed
LOOK_S = 1.0  # between two looks whether it may be asked for
_URL = "http://localhost/v1/responses"  # of a Unix socket
_LATER = (429, 503, 507)


class Resuming:
    """The responses that wait to be asked for again."""

    def __init__(self, background: Background, keeper: ResponseKeeper, generator: Generator, inside: Inside) -> None:
        self.keeper, self._background = keeper, background
        self._generator, self._inside = generator, inside
        self._asking: asyncio.Task[None] | None = None
        inside.add(RESPONSE_HEADER, self.let_in)

    def let_in(self, request: web.Request, id: str) -> None:
        """Mark a request for such a response with whom it is for."""
        waiting = self._background.waiting(id)
        if waiting is None:
            return
        request[AGAIN] = waiting
        request[PAYER] = Payer(waiting.order.payer, waiting.order.behalf)
        if waiting.owner:
            request[CLIENT] = waiting.owner

    def start(self, socket: Path) -> None:
        """Ask for them over this application's own socket."""
        self._asking = asyncio.create_task(self._run(socket))

    async def close(self) -> None:
        """Ask for no more. The next coordinator goes on with those that have not ended."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        await self._background.leave()

    async def _run(self, socket: Path) -> None:
        waiting = self._background.all_waiting()
        if waiting:
            log.info("%d background responses of the coordinator before go on", len(waiting))
        connector = aiohttp.UnixConnector(str(socket))
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout()) as session:
            of_key: defaultdict[str, list[Waiting]] = defaultdict(list)
            for each in waiting:
                if not each.n_starts:
                    of_key[each.owner].append(each)
            async with asyncio.TaskGroup() as group:  # a key whose line is full holds up no other
                for own in of_key.values():
                    group.create_task(self._ask_all(session, own))
            for each in in_turn([each for each in waiting if each.n_starts]):
                await self._ask_all(session, [each])
                await each.is_going.wait()

    async def _ask_all(self, session: aiohttp.ClientSession, waiting: Sequence[Waiting]) -> None:
        """Ask for responses of one key, one after the other."""
        for each in waiting:
            try:
                await self._ask(session, each)
            except Exception as error:
                log.exception("the background response %s cannot go on", each.id)
                self._background.fail(each, f"the request cannot be read any more: {error}")

    async def _ask(self, session: aiohttp.ClientSession, waiting: Waiting) -> None:
        """Ask for a response until it is admitted, refused for good, or cancelled."""
        if waiting.n_starts >= STARTS_MAX - 1:
            text = f"the coordinator has ended {STARTS_MAX} times while it ran, so it is not tried again"
            self._background.fail(waiting, text)
            await self._acquit()
            return
        try:
            waiting.sent, waiting.said = await self.keeper.read(waiting.id)
        except FileNotFoundError:
            if self._background.waiting(waiting.id) is not waiting:
                return  # it was cancelled meanwhile
            raise
        is_counted = False
        while self._background.waiting(waiting.id) is waiting:
            if self._generator.phase.takes_requests:
                if not is_counted:
                    await self.keeper.started(waiting.id)
                    is_counted = True
                if refusal := await self._refusal(session, waiting):
                    self._background.fail(waiting, refusal)
            if self._background.waiting(waiting.id) is waiting:
                await asyncio.sleep(LOOK_S)
        waiting.sent, waiting.said = None, ()

    async def _acquit(self) -> None:
        """The crashes have had their reason: what has not ended begins to be counted anew."""
        for each in self._background.all_waiting():
            each.n_starts = 0
        await self.keeper.left(self._background.ids())

    async def _refusal(self, session: aiohttp.ClientSession, waiting: Waiting) -> str:
        """Ask once; returns why it is refused for good, empty if it is not."""
        headers = self._inside.headers(RESPONSE_HEADER, waiting.id)
        with contextlib.suppress(aiohttp.ClientError):
            async with session.post(_URL, headers=headers) as reply:
                if reply.status not in (200, *_LATER):
                    return msgspec.json.decode(await reply.read(), type=ErrorBody).error.message
        return ""


def in_turn(suspects: Sequence[Waiting]) -> list[Waiting]:
    """Return them in the order in which they are tried: those with the fewest starts first.

    Of those with as many starts it is the first one first and the last one first in turns. So what came before the one
    that crashes, and ran beside it, comes behind it the next time: none has as many starts as that one.
    """
    turns = [(each.n_starts, at if each.n_starts % 2 else -at) for at, each in enumerate(suspects)]
    return [suspects[abs(at)] for _, at in sorted(turns)]
