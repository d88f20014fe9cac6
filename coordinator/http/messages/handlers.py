"""The routes of /v1/messages."""

from __future__ import annotations

import secrets
import time

from aiohttp import web

from relayline.coordinator.http.edge.middleware import json_response, request_id
from relayline.coordinator.http.handlers import Handlers
from relayline.coordinator.http.messages.dialect import MessagesDialect
from relayline.coordinator.http.replies.dialects import Header
from relayline.coordinator.http.replies.reply import run
from relayline.coordinator.http.requests.chat_form import ChatForm


class MessageHandlers(Handlers):
    """The handlers of /v1/messages in one application."""

    async def create(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages."""
        service = self._service
        self._check_taken(request)
        prepared = await service.read_in("messages", request, await request.read())
        plan = await service.shaped(prepared, request)
        name = f"msg_{secrets.token_hex(12)}"
        header = Header(name, int(time.time()), prepared.model, service.fingerprint, True, False)
        form = ChatForm(service.conversation, plan.offered, plan.splits_reasoning, prepared.is_thinking)
        job = await self._job(request, prepared, plan, header, "messages", form)
        return await run(request, service, job, MessagesDialect(header, job.n_prompt_tokens, request_id(request)))

    async def count(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages/count_tokens."""
        self._check_taken(request)
        prepared = await self._service.read_in("counted", request, await request.read())
        return json_response(b'{"input_tokens":%d}' % await self._service.n_counted(request, prepared))
