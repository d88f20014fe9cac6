"""How answers are written for /v1/completions and for /v1/chat/completions. Pure."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET, UnsetType

from relayline.coordinator.answers.reader import CallPart
from relayline.coordinator.http.replies import shapes
from relayline.coordinator.http.replies.choice import LOGPROB_MIN, FinishReason, Growth, Prompt, Scored, Speller
from relayline.coordinator.http.replies.dialect import Header, OpenAIStream, SoFar, token_logprob
from relayline.coordinator.http.replies.shapes import Usage
from relayline.coordinator.sessions.generation import ROW_TOKEN_MIN, PromptProgress, PromptScore

_TEXT_ALONE = Growth()[1:]  # the other fields of a growth that has a text alone
NO_TOKEN = -1  # in a prompt's ids, in place of a row of an image; llama.cpp's own number


class _ChoiceStream(OpenAIStream, abc.ABC):
    """One event adds to one choice. Most add text alone: for each choice all around it is written once."""

    def __init__(self, header: Header, speller: Speller, n_top: int) -> None:
        """`n_top`: alternatives per position, or below 0 for no log probabilities."""
        self._header, self._speller, self._n_top = header, speller, n_top
        self._has_text_alone = n_top < 0 and not header.return_token_ids
        self._around: dict[int, tuple[bytes, bytes]] = {}

    @abc.abstractmethod
    def _empty_event(self, index: int) -> tuple[bytes, bytes]:
        """Return the key of an event's text in its JSON, and the event that adds an empty one."""

    def _is_text(self, growth: Growth) -> bool:
        """Return whether an event says nothing but this growth's text."""
        return self._has_text_alone and growth[1:] == _TEXT_ALONE and self.so_far is SoFar

    def _text_event(self, index: int, text: str) -> bytes:
        """Return the event that adds this text."""
        around = self._around.get(index)
        if around is None:
            key, event = self._empty_event(index)
            before, _, behind = event.partition(key + b'""')  # within a JSON text its quotes would be escaped
            around = self._around[index] = (before + key, behind)
        return around[0] + shapes.encode(text) + around[1]


