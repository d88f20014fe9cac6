"""Sizes in bytes as people write them: a number with or without a unit, such as 4194304, 4M, 4MiB or 1.5G. Pure.

As in GNU's tools, K, M, G and T are powers of 1,024, with or without iB; KB, MB, GB and TB are powers of 1,000.
"""

from __future__ import annotations

import re

# What ECMA 262 and Rust read too, since the manifest's JSON Schema publishes it.
SIZE = r"^[0-9]+(\.[0-9]+)?[ ]?([KkMmGgTtPp]([Ii]?[Bb]?)|[Bb])?$"
FORMS = "a number of bytes, or a size such as 4M or 1.5GiB"
UNITS = "KMGTP"
_SIZE = re.compile(SIZE, re.ASCII)
CHARS_MAX = 32


def read_size(text: str) -> int:
    """Return the bytes of a text. Raises ValueError, which says what to write instead."""
    text = text.strip()
    if len(text) > CHARS_MAX or _SIZE.match(text) is None:
        raise ValueError(f"is not {FORMS}")
    number = text.rstrip("KkMmGgTtPpIiBb ")
    unit = text[len(number) :].strip().upper()
    power = UNITS.find(unit[:1]) + 1 if unit not in ("", "B") else 0
    scale: int = (1_000 if unit.endswith("B") and "I" not in unit else 1_024) ** power
    whole, _, part = number.partition(".")
    n_bytes, rest = divmod(int(whole + part) * scale, int("1" + "0" * len(part)))
    if rest and not power:
        raise ValueError("is not a whole number of bytes")
    return n_bytes


def size_text(n_bytes: int) -> str:
    """Return a size with the largest unit that it has whole: 1PiB, 4MiB, 1000."""
    power = 0
    while n_bytes and n_bytes % 1_024 == 0 and power < len(UNITS):
        n_bytes //= 1_024
        power += 1
    return f"{n_bytes}{UNITS[power - 1]}iB" if power else str(n_bytes)
