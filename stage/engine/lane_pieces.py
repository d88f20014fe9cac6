"""Lanes copied out of an engine, and put back, in pieces between steps. Decode thread only.

llama.cpp's own call copies a whole lane: 30,000 tokens of a large model take half a second, and every stream waits.
There are two other ways, by the layout of the cells:

* Lanes with their own cells, in this host's memory: cells are read and written in place (`stage.engine.own_cells`). A
  lane that is put back must also be known to llama.cpp. So a step of the same rows is begun whose graph ends at its
  first node: llama.cpp then counts them as the lane's, and nothing is computed. Sliding windows whose cells alone are
  kept come last, in one go (`stage.engine.window_copies`).
* Lanes that share cells: some positions of a lane are lent to a spare sequence, and the state of that is copied.

In both, the lane may be given to another stream as soon as a copy of it is `begun`. What the new stream overwrites must
have been copied before: see `stage.steps.lane_copies`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from llama_cpp import llama_cpp as llama

from relayline.stage.engine import layer_cells
from relayline.stage.engine.cell_state import CellState, bytes_of
from relayline.stage.engine.claims import Claims
from relayline.stage.engine.lane_state import read_lane, write_lane
from relayline.stage.engine.lane_windows import LaneWindows
from relayline.stage.engine.layer_cells import LayerCells
from relayline.stage.engine.own_cells import OwnCells
from relayline.stage.engine.piece_price import PiecePrice
from relayline.stage.engine.window_copies import WindowCopies
from relayline.wire.common.errors import NativeError

if TYPE_CHECKING:
    from relayline.stage.engine.native import NativeEngine

OWN_PIECE_BYTES = 1 << 19  # copied at once, where cells are reached in place: a fraction of a millisecond
CLAIMED_ROWS = 64  # at once, or llama.cpp's mask over all cells of a long lane takes more than a millisecond
SHARED_PIECE_BYTES = 8 << 20  # where llama.cpp looks through all cells for each piece


class OwnPieces:
    """Of an engine whose lanes have their own cells."""

    copies = True

    def __init__(
        self, engine: NativeEngine, cells: OwnCells, claims: Claims, windows: WindowCopies | None = None
    ) -> None:
        """windows: where layers keep those alone, which `cells` then lacks."""
        self._windows = windows
        self.window_positions = windows.n_positions if windows is not None else 0
        self._engine, self._cells, self._claims, self.forms = engine, cells, claims, cells.forms
        self.piece_tokens = max(1, OWN_PIECE_BYTES // bytes_of(cells.forms))
        self._price = PiecePrice()

    @property
    def token_ns(self) -> float:
        """As of `Pieces`."""
        return self._price.token_ns

    def begin(self, lane: int, n_tokens: int) -> int | None:
        """As of `Pieces`: the lane itself, whose memory stays as it is."""
        return lane

    def read(self, source: int, into: CellState, first: int, end: int) -> None:
        """As of `Pieces`."""
        began_ns = time.monotonic_ns()
        self._cells.read(source, into, first, end)
        self._price.taken_out(end - first, time.monotonic_ns() - began_ns)

    def end(self, source: int) -> None:
        """As of `Pieces`."""

    def write(self, lane: int, state: CellState, first: int, end: int, total: int) -> None:
        """As of `Pieces`."""
        began_ns = time.monotonic_ns()
        self._claim(lane, end, total)
        self._cells.write(lane, state, first, end)
        self._price.put_back(end - first, time.monotonic_ns() - began_ns)

    def copy(self, source: int, target: int, first: int, end: int, total: int) -> None:
        """As of `Pieces`."""
        self._claim(target, end, total)
        self._cells.copy(source, target, first, end)

    def window_bytes(self, n_tokens: int) -> int:
        """As of `Pieces`."""
        return self._windows.n_bytes(n_tokens) if self._windows is not None else 0

    def windows(self, lane: int, n_tokens: int) -> LaneWindows | None:
        """As of `Pieces`."""
        return self._windows.take(lane, n_tokens) if self._windows is not None else None

    def put_windows(self, lane: int, windows: LaneWindows, n_tokens: int) -> None:
        """As of `Pieces`."""
        assert self._windows is not None
        self._windows.put(lane, windows, n_tokens)

    def _claim(self, lane: int, end: int, total: int) -> None:
        held = self._engine.lane_tokens(lane)
        while held < end:
            n_rows = min(CLAIMED_ROWS, self._engine.max_rows, total - held)
            self._claims.claim(lane, held, n_rows)
            held += n_rows


class SharedPieces:
    """Of an engine whose lanes share cells."""

    copies = False
    window_positions = 0

    def __init__(self, engine: NativeEngine, context: Any, shape: layer_cells.Shape, lent: int, held: range) -> None:
        """lent: the sequence that positions are lent to; held: those that keep lanes for as long as they are read."""
        self._engine, self._context, self._shape, self.forms = engine, context, shape, shape.forms
        self._memory: Any = llama.llama_get_memory(context)
        self._lent, self._free = lent, list(held)
        self.piece_tokens = max(1, min(SHARED_PIECE_BYTES // bytes_of(shape.forms), engine.max_rows))
        self._price = PiecePrice()

    @property
    def token_ns(self) -> float:
        """As of `Pieces`."""
        return self._price.token_ns

    def begin(self, lane: int, n_tokens: int) -> int | None:
        """As of `Pieces`: a further sequence holds the same cells."""
        if not self._free:
            return None
        held = self._free.pop()
        llama.llama_memory_seq_cp(self._memory, lane, held, 0, n_tokens)
        return held

    def read(self, source: int, into: CellState, first: int, end: int) -> None:
        """As of `Pieces`; the cells are given back."""
        began_ns = time.monotonic_ns()
        llama.llama_memory_seq_cp(self._memory, source, self._lent, first, end)
        try:
            state = read_lane(self._context, self._lent)
        finally:
            self._engine.clear(self._lent)
        if state is None:
            raise NativeError("llama.cpp does not give the state of a lane")
        cells = [tensor for layer in layer_cells.cut(self._shape, state, first) for tensor in layer.tensors]
        if cells[0].shape[1] != end - first:
            raise NativeError(f"a lane has {cells[0].shape[1]} cells at positions {first} to {end - 1}")
        for begin, until, parts in into.spans(first, end):
            for tensor, part in zip(cells, parts, strict=True):
                part[...] = tensor[:, begin - first : until - first]
        llama.llama_memory_seq_rm(self._memory, source, first, end)
        self._price.taken_out(end - first, time.monotonic_ns() - began_ns)

    def end(self, source: int) -> None:
        """As of `Pieces`."""
        self._engine.clear(source)
        self._free.append(source)

    def copy(self, source: int, target: int, first: int, end: int, total: int) -> None:
        """As of `Pieces`: not used, since both lanes can have the same cells."""
        raise NativeError("lanes that share cells need no copies")

    def write(self, lane: int, state: CellState, first: int, end: int, total: int) -> None:
        """As of `Pieces`."""
        began_ns = time.monotonic_ns()
        spans = [parts for _, _, parts in state.spans(first, end)]
        tensors = iter([np.concatenate(parts, axis=1) for parts in zip(*spans, strict=True)])
        layers = [LayerCells(form, tuple(next(tensors) for _ in form)) for form in self.forms]
        if not write_lane(self._context, self._lent, layer_cells.written(self._shape, layers, first)):
            self._engine.clear(self._lent)
            raise NativeError(f"llama.cpp does not take {end - first} cells for lane {lane}")
        llama.llama_memory_seq_cp(self._memory, self._lent, lane, first, end)
        self._engine.clear(self._lent)
        self._price.put_back(end - first, time.monotonic_ns() - began_ns)

    def window_bytes(self, n_tokens: int) -> int:
        """As of `Pieces`."""
        return 0

    def windows(self, lane: int, n_tokens: int) -> LaneWindows | None:
        """As of `Pieces`."""
        return None

    def put_windows(self, lane: int, windows: LaneWindows, n_tokens: int) -> None:
        """As of `Pieces`: there are none."""
        raise NativeError("lanes that share cells are not copied beside their windows")
