"""Reads one tool call as the model writes it: pieces of text in, its name and its arguments as JSON text out. Pure.

Arguments are passed on as they arrive, in the model's own words. Text that turns out not to be a call raises
NotACallError. That always happens before the name is known, so no reader has seen a call. Calls whose arguments are
between tags are read in `coordinator/answers/tagged_calls.py`.
"""

from __future__ import annotations

import json
import re
from typing import Any, Protocol

from relayline.coordinator.answers.syntax import NamedBody, ObjectBody

NAME_CHARS_MAX = 256  # of a name, and of blanks around it
HEAD_CHARS_MAX = 2 * NAME_CHARS_MAX  # of the text before arguments that are passed on as they arrive

_FIRST_KEY = re.compile(r'\s*\{\s*"([^"\\]*)"\s*:')
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")
_BEGUN_KEY = re.compile(r'\s*(?:\{\s*(?:"[^"\\]*(?:"\s*)?)?)?')


class NotACallError(Exception):
    """The text looked like a call and is none."""


class CallReader(Protocol):
    """Reads one call."""

    name: str  # empty until known
    id: str  # the model's own; mostly empty
    rest: str | None  # the text behind the call, once the call is over

    @property
    def is_whole(self) -> bool:
        """Whether all arguments have come."""

    def push(self, text: str) -> str:
        """Take the next text; return the part that belongs to the arguments. Raises NotACallError."""


class ObjectScanner:
    """Finds where a JSON object ends in text that arrives in pieces. It looks at nothing but brackets and strings."""

    _IN_STRING = re.compile(r'["\\]')
    _OUTSIDE = re.compile(r'["{}\[\]]')

    def __init__(self, depth: int = 0) -> None:
        """`depth`: how many brackets were opened before the first piece."""
        self._depth = depth
        self._in_string = self._is_escaped = False

    def take(self, text: str) -> tuple[str, int | None]:
        """Return (the object's part of this piece as JSON spells it, the index behind its last bracket or None)."""
        is_in, is_escaped = self._in_string, self._is_escaped
        end = self.end_in(text)
        return _spelt(text[:end], is_in, is_escaped), end

    def end_in(self, text: str) -> int | None:
        """Return the index behind the object's last bracket, None if it is not in this piece."""
        at = 1 if self._is_escaped and text else 0
        self._is_escaped = self._is_escaped and not text
        while found := (self._IN_STRING if self._in_string else self._OUTSIDE).search(text, at):
            at, mark = found.end(), found[0]
            if mark == "\\":
                at += 1
                self._is_escaped = at > len(text)
            elif mark == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if mark in "{[" else -1
                if self._depth == 0:
                    return at
        return None


def _spelt(text: str, is_in: bool, is_escaped: bool) -> str:
    """Return JSON text with the line breaks and tabs that models write in strings as JSON spells them.

    `is_in`: it begins inside a string; `is_escaped`: behind a backslash there.
    """
    if not _CONTROL.search(text):
        return text
    spelt: list[str] = []
    for char in text:
        spelt.append(json.dumps(char)[2 if is_escaped else 1 : -1] if is_in and char < " " else char)
        is_in ^= char == '"' and not is_escaped
        is_escaped = is_in and char == "\\" and not is_escaped
    return "".join(spelt)


