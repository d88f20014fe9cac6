"""Writes answers for /v1/audio/transcriptions: one text, or the events that build it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relayline.coordinator.http.replies import shapes
from relayline.coordinator.http.replies.choice import FinishReason, Growth
from relayline.coordinator.http.replies.dialect import OpenAIStream
from relayline.coordinator.http.replies.shapes import Usage


class TranscriptionDialect(OpenAIStream):
    """/v1/audio/transcriptions: one choice."""

    def __init__(self, response_format: str) -> None:
        """`response_format`: json or text."""
        self._is_text = response_format == "text"
        self._texts: list[str] = []  # of a stream, whose last event has all of them

    def growth_event(self, index: int, growth: Growth) -> bytes:
        """Return the event for one token; a model's thoughts are no part of a transcription."""
        self._texts.append(growth.text)
        return shapes.encode({"type": "transcript.text.delta", "delta": growth.text})

    def finish_event(self, index: int, reason: FinishReason, stop: str) -> bytes:
        """Return an event that adds nothing: the one with the usage ends a stream."""
        return shapes.encode({"type": "transcript.text.delta", "delta": ""})

    def usage_event(self, usage: Usage) -> bytes:
        """Return the event with the whole text."""
        text = "".join(self._texts)
        return shapes.encode({"type": "transcript.text.done", "text": text, "usage": _usage(usage)})

    def reply(self, choices: Sequence[tuple[Growth, FinishReason]], usage: Usage) -> bytes:
        """Return the whole transcription."""
        text = choices[0][0].text
        if self._is_text:
            return f"{text}\n".encode("utf-8", "replace")
        return shapes.encode({"text": text, "usage": _usage(usage)})


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "type": "tokens",
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }
