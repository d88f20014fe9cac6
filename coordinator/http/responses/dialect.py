"""Writes answers for /v1/responses: output items, the events that build them, and the whole response. Pure."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from relayline.coordinator.answers.reader import CALL_ID_CHARS
from relayline.coordinator.http.edge.errors import error_body
from relayline.coordinator.http.replies import shapes
from relayline.coordinator.http.replies.choice import FinishReason, Growth, Prompt, Scored, Speller
from relayline.coordinator.http.replies.dialect import Dialect, Header, token_logprob
from relayline.coordinator.http.replies.shapes import Usage
from relayline.coordinator.http.requests.inner_form import named_frames
from relayline.coordinator.http.requests.plan import Plan
from relayline.coordinator.http.responses.asking import AnswerOptions
from relayline.coordinator.http.responses.items import ID_CHARS, PREFIXES
from relayline.wire.common.errors import RelaylineError

Item = dict[str, Any]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
Logprobs = Callable[[Sequence[Scored]], list[shapes.TokenLogprob]]

# Of calls of functions, and of custom tools: the item's type, what it is filled with, and the events that fill it.
_CALLS = (
    ("function_call", "arguments", "function_call_arguments"),
    ("custom_tool_call", "input", "custom_tool_call_input"),
)
_INCOMPLETE = {"reason": "max_output_tokens"}


def _part_id(response_id: str, part: str) -> str:
    """Return what names a part of a response: always the same, and no easier to guess than the response's own id."""
    return hashlib.sha256(f"{response_id} {part}".encode()).hexdigest()[:ID_CHARS]


def call_ids_of(response_id: str) -> Callable[[], str]:
    """Return what gives the calls of a response their ids, one after the other."""
    numbers = itertools.count()
    return lambda: _part_id(response_id, f"call {next(numbers)}")[:CALL_ID_CHARS]


