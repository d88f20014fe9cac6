"""Finds the special tokens of a text as llama.cpp does, but in time linear in the text.

llama.cpp looks for its special tokens one after another, the longest first, in the text left over by earlier ones. It
walks through all pieces for each one found, which is quadratic: 64 KiB of `<s>` take it half a second, 16 MiB hours.
Here an array as long as the text marks the bytes already taken. The result is the same:
`tests/coordinator/text/test_special_tokens.py` compares it with llama.cpp itself. Pure.
"""

from __future__ import annotations

import dataclasses
import graphlib
from collections.abc import Callable, Iterable, Iterator, Sequence

_BLANKS = frozenset(b" \t\n\v\f\r")  # C's isspace
_PREFIX_BYTES = 4
_TAKEN = b"\x01"

Part = bytes | int  # text between special tokens, or a token


@dataclasses.dataclass(frozen=True, slots=True)
class Special:
    """One special token of a vocabulary."""

    token: int
    text: bytes  # at least one byte
    is_control: bool = True  # plain text where special tokens are not to be read
    takes_left: bool = False  # blanks before it belong to it
    takes_right: bool = False  # blanks behind it belong to it


class TooManyError(Exception):
    """The text has more special tokens than were allowed."""


class SpecialTokens:
    """The special tokens of one vocabulary, in the order in which llama.cpp looks for them."""

    def __init__(self, specials: Iterable[Special], encode: Callable[[bytes], Sequence[int]]) -> None:
        """`encode` is llama.cpp's own tokenisation of a short text: it decides between tokens of the same length."""
        by_length: dict[int, list[Special]] = {}
        for special in specials:
            by_length.setdefault(len(special.text), []).append(special)
        ordered = [each for length in sorted(by_length, reverse=True) for each in _in_order(by_length[length], encode)]
        by_prefix: dict[bytes, list[tuple[int, Special]]] = {}
        for rank, special in enumerate(ordered):
            by_prefix.setdefault(special.text[:_PREFIX_BYTES], []).append((rank, special))
        self._by_prefix = by_prefix

    def split(self, raw: bytes, *, parse_special: bool, n_max: int) -> Iterator[Part]:
        """Yield the parts of a text in order; those of text hold no special token.

        Raises TooManyError as soon as more than `n_max` special tokens are found.
        """
        candidates = sorted(
            ((rank, special) for prefix, some in self._by_prefix.items() if prefix in raw for rank, special in some),
            key=lambda each: each[0],
        )
        found: list[tuple[int, int, int]] = []  # start, end, token; blanks that belong to it included
        taken = bytearray(len(raw) if candidates else 0)
        for _, special in candidates:
            if parse_special or not special.is_control:
                _take(raw, special, taken, found, n_max)
        found.sort()
        at = 0
        for start, end, token in found:
            if at < start:
                yield raw[at:start]
            yield token
            at = end
        if at < len(raw):
            yield raw[at:]


def _take(raw: bytes, special: Special, taken: bytearray, found: list[tuple[int, int, int]], n_max: int) -> None:
    """Mark all places of one special token that are free, from left to right."""
    text, length, size = special.text, len(special.text), len(raw)
    at = raw.find(text)
    while at >= 0:
        last = taken.rfind(_TAKEN, at, at + length)
        if last >= 0:
            at = raw.find(text, last + 1)
            continue
        start, end = at, at + length
        while special.takes_left and start > 0 and not taken[start - 1] and raw[start - 1] in _BLANKS:
            start -= 1
        while special.takes_right and end < size and not taken[end] and raw[end] in _BLANKS:
            end += 1
        taken[start:end] = _TAKEN * (end - start)
        found.append((start, end, special.token))
        if len(found) > n_max:
            raise TooManyError
        at = raw.find(text, end)


def _in_order(specials: list[Special], encode: Callable[[bytes], Sequence[int]]) -> Iterable[Special]:
    """Return specials of one length in llama.cpp's order, as far as that shows: where the text of two may overlap.

    It sorts by length only, so that the order of the rest is chance. It is asked which of the two it finds first.
    """
    length = len(specials[0].text)
    before: dict[int, set[int]] = {at: set() for at in range(len(specials))}
    for n_shared in range(1, length):
        begins: dict[bytes, list[int]] = {}
        for at, special in enumerate(specials):
            begins.setdefault(special.text[:n_shared], []).append(at)
        for left, special in enumerate(specials):
            for right in begins.get(special.text[length - n_shared :], ()):
                if left != right and right not in before[left] and left not in before[right]:
                    ids = encode(special.text + specials[right].text[n_shared:])
                    is_left_first = bool(ids) and ids[0] == special.token
                    before[right if is_left_first else left].add(left if is_left_first else right)
    if not any(before.values()):
        return specials
    try:
        order = [*graphlib.TopologicalSorter(before).static_order()]
    except graphlib.CycleError:  # longer tokens stood in the way of an answer
        return specials
    return [specials[at] for at in order]
