"""llama.cpp's batch of one step, over arrays that the engine's caller fills. Decode thread only.

The arrays are allocated once and batches point into them for good. Where llama.cpp cuts steps into micro-batches, it
gets the rows in the order of lanes (see `stage.engine.micro_batches`): copies, unless they are in that order already,
as in most decode steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as llama

from relayline.stage.engine.block_rows import Parts
from relayline.stage.engine.ggml import pointer
from relayline.stage.engine.inner_rows import InnerRowParts
from relayline.stage.engine.lane_places import Grid, LanePlaces
from relayline.stage.engine.lane_rewinds import LaneRewinds
from relayline.stage.engine.micro_batches import Cut, cut
from relayline.wire.common.errors import NativeError

Array = npt.NDArray[Any]
_ROPE_TYPES_4D = (llama.LLAMA_ROPE_TYPE_MROPE, llama.LLAMA_ROPE_TYPE_IMROPE)


class StepBatch:
    """The batch of one native context."""

    cut: Cut | None = None
    """How llama.cpp cuts the step that was filled in last; None where it never cuts."""
    n_filled = 0
    """Steps that were filled in."""

    def __init__(self, rows: Array, positions: Array, lanes: Array, wants: Array, rewinds: LaneRewinds) -> None:
        """rows: f32 [max_rows, width]; the others [max_rows]. All belong to the caller, who keeps them."""
        self._given = (rows, positions, lanes, wants)
        self._rewinds = rewinds
        self._ordered = tuple(np.zeros_like(array) for array in self._given) if rewinds.cut_steps else self._given
        self.rows: Array = self._ordered[0]
        """Rows as llama.cpp gets them."""

    def bind(self, parts: Parts, model: Any, n_lanes: int) -> None:
        """Make the batches. parts: made from `rows`; model: has the number of positions per row."""
        self.parts = parts
        self.places = LanePlaces(n_lanes)
        self._positions_4d: Array | None = None
        # Multi-axis rope reads four positions a row, axis by axis: a copy laid out that way is made for each step.
        if llama.llama_model_rope_type(model) in _ROPE_TYPES_4D:
            self._positions_4d = np.zeros(4 * len(self.rows), np.int32)
        self._of_order = self._in_order = self._latest = self._over(parts.embeddings, *self._ordered[1:])
        if self._rewinds.cut_steps and not parts.are_written and not parts.are_apart:
            self._in_order = self._over(*self._given)

    @property
    def has_axes(self) -> bool:
        """Whether a row's position has several axes."""
        return self._positions_4d is not None

    def fill(self, n_rows: int, grids: Sequence[Grid] = ()) -> Any:
        """Return the llama_batch with the step's rows [0:n_rows). grids: those of images, where positions have axes."""
        self.n_filled += 1
        batch, order = self._of_order, None
        if self._rewinds.cut_steps:
            self.cut = cut(
                self._given[2][:n_rows], sequential=self._rewinds.cut_in_sequence, n_tail=self._rewinds.n_tail
            )
            if self.cut.is_in_order and self._in_order is not batch:
                batch = self._in_order
            else:
                self._put_in_order(self.cut, n_rows)
                order = self.cut.given
        if self.parts.are_apart:
            self.parts.fill(self._given[0][:n_rows], self.cut)
        if self._positions_4d is not None:
            axes = self._positions_4d[: 4 * n_rows].reshape(4, n_rows)
            self.places.fill(axes, self._given[1][:n_rows], self._given[2][:n_rows], grids)
            if order is not None:
                axes[:] = axes[:, order]
        batch.n_tokens = n_rows
        self._latest = batch
        return batch

    @property
    def n_rows(self) -> int:
        """Rows of the step that was filled in last."""
        return int(self._latest.n_tokens)

    def places_of(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Return rows' places in the batch."""
        return rows if self.cut is None or self.cut.is_in_order else np.argsort(self.cut.given)[rows]

    def inner_rows(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.float32]:
        """Return the inner rows of rows of the last step, see InnerRowParts.read. Raises NativeError."""
        if not isinstance(self.parts, InnerRowParts):
            raise NativeError("rows of this stage have no inner rows")
        return self.parts.read(self._given[0], rows)

    def place_of(self, row: int) -> int:
        """Return a row's place in the batch."""
        if self.cut is None or self.cut.is_in_order:
            return row
        return int(np.flatnonzero(self.cut.given == row)[0])

    def _put_in_order(self, step: Cut, n_rows: int) -> None:
        for array, ordered in zip(self._given, self._ordered, strict=True):
            is_written = array is self._given[0] and self.parts.are_written
            order = step.computed if is_written else step.given
            np.take(array, order, axis=0, out=ordered[:n_rows], mode="clip")  # else it buffers

    def _over(self, rows: Array, positions: Array, lanes: Array, wants: Array) -> Any:
        counts = np.ones(len(lanes), np.int32)
        addresses = np.ascontiguousarray(lanes.ctypes.data + 4 * np.arange(len(lanes), dtype=np.uintp))
        batch = llama.llama_batch(
            n_tokens=0,
            token=None,
            embd=pointer(rows, ctypes.c_float),
            pos=pointer(positions if self._positions_4d is None else self._positions_4d, llama.llama_pos),
            n_seq_id=pointer(counts, ctypes.c_int32),
            seq_id=pointer(addresses, ctypes.POINTER(llama.llama_seq_id)),
            logits=pointer(wants, ctypes.c_int8),
        )
        batch.held = (counts, addresses)  # it points into them
        return batch
