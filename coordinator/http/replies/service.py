"""The parts of the coordinator that a generating request uses: the model's, and workers for its body."""

from __future__ import annotations

import dataclasses
import secrets
import time
from typing import Literal

import msgspec
from aiohttp import web

from relayline.coordinator.answers.template import Conversation
from relayline.coordinator.http.edge.clients import client_of
from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.replies.choice import Speller
from relayline.coordinator.http.replies.media import Media
from relayline.coordinator.http.replies.observe import note_grammar, noted_media, wants_content
from relayline.coordinator.http.requests.plan import Plan
from relayline.coordinator.http.workers.body_pool import BodyPool, find_style
from relayline.coordinator.http.workers.prepared import Asked, Prepared, PromptRoute, setting_of, unpacked
from relayline.coordinator.http.workers.preparing import as_sent
from relayline.coordinator.media.encoder import Encoder
from relayline.coordinator.media.parts import TEXT_ALONE, Takes
from relayline.coordinator.observe.observer import Observer
from relayline.coordinator.sessions.generation import Generator
from relayline.coordinator.text.chat import ChatTemplate
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.bounds import CTX_TOKENS_MAX
from relayline.wire.common.errors import InvalidRequestError, NotServedError
from relayline.wire.common.versions import version_of

_READING = ("embeddings", "rerank", "score", "counted")  # routes that write no text


@dataclasses.dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of an application, as its clients know it."""

    model_id: str
    """Its name."""
    created: int
    """When it came up, unix seconds."""
    tokenizer: Tokenizer
    chat: ChatTemplate
    encoder: Encoder | None = None
    """Encodes images and audio, and has been started; None: chats are text alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class Service:
    """The parts that handlers share; one per application."""

    generator: Generator
    tokenizer: Tokenizer
    speller: Speller
    conversation: Conversation
    model_id: str
    created: int  # unix seconds when the model came up
    fingerprint: str  # what computes the answers, as far as their arithmetic goes
    limits: HttpLimits
    observer: Observer
    pool: BodyPool
    media: Media | None = None  # of a model with a projector
    template_fault: str = ""  # why the chat template cannot be used, or empty

    @property
    def takes(self) -> Takes:
        """What chats may hold besides text."""
        return TEXT_ALONE if self.media is None else self.media.takes

    def _check_writes(self, route: str) -> None:
        """Raise NotServedError where a reranker is asked to write."""
        if self.tokenizer.n_labels and route not in _READING:
            raise NotServedError("this model ranks documents and writes no text; send a query to /v1/rerank")

    async def _with_media(self, request: web.Request, prepared: Prepared) -> Prepared:
        """Put its media into the prompt of a chat. Raises InvalidRequestError, OverloadedError, InternalError."""
        if self.media is None or not prepared.media:
            return prepared
        if not self.generator.ctx_tokens:
            self.generator.check_ready()  # encoding would be for nothing
        tokens, ctx_tokens = unpacked(prepared.prompts[0]), self.generator.ctx_tokens or CTX_TOKENS_MAX
        with noted_media(self.observer, request) as record:
            filled = await self.media.fill(client_of(request), tokens, prepared.media, ctx_tokens, record)
        prepared.prompts, prepared.media = [filled.tokens.tobytes()], []
        prepared.rows = filled.images
        return prepared

    async def n_counted(self, request: web.Request, prepared: Prepared) -> int:
        """Return how many tokens a prompt has that is only counted: its images and audio are not encoded."""
        n_tokens = prepared.n_tokens
        if self.media is not None and prepared.media:
            n_tokens += await self.media.count(client_of(request), prepared.media) - len(prepared.media)
        return n_tokens

    async def prepared(
        self,
        route: PromptRoute,
        request: web.Request,
        raw: bytes | None = None,
        n_context: int = 0,
        *,
        is_counted: bool = False,
        seed: int | None = None,
    ) -> Prepared:
        """Return a request's body after reading, checking and tokenising by a worker. Raises the body's error.

        `raw`: the body, where it has been read; its first `n_context` bytes are the context that it refers to. The
        media of one that `is_counted` are left as they are. `seed`: if the body has none; else any.
        """
        self._check_writes(route)
        raw = await request.read() if raw is None else raw
        is_counted |= route == "counted"
        content = wants_content(self.observer, request)
        # A text that is only counted may be longer than any stream.
        ctx_tokens = 0 if route == "counted" else self.generator.ctx_tokens
        asked = Asked(route, ctx_tokens, random_seed() if seed is None else seed, content, n_context)
        prepared = msgspec.msgpack.decode(await self.pool.ask(client_of(request), asked, raw), type=Prepared)
        try:
            return prepared if is_counted else await self._with_media(request, prepared)
        except InvalidRequestError as error:
            raise as_sent(route, error) from None

    async def answered(self, route: Literal["tokenize", "detokenize", "template"], request: web.Request) -> bytes:
        """Return a worker's answer to a body. Raises the body's error."""
        raw = await request.read()
        return await self.pool.ask(client_of(request), Asked(route, self.generator.ctx_tokens), raw)

    async def shaped(self, prepared: Prepared, request: web.Request) -> Plan:
        """Return the plan with the grammar that its shape and its tools ask for.

        Raises InvalidRequestError if there is none.
        """
        plan = prepared.plan
        if not prepared.grammar_task:
            return plan
        start_ns = time.monotonic_ns()
        grammar = (await self.pool.ask(client_of(request), Asked("grammar"), prepared.grammar_task)).decode()
        note_grammar(request, start_ns, time.monotonic_ns())
        return dataclasses.replace(plan, sampling=dataclasses.replace(plan.sampling, grammar=grammar))


def random_seed() -> int:
    """Return a seed for a request that brought none (u64)."""
    return secrets.randbits(64)


def make_service(generator: Generator, model: ServedModel, limits: HttpLimits, observer: Observer) -> Service:
    """Return the parts that the handlers of one application share."""
    tokenizer, encoder = model.tokenizer, model.encoder
    setting = setting_of(model.model_id, limits, model.chat, TEXT_ALONE if encoder is None else encoder.takes)
    style = setting.style = find_style(setting, tokenizer.path)
    return Service(
        generator=generator,
        tokenizer=tokenizer,
        speller=Speller(tokenizer),
        conversation=Conversation(model.chat, tokenizer, style.tool_style()),
        model_id=model.model_id,
        created=model.created,
        fingerprint=f"relayline-{version_of()}",
        limits=limits,
        observer=observer,
        pool=BodyPool(setting, tokenizer),
        media=Media(encoder, limits.media_hosts) if encoder is not None else None,
        template_fault=style.fault,
    )
