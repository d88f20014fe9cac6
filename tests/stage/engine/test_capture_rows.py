"""Goal: stage/engine/_capture.c copies whole rows out of a graph, and never more than there is room for.

Method: the library's function is called as llama.cpp calls it, with ggml functions that return whatever a row of the
table has. The destination is in the middle of a larger array, whose rest must stay unchanged.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from relayline.stage.engine import capture

TENSOR = 0x1234
ROOM, BEFORE = 12, 5  # floats of the destination, and before it

_NAME = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)  # of text that outlives the call
_SIZE = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p)
_BOOL = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
_GET = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)


def run(n_bytes: int, **changes: int) -> tuple[Any, bool, np.ndarray]:
    """Compute one tensor of so many bytes; returns the state, whether the graph continues, and the array."""
    facts = {"element_bytes": 4, "contiguous": 1, "row_floats": 3, "written": 0, "capacity": ROOM, "stop": 0} | changes
    array = np.full(BEFORE + ROOM + 5, -1, np.float32)

    def get(tensor: int, to: int, offset: int, size: int) -> None:
        assert (tensor, offset) == (TENSOR, 0)
        ctypes.memmove(to, np.arange(size // 4, dtype=np.float32).tobytes(), size)

    name = ctypes.create_string_buffer(b"l_out-1")
    keep = (_NAME(lambda _: ctypes.addressof(name)), _SIZE(lambda _: n_bytes), _SIZE(lambda _: facts["element_bytes"]))
    more = (_BOOL(lambda _: bool(facts["contiguous"])), _GET(get))
    pointers = [ctypes.cast(function, ctypes.c_void_p) for function in (*keep, *more)]
    state = capture._State(
        b"l_out-1", array.ctypes.data + 4 * BEFORE, facts["capacity"], facts["row_floats"], facts["written"], 0, 0,
        facts["stop"], *pointers,
    )  # fmt: skip
    function = capture._library().relayline_capture_eval
    function.restype, function.argtypes = ctypes.c_bool, [ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p]
    assert function(TENSOR, True, ctypes.addressof(state))
    return state, function(TENSOR, False, ctypes.addressof(state)), array


@pytest.mark.parametrize(
    ("n_bytes", "changes", "error"),
    [
        (12, {}, 0),
        (48, {}, 0),
        (12, {"written": 9}, 0),
        (12, {"element_bytes": 2}, 1),
        (12, {"contiguous": 0}, 1),
        (0, {"stop": 1}, 2),
        (8, {}, 2),
        (13, {}, 2),
        (15, {}, 2),
        (12, {"row_floats": 0}, 2),
        (60, {}, 3),
        (12, {"written": 10}, 3),
        (12, {"written": 13}, 3),
        (12, {"written": 2**64 - 1}, 3),
        (12, {"capacity": 0}, 3),
        (12 * 2**58, {}, 3),
        (2**64 - 4, {"row_floats": 1}, 3),
    ],
)
def test_whole_rows_are_copied_where_there_is_room_and_nothing_else_is_touched(
    n_bytes: int, changes: dict[str, int], error: int
) -> None:
    state, goes_on, array = run(n_bytes, **changes)
    assert (state.error, goes_on) == (error, error == 0)
    begin = BEFORE + (changes.get("written", 0) if error == 0 else 0)
    n_floats = n_bytes // 4 if error == 0 else 0
    expected = np.full_like(array, -1)
    expected[begin : begin + n_floats] = np.arange(n_floats)
    assert array.tolist() == expected.tolist()
    assert state.written == changes.get("written", 0) + n_floats
    assert state.n_calls == (error == 0)


def test_the_graph_stops_behind_the_last_layer_on_request() -> None:
    assert not run(12, stop=1)[1]
