"""Writes answers for /v1/messages: content blocks, the events that build them, and the whole message. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relayline.coordinator.answers.reader import CallPart
from relayline.coordinator.http.messages.errors import messages_error
from relayline.coordinator.http.replies import shapes
from relayline.coordinator.http.replies.choice import FinishReason, Growth, Prompt
from relayline.coordinator.http.replies.dialect import Dialect, Header
from relayline.coordinator.http.replies.shapes import Usage
from relayline.coordinator.http.requests.inner_form import named_frames
from relayline.wire.common.errors import RelaylineError

Block = dict[str, Any]

_STOP_REASONS: dict[FinishReason, str] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_SIGNATURE = "unsigned"  # of thoughts: clients send it back with them; it is not checked here
_PING = b'{"type":"ping"}'


class MessagesDialect(Dialect):
    """/v1/messages: one choice. The event message_stop is the end."""

    def __init__(self, header: Header, n_prompt: int, request_id: str) -> None:
        """`n_prompt`: tokens of the prompt, which the first event says."""
        self._header, self._n_prompt, self._request_id = header, n_prompt, request_id
        self._open = ""  # the type of the block that is being built
        self._call = -1  # which of the answer's calls is
        self._n_blocks = 0
        self._reason: FinishReason = "stop"
        self._stop = ""

    def frame(self, event: bytes) -> bytes:
        """Return the event, whose lines have been written: a token may need several."""
        return event

    def opening_event(self, index: int, prompt: Prompt) -> bytes | None:
        """Return the events that open a message."""
        message = {**self._message([]), "usage": _usage(self._n_prompt, 0, 0)}
        return named_frames([_event("message_start", message=message), _PING])

    def growth_event(self, index: int, growth: Growth) -> bytes:
        """Return the events for one token."""
        events: list[bytes] = []
        if growth.reasoning:
            events += self._opened({"type": "thinking", "thinking": "", "signature": ""})
            events.append(self._delta({"type": "thinking_delta", "thinking": growth.reasoning}))
        if growth.text:
            events += self._opened(_text(""))
            events.append(self._delta({"type": "text_delta", "text": growth.text}))
        for part in growth.calls:
            if part.index != self._call:
                self._call = part.index
                events += self._closed()
                events += self._opened(_tool_use(part, {}))
            if part.arguments:
                events.append(self._delta({"type": "input_json_delta", "partial_json": part.arguments}))
        return named_frames(events)

    def finish_event(self, index: int, reason: FinishReason, stop: str) -> bytes:
        """Return the events that end the last block."""
        self._reason, self._stop = reason, stop
        return named_frames(self._closed())

    def usage_event(self, usage: Usage) -> bytes:
        """Return the events that end the message."""
        delta = _event("message_delta", delta={"container": None, **self._ending()}, usage=_counts(*_tokens(usage)))
        return named_frames([delta, _event("message_stop")])

    def failure_event(self, error: RelaylineError) -> bytes:
        """Return the event that ends a message that failed."""
        return named_frames([messages_error(error, self._request_id)])

    def reply(self, choices: Sequence[tuple[Growth, FinishReason]], usage: Usage) -> bytes:
        """Return the whole message."""
        growth, self._reason = choices[0]
        self._stop = growth.stop
        content: list[Block] = []
        if growth.reasoning:
            content.append({"type": "thinking", "thinking": growth.reasoning, "signature": _SIGNATURE})
        if growth.text or not growth.calls:
            content.append(_text(growth.text))
        content += [_tool_use(call, call.arguments_object()) for call in growth.whole_calls()]
        return shapes.encode({**self._message(content), **self._ending(), "usage": _usage(*_tokens(usage))})

    def _message(self, content: list[Block]) -> dict[str, Any]:
        return {
            "id": self._header.id,
            "type": "message",
            "role": "assistant",
            "model": self._header.model,
            "content": content,
            "container": None,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
        }

    def _ending(self) -> dict[str, Any]:
        by_text = self._reason == "stop" and self._stop
        reason = "stop_sequence" if by_text else _STOP_REASONS[self._reason]
        return {"stop_reason": reason, "stop_sequence": self._stop if by_text else None, "stop_details": None}

    def _opened(self, block: Block) -> list[bytes]:
        if self._open == block["type"]:
            return []
        events = self._closed()
        self._open = block["type"]
        self._n_blocks += 1
        return [*events, _event("content_block_start", index=self._n_blocks - 1, content_block=block)]

    def _closed(self) -> list[bytes]:
        kind, self._open = self._open, ""
        if not kind:
            return []
        end = _event("content_block_stop", index=self._n_blocks - 1)
        return [self._delta({"type": "signature_delta", "signature": _SIGNATURE}), end] if kind == "thinking" else [end]

    def _delta(self, delta: Block) -> bytes:
        return _event("content_block_delta", index=self._n_blocks - 1, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return shapes.encode({"type": kind, **fields})


def _text(text: str) -> Block:
    return {"type": "text", "text": text, "citations": None}


def _tool_use(call: CallPart, arguments: Any) -> Block:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments, "caller": {"type": "direct"}}


def _tokens(usage: Usage) -> tuple[int, int, int]:
    return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens


def _usage(n_prompt: int, n_cached: int, n_output: int) -> dict[str, Any]:
    """Return the counts of a message; the event that ends one has fewer."""
    further = {"cache_creation": None, "inference_geo": None, "service_tier": "standard"}
    return _counts(n_prompt, n_cached, n_output) | further


def _counts(n_prompt: int, n_cached: int, n_output: int) -> dict[str, Any]:
    """Return token counts; cached tokens are not among the input tokens here."""
    return {
        "input_tokens": n_prompt - n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "output_tokens": n_output,
        "output_tokens_details": None,
        "server_tool_use": None,
    }
