"""Copies of what one lane's sliding windows hold: at its end, and at its checkpoints. Pure.

Where layers with a window keep the window's cells alone, a cell's place says nothing about its position. llama.cpp
gives and takes these cells in one call. So a lane that is copied in pieces (`stage.engine.lane_pieces`) has them as
arrays beside its other cells. Where such arrays are copied, that is done in pieces here.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from relayline.stage.engine.fresh_memory import small_pages
from relayline.wire.common.checkpoints import CHECKPOINTS_PER_LANE_MAX
from relayline.wire.common.errors import NativeError

Bytes = npt.NDArray[np.uint8]
Window = tuple[int, Bytes]
"""The tokens that a lane has where this is its window, and llama.cpp's copy of it."""

MOVE_BYTES = 1 << 19  # copied at once: a fraction of a millisecond
_NUMBERS = 3  # checkpoints, tokens at the end, bytes of the window there: 0 if the last checkpoint is that
_MARKS_MAX = CHECKPOINTS_PER_LANE_MAX + 1


class Moves:
    """Copies between arrays, to be made piece by piece."""

    def __init__(self, pairs: Sequence[tuple[Bytes, Bytes]] = ()) -> None:
        """pairs: what is written, and what it is read from, of the same size."""
        self._pieces = [(*pair, at) for pair in pairs for at in range(0, pair[0].nbytes, MOVE_BYTES)]

    def __len__(self) -> int:
        return len(self._pieces)

    def make(self, number: int) -> None:
        """Copy one piece, counted from 0."""
        target, source, at = self._pieces[number]
        target[at : at + MOVE_BYTES] = source[at : at + MOVE_BYTES]


@dataclasses.dataclass(frozen=True, slots=True)
class LaneWindows:
    """The windows of one lane."""

    checkpoints: tuple[Window, ...]
    """Those at its checkpoints, ascending."""
    end: Window
    """The one at its end. It may be the last checkpoint's."""

    def at(self, n_tokens: int, n_positions: int) -> Bytes | None:
        """Return what holds the window of the lane's first n_tokens; None where it is gone.

        n_positions: of a window, with a row's own. llama.cpp's copy has one position more than the next row reads.
        """
        for end, window in self.checkpoints:
            if end == n_tokens:
                return window
        return self.end[1] if reaches(self.end[0], n_tokens, n_positions) else None

    @property
    def _ends_at_checkpoint(self) -> bool:
        return bool(self.checkpoints) and self.checkpoints[-1][0] == self.end[0]

    @property
    def _parts(self) -> list[Window]:
        return [*self.checkpoints, *([] if self._ends_at_checkpoint else [self.end])]

    @property
    def n_bytes(self) -> int:
        """Bytes that `stored_in` needs."""
        return 8 * (_NUMBERS + 2 * len(self.checkpoints)) + sum(window.nbytes for _, window in self._parts)

    def stored_in(self, data: Bytes) -> Moves:
        """Write the head of a stored form into data, u8 [n_bytes]; returns the moves that write the rest."""
        end_bytes = 0 if self._ends_at_checkpoint else self.end[1].nbytes
        marks = [number for end, window in self.checkpoints for number in (end, window.nbytes)]
        head = np.array([len(self.checkpoints), self.end[0], end_bytes, *marks], np.int64).view(np.uint8)
        data[: head.nbytes] = head
        pairs, at = [], head.nbytes
        for _, window in self._parts:
            pairs.append((data[at : at + window.nbytes], window))
            at += window.nbytes
        return Moves(pairs)

    @classmethod
    def read(cls, data: Bytes, n_tokens: int) -> LaneWindows:
        """Return views of what was stored for a lane of n_tokens. Raises NativeError where it is not whole."""
        refused = NativeError(f"{data.nbytes} bytes are not the windows of a lane of {n_tokens} tokens")
        if data.nbytes < 8 * _NUMBERS:
            raise refused
        n_checkpoints, end, end_bytes = data[: 8 * _NUMBERS].view(np.int64).tolist()
        at = 8 * (_NUMBERS + 2 * n_checkpoints)
        if not 0 <= n_checkpoints < _MARKS_MAX or end != n_tokens or end_bytes < 0 or at > data.nbytes:
            raise refused
        numbers = data[8 * _NUMBERS : at].view(np.int64).tolist()
        marks = [(0, 0), *zip(numbers[::2], numbers[1::2], strict=True)]
        if end_bytes:
            marks.append((end, end_bytes))
        is_ascending = all(before < after for (before, _), (after, _) in itertools.pairwise(marks))
        sizes = [size for _, size in marks[1:]]
        if not is_ascending or marks[-1][0] != end or min(sizes) <= 0 or at + sum(sizes) != data.nbytes:
            raise refused
        windows = []
        for position, size in marks[1:]:
            windows.append((position, data[at : at + size]))
            at += size
        return cls(tuple(windows[:n_checkpoints]), windows[-1])

    def taken_out(self, n_tokens: int) -> tuple[LaneWindows, Moves]:
        """Return the windows with those checkpoints, up to n_tokens, that are to outlive this memory, and the moves
        that fill these in. Raises OSError.
        """
        kept = [(end, small_pages(window.nbytes)) for end, window in self.checkpoints if end <= n_tokens]
        pairs = [(copy, window) for (_, copy), (_, window) in zip(kept, self.checkpoints, strict=False)]
        return LaneWindows(tuple(kept), self.end), Moves(pairs)


def reaches(end: int, n_tokens: int, n_positions: int) -> bool:
    """Return whether llama.cpp's copy of the window at `end` has all that a row at n_tokens reads.

    Of a lane that ends at `end` it has the last n_positions.
    """
    return n_tokens <= end and (end - n_tokens <= 1 or end <= n_positions)
