"""Text of another process before a person or a log sees it: bounded, and nothing in it that a terminal obeys."""

from __future__ import annotations

import errno
import os
import ssl
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from relayline.wire.common import bounds

KEYS_MAX = 64  # of a map from names that another process sends; there are some twenty labels and reasons


def system_reason(error: BaseException) -> str:
    """Return why the system made no connection, in its own words; "" for errors that are not the system's.

    asyncio and aiohttp put addresses and objects into their texts. An error that wraps a system's error has it as
    `os_error`. A number below 0 is of the search for a name, which has its own words.
    """
    cause = getattr(error, "os_error", error)
    if not isinstance(cause, OSError) or isinstance(cause, ssl.SSLError) or not cause.errno:
        return ""
    return os.strerror(cause.errno) if cause.errno > 0 else cause.strerror or ""


def file_error_text(error: OSError) -> str:
    """Return what the system refused to do, and with which file, for a person."""
    where = f"{error.filename}: " if error.filename else ""
    is_in_the_way = isinstance(error, FileExistsError | NotADirectoryError)
    if is_in_the_way:
        return f"{where}it is a file; name a directory"
    if error.errno == errno.EMFILE:
        return f"{where}this process may open no more files; raise `ulimit -n`"
    return f"{where}{error.strerror or error}"


def printable(text: str, chars_max: int = bounds.PEER_TEXT_CHARS_MAX) -> str:
    """Return text as one line that is safe to print: long text cut, and control characters as backslash escapes.

    Control characters are all that Unicode does not call printable: escape sequences, line ends, marks of writing
    direction, invisible characters, halves of surrogate pairs.
    """
    n_more = len(text) - chars_max
    kept = text[:chars_max] if n_more > 0 else text
    if not kept.isprintable():
        kept = "".join([each if each.isprintable() else _escaped(each) for each in kept])
    return f"{kept}... ({n_more} more characters)" if n_more > 0 else kept


def not_text(path: object) -> str:
    """Return why a path cannot be text, as manifests and other processes need it, and what to do; empty if it can."""
    if not any("\ud800" <= char <= "\udfff" for char in str(path)):
        return ""
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8":
        return f"the name is not {encoding}, which this locale asks for; set LC_ALL=C.UTF-8"
    return "the name is not UTF-8; rename it"


def whole_number(text: str, digits_max: int) -> int | None:
    """Return the number that a text of digits alone is; None for any other text, and for more digits than these.

    `int` takes blanks, signs, underscores and the digits of all scripts, and raises above 4,300 digits.
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= digits_max else None


def plural(n: float, one: str, many: str = "") -> str:
    """Return the noun for `n` things: "stage" for 1, otherwise "stages", or `many` where that is another word."""
    return one if n == 1 else many or f"{one}s"


def counted(n: int, one: str, many: str = "") -> str:
    """Return `n` with its noun for a person: "1 stage", "1,024 tokens"."""
    return f"{n:,} {plural(n, one, many)}"


def duration_text(seconds: float) -> str:
    """Return a time for a person, in its two largest units: "45 s", "3 min 20 s", "2 h 5 min", "1 d 3 h"."""
    whole = round(seconds)
    for unit_s, unit, part_s, part in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit_s:
            return f"{whole // unit_s} {unit} {whole % unit_s // part_s} {part}"
    return f"{whole} s"


def layer_range(start: int, end: int) -> str:
    """Return the layers from `start` up to but not including `end` for a person: "3-5", and "7" for one alone."""
    return f"{start}-{end - 1}" if end - start > 1 else str(start)


def layer_ranges(edges: Iterable[Sequence[int]]) -> str:
    """Return the (first, end) of several stages for a person: "0-3, 4-7"."""
    return ", ".join(layer_range(start, end) for start, end in edges)


def named_layers(start: int, end: int) -> str:
    """Return `layer_range` with its noun: "layers 3-5", "layer 7"."""
    return f"layer{'s' if end - start > 1 else ''} {layer_range(start, end)}"


def named_stage(name: str) -> str:
    """Return a stage's name with its noun: "stage laptop", but "stage-1" where the name itself begins with it."""
    return name if name.startswith("stage") and name != "stage" else f"stage {name}"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def printable_values(value: Any) -> Any:
    """Return JSON-like data with every text in it, names of fields included, made printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable_values(key): printable_values(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [printable_values(each) for each in value]
    return value


def tidy(message: Message, chars_max: int = bounds.PEER_NAME_CHARS_MAX) -> None:
    """Make every text of a received message printable, in place: of it, of messages in it, and keys of its maps.

    Not for long lists of messages, which are walked through one by one.
    """
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_STRING and not field.is_repeated:
            if (plain := printable(value, chars_max)) != value:
                setattr(message, field.name, plain)
        elif field.message_type is None:
            continue
        elif field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["key"].type == FieldDescriptor.TYPE_STRING:
                _tidy_keys(value, chars_max)
        else:
            for each in value if field.is_repeated else (value,):
                tidy(each, chars_max)


def _tidy_keys(found: Any, chars_max: int) -> None:
    kept = {printable(key, chars_max): found[key] for key in sorted(found)[:KEYS_MAX]}
    if kept.keys() != set(found):
        found.clear()
        found.update(kept)
