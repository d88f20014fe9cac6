"""YAML text to plain values with the line of each: one document, YAML 1.2's core types, everything bounded.

PyYAML parses, but the types of scalars are decided here, because PyYAML follows YAML 1.1, where `off` and `no` are
false and 8:30 is a number. Editors and Kubernetes read the same file as YAML 1.2, and a manifest must mean one thing.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import yaml

TEXT_BYTES_MAX = 256 * 1024  # a manifest of 64 stages with every field takes a fifth
NODES_MAX = 20_000  # scalars, lists and mappings, aliases counted at every use: an anchor bomb ends here
DEPTH_MAX = 20  # the deepest field of a manifest is at 6
DIGITS_MAX = 40  # of a number; more is a mistake, and int() of many digits is slow

Path = tuple[str | int, ...]

_NULL = re.compile(r"|~|null|Null|NULL")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL_FLOAT = re.compile(r"[-+]?(\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN")

_STR_TAG, _MAP_TAG, _SEQ_TAG = ("tag:yaml.org,2002:" + kind for kind in ("str", "map", "seq"))


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Complaint:
    """One thing wrong with a text. Lines count from 1."""

    line: int
    message: str


class TextError(Exception):
    """A text that is not a usable YAML document; each complaint is complete in itself."""

    def __init__(self, *complaints: Complaint) -> None:
        super().__init__("; ".join(f"line {complaint.line}: {complaint.message}" for complaint in complaints))
        self.complaints = complaints


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """A parsed text."""

    value: Any
    """dict, list, str, int, float, bool or None."""
    lines: dict[Path, int]
    """Line of every value by its path; of a mapping's entry, the line of its key."""

    def line_of(self, path: Path) -> int:
        """Return the line of the value at `path`, or of the nearest enclosing value that the text has."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def read_document(data: bytes) -> Document:
    """Parse one YAML document. Raises only TextError, for any bytes."""
    if len(data) > TEXT_BYTES_MAX:
        raise TextError(Complaint(1, f"the file has {len(data)} bytes; a manifest may have at most {TEXT_BYTES_MAX}"))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TextError(Complaint(line, f"byte 0x{data[error.start]:02x} is not UTF-8")) from None
    builder = _Builder()
    value = builder.build(_compose(text), (), 0)
    if builder.complaints:
        raise TextError(*builder.complaints)
    return Document(value, builder.lines)


def is_string(plain: str) -> bool:
    """Return whether unquoted text is a string here; the writer of manifests quotes all other text."""
    return not any(kind.fullmatch(plain) for kind in (_NULL, _BOOL, _INT, _FLOAT, _SPECIAL_FLOAT))


class _Loader(yaml.BaseLoader):
    """Refuses deep nesting at the first bracket or indent too many.

    PyYAML looks at every open bracket again for each token, so its cost grows with the square of the depth.
    """

    def fetch_flow_collection_start(self, token_class: Any) -> None:
        """Take a `[` or `{`."""
        super().fetch_flow_collection_start(token_class)
        self._check(self.flow_level)

    def add_indent(self, column: int) -> bool:
        """Take a column; return whether a block begins there."""
        is_deeper = super().add_indent(column)
        self._check(len(self.indents))
        return is_deeper

    def _check(self, depth: int) -> None:
        if depth > DEPTH_MAX + 1:  # `_Builder` counts the document's own value as 0
            raise TextError(Complaint(self.line + 1, "values are nested too deeply"))


# What PyYAML says of the usual mistakes -> what to do.
_REMEDIES = {
    "found character '\\t' that cannot start any token": "a tab stands where a value begins; indent with spaces",
    "mapping values are not allowed here": "a key is too much in this line; a text with `: ` in it needs quotes",
    "found undefined alias": "a text that begins with * needs quotes",
}


def _plain(error: yaml.MarkedYAMLError) -> str:
    """Return what is wrong, in the words of this module where it knows some."""
    problem = str(error.problem)
    known = next((words for start, words in _REMEDIES.items() if problem.startswith(start)), "")
    return known or (f"{problem} {error.context}" if error.context else problem)


def _compose(text: str) -> yaml.Node:
    try:
        # The base loader keeps every scalar as text. Two documents are enough to know that there are too many.
        nodes = yaml.compose_all(text, Loader=_Loader)
        first = next(nodes, None)
        second = next(nodes, None) if first is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        raise TextError(Complaint(line, _one_line(f"not YAML: {_plain(error)}"))) from None
    except yaml.YAMLError as error:
        position = getattr(error, "position", 0)
        raise TextError(Complaint(text.count("\n", 0, position) + 1, _one_line(f"not YAML: {error}"))) from None
    except RecursionError:
        raise TextError(Complaint(1, "values are nested too deeply")) from None
    if first is None:
        raise TextError(Complaint(1, "the file is empty"))
    if second is not None:
        line = second.start_mark.line + 1
        raise TextError(Complaint(line, "a second YAML document starts here; write one manifest per file"))
    return first


def _one_line(message: str) -> str:
    return " ".join(message.split())


class _Builder:
    """Nodes to values. Collects complaints and continues, except where a bound ends it."""

    def __init__(self) -> None:
        self.complaints: list[Complaint] = []
        self.lines: dict[Path, int] = {}
        self._n_nodes = 0

    def build(self, node: yaml.Node, path: Path, depth: int) -> Any:
        """Return the node's value and note its line, unless its key has noted one. Raises TextError."""
        line = node.start_mark.line + 1
        self._n_nodes += 1
        if self._n_nodes > NODES_MAX:
            raise TextError(Complaint(line, f"more than {NODES_MAX} values; an anchor may repeat itself"))
        if depth > DEPTH_MAX:
            raise TextError(Complaint(line, "values are nested too deeply"))
        self.lines.setdefault(path, line)
        if isinstance(node, yaml.MappingNode) and node.tag == _MAP_TAG:
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode) and node.tag == _SEQ_TAG:
            return [self.build(item, (*path, index), depth + 1) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.tag == _STR_TAG:
            return self._scalar(node, line)
        self.complaints.append(Complaint(line, f"tag {_shortened(node.tag)} is not supported in a manifest"))
        return None

    def _mapping(self, node: yaml.MappingNode, path: Path, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.complaints.append(Complaint(line, "a key must be text"))
                continue
            key = str(key_node.value)
            if not _is_text(key):
                self.complaints.append(Complaint(line, _HALF_CHARACTER))
                continue
            if key in found:
                first = self.lines[(*path, key)]
                message = f"key {_shortened(key)!r} is given twice; first in line {first}"
                self.complaints.append(Complaint(line, message))
                continue
            self.lines[(*path, key)] = line
            found[key] = self.build(value_node, (*path, key), depth + 1)
        return found

    def _scalar(self, node: yaml.ScalarNode, line: int) -> Any:
        text = str(node.value)
        if not _is_text(text):
            self.complaints.append(Complaint(line, _HALF_CHARACTER))
            return None
        if node.style is not None:
            return text
        if _NULL.fullmatch(text):
            return None
        if _BOOL.fullmatch(text):
            return text.lower() == "true"
        if _SPECIAL_FLOAT.fullmatch(text):
            self.complaints.append(Complaint(line, f"{text} is not a number that a manifest can use"))
            return None
        if not _INT.fullmatch(text) and not _FLOAT.fullmatch(text):
            return text
        if len(text) > DIGITS_MAX:
            self.complaints.append(Complaint(line, f"{_shortened(text)} has too many digits"))
            return None
        return _number(text)


_HALF_CHARACTER = "an escape is half a character (a surrogate)"


def _is_text(text: str) -> bool:
    """Return whether UTF-8 can hold it: escapes in quotes can name lone surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _number(text: str) -> int | float:
    if text.startswith(("0o", "0x")):
        return int(text, 0)
    return int(text) if _INT.fullmatch(text) else float(text)


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