class OutputItems:
    """The output of one response as it grows: items; the last one may be open. Methods return the events."""

    def __init__(self, response_id: str, logprobs: Logprobs, namespaced: Mapping[str, tuple[str, str]]) -> None:
        """`namespaced`: the names that the model sees of tools in name spaces -> (name space, name)."""
        self.items: list[Item] = []
        self._response_id = response_id
        self._namespaced = namespaced
        self._n_events = 0
        self._logprobs = logprobs
        self._open: str = ""  # the item being built: "reasoning", "message", "function_call", "custom_tool_call"
        self._call = -1  # which of the answer's calls is
        self._texts: list[str] = []
        self._scored: list[shapes.TokenLogprob] = []

    def event(self, kind: str, **fields: Any) -> bytes:
        """Return the next event."""
        number = self._n_events
        self._n_events += 1
        return shapes.encode({"type": f"response.{kind}", "sequence_number": number, **fields})

    def grow(self, growth: Growth) -> list[bytes]:
        """Take one token's text."""
        events: list[bytes] = []
        if growth.reasoning:
            events += self._opened("reasoning")
            events.append(self._delta("reasoning_text.delta", growth.reasoning, content_index=0))
        if growth.text or (growth.scored and self._open == "message"):
            events += self._opened("message")
            scored = self._logprobs(growth.scored)
            self._scored += scored
            events.append(self._delta("output_text.delta", growth.text, content_index=0, logprobs=scored))
        for part in growth.calls:
            if part.index != self._call or self._open not in ("function_call", "custom_tool_call"):
                events += self.close("completed")
                self._call = part.index
                kind, filled, _ = _CALLS[part.is_custom]
                events += self._begun({"type": kind, "call_id": part.id, **self._named(part.name), filled: ""})
            if part.arguments:
                events.append(self._delta(f"{_CALLS[part.is_custom][2]}.delta", part.arguments))
        return events

    def finish(self, reason: FinishReason) -> list[bytes]:
        """Close the open item. An empty answer becomes an empty message."""
        events = [] if self.items else self._opened("message")
        return events + self.close("incomplete" if reason == "length" else "completed")

    def close(self, status: str) -> list[bytes]:
        """Close the open item, if there is one."""
        kind, self._open = self._open, ""
        if not kind:
            return []
        item, text = self.items[-1], "".join(self._texts)
        item["status"] = status
        at = self._at()
        if kind == "function_call":
            item["arguments"] = text
            done = self.event("function_call_arguments.done", **at, name=item["name"], arguments=text)
            return [done, self._item_done()]
        if kind == "custom_tool_call":
            item["input"] = text
            return [self.event("custom_tool_call_input.done", **at, input=text), self._item_done()]
        part = item["content"][0]
        part["text"] = text
        more: dict[str, Any] = {}
        if kind == "message":
            part["logprobs"] = more["logprobs"] = self._scored
        name = "output_text.done" if kind == "message" else "reasoning_text.done"
        return [
            self.event(name, **at, content_index=0, text=text, **more),
            self.event("content_part.done", **at, content_index=0, part=part),
            self._item_done(),
        ]

    def _named(self, name: str) -> Item:
        """Return the fields of a call that name its tool."""
        if name not in self._namespaced:
            return {"name": name}
        space, name = self._namespaced[name]
        return {"namespace": space, "name": name}

    def _opened(self, kind: str) -> list[bytes]:
        if self._open == kind:
            return []
        events = self.close("completed")
        if kind == "message":
            part: Item = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            events += self._begun({"type": "message", "role": "assistant", "content": []})
        else:
            part = {"type": "reasoning_text", "text": ""}
            events += self._begun({"type": "reasoning", "summary": [], "content": []})
        events.append(self.event("content_part.added", **self._at(), content_index=0, part=part))
        self.items[-1]["content"] = [part]
        return events

    def _begun(self, item: Item) -> list[bytes]:
        name = f"{PREFIXES[item['type']]}_{_part_id(self._response_id, f'item {len(self.items)}')}"
        item = {"type": item["type"], "id": name, "status": "in_progress", **item}
        self._open, self._texts, self._scored = item["type"], [], []
        self.items.append(item)
        return [self.event("output_item.added", output_index=len(self.items) - 1, item=item)]

    def _delta(self, name: str, text: str, **more: Any) -> bytes:
        self._texts.append(text)
        return self.event(name, **self._at(), delta=text, **more)

    def _at(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _item_done(self) -> bytes:
        return self.event("output_item.done", output_index=len(self.items) - 1, item=self.items[-1])


class ResponsesDialect(Dialect):
    """/v1/responses: one choice. The event with the whole response is the end."""

    def __init__(
        self,
        header: Header,
        speller: Speller,
        plan: Plan,
        options: AnswerOptions,
        clock_s: Callable[[], int],
        keep: Callable[[bytes, Sequence[Item]], None],
    ) -> None:
        """`keep` gets the body of a finished response, and its output."""
        self._header, self._speller, self._clock_s = header, speller, clock_s
        self._n_top, self._sampling = plan.n_logprobs, plan.sampling
        self._echo, self._keep, self._is_background = options.echo, keep, options.background
        self._output = OutputItems(header.id, self._logprobs, options.namespaced)
        self._reason: FinishReason = "stop"

    def frame(self, event: bytes) -> bytes:
        """Return the event, whose lines have been written: a token may need several."""
        return event

    def opening_event(self, index: int, prompt: Prompt) -> bytes:
        """Return the events that open a response."""
        body = self._body("in_progress", None)
        kinds = ("in_progress",) if self._is_background else ("created", "in_progress")
        return named_frames([self._whole(kind, body) for kind in kinds])

    def growth_event(self, index: int, growth: Growth) -> bytes:
        """Return the events for one token."""
        return named_frames(self._output.grow(growth))

    def finish_event(self, index: int, reason: FinishReason, stop: str) -> bytes:
        """Return the events that end the last item."""
        self._reason = reason
        return named_frames(self._output.finish(reason))

    def usage_event(self, usage: Usage) -> bytes:
        """Return the event that carries the whole response."""
        return self.ended_event(self._ended(usage))

    def failure_event(self, error: RelaylineError) -> bytes:
        """Return the events that end a response that failed."""
        return self.failed_event(self.failed(error))

    def reply(self, choices: Sequence[tuple[Growth, FinishReason]], usage: Usage) -> bytes:
        """Return the whole response."""
        growth, self._reason = choices[0]
        self._output.grow(growth)
        self._output.finish(self._reason)
        return self._ended(usage)

    @property
    def items(self) -> Sequence[Item]:
        """The output so far."""
        return self._output.items

    @property
    def ending(self) -> Status:
        """How a whole answer ends."""
        return "incomplete" if self._reason == "length" else "completed"

    def queued_events(self) -> bytes:
        """Return the events of a background response that has been admitted."""
        body = self._body("queued", None)
        return named_frames([self._whole(kind, body) for kind in ("created", "queued")])

    def ended_event(self, body: bytes) -> bytes:
        """Return the event that ends a whole answer, of which `body` is the response."""
        return named_frames([self._whole(self.ending, body)])

    def close_open(self) -> bytes:
        """Return the events that end the open item where the answer breaks off."""
        return named_frames(self._output.close("incomplete"))

    def state(self, status: Status, usage: Usage | None = None) -> bytes:
        """Return the response as it is."""
        return self._body(status, usage)

    def failed_event(self, body: bytes) -> bytes:
        """Return the event that ends an answer that failed, of which `body` is the response."""
        return named_frames([self._whole("failed", body)])

    def failed(self, error: RelaylineError, output: Sequence[Item] | None = None) -> bytes:
        """Return a response that failed, with its own output unless another is given."""
        detail = error_body(error).error
        code = "rate_limit_exceeded" if detail.type == "rate_limit_error" else "server_error"
        return self._body("failed", None, {"code": code, "message": detail.message}, output)

    def _whole(self, kind: str, body: bytes) -> bytes:
        return self._output.event(kind, response=msgspec.Raw(body))

    def _ended(self, usage: Usage) -> bytes:
        body = self._body(self.ending, usage)
        self._keep(body, self._output.items)
        return body

    def _body(
        self, status: Status, usage: Usage | None, error: Item | None = None, output: Sequence[Item] | None = None
    ) -> bytes:
        if output is None:
            output = [] if status in ("queued", "in_progress") else self._output.items
        header = self._header
        fields = {
            "id": header.id,
            "object": "response",
            "created_at": header.created,
            "status": status,
            "completed_at": self._clock_s() if status == "completed" else None,
            "error": error,
            "incomplete_details": _INCOMPLETE if status == "incomplete" else None,
            "model": header.model,
            "output": output,
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
        }
        if usage is not None:
            fields["usage"] = _usage(usage)
        return shapes.encode(fields)[:-1] + b"," + self._echo[1:]

    def _logprobs(self, scored: Sequence[Scored]) -> list[shapes.TokenLogprob]:
        return [] if self._n_top < 0 else [token_logprob(self._speller, one, self._n_top) for one in scored]


def _usage(usage: Usage) -> Item:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.completion_tokens_details.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
