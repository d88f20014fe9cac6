"""Writes answers for /completion and /infill: llama-server's events and bodies. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from relayline.coordinator.http.llama.asking import AnswerOptions
from relayline.coordinator.http.replies import shapes
from relayline.coordinator.http.replies.choice import FinishReason, Growth, Scored, Speller
from relayline.coordinator.http.replies.dialect import Dialect, Header
from relayline.coordinator.http.replies.shapes import Usage
from relayline.coordinator.sessions.generation import PromptProgress

_STOPS: dict[FinishReason, str] = {"stop": "eos", "length": "limit", "tool_calls": "eos"}
NO_SLOT = -1  # an answer may go through several lanes


@dataclasses.dataclass(slots=True)
class _Answer:
    """One answer so far."""

    n_tokens: int = 0
    has_new_line: bool = False

    def note(self, growth: Growth) -> None:
        self.n_tokens += len(growth.tokens)
        self.has_new_line = self.has_new_line or "\n" in growth.text


class LlamaDialect(Dialect):
    """/completion and /infill. An event with `stop` is the end of each answer."""

    def __init__(
        self, header: Header, speller: Speller, n_top: int, options: AnswerOptions, n_prompts: Sequence[int]
    ) -> None:
        """`n_top`: alternatives per position, or below 0 for none; `n_prompts`: each prompt's tokens."""
        self._header, self._speller, self._n_top = header, speller, n_top
        self._options, self._n_prompts = options, n_prompts
        self._answers: dict[int, _Answer] = {}
        self._n_per_prompt = 1

    def of_choices(self, n_choices: int) -> LlamaDialect:
        """Say how many answers there are."""
        self._n_per_prompt = n_choices // len(self._n_prompts)
        return self

    def progress_event(self, index: int, progress: PromptProgress, time_ms: int) -> bytes | None:
        """Return the event that says how far a prompt has been read."""
        progress_fields = shapes.PromptProgress.of(progress, time_ms)
        return shapes.encode({**self._partial(index, "", []), "prompt_progress": progress_fields})

    def growth_event(self, index: int, growth: Growth) -> bytes:
        """Return the event for one token."""
        self._answer(index).note(growth)
        event = self._partial(index, growth.text, list(growth.tokens))
        if self._options.timings_per_token:
            event["timings"] = self.so_far().timings
        if self._n_top >= 0 and growth.scored:
            event["completion_probabilities"] = self._probabilities(growth.scored)
        return shapes.encode(event)

    def finish_event(self, index: int, reason: FinishReason, stop: str) -> bytes:
        """Return the event that ends an answer."""
        return shapes.encode(self._final(index, Growth(stop=stop), reason))

    def usage_event(self, usage: Usage) -> bytes:
        """Never asked for: every answer's end says its counts."""
        raise NotImplementedError

    def reply(self, choices: Sequence[tuple[Growth, FinishReason]], usage: Usage) -> bytes:
        """Return the whole reply: one object, or a list of several."""
        written = []
        for index, (growth, reason) in enumerate(choices):
            self._answer(index).note(growth)
            body = self._final(index, growth, reason)
            if self._n_top >= 0 and growth.scored:
                body["completion_probabilities"] = self._probabilities(growth.scored)
            written.append(self._chosen(body))
        return shapes.encode(written[0] if len(written) == 1 else written)

    def _answer(self, index: int) -> _Answer:
        return self._answers.setdefault(index, _Answer())

    def _n_prompt(self, index: int) -> int:
        return self._n_prompts[index // self._n_per_prompt]

    def _partial(self, index: int, content: str, tokens: list[int]) -> dict[str, Any]:
        return {
            "index": index,
            "content": content,
            "tokens": tokens,
            "stop": False,
            "id_slot": NO_SLOT,
            "tokens_predicted": self._answer(index).n_tokens,
            "tokens_evaluated": self._n_prompt(index),
        }

    def _final(self, index: int, growth: Growth, reason: FinishReason) -> dict[str, Any]:
        options, answer = self._options, self._answer(index)
        by_text = reason == "stop" and growth.stop
        return {
            "index": index,
            "content": growth.text,
            "tokens": list(growth.tokens) if options.return_tokens else [],
            "id_slot": NO_SLOT,
            "stop": True,
            "model": self._header.model,
            "tokens_predicted": answer.n_tokens,
            "tokens_evaluated": self._n_prompt(index),
            "generation_settings": options.settings,
            "prompt": options.texts[index // self._n_per_prompt],
            "has_new_line": answer.has_new_line,
            "truncated": False,
            "stop_type": "word" if by_text else _STOPS[reason],
            "stopping_word": growth.stop if by_text else "",
            "tokens_cached": self._n_prompt(index) + max(0, answer.n_tokens - 1),
            "timings": self.so_far().timings,
        }

    def _chosen(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields that were asked for; a path with slashes leads into an object."""
        if not self._options.response_fields:
            return body
        found: dict[str, Any] = {}
        for path in self._options.response_fields:
            value: Any = body
            for key in path.split("/"):
                if isinstance(value, msgspec.Struct):
                    value = msgspec.structs.asdict(value)
                if not isinstance(value, Mapping) or key not in value:
                    break
                value = value[key]
            else:
                found[path] = value
        return found

    def _probabilities(self, scored: Sequence[Scored]) -> list[dict[str, Any]]:
        return [
            {**self._one(one.token, one.logprob), "top_logprobs": [self._one(*each) for each in one.top[: self._n_top]]}
            for one in scored
        ]

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        _, raw = self._speller.spell(token)
        text = raw.decode(errors="ignore")
        return {"id": token, "token": text, "bytes": list(raw), "logprob": max(logprob, -math.inf)}
