"""Encoded images and audio: their numbers in a prompt, and which are kept for the next turn of a chat. Pure.

An encoded file is rows of the model's width. In the tokens of a prompt a number represents each row. The numbers are
made from the projector and the file's bytes: equal files have equal ones, in this process and any later one. So the
prefix cache, replays and stored prefixes need to know nothing of images and audio.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import weakref
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from relayline.coordinator.media.segments import Grid, Segment, n_rows_in
from relayline.coordinator.sessions.generation import ROW_TOKEN_MIN, ImageRows
from relayline.wire.common.bounds import MEDIA_ROWS_BYTES_MAX, MEDIA_ROWS_KEPT_BYTES
from relayline.wire.common.errors import OverloadedError

_RETRY_AFTER_S = 5
LAYOUTS_MAX = 1_024  # of files that were counted and not kept


class Encoded(NamedTuple):
    """One image or audio file: the tokens around its rows, and the rows."""

    segments: list[Segment]
    rows: npt.NDArray[np.float32]  # [n, n_embd]
    numbers: list[int]  # one for each row
    are_mutual: bool  # its rows attend to each other


class Filled(NamedTuple):
    """A prompt with its media in it."""

    tokens: array[int]
    images: tuple[ImageRows, ...]


class EncodedMedia:
    """Encoded media by their keys: the latest ones, and how many bytes of rows all requests hold."""

    def __init__(self, kept_bytes: int = MEDIA_ROWS_KEPT_BYTES, bytes_max: int = MEDIA_ROWS_BYTES_MAX) -> None:
        """`kept_bytes` of rows are kept when no request has them; requests and these hold at most `bytes_max`."""
        self._kept_bytes, self._bytes_max = kept_bytes, bytes_max
        self._kept: collections.OrderedDict[bytes, Encoded] = collections.OrderedDict()
        self._layouts: collections.OrderedDict[bytes, list[Segment]] = collections.OrderedDict()
        self._alive: dict[int, int] = {}  # bytes of all rows that something refers to
        self._numbers = itertools.count()

    @property
    def bytes_alive(self) -> int:
        """Bytes of rows that are kept, or that some request holds."""
        return sum(list(self._alive.values()))

    def get(self, key: bytes) -> Encoded | None:
        """Return a file that is kept."""
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def layout(self, key: bytes) -> list[Segment] | None:
        """Return the segments of a file that was counted or encoded lately."""
        return self._layouts.get(key)

    def note(self, key: bytes, segments: list[Segment]) -> None:
        """Remember the segments of a file."""
        self._layouts[key] = segments
        self._layouts.move_to_end(key)
        while len(self._layouts) > LAYOUTS_MAX:
            self._layouts.popitem(last=False)

    def check_room(self, n_bytes: int) -> None:
        """Raise OverloadedError where requests hold too many rows for as many bytes more."""
        if self.bytes_alive + n_bytes > self._bytes_max:
            raise OverloadedError("too many images and audio files are being answered; try again", _RETRY_AFTER_S)

    def put(
        self, key: bytes, segments: list[Segment], rows: npt.NDArray[np.float32], *, are_mutual: bool = False
    ) -> Encoded:
        """Keep a file as the latest one; those longest unused are given up for it. `rows` owns its memory.

        `are_mutual`: they attend to each other.
        """
        number = next(self._numbers)
        self._alive[number] = rows.nbytes
        weakref.finalize(rows, self._alive.pop, number, None).atexit = False  # views of them keep them alive
        encoded = self._kept[key] = Encoded(segments, rows, row_numbers(key, len(rows)), are_mutual)
        while len(self._kept) > 1 and sum(each.rows.nbytes for each in self._kept.values()) > self._kept_bytes:
            self._kept.popitem(last=False)
        return encoded


def row_numbers(key: bytes, n_rows: int) -> list[int]:
    """Return the number that represents each row of a file: from ROW_TOKEN_MIN to twice that.

    Those of two files are alike at one place once in a thousand million; a prefix that is copied ends there.
    """
    drawn = np.frombuffer(hashlib.shake_256(key).digest(4 * n_rows), "<u4")
    numbers: list[int] = (drawn % ROW_TOKEN_MIN + ROW_TOKEN_MIN).tolist()
    return numbers


def n_tokens_of(segments: Sequence[Segment]) -> int:
    """Return how many tokens of a prompt a file takes."""
    return sum(len(each) if isinstance(each, list) else n_rows_in(each) for each in segments)


def put_in(tokens: Sequence[int], media: Sequence[Encoded]) -> Filled:
    """Return a prompt with its media in it. In `tokens`, -1 represents the first file, -2 the second."""
    filled, rows = array("i"), []
    for token in tokens:
        if token >= 0:
            filled.append(token)
            continue
        file, at = media[-1 - token], 0
        for segment in file.segments:
            if isinstance(segment, list):
                filled.extend(segment)
                continue
            grid = (segment.width, segment.height) if isinstance(segment, Grid) else None
            end = at + n_rows_in(segment)
            rows.append(ImageRows(len(filled), file.rows[at:end], file.are_mutual, grid))
            filled.extend(file.numbers[at:end])
            at = end
    return Filled(filled, tuple(rows))
