"""The routes that make responses: POST /v1/responses, and the count of what one would read."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Sequence

import msgspec
from aiohttp import web

from relayline.coordinator.http.conversations.keeper import Conversations
from relayline.coordinator.http.conversations.store import Turn
from relayline.coordinator.http.edge.clients import CLIENT
from relayline.coordinator.http.edge.middleware import json_response
from relayline.coordinator.http.handlers import Handlers
from relayline.coordinator.http.replies.reply import run
from relayline.coordinator.http.replies.service import Service
from relayline.coordinator.http.responses.asking import AnswerOptions
from relayline.coordinator.http.responses.background import Background
from relayline.coordinator.http.responses.context import Contexts
from relayline.coordinator.http.responses.dialect import Item, ResponsesDialect, call_ids_of
from relayline.coordinator.http.responses.items import new_id
from relayline.coordinator.http.responses.orders import Sent
from relayline.coordinator.http.responses.promising import promised_job
from relayline.coordinator.http.responses.running import kept_output
from relayline.coordinator.http.responses.store import ResponseStore, Stored
from relayline.coordinator.http.responses.waiting import AGAIN


class MakingHandlers(Handlers):
    """Their handlers in one application."""

    def __init__(
        self, service: Service, store: ResponseStore, background: Background, conversations: Conversations
    ) -> None:
        super().__init__(service)
        self._store, self._background, self._conversations = store, background, conversations
        self._contexts = Contexts(service, store, background, conversations.store)

    async def create(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses."""
        self._check_taken(request)
        service, again = self._service, request.get(AGAIN)
        with contextlib.ExitStack() as turns:
            sent, turn = await self._sent(request, turns)
            prepared = await service.prepared("responses", request, sent.raw, sent.n_context, seed=sent.seed)
            options = msgspec.msgpack.decode(prepared.answer_options, type=AnswerOptions)
            promised = sent if options.background else None
            del sent  # a long body
            plan = await service.shaped(prepared, request)
            id, created = (new_id("resp"), int(time.time())) if again is None else (again.id, again.order.created)
            job = await self._job(request, prepared, plan, id, created, "input", call_ids_of(id))
            put = functools.partial(self._keep, asyncio.get_running_loop(), id, request.get(CLIENT, ""), options)
            keep = put if options.store and not options.background else _forget
            dialect = ResponsesDialect(job.header, service.speller, plan, options, lambda: int(time.time()), keep)
            if promised is not None:
                running = await promised_job(self._background, service, request, job, dialect, options, promised, turn)
                del promised
                return await self._background.begin(request, running)
            end = None if turn is None else functools.partial(self._end, turn, options, dialect)
            return await run(request, service, job, dialect, before_end=end)

    async def _sent(self, request: web.Request, turns: contextlib.ExitStack) -> tuple[Sent, Turn | None]:
        """Return a body with its stored context, and its turn in a conversation, which ends with `turns`."""
        again = request.get(AGAIN)
        if again is not None and again.sent is not None:
            return again.sent, again.turn
        raw, owner = await request.read(), request.get(CLIENT, "")
        wanted = await self._contexts.references(request, raw)
        id, store = wanted.conversation_id, self._conversations.store
        turn = None if id is None else turns.enter_context(store.begin(id, owner))
        return await self._contexts.sent(raw, wanted, owner), turn

    async def _end(self, turn: Turn, options: AnswerOptions, dialect: ResponsesDialect) -> None:
        """Add a whole answer and its input to their conversation."""
        output = await asyncio.to_thread(kept_output, dialect.items)
        await self._conversations.add(turn, [*options.input_items, *output])
        turn.leave()  # before the client is told, which may send the next one at once

    async def count(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses/input_tokens: how many tokens the prompt would have."""
        raw = await request.read()
        wanted = await self._contexts.references(request, raw)
        sent = await self._contexts.sent(raw, wanted, request.get(CLIENT, ""))
        prepared = await self._service.prepared("responses", request, sent.raw, sent.n_context, is_counted=True)
        n_tokens = await self._service.n_counted(request, prepared)
        return json_response(b'{"object":"response.input_tokens","input_tokens":%d}' % n_tokens)

    def _keep(
        self,
        loop: asyncio.AbstractEventLoop,
        id: str,
        owner: str,
        options: AnswerOptions,
        body: bytes,
        output: Sequence[Item],
    ) -> None:
        stored = Stored(id, owner, body, options.input_items, kept_output(output), options.previous_response_id)
        loop.call_soon_threadsafe(self._store.put, stored)  # a long answer is written by a thread


def _forget(_body: bytes, _output: Sequence[Item]) -> None:
    """Do not store a response."""
