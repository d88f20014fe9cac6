"""The routes of /v1/audio/transcriptions."""

from __future__ import annotations

import secrets
import time

import msgspec
from aiohttp import web

from relayline.coordinator.http.handlers import Handlers
from relayline.coordinator.http.replies.dialects import Header
from relayline.coordinator.http.replies.reply import run
from relayline.coordinator.http.requests.chat_form import ChatForm
from relayline.coordinator.http.transcriptions.asking import AnswerOptions
from relayline.coordinator.http.transcriptions.dialect import TranscriptionDialect
from relayline.wire.common.errors import NotServedError


class TranscriptionHandlers(Handlers):
    """The handlers of /v1/audio/transcriptions in one application."""

    async def create(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/audio/transcriptions, and llama-server's /audio/transcriptions."""
        service = self._service
        if not service.takes.audio:
            text = "this model takes no audio; transcriptions need a projector that does, see --mmproj"
            raise NotServedError(text)
        self._check_taken(request)
        prepared = await service.read_in("transcriptions", request, await request.read())
        plan = await service.shaped(prepared, request)
        form = ChatForm(service.conversation, plan.offered, plan.splits_reasoning, prepared.is_thinking)
        header = Header(
            f"transcription-{secrets.token_hex(12)}", int(time.time()), prepared.model, service.fingerprint, True, False
        )
        job = await self._job(request, prepared, plan, header, "file", form)
        options = msgspec.msgpack.decode(prepared.answer_options, type=AnswerOptions)
        response = await run(request, service, job, TranscriptionDialect(options.response_format))
        if options.response_format == "text" and not plan.stream:
            response.content_type, response.charset = "text/plain", "utf-8"
        return response
