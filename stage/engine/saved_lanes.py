"""Whole lanes as bytes that outlive them: for the tier of what lanes held, see `stage.engine.tier`. Decode thread only.

A saved lane is one array: a head of numbers of 64 bits (see `_head`), llama.cpp's state of the lane, and the
checkpoints of its recurrent state, where it has one. If rows have places on several axes, the head also has the lane's
images (see `stage.engine.lane_places`). llama.cpp reads and writes a lane's state in one call, so a copy delays the
next step until it is done; see HELD_COPIES_MAX in `stage.engine.lane_state` for times.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as llama

from relayline.stage.engine import layer_cells, own_cells
from relayline.stage.engine.cell_state import Pieces
from relayline.stage.engine.claims import Claims
from relayline.stage.engine.ggml import pointer
from relayline.stage.engine.lane_pieces import OwnPieces, SharedPieces
from relayline.stage.engine.lane_places import LanePlaces
from relayline.stage.engine.lane_rewinds import LaneRewinds
from relayline.stage.engine.lane_state import HELD_COPIES_MAX, copy_lane, read_lane, read_partial, write_lane
from relayline.stage.engine.own_cells import NodeNotes
from relayline.stage.engine.window_copies import WindowCopies
from relayline.wire.common.errors import NativeError

if TYPE_CHECKING:
    from relayline.stage.engine.native import NativeEngine

Saved = npt.NDArray[np.uint8]

_FORM, _FORM_WITH_IMAGES = 1, 2  # of these bytes
# Form, tokens, bytes of llama.cpp's state, checkpoints; then position and bytes of each checkpoint. With images: how
# many numbers these have, and those.
_NUMBERS = 4
_BYTE_NS = 0.5  # of a byte that is brought back, before any was: memory as slow as 2 GB/s
_WEIGHT = 0.2  # of the latest copy in the average


class SavedLanes:
    """Saves lanes of one engine, brings them back, and copies them."""

    def __init__(self, engine: NativeEngine, context: Any, rewinds: LaneRewinds, places: LanePlaces) -> None:
        self._engine, self._context, self._rewinds, self._places = engine, context, rewinds, places
        self._byte_ns, self._token_bytes = _BYTE_NS, 1
        self.shape: layer_cells.Shape | None = None
        """The shape of a lane's state; None where layers cannot be taken out of it, see `cells`."""
        self.pieces: Pieces | None = None

    @property
    def token_ns(self) -> float:
        """Time in which one token of a lane is brought back."""
        measured_ns = self.pieces.token_ns if self.pieces is not None else 0.0
        return measured_ns or self._byte_ns * self._token_bytes

    def measure(self, lane: int, notes: NodeNotes, claims: Claims | None) -> None:
        """Measure how many bytes one position adds to a lane's state, from a lane that holds exactly one.

        notes: of the step that computed it. claims: where the engine's graphs can be stopped.
        """
        n_bytes = llama.llama_state_seq_get_size(self._context, lane)
        if self._engine.keeps_state:  # that of the whole lane, however long
            n_bytes -= llama.llama_state_seq_get_size_ext(self._context, lane, llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
        self._token_bytes = max(1, n_bytes)
        state = read_lane(self._context, lane)
        artifact = self._engine.artifact
        if state is not None and not self._engine.keeps_state and not self._engine.attention.window:
            self.shape = layer_cells.shape_of(state, artifact.layer_end - artifact.layer_start)
        if state is not None and not self._rewinds.has_cells:
            self.pieces = self._pieces(state, notes, claims)

    def _pieces(self, state: Saved, notes: NodeNotes, claims: Claims | None) -> Pieces | None:
        """Return the way to copy lanes in pieces; None where there is none."""
        engine, config = self._engine, self._engine.config
        n_lanes = config.settings.n_lanes
        if self._rewinds.are_recurrent:
            return None
        if config.settings.kv_layout == "per-lane":
            return self._own_pieces(state, notes, claims) if claims is not None else None
        if self.shape is None or not config.held_lanes or not config.spare_lanes:
            return None
        held = range(n_lanes + config.spare_lanes, config.n_sequences)
        return SharedPieces(engine, self._context, self.shape, n_lanes, held)

    def _own_pieces(self, state: Saved, notes: NodeNotes, claims: Claims) -> Pieces | None:
        engine = self._engine
        window = windows = None
        if engine.attention.keeps_window:
            window = read_partial(self._context, 0)
            if window is None:
                return None
            windows = WindowCopies(engine, self._context, self._rewinds, engine.attention.window, window.nbytes)
        cells = own_cells.found(notes, state, engine.config.n_sequences, window)
        return OwnPieces(engine, cells, claims, windows) if cells is not None and claims.works() else None

    def pieces_of(self, lane: int) -> Pieces | None:
        """Return the way to copy this lane in pieces; None where it is copied whole."""
        return None if self._places.holds_images(lane) else self.pieces

    def forms(self) -> tuple[layer_cells.Form, ...]:
        """Return the form of each layer's cells; empty where a lane's state cannot be taken apart."""
        return self.shape.forms if self.shape is not None else ()

    def cells(self, lane: int) -> list[layer_cells.LayerCells]:
        """Return what a lane holds, layer by layer: copies, and as many tokens as the lane has.

        Raises NativeError where a state cannot be taken apart: recurrent ones, sliding windows, images.
        """
        self.settle(lane)
        state = read_lane(self._context, lane)
        if state is None or self.shape is None or self._places.holds_images(lane):
            raise NativeError(f"lane {lane} cannot be taken apart by layers")
        return layer_cells.cut(self.shape, state)

    def put_cells(self, lane: int, cells: Sequence[layer_cells.LayerCells]) -> int:
        """Fill an empty lane with the cells from stages that had its layers; returns its tokens.

        Raises NativeError, and the lane is empty, where it cannot.
        """
        if self.shape is None:
            raise NativeError("this engine's lanes cannot be put together from layers")
        state = layer_cells.written(self.shape, cells)
        self.settle(lane)
        n_tokens = cells[0].n_tokens
        if not write_lane(self._context, lane, state) or self._engine.lane_tokens(lane) != n_tokens:
            self._engine.clear(lane)
            raise NativeError(f"llama.cpp does not take a state of {state.nbytes} bytes for lane {lane}")
        return n_tokens

    def size(self, lane: int) -> int:
        """Return the bytes of what `save` would return, but for a few."""
        return int(llama.llama_state_seq_get_size(self._context, lane))

    def save(self, lane: int) -> Saved:
        """Return all that the lane holds. Raises NativeError where llama.cpp does not give it."""
        engine, context = self._engine, self._context
        self.settle(lane)
        n_tokens, n_bytes = engine.lane_tokens(lane), llama.llama_state_seq_get_size(context, lane)
        checkpoints = self._rewinds.saved(lane, n_tokens)
        sizes = [(position, state.nbytes) for position, state in checkpoints]
        images = self._places.saved(lane)
        form, counted = (_FORM_WITH_IMAGES, [images.size, *images]) if images.size else (_FORM, [])
        head = np.array([form, n_tokens, n_bytes, len(sizes), *(n for size in sizes for n in size), *counted], np.int64)
        saved = np.empty(head.nbytes + n_bytes + sum(size for _, size in sizes), np.uint8)
        saved[: head.nbytes] = head.view(np.uint8)
        at = head.nbytes
        if llama.llama_state_seq_get_data(context, pointer(saved[at:]), n_bytes, lane) != n_bytes:
            raise NativeError(f"llama.cpp does not give the state of lane {lane}")
        at += n_bytes
        for _, state in checkpoints:
            saved[at : at + state.nbytes] = state
            at += state.nbytes
        return saved

    def restore(self, lane: int, saved: Saved) -> int:
        """Let the lane, which is empty, hold what `save` returned; returns its tokens.

        Raises NativeError, and the lane is empty, where it cannot: there are no cells, or it is of another engine.
        """
        started_ns = time.monotonic_ns()
        n_tokens, n_bytes, sizes, images, at = _head(saved)
        self.settle(lane)
        if at + n_bytes + sum(size for _, size in sizes) != saved.nbytes:
            raise NativeError(f"{saved.nbytes} bytes are not the state of a lane")
        self._places.put_back(lane, images)
        n_read = llama.llama_state_seq_set_data(self._context, pointer(saved[at:]), n_bytes, lane)
        if n_read != n_bytes or self._engine.lane_tokens(lane) != n_tokens:
            self._engine.clear(lane)
            raise NativeError(f"llama.cpp does not take a state of {n_bytes} bytes for lane {lane}")
        at += n_bytes
        checkpoints = []
        for position, size in sizes:
            checkpoints.append((position, saved[at : at + size].copy()))
            at += size
        self._rewinds.put_back(lane, checkpoints)
        taken_ns = (time.monotonic_ns() - started_ns) / saved.nbytes
        self._byte_ns += _WEIGHT * (taken_ns - self._byte_ns)
        return n_tokens

    def copy_held(self, source_lane: int, target_lane: int, *, is_whole: bool = True) -> bool:
        """Copy the cells that a lane uses, at once. False where llama.cpp's copy of all cells is quicker, or needed.
        Where lanes share cells, that is nearly always so.

        Not `is_whole`: a checkpoint will replace what was copied of the lane's windows, or recurrent states. Raises
        NativeError if there is no other copy and llama.cpp does not make this one.
        """
        engine = self._engine
        is_per_lane = engine.config.settings.kv_layout == "per-lane"
        # Into a target whose copy is put off until the next step no checkpoint can be written.
        is_replaced = engine.attention.keeps_window and is_per_lane and not is_whole
        if is_replaced or self._rewinds.has_cells or self._rewinds.is_taken_back(source_lane):
            if is_replaced:
                self.settle(source_lane)
            if not copy_lane(self._context, source_lane, target_lane):
                raise NativeError(f"{engine.artifact.architecture}: llama.cpp does not copy lane {source_lane}")
            return True
        n_tokens, settings = engine.lane_tokens(source_lane), engine.config.settings
        if not is_per_lane:
            return False
        # The target of a pending copy is not filled yet, so it can neither be read nor replaced.
        if engine.copies_wait or settings.gpu_layers or n_tokens * HELD_COPIES_MAX > settings.ctx_tokens:
            return False
        # llama_kv_cache::state_write leaves out cells before the window of the next row.
        if 0 < engine.attention.window < n_tokens:
            return False
        return copy_lane(self._context, source_lane, target_lane)

    def settle(self, lane: int) -> None:
        """Let copies of whole lanes be made that llama.cpp puts off until the next step: one row, forgotten again.

        Raises NativeError where the lane could not forget it.
        """
        engine = self._engine
        if not engine.copies_wait:
            return
        position = engine.lane_tokens(lane)
        if position and (self._rewinds.are_recurrent or position >= engine.config.settings.ctx_tokens):
            raise NativeError(f"lane {lane} waits for a copy and has no room for another row")
        engine.input_rows[0], engine.seq_ids[0], engine.positions[0], engine.wants[0] = 0.01, lane, position, 1
        engine.decode(1)
        engine.drop_from(lane, position)


def _head(saved: Saved) -> tuple[int, int, list[tuple[int, int]], npt.NDArray[np.int64], int]:
    """Return tokens, bytes of llama.cpp's state, position and bytes of each checkpoint, the numbers of images, and the
    bytes of this head.

    Raises NativeError.
    """
    if saved.nbytes < 8 * _NUMBERS:
        raise NativeError(f"{saved.nbytes} bytes are not the state of a lane")
    form, n_tokens, n_bytes, n_checkpoints = saved[: 8 * _NUMBERS].view(np.int64).tolist()
    end = 8 * (_NUMBERS + 2 * n_checkpoints)
    if (
        form not in (_FORM, _FORM_WITH_IMAGES)
        or min(n_tokens, n_bytes) <= 0
        or not 0 <= n_checkpoints <= saved.nbytes // 16
    ):
        raise NativeError(f"a lane's state of form {form} is not known here")
    is_cut = saved.nbytes < end + 8 * (form == _FORM_WITH_IMAGES)
    at, n_images = end, 0
    if not is_cut and form == _FORM_WITH_IMAGES:
        at, n_images = end + 8, int(saved[end : end + 8].view(np.int64)[0])
        is_cut = not 0 <= n_images <= (saved.nbytes - at) // 8
    if is_cut:
        raise NativeError(f"{saved.nbytes} bytes are not the state of a lane")
    numbers = saved[8 * _NUMBERS : end].view(np.int64).tolist()
    images = saved[at : at + 8 * n_images].view(np.int64)
    return n_tokens, n_bytes, list(zip(numbers[::2], numbers[1::2], strict=True)), images, at + images.nbytes
