"""Writes answers for /api/chat and /api/generate: one JSON object a line, the last one with counts and times. Pure."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import UnsetType

from relayline.coordinator.answers.reader import CallPart
from relayline.coordinator.http.edge.errors import error_body
from relayline.coordinator.http.edge.sse import StreamForm
from relayline.coordinator.http.replies import shapes
from relayline.coordinator.http.replies.choice import FinishReason, Growth, Scored, Speller
from relayline.coordinator.http.replies.dialect import Dialect, Header, token_logprob
from relayline.coordinator.http.replies.shapes import Usage
from relayline.wire.common.errors import RelaylineError

CONTENT_TYPE = "application/x-ndjson"
_MS_NS = 1e6


class OllamaDialect(Dialect):
    """/api/chat, and /api/generate: one choice. An object that is `done` is the end."""

    def __init__(
        self, header: Header, speller: Speller, n_top: int, *, is_chat: bool, clock: Callable[[], datetime.datetime]
    ) -> None:
        """`n_top`: alternatives per position, or below 0 for no log probabilities. `clock`: the time, with its zone."""
        self._header, self._speller, self._n_top = header, speller, n_top
        self._is_chat, self._clock = is_chat, clock
        self._call: CallPart | None = None  # the one that is being written; clients get whole ones

    @property
    def form(self) -> StreamForm:
        """How its stream is sent. A client that waits gets objects that add nothing: it reads no comments."""
        return StreamForm(CONTENT_TYPE, self.frame(shapes.encode(self._object("", "", [], is_done=False))))

    def frame(self, event: bytes) -> bytes:
        """Return the line of an object, and none for none."""
        return event + b"\n" if event else b""

    def growth_event(self, index: int, growth: Growth) -> bytes:
        """Return the object for one token; none where it only adds to a call."""
        calls = [call for part in growth.calls if (call := self._grown(part)) is not None]
        if not (growth.text or growth.reasoning or calls or growth.scored):
            return b""
        return shapes.encode(self._added(growth, calls))

    def finish_event(self, index: int, reason: FinishReason, stop: str) -> bytes:
        """Return the last object, after one with the last call."""
        call, self._call = self._call, None
        last = shapes.encode(self._ended(self._object("", "", [], is_done=True), reason))
        if call is None:
            return last
        return self.frame(shapes.encode(self._object("", "", [call], is_done=False))) + last

    def usage_event(self, usage: Usage) -> bytes:
        """Never asked for: the last object says the counts."""
        raise NotImplementedError

    def failure_event(self, error: RelaylineError) -> bytes:
        """Return the object that makes Ollama's clients raise."""
        return shapes.encode({"error": error_body(error).error.message})

    def reply(self, choices: Sequence[tuple[Growth, FinishReason]], usage: Usage) -> bytes:
        """Return the whole answer."""
        growth, reason = choices[0]
        body = self._object(growth.text, growth.reasoning, growth.whole_calls(), is_done=True)
        return shapes.encode(self._ended(self._scored(body, growth.scored), reason))

    def _grown(self, part: CallPart) -> CallPart | None:
        """Take a part of a call; return the call before it once another begins."""
        before = self._call
        if before is not None and before.index == part.index:
            self._call = dataclasses.replace(before, arguments=before.arguments + part.arguments)
            return None
        self._call = part
        return before

    def _added(self, growth: Growth, calls: Sequence[CallPart]) -> dict[str, Any]:
        return self._scored(self._object(growth.text, growth.reasoning, calls, is_done=False), growth.scored)

    def _object(self, text: str, thinking: str, calls: Sequence[CallPart], *, is_done: bool) -> dict[str, Any]:
        created = shapes.utc_text(self._clock())
        head = {"model": self._header.model, "created_at": created}
        thought = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return {**head, "response": text, **thought, "done": is_done}
        message: dict[str, Any] = {"role": "assistant", "content": text, **thought}
        if calls:
            message["tool_calls"] = [_written(call) for call in calls]
        return {**head, "message": message, "done": is_done}

    def _scored(self, body: dict[str, Any], scored: Sequence[Scored]) -> dict[str, Any]:
        if self._n_top < 0 or not scored:
            return body
        return body | {"logprobs": [token_logprob(self._speller, one, self._n_top) for one in scored]}

    def _ended(self, body: dict[str, Any], reason: FinishReason) -> dict[str, Any]:
        """Return the last object with its reason, its counts, and times in nanoseconds."""
        body["done_reason"] = "length" if reason == "length" else "stop"
        timings = self.so_far().timings
        if isinstance(timings, UnsetType):
            return body
        return body | {
            "total_duration": round((timings.prompt_ms + timings.predicted_ms) * _MS_NS),
            "load_duration": 0,
            "prompt_eval_count": timings.prompt_n + timings.cache_n,
            "prompt_eval_duration": round(timings.prompt_ms * _MS_NS),
            "eval_count": timings.predicted_n,
            "eval_duration": round(timings.predicted_ms * _MS_NS),
        }


def _written(call: CallPart) -> dict[str, Any]:
    """Return a call as Ollama's clients read it: with its arguments as an object."""
    function = {"index": call.index, "name": call.name, "arguments": call.arguments_object()}
    return {"id": call.id, "function": function}
