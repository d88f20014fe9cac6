"""The two reply formats: how growing choices are written for /v1/completions and for /v1/chat/completions. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from msgspec import UNSET, UnsetType

from relayline.coordinator.answers.reader import CallPart
from relayline.coordinator.http import shapes
from relayline.coordinator.http.choice import FinishReason, Growth, Scored, Speller
from relayline.coordinator.http.errors import error_body
from relayline.coordinator.http.shapes import Usage
from relayline.coordinator.http.sse import DONE, data_frame
from relayline.wire.common.errors import RelaylineError


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """What every body and every event of one reply repeats."""

    id: str
    created: int  # unix seconds
    model: str
    fingerprint: str
    include_usage: bool  # events carry a `usage` field, null except in the last
    return_token_ids: bool


class Dialect(Protocol):
    """Writes one reply. Methods that end in `event` return the JSON of one SSE event, which `frame` makes lines of."""

    def frame(self, event: bytes) -> bytes:
        """Return the lines of an event."""

    def opening_event(self, index: int, echo: str) -> bytes | None:
        """Return the event that opens a choice before its first token, if there is one."""

    def growth_event(self, index: int, growth: Growth) -> bytes:
        """Return the event for what one token added."""

    def finish_event(self, index: int, reason: FinishReason, stop: str) -> bytes:
        """Return the event that ends a choice. `stop` is the stop string that did it, empty for none."""

    def closing_events(self) -> Sequence[bytes]:
        """Return what stands at the end of a stream that is whole."""

    def failure_event(self, error: RelaylineError) -> bytes:
        """Return the event that ends a stream that is not."""

    def usage_event(self, usage: Usage) -> bytes:
        """Return the event without choices that carries the usage."""

    def reply(self, choices: Sequence[tuple[Growth, FinishReason]], usage: Usage) -> bytes:
        """Return the body of a reply that was not streamed."""


class _OpenAIStream:
    """What the streams of both OpenAI's older routes have: events without names, an error like a reply's, [DONE]."""

    def frame(self, event: bytes) -> bytes:
        """Return the lines of an event."""
        return data_frame(event)

    def closing_events(self) -> Sequence[bytes]:
        """Return what tells clients that nothing more comes."""
        return (DONE,)

    def failure_event(self, error: RelaylineError) -> bytes:
        """Return the event that makes OpenAI's clients raise."""
        return shapes.encode(error_body(error))


class CompletionDialect(_OpenAIStream):
    """/v1/completions."""

    def __init__(self, header: Header, speller: Speller, n_top: int) -> None:
        """`n_top`: alternatives per position, or below 0 for no log probabilities."""
        self._header, self._speller, self._n_top = header, speller, n_top

    def opening_event(self, index: int, echo: str) -> bytes | None:
        """Return the echoed prompt, or None: a completion has no role to announce."""
        return self._event([shapes.CompletionChoice(echo, index)]) if echo else None

    def growth_event(self, index: int, growth: Growth) -> bytes:
        """Return the event for what one token added."""
        return self._event([self._choice(index, growth, None)])

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
        return shapes.encode(self._body(choices, usage if self._header.include_usage else UNSET))

    def _body(self, choices: list[shapes.CompletionChoice], usage: Usage | UnsetType | None) -> shapes.Completion:
        header = self._header
        return shapes.Completion(header.id, header.created, header.model, header.fingerprint, choices, usage)

    def _choice(self, index: int, growth: Growth, reason: FinishReason | None) -> shapes.CompletionChoice:
        logprobs = self._logprobs(growth.scored) if self._n_top >= 0 else None
        return shapes.CompletionChoice(growth.text, index, logprobs, reason, _token_ids(self._header, growth))

    def _logprobs(self, scored: Sequence[Scored]) -> shapes.CompletionLogprobs:
        name = [self._speller.spell(one.token)[0] for one in scored]
        top = None
        if self._n_top > 0:  # the chosen token is always among them, as OpenAI has it
            top = [
                {self._speller.spell(token)[0]: logprob for token, logprob in one.top} | {chosen: one.logprob}
                for chosen, one in zip(name, scored, strict=True)
            ]
        return shapes.CompletionLogprobs(
            name, [one.logprob for one in scored], top, [one.offset_chars for one in scored]
        )


class ChatDialect(_OpenAIStream):
    """/v1/chat/completions."""

    def __init__(self, header: Header, speller: Speller, n_top: int, *, has_tools: bool = False) -> None:
        """`n_top`: alternatives per position, or below 0 for no log probabilities.

        `has_tools`: an answer may say nothing, and only call tools.
        """
        self._header, self._speller, self._n_top = header, speller, n_top
        self._has_tools = has_tools

    def opening_event(self, index: int, echo: str) -> bytes | None:
        """Return the event that announces the assistant's role."""
        return self._event([shapes.ChunkChoice(index, shapes.Delta("assistant", None if self._has_tools else echo))])

    def growth_event(self, index: int, growth: Growth) -> bytes:
        """Return the event for what one token added."""
        delta = shapes.Delta(
            content=None if (growth.reasoning or growth.calls) and not growth.text else growth.text,
            reasoning_content=growth.reasoning or None,
            tool_calls=[_call_delta(part) for part in growth.calls] or None,
        )
        ids = _token_ids(self._header, growth)
        return self._event([shapes.ChunkChoice(index, delta, self._logprobs(growth.scored), None, ids)])

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
        body = shapes.ChatCompletion(header.id, header.created, header.model, header.fingerprint, written, usage)
        return shapes.encode(body)

    def _event(self, choices: list[shapes.ChunkChoice], usage: Usage | None = None) -> bytes:
        header = self._header
        shown = usage if header.include_usage else UNSET
        body = shapes.ChatChunk(header.id, header.created, header.model, header.fingerprint, choices, shown)
        return shapes.encode(body)

    def _logprobs(self, scored: Sequence[Scored]) -> shapes.ChatLogprobs | None:
        if self._n_top < 0:
            return None
        return shapes.ChatLogprobs([token_logprob(self._speller, one, self._n_top) for one in scored])


def token_logprob(speller: Speller, one: Scored, n_top: int) -> shapes.TokenLogprob:
    """Return a token's log probability, with those of at most `n_top` rivals."""
    name, raw = speller.spell(one.token)
    top = []
    for token, logprob in one.top[:n_top]:
        rival, rival_raw = speller.spell(token)
        top.append(shapes.TopLogprob(rival, logprob, list(rival_raw)))
    return shapes.TokenLogprob(name, one.logprob, list(raw), top)


def _call_delta(part: CallPart) -> shapes.ToolCall:
    if not part.name:
        return shapes.ToolCall(shapes.CalledFunction(part.arguments), index=part.index)
    return shapes.ToolCall(shapes.CalledFunction(part.arguments, part.name), part.id, "function", part.index)


def _message(growth: Growth) -> shapes.AssistantMessage:
    calls = [
        shapes.ToolCall(shapes.CalledFunction(call.arguments, call.name), call.id, "function")
        for call in growth.whole_calls()
    ]
    return shapes.AssistantMessage(
        content=None if calls and not growth.text else growth.text,
        reasoning_content=growth.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def _token_ids(header: Header, growth: Growth) -> list[int] | UnsetType:
    return list(growth.tokens) if header.return_token_ids else UNSET
