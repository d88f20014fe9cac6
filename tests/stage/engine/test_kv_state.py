"""A lane's state in llama.cpp's format is extended; a state in another format is left alone."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayline.stage.engine.kv_state import cells_of, multiplied


def cache(
    n_cells: int, n_streams: int, n_layers: int, *, transposed: bool, n_owners: int = 1, more: bytes = b""
) -> bytes:
    """The format of llama_kv_cache::state_write; a cell's values identify it."""
    text = struct.pack("<I", n_streams) + struct.pack("<I", 0) * (n_streams - 1) + struct.pack("<I", n_cells)
    if not n_cells:
        return text
    text += b"".join(struct.pack("<iI", cell, n_owners) + more + struct.pack("<i", 3) for cell in range(n_cells))
    text += struct.pack("<II", transposed, n_layers)
    rows = b"".join(bytes([cell]) * 6 for cell in range(n_cells))
    keys = (struct.pack("<iQ", 1, 6) + rows) * n_layers
    return text + keys + (transposed_values(n_cells) * n_layers if transposed else keys)


def transposed_values(n_cells: int) -> bytes:
    return struct.pack("<iII", 1, 2, 5) + b"".join(bytes([cell]) * 2 for cell in range(n_cells)) * 5


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(0, 3), st.booleans()), min_size=1, max_size=2),
    st.integers(1, 5),
)
def test_every_cell_is_there_so_many_times(caches: list[tuple[int, int, int, bool]], n_times: int) -> None:
    state = b"headhead" + b"".join(cache(*shape, transposed=transposed) for *shape, transposed in caches)
    longer = multiplied(state, n_times)
    assert longer is not None
    sizes = [len(cache(n * n_times, n_streams, n_layers, transposed=t)) for n, n_streams, n_layers, t in caches]
    assert len(longer) == 8 + sum(sizes)
    assert longer[:8] == b"headhead"
    assert multiplied(state, 1) == state


def test_the_cells_of_windows_stay_as_they_are() -> None:
    first, windows = cache(3, 1, 2, transposed=False), cache(2, 1, 4, transposed=False)
    longer = multiplied(b"headhead" + first + windows, 5, is_first_alone=True)
    assert longer is not None
    assert longer.endswith(windows)
    assert longer[8 : -len(windows)] == (multiplied(b"headhead" + first, 5) or b"")[8:]


def test_the_copies_stand_behind_each_other_in_every_row() -> None:
    longer = multiplied(b"headhead" + cache(2, 1, 1, transposed=True), 2)
    assert longer is not None
    assert longer.endswith(struct.pack("<iII", 1, 2, 5) + b"\0\0\1\1\0\0\1\1" * 5)
    assert struct.pack("<iIiiIi", 0, 1, 3, 1, 1, 3) * 2 in longer, "positions repeat"


def test_cells_may_have_positions_on_other_axes_and_layers_no_values() -> None:
    axes = struct.pack("<iii", 7, 9, -1)
    longer = multiplied(b"headhead" + cache(3, 1, 2, transposed=True, more=axes), 2)
    assert longer is not None
    assert longer.count(axes) == 6
    keys_alone = (b"headhead" + cache(3, 1, 2, transposed=False))[: -2 * (12 + 18)]
    keys_alone = keys_alone.replace(struct.pack("<I", 1), struct.pack("<I", 2), 1) + struct.pack("<I", 0)
    longer = multiplied(keys_alone, 2)
    assert longer is not None
    assert len(longer) == len(keys_alone) + 3 * 12 + 2 * 18


@pytest.mark.parametrize(
    "state",
    [
        b"head",
        b"headhead\1",
        b"headhead" + cache(3, 1, 2, transposed=False)[:-1],
        b"headhead" + cache(3, 1, 2, transposed=True) + b"\1\0\0",
        b"headhead" + cache(3, 1, 2, transposed=False, n_owners=2),
        b"headhead" + struct.pack("<I", 2**32 - 1),
    ],
    ids=["no head", "half a number", "cut", "more behind", "two owners", "streams that are not there"],
)
def test_another_format_is_left_alone(state: bytes) -> None:
    assert multiplied(state, 4) is None


def test_values_without_bytes_are_another_format_however_many_they_are() -> None:
    """As where a state without values is read as one with transposed values: the numbers are then anything."""
    cell = struct.pack("<iIi", 0, 1, 0)
    keys, values = struct.pack("<iQ", 0, 4) + b"keys", struct.pack("<iII", 0, 0, 0xFFFFFFFF)
    state = bytes(8) + struct.pack("<II", 1, 1) + cell + struct.pack("<II", 1, 1) + keys + values
    assert cells_of(state) is None
