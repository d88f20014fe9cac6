"""Marks of stored prefixes: keys of their beginnings, for coordinators that do not know their tokens. Pure.

The key of an entire prefix finds it only for a prompt that begins with all of it. A mark is the key of its first
tokens, up to a place where a later prompt may stop agreeing with it. Such places are the ends of a chat's turns, and
others at a distance that grows with the prefix. Where stages can rewind to checkpoints alone, these are the places.
Stages keep the marks of each prefix as a note (`note_of`), and tell them to a coordinator that comes later. It hashes a
prompt once, at the places of all marks, and so finds the longest beginning that is stored (`MarkIndex`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator

import xxhash

from relayline.wire.common.bounds import NOTE_BYTES_MAX, NOTES_BYTES_MAX

GRID_TOKENS = 64  # reading again half of so many takes about as long as a step
GRID_MARKS_MAX = 256  # of a longer prefix only every second, fourth... is marked
PLACES_MAX = 16  # further marks of one prefix
MARKS_MAX = NOTES_BYTES_MAX // 12  # of all prefixes; a stage keeps no more
_HEAD = struct.Struct("<4sHH")  # form, whether the places are checkpoints, number of marks
_FORM = b"mrk1"
_SUM = struct.Struct("<Q")  # xxh3-64 of everything before it
_KEY_MASK = (1 << 63) - 1

assert _HEAD.size + 12 * (GRID_MARKS_MAX + PLACES_MAX) + _SUM.size <= NOTE_BYTES_MAX


@dataclasses.dataclass(frozen=True, slots=True)
class Marks:
    """The marks of one prefix."""

    places: array[int]
    """u32, ascending: of how many tokens each is the key."""
    keys: array[int]
    """u64, as many."""
    are_checkpoints: bool = False
    """Whether stages that cannot rewind to any place can come back to these."""


def digest_of(rounding: str) -> hashlib.blake2b:
    """Return the hash of no tokens, in which clients cannot construct collisions. rounding: see `TierFacts`."""
    salt = hashlib.blake2b(rounding.encode(), digest_size=hashlib.blake2b.SALT_SIZE).digest()
    return hashlib.blake2b(digest_size=8, person=b"relayline prefix", salt=salt)


def key_of_digest(digest: hashlib.blake2b) -> int:
    """Return the key of the tokens that were hashed: 63 bits."""
    return int.from_bytes(digest.digest(), "little") & _KEY_MASK


def keys_at(tokens: array[int], places: Iterable[int], rounding: str) -> Iterator[tuple[int, int]]:
    """Yield each of these ascending places, and the key of the tokens before it."""
    digest, at, view = digest_of(rounding), 0, memoryview(tokens)
    for place in places:
        digest.update(view[at:place])
        at = place
        yield place, key_of_digest(digest)


def marks_of(tokens: array[int], rounding: str, places: Iterable[int], *, are_checkpoints: bool) -> Marks:
    """Return the marks of a prefix at these places, and, unless these are checkpoints, all along it.

    The end needs none: the key of the prefix is its.
    """
    chosen = {place for place in list(places)[-PLACES_MAX:] if 0 < place < len(tokens)}
    if not are_checkpoints:
        step = GRID_TOKENS
        while len(tokens) > step * GRID_MARKS_MAX:
            step *= 2
        chosen.update(range(step, len(tokens), step))
    marks = Marks(array("I"), array("Q"), are_checkpoints)
    for place, key in keys_at(tokens, sorted(chosen), rounding):
        marks.places.append(place)
        marks.keys.append(key)
    return marks


def note_of(marks: Marks) -> bytes:
    """Return marks as bytes that a stage keeps: little endian, at most NOTE_BYTES_MAX."""
    data = _HEAD.pack(_FORM, marks.are_checkpoints, len(marks.places)) + marks.places.tobytes() + marks.keys.tobytes()
    return data + _SUM.pack(xxhash.xxh3_64_intdigest(data))


def marks_in(note: bytes) -> Marks | None:
    """Return the marks of a note; None where it is another form, or damaged."""
    if len(note) < _HEAD.size + _SUM.size:
        return None
    form, are_checkpoints, n_marks = _HEAD.unpack_from(note)
    end = _HEAD.size + 12 * n_marks
    if form != _FORM or end + _SUM.size != len(note):
        return None
    if _SUM.unpack_from(note, end)[0] != xxhash.xxh3_64_intdigest(note[:end]):
        return None
    middle = _HEAD.size + 4 * n_marks
    return Marks(array("I", note[_HEAD.size : middle]), array("Q", note[middle:end]), bool(are_checkpoints))


class MarkIndex:
    """The marks of all prefixes whose tokens are not known, by key."""

    def __init__(self) -> None:
        self._owners: dict[int, list[int]] = {}  # key of a beginning -> keys of the prefixes that have it
        self._places: list[int] = []
        self._known: set[int] = set()
        self._gap = self._n_marks = 0  # the widest between two marks of a prefix

    def add(self, prefix: int, marks: Marks) -> bool:
        """Add the marks of a prefix; the one added last is preferred. False if there is no room for them."""
        if self._n_marks + len(marks.places) > MARKS_MAX:
            return False
        self._n_marks += len(marks.places)
        before = 0
        for place, key in zip(marks.places, marks.keys, strict=True):
            self._owners.setdefault(key, []).append(prefix)
            self._gap, before = max(self._gap, place - before), place
        self._known.update(marks.places)
        return True

    def longest(
        self, tokens: array[int], n_least: int, rounding: str, is_there: Callable[[int], bool]
    ) -> tuple[int | None, int]:
        """Return a prefix that shares more than n_least tokens with a prompt, and how many; else None.

        It is the longest of the beginnings that have a mark. `is_there` says whether a prefix still is.
        """
        if len(self._places) != len(self._known):
            self._places = sorted(self._known)
        best, n_best, n_matched = None, n_least, 0
        for place, key in keys_at(tokens, self._places, rounding):
            if place > len(tokens) or place - n_matched > self._gap:
                break
            owners = self._owners.get(key)
            if owners is None:
                continue
            n_matched = place
            if place > n_best and (owner := next(filter(is_there, reversed(owners)), None)) is not None:
                best, n_best = owner, place
        return best, n_best
