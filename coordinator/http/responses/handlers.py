"""The routes of /v1/responses."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence

import msgspec
from aiohttp import hdrs, web

from relayline.coordinator.http.edge.clients import CLIENT, client_of
from relayline.coordinator.http.edge.middleware import json_response
from relayline.coordinator.http.handlers import Handlers
from relayline.coordinator.http.replies import shapes
from relayline.coordinator.http.replies.dialects import Header
from relayline.coordinator.http.replies.reply import run
from relayline.coordinator.http.replies.service import Service, random_seed
from relayline.coordinator.http.requests.chat_form import ChatForm
from relayline.coordinator.http.responses.asking import AnswerOptions, References
from relayline.coordinator.http.responses.background import Background
from relayline.coordinator.http.responses.dialect import Item, ResponsesDialect, call_ids_of, new_id
from relayline.coordinator.http.responses.following import follow
from relayline.coordinator.http.responses.orders import Sent
from relayline.coordinator.http.responses.promising import promised_job
from relayline.coordinator.http.responses.store import ResponseStore, Stored
from relayline.coordinator.http.responses.waiting import AGAIN
from relayline.coordinator.http.workers.prepared import Asked
from relayline.wire.common.bounds import CTX_TOKENS_MAX
from relayline.wire.common.errors import ContextLengthError, InvalidRequestError, ResponseNotFoundError

PAGE_ITEMS, PAGE_ITEMS_MAX = 20, 100  # of a list of items
_REFERRING = (b"previous_response_id", b"item_reference")  # a body without these words refers to nothing stored


class ResponseHandlers(Handlers):
    """The handlers of /v1/responses in one application."""

    def __init__(self, service: Service, store: ResponseStore, background: Background) -> None:
        super().__init__(service)
        self._store, self._background = store, background

    async def create(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses."""
        service = self._service
        self._check_taken(request)
        again = request.get(AGAIN)
        sent = await self._sent(request) if again is None or again.sent is None else again.sent
        prepared = await service.read_in("responses", request, sent.raw, sent.n_context, seed=sent.seed)
        options = msgspec.msgpack.decode(prepared.answer_options, type=AnswerOptions)
        promised = sent if options.background else None
        del sent  # a long body
        plan = await service.shaped(prepared, request)
        id, created = (new_id("resp"), int(time.time())) if again is None else (again.id, again.order.created)
        header = Header(id, created, prepared.model, service.fingerprint, True, False)
        splits, is_thinking = plan.splits_reasoning, prepared.is_thinking
        form = ChatForm(service.conversation, plan.offered, splits, is_thinking, call_ids_of(id))
        job = await self._job(request, prepared, plan, header, "input", form)
        put = functools.partial(self._keep, asyncio.get_running_loop(), header.id, request.get(CLIENT, ""), options)
        keep = put if options.store and not options.background else _forget
        n_top = plan.n_logprobs
        dialect = ResponsesDialect(header, service.speller, n_top, options, lambda: int(time.time()), keep)
        if promised is not None:
            running = await promised_job(self._background, service, request, job, dialect, options, promised)
            del promised
            return await self._background.begin(request, running)
        return await run(request, service, job, dialect)

    async def count(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses/input_tokens: how many tokens the prompt would have."""
        sent = await self._sent(request)
        prepared = await self._service.read_in("responses", request, sent.raw, sent.n_context, is_counted=True)
        n_tokens = await self._service.n_counted(request, prepared)
        return json_response(b'{"object":"response.input_tokens","input_tokens":%d}' % n_tokens)

    async def retrieve(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/responses/{id}; as a stream, the events of a background response after `starting_after`."""
        found = self._found(request)
        if request.method == hdrs.METH_HEAD or request.query.get("stream", "false") in ("", "false"):
            return json_response(found.body)
        if found.recording is None:
            text = "only a background response that was asked for as a stream can be streamed again; leave it out"
            raise InvalidRequestError.of_field("stream", text)
        first = _starting_after(request) + 1
        if found.recording.since(first, 0) is None:
            text = f"events before {found.recording.n_dropped} are no longer kept; get the response without `stream`"
            raise InvalidRequestError.of_field("starting_after", text)
        return await follow(request, found.recording, first, self._service.limits)

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
        """DELETE /v1/responses/{id}; one that runs is cancelled."""
        found = self._found(request)
        running = self._background.get(found.id, found.owner)
        if running is not None:
            await self._background.cancel(running)
        if self._background.keeper is not None:  # first: what cannot go from the disk would be back after a restart
            await self._background.keeper.forget(found.id)
        self._store.delete(found.id, found.owner)
        return json_response(shapes.encode({"id": found.id, "object": "response", "deleted": True}))

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses/{id}/cancel: of a background response. One that has ended stays as it is."""
        found = self._found(request)
        running = self._background.get(found.id, found.owner)
        if running is not None:
            await self._background.cancel(running)
            found = self._found(request)
        if not found.is_background:
            raise InvalidRequestError("only a background response can be cancelled; for another, close its connection")
        if self._background.keeper is not None:
            await self._background.keeper.forget_order(found.id)
        return json_response(found.body)

    async def _sent(self, request: web.Request) -> Sent:
        """Return a body with the stored responses that it refers to before it."""
        raw = await request.read()
        context = b""
        if any(word in raw for word in _REFERRING):
            answer = await self._service.pool.ask(client_of(request), Asked("references"), raw)
            context = self._context(msgspec.msgpack.decode(answer, type=References), request.get(CLIENT, ""))
        return Sent(context + raw if context else raw, len(context), random_seed())

    def _context(self, wanted: References, owner: str) -> bytes:
        """Return the Context of a body as JSON: the stored responses that it refers to, joined."""
        previous_id = wanted.previous_response_id
        if previous_id is None and not wanted.item_ids:
            return b""
        if previous_id is not None and self._background.get(previous_id, owner) is not None:
            text = "the response is still in progress; wait for its end"
            raise InvalidRequestError.of_field("previous_response_id", text)
        chain = [] if previous_id is None else self._store.chain(previous_id, owner)
        if isinstance(chain, str):
            text = f"the response {chain[:100]!r} is not stored here (any more); send all items as input"
            raise ResponseNotFoundError(f"previous_response_id: {text}", "previous_response_id")
        if sum(stored.items_bytes for stored in chain) > self._service.limits.body_bytes_max:
            text = "the conversation is too long to go on with; send the items that matter as input"
            raise ContextLengthError(f"previous_response_id: {text}", "previous_response_id")
        history = [item for stored in chain for _, item in (*stored.input_items, *stored.output_items)]
        items = {item_id: msgspec.Raw(item) for item_id, item in self._store.items(wanted.item_ids, owner).items()}
        return b'{"history":[' + b",".join(history) + b'],"items":' + shapes.encode(items) + b"}"

    def _found(self, request: web.Request) -> Stored:
        name, owner = request.match_info["id"], request.get(CLIENT, "")
        running = self._background.get(name, owner)
        found = self._store.get(name, owner) if running is None else running.as_stored()
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


def _starting_after(request: web.Request) -> int:
    """Return the sequence number of the last event that the client has; -1 if none."""
    text = request.query.get("starting_after", "")
    if not text:
        return -1
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(CTX_TOKENS_MAX)) + 2):
        raise InvalidRequestError.of_field("starting_after", "must be the sequence number of an event")
    return int(text)


def _page_size(request: web.Request) -> int:
    text = request.query.get("limit", str(PAGE_ITEMS))
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:4]) <= PAGE_ITEMS_MAX):
        raise InvalidRequestError.of_field("limit", f"must be a number from 1 to {PAGE_ITEMS_MAX}")
    return int(text)
