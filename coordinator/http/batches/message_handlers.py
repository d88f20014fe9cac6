"""The routes of /v1/messages/batches: Anthropic's form of a batch, whose requests come in its body."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from aiohttp import hdrs, web

from relayline.coordinator.batches.message_lines import URL, result_line
from relayline.coordinator.batches.store import StoredBatch, StoredFile, new_id
from relayline.coordinator.http.batches.message_input import Order, Read
from relayline.coordinator.http.batches.own import disk, keeper_of, kept, owner_of, window_of
from relayline.coordinator.http.batches.room import Room
from relayline.coordinator.http.batches.shapes import MESSAGE_BATCHES as PATH
from relayline.coordinator.http.batches.shapes import message_batch_shape, message_page
from relayline.coordinator.http.batches.uploads import receive_body
from relayline.coordinator.http.edge.clients import CLIENT, PAYER, Payer, tenant_of
from relayline.coordinator.http.edge.errors import HttpRefusal
from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.edge.middleware import response_of
from relayline.coordinator.http.edge.queries import page_size
from relayline.coordinator.http.edge.sse import taken_by_client
from relayline.wire.common.child_command import module_command
from relayline.wire.common.errors import FileNotStoredError, InternalError, InvalidRequestError

PAGE_MAX = 1_000
WINDOW = "24h"  # Anthropic's, for a body that names none
BLOCK_BYTES = 256 * 1024  # of results, read at once
READERS_MAX = 1  # bodies that are read at the same time; each takes as much memory as it has bytes, and some more
READ_TIMEOUT_S = 300.0  # for one
_READER = "relayline.coordinator.http.batches.message_input"


class MessageBatchHandlers:
    """The handlers of one application; without a keeper in it each answers 501."""

    def __init__(self, limits: HttpLimits, room: Room) -> None:
        self._limits, self._room = limits, room
        self._reading = asyncio.Semaphore(READERS_MAX)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.post(PATH, self.create),
            web.get(PATH, self.batches),
            web.get(f"{PATH}/{{id}}", self.batch),
            web.delete(f"{PATH}/{{id}}", self.delete),
            web.post(f"{PATH}/{{id}}/cancel", self.cancel),
            web.get(f"{PATH}/{{id}}/results", self.results),
        ]

    async def create(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages/batches: a body with all requests; the first mistake in it refuses all."""
        keeper = keeper_of(request)
        store, owner = keeper.store, owner_of(request)
        with self._room.taking(store, keeper.limits, owner, request.content_length) as n_max:
            file_id = new_id("file-")
            path = store.path_of(file_id)
            try:
                with disk():
                    await receive_body(request, path, n_max)
                async with self._reading:
                    read = await _read(Order(str(path), keeper.limits.batch_requests, n_max))
                batch = _new_batch(request, owner, file_id, read)
                file = StoredFile(
                    id=file_id, owner=owner, filename=f"{batch.id}_input.jsonl", purpose="batch",
                    n_bytes=read.n_bytes, created_at=batch.created_at,
                )  # fmt: skip
                with disk():
                    await keeper.begin(batch, file)
            except BaseException:  # a client that has left, too
                await keeper.drop_unkept(file_id)
                raise
        return response_of(message_batch_shape(batch))

    async def batches(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/messages/batches: the newest first."""
        every = keeper_of(request).store.batches_of.get(owner_of(request), {}).values()
        found = [batch for batch in every if batch.form == "messages"][::-1]
        after, before = request.query.get("after_id"), request.query.get("before_id")
        return response_of(message_page(found, after, before, page_size(request, PAGE_MAX)))

    async def batch(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/messages/batches/{id}."""
        return response_of(message_batch_shape(_found(request)))

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages/batches/{id}/cancel: it ends once its running requests have."""
        batch = _found(request)
        if batch.is_ended:
            raise InvalidRequestError("this batch has ended; it cannot be canceled any more")
        if batch.status != "cancelling":  # the process that names the rest must not be stopped
            with disk():
                await keeper_of(request).cancel(batch)
        return response_of(message_batch_shape(batch))

    async def delete(self, request: web.Request) -> web.StreamResponse:
        """DELETE /v1/messages/batches/{id}: a batch that has ended, and its results."""
        batch, keeper = _found(request), keeper_of(request)
        if not batch.is_ended:
            raise InvalidRequestError("this batch has not ended; cancel it first")
        with disk():
            await keeper.call(keeper.store.delete_batch, batch.id)
        return response_of({"id": batch.id, "type": "message_batch_deleted"})

    async def results(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/messages/batches/{id}/results: a line for each request."""
        batch, store = _found(request), keeper_of(request).store
        if not batch.is_ended:
            raise InvalidRequestError("this batch has not ended; it has results once it has a results_url")
        wanted = [batch.output_id] * batch.has_output + [batch.error_id] * batch.has_errors
        if any(file_id not in store.files for file_id in wanted):
            raise FileNotStoredError("the results of this batch were deleted")
        blocks = _blocks([store.path_of(file_id) for file_id in wanted])
        with disk():
            block = await asyncio.to_thread(next, blocks, b"")
        response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: "application/x-jsonl"})
        await response.prepare(request)
        while block and request.method != hdrs.METH_HEAD:
            async with taken_by_client(request, len(block), self._limits.write_timeout_s):
                await response.write(block)
            block = await asyncio.to_thread(next, blocks, b"")
        await response.write_eof()
        return response


