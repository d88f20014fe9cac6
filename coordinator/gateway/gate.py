"""Lets requests to pipelines of which not all may be awake at once: feeds `coordinator.gateway.awake` and carries out
its decisions."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from aiohttp import hdrs

from relayline.coordinator.gateway.awake import Awake, Decision, GiveUp, Go, PutToSleep, Told
from relayline.coordinator.gateway.router import Backend, Health
from relayline.coordinator.http.edge.steering import plain_path
from relayline.wire.common.tasks import cancel_all, start_among

# What clients POST without waking anything; other routes count as requests, so that no more are awake than may be.
_QUIET = re.compile(
    r"(/v1)?/((pipeline|telemetry|requests|files|conversations)(/.*)?|sleep|tokenize|detokenize|apply-template"
    r"|messages/count_tokens|responses/(input_tokens|[^/]+/cancel)|(messages/)?batches/.*/cancel|api/(show|pull))"
)


def wakes(method: str, path: str) -> bool:
    """Return whether a request wakes a pipeline that sleeps. `path`: as its pipeline gets it, with its query."""
    return method == hdrs.METH_POST and _QUIET.fullmatch(plain_path(path.partition("?")[0])) is None


class PipelineLostError(Exception):
    """A request waited for a pipeline that does not answer any more."""


class Gate:
    """The gate before all pipelines of one gateway. Event loop only."""

    def __init__(self, awake: Awake, tell: Callable[[Backend], Awaitable[Told]]) -> None:
        """`tell` tells a pipeline to sleep, and returns once it has answered or a bound is over."""
        self._awake, self._tell = awake, tell
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._telling: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @contextlib.asynccontextmanager
    async def place(self, backend: Backend, *, is_start: bool = False) -> AsyncIterator[None]:
        """Within the context a request may be at a pipeline, or with `is_start` the pipeline starts.

        Waits for that. Raises NotReadyError where it takes too long, PipelineLostError.
        """
        if not self._awake.limit:
            yield
            return
        number, decisions = self._awake.came(backend, time.monotonic_ns(), is_start=is_start)
        may_go = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._carry(decisions)
            await may_go
            yield
        finally:
            self._waiting.pop(number, None)
            self._carry(self._awake.ended(number, time.monotonic_ns()))

    def heard(self, backend: Backend, asked_ns: int) -> None:
        """A pipeline has said how it is. `asked_ns`: when it was asked."""
        if self._awake.limit:
            is_busy = backend.n_others > 0 or backend.health is not Health.READY
            self._carry(
                self._awake.heard(
                    backend, time.monotonic_ns(), is_asleep=backend.is_asleep, is_busy=is_busy, asked_ns=asked_ns
                )
            )

    def lost(self, backend: Backend) -> None:
        """A pipeline does not answer."""
        if self._awake.limit:
            self._carry(self._awake.lost(backend, time.monotonic_ns()))

    def removed(self, backend: Backend) -> None:
        """A pipeline is no longer one of this gateway's."""
        if self._awake.limit:
            self._carry(self._awake.removed(backend, time.monotonic_ns()))

    def _carry(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Go(number):
                    if not (may_go := self._waiting[number]).done():
                        may_go.set_result(None)
                case GiveUp(number, error):
                    if not (may_go := self._waiting[number]).done():
                        may_go.set_exception(error or PipelineLostError())
                case PutToSleep() if self._is_closed:
                    pass
                case PutToSleep(pipeline):
                    assert isinstance(pipeline, Backend)
                    start_among(self._telling, self._put_to_sleep(pipeline))

    async def _put_to_sleep(self, backend: Backend) -> None:
        outcome = Told.AWAKE
        try:
            outcome = await self._tell(backend)
        finally:
            if outcome is Told.ASLEEP:
                backend.slept()
            self._carry(self._awake.told(backend, outcome, time.monotonic_ns()))

    async def close(self) -> None:
        """Wait for no pipeline any more, and tell none to sleep."""
        self._is_closed = True
        for may_go in self._waiting.values():
            if not may_go.done():
                may_go.set_exception(PipelineLostError())
        await cancel_all(self._telling)
