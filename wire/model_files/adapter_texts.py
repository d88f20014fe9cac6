"""Parses the setting of LoRA adapters: files with names and scales. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ADAPTERS_MAX = 16  # in one pipeline: each takes memory on every stage
SCALE_MAX = 1_000.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class AdapterText(NamedTuple):
    """One adapter as a user names it."""

    name: str
    """The model's name in requests that want it; empty: every request has it."""
    path: str
    scale: float = 1.0


def read_adapters(text: str) -> tuple[AdapterText, ...]:
    """Return the adapters of a list with commas: each FILE, NAME=FILE, FILE:SCALE or NAME=FILE:SCALE.

    Raises ValueError.
    """
    adapters = tuple(_read_one(part.strip()) for part in text.split(","))
    if len(adapters) > ADAPTERS_MAX:
        raise ValueError(f"{len(adapters)} adapters; at most {ADAPTERS_MAX} can be served")
    names = [adapter.name for adapter in adapters if adapter.name]
    if len(set(names)) < len(names):
        raise ValueError("two adapters have one name")
    return adapters


def _read_one(part: str) -> AdapterText:
    name, path = "", part
    head, equals, rest = part.partition("=")
    if equals and "/" not in head:
        name, path = head.strip(), rest.strip()
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name; use letters, digits, dots, hyphens and underscores")
    before, colon, after = path.rpartition(":")
    scale = 1.0
    if colon and (stated := _number(after)) is not None:
        path, scale = before, stated
        if not math.isfinite(scale) or not 0 < abs(scale) <= SCALE_MAX:
            raise ValueError(f"the scale {after} is not a number from -{SCALE_MAX:g} to {SCALE_MAX:g}, without 0")
    if not path:
        raise ValueError("give files separated by commas, such as style.gguf or sql=sql.gguf:0.8")
    return AdapterText(name, path, scale)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def text_of(adapters: tuple[AdapterText, ...]) -> str:
    """Return the setting's text; `read_adapters` is the way back. Raises ValueError for a path that it cannot hold."""
    for each in adapters:
        if "," in each.path:
            raise ValueError(f"{each.path} has a comma, which separates adapters; move or link the file")
    return ",".join(f"{f'{each.name}=' if each.name else ''}{each.path}:{each.scale!r}" for each in adapters)


def placed(text: str, resolve: Callable[[str], Path]) -> str:
    """Return a setting's text with the paths that `resolve` makes of its own. Raises ValueError as `text_of`."""
    return text_of(tuple(each._replace(path=str(resolve(each.path))) for each in read_adapters(text)))
