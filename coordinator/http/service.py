"""A generating request's link to the rest of the coordinator, and the opening of its streams, all or none."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import ipaddress
import secrets
import time
from collections.abc import Sequence
from importlib import metadata
from typing import Literal

import msgspec
from aiohttp import web

from relayline.coordinator.answers.template import Conversation
from relayline.coordinator.http.body_pool import BodyPool, find_style
from relayline.coordinator.http.chat_form import ChatForm
from relayline.coordinator.http.choice import ChoiceState, Ending, Prompt, Speller
from relayline.coordinator.http.dialects import Header
from relayline.coordinator.http.images import Images
from relayline.coordinator.http.limits import HttpLimits
from relayline.coordinator.http.observe import note_grammar, wants_content
from relayline.coordinator.http.prepared import Asked, Prepared, setting_of, unpacked
from relayline.coordinator.http.preparing import as_sent
from relayline.coordinator.http.validation import Plan, check_tokens, fit_tokens
from relayline.coordinator.images.encoder import Encoder
from relayline.coordinator.observe.observer import Observer
from relayline.coordinator.sessions.generation import GenerationRequest, Generator, TokenStream
from relayline.coordinator.sessions.request_log import RequestRecord
from relayline.coordinator.text.chat import ChatTemplate
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.bounds import CTX_TOKENS_MAX
from relayline.wire.common.errors import InvalidRequestError
from relayline.wire.common.versions import version_of

YIELD_BYTES = 64 * 1024  # of a packed prompt: a fraction of a millisecond
OtherForm = Literal["responses", "messages", "counted", "llama", "infill", "embeddings"]
CLIENT = web.RequestKey("client", str)  # by the key that it has shown


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
    """Encodes images, and has been started; None: chats are text alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class Service:
    """The parts that handlers share; one per application."""

    generator: Generator
    tokenizer: Tokenizer
    speller: Speller
    conversation: Conversation
    model_id: str
    created: int  # unix seconds when the model came up
    fingerprint: str
    limits: HttpLimits
    observer: Observer
    pool: BodyPool
    images: Images | None = None  # of a model with a projector
    template_fault: str = ""  # why the chat template cannot be used, or empty

    async def prepared(self, route: Literal["completions", "chat"], request: web.Request, *, content: bool) -> Prepared:
        """Return a body after reading, checking and tokenising by a worker.

        Raises the body's error. `content`: with its prompts as JSON, for telemetry.
        """
        asked = Asked(route, self.generator.ctx_tokens, random_seed(), content)
        raw = await request.read()
        answer = await self.pool.ask(client_of(request), asked, raw)
        return await self._with_images(request, msgspec.msgpack.decode(answer, type=Prepared))

    async def _with_images(self, request: web.Request, prepared: Prepared) -> Prepared:
        """Put its images into the prompt of a chat. Raises InvalidRequestError, OverloadedError, InternalError."""
        if self.images is None or not prepared.pictures:
            return prepared
        if not self.generator.ctx_tokens:
            self.generator.check_ready()  # encoding would be for nothing
        tokens, ctx_tokens = unpacked(prepared.prompts[0]), self.generator.ctx_tokens or CTX_TOKENS_MAX
        filled = await self.images.fill(client_of(request), tokens, prepared.pictures, ctx_tokens)
        prepared.prompts, prepared.pictures = [filled.tokens.tobytes()], []
        prepared.rows = filled.images
        return prepared

    async def n_counted(self, request: web.Request, prepared: Prepared) -> int:
        """Return how many tokens a prompt has that is only counted: its images are not encoded."""
        n_tokens = prepared.n_tokens
        if self.images is not None and prepared.pictures:
            n_tokens += await self.images.count(client_of(request), prepared.pictures) - len(prepared.pictures)
        return n_tokens

    async def read_in(
        self, route: OtherForm, request: web.Request, raw: bytes, n_context: int = 0, *, is_counted: bool = False
    ) -> Prepared:
        """Return a body of another dialect, as `prepared` does; its first `n_context` bytes are the context that it
        refers to. The images of one that `is_counted` are left as they are.
        """
        is_counted |= route == "counted"
        content = wants_content(self.observer, request)
        # A text that is only counted may be longer than any stream.
        ctx_tokens = 0 if route == "counted" else self.generator.ctx_tokens
        asked = Asked(route, ctx_tokens, random_seed(), content, n_context)
        prepared = msgspec.msgpack.decode(await self.pool.ask(client_of(request), asked, raw), type=Prepared)
        try:
            return prepared if is_counted else await self._with_images(request, prepared)
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


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A checked request, ready to open."""

    header: Header
    plan: Plan
    prompts: tuple[Prompt, ...]
    requests: tuple[GenerationRequest, ...]  # one per choice: every prompt's choices in turn
    record: RequestRecord | None = None
    form: ChatForm | None = None  # of a chat's answers

    @property
    def n_prompt_tokens(self) -> int:
        """Prompt tokens of the request, each prompt counted once."""
        return sum(len(prompt.tokens) for prompt in self.prompts)

    def prompt_of(self, choice: int) -> Prompt:
        """Return the prompt that a choice continues."""
        return self.prompts[choice // self.plan.n]

    def note(self, choice: int, state: ChoiceState) -> None:
        """Tell telemetry how far a choice has come as its client sees it."""
        if self.record is not None and choice < len(self.record.streams):  # in the order in which choices were opened
            self.record.streams[choice].n_tokens = state.n_tokens
            self.record.streams[choice].n_thought = state.n_thought
            self.record.streams[choice].finish_reason = state.finish_reason or ""

    def choice_states(self, service: Service) -> list[ChoiceState]:
        """Return a fresh state for each choice."""
        form, stop_tokens = self.form, frozenset(self.plan.stop_tokens)
        return [
            ChoiceState(
                form.conversation.piece if form else service.tokenizer.piece,
                Ending(self.plan.stops, stop_tokens, self.plan.min_tokens, shows_stop=self.plan.shows_stop),
                wants_logprobs=self.plan.n_logprobs >= 0,
                wants_tokens=self.plan.return_token_ids,
                offset_chars=len(self.prompt_of(index).echo),
                reader=form.new_reader() if form else None,
            )
            for index in range(len(self.requests))
        ]


async def unpacked_prompts(prepared: Prepared) -> list[Prompt]:
    """Return the prompts of a prepared request, without holding up others for long: some have a million tokens."""
    prompts = []
    for at, tokens in enumerate(prepared.prompts):
        if at and len(tokens) > YIELD_BYTES:
            await asyncio.sleep(0)
        echo = prepared.echoes[at] if prepared.echoes else ""
        prompts.append(Prompt(unpacked(tokens), echo, prepared.rows))
    return prompts


def client_of(request: web.Request) -> str:
    """Return who sent a request: the key that it has shown, or its address; of IPv6 the network."""
    return request[CLIENT] if CLIENT in request else _client_at(request.remote or "")


@functools.lru_cache(maxsize=1_024)
def _client_at(remote: str) -> str:
    try:
        address = ipaddress.ip_address(remote)
    except ValueError:  # of a Unix socket
        return remote
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))  # a holder of one address has all of these
    return str(address)


def random_seed() -> int:
    """Return a seed for a request that brought none (u64)."""
    return secrets.randbits(64)


def make_job(
    service: Service,
    header: Header,
    plan: Plan,
    prompts: Sequence[Prompt],
    param: str,
    record: RequestRecord | None,
    form: ChatForm | None,
    prediction: tuple[int, ...],
) -> Job:
    """Check prompts against the context and lay out one generation request per choice.

    Raises InvalidRequestError or ContextLengthError naming `param`, NotReadyError while the context is not known.
    """
    ctx_tokens = service.generator.ctx_tokens
    if not ctx_tokens:  # no stage has been heard yet: nothing would fit, and that is not the request's fault
        service.generator.check_ready()
    n_vocab = service.tokenizer.n_vocab
    check_tokens([token for token, _ in plan.sampling.logit_bias], n_vocab, "logit_bias")
    check_tokens(plan.sampling.allowed_tokens, n_vocab, "allowed_token_ids")
    check_tokens(plan.stop_tokens, n_vocab, "stop_token_ids")
    requests: list[GenerationRequest] = []
    for prompt in prompts:
        max_tokens = fit_tokens(len(prompt.tokens), plan, ctx_tokens, param, is_strict=service.limits.strict_max_tokens)
        for choice in range(plan.n):
            requests.append(
                GenerationRequest(
                    request_id=f"{header.id}-{len(requests)}",
                    prompt_tokens=prompt.tokens,
                    max_tokens=max_tokens,
                    sampling=plan.sampling_of(choice, len(prompt.tokens)),
                    ignore_eos=plan.ignore_eos,
                    cache_prompt=plan.cache_prompt and not plan.scores_prompt,
                    prediction=prediction,
                    scores_prompt=plan.scores_prompt,
                    wants_progress=plan.shows_progress,
                    images=prompt.images,
                )
            )
    return Job(header, plan, tuple(prompts), tuple(requests), record, form)


async def open_streams(generator: Generator, job: Job) -> list[TokenStream]:
    """Admit every choice, or none: when one is refused, those before it are closed and the refusal is raised."""
    streams: list[TokenStream] = []
    try:
        for request in job.requests:
            streams.append(generator.open(request, job.record))
    except BaseException:
        for stream in streams:
            await stream.aclose()
        raise
    return streams


def make_service(generator: Generator, model: ServedModel, limits: HttpLimits, observer: Observer) -> Service:
    """Return the parts that the handlers of one application share."""
    tokenizer, encoder = model.tokenizer, model.encoder
    setting = setting_of(model.model_id, limits, model.chat, has_images=encoder is not None)
    style = setting.style = find_style(setting, tokenizer.path)
    return Service(
        generator=generator,
        tokenizer=tokenizer,
        speller=Speller(tokenizer),
        conversation=Conversation(model.chat, tokenizer, style.tool_style()),
        model_id=model.model_id,
        created=model.created,
        fingerprint=_fingerprint(),
        limits=limits,
        observer=observer,
        pool=BodyPool(setting, tokenizer),
        images=Images(encoder) if encoder is not None else None,
        template_fault=style.fault,
    )


def _fingerprint() -> str:
    """Return `system_fingerprint`: what computed the answer, as far as its arithmetic goes."""
    try:
        return f"relayline-{version_of()}"
    except metadata.PackageNotFoundError:  # run from a checkout that was never installed
        return "relayline-dev"
