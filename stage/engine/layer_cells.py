"""A lane's saved state cut into layers, and put together from layers of several stages. Pure.

A layer's cells are the same bytes on whatever stage computed them. So a stage that gets other layers may take their
cells over from the stages that had them, and no row is computed again. The format is llama.cpp's own, described in
`stage.engine.kv_state`. So an engine states the `Shape` of its lanes' states from one that it has written itself, and
everything that does not have that shape to the byte is refused.

It also refuses states whose cells are not at positions 0, 1, 2 and so on: with sliding windows cells are missing, and
images have several cells at one position.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from relayline.stage.engine.kv_state import HEAD_BYTES
from relayline.wire.common.errors import NativeError

Bytes = npt.NDArray[np.uint8]

_U32, _ROWS, _TRANSPOSED = struct.Struct("<I"), struct.Struct("<iQ"), struct.Struct("<iII")
_CELL = np.dtype([("position", "<i4"), ("n_owners", "<u4"), ("owner", "<i4")])
_TENSOR = struct.Struct("<iII")  # type, groups, bytes of one cell in one group
_MAGIC_BYTES = 4  # of the head; the number of the lane follows
CELL_BYTES_MAX = 1 << 24  # of one cell in one layer; the widest models have some ten thousand


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """The form of one layer's keys or values: `n_groups` times all cells, each with `n_bytes`.

    Rows that belong to a cell are one group. Values that are stored transposed are a group for each of their rows.
    """

    kind: int
    """ggml's type."""
    n_groups: int
    n_bytes: int

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell."""
        return self.n_groups * self.n_bytes


Form = tuple[Tensor, ...]
"""The keys of one layer, and its values where it has some."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What all states of one engine's lanes have in common."""

    head: bytes
    n_streams: int
    is_transposed: bool
    forms: tuple[Form, ...]
    """Of each layer, in order."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerCells:
    """What one lane holds in one layer, cell after cell by position."""

    form: Form
    tensors: tuple[Bytes, ...]
    """[n_groups, n_tokens, n_bytes] of each tensor of the form."""

    @property
    def n_tokens(self) -> int:
        """How many there are."""
        return int(self.tensors[0].shape[1])

    def shortened(self, n_tokens: int) -> LayerCells:
        """Return the first n_tokens of it."""
        return LayerCells(self.form, tuple(tensor[:, :n_tokens] for tensor in self.tensors))


def packed(form: Form) -> bytes:
    """Return a form as bytes, for messages."""
    return b"".join(_TENSOR.pack(each.kind, each.n_groups, each.n_bytes) for each in form)


def shape_of(state: Bytes, n_layers: int) -> Shape | None:
    """Return the shape of a state that an engine with n_layers has written; None for one that is not understood."""
    for has_values in (True, False):  # nothing in the state says which
        try:
            shape, cells = _read(state, has_values=has_values)
            is_same = bytes(written(shape, cells)) == state.tobytes()
        except (struct.error, ValueError, NativeError):
            continue
        if is_same and len(shape.forms) == n_layers:
            return shape
    return None


def cut(shape: Shape, state: Bytes, first: int = 0) -> list[LayerCells]:
    """Return a lane's cells by layer, which stand for positions from `first` on.

    Raises NativeError for a state of another shape, or with other cells.
    """
    try:
        found, cells = _read(state, has_values=len(shape.forms[0]) > 1, first=first)
    except (struct.error, ValueError) as error:
        raise NativeError(f"llama.cpp writes a lane's state in a form that is not known here: {error}") from error
    if found.head[:_MAGIC_BYTES] != shape.head[:_MAGIC_BYTES] or dataclasses.replace(found, head=shape.head) != shape:
        raise NativeError("the state of a lane does not have the shape of this engine's")
    return cells


def written(shape: Shape, layers: Sequence[LayerCells], first: int = 0) -> Bytes:
    """Return the state of a lane with these cells, at positions from `first` on, as llama.cpp would write it. Raises
    NativeError where they differ from the shape.
    """
    if tuple(layer.form for layer in layers) != shape.forms:
        raise NativeError("these cells are of layers that this engine does not have, or of another form")
    n_tokens = layers[0].n_tokens
    wanted = [(form.n_groups, n_tokens, form.n_bytes) for layer in layers for form in layer.form]
    if [tensor.shape for layer in layers for tensor in layer.tensors] != wanted or not n_tokens:
        raise NativeError("a layer has cells for another number of tokens than it states")
    state = np.empty(_size(shape, n_tokens), np.uint8)
    cells = np.zeros(n_tokens, _CELL)
    cells["position"], cells["n_owners"] = np.arange(first, first + n_tokens), 1
    cells["owner"] = struct.unpack_from("<i", shape.head, _MAGIC_BYTES)[0]
    begin = shape.head + _U32.pack(shape.n_streams) + _U32.pack(n_tokens)
    writer = _Writer(state)
    writer.put(np.frombuffer(begin, np.uint8))
    writer.put(cells.view(np.uint8))
    writer.put(np.frombuffer(struct.pack("<II", shape.is_transposed, len(layers)), np.uint8))
    for part in range(max(map(len, shape.forms))):
        for layer in layers:
            if part < len(layer.form):
                writer.put(np.frombuffer(_header(layer.form[part], part, is_transposed=shape.is_transposed), np.uint8))
                writer.put(layer.tensors[part])
    writer.put(np.zeros(_U32.size * (shape.n_streams - 1), np.uint8))
    return state


def _header(tensor: Tensor, part: int, *, is_transposed: bool) -> bytes:
    if part and is_transposed:
        return _TRANSPOSED.pack(tensor.kind, tensor.n_bytes, tensor.n_groups)
    return _ROWS.pack(tensor.kind, tensor.n_bytes)


def _size(shape: Shape, n_tokens: int) -> int:
    headers = sum(
        len(_header(tensor, part, is_transposed=shape.is_transposed)) + n_tokens * tensor.cell_bytes
        for form in shape.forms
        for part, tensor in enumerate(form)
    )
    counts = _U32.size * (1 + shape.n_streams)
    return HEAD_BYTES + counts + n_tokens * _CELL.itemsize + 2 * _U32.size + headers


class _Writer:
    """Fills a state from its start."""

    def __init__(self, state: Bytes) -> None:
        self._state, self._at = state, 0

    def put(self, data: Bytes) -> None:
        """Append an array."""
        end = self._at + data.size
        self._state[self._at : end].reshape(data.shape)[...] = data
        self._at = end


def _read(state: Bytes, *, has_values: bool, first: int = 0) -> tuple[Shape, list[LayerCells]]:
    """Raises struct.error or ValueError for bytes that are no state with one lane in one cache."""
    reader = _Reader(state)
    head = reader.take(HEAD_BYTES).tobytes()
    n_streams = reader.number()
    empty_before = 0
    while (n_cells := reader.number()) == 0:
        empty_before += 1
    cells = reader.take(n_cells * _CELL.itemsize).view(_CELL)
    order = _order(cells, first)
    transposed, n_layers = reader.number(), reader.number()
    if transposed > 1 or not 0 < n_layers <= 1 << 16:
        raise ValueError(f"{n_layers} layers, transposed {transposed}")
    tensors = [[reader.tensor(n_cells, order)] for _ in range(n_layers)]
    if has_values:
        for layer in tensors:
            layer.append(reader.transposed(n_cells, order) if transposed else reader.tensor(n_cells, order))
    rest = reader.take(_U32.size * (n_streams - 1 - empty_before))
    if rest.any() or not reader.is_over:
        raise ValueError("more than the cells of one lane")
    layers = [LayerCells(tuple(form for form, _ in layer), tuple(data for _, data in layer)) for layer in tensors]
    forms = tuple(layer.form for layer in layers)
    return Shape(head, n_streams, bool(transposed), forms), layers


def _order(cells: npt.NDArray[np.void], first: int) -> npt.NDArray[np.intp] | None:
    """Return the order in which the cells hold `first` and the next positions; None if they are in it already."""
    positions = cells["position"]
    if (cells["n_owners"] != 1).any():
        raise ValueError("cells with several owners")
    wanted = np.arange(first, first + len(positions))
    if np.array_equal(positions, wanted):
        return None
    order = np.argsort(positions, kind="stable")
    if not np.array_equal(positions[order], wanted):
        raise ValueError(f"cells that do not stand for the positions from {first} on")
    return order


class _Reader:
    """Walks a state from its start."""

    def __init__(self, state: Bytes) -> None:
        self._state, self._at = state, 0

    @property
    def is_over(self) -> bool:
        """Whether everything has been read."""
        return self._at == self._state.size

    def take(self, n_bytes: int) -> Bytes:
        """Return the next bytes. Raises ValueError where they end before."""
        if not 0 <= n_bytes <= self._state.size - self._at:
            raise ValueError("it ends too early")
        self._at += n_bytes
        return self._state[self._at - n_bytes : self._at]

    def number(self) -> int:
        """Return the next number of 32 bits."""
        return int(_U32.unpack(self.take(_U32.size).tobytes())[0])

    def tensor(self, n_cells: int, order: npt.NDArray[np.intp] | None) -> tuple[Tensor, Bytes]:
        """Return rows that belong to a cell each."""
        kind, n_bytes = _ROWS.unpack(self.take(_ROWS.size).tobytes())
        return self._data(Tensor(kind, 1, n_bytes), n_cells, order)

    def transposed(self, n_cells: int, order: npt.NDArray[np.intp] | None) -> tuple[Tensor, Bytes]:
        """Return rows that hold a value of each cell."""
        kind, n_bytes, n_rows = _TRANSPOSED.unpack(self.take(_TRANSPOSED.size).tobytes())
        return self._data(Tensor(kind, n_rows, n_bytes), n_cells, order)

    def _data(self, form: Tensor, n_cells: int, order: npt.NDArray[np.intp] | None) -> tuple[Tensor, Bytes]:
        if not 0 < form.cell_bytes <= CELL_BYTES_MAX:
            raise ValueError(f"cells of {form.cell_bytes} bytes")
        data = self.take(n_cells * form.cell_bytes).reshape(form.n_groups, n_cells, form.n_bytes)
        return form, data if order is None else data[:, order]
