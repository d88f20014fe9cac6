"""A lane's KV cells as one array that is filled, and read, some cells at a time. Pure.

llama.cpp gives or takes the state of a lane in one call, during which no step runs. In this form a state is a head,
then blocks of BLOCK_TOKENS positions. In a block the cells of each tensor stand one after the other: the keys of a
layer, its values, the keys of the next one. So any range of positions has a fixed place in it, and a state is filled
from its start to its end, so no piece touches many new pages.

It holds no more than cells. Lanes with recurrent states or images have llama.cpp's own form (see
`stage.engine.saved_lanes`).
"""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from relayline.stage.engine.layer_cells import Form, Tensor, packed
from relayline.wire.common.errors import NativeError

Bytes = npt.NDArray[np.uint8]

CELLS = 3
"""The first number of such a state, which tells it from others."""
BLOCK_TOKENS = 64
_HEAD_NUMBERS = 4  # form, tokens, hash of the tensors' forms, and a spare one


@dataclasses.dataclass(frozen=True, slots=True)
class CellState:
    """A state, whole or in the making."""

    data: Bytes
    n_tokens: int
    tensors: tuple[Tensor, ...]

    @classmethod
    def empty(cls, forms: Sequence[Form], n_tokens: int) -> CellState:
        """Return one whose cells are to be filled in."""
        size = _HEAD_NUMBERS * 8 + n_tokens * bytes_of(forms)
        # Small pages: numpy asks for huge ones, and a fresh huge page took up to 7 ms, a piece of small ones 1 to 2.
        data = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        data[: _HEAD_NUMBERS * 8].view(np.int64)[:] = (CELLS, n_tokens, signature(forms), 0)
        return cls(data, n_tokens, tensors_of(forms))

    @classmethod
    def read(cls, data: Bytes, forms: Sequence[Form]) -> CellState:
        """Return a stored one. Raises NativeError where it is not of an engine with these forms, or not whole."""
        if data.nbytes < _HEAD_NUMBERS * 8:
            raise NativeError(f"{data.nbytes} bytes are not the cells of a lane")
        form, n_tokens, hashed, _ = data[: _HEAD_NUMBERS * 8].view(np.int64).tolist()
        if form != CELLS or hashed != signature(forms):
            raise NativeError("the cells of a lane are of another engine")
        if n_tokens <= 0 or data.nbytes != _HEAD_NUMBERS * 8 + n_tokens * bytes_of(forms):
            raise NativeError(f"{data.nbytes} bytes are not the cells of {n_tokens} tokens")
        return cls(data, n_tokens, tensors_of(forms))

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
        at = _HEAD_NUMBERS * 8 + block * sum(tensor.cell_bytes for tensor in self.tensors)
        for tensor in self.tensors:
            after = at + size * tensor.cell_bytes
            yield self.data[at:after].reshape(tensor.n_groups, size, tensor.n_bytes)
            at = after


class Pieces(Protocol):
    """One way to copy lanes in pieces. Positions are a lane's rows, counted from 0."""

    forms: tuple[Form, ...]
    piece_tokens: int
    """How many tokens one piece should have."""
    token_ns: float
    """Time in which one token is put back, as measured; 0 before the first."""
    copies: bool
    """Whether one lane is copied to another in pieces; otherwise that is done at once, and costs little."""

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


def is_cells(data: Bytes) -> bool:
    """Return whether a stored state has this form."""
    return data.nbytes >= 8 and int(data[:8].view(np.int64)[0]) == CELLS


def bytes_of(forms: Sequence[Form]) -> int:
    """Return the bytes of one token in all tensors."""
    return sum(tensor.cell_bytes for tensor in tensors_of(forms))


def signature(forms: Sequence[Form]) -> int:
    """Return a hash of the forms: cells in another form look alike."""
    return xxhash.xxh3_64_intdigest(b"|".join(map(packed, forms))) >> 1


def tensors_of(forms: Sequence[Form]) -> tuple[Tensor, ...]:
    """Return the tensors of all layers, in order."""
    return tuple(tensor for form in forms for tensor in form)
