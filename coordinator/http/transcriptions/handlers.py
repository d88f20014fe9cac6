"""The routes of /v1/audio/transcriptions."""

from __future__ import annotations

import secrets

import msgspec
from aiohttp import web

from relayline.coordinator.http.handlers import Handlers
from relayline.coordinator.http.replies.reply import run
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
        job, repeated = await self._asked("transcriptions", request, f"transcription-{secrets.token_hex(12)}", "file")
        options = msgspec.msgpack.decode(repeated, type=AnswerOptions)
        response = await run(request, service, job, TranscriptionDialect(options.response_format))
        if options.response_format == "text" and not job.plan.stream:
            response.content_type, response.charset = "text/plain", "utf-8"
        return response
