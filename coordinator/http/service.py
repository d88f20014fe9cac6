"""What a generating request needs from the rest of the coordinator, and the opening of its streams, all or none."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Callable, Sequence
from typing import TypeVar

from relayline.coordinator.answers.template import Conversation
from relayline.coordinator.http.chat_form import ChatForm, chat_grammar
from relayline.coordinator.http.choice import ChoiceState, Speller
from relayline.coordinator.http.dialects import Header
from relayline.coordinator.http.limits import HttpLimits
from relayline.coordinator.http.structure import grammar_of
from relayline.coordinator.http.validation import Plan, check_tokens, fit_tokens
from relayline.coordinator.observe.observer import Observer
from relayline.coordinator.sessions.generation import GenerationRequest, Generator, TokenStream
from relayline.coordinator.sessions.request_log import RequestRecord
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import InvalidRequestError

T = TypeVar("T")


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

    async def aside(self, size: int, work: Callable[[], T]) -> T:
        """Return what `work` returns for `size` characters or tokens; a lot of them does not hold up the event loop."""
        return work() if size <= self.limits.text_inline_bytes_max else await asyncio.to_thread(work)

    async def prompts(self, sent: Sequence[str | list[int]], *, echo: bool) -> list[Prompt]:
        """Return the prompts of a completion body, each sent as text or as token ids.

        Raises InvalidRequestError for text when the model has no tokenizer.
        """
        return await self.aside(sum(map(len, sent)), lambda: [self._prompt(each, echo) for each in sent])

    def _prompt(self, sent: str | list[int], echo: bool) -> Prompt:
        if isinstance(sent, str):
            return Prompt(tuple(self.tokenizer.encode(sent)), sent if echo else "")
        return Prompt(tuple(sent), self.tokenizer.decode(sent) if echo else "")

    async def prediction(self, plan: Plan) -> tuple[int, ...]:
        """Return the token ids of what the client expects the answer to be like, as many as a stream may hold.

        Special tokens that it spells out are text, as in an answer. Raises InvalidRequestError for text when the model
        has no tokenizer, and for token ids outside its vocabulary.
        """
        text, tokenizer = plan.prediction, self.tokenizer
        if not text:
            return ()
        if isinstance(text, tuple):
            check_tokens(text, tokenizer.n_vocab, "prediction")
            return text[: self.generator.ctx_tokens]
        if not tokenizer.has_text:
            raise InvalidRequestError("prediction: this model has no tokenizer", param="prediction")
        ids = await self.aside(len(text), lambda: tokenizer.encode(text, add_special=False, parse_special=False))
        return tuple(ids[: self.generator.ctx_tokens])

    async def shaped(self, plan: Plan, form: ChatForm | None = None) -> Plan:
        """Return the plan with the grammar that its shape and its tools ask for; `form` is a chat's.

        Raises InvalidRequestError where there is none.
        """
        shape = plan.shape
        if shape is None and plan.offered is None:
            return plan
        if shape is not None and not self.tokenizer.has_text:
            raise InvalidRequestError(f"{shape.param}: this model has no tokenizer", param=shape.param)
        if form is not None:
            grammar = await asyncio.to_thread(chat_grammar, plan, form)
        else:
            grammar = await asyncio.to_thread(grammar_of, shape) if shape else ""
        return dataclasses.replace(plan, sampling=dataclasses.replace(plan.sampling, grammar=grammar))

    async def encode_chat(self, text: str) -> list[int]:
        """Return the token ids of a rendered chat. Raises InvalidRequestError when the model has no tokenizer."""
        return await self.aside(len(text), lambda: self.tokenizer.encode_chat(text))


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as token ids, with the text to repeat before its choices (empty without `echo`)."""

    tokens: tuple[int, ...]
    echo: str = ""


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
        form = self.form
        return [
            ChoiceState(
                form.conversation.piece if form else service.tokenizer.piece,
                self.plan.stops,
                wants_logprobs=self.plan.sampling.n_logprobs >= 0,
                wants_tokens=self.plan.return_token_ids,
                offset_chars=len(self.prompt_of(index).echo),
                reader=form.new_reader() if form else None,
            )
            for index in range(len(self.requests))
        ]


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
    form: ChatForm | None = None,
    prediction: tuple[int, ...] = (),
) -> Job:
    """Check prompts against vocabulary and context and lay out one generation request per choice.

    Raises InvalidRequestError or ContextLengthError naming `param`, NotReadyError while the context is not known.
    """
    ctx_tokens = service.generator.ctx_tokens
    if not ctx_tokens:  # no stage has been heard yet: nothing would fit, and that is not the request's fault
        service.generator.check_ready()
    check_tokens([token for token, _ in plan.sampling.logit_bias], service.tokenizer.n_vocab, "logit_bias")
    requests: list[GenerationRequest] = []
    for prompt in prompts:
        check_tokens(prompt.tokens, service.tokenizer.n_vocab, param)
        max_tokens = fit_tokens(len(prompt.tokens), plan, ctx_tokens, param)
        for choice in range(plan.n):
            requests.append(
                GenerationRequest(
                    request_id=f"{header.id}-{len(requests)}",
                    prompt_tokens=prompt.tokens,
                    max_tokens=max_tokens,
                    sampling=plan.sampling_of(choice),
                    ignore_eos=plan.ignore_eos,
                    record=record,
                    cache_prompt=plan.cache_prompt,
                    prediction=prediction,
                )
            )
    return Job(header, plan, tuple(prompts), tuple(requests), record, form)


async def open_streams(generator: Generator, requests: Sequence[GenerationRequest]) -> list[TokenStream]:
    """Admit every choice, or none: when one is refused, those before it are closed and the refusal is raised."""
    streams: list[TokenStream] = []
    try:
        for request in requests:
            streams.append(generator.open(request))
    except BaseException:
        for stream in streams:
            await stream.aclose()
        raise
    return streams
