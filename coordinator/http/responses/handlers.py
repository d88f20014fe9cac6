"""The routes of /v1/responses."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence

import msgspec
from aiohttp import web

from relayline.coordinator.http.edge.clients import CLIENT, client_of
from relayline.coordinator.http.edge.middleware import json_response
from relayline.coordinator.http.handlers import Handlers
from relayline.coordinator.http.replies import shapes
from relayline.coordinator.http.replies.dialects import Header
from relayline.coordinator.http.replies.reply import run
from relayline.coordinator.http.replies.service import Service
from relayline.coordinator.http.requests.chat_form import ChatForm
from relayline.coordinator.http.responses.asking import AnswerOptions, References
from relayline.coordinator.http.responses.dialect import Item, ResponsesDialect, new_id
from relayline.coordinator.http.responses.store import ResponseStore, Stored
from relayline.coordinator.http.workers.prepared import Asked, Prepared
from relayline.wire.common.errors import ContextLengthError, InvalidRequestError, ResponseNotFoundError

PAGE_ITEMS, PAGE_ITEMS_MAX = 20, 100  # of a list of items
_REFERRING = (b"previous_response_id", b"item_reference")  # a body without these words refers to nothing stored


class ResponseHandlers(Handlers):
    """The handlers of /v1/responses in one application."""

    def __init__(self, service: Service, store: ResponseStore) -> None:
        super().__init__(service)
        self._store = store

    async def create(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses."""
        service = self._service
        self._check_taken(request)
        prepared = await self._read(request)
        options = msgspec.msgpack.decode(prepared.answer_options, type=AnswerOptions)
        plan = await service.shaped(prepared, request)
        header = Header(new_id("resp"), int(time.time()), prepared.model, service.fingerprint, True, False)
        form = ChatForm(service.conversation, plan.offered, plan.splits_reasoning, prepared.is_thinking)
        job = await self._job(request, prepared, plan, header, "input", form)
        put = functools.partial(self._keep, asyncio.get_running_loop(), header.id, request.get(CLIENT, ""), options)
        keep = put if options.store else _forget
        n_top = plan.n_logprobs
        dialect = ResponsesDialect(header, service.speller, n_top, options, lambda: int(time.time()), keep)
        return await run(request, service, job, dialect)

    async def count(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses/input_tokens: how many tokens the prompt would have."""
        prepared = await self._read(request, is_counted=True)
        n_tokens = await self._service.n_counted(request, prepared)
        return json_response(b'{"object":"response.input_tokens","input_tokens":%d}' % n_tokens)

    async def retrieve(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/responses/{id}."""
        if request.query.get("stream", "false") not in ("", "false"):
            raise InvalidRequestError.of_field("stream", "a stored response is not streamed again; leave it out")
        return json_response(self._found(request).body)

    async def input_items(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/responses/{id}/input_items: the items of its body, the last one first unless `order` is asc."""
        items = list(self._found(request).input_items)
        if request.query.get("order", "desc") != "asc":
            items.reverse()
        after = request.query.get("after")
        ids = [item_id for item_id, _ in items]
        begin = ids.index(after) + 1 if after in ids else 0
        page = items[begin : begin + _page_size(request)]
        listed = {
            "object": "list",
            "data": [msgspec.Raw(item) for _, item in page],
            "first_id": page[0][0] if page else None,
            "last_id": page[-1][0] if page else None,
            "has_more": begin + len(page) < len(items),
        }
        return json_response(shapes.encode(listed))

    async def delete(self, request: web.Request) -> web.StreamResponse:
        """DELETE /v1/responses/{id}."""
        found = self._found(request)
        self._store.delete(found.id, found.owner)
        return json_response(shapes.encode({"id": found.id, "object": "response", "deleted": True}))

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses/{id}/cancel: stored responses are finished, so there is nothing to cancel."""
        self._found(request)
        raise InvalidRequestError("only a background response can be cancelled; for another, close its connection")

    async def _read(self, request: web.Request, *, is_counted: bool = False) -> Prepared:
        service, raw = self._service, await request.read()
        context = b""
        if any(word in raw for word in _REFERRING):
            answer = await service.pool.ask(client_of(request), Asked("references"), raw)
            context = self._context(msgspec.msgpack.decode(answer, type=References), request.get(CLIENT, ""))
        sent = context + raw if context else raw
        return await service.read_in("responses", request, sent, len(context), is_counted=is_counted)

    def _context(self, wanted: References, owner: str) -> bytes:
        """Return the Context of a body as JSON: the stored responses that it refers to, joined."""
        previous_id = wanted.previous_response_id
        if previous_id is None and not wanted.item_ids:
            return b""
        chain = [] if previous_id is None else self._store.chain(previous_id, owner)
        if isinstance(chain, str):
            text = f"the response {chain[:100]!r} is not stored here (any more); send all items as input"
            raise ResponseNotFoundError(f"previous_response_id: {text}", "previous_response_id")
        if sum(stored.n_bytes for stored in chain) > self._service.limits.body_bytes_max:
            text = "the conversation is too long to go on with; send the items that matter as input"
            raise ContextLengthError(f"previous_response_id: {text}", "previous_response_id")
        history = [item for stored in chain for _, item in (*stored.input_items, *stored.output_items)]
        items = {item_id: msgspec.Raw(item) for item_id, item in self._store.items(wanted.item_ids, owner).items()}
        return b'{"history":[' + b",".join(history) + b'],"items":' + shapes.encode(items) + b"}"

    def _found(self, request: web.Request) -> Stored:
        name = request.match_info["id"]
        found = self._store.get(name, request.get(CLIENT, ""))
        if found is None:
            raise ResponseNotFoundError(f"no response {name[:100]!r} is stored here")
        return found

    def _keep(
        self,
        loop: asyncio.AbstractEventLoop,
        id: str,
        owner: str,
        options: AnswerOptions,
        body: bytes,
        output: Sequence[Item],
    ) -> None:
        items = [(item["id"], shapes.encode(item)) for item in output]
        stored = Stored(id, owner, body, options.input_items, items, options.previous_response_id)
        loop.call_soon_threadsafe(self._store.put, stored)  # a long answer is written by a thread


def _forget(_body: bytes, _output: Sequence[Item]) -> None:
    """Do not store a response."""


def _page_size(request: web.Request) -> int:
    text = request.query.get("limit", str(PAGE_ITEMS))
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:4]) <= PAGE_ITEMS_MAX):
        raise InvalidRequestError.of_field("limit", f"must be a number from 1 to {PAGE_ITEMS_MAX}")
    return int(text)
