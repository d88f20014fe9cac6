"""The routes of llama-server's own API."""

from __future__ import annotations

import secrets
from typing import Literal

import msgspec
from aiohttp import web

from relayline.coordinator.http.edge.clients import tenant_of
from relayline.coordinator.http.edge.middleware import response_of
from relayline.coordinator.http.handlers import Handlers
from relayline.coordinator.http.llama.asking import AnswerOptions
from relayline.coordinator.http.llama.dialect import LlamaDialect
from relayline.coordinator.http.replies.reply import run
from relayline.coordinator.http.requests.lora import listed
from relayline.wire.common.errors import OverloadedError


class LlamaHandlers(Handlers):
    """The handlers of one application."""

    async def completion(self, request: web.Request) -> web.StreamResponse:
        """POST /completion: a completion in llama-server's own form, with its defaults."""
        return await self._answer("llama", request)

    async def infill(self, request: web.Request) -> web.StreamResponse:
        """POST /infill: the text between two texts, for models whose vocabulary has tokens for that."""
        return await self._answer("infill", request)

    async def lora_adapters(self, request: web.Request) -> web.StreamResponse:
        """GET /lora-adapters: the LoRA adapters that the client's key may use, in the order of their ids."""
        return response_of(listed(self._service.limits.lora, tenant_of(request).models))

    async def slots(self, request: web.Request) -> web.StreamResponse:
        """GET /slots: what each lane does; 503 with `?fail_on_no_slot=1` where none is free."""
        slots, n_ctx = self._service.generator.slots(), self._service.generator.ctx_tokens
        if request.query.get("fail_on_no_slot") and all(slot.is_busy for slot in slots):
            raise OverloadedError("no lane is free")
        found = [
            {
                "id": slot.lane,
                "n_ctx": n_ctx,
                "speculative": slot.may_draft,
                "is_processing": slot.is_busy,
                "id_task": slot.task,
                "n_prompt_tokens": slot.n_prompt,
                "n_prompt_tokens_processed": slot.n_read,
                "n_prompt_tokens_cache": slot.n_cached,
                "state": slot.state,
                "next_token": [
                    {"has_next_token": slot.is_busy, "n_remain": slot.n_left, "n_decoded": slot.n_generated}
                ],
            }
            for slot in slots
        ]
        return response_of(found)

    async def _answer(self, route: Literal["llama", "infill"], request: web.Request) -> web.StreamResponse:
        service = self._service
        job, repeated = await self._asked(route, request, f"cmpl-{secrets.token_hex(16)}", "prompt")
        options = msgspec.msgpack.decode(repeated, type=AnswerOptions)
        n_prompts = [len(prompt.tokens) for prompt in job.prompts]
        dialect = LlamaDialect(job.header, service.speller, job.plan.n_logprobs, options, n_prompts)
        return await run(request, service, job, dialect.of_choices(len(job.requests)))