class ObjectCall:
    """{"name": ..., "arguments": {...}}: passed on as they arrive in that order, else when complete."""

    def __init__(self, body: ObjectBody, names: frozenset[str] | None, close: str = "") -> None:
        self.name, self.id = "", ""
        self._close, self._behind = close.strip(), ""
        self.rest: str | None = None
        self._names = names
        self._name_keys = (body.name_key, "name", "function")
        self._argument_keys = (body.arguments_key, "arguments", "parameters")
        self._other_keys = (body.number_key or "id", "type", "id")
        others = rf'(?:"(?:{"|".join(self._other_keys)})"\s*:\s*"[^"\\]*"\s*,\s*)*'
        names_text, arguments_text = "|".join(self._name_keys), "|".join(self._argument_keys)
        self._head = re.compile(
            rf'\s*\{{\s*{others}"(?:{names_text})"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*{others}"(?:{arguments_text})"\s*:\s*'
            r"(?=\{)"
        )
        self._held = ""
        self._whole = ObjectScanner()
        self._arguments: ObjectScanner | None = None  # while they are handed on
        self._tail: ObjectScanner | None = None  # behind them

    @property
    def is_whole(self) -> bool:
        """Whether all arguments have come."""
        return self._tail is not None or self.rest is not None

    def push(self, text: str) -> str:
        """Take the next text; return the part that belongs to the arguments."""
        if self._tail is not None:
            return self._end(self._tail, text)
        if self._arguments is not None:
            return self._stream(self._arguments, text)
        self._held += text
        end = self._whole.end_in(text)
        self._check_first_key()
        head = self._head.match(self._held[:HEAD_CHARS_MAX])
        if head:
            self._called(_name_of(head[1]))
            self._arguments = ObjectScanner()
            return self._stream(self._arguments, self._held[head.end() :])
        return "" if end is None else self._take(len(self._held) - len(text) + end)

    def _check_first_key(self) -> None:
        begun = self._held[:HEAD_CHARS_MAX]
        first = _FIRST_KEY.match(begun)
        known = (*self._name_keys, *self._argument_keys, *self._other_keys)
        is_open = len(begun) < HEAD_CHARS_MAX and _BEGUN_KEY.fullmatch(begun)
        if first[1] not in known if first else not is_open:
            raise NotACallError

    def _called(self, name: str) -> None:
        if (self._names is not None and name not in self._names) or sayable(name) != name:
            raise NotACallError
        self.name = name

    def _stream(self, scanner: ObjectScanner, text: str) -> str:
        arguments, end = scanner.take(text)
        if end is None:
            return arguments
        self._tail = ObjectScanner(depth=1)
        return arguments + self._end(self._tail, text[end:])

    def _end(self, scanner: ObjectScanner, text: str) -> str:
        """Find the end behind the arguments: the last bracket, or the mark, for small models forget that bracket."""
        end = scanner.end_in(text)
        n_before = len(self._behind)
        self._behind += text
        at = self._behind.find(self._close) if self._close else -1
        if at >= 0 and (end is None or at < n_before + end):
            self.rest = self._behind[at:]
        elif end is not None:
            self.rest = text[end:]
        else:
            self._behind = self._behind[-len(self._close) :] if self._close else ""
        return ""

    def _take(self, end: int) -> str:
        """Read the call from the complete object, which ends at `end` of the held text."""
        try:
            call = json.loads(self._held[:end], strict=False)
            name = next((call[key] for key in self._name_keys if key in call), None)
            arguments = next((call[key] for key in self._argument_keys if key in call), None)
            arguments_text = sayable(arguments) or "{}" if isinstance(arguments, str) else to_json(arguments or {})
        except (ValueError, RecursionError):
            raise NotACallError from None
        if not isinstance(name, str) or not name or (arguments is None and self._names is not None):
            raise NotACallError
        self._called(name)
        self.rest = self._held[end:]
        return arguments_text


def to_json(value: Any) -> str:
    """Return a value as JSON text. Raises ValueError for numbers that JSON has not."""
    return sayable(json.dumps(value, ensure_ascii=False, allow_nan=False))


def sayable(text: str) -> str:
    """Return a text that UTF-8 can carry: half a surrogate pair, which JSON may spell, stays spelt."""
    return text.encode(errors="backslashreplace").decode()


def _name_of(written: str) -> str:
    """Read a name; models escape what needs none, such as _ in Markdown. Raises NotACallError."""
    spelt = _ESCAPED.sub(lambda escape: escape[0] if escape[1] in '"\\/bfnrtu' else escape[1], written)
    try:
        return str(json.loads(spelt, strict=False))
    except ValueError:
        raise NotACallError from None


class NamedCall:
    """name[ARGS]{...}."""

    def __init__(self, body: NamedBody) -> None:
        self.name, self.id = "", ""
        self.rest: str | None = None
        self._body = body
        self._held = ""
        self._scanner: ObjectScanner | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all arguments have come."""
        return self.rest is not None

    def push(self, text: str) -> str:
        """Take the next text; return the part that belongs to the arguments. Raises NotACallError."""
        if self._scanner is not None:
            return self._stream(self._scanner, text)
        self._held += text
        name, mark, behind = self._held.partition(self._body.name_end.strip())
        arguments = behind.lstrip()
        if len(behind) - len(arguments) > NAME_CHARS_MAX:
            raise NotACallError
        if len(name) > NAME_CHARS_MAX + (0 if mark else len(self._body.name_end)):
            raise NotACallError
        if not arguments:
            return ""
        self._read_name(name.partition(self._body.id_mark)[0] if self._body.id_mark else name)
        if not self.name or arguments[0] != "{":
            self.name = ""
            raise NotACallError
        self._scanner = ObjectScanner()
        return self._stream(self._scanner, arguments)

    def _read_name(self, text: str) -> None:
        text = text.strip()
        if self._body.is_numbered:
            self.id = text
            text = text.rpartition(":")[0] or text
        self.name = text.removeprefix(self._body.prefix)

    def _stream(self, scanner: ObjectScanner, text: str) -> str:
        arguments, end = scanner.take(text)
        if end is not None:
            self.rest = text[end:]
        return arguments
