"""Lanes of the model engine copied in pieces, as stage.engine.lane_pieces.OwnPieces does: from memory that stays after
a lane has been emptied, until other rows are written over it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from relayline.deploy.testing.cluster.clock import Violation
from relayline.stage.engine.cell_state import CellState
from relayline.stage.engine.lane_windows import LaneWindows
from relayline.stage.engine.layer_cells import Form, Tensor

if TYPE_CHECKING:
    from relayline.deploy.testing.cluster.model import ModelEngine

CELLS: Form = (Tensor(0, 1, 4),)
Rows = list[tuple[int, ...]]


class ModelPieces:
    """Satisfies stage.engine.lane_pieces.Pieces."""

    piece_tokens = 2
    token_ns = 0.0
    copies = True
    window_positions = 0

    def __init__(self, engine: ModelEngine, n_layers: int) -> None:
        self._engine = engine
        self.forms: tuple[Form, ...] = (CELLS,) * n_layers

    def begin(self, lane: int, n_tokens: int) -> int | None:
        """Return the lane itself."""
        return lane

    def read(self, source: int, into: CellState, first: int, end: int) -> None:
        """Copy rows out of a lane's memory."""
        rows = np.array(self._rows(source, first, end), np.int32)
        for begin, until, parts in into.spans(first, end):
            for layer, part in enumerate(parts):
                values = np.ascontiguousarray(rows[begin - first : until - first, layer])
                part[0] = values.view(np.uint8).reshape(-1, 4)

    def end(self, source: int) -> None:
        """Nothing is kept for it."""

    def write(self, lane: int, state: CellState, first: int, end: int, total: int) -> None:
        """Append rows to a lane."""
        for begin, _, parts in state.spans(first, end):
            columns = [np.ascontiguousarray(part[0]).view(np.int32).ravel().tolist() for part in parts]
            self._append(lane, begin, list(zip(*columns, strict=True)))

    def copy(self, source: int, target: int, first: int, end: int, total: int) -> None:
        """Append rows of one lane's memory to another lane."""
        self._append(target, first, self._rows(source, first, end))

    def window_bytes(self, n_tokens: int) -> int:
        """Return 0: rows are all that a lane has."""
        return 0

    def windows(self, lane: int, n_tokens: int) -> LaneWindows | None:
        """Return None, as `window_bytes`."""
        return None

    def put_windows(self, lane: int, windows: LaneWindows, n_tokens: int) -> None:
        """Never asked for."""
        raise Violation(f"lane {lane} is given windows")

    def _rows(self, lane: int, first: int, end: int) -> Rows:
        return [self._engine.memory[lane][position] for position in range(first, end)]

    def _append(self, lane: int, first: int, rows: Rows) -> None:
        if len(self._engine.lanes[lane]) != first:
            raise Violation(
                f"lane {lane} holds {len(self._engine.lanes[lane])} rows, and is given those from {first} on"
            )
        self._engine.void_logits()  # a lane is given cells by a run of llama.cpp
        self._engine.fill(lane, rows)
