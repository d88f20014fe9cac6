"""Parsers for the benches' command lines: numbers and comma-separated lists. Bad ones are refused in one line at the
start.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable


def number(text: str) -> int:
    """Return "8" as a number of at least 1. Raises argparse.ArgumentTypeError, which is shown with the flag."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    """Return "1,8,32" as numbers of at least 1. Raises argparse.ArgumentTypeError, which is shown with the flag."""
    parts = text.split(",")
    for part in parts:
        if not (part.isascii() and part.isdigit() and int(part)):
            raise argparse.ArgumentTypeError(f"{part!r} is not a number of at least 1; give a list such as 1,8,32")
    return tuple(map(int, parts))


def some_of(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a function that reads "a,b" as names, all of them known. It raises argparse.ArgumentTypeError."""
    names = tuple(known)

    def read(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        for name in found:
            if name not in names:
                raise argparse.ArgumentTypeError(f"there is no {name!r}; there are {', '.join(names)}")
        return found

    return read
