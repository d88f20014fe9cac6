"""The routes. Each reads a body, has it checked, and answers; the work is done elsewhere."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec
from aiohttp import web

from relayline.coordinator.http import shapes, validation
from relayline.coordinator.http.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, decode_body
from relayline.coordinator.http.chat_form import form_of
from relayline.coordinator.http.dialects import ChatDialect, CompletionDialect, Header
from relayline.coordinator.http.middleware import json_response
from relayline.coordinator.http.observe import RECORD, note_input, note_plan, note_prompts, wants_content
from relayline.coordinator.http.reply import run
from relayline.coordinator.http.service import Prompt, Service, make_job, random_seed
from relayline.coordinator.observe import metrics
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import InvalidRequestError
from relayline.wire.common.phase import Phase

TOKENS_PER_PART = 4_096  # of a long answer to /tokenize; about a millisecond of JSON


class Handlers:
    """The handlers of one application."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, _request: web.Request) -> web.StreamResponse:
        """GET /health: 200 when a request would start at once, else 503 with the phase that says why."""
        phase = self._service.generator.phase
        if phase is Phase.READY:
            return json_response(b'{"status":"ok"}')
        return json_response(b'{"status":"%s"}' % phase.value.encode(), 503, {"Retry-After": "1"})

    async def live(self, _request: web.Request) -> web.StreamResponse:
        """GET /live: 200 while the process answers at all; for probes that restart what does not."""
        return json_response(b'{"status":"ok"}')

    async def models(self, _request: web.Request) -> web.StreamResponse:
        """GET /v1/models."""
        return json_response(shapes.encode(shapes.ModelList([self._model()])))

    async def model(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models/{id}; ids may contain slashes."""
        validation.check_model(request.match_info["id"], self._service.model_id, self._service.limits)
        return json_response(shapes.encode(self._model()))

    async def pipeline(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/pipeline: topology and live counters; `?since_ns=N` restricts overlap to what came after."""
        text = request.query.get("since_ns")
        since_ns = None if text is None else validation.nanoseconds(text, "since_ns")
        return json_response(msgspec.json.encode(await self._service.generator.describe(since_ns)))

    async def metrics(self, _request: web.Request) -> web.StreamResponse:
        """GET /metrics, for Prometheus."""
        observer = self._service.observer
        telemetry = {
            "exported_spans": observer.telemetry.exported_spans,
            "dropped_spans": observer.telemetry.dropped_spans,
            "level": int(observer.telemetry.level),
        }
        described = await self._service.generator.describe() | {"telemetry": telemetry}
        text = metrics.render(described) + observer.metrics.render()
        return web.Response(body=text, headers={"Content-Type": metrics.CONTENT_TYPE})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        service = self._service
        self._check_taken(request)
        body = decode_body(await request.read(), CompletionBody)
        model = validation.check_model(body.model, service.model_id, service.limits)
        plan = await service.shaped(validation.plan_completion(body, service.limits, random_seed()))
        header = self._header("cmpl", model, plan)
        note_plan(service.observer, request, plan, model, header.id)
        start_ns = time.monotonic_ns()
        sent = validation.split_prompt(body.prompt, plan.n, service.limits)
        prompts = await service.prompts(sent, echo=plan.echo)
        prediction = await service.prediction(plan)
        note_prompts(request, start_ns, [len(prompt.tokens) for prompt in prompts])
        if wants_content(service.observer, request):
            note_input(request, [("user", service.tokenizer.decode(prompt.tokens)) for prompt in prompts])
        job = make_job(service, header, plan, prompts, "prompt", request[RECORD], prediction=prediction)
        return await run(request, service, job, CompletionDialect(header, service.speller, plan.sampling.n_logprobs))

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        service = self._service
        self._check_taken(request)
        body = decode_body(await request.read(), ChatBody)
        model = validation.check_model(body.model, service.model_id, service.limits)
        plan = validation.plan_chat(body, service.limits, random_seed())
        if not service.tokenizer.has_text:
            text = "this model has no tokenizer; send token ids to /v1/completions"
            raise InvalidRequestError(text, param="messages")
        messages = [msgspec.to_builtins(message) for message in body.messages]
        shown = plan.offered.shown if plan.offered else ()
        variables = service.conversation.variables(body.reasoning_effort, body.chat_template_kwargs or {})
        rendered = service.conversation.render(messages, shown, variables)
        form = form_of(plan, service.conversation, rendered)
        plan = await service.shaped(plan, form)
        header = self._header("chatcmpl", model, plan)
        note_plan(service.observer, request, plan, model, header.id)
        start_ns = time.monotonic_ns()
        prompts = [Prompt(tuple(await service.encode_chat(rendered)))]
        prediction = await service.prediction(plan)
        note_prompts(request, start_ns, [len(prompt.tokens) for prompt in prompts])
        if wants_content(service.observer, request):
            note_input(request, [(message["role"], _text(message)) for message in messages])
        job = make_job(service, header, plan, prompts, "messages", request[RECORD], form, prediction)
        return await run(request, service, job, ChatDialect(header, service.speller, plan.sampling.n_logprobs))

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        """POST /tokenize: text to token ids, or to ids with their pieces."""
        raw, tokenizer = await request.read(), self._service.tokenizer
        return json_response(await self._service.aside(len(raw), lambda: _tokenized(raw, tokenizer)))

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        """POST /detokenize: token ids to text, special tokens by name."""
        raw, tokenizer = await request.read(), self._service.tokenizer
        return json_response(await self._service.aside(len(raw), lambda: _detokenized(raw, tokenizer)))

    def _check_taken(self, request: web.Request) -> None:
        """Refuse before a long body is read what would be refused after. Raises NotReadyError, OverloadedError."""
        n_bytes = request.content_length
        is_long = request.can_read_body if n_bytes is None else n_bytes > self._service.limits.body_free_bytes
        if is_long:
            self._service.generator.check_ready()
            self._service.generator.check_room()

    def _model(self) -> shapes.Model:
        return shapes.Model(self._service.model_id, self._service.created)

    def _header(self, prefix: str, model: str, plan: validation.Plan) -> Header:
        return Header(
            id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=model,
            fingerprint=self._service.fingerprint,
            include_usage=plan.include_usage,
            return_token_ids=plan.return_token_ids,
        )


def _text(message: dict[str, Any]) -> str:
    """Return a chat message's text; parts of other kinds have none."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)


def _tokenized(raw: bytes, tokenizer: Tokenizer) -> bytes:
    """Return the answer to a /tokenize body. Put together in parts: encoding one keeps every other thread waiting."""
    body = decode_body(raw, TokenizeBody)
    ids = tokenizer.encode(body.content, add_special=body.add_special, parse_special=body.parse_special)
    parts: list[bytes] = []
    for at in range(0, len(ids), TOKENS_PER_PART):
        part: list[Any] = ids[at : at + TOKENS_PER_PART]
        if body.with_pieces:
            part = [{"id": token, "piece": _piece(tokenizer.piece(token, special=True))} for token in part]
        parts.append(shapes.encode(part)[1:-1])
    return b'{"tokens":[' + b",".join(parts) + b"]}"


def _detokenized(raw: bytes, tokenizer: Tokenizer) -> bytes:
    """Return the answer to a /detokenize body."""
    body = decode_body(raw, DetokenizeBody)
    validation.check_tokens(body.tokens, tokenizer.n_vocab, "tokens")
    return shapes.encode({"content": tokenizer.decode(body.tokens)})


def _piece(raw: bytes) -> str | list[int]:
    """Return a piece as text, or as its bytes when it is only part of a character."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
