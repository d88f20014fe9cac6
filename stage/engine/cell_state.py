"""A lane's KV cells as one array that is filled, and read, some cells at a time. Pure.

llama.cpp gives or takes the state of a lane in one call, during which no step runs. In this form a state is a head,
then blocks of BLOCK_TOKENS positions. In a block the cells of each tensor stand one after the other: the keys of a
layer, its values, the keys of the next one. So any range of positions has a fixed place in it, and a state is filled
from its start to its end, so no piece touches many new pages. Where layers with a sliding window keep the window's
cells alone, only the other layers' cells are there. The windows follow (`stage.engine.lane_windows`).

It holds no more than that. Lanes with recurrent states or images have llama.cpp's own form (see
`stage.engine.saved_lanes`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from relayline.stage.engine.fresh_memory import small_pages
from relayline.stage.engine.lane_windows import LaneWindows, Moves
from relayline.stage.engine.layer_cells import Form, Tensor, packed
from relayline.wire.common.errors import NativeError

Bytes = npt.NDArray[np.uint8]

CELLS, CELLS_AND_WINDOWS = 3, 4
"""The first number of such a state, which tells it from others."""
BLOCK_TOKENS = 64
_HEAD_BYTES = 4 * 8  # form, tokens, hash of the tensors' forms, bytes of the windows


@dataclasses.dataclass(frozen=True, slots=True)
class CellState:
    """A state, whole or in the making."""

    data: Bytes
    n_tokens: int
    tensors: tuple[Tensor, ...]
    windows: LaneWindows | None = None
    """Of a stored state: views of its end."""

    @classmethod
    def empty(cls, forms: Sequence[Form], n_tokens: int, windows: LaneWindows | None = None) -> tuple[CellState, Moves]:
        """Return one whose cells are to be filled in, and the moves that fill in the windows. Raises OSError."""
        n_bytes = windows.n_bytes if windows is not None else 0
        end = _HEAD_BYTES + n_tokens * bytes_of(forms)
        data = small_pages(end + n_bytes)
        form = CELLS if windows is None else CELLS_AND_WINDOWS
        data[:_HEAD_BYTES].view(np.int64)[:] = (form, n_tokens, signature(forms), n_bytes)
        moves = windows.stored_in(data[end:]) if windows is not None else Moves()
        return cls(data, n_tokens, tensors_of(forms)), moves

    @classmethod
    def read(cls, data: Bytes, forms: Sequence[Form], *, has_windows: bool = False) -> CellState:
        """Return a stored one. Raises NativeError where it is not of an engine with these forms, or not whole.

        has_windows: the engine keeps windows' cells alone.
        """
        if data.nbytes < _HEAD_BYTES:
            raise NativeError(f"{data.nbytes} bytes are not the cells of a lane")
        form, n_tokens, hashed, n_bytes = data[:_HEAD_BYTES].view(np.int64).tolist()
        if form != (CELLS_AND_WINDOWS if has_windows else CELLS) or hashed != signature(forms):
            raise NativeError("the cells of a lane are of another engine")
        end = _HEAD_BYTES + n_tokens * bytes_of(forms)
        if n_tokens <= 0 or data.nbytes != end + n_bytes or (not has_windows and n_bytes):
            raise NativeError(f"{data.nbytes} bytes are not the cells of {n_tokens} tokens")
        windows = LaneWindows.read(data[end:], n_tokens) if has_windows else None
        return cls(data, n_tokens, tensors_of(forms), windows)

    def spans(self, first: int, end: int) -> Iterator[tuple[int, int, list[Bytes]]]:
        """Yield the parts of [first:end) block by block: their first position and end, and a view of each tensor's
        cells, [n_groups, positions, n_bytes].
        """
        while first < end:
            block = first - first % BLOCK_TOKENS
            size = min(BLOCK_TOKENS, self.n_tokens - block)
            until = min(end, block + size)
            yield first, until, [view[:, first - block : until - block] for view in self._block(block, size)]
            first = until

    def _block(self, block: int, size: int) -> Iterator[Bytes]:
        at = _HEAD_BYTES + block * sum(tensor.cell_bytes for tensor in self.tensors)
        for tensor in self.tensors:
            after = at + size * tensor.cell_bytes
            yield self.data[at:after].reshape(tensor.n_groups, size, tensor.n_bytes)
            at = after


class Pieces(Protocol):
    """One way to copy lanes in pieces. Positions are a lane's rows, counted from 0."""

    forms: tuple[Form, ...]
    piece_tokens: int
    """How many tokens one piece should have."""
    copies: bool
    """Whether one lane is copied to another in pieces; otherwise that is done at once, and costs little."""
    window_positions: int
    """How many positions the windows have that lanes keep besides their cells; 0: none are."""

    @property
    def token_ns(self) -> float:
        """Time in which one token is put back, as measured; 0 before the first piece."""

    def begin(self, lane: int, n_tokens: int) -> int | None:
        """Keep a lane's first tokens readable; returns what to read them by, None where too many are kept already."""

    def read(self, source: int, into: CellState, first: int, end: int) -> None:
        """Copy positions [first:end). Those before may then be overwritten. Raises NativeError."""

    def end(self, source: int) -> None:
        """Nothing more is read from it."""

    def write(self, lane: int, state: CellState, first: int, end: int, total: int) -> None:
        """Append positions [first:end), of `total` in the end, to a lane that holds those before. Raises
        RelaylineError.
        """

    def copy(self, source: int, target: int, first: int, end: int, total: int) -> None:
        """Append positions [first:end) of one lane to another. Raises RelaylineError."""

    def window_bytes(self, n_tokens: int) -> int:
        """Return about how many bytes the windows of a lane with so many tokens take. Any thread."""

    def windows(self, lane: int, n_tokens: int) -> LaneWindows | None:
        """Return the windows of a lane's first tokens; None where lanes have none.

        Raises PositionGapError where the lane does not have that window any more, and NativeError.
        """

    def put_windows(self, lane: int, windows: LaneWindows, n_tokens: int) -> None:
        """Let a lane that was given n_tokens cells have its windows, too: it can go on then.

        Raises RelaylineError, and the lane is empty, where it cannot.
        """


def is_cells(data: Bytes) -> bool:
    """Return whether a stored state has this form."""
    return data.nbytes >= 8 and int(data[:8].view(np.int64)[0]) in (CELLS, CELLS_AND_WINDOWS)


def bytes_of(forms: Sequence[Form]) -> int:
    """Return the bytes of one token in all tensors."""
    return sum(tensor.cell_bytes for tensor in tensors_of(forms))


def signature(forms: Sequence[Form]) -> int:
    """Return a hash of the forms: cells in another form look alike."""
    return xxhash.xxh3_64_intdigest(b"|".join(map(packed, forms))) >> 1


def tensors_of(forms: Sequence[Form]) -> tuple[Tensor, ...]:
    """Return the tensors of all layers, in order."""
    return tuple(tensor for form in forms for tensor in form)
