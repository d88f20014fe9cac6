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
from relayline.wire.common.ggml_tensor import GgmlTensor

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


COMPUTE, OTHER = 16, 3  # flags of a node: GGML_TENSOR_FLAG_COMPUTE, and others
_ROWS = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)
Node = tuple[str, str, int, int]  # name, operation, columns, rows


class Graph:
    """Nodes of a graph, and a state that finds them by their addresses."""

    def __init__(self, *nodes: Node, taps: tuple[str, ...] = (), skips: tuple[str, ...] = ()) -> None:
        self.tensors = [GgmlTensor(flags=COMPUTE | OTHER) for _ in nodes]
        self.addresses = [ctypes.addressof(tensor) for tensor in self.tensors]
        texts = [[ctypes.create_string_buffer(text.encode()) for text in node[:2]] for node in nodes]
        at = self.addresses.index
        functions = {
            "get_name": _NAME(lambda tensor: ctypes.addressof(texts[at(tensor)][0])),
            "op_desc": _NAME(lambda tensor: ctypes.addressof(texts[at(tensor)][1])),
            "nbytes": _SIZE(lambda tensor: 4 * nodes[at(tensor)][2] * nodes[at(tensor)][3]),
            "element_size": _SIZE(lambda _: 4),
            "nrows": _ROWS(lambda tensor: nodes[at(tensor)][3]),
            "is_contiguous": _BOOL(lambda _: True),
            "tensor_get": _GET(self._get),
        }
        self.rows = np.full((1 + len(taps), BEFORE + ROOM + 5), -1, np.float32)
        self.taps = (capture._Tap * len(taps))(
            *(
                capture._Tap(name.encode(), row.ctypes.data + 4 * BEFORE)
                for name, row in zip(taps, self.rows[1:], strict=True)
            )
        )
        named = {
            f"skip_{which}": name.encode()
            for which, name in zip(("from", "last", "to"), skips or (None,) * 3, strict=True)
            if name
        }
        self.state = capture._State(
            target=b"l_out-9", destination=self.rows[0].ctypes.data + 4 * BEFORE, capacity=ROOM, row_floats=3,
            taps=self.taps, n_taps=len(taps), flags_at=GgmlTensor.flags.offset, stop=1, **named,
            **{name: ctypes.cast(function, ctypes.c_void_p) for name, function in functions.items()},
        )  # fmt: skip
        self._keep = (texts, functions)
        self._function = capture._library().relayline_capture_eval
        self._function.restype = ctypes.c_bool
        self._function.argtypes = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p]

    def _get(self, tensor: int, to: int, offset: int, size: int) -> None:
        ctypes.memmove(to, np.full(size // 4, self.addresses.index(tensor), np.float32).tobytes(), size)

    def ask(self, index: int) -> bool:
        return bool(self._function(self.addresses[index], True, ctypes.addressof(self.state)))

    def run(self) -> int:
        """Compute the nodes up to where the graph ends; returns which one that is."""
        for index, address in enumerate(self.addresses):
            if self.ask(index) and not self._function(address, False, ctypes.addressof(self.state)):
                return index
        return len(self.addresses)

    @property
    def skipped(self) -> list[int]:
        assert all(tensor.flags & OTHER == OTHER for tensor in self.tensors)
        return [index for index, tensor in enumerate(self.tensors) if not tensor.flags & COMPUTE]


def test_rows_are_copied_in_passing_and_the_graph_goes_on() -> None:
    graph = Graph(
        ("l_out-2", "ADD", 3, 2), ("other", "ADD", 3, 2), ("l_out-5", "ADD", 3, 2), ("l_out-9", "ADD", 3, 2),
        taps=("l_out-2", "l_out-5"),
    )  # fmt: skip
    for n_graphs in (1, 2):
        assert graph.run() == 3
        assert (graph.state.error, graph.state.n_calls, graph.state.written) == (0, n_graphs, 6 * n_graphs)
        assert [tap.written for tap in graph.taps] == [6 * n_graphs] * 2
    for row, node in zip(graph.rows, (3, 0, 2), strict=True):
        assert row.tolist() == [-1.0] * BEFORE + [float(node)] * ROOM + [-1.0] * 5
    assert graph.run() == 0, "no room is left"
    assert (graph.state.error, graph.state.n_calls) == (3, 2)
    assert not graph.skipped


SKIPS = ("attn_norm-0", "attn_norm-1", "l_out-1")
NODES: tuple[Node, ...] = (
    ("norm-0", "RMS_NORM", 3, 2),
    ("attn_norm-0", "MUL", 3, 2),  # the first that is not computed
    ("node_2", "CONCAT", 3, 4),  # rows joined to others
    ("node_3", "CONCAT", 4, 2),  # something else
    ("node_4", "RMS_NORM", 3, 2),
    ("attn_norm-1", "MUL", 3, 2),  # of the last layer: norms and sums may be those of the next layer's scores
    ("node_6", "MUL_MAT", 3, 2),
    ("node_7", "RMS_NORM", 3, 4),
    ("node_8", "SUM_ROWS", 1, 4),
    ("node_9", "CONCAT", 3, 0),
    ("l_out-1", "ADD", 3, 2),  # the last that is not computed
    ("node_11", "MUL_MAT", 3, 2),
    ("l_out-9", "ADD", 3, 2),
)


def test_placeholders_are_not_computed_but_for_what_later_nodes_need() -> None:
    """Nor in the graph of a second micro-batch, whose nodes are others."""
    for _ in range(2):
        graph = Graph(*NODES, skips=SKIPS)
        assert [graph.run(), graph.run()] == [12, 12]
        assert graph.skipped == [1, 3, 4, 6, 9, 10]
    whole = Graph(*NODES)
    whole.run()
    assert whole.skipped == []


def test_an_entry_is_written_where_nothing_was_computed() -> None:
    graph = Graph(*NODES, skips=SKIPS)
    source = np.arange(6, dtype=np.float32)
    entries = (capture._Entry * 1)(capture._Entry(b"l_out-1", source.ctypes.data, 6, 0))
    written: list[tuple[int, list[float]]] = []

    def put(tensor: int, values: int, offset: int, size: int) -> None:
        floats = np.frombuffer((ctypes.c_char * size).from_address(values), np.float32)
        written.append((graph.addresses.index(tensor), floats.tolist()))

    setter = _GET(put)
    graph.state.entries, graph.state.n_entries = entries, 1
    graph.state.tensor_set = ctypes.cast(setter, ctypes.c_void_p)
    assert graph.run() == 12
    assert written == [(10, source.tolist())]
    assert 10 in graph.skipped
