"""A checked request as generation requests, and the opening of its streams, all or none."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from relayline.coordinator.http.replies.choice import ChoiceState, Ending, Prompt
from relayline.coordinator.http.replies.dialect import Header
from relayline.coordinator.http.replies.service import Service
from relayline.coordinator.http.requests.chat_form import ChatForm
from relayline.coordinator.http.requests.plan import Plan
from relayline.coordinator.http.requests.prompts import fit_tokens
from relayline.coordinator.http.workers.prepared import Prepared, unpacked
from relayline.coordinator.sessions.generation import GenerationRequest, Generator, TokenStream
from relayline.coordinator.sessions.request_log import RequestRecord
from relayline.coordinator.sessions.tenants import ANYONE, circle_of

YIELD_BYTES = 64 * 1024  # of a packed prompt: a fraction of a millisecond


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

    def continued(self, said: Sequence[int]) -> Job:
        """Return the same job of one choice, whose answer begins with these tokens."""
        return dataclasses.replace(self, requests=(dataclasses.replace(self.requests[0], said=tuple(said)),))

    def note(self, choice: int, state: ChoiceState) -> None:
        """Tell telemetry how far a choice has come as its client sees it."""
        if self.record is not None and choice < len(self.record.streams):  # in the order in which choices were opened
            stream = self.record.streams[choice]
            stream.n_tokens, stream.n_thought = state.n_tokens, state.n_thought
            stream.n_cached = 0 if choice % self.plan.n else state.n_cached  # each prompt counts once
            stream.finish_reason = state.finish_reason or ""

    def choice_states(self, service: Service) -> list[ChoiceState]:
        """Return a fresh state for each choice."""
        form, plan = self.form, self.plan
        ending = Ending(
            plan.stops,
            frozenset(plan.stop_tokens),
            plan.min_tokens,
            shows_stop=plan.shows_stop,
            line_end=plan.line_end,
            at_once=plan.shows_prompt_alone,
        )
        return [
            ChoiceState(
                form.conversation.piece if form else service.tokenizer.piece,
                ending,
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
    requests: list[GenerationRequest] = []
    tenant = record.tenant if record is not None else ANYONE
    circle = circle_of(tenant, plan.cache_salt)
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
                    adapter=service.limits.adapter_of(header.model),
                    images=prompt.images,
                    tenant=tenant,
                    circle=circle,
                    turn=plan.turn,
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
