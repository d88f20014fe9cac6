"""Chooses the chat template of a coordinator: the model's own, or one from a file."""

from __future__ import annotations

import functools
from pathlib import Path

from relayline.coordinator.text.chat import ChatTemplate, read_template
from relayline.coordinator.text.tokenizer import Tokenizer


def chat_template_of(tokenizer: Tokenizer, path: Path | None) -> ChatTemplate:
    """Return the model's own template, or the one in a file. Raises UsageError where that cannot be used."""
    template = functools.partial(ChatTemplate, bos_text=tokenizer.bos_text, eos_text=tokenizer.eos_text)
    if path is not None:
        return template(read_template(path))
    of_tools = template(tokenizer.tool_template) if tokenizer.tool_template else None
    return template(tokenizer.chat_template, for_tools=of_tools)
