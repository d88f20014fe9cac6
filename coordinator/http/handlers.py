"""The routes. Each reads a body, has it checked, and answers; the work is done elsewhere."""

from __future__ import annotations

import datetime
import secrets
import time
from collections.abc import Callable

import msgspec
from aiohttp import hdrs, web

from relayline.coordinator.answers.reader import random_call_id
from relayline.coordinator.http.edge.clients import check_may_use, tenant_of
from relayline.coordinator.http.edge.middleware import json_response, response_of
from relayline.coordinator.http.edge.record import RECORD
from relayline.coordinator.http.llama.settings import default_settings
from relayline.coordinator.http.replies import shapes
from relayline.coordinator.http.replies.dialect import Header
from relayline.coordinator.http.replies.job import Job, make_job, unpacked_prompts
from relayline.coordinator.http.replies.observe import note_input, note_plan, note_prompts
from relayline.coordinator.http.replies.openai_dialects import ChatDialect, CompletionDialect
from relayline.coordinator.http.replies.reply import run
from relayline.coordinator.http.replies.service import Service
from relayline.coordinator.http.requests import validation
from relayline.coordinator.http.requests.chat_form import ChatForm
from relayline.coordinator.http.requests.plan import Plan
from relayline.coordinator.http.workers.prepared import Prepared, PromptRoute, unpacked
from relayline.coordinator.observe import metrics
from relayline.coordinator.observe.targets import targets
from relayline.wire.common.phase import Phase
from relayline.wire.common.versions import version_of


class Handlers:
    """The handlers of one application."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, _request: web.Request) -> web.StreamResponse:
        """GET /health: 200 when a request would start, or wake the pipeline; else 503 with the phase that says why."""
        phase = self._service.generator.phase
        if phase is Phase.READY:
            return json_response(b'{"status":"ok"}')
        if phase.rests:
            return json_response(b'{"status":"%s"}' % phase.value.encode())
        return json_response(b'{"status":"%s"}' % phase.value.encode(), 503, {"Retry-After": "1"})

    async def live(self, _request: web.Request) -> web.StreamResponse:
        """GET /live: 200 while the process answers at all; for probes that restart a hung one."""
        return json_response(b'{"status":"ok"}')

    async def version(self, _request: web.Request) -> web.StreamResponse:
        """GET /version, as vLLM has it."""
        return response_of({"version": version_of()})

    async def models(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models."""
        names = self._names(request)
        ends = (names[0], names[-1]) if names else ("", "")
        found = shapes.ModelList([self._model(name) for name in names], first_id=ends[0], last_id=ends[1])
        return response_of(found)

    async def model(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models/{id}; ids may contain slashes."""
        name = validation.check_model(request.match_info["id"], self._service.model_id, self._service.limits)
        self._check_may_use(request, name)
        return response_of(self._model(name))

    async def pipeline(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/pipeline: topology and live counters; `?since_ns=N` restricts overlap to later steps."""
        text = request.query.get("since_ns")
        since_ns = None if text is None else validation.nanoseconds(text, "since_ns")
        return response_of(await self._service.generator.describe(since_ns))

    async def usage(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/usage: requests and tokens of each API key since the start, and what runs and waits now."""
        service = self._service
        data = service.observer.usage.figures(service.generator.tenants())
        found = {"object": "list", "key": tenant_of(request).name or None, "since": service.created, "data": data}
        return response_of(found)

    async def targets(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/pipeline/targets: this process and its stages, as Prometheus' HTTP service discovery reads them."""
        described = await self._service.generator.describe(with_recent=False)
        found = targets(described, request.host, request.scheme)
        return response_of(found)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """GET /metrics, for Prometheus; OpenMetrics and gzip for clients that accept them."""
        observer = self._service.observer
        telemetry = {
            "exported_spans": observer.telemetry.exported_spans,
            "dropped_spans": observer.telemetry.dropped_spans,
            "level": int(observer.telemetry.level),
        }
        described = await self._service.generator.describe() | {"telemetry": telemetry}
        accept = request.headers.get(hdrs.ACCEPT, "")
        text, content_type = metrics.render(described, observer.metrics.registry, accept)
        headers = {hdrs.CONTENT_TYPE: content_type, hdrs.VARY: f"{hdrs.ACCEPT}, {hdrs.ACCEPT_ENCODING}"}
        response = web.Response(body=text, headers=headers)
        if "gzip" in request.headers.get(hdrs.ACCEPT_ENCODING, ""):
            response.enable_compression(web.ContentCoding.gzip)
        return response

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        service = self._service
        job, _ = await self._asked("completions", request, f"cmpl-{secrets.token_hex(16)}", "prompt")
        return await run(request, service, job, CompletionDialect(job.header, service.speller, job.plan.n_logprobs))

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        service = self._service
        job, _ = await self._asked("chat", request, f"chatcmpl-{secrets.token_hex(16)}", "messages")
        n_top, has_tools = job.plan.n_logprobs, job.plan.offered is not None
        return await run(request, service, job, ChatDialect(job.header, service.speller, n_top, has_tools=has_tools))

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        """POST /tokenize: text to token ids, or to ids with their pieces."""
        return json_response(await self._service.answered("tokenize", request))

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        """POST /detokenize: token ids to text, special tokens by name."""
        return json_response(await self._service.answered("detokenize", request))

    async def apply_template(self, request: web.Request) -> web.StreamResponse:
        """POST /apply-template: the prompt that a chat becomes, as text; as llama-server has it."""
        return json_response(await self._service.answered("template", request))

    async def tokenizer_info(self, _request: web.Request) -> web.StreamResponse:
        """GET /tokenizer_info: special tokens and the chat template, as vLLM has it."""
        tokenizer = self._service.tokenizer
        fields = {
            "tokenizer_class": "llama.cpp",
            "bos_token": tokenizer.bos_text or None,
            "eos_token": tokenizer.eos_text or None,
            "chat_template": self._service.conversation.template_text,
            "model_max_length": self._service.generator.ctx_tokens or None,
        }
        return response_of(fields)

    async def props(self, _request: web.Request) -> web.StreamResponse:
        """GET /props: the facts of the served model, as llama-server gives them."""
        service = self._service
        takes = service.takes
        defaults = default_settings(service.limits.recommended)
        fields = {
            "default_generation_settings": {"params": defaults, "n_ctx": service.generator.ctx_tokens},
            "total_slots": len(service.generator.slots()),
            "endpoint_slots": True,
            "endpoint_props": True,
            "endpoint_metrics": True,
            "model_alias": service.model_id,
            "chat_template": service.conversation.template_text or "",
            "bos_token": service.tokenizer.bos_text,
            "eos_token": service.tokenizer.eos_text,
            "modalities": {"vision": takes.images, "audio": takes.audio, "video": takes.video},
            "build_info": service.fingerprint,
            "is_sleeping": service.generator.phase is Phase.SLEEPING,
        }
        return response_of(fields)

    async def _asked(
        self, route: PromptRoute, request: web.Request, id: str, param: str, raw: bytes | None = None
    ) -> tuple[Job, bytes]:
        """Return a request's job, and msgpack of the fields of its body that the answer repeats. Raises its errors.

        `id`: of the answer. `param`: the field that holds the prompt. `raw`: the body, where it has been read.
        """
        if raw is None:
            self._check_taken(request)
        prepared = await self._service.prepared(route, request, raw)
        plan = await self._service.shaped(prepared, request)
        return await self._job(request, prepared, plan, id, int(time.time()), param), prepared.answer_options

    async def _job(
        self,
        request: web.Request,
        prepared: Prepared,
        plan: Plan,
        id: str,
        created: int,
        param: str,
        new_call_id: Callable[[], str] = random_call_id,
    ) -> Job:
        """Note a prepared request and lay out its choices. `created`: unix seconds. Raises ModelNotFoundError."""
        service, form = self._service, None
        self._check_may_use(request, prepared.model)
        header = Header(
            id=id,
            created=created,
            model=prepared.model,
            fingerprint=service.fingerprint,
            return_token_ids=plan.return_token_ids,
            n_prompt_logprobs=plan.n_prompt_logprobs,
            service_tier=plan.service_tier or msgspec.UNSET,
        )
        if not prepared.is_plain:
            splits, is_thinking = plan.splits_reasoning, prepared.is_thinking
            form = ChatForm(service.conversation, plan.offered, splits, is_thinking, new_call_id)
        note_plan(service.observer, request, plan, prepared.model, id)
        prompts = await unpacked_prompts(prepared)
        prediction = unpacked(prepared.prediction)
        note_prompts(request, prepared.start_ns, prepared.end_ns, [len(prompt.tokens) for prompt in prompts])
        if prepared.input_json:
            note_input(request, prepared.input_json)
        return make_job(service, header, plan, prompts, param, request[RECORD], form, prediction)

    def _check_taken(self, request: web.Request) -> None:
        """Refuse before a long body is read what would be refused after. Raises NotReadyError, OverloadedError."""
        n_bytes = request.content_length
        is_long = request.can_read_body if n_bytes is None else n_bytes > self._service.limits.body_free_bytes
        if is_long:
            self._service.generator.check_ready()
            self._service.generator.check_room(tenant_of(request))

    def _check_may_use(self, request: web.Request, name: str) -> None:
        """Raise ModelNotFoundError unless the request's key may use the model that this name means."""
        is_other = name in self._service.limits.adapters
        check_may_use(tenant_of(request), name, "" if is_other else self._service.model_id)

    def _names(self, request: web.Request) -> list[str]:
        """Return the served names that the request's key may use."""
        service, may_use = self._service, tenant_of(request).models
        names = dict.fromkeys((service.model_id, *service.limits.model_aliases, *service.limits.adapters))
        return [name for name in names if not may_use or name in may_use]

    def _model(self, name: str) -> shapes.Model:
        service = self._service
        created_at = datetime.datetime.fromtimestamp(service.created, datetime.UTC).isoformat()
        model = shapes.Model(name, service.created, root=service.model_id, display_name=name, created_at=created_at)
        if name in service.limits.adapters:
            model.root, model.parent = name, service.model_id
        if ctx_tokens := service.generator.ctx_tokens:
            model.max_model_len = model.max_input_tokens = model.max_tokens = ctx_tokens
            model.meta = shapes.ModelMeta(n_ctx=ctx_tokens, n_vocab=service.tokenizer.n_vocab)
        if service.limits.recommended:
            model.default_parameters = dict(service.limits.recommended)
        takes = service.takes
        if any(takes):
            kinds = (("image", takes.images), ("audio", takes.audio), ("video", takes.video))
            more = [name for name, is_taken in kinds if is_taken]
            model.architecture = shapes.ModelArchitecture(("text", *more))
        return model