class CompletionDialect(_ChoiceStream):
    """/v1/completions."""

    def opening_event(self, index: int, prompt: Prompt) -> bytes | None:
        """Return the echoed prompt, and its token ids; None for neither: a completion has no role to announce."""
        ids = _prompt_ids(self._header, prompt)
        if not (prompt.echo or ids):
            return None
        return self._event([shapes.CompletionChoice(prompt.echo, index, prompt_token_ids=ids)])

    def growth_event(self, index: int, growth: Growth) -> bytes:
        """Return the event for one token."""
        if self._is_text(growth):
            return self._text_event(index, growth.text)
        return self._event([self._choice(index, growth, None)])

    def _empty_event(self, index: int) -> tuple[bytes, bytes]:
        return b'"text":', self._event([self._choice(index, Growth(), None)])

    def progress_event(self, index: int, progress: PromptProgress, time_ms: int) -> bytes | None:
        """Return the event that says how far a prompt has been read, as llama-server has it."""
        body = self._body([shapes.CompletionChoice("", index)])
        body.prompt_progress = shapes.PromptProgress.of(progress, time_ms)
        return shapes.encode(body)

    def finish_event(self, index: int, reason: FinishReason, stop: str) -> bytes:
        """Return the event that ends a choice."""
        return self._event([shapes.CompletionChoice("", index, None, reason)])

    def usage_event(self, usage: Usage) -> bytes:
        """Return the event that carries the usage."""
        return self._event([], usage)

    def reply(self, choices: Sequence[tuple[Growth, FinishReason]], usage: Usage) -> bytes:
        """Return the whole reply."""
        written = [self._choice(index, growth, reason) for index, (growth, reason) in enumerate(choices)]
        return shapes.encode(self._body(written, usage))

    def _event(self, choices: list[shapes.CompletionChoice], usage: Usage | None = None) -> bytes:
        so_far = self.so_far()
        return shapes.encode(self._body(choices, usage or so_far.usage or UNSET))

    def _body(self, choices: list[shapes.CompletionChoice], usage: Usage | UnsetType = UNSET) -> shapes.Completion:
        header = self._header
        timings = self.so_far().timings
        return shapes.Completion(
            header.id, header.created, header.model, header.fingerprint, choices, usage, timings=timings
        )

    def _choice(self, index: int, growth: Growth, reason: FinishReason | None) -> shapes.CompletionChoice:
        logprobs = self._logprobs(growth.scored) if self._n_top >= 0 else None
        prompt = growth.prompt
        if logprobs and prompt is not None and prompt.echo:
            self._echo(logprobs, prompt, growth.prompt_scores)
        return shapes.CompletionChoice(
            growth.text,
            index,
            logprobs,
            reason,
            _token_ids(self._header, growth),
            _prompt_ids(self._header, prompt),
            _prompt_logprobs(self._header, self._speller, growth),
        )

    def _echo(self, logprobs: shapes.CompletionLogprobs, prompt: Prompt, scores: Sequence[PromptScore]) -> None:
        """Put the log probabilities of an echoed prompt's tokens before those of the answer."""
        logprobs.tokens[:0] = [self._speller.spell(token)[0] for token in prompt.tokens]
        logprobs.token_logprobs[:0] = [None, *(max(score.logprob, LOGPROB_MIN) for score in scores)]
        logprobs.text_offset[:0] = self._speller.offsets(prompt.tokens, prompt.echo)
        logprobs.top_logprobs[:0] = [None, *(self._top(score.token, score.logprob, score.top) for score in scores)]

    def _top(self, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Return the likeliest tokens of a place; the chosen one is always among them, as OpenAI has it."""
        leaders = {self._speller.spell(rival)[0]: max(each, LOGPROB_MIN) for rival, each in top[: self._n_top]}
        return leaders | {self._speller.spell(token)[0]: max(logprob, LOGPROB_MIN)}

    def _logprobs(self, scored: Sequence[Scored]) -> shapes.CompletionLogprobs:
        name = [self._speller.spell(one.token)[0] for one in scored]
        top: list[dict[str, float] | None] = [self._top(one.token, one.logprob, one.top) for one in scored]
        return shapes.CompletionLogprobs(
            name, [one.logprob for one in scored], top, [one.offset_chars for one in scored]
        )


class ChatDialect(_ChoiceStream):
    """/v1/chat/completions."""

    def __init__(self, header: Header, speller: Speller, n_top: int, *, has_tools: bool = False) -> None:
        """`n_top`: alternatives per position, or below 0 for no log probabilities.

        `has_tools`: an answer may say nothing, and only call tools.
        """
        super().__init__(header, speller, n_top)
        self._has_tools = has_tools

    def opening_event(self, index: int, prompt: Prompt) -> bytes | None:
        """Return the event that announces the assistant's role."""
        delta = shapes.Delta("assistant", None if self._has_tools else prompt.echo)
        return self._event([shapes.ChunkChoice(index, delta)], prompt=None if index else prompt)

    def growth_event(self, index: int, growth: Growth) -> bytes:
        """Return the event for one token."""
        if self._is_text(growth):
            return self._text_event(index, growth.text)
        delta = shapes.Delta(
            content=None if (growth.reasoning or growth.calls) and not growth.text else growth.text,
            reasoning_content=growth.reasoning or None,
            tool_calls=[_call_delta(part) for part in growth.calls] or None,
        )
        ids = _token_ids(self._header, growth)
        return self._event([shapes.ChunkChoice(index, delta, self._logprobs(growth.scored), None, ids)])

    def _empty_event(self, index: int) -> tuple[bytes, bytes]:
        return b'"content":', self._event([shapes.ChunkChoice(index, shapes.Delta(content=""))])

    def progress_event(self, index: int, progress: PromptProgress, time_ms: int) -> bytes | None:
        """Return the event that says how far a prompt has been read, as llama-server has it."""
        chunk = self._chunk([shapes.ChunkChoice(index, shapes.Delta())])
        chunk.prompt_progress = shapes.PromptProgress.of(progress, time_ms)
        return shapes.encode(chunk)

    def finish_event(self, index: int, reason: FinishReason, stop: str) -> bytes:
        """Return the event that ends a choice: an empty delta."""
        return self._event([shapes.ChunkChoice(index, shapes.Delta(), None, reason)])

    def usage_event(self, usage: Usage) -> bytes:
        """Return the event that carries the usage."""
        return self._event([], usage)

    def reply(self, choices: Sequence[tuple[Growth, FinishReason]], usage: Usage) -> bytes:
        """Return the whole reply."""
        written = [
            shapes.ChatChoice(
                index,
                _message(growth),
                self._logprobs(growth.scored),
                reason,
                _token_ids(self._header, growth),
            )
            for index, (growth, reason) in enumerate(choices)
        ]
        header = self._header
        body = shapes.ChatCompletion(
            header.id,
            header.created,
            header.model,
            header.fingerprint,
            written,
            usage,
            timings=self.so_far().timings,
            service_tier=header.service_tier,
            prompt_token_ids=_prompt_ids(header, choices[0][0].prompt),
            prompt_logprobs=_prompt_logprobs(header, self._speller, choices[0][0]),
        )
        return shapes.encode(body)

    def _event(
        self, choices: list[shapes.ChunkChoice], usage: Usage | None = None, prompt: Prompt | None = None
    ) -> bytes:
        so_far = self.so_far()
        chunk = self._chunk(choices)
        chunk.usage, chunk.timings = usage or so_far.usage or UNSET, so_far.timings
        chunk.prompt_token_ids = _prompt_ids(self._header, prompt)
        return shapes.encode(chunk)

    def _chunk(self, choices: list[shapes.ChunkChoice]) -> shapes.ChatChunk:
        header = self._header
        return shapes.ChatChunk(
            header.id, header.created, header.model, header.fingerprint, choices, service_tier=header.service_tier
        )

    def _logprobs(self, scored: Sequence[Scored]) -> shapes.ChatLogprobs | None:
        if self._n_top < 0:
            return None
        return shapes.ChatLogprobs([token_logprob(self._speller, one, self._n_top) for one in scored])


def _call_delta(part: CallPart) -> shapes.ToolCall:
    call = _call(part)
    call.index = part.index
    return call


def _call(part: CallPart) -> shapes.ToolCall:
    name, id = (part.name, part.id) if part.name else (UNSET, UNSET)
    if part.is_custom:
        kind: Literal["custom"] | UnsetType = "custom" if part.name else UNSET
        return shapes.ToolCall(id=id, type=kind, custom=shapes.CalledCustom(part.arguments, name))
    return shapes.ToolCall(shapes.CalledFunction(part.arguments, name), id, "function" if part.name else UNSET)


def _message(growth: Growth) -> shapes.AssistantMessage:
    calls = [_call(call) for call in growth.whole_calls()]
    return shapes.AssistantMessage(
        content=None if calls and not growth.text else growth.text,
        reasoning_content=growth.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def _token_ids(header: Header, growth: Growth) -> list[int] | UnsetType:
    return list(growth.tokens) if header.return_token_ids else UNSET


def _prompt_ids(header: Header, prompt: Prompt | None) -> list[int] | UnsetType:
    if not header.return_token_ids or prompt is None:
        return UNSET
    if prompt.images:
        return [token if token < ROW_TOKEN_MIN else NO_TOKEN for token in prompt.tokens]
    return list(prompt.tokens)


def _prompt_logprobs(header: Header, speller: Speller, growth: Growth) -> shapes.PromptLogprobs | UnsetType:
    if header.n_prompt_logprobs < 0:
        return UNSET
    found: shapes.PromptLogprobs = [None]
    for score in growth.prompt_scores:
        ranks = {token: rank for rank, (token, _) in enumerate(score.top, 1)}
        shown = [*score.top[: header.n_prompt_logprobs], (score.token, score.logprob)]
        found.append(
            {
                str(token): shapes.PromptLogprob(max(logprob, LOGPROB_MIN), ranks.get(token), speller.spell(token)[0])
                for token, logprob in shown
            }
        )
    return found
