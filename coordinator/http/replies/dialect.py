"""What all dialects have in common: each writes growing choices in the form of one API's answers. Pure.

A dialect lives for one answer. It stands beside the routes that it is for: `openai_dialects` here, and `dialect.py` of
`messages`, `responses`, `transcriptions`, `llama` and `ollama`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from relayline.coordinator.http.edge.errors import error_body
from relayline.coordinator.http.edge.sse import DONE, data_frame
from relayline.coordinator.http.replies import shapes
from relayline.coordinator.http.replies.choice import FinishReason, Growth, Prompt, Scored, Speller
from relayline.coordinator.http.replies.shapes import Timings, Usage
from relayline.coordinator.sessions.generation import PromptProgress
from relayline.coordinator.sessions.tenants import ServiceTier
from relayline.wire.common.errors import RelaylineError


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """The fields that every body and every event of one reply repeats."""

    id: str
    created: int  # unix seconds
    model: str
    fingerprint: str
    return_token_ids: bool
    n_prompt_logprobs: int = -1  # of each token of a prompt, as vLLM shows them; below 0: none
    service_tier: ServiceTier | UnsetType = UNSET  # where it was asked for


class SoFar(NamedTuple):
    """The figures of the whole answer so far, which each event carries."""

    usage: Usage | None = None
    timings: Timings | UnsetType = UNSET


class Dialect(abc.ABC):
    """Writes one answer. Methods that end in `event` return one event of a stream, which `frame` makes lines of."""

    so_far: Callable[[], SoFar] = SoFar  # called for each event, and for a reply
    begun_ns: int = 0  # when the request was admitted; of the monotonic clock

    def frame(self, event: bytes) -> bytes:
        """Return the lines of an event."""
        return data_frame(event)

    def opening_event(self, index: int, prompt: Prompt) -> bytes | None:
        """Return the event that opens a choice before its first token, if there is one."""
        return None

    def progress_event(self, index: int, progress: PromptProgress, time_ms: int) -> bytes | None:
        """Return the event that says how far a prompt has been read, where its reader has asked for that."""
        return None

    @abc.abstractmethod
    def growth_event(self, index: int, growth: Growth) -> bytes:
        """Return the event for one token."""

    @abc.abstractmethod
    def finish_event(self, index: int, reason: FinishReason, stop: str) -> bytes:
        """Return the event that ends a choice. `stop` is the stop string that did it, empty for none."""

    @abc.abstractmethod
    def usage_event(self, usage: Usage) -> bytes:
        """Return the event without choices that carries the usage."""

    def closing_events(self) -> Sequence[bytes]:
        """Return the end of a complete stream, where its last events do not say it."""
        return ()

    def failure_event(self, error: RelaylineError) -> bytes:
        """Return the event that ends a stream that is not complete: here the one that makes OpenAI's clients raise."""
        return shapes.encode(error_body(error))

    @abc.abstractmethod
    def reply(self, choices: Sequence[tuple[Growth, FinishReason]], usage: Usage) -> bytes:
        """Return the body of a reply that was not streamed."""


class OpenAIStream(Dialect):
    """A stream as OpenAI's older routes have it: [DONE] ends it."""

    def closing_events(self) -> Sequence[bytes]:
        """Return the event that marks the end of the stream."""
        return (DONE,)


def token_logprob(speller: Speller, one: Scored, n_top: int) -> shapes.TokenLogprob:
    """Return a token's log probability, with those of at most `n_top` rivals."""
    name, raw = speller.spell(one.token)
    top = []
    for token, logprob in one.top[:n_top]:
        rival, rival_raw = speller.spell(token)
        top.append(shapes.TopLogprob(rival, logprob, list(rival_raw)))
    return shapes.TokenLogprob(name, one.logprob, list(raw), top)
