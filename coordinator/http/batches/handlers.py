"""The routes of /v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
import time
from typing import BinaryIO
from urllib.parse import quote

from aiohttp import hdrs, web

from relayline.coordinator.batches.lines import SERVED_URLS
from relayline.coordinator.batches.store import StoredBatch, StoredFile, new_id
from relayline.coordinator.http.batches.bodies import BatchBody
from relayline.coordinator.http.batches.own import disk, keeper_of, kept, owner_of, window_of
from relayline.coordinator.http.batches.room import Room
from relayline.coordinator.http.batches.shapes import batch_shape, file_shape, page_of
from relayline.coordinator.http.batches.uploads import Uploaded, receive
from relayline.coordinator.http.edge.body import read_small
from relayline.coordinator.http.edge.clients import CLIENT, PAYER, Payer, tenant_of
from relayline.coordinator.http.edge.errors import HttpRefusal
from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.edge.middleware import response_of
from relayline.coordinator.http.edge.queries import page_size
from relayline.coordinator.http.edge.sse import taken_by_client
from relayline.coordinator.http.requests.bodies import decode_body
from relayline.wire.common.errors import FileNotStoredError, InvalidRequestError
from relayline.wire.common.texts import whole_number

PAGE_MAX = 10_000
BLOCK_BYTES = 256 * 1024
EXPIRY_MAX_S = 10 * 365 * 86_400


class BatchHandlers:
    """The handlers of one application; without a keeper in it each answers 501."""

    def __init__(self, limits: HttpLimits, room: Room) -> None:
        self._limits, self._room = limits, room

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.post("/v1/files", self.upload),
            web.get("/v1/files", self.files),
            web.get("/v1/files/{id}", self.file),
            web.delete("/v1/files/{id}", self.delete),
            web.get("/v1/files/{id}/content", self.content),
            web.post("/v1/batches", self.create),
            web.get("/v1/batches", self.batches),
            web.get("/v1/batches/{id}", self.batch),
            web.post("/v1/batches/{id}/cancel", self.cancel),
        ]

    async def upload(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/files: a form with a file and its purpose."""
        keeper = keeper_of(request)
        store, owner = keeper.store, owner_of(request)
        with self._room.taking(store, keeper.limits, owner, request.content_length) as n_max:
            file_id = new_id("file-")
            try:
                with disk():
                    found = await receive(request, store.path_of(file_id), n_max)
                file = _received(file_id, owner, found, int(time.time()))
                with disk():
                    await keeper.call(store.keep_file, file)
            except BaseException:  # a client that has left, too
                await keeper.drop_unkept(file_id)
                raise
        return response_of(file_shape(file))

    async def files(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/files: the newest first unless `order` is asc; of one `purpose` if it is given."""
        purpose = request.query.get("purpose")
        own = list(keeper_of(request).store.files_of.get(owner_of(request), {}).values())
        found = [file for file in own if purpose in (None, file.purpose)]
        if request.query.get("order", "desc") != "asc":
            found.reverse()
        return response_of(page_of(found, file_shape, request.query.get("after"), page_size(request, PAGE_MAX)))

    async def file(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/files/{id}."""
        return response_of(file_shape(kept(request, keeper_of(request).store.files, "file")))

    async def delete(self, request: web.Request) -> web.StreamResponse:
        """DELETE /v1/files/{id}."""
        keeper = keeper_of(request)
        file = kept(request, keeper.store.files, "file")
        if user := keeper.user_of(file):
            raise InvalidRequestError(f"{user} still reads this file; cancel it first")
        with disk():
            await keeper.call(keeper.store.delete_file, file.id)
        return response_of({"id": file.id, "object": "file", "deleted": True})

    async def content(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/files/{id}/content: the file, block by block."""
        keeper = keeper_of(request)
        file = kept(request, keeper.store.files, "file")
        with disk():
            opened = await asyncio.to_thread(keeper.store.path_of(file.id).open, "rb")
        try:
            headers = {hdrs.CONTENT_DISPOSITION: f"attachment; filename*=UTF-8''{quote(file.filename)}"}
            response = web.StreamResponse(headers=headers)
            response.content_type, response.content_length = "application/octet-stream", file.n_bytes
            await response.prepare(request)
            if request.method != hdrs.METH_HEAD:
                await self._send(request, response, opened, file.n_bytes)
            await response.write_eof()
            return response
        finally:
            opened.close()  # here: a thread's would not come to it where the client's leaving cancels this once more

    async def create(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/batches."""
        keeper = keeper_of(request)
        body = decode_body(await read_small(request), BatchBody)
        if body.endpoint not in SERVED_URLS:
            raise InvalidRequestError.of_field("endpoint", f"must be one of {', '.join(SERVED_URLS)}")
        window_s = window_of(body.completion_window)
        file = keeper.store.files.get(body.input_file_id)
        if file is None or file.owner != owner_of(request):
            raise FileNotStoredError(f"input_file_id: no file {body.input_file_id[:100]!r} here", "input_file_id")
        if file.purpose != "batch":
            raise InvalidRequestError.of_field("input_file_id", "is the output of a batch, not a file of requests")
        now_s, payer = int(time.time()), request.get(PAYER, Payer(""))
        batch = StoredBatch(
            id=new_id("batch_"), owner=file.owner, client=request.get(CLIENT, ""),
            models=tuple(sorted(tenant_of(request).models)), payer=payer.name, behalf=payer.behalf,
            endpoint=body.endpoint, input_id=file.id,
            output_id=new_id("file-"), error_id=new_id("file-"), window=body.completion_window,
            metadata=body.metadata, created_at=now_s, expires_at=now_s + window_s,
        )  # fmt: skip
        with disk():
            await keeper.begin(batch)
        return response_of(batch_shape(batch))

    async def batches(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/batches: the newest first."""
        every = keeper_of(request).store.batches_of.get(owner_of(request), {}).values()
        found = [batch for batch in every if batch.form == "openai"][::-1]
        return response_of(page_of(found, batch_shape, request.query.get("after"), page_size(request, PAGE_MAX)))

    async def batch(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/batches/{id}."""
        return response_of(batch_shape(_found(request)))

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/batches/{id}/cancel: it is cancelled once its running requests are."""
        keeper = keeper_of(request)
        batch = _found(request)
        if batch.is_ended:
            raise HttpRefusal(409, f"this batch is {batch.status}; it cannot be cancelled any more", "batch_ended")
        with disk():
            await keeper.cancel(batch)
        return response_of(batch_shape(batch))

    async def _send(self, request: web.Request, response: web.StreamResponse, opened: BinaryIO, n_bytes: int) -> None:
        while n_bytes > 0 and (block := await asyncio.to_thread(opened.read, min(n_bytes, BLOCK_BYTES))):
            async with taken_by_client(request, len(block), self._limits.write_timeout_s):
                await response.write(block)
            n_bytes -= len(block)


def _found(request: web.Request) -> StoredBatch:
    batch = kept(request, keeper_of(request).store.batches, "batch")
    if batch.form != "openai":
        raise FileNotStoredError(f"{batch.id} is a batch of /v1/messages/batches")
    return batch


def _received(file_id: str, owner: str, found: Uploaded, now_s: int) -> StoredFile:
    """Return what is known of an upload. Raises InvalidRequestError."""
    if found.fields.get("purpose") != "batch":
        raise InvalidRequestError.of_field("purpose", "must be batch; files of other purposes are not kept here")
    return StoredFile(
        id=file_id, owner=owner, filename=found.filename, purpose="batch", n_bytes=found.n_bytes or 0,
        created_at=now_s, expires_at=_expiry_of(found.fields, now_s),
    )  # fmt: skip


def _expiry_of(fields: dict[str, str], now_s: int) -> int | None:
    anchor, text = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and text is None:
        return None
    after_s = whole_number(text or "", 11)
    if anchor != "created_at" or after_s is None or not 3_600 <= after_s <= EXPIRY_MAX_S:
        problem = f"must have the anchor created_at, and from 3600 to {EXPIRY_MAX_S} seconds"
        raise InvalidRequestError.of_field("expires_after", problem)
    return now_s + after_s
