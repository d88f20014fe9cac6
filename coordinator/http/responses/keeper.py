"""Keeps the responses of an application in a directory: nothing of it runs on the event loop.

Three threads, so that nothing waits for what is larger:

* One writes whole files, one after the other, and waits for the disk.
* One adds what models say. That takes microseconds, and a client waits for it.
* One reads what is asked for again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from relayline.coordinator.http.edge.errors import using_disk
from relayline.coordinator.http.responses.directory import ResponseDirectory
from relayline.coordinator.http.responses.orders import Order, Sent
from relayline.coordinator.http.responses.store import Stored
from relayline.coordinator.sessions.generation import TokenEvent
from relayline.wire.common.bounds import STORED_RESPONSES_BYTES_MAX

log = logging.getLogger("relayline.http")

# Of what waits for a slow disk: further responses are in memory only, and further requests that cannot do without the
# disk are refused. A disk that hangs holds no more memory.
WRITES_WAITING_MAX, WRITES_WAITING_BYTES_MAX = 256, 2 * STORED_RESPONSES_BYTES_MAX
# With what is to be removed, which has no bytes. A file that then stays goes at a later start, once others are newer.
DROPS_WAITING_MAX = 4_096

DISK_PAUSE_S = 5.0

_SLOW = "the disk is slow"

T = TypeVar("T")


class ResponseKeeper:
    """The mirror of a store in a directory. Where the disk cannot be used, responses are in memory only."""

    def __init__(self, directory: ResponseDirectory) -> None:
        self.directory = directory
        self._files = ThreadPoolExecutor(1, "responses")
        self._said = ThreadPoolExecutor(1, "responses-said")
        self._reads = ThreadPoolExecutor(1, "responses-read")
        self._n_waiting = self._bytes_waiting = 0
        self._is_failing = False
        self._broken: set[str] = set()  # background responses whose files have a gap
        self._loop = asyncio.get_running_loop()

    def put(self, stored: Stored) -> None:
        """Write a response soon."""
        self._broken.discard(stored.id)
        self.write(self.directory.put, stored, n_bytes=stored.n_bytes)

    def write(self, function: Callable[..., None], *arguments: object, n_bytes: int) -> None:
        """Let one of the directory's calls write this much soon, unless too much waits already."""
        if self._has_room(n_bytes):
            self.soon(function, *arguments, n_bytes=n_bytes)
        else:
            self._note(_SLOW)

    def drop(self, id: str) -> None:
        """Forget a response soon."""
        self.remove(self.directory.drop, id)

    def remove(self, function: Callable[..., None], id: str) -> None:
        """Let one of the directory's calls remove a file soon, unless too much waits already."""
        if self._n_waiting < DROPS_WAITING_MAX:
            self.soon(function, id)

    def used(self, ids: Sequence[str]) -> None:
        """Note soon that these were used now, unless too much waits already."""
        if self._has_room(0):
            self.soon(self.directory.used, ids)

    async def forget(self, id: str) -> None:
        """Forget a response for certain. Raises HttpRefusal where the disk cannot be used."""
        with using_disk("the disk with the responses"):
            await self.call(self.directory.drop, id)

    async def forget_order(self, id: str) -> None:
        """Forget for certain what a background response was to answer. Raises HttpRefusal where the disk cannot be
        used: the next coordinator would go on with it.
        """
        with using_disk("the disk with the responses"):
            await self.call(self.directory.orders.finished, id)

    async def promise(self, order: Order) -> None:
        """Write down what a background response is to answer. Raises OverloadedError where too much is kept, and
        HttpRefusal where the disk cannot be used.
        """
        with using_disk("the disk with the responses"):
            self._check_room(n_bytes := _order_bytes(order))
            try:
                await self._in_turn(self.directory.orders.begin, order, n_bytes=n_bytes)
            except BaseException:  # a client that has left, too
                self.finished(order.id)
                raise

    def finished(self, id: str) -> None:
        """Forget soon what a background response was to answer."""
        self.soon(self.directory.orders.finished, id)

    async def add(self, id: str, events: Sequence[TokenEvent]) -> None:
        """Write what the model has said of a background response. After a failure no more is written of it."""
        if id in self._broken:
            return
        adding = self._loop.run_in_executor(self._said, self.directory.orders.add, id, events)
        try:
            await _done_whatever_comes(adding)
        except OSError as error:
            self._broken.add(id)
            text = "what %s says cannot be written any more, and a restart takes it back to here: %s"
            log.warning(text, id, error.strerror or error)

    async def started(self, id: str) -> None:
        """Note that a background response is asked for again now; waits for a disk that cannot be used."""
        while True:
            try:
                return await self.call(self.directory.orders.started, id)
            except OSError as error:
                self._note(error.strerror or str(error))
                await asyncio.sleep(DISK_PAUSE_S)

    async def read(self, id: str) -> tuple[Sent, list[TokenEvent]]:
        """Return the request of a background response that waits, and the tokens of its answer so far. Raises OSError,
        and others for a file that has become unreadable.
        """
        return await self._loop.run_in_executor(self._reads, self.directory.orders.read, id)

    async def left(self, ids: Sequence[str]) -> None:
        """Note that this coordinator ends in order, and that it was not for these."""
        with contextlib.suppress(OSError):  # they have been counted as if it did not
            await self.call(self.directory.orders.left, ids)

    async def call(self, function: Callable[..., T], *arguments: object, n_bytes: int = 0) -> T:
        """Run one of the directory's calls, after those that were asked for before; what models say and what is read
        is not among them. `n_bytes`: what it writes. Raises OSError, at once where too much waits already.
        """
        self._check_room(n_bytes)
        return await self._in_turn(function, *arguments, n_bytes=n_bytes)

    async def settled(self) -> None:
        """Wait until all that was asked for before is on the disk, or cannot be."""
        await self.call(lambda: None)

    async def close(self) -> None:
        """Let another coordinator have the directory, once all is written."""
        await self._in_turn(lambda: None)
        for threads in (self._files, self._said, self._reads):
            threads.shutdown()
        self.directory.close()

    def soon(self, function: Callable[..., None], *arguments: object, n_bytes: int = 0) -> None:
        """Run one of the directory's calls after those that were asked for before. `n_bytes`: what it writes."""
        self._submit(function, *arguments, n_bytes=n_bytes).add_done_callback(
            lambda done: self._loop.call_soon_threadsafe(self._note_end, done, n_bytes)
        )

    async def _in_turn(self, function: Callable[..., T], *arguments: object, n_bytes: int = 0) -> T:
        """As `call`, whatever waits. A caller that is cancelled leaves it in its turn, where it holds memory."""
        doing = asyncio.wrap_future(self._submit(function, *arguments, n_bytes=n_bytes))
        doing.add_done_callback(lambda done: done.cancelled() or done.exception())  # which nobody may look at
        return await asyncio.shield(doing)

    def _submit(self, function: Callable[..., T], *arguments: object, n_bytes: int) -> Future[T]:
        self._n_waiting += 1
        self._bytes_waiting += n_bytes
        doing = self._files.submit(function, *arguments)
        doing.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._note_done, n_bytes))
        return doing

    def _note_done(self, n_bytes: int) -> None:
        self._n_waiting -= 1
        self._bytes_waiting -= n_bytes

    def _has_room(self, n_bytes: int) -> bool:
        return self._n_waiting < WRITES_WAITING_MAX and self._bytes_waiting + n_bytes <= WRITES_WAITING_BYTES_MAX

    def _check_room(self, n_bytes: int) -> None:
        if not self._has_room(n_bytes):
            self._note(_SLOW)
            raise TimeoutError(errno.ETIMEDOUT, "it is slow, and too much waits for it already")

    def _note_end(self, done: Future[None], n_bytes: int) -> None:
        error = done.exception()
        if error is not None:
            self._note(getattr(error, "strerror", None) or str(error))
        elif n_bytes:  # a file can be removed from a full disk, too
            self._note("")

    def _note(self, fault: str) -> None:
        """Say once that the disk cannot be used, and once that it can."""
        if fault and not self._is_failing:
            text = "responses and conversations cannot be written to %s, and those of now are in memory only: %s"
            log.warning(text, self.directory.path, fault)
        elif self._is_failing and not fault:
            log.info("responses and conversations are written to %s again", self.directory.path)
        self._is_failing = bool(fault)


def _order_bytes(order: Order) -> int:
    sent = 0 if order.sent is None else len(order.sent.raw)
    return sent + len(order.queued) + sum(len(item) for _, item in order.input_items)


async def _done_whatever_comes(writing: asyncio.Future[None]) -> None:
    """Wait for a write's end, also where the one that waits is cancelled: its files may go next. Raises OSError."""
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing])
        writing.exception()  # nobody else looks at it
        raise
