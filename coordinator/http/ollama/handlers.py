"""The routes of Ollama's own API."""

from __future__ import annotations

import asyncio
import datetime
import secrets
import time
from collections.abc import Sequence
from typing import Any, Literal

from aiohttp import web

from relayline.coordinator.http.edge.body import SMALL_BYTES_MAX, read_small
from relayline.coordinator.http.edge.middleware import json_response, response_of
from relayline.coordinator.http.edge.steering import check_steers
from relayline.coordinator.http.embeddings.handlers import EmbeddingHandlers
from relayline.coordinator.http.embeddings.vectors import ollama_reply, ollama_vector
from relayline.coordinator.http.ollama import models
from relayline.coordinator.http.ollama.asking import OllamaPullBody, OllamaShowBody, is_only_loading, unloads
from relayline.coordinator.http.ollama.dialect import CONTENT_TYPE, OllamaDialect
from relayline.coordinator.http.replies.reply import run
from relayline.coordinator.http.replies.service import Service
from relayline.coordinator.http.requests import validation
from relayline.coordinator.http.requests.bodies import decode_body
from relayline.coordinator.http.sleep_handlers import SleepControl
from relayline.wire.common.errors import NotServedError
from relayline.wire.common.phase import Phase

Route = Literal["ollama_chat", "ollama_generate"]


class OllamaHandlers(EmbeddingHandlers):
    """The handlers of one application."""

    _size_bytes = 0  # of the model's parts, once it is known

    def __init__(self, service: Service, sleep: SleepControl | None = None) -> None:
        """`sleep` unloads the model and loads it again."""
        super().__init__(service)
        self._sleep = sleep

    async def api_version(self, _request: web.Request) -> web.StreamResponse:
        """GET /api/version."""
        return response_of({"version": models.API_VERSION})

    async def tags(self, request: web.Request) -> web.StreamResponse:
        """GET /api/tags: the served models."""
        return response_of({"models": await self._entries(self._names(request))})

    async def running(self, request: web.Request) -> web.StreamResponse:
        """GET /api/ps: the served models, which are all loaded unless the pipeline sleeps."""
        generator = self._service.generator
        loaded = [] if generator.phase is Phase.SLEEPING else await self._entries(self._names(request))
        found = models.running(loaded, generator.ctx_tokens)
        return response_of({"models": found})

    async def show(self, request: web.Request) -> web.StreamResponse:
        """POST /api/show."""
        body = decode_body(await read_small(request), OllamaShowBody)
        name = self._checked(request, body.model or body.name)
        service = self._service
        (entry,) = await self._entries([name])
        template = service.conversation.template_text or ""
        metadata, ctx_tokens = service.tokenizer.metadata, service.generator.ctx_tokens
        recommended = service.limits.recommended
        return response_of(models.shown(entry, metadata, self._capabilities(), template, ctx_tokens, recommended))

    async def pull(self, request: web.Request) -> web.StreamResponse:
        """POST /api/pull: a model that is served is there already; others are not loaded."""
        body = decode_body(await read_small(request), OllamaPullBody)
        self._checked(request, body.model or body.name)
        reply = json_response(b'{"status":"success"}\n')
        if body.stream is not False:
            reply.content_type = CONTENT_TYPE
        return reply

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /api/chat."""
        return await self._generated("ollama_chat", request)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /api/generate."""
        return await self._generated("ollama_generate", request)

    async def embed(self, request: web.Request) -> web.StreamResponse:
        """POST /api/embed."""
        begun_ns = time.monotonic_ns()
        prepared, rows, options = await self._rows(request)
        took_ns = time.monotonic_ns() - begun_ns
        return json_response(
            await asyncio.to_thread(ollama_reply, prepared.model, rows, options, prepared.n_tokens, took_ns)
        )

    async def embedding(self, request: web.Request) -> web.StreamResponse:
        """POST /api/embeddings: the older form, of one text."""
        _, rows, options = await self._rows(request)
        return json_response(await asyncio.to_thread(ollama_vector, rows[0], options))

    async def _generated(self, route: Route, request: web.Request) -> web.StreamResponse:
        service = self._service
        self._check_taken(request)
        raw = await request.read()
        if len(raw) <= SMALL_BYTES_MAX and is_only_loading(raw):
            return await self._loaded(request, raw)
        is_chat = route == "ollama_chat"
        param = "messages" if is_chat else "prompt"
        job, _ = await self._asked(route, request, f"chatcmpl-{secrets.token_hex(16)}", param, raw)
        dialect = OllamaDialect(job.header, service.speller, job.plan.n_logprobs, is_chat=is_chat, clock=_now)
        return await run(request, service, job, dialect, dialect.form)

    async def _loaded(self, request: web.Request, raw: bytes) -> web.StreamResponse:
        """Answer a request that asks for no answer: it loads the model, or unloads it once no request runs.

        Who may not steer may load, as any question does, and not unload. Raises HttpRefusal, InvalidRequestError,
        NotReadyError.
        """
        body = decode_body(raw, OllamaShowBody)
        name = self._checked(request, body.model)
        generator = self._service.generator
        reason: models.Reason = "load"
        if unloads(body.keep_alive):
            check_steers(request)
            if self._sleep is None:
                raise NotServedError("nothing is unloaded here")
            reason = "unload"
            await self._sleep.ask()
        elif self._sleep is not None and generator.phase.rests:
            await self._sleep.wake()
        else:
            generator.check_ready()
        return json_response(models.without_answer(name, request.path, reason, _now()))

    def _checked(self, request: web.Request, sent: str | None) -> str:
        """Return the served name that a client means. Raises ModelNotFoundError."""
        name = validation.check_model(sent, self._service.model_id, self._service.limits)
        self._check_may_use(request, name)
        return name

    async def _entries(self, names: Sequence[str]) -> list[dict[str, Any]]:
        service = self._service
        if not self._size_bytes:
            stages = (await service.generator.describe(with_recent=False)).get("stages")  # it asks all stages
            if isinstance(stages, list):
                self._size_bytes = sum(stage.get("artifact_bytes", 0) for stage in stages)
        metadata = service.tokenizer.metadata
        return await asyncio.to_thread(models.listed, names, service.created, metadata, self._size_bytes)

    def _capabilities(self) -> list[str]:
        service = self._service
        conversation = service.conversation
        has = {
            "completion": True,
            "tools": conversation.template_text is not None,
            "thinking": conversation.thinking is not None,
            "insert": service.tokenizer.fill_in is not None,
            "vision": service.takes.images,
            "audio": service.takes.audio,
        }
        writes = not service.tokenizer.n_labels  # a reranker does not
        return [name for name, is_there in has.items() if is_there and writes]


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
