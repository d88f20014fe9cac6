"""Lanes of the model engine copied in pieces, as stage.engine.lane_pieces.OwnPieces does: from memory that stays after
a lane has been emptied, until other rows are written over it. Windows are copied beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from relayline.deploy.testing.cluster.clock import Violation
from relayline.deploy.testing.cluster.windows import WINDOW
from relayline.stage.engine.cell_state import CellState
from relayline.stage.engine.lane_windows import LaneWindows, reaches
from relayline.stage.engine.layer_cells import Form, Tensor
from relayline.wire.common.errors import PositionGapError

if TYPE_CHECKING:
    from relayline.deploy.testing.cluster.model import ModelEngine

CELLS: Form = (Tensor(0, 1, 4),)
NOTHING = -1
"""In place of values of layers with a window, which cells do not have."""
Rows = list[tuple[int, ...]]


class ModelPieces:
    """Satisfies stage.engine.lane_pieces.Pieces."""

    piece_tokens = 2
    token_ns = 0.0
    copies = True

    def __init__(self, engine: ModelEngine, plain: Sequence[int]) -> None:
        """plain: the places of the engine's layers whose cells are copied; all others have windows."""
        self._engine, self._plain = engine, tuple(plain)
        self.forms: tuple[Form, ...] = (CELLS,) * len(plain)
        self.window_positions = WINDOW if engine.windows is not None else 0

    def begin(self, lane: int, n_tokens: int) -> int | None:
        """Return the lane itself."""
        return lane

    def read(self, source: int, into: CellState, first: int, end: int) -> None:
        """Copy rows out of a lane's memory."""
        rows = np.array(self._rows(source, first, end), np.int32)
        for begin, until, parts in into.spans(first, end):
            for place, part in zip(self._plain, parts, strict=True):
                values = np.ascontiguousarray(rows[begin - first : until - first, place])
                part[0] = values.view(np.uint8).reshape(-1, 4)

    def end(self, source: int) -> None:
        """Nothing is kept for it."""

    def write(self, lane: int, state: CellState, first: int, end: int, total: int) -> None:
        """Append rows to a lane."""
        for begin, until, parts in state.spans(first, end):
            rows = np.full((until - begin, self._engine.n_layers), NOTHING)
            for place, part in zip(self._plain, parts, strict=True):
                rows[:, place] = np.ascontiguousarray(part[0]).view(np.int32).ravel()
            self._append(lane, begin, [tuple(row) for row in rows.tolist()])

    def copy(self, source: int, target: int, first: int, end: int, total: int) -> None:
        """Append rows of one lane's memory to another lane."""
        rows = self._rows(source, first, end)
        if self._engine.windows is not None:
            plain = set(self._plain)
            rows = [tuple(value if at in plain else NOTHING for at, value in enumerate(row)) for row in rows]
        self._append(target, first, rows)

    def window_bytes(self, n_tokens: int) -> int:
        """Return about how many bytes the windows of so many rows take."""
        return 4 * min(n_tokens, self.window_positions) * (self._engine.n_layers - len(self._plain))

    def windows(self, lane: int, n_tokens: int) -> LaneWindows | None:
        """Return a lane's windows, as stage.engine.window_copies does."""
        windows, checkpoints = self._engine.windows, self._engine.checkpoints
        if windows is None or checkpoints is None:
            return None
        at = [(mark, checkpoints.state(lane, mark)) for mark in checkpoints.positions(lane) if mark <= n_tokens]
        kept = tuple((mark, state) for mark, state in at if state is not None)
        end = self._engine.lane_tokens(lane)
        if kept and kept[-1][0] == n_tokens:
            return LaneWindows(kept, kept[-1])
        if not reaches(end, n_tokens, WINDOW):
            raise PositionGapError(f"lane {lane} has the window of its end at {end}, not that at {n_tokens}")
        return LaneWindows(kept, (end, windows.state(lane, end)))

    def put_windows(self, lane: int, windows: LaneWindows, n_tokens: int) -> None:
        """Let a lane have these windows, as stage.engine.window_copies does."""
        engine, state = self._engine, windows.at(n_tokens, WINDOW)
        if engine.windows is None or engine.checkpoints is None:
            raise Violation(f"lane {lane} is given windows")
        if state is None:
            engine.clear(lane)
            raise PositionGapError(f"the window at {n_tokens} was not kept")
        engine.void_logits()
        engine.windows.put(lane, state)
        engine.windows.cut(lane, n_tokens)
        if engine.lane_tokens(lane) != n_tokens or not engine.windows.has(lane, n_tokens):
            raise Violation(f"a window of another position came for the {n_tokens} rows of lane {lane}")
        for mark, kept in windows.checkpoints:
            if mark <= n_tokens:
                engine.checkpoints.add(lane, mark, kept)

    def _rows(self, lane: int, first: int, end: int) -> Rows:
        return [self._engine.memory[lane][position] for position in range(first, end)]

    def _append(self, lane: int, first: int, rows: Rows) -> None:
        if len(self._engine.lanes[lane]) != first:
            raise Violation(
                f"lane {lane} holds {len(self._engine.lanes[lane])} rows, and is given those from {first} on"
            )
        self._engine.void_logits()  # a lane is given cells by a run of llama.cpp
        self._engine.fill(lane, rows)
