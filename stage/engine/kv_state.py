"""Extends llama.cpp's saved state of one lane's KV cells to a long context, without computing it. Pure.

`llama_state_seq_get_data` of llama.cpp 0.3.36's binding writes eight bytes of head, then the output of
`llama_kv_cache::state_write` for each cache (a model with sliding windows has two). That output is the number of
streams and, for each, its number of cells. A stream with cells adds their positions and owners (and, where rope has
several axes, the other positions). Then follow keys and values layer by layer, cell after cell, or values row after row
where they are stored transposed (without flash attention). Models whose attention is latent (deepseek2) have no values
there.
"""

from __future__ import annotations

import itertools
import struct

HEAD_BYTES = 8
CELL_BYTES = (12, 24)  # position, number of owners (one), owner; between the last two, 12 bytes of other positions
_U32 = struct.Struct("<I")
_ROWS = struct.Struct("<iQ")  # type, bytes of a cell's row
_TRANSPOSED = struct.Struct("<iII")  # type, bytes of a value, rows


def multiplied(state: bytes, n_times: int, *, is_first_alone: bool = False) -> bytes | None:
    """Return the state of a lane that holds each of its cells n_times, at the same positions.

    `is_first_alone`: only the cells of the first cache; those of sliding windows are in the second. None for a state in
    another format: the format is private to llama.cpp, and cells may hold more than a position.
    """
    reader = _read(state, n_times, is_first_alone=is_first_alone)
    return None if reader is None else b"".join(reader.parts)


def cells_of(state: bytes) -> tuple[list[bytes], bool] | None:
    """Return the cells of a lane's state, one entry for each tensor, and whether values are stored transposed.

    None for a state in another format, as `multiplied`.
    """
    reader = _read(state, 1)
    return None if reader is None else (reader.cells, reader.is_transposed)


def _read(state: bytes, n_times: int, *, is_first_alone: bool = False) -> _Reader | None:
    # Nothing in the state says which. Of a single cell either size may look right.
    for has_values, cell_bytes in itertools.product((True, False), CELL_BYTES):
        reader = _Reader(state, n_times, has_values=has_values, cell_bytes=cell_bytes)
        try:
            reader.keep(HEAD_BYTES)
            while reader.at < len(state):
                reader.cache()
                if is_first_alone:
                    reader.n_times = 1
        except (struct.error, ValueError):
            continue
        return reader
    return None


class _Reader:
    """Walks a state from its start, and collects the parts of the longer one."""

    def __init__(self, state: bytes, n_times: int, *, has_values: bool, cell_bytes: int) -> None:
        self._state, self.n_times, self._has_values, self._cell_bytes = state, n_times, has_values, cell_bytes
        self.at = 0
        self.parts: list[bytes] = []
        self.cells: list[bytes] = []
        self.is_transposed = False

    def keep(self, n_bytes: int, n_times: int = 1) -> None:
        """Copy the next bytes, the given number of times. Raises ValueError where they end before."""
        if self.at + n_bytes > len(self._state):
            raise ValueError("the state ends too early")
        self.parts.append(self._state[self.at : self.at + n_bytes] * n_times)
        self.at += n_bytes

    def cache(self) -> None:
        """Take one cache over, with n_times its cells."""
        (n_streams,) = _U32.unpack_from(self._state, self.at)
        self.keep(_U32.size)
        for _ in range(n_streams):
            (n_cells,) = _U32.unpack_from(self._state, self.at)
            self.at += _U32.size
            self.parts.append(_U32.pack(n_cells * self.n_times))
            if n_cells:
                self._cells(n_cells)

    def _cells(self, n_cells: int) -> None:
        if not self._have_one_owner(n_cells, self._cell_bytes):
            raise ValueError("cells of another form")
        self.keep(n_cells * self._cell_bytes, self.n_times)
        is_transposed, n_layers = struct.unpack_from("<II", self._state, self.at)
        self.is_transposed = bool(is_transposed)
        self.keep(2 * _U32.size)
        for _ in range(n_layers):
            self._rows(n_cells)
        for _ in range(n_layers if self._has_values else 0):
            if is_transposed:
                self._transposed(n_cells)
            else:
                self._rows(n_cells)

    def _have_one_owner(self, n_cells: int, cell_bytes: int) -> bool:
        starts = range(self.at, self.at + n_cells * cell_bytes, cell_bytes)
        return all(struct.unpack_from("<iI", self._state, start)[1] == 1 for start in starts)

    def _rows(self, n_cells: int) -> None:
        _, row_bytes = _ROWS.unpack_from(self._state, self.at)
        self.keep(_ROWS.size)
        self.cells.append(self._state[self.at : self.at + n_cells * row_bytes])
        self.keep(n_cells * row_bytes, self.n_times)

    def _transposed(self, n_cells: int) -> None:
        _, value_bytes, n_rows = _TRANSPOSED.unpack_from(self._state, self.at)
        self.keep(_TRANSPOSED.size)
        n_bytes = n_rows * n_cells * value_bytes
        if not 0 < n_bytes <= len(self._state) - self.at:  # of another form: rows without bytes could be billions
            raise ValueError("values of another form")
        self.cells.append(self._state[self.at : self.at + n_bytes])
        for _ in range(n_rows):
            self.keep(n_cells * value_bytes, self.n_times)
