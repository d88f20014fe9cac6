"""From GBNF, the grammars of llama.cpp, to Lark as llguidance reads it. Pure.

It reads what llama.cpp's own parser reads, `_` in names, and `|` at the beginning of a line. What has no recursion
becomes regular expressions, as large as possible: a whole grammar without it is one. Within an expression every way to
read a text counts, as in llama.cpp. Where one expression ends and another begins, llguidance takes the longest text for
the first one: as two expressions `[a-z ]+ " is "` would never come to its end.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple, NoReturn

REPETITIONS_MAX = 2_000  # llama.cpp's: more of at least is refused, and more of at most is any number
EXPRESSION_CHARS_MAX = 16_384  # of one expression; a rule that makes it longer keeps its name
EXPRESSION_DEPTH_MAX = 60  # brackets within brackets of one; each is up to four of the 250 that llguidance reads
LARK_DEPTH_MAX = 8  # the same outside of expressions; deeper ones get rules of their own
_CHAR_MAX, _SURROGATES = 0x10FFFF, (0xD800, 0xDFFF)
_PLAIN = " _,:;=!@%'\""  # signs that mean themselves everywhere in a regular expression
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", **{char: char for char in '\\"[]-'}}
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_INT = re.compile(r"[0-9]{1,18}")
_TOKEN = re.compile(r"(!?)<(\[[0-9]{1,10}\]|[^>\n]*)>")
_PLAIN_TEXT = re.compile(r'[^"\\]+')
# What is matched is not given back: a comment of many `#` would be tried in all its parts.
_BLANKS, _LINES = re.compile(r"(?:[ \t]|#[^\r\n]*+)*+"), re.compile(r"(?:[ \t\r\n]|#[^\r\n]*+)*+")
_NEXT_WAY = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*+)*+\|")  # xgrammar and people put it on the next line, too
_LARK = re.compile(r"(?m)^[ \t]*(?:%llguidance\b|[?!]?start\s*:(?!:=))")
_GBNF = re.compile(r"(?m)^[ \t]*root[ \t]*::=")


class GbnfError(ValueError):
    """A grammar that cannot be read."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Chars:
    """One character of a class, or a text."""

    expression: str
    is_one: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class _Token:
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Rule:
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class _All:
    """One behind the other."""

    parts: tuple[_Node, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Any:
    parts: tuple[_Node, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Times:
    part: _Node
    least: int
    most: int | None

    @property
    def sign(self) -> str:
        """Return it as Lark and regular expressions write it."""
        usual = {(0, None): "*", (1, None): "+", (0, 1): "?"}
        most = "" if self.most is None else self.most
        return usual.get((self.least, self.most)) or f"{{{self.least},{most}}}"


_Node = _Chars | _Token | _Rule | _All | _Any | _Times


def lark_of(text: str) -> str:
    """Return GBNF as Lark; Lark stays as it is. Raises GbnfError, RecursionError."""
    if _LARK.search(text) and not _GBNF.search(text):
        return text
    return _written(_Parser(text).rules())


class _Parser:
    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def rules(self) -> dict[str, _Node]:
        found: dict[str, _Node] = {}
        self._skip(_LINES)
        while self._at < len(self._text):
            name = self._match(_NAME, "a rule's name")
            self._skip(_BLANKS)
            self._expect("::=")
            self._skip(_LINES)
            found[name] = self._alternatives(is_nested=False)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                self._fail("Expected the end of the line")
            self._skip(_LINES)
        return found

    def _alternatives(self, *, is_nested: bool) -> _Node:
        parts = [self._sequence(is_nested=is_nested)]
        while (way := _NEXT_WAY.match(self._text, self._at)) is not None:
            self._at = way.end()
            self._skip(_LINES)
            parts.append(self._sequence(is_nested=is_nested))
        return parts[0] if len(parts) == 1 else _Any(tuple(parts))

    def _sequence(self, *, is_nested: bool) -> _Node:
        parts: list[_Node] = []
        blanks = _LINES if is_nested else _BLANKS
        while (item := self._item()) is not None:
            self._skip(blanks)
            while (times := self._times(blanks)) is not None:
                if item == _All(()):
                    self._fail("Nothing to repeat")
                item = _All(()) if times[1] == 0 else _Times(item, *times)
                self._skip(blanks)
            parts.append(item)
        return parts[0] if len(parts) == 1 else _All(tuple(parts))

    def _item(self) -> _Node | None:
        char = self._peek()
        if char == '"':
            return self._literal()
        if char == "[":
            return self._class()
        if char == "(":
            self._at += 1
            self._skip(_LINES)
            inner = self._alternatives(is_nested=True)
            self._expect(")")
            return inner if inner != _All(()) else _Any((inner,))
        if char == ".":
            self._at += 1
            return _Chars(_class_of([(0, _CHAR_MAX)]))
        if char and char in "<!":
            is_not, name = self._found(_TOKEN, "a token").groups()
            if is_not and not name.startswith("["):
                self._fail("a token that may not be there is named by its number, as in !<[5]>")
            return _Token(f"<[^{name[1:]}>" if is_not else f"<{name}>")
        if _NAME.match(char):
            return _Rule(self._match(_NAME, "a name"))
        return None

    def _literal(self) -> _Node:
        self._at += 1
        chars: list[str] = []
        while self._peek() != '"':
            plain = _PLAIN_TEXT.match(self._text, self._at)
            if plain is not None:
                self._at = plain.end()
                chars += map(_code, map(ord, plain[0]))
            else:
                chars.append(_class_of([(code := self._char(), code)]))
        self._at += 1
        return _Chars("".join(chars), len(chars) == 1) if chars else _All(())

    def _class(self) -> _Node:
        self._at += 1
        is_not = self._peek() == "^"
        self._at += is_not
        ranges: list[tuple[int, int]] = []
        while self._peek() != "]":
            low = high = self._char()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._char()
            ranges.append((low, high))
        self._at += 1
        return _Chars(_class_of(ranges, is_not=is_not)) if ranges else _All(())

    def _char(self) -> int:
        char = self._peek()
        if not char:
            self._fail("Unexpected end")
        self._at += 1
        if char != "\\":
            return ord(char)
        kind = self._peek()
        self._at += 1
        if kind in _HEX:
            digits = self._text[self._at : self._at + _HEX[kind]]
            if len(digits) < _HEX[kind] or not all(digit in "0123456789abcdefABCDEF" for digit in digits):
                self._fail(f"Expected {_HEX[kind]} hexadecimal digits")
            self._at += _HEX[kind]
            return int(digits, 16)
        if kind not in _ESCAPES:
            self._fail(f"Unknown escape \\{kind}")
        return ord(_ESCAPES[kind])

    def _times(self, blanks: re.Pattern[str]) -> tuple[int, int | None] | None:
        char = self._peek()
        if char in ("*", "+", "?"):
            self._at += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        if char != "{":
            return None
        self._at += 1
        self._skip(blanks)
        least = int(self._match(_INT, "a number"))
        self._skip(blanks)
        most: int | None = least
        if self._peek() == ",":
            self._at += 1
            self._skip(blanks)
            most = int(self._match(_INT, "a number")) if self._peek().isdigit() else None
            self._skip(blanks)
        self._expect("}")
        if least > REPETITIONS_MAX or (most is not None and most < least):
            self._fail(f"at least {least} times is too often")
        return least, most if most is not None and most <= REPETITIONS_MAX else None

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self, blanks: re.Pattern[str]) -> None:
        found = blanks.match(self._text, self._at)
        self._at = found.end() if found else self._at

    def _found(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        found = pattern.match(self._text, self._at)
        if found is None:
            self._fail(f"Expected {what}")
        self._at = found.end()
        return found

    def _match(self, pattern: re.Pattern[str], what: str) -> str:
        return self._found(pattern, what)[0]

    def _expect(self, sign: str) -> None:
        if not self._text.startswith(sign, self._at):
            self._fail(f"Expected {sign!r}")
        self._at += len(sign)

    def _fail(self, reason: str) -> NoReturn:
        line = self._text.count("\n", 0, self._at) + 1
        raise GbnfError(f"{reason} in line {line}, before {self._text[self._at : self._at + 20]!r}")


def _class_of(ranges: list[tuple[int, int]], *, is_not: bool = False) -> str:
    """Return the regular expression of one character. Raises GbnfError where there is none."""
    parts: list[str] = []
    for low, high in ranges:
        low = _SURROGATES[1] + 1 if _SURROGATES[0] <= low <= _SURROGATES[1] else low
        high = _SURROGATES[0] - 1 if _SURROGATES[0] <= high <= _SURROGATES[1] else min(high, _CHAR_MAX)
        if low <= high:  # else it is never met
            parts.append(_code(low) if low == high else f"{_code(low)}-{_code(high)}")
    if not parts and not is_not:
        raise GbnfError("a range or an escape that no character is in")
    if len(parts) == 1 and "-" not in parts[0] and not is_not:
        return parts[0]
    return f"[{'^' * is_not}{''.join(parts)}]" if parts else _class_of([(0, _CHAR_MAX)])


@functools.lru_cache(4_096)
def _code(char: int) -> str:
    return chr(char) if chr(char).isalnum() or chr(char) in _PLAIN else f"\\x{{{char:x}}}"


def _within(node: _Node) -> Iterator[_Node]:
    """Yield a node and all nodes within, in their order."""
    left = [node]
    while left:
        node = left.pop()
        yield node
        left += reversed(_parts(node))


def _refs(node: _Node) -> Iterator[str]:
    """Yield the names of the rules that a node names."""
    return (each.name for each in _within(node) if isinstance(each, _Rule))


def _parts(node: _Node) -> tuple[_Node, ...]:
    if isinstance(node, _All | _Any):
        return node.parts
    return (node.part,) if isinstance(node, _Times) else ()


def _has_token(node: _Node) -> bool:
    return any(isinstance(each, _Token) for each in _within(node))


_ANY, _ALL, _TIMES, _ATOM = range(4)  # how closely what is written stands together
# As closely at least a part has to: of an expression, and outside of it.
_LEAST_IN_EXPRESSION = {_Any: _ANY, _All: _ALL, _Times: _ATOM}
_LEAST_IN_LARK = {_Any: _ANY, _All: _TIMES, _Times: _ATOM}


class _Text(NamedTuple):
    text: str
    closeness: int
    depth: int = 0  # brackets within brackets


def _around(written: _Text, least: int, brackets: str) -> _Text:
    """Return it as a part of something closer, in brackets where needed."""
    if written.closeness >= least:
        return written
    return _Text(f"{brackets}{written.text})", _ATOM, written.depth + 1)


def _written(rules: Mapping[str, _Node]) -> str:
    for node in rules.values():
        for name in _refs(node):
            if name not in rules:
                raise GbnfError(f"Rule '{name}' not found")
    if "root" not in rules:
        raise GbnfError("No 'root' rule found")
    return _Writer(rules).text()


class _Writer:
    def __init__(self, rules: Mapping[str, _Node]) -> None:
        self._rules = rules
        self._found: dict[int, tuple[_Node, _Text | None]] = {}  # expressions by the id of their node, which stays
        self._regular: dict[str, _Text | None] = {}  # as expressions; None: too much for one
        for name in _regular(rules):
            self._regular[name] = self._expression(rules[name])
        self._names: dict[str, str] = {}  # of rules, as Lark has them
        self._counts: dict[str, int] = {}  # of names that were to be the same
        self._lines: dict[str, str] = {}
        self._due: list[str] = []

    def text(self) -> str:
        """Return the grammar."""
        whole = self._regular.get("root")
        if whole is not None:
            return f"start: /{whole.text}/" if whole.text else 'start: ""'
        first = self._name("root")
        while self._due:
            name = self._due.pop()
            inside = None if name in self._regular else self._names[name]
            self._lines[self._names[name]] = self._lark(self._rules[name], inside).text
        if first != "start":
            self._lines["start"] = first
        return "\n".join(f"{name}: {line}" for name, line in self._lines.items())

    def _name(self, rule: str) -> str:
        if rule not in self._names:
            self._due.append(rule)
            plain = "start" if rule == "root" and rule not in self._regular else f"r_{rule.replace('-', '_').lower()}"
            self._names[rule] = self._new(plain.upper() if rule in self._regular else plain)
        return self._names[rule]

    def _new(self, name: str) -> str:
        """Return a name that nothing has, and keep it."""
        new, number = name, self._counts.get(name, 0)
        while new in self._counts:
            number += 1
            new = f"{name}_{number}"
        self._counts[name], self._counts[new] = number, 0
        return new

    def _is_regular(self, node: _Node) -> bool:
        return all(
            not isinstance(each, _Token) and (not isinstance(each, _Rule) or each.name in self._regular)
            for each in _within(node)
        )

    def _lark(self, node: _Node, rule: str | None) -> _Text:
        """Write a node of a rule, None: of what is regular."""
        if not any(isinstance(each, _Rule | _Token) for each in _within(node)):
            found = self._expression(node)
            if found is not None:
                return _Text(f"/{found.text}/" if found.text else '""', _ATOM)
        if isinstance(node, _Rule):
            return _Text(self._name(node.name), _ATOM)
        if rule is not None and self._is_regular(node):
            name = self._new(rule.upper())
            self._lines[name] = self._lark(node, None).text
            return _Text(name, _ATOM)
        if isinstance(node, _Token):
            return _Text(node.text, _ATOM)
        parts = self._joined(node) if rule is not None else _parts(node)
        written = [self._apart(self._lark(part, rule), _LEAST_IN_LARK[type(node)], rule) for part in parts]
        depth = max((part.depth for part in written), default=0)
        if isinstance(node, _Times):
            return _Text(written[0].text + node.sign, _TIMES, depth)
        if isinstance(node, _Any):
            return _Text(" | ".join(part.text for part in written), _ANY, depth)
        return _Text(" ".join(part.text for part in written), _ALL, depth)

    def _apart(self, written: _Text, least: int, rule: str | None) -> _Text:
        """Return it as a part of something closer: in brackets, or as a rule of its own, where needed."""
        if written.closeness >= least or written.depth < LARK_DEPTH_MAX:
            return _around(written, least, "(")
        name = self._new("PART" if rule is None else rule)
        self._lines[name] = written.text
        return _Text(name, _ATOM)

    def _joined(self, node: _Node) -> tuple[_Node, ...]:
        """Return the parts of a node with regular ones put together: neighbours, and all alternatives."""
        kind, joined = type(node), list[_Node]()
        regular: list[_Node] = []
        for part in _parts(node):
            if self._is_regular(part):
                regular.append(part)
            elif kind is _Any:
                joined.append(part)
            else:
                joined += [*_one(_All, regular), part]
                regular = []
        joined += _one(_Any if kind is _Any else _All, regular)
        return tuple(joined)

    def _expression(self, node: _Node) -> _Text | None:
        """Return a node as a regular expression; None: it is too long or too deep, or not regular."""
        if id(node) not in self._found:  # else a deep one is made anew for each node around it
            self._found[id(node)] = node, self._new_expression(node)
        return self._found[id(node)][1]

    def _new_expression(self, node: _Node) -> _Text | None:
        if isinstance(node, _Chars):
            return _Text(node.expression, _ATOM if node.is_one else _ALL)
        if isinstance(node, _Rule):
            return self._regular.get(node.name)
        if isinstance(node, _Token):
            return None
        least, texts, n_chars, depth = _LEAST_IN_EXPRESSION[type(node)], list[str](), 0, 0
        for part in _parts(node):
            found = self._expression(part)
            if found is None:
                return None
            found = _around(found, least, "(?:")
            texts.append(found.text)
            n_chars, depth = n_chars + len(found.text) + 1, max(depth, found.depth)
        if n_chars > EXPRESSION_CHARS_MAX or depth > EXPRESSION_DEPTH_MAX:
            return None
        if isinstance(node, _Times):
            return _Text(texts[0] + node.sign, _TIMES, depth)
        return _Text("|".join(texts), _ANY, depth) if isinstance(node, _Any) else _Text("".join(texts), _ALL, depth)


def _one(kind: type[_All | _Any], parts: list[_Node]) -> list[_Node]:
    return [parts[0] if len(parts) == 1 else kind(tuple(parts))] if parts else []


def _regular(rules: Mapping[str, _Node]) -> Iterator[str]:
    """Yield the rules without recursion and tokens, each behind those that it names."""
    left = {name: {*_refs(node)} for name, node in rules.items() if not _has_token(node)}
    users: dict[str, list[str]] = {}
    for name, refs in left.items():
        for ref in refs:
            users.setdefault(ref, []).append(name)
    ready = [name for name, refs in left.items() if not refs]
    while ready:
        name = ready.pop()
        yield name
        for user in users.get(name, ()):
            left[user].discard(name)
            if not left[user]:
                ready.append(user)
