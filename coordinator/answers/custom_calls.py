"""Calls of tools whose input is free text. To the model such a tool is a function with one argument, a text called
`input`; here the JSON of its calls becomes that text again, piece by piece. Pure.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection

from relayline.coordinator.answers.reader import CallPart, Parts, Reader

ARGUMENT = "input"
_BEGIN = re.compile(rf'\s*\{{\s*"{ARGUMENT}"\s*:\s*"')
_HEX = "[0-9a-fA-F]"
_PAIR = rf"u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}"  # two escapes that are one character
_WHOLE = re.compile(rf'(?:[^"\\]|\\(?:["\\/bfnrt]|{_PAIR}|u(?![dD][89abAB]){_HEX}{{4}}))*+')
_ESCAPE_CHARS_MAX = 12  # of the longest escape: a pair


class InputText:
    """The text in the arguments of one call as they grow."""

    def __init__(self) -> None:
        self._held = ""
        self._has_begun = self._has_ended = False

    def push(self, arguments: str) -> str:
        """Take the next piece of JSON; return what it adds to the text."""
        if self._has_ended:
            return ""
        self._held += arguments
        if not self._has_begun:
            found = _BEGIN.match(self._held)
            if found is None:
                return ""
            self._held, self._has_begun = self._held[found.end() :], True
        return self._decoded()

    def finish(self) -> str:
        """Return the arguments themselves if they are no such JSON: they are all there is of the call."""
        return "" if self._has_begun else self._held

    def _decoded(self) -> str:
        texts = []
        while True:
            found = _WHOLE.match(self._held)
            assert found is not None, "it matches nothing too"
            texts.append(_without_halves(json.loads(f'"{found[0]}"', strict=False)))
            self._held = self._held[found.end() :]
            if self._held.startswith('"'):
                self._has_ended = True
                break
            if len(self._held) < _ESCAPE_CHARS_MAX:
                break
            texts.append("\ufffd")  # an escape that is none, or half a pair
            self._held = self._held[1:]
        return "".join(texts)


def _without_halves(text: str) -> str:
    """Return a text without half pairs of UTF-16, which no reply can carry."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


class CustomCallReader:
    """A reader whose calls of some tools carry their input in place of arguments."""

    def __init__(self, inner: Reader, names: Collection[str]) -> None:
        """`names`: of the tools whose input is text."""
        self._inner, self._names = inner, names
        self._index = -1  # of the latest call
        self._input: InputText | None = None  # of that call, if its tool is such a one
        self.n_calls = 0
        self.is_over = False  # nothing that may still come belongs to the answer

    @property
    def is_thinking(self) -> bool:
        """Whether the next text is reasoning, as far as is known."""
        return self._inner.is_thinking

    @property
    def has_cut_call(self) -> bool:
        """Whether a call has begun whose arguments are not complete."""
        return self._inner.has_cut_call

    def push(self, text: str) -> Parts:
        """Take the next text."""
        return self._translated(self._inner.push(text), is_end=self._inner.is_over)

    def finish(self, *, is_cut: bool = False) -> Parts:
        """Return the held text, when no more text follows. `is_cut`: the answer ended only for want of room."""
        parts = self._inner.finish(is_cut=is_cut)
        return self._translated(parts, is_end=True, is_cut=is_cut or self.has_cut_call)

    def _translated(self, parts: Parts, *, is_end: bool, is_cut: bool = False) -> Parts:
        self.n_calls, self.is_over = self._inner.n_calls, self._inner.is_over
        found: list[CallPart] = []
        for part in parts.calls:
            if part.name:
                found += self._ended()
                self._index, self._input = part.index, InputText() if part.name in self._names else None
            if self._input is None:
                found.append(part)
                continue
            text = self._input.push(part.arguments)
            if part.name or text:
                found.append(dataclasses.replace(part, arguments=text, is_custom=True))
        if is_end and not is_cut:  # what a cut call holds back is the beginning of its JSON
            found += self._ended()
        return parts._replace(calls=tuple(found))

    def _ended(self) -> list[CallPart]:
        text = self._input.finish() if self._input is not None else ""
        self._input = None
        return [CallPart(self._index, text, is_custom=True)] if text else []
