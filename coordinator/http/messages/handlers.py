"""The routes of /v1/messages."""

from __future__ import annotations

import secrets

from aiohttp import web

from relayline.coordinator.http.edge.middleware import json_response, request_id
from relayline.coordinator.http.handlers import Handlers
from relayline.coordinator.http.messages.dialect import MessagesDialect
from relayline.coordinator.http.replies.reply import run


class MessageHandlers(Handlers):
    """The handlers of /v1/messages in one application."""

    async def create(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages."""
        job, _ = await self._asked("messages", request, f"msg_{secrets.token_hex(12)}", "messages")
        dialect = MessagesDialect(job.header, job.n_prompt_tokens, request_id(request))
        return await run(request, self._service, job, dialect)

    async def count(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages/count_tokens."""
        self._check_taken(request)
        prepared = await self._service.prepared("counted", request)
        return json_response(b'{"input_tokens":%d}' % await self._service.n_counted(request, prepared))
