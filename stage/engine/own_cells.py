"""The KV cells of lanes that have their own, as memory of this process. Decode thread only.

llama.cpp has no call for a part of a lane's state. But where each lane has its own cells and they lie in this host's
memory, the cell of a position has a fixed place. llama.cpp fills a lane's cells from the first on, one for each row,
and rewinding frees the last ones. So any range can be read, and written, while nothing is computed.

Its tensors are found in the graph of the first step (`found`). Their cells are compared, byte for byte, with a state
that llama.cpp writes itself; where they differ, nothing here is used.

Layers that keep a window's cells alone fill them again and again. Their cells are left out here.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from relayline.stage.engine.cell_state import CellState
from relayline.stage.engine.ggml_functions import calls
from relayline.stage.engine.kv_state import cells_of
from relayline.stage.engine.layer_cells import Form, Tensor
from relayline.wire.common.ggml_tensor import GgmlTensor

_CACHES = ("cache_k_", "cache_v_")  # the beginnings of their names in llama_kv_cache
Bytes = npt.NDArray[np.uint8]


class NodeNotes:
    """What the graph of one step shows: its first node, and the tensors of the KV cache."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self.tensors: dict[int, str] = {}  # address -> name, in the order of use

    @property
    def first(self) -> str:
        """The name of the first node; empty where others have it too."""
        return self._names[0] if self._names and self._names.count(self._names[0]) == 1 else ""

    def note(self, address: int, name: str) -> None:
        """Take note of a node."""
        self._names.append(name)
        node = GgmlTensor.from_address(address)
        for used in (address, *(source for source in node.src if source)):
            whole = GgmlTensor.from_address(used).view_src
            if whole and whole not in self.tensors and (found := _name(whole)).startswith(_CACHES):
                self.tensors[whole] = found


class OwnCells:
    """All cells of one engine."""

    def __init__(self, views: list[Bytes], forms: tuple[Form, ...]) -> None:
        """views: [lanes, n_groups, cells, n_bytes] of each tensor."""
        self._views, self.forms = views, forms

    def read(self, lane: int, into: CellState, first: int, end: int) -> None:
        """Copy a lane's cells of positions [first:end)."""
        for begin, until, parts in into.spans(first, end):
            for view, part in zip(self._views, parts, strict=True):
                part[...] = view[lane, :, begin:until]

    def write(self, lane: int, state: CellState, first: int, end: int) -> None:
        """Fill a lane's cells of positions [first:end), which llama.cpp takes for its own already."""
        for begin, until, parts in state.spans(first, end):
            for view, part in zip(self._views, parts, strict=True):
                view[lane, :, begin:until] = part

    def copy(self, source: int, target: int, first: int, end: int) -> None:
        """Copy a lane's cells of positions [first:end) to another lane, as `write`."""
        for view in self._views:
            view[target, :, first:end] = view[source, :, first:end]

    def cell(self, lane: int, position: int) -> list[bytes]:
        """Return the bytes of one position's cell in each tensor."""
        return [view[lane, :, position].tobytes() for view in self._views]


def found(notes: NodeNotes, state: Bytes, n_lanes: int, window: Bytes | None = None) -> OwnCells | None:
    """Return the cells that a step's graph used; None where they cannot be reached so.

    state: llama.cpp's of lane 0, which holds one row. window: the part of it that is of windows, where their cells
    alone are kept.
    """
    known = cells_of(state.tobytes())
    left_out = cells_of(window.tobytes()) if window is not None else ([], False)
    if known is None or left_out is None or not notes.tensors:
        return None
    cells, is_transposed = known
    cells = cells[: len(cells) - len(left_out[0])]  # llama_kv_cache_iswa::state_write: those of windows come last
    n_cells = max(_n_cells(address) for address in notes.tensors)
    layers: dict[str, list[tuple[Tensor, Bytes]]] = {}
    for address, name in sorted(notes.tensors.items(), key=lambda item: _place(item[1])):
        if window is not None and _n_cells(address) < n_cells:
            continue
        cache = GgmlTensor.from_address(address)
        view = _view(cache, n_lanes, is_transposed=is_transposed and name.startswith(_CACHES[1]))
        if view is None:
            return None
        form = Tensor(cache.type, view.shape[1], view.shape[3])
        layers.setdefault(name[len(_CACHES[0]) :], []).append((form, view))
    views = [view for layer in layers.values() for _, view in layer]
    own = OwnCells(views, tuple(tuple(form for form, _ in layer) for layer in layers.values()))
    return own if views and sorted(own.cell(0, 0)) == sorted(cells) else None


def _n_cells(address: int) -> int:
    return int(GgmlTensor.from_address(address).ne[1])


def _place(name: str) -> tuple[int, str]:
    digits = "".join(filter(str.isdigit, name))
    return (int(digits) if digits else 0, name)


def _name(tensor: int) -> str:
    return ctypes.string_at(calls.ggml_get_name(tensor)).decode("utf-8", "replace")


def _view(tensor: Any, n_lanes: int, *, is_transposed: bool) -> Bytes | None:
    """Return a tensor [values, cells, lanes] as bytes, [lanes, groups, cells, bytes]; None if it lies otherwise."""
    n_values, n_cells, n_streams, n_more = tensor.ne
    element, row, lane, _ = tensor.nb
    if n_streams != n_lanes or n_more != 1 or row * n_cells != lane or not tensor.data:
        return None
    if not calls.ggml_backend_buffer_is_host(tensor.buffer):
        return None
    memory: Any = (ctypes.c_uint8 * (lane * n_lanes)).from_address(tensor.data)
    data: Bytes = np.frombuffer(memory, np.uint8)
    if is_transposed:
        return data.reshape(n_lanes, n_values, n_cells, element) if element * n_values == row else None
    return data.reshape(n_lanes, 1, n_cells, row)
