"""Reads calls with one pair of tags for each argument, and passes the arguments on as JSON. Pure.

A tag does not say whether `5` is a number or a text: the tool's schema does. Where the schema leaves it open, text that
is valid JSON counts as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from relayline.coordinator.answers.calls import NAME_CHARS_MAX, NotACallError, to_json
from relayline.coordinator.answers.syntax import TaggedBody
from relayline.coordinator.text.detokenize import overlap

Types = Mapping[str, frozenset[str]]  # JSON types that each argument of a tool may have; none: any
# Among the types of an argument that is a string although its schema does not say so itself: grammars have such
# values written as JSON, in quotes, while models that none leads may write them bare.
QUOTED = "quoted"

_KEY_CHARS_MAX = 2 * NAME_CHARS_MAX  # of a key and the tags around it

_NAME = re.compile(r'([^\s<>"]+)(?:">|>|(?=[\s<]))')
_BEGUN_NAME = re.compile(r'[^\s<>"]*"?')
_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}  # as templates made with Jinja write them


class TaggedCall:
    """<function=name><parameter=key>value</parameter></function>: strings are passed on as they arrive."""

    def __init__(self, body: TaggedBody, close: str, types_of: Callable[[str], Types]) -> None:
        self.name, self.id = "", ""
        self.rest: str | None = None
        self._body, self._types_of = body, types_of
        self._types: Types = {}
        self._value_end = body.value_end.strip()
        self._is_padded = body.value_end.startswith("\n")  # values are on separate lines
        key_end = r"\s*".join(re.escape(part) for part in body.key_end.split())
        self._key = re.compile(rf"{re.escape(body.key_open)}([^<>]*?){key_end}")
        self._end = body.end.strip() or close.strip()
        self._keeps_end = not body.end  # it ends more than the body
        self._held = ""
        self._n_keys = 0
        self._key_types: frozenset[str] | None = None  # of the value that is being read
        self._is_begun = False  # that value's string

    @property
    def is_whole(self) -> bool:
        """Whether all arguments have come."""
        return self.rest is not None

    def push(self, text: str) -> str:
        """Take the next text; return the part that belongs to the arguments. Raises NotACallError."""
        self._held += text
        if not self.name and not self._find_name():
            return ""
        added = ""
        while self.rest is None:
            step = self._between() if self._key_types is None else self._value(self._key_types)
            if step is None:
                break
            added += step
        return added

    def _find_name(self) -> bool:
        text, opening = self._held.lstrip(), self._body.name_open
        if not text.startswith(opening):
            if not opening.startswith(text):
                raise NotACallError
            return False
        text = text[len(opening) :]
        found = _NAME.match(text)
        if found is None:
            if not _BEGUN_NAME.fullmatch(text) or len(text) > 2 * NAME_CHARS_MAX:
                raise NotACallError
            return False
        if len(found[1]) > NAME_CHARS_MAX:
            raise NotACallError
        self.name, self._held = found[1], text[found.end() :]
        self._types = self._types_of(self.name)
        return True

    def _between(self) -> str | None:
        """Continue with the next value or the end. None: more text is needed."""
        text = self._held = self._held.lstrip()
        key = self._key.match(text, 0, _KEY_CHARS_MAX)
        if key:
            self._held = text[key.end() :]
            self._key_types, self._is_begun = self._types.get(key[1], frozenset()), False
            self._n_keys += 1
            return f"{', ' if self._n_keys > 1 else '{'}{json.dumps(key[1], ensure_ascii=False)}: "
        opening = self._body.key_open
        is_begun = opening.startswith(text) or (text.startswith(opening) and len(text) <= _KEY_CHARS_MAX)
        if is_begun or (self._end.startswith(text) and text != self._end):
            return None
        # Any other text here ends the call as well: its name has been passed on already.
        self.rest = text if self._keeps_end else text.removeprefix(self._end)
        return "}" if self._n_keys else "{}"

    def _value(self, types: frozenset[str]) -> str | None:
        """Read on in a value. None: more text is needed."""
        at = self._held.find(self._value_end)
        if types == {"string"}:
            return self._string(at)
        if at < 0:
            return None
        text, self._held = self._held[:at], self._held[at + len(self._value_end) :]
        self._key_types = None
        return json_of(self._bare(text), types)

    def _string(self, at: int) -> str | None:
        opening = "" if self._is_begun else '"'
        if at >= 0:
            text, self._held = self._held[:at], self._held[at + len(self._value_end) :]
            self._key_types = None
            return f'{opening}{json.dumps(self._bare(text), ensure_ascii=False)[1:-1]}"'
        n_held = max(overlap(self._held, mark) for mark in (self._value_end, f"\n{self._value_end}"))
        text, self._held = self._held[: len(self._held) - n_held], self._held[len(self._held) - n_held :]
        if not text:
            return None
        if self._is_padded and not self._is_begun:
            text = text.removeprefix("\n")
        self._is_begun = True
        return f"{opening}{json.dumps(text, ensure_ascii=False)[1:-1]}"

    def _bare(self, text: str) -> str:
        if not self._is_padded:
            return text
        return (text if self._is_begun else text.removeprefix("\n")).removesuffix("\n")


def json_of(text: str, types: frozenset[str]) -> str:
    """Return an argument's value as JSON, of the first of its types (none: any) that fits; else as a string."""
    bare = text.strip()
    try:
        value: Any = json.loads(_OF_PYTHON.get(bare, bare))
        if types and type_of(value) not in types and not (type_of(value) == "integer" and "number" in types):
            value = text if "string" in types else value
        return to_json(value)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def type_of(value: Any) -> str:
    """Return the name that JSON schemas have for a value's type."""
    if isinstance(value, bool):
        return "boolean"
    names = {type(None): "null", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]