def _found(request: web.Request) -> StoredBatch:
    batch = kept(request, keeper_of(request).store.batches, "message batch")
    if batch.form != "messages":
        raise FileNotStoredError(f"{batch.id} is a batch of /v1/batches")
    return batch


def _new_batch(request: web.Request, owner: str, file_id: str, read: Read) -> StoredBatch:
    now_s, payer, window = int(time.time()), request.get(PAYER, Payer("")), read.window or WINDOW
    return StoredBatch(
        id=new_id("msgbatch_"), form="messages", owner=owner, client=request.get(CLIENT, ""),
        models=tuple(sorted(tenant_of(request).models)), payer=payer.name, behalf=payer.behalf, endpoint=URL,
        input_id=file_id, output_id=new_id("file-"), error_id=new_id("file-"), window=window, metadata=None,
        n_requests=read.n_requests, created_at=now_s, expires_at=now_s + window_of(window),
    )  # fmt: skip


async def _read(order: Order) -> Read:
    """Let a process read a body. Raises InvalidRequestError, HttpRefusal for its disk, InternalError."""
    process = await asyncio.create_subprocess_exec(
        *module_command(_READER), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            said, _ = await process.communicate(msgspec.json.encode(order) + b"\n")
    except TimeoutError:
        raise InternalError("the requests could not be read in time; send fewer in one batch") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise InternalError("the process that reads requests has died; send the batch again")
    read = msgspec.json.decode(said, type=Read)
    if read.disk_problem:
        raise HttpRefusal(
            507, f"the disk with the files of batches cannot be used now: {read.disk_problem}", "disk_error"
        )
    if read.problem:
        raise InvalidRequestError(read.problem, read.param)
    return read


def _blocks(paths: Sequence[Path]) -> Iterator[bytes]:
    """Yield the results in these files, some lines at a time. Blocks: call it in a thread. Raises OSError.

    All are opened before the first block: a batch that is deleted meanwhile cuts no download.
    """
    gathered = bytearray()
    with contextlib.ExitStack() as opened:
        for file in [opened.enter_context(path.open("rb")) for path in paths]:
            for line in file:
                gathered += result_line(line)
                if len(gathered) >= BLOCK_BYTES:
                    yield bytes(gathered)
                    gathered.clear()
    if gathered:
        yield bytes(gathered)
