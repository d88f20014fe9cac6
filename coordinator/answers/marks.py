"""Marks that are single tokens in a model's vocabulary, which no text spells and which are not shown as text."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from relayline.coordinator.answers.syntax import Syntax, Thinking
from relayline.coordinator.text.tokenizer import Tokenizer

_MARK = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")


def control_marks(tokenizer: Tokenizer, syntax: Syntax, thinking: Thinking | None) -> dict[str, int]:
    """Return those marks of calls and thoughts that are control tokens, with their ids."""
    found: dict[str, int] = {}
    for mark in {mark for text in _texts(syntax, thinking) for mark in _MARK.findall(text)}:
        ids = tokenizer.encode(mark, add_special=False) if tokenizer.has_text else []
        if len(ids) == 1 and not tokenizer.piece(ids[0]) and tokenizer.piece(ids[0], special=True) == mark.encode():
            found[mark] = ids[0]
    return found


def _texts(*parts: object) -> Iterator[str]:
    for part in parts:
        if isinstance(part, str):
            yield part
        elif dataclasses.is_dataclass(part):
            yield from _texts(*(getattr(part, field.name) for field in dataclasses.fields(part)))
