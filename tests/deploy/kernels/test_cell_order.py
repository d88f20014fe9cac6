"""A row's bits do not depend on where its lane's shared KV cells lie (deploy/kernels/cell_order.cpp)."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pytest

from relayline.stage.engine import ggml
from tests.deploy.kernels.test_attention import F16, F32, HIDDEN, MODELS, Model
from tests.support.ggml_calls import FLOAT, INT, LONG, POINTER, SIZE, function, new_context

I64 = 27
N_CELLS, N_LANES = 256, 3
Rows = npt.NDArray[np.float32]


def tensor(context: Any, values: npt.NDArray[Any], type_id: int) -> Any:
    shape = (*reversed(values.shape), *(1,) * (4 - values.ndim))
    made = function("ggml_new_tensor_4d", POINTER, POINTER, INT, LONG, LONG, LONG, LONG)(context, type_id, *shape)
    ctypes.memmove(data_of(made), values.ctypes.data, values.nbytes)
    return made


def data_of(made: Any) -> int:
    return int(function("ggml_get_data", POINTER, POINTER)(made))


def compute(n_threads: int, build: Callable[[Any], tuple[Any, npt.NDArray[Any]]]) -> npt.NDArray[Any]:
    """Run what `build` makes in a new context, and copy the outcome into the array that it returns with it."""
    context = new_context()
    try:
        out, result = build(context)
        graph = function("ggml_new_graph", POINTER, POINTER)(context)
        function("ggml_build_forward_expand", None, POINTER, POINTER)(graph, out)
        assert function("ggml_graph_compute_with_ctx", INT, POINTER, POINTER, INT)(context, graph, n_threads) == 0
        ctypes.memmove(result.ctypes.data, data_of(out), result.nbytes)
        return result
    finally:
        function("ggml_free", None, POINTER)(context)


class SharedCache:
    """Keys and values of cells, as llama.cpp has them in a cache whose lanes share cells."""

    def __init__(self, model: Model, n_threads: int = 1) -> None:
        self.model, self._n_threads = model, n_threads
        self.lanes = np.full(N_CELLS, -1)
        self._context = new_context()
        width = model.n_kv_heads * model.width
        self._parts = [tensor(self._context, np.zeros((N_CELLS, width), np.float16), F16) for _ in range(2)]
        for part, name in zip(self._parts, (b"cache_k_l0", b"cache_v_l0"), strict=True):
            function("ggml_set_name", POINTER, POINTER, ctypes.c_char_p)(part, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        function("ggml_free", None, POINTER)(self._context)

    def write(self, rows: Rows, cells: list[int], lanes: list[int]) -> None:
        """rows: (2, n, kv heads * width), keys and values"""
        for part, its in zip(self._parts, rows, strict=True):

            def build(context: Any, part: Any = part, its: Rows = its) -> tuple[Any, npt.NDArray[Any]]:
                places = tensor(context, np.array(cells, np.int64), I64)
                set_rows = function("ggml_set_rows", POINTER, *(POINTER,) * 4)
                return set_rows(context, part, tensor(context, np.ascontiguousarray(its), F32), places), np.empty(0)

            compute(self._n_threads, build)
        self.lanes[cells] = lanes

    def attend(self, queries: Rows, row_lanes: list[int]) -> Rows:
        """Return (rows, heads, width): each row over the cells of its lane."""
        model = self.model
        view = function("ggml_view_4d", POINTER, *(POINTER,) * 2, *(LONG,) * 4, *(SIZE,) * 4)
        turn = function("ggml_permute", POINTER, POINTER, POINTER, INT, INT, INT, INT)
        flash = function("ggml_flash_attn_ext", POINTER, *(POINTER,) * 5, FLOAT, FLOAT, FLOAT)

        def build(context: Any) -> tuple[Any, npt.NDArray[Any]]:
            hidden = np.where(np.array(row_lanes)[:, None] == self.lanes[None, :], 0.0, HIDDEN).astype(np.float16)
            head_bytes, row_bytes = 2 * model.width, 2 * model.width * model.n_kv_heads
            shape = (model.width, model.n_kv_heads, N_CELLS, 1)
            strides = (head_bytes, row_bytes, row_bytes * N_CELLS, 0)
            places = [tensor(context, queries, F32), *(view(context, part, *shape, *strides) for part in self._parts)]
            turned = [turn(context, place, 0, 2, 1, 3) for place in places]
            out = flash(context, *turned, tensor(context, hidden, F16), model.width**-0.5, 0.0, model.softcap)
            return out, np.empty((len(queries), model.n_heads, model.width), np.float32)

        return compute(self._n_threads, build)


class Lanes:
    """The content of lanes, and its cells: tokens come in steps, and some are forgotten."""

    def __init__(self, cache: SharedCache, seed: int) -> None:
        self._cache, self._rng, self._values = cache, random.Random(seed), np.random.default_rng(seed)
        self._free = list(range(N_CELLS))
        self.held: list[list[int]] = [[] for _ in range(N_LANES)]
        self.rows: list[list[Rows]] = [[] for _ in range(N_LANES)]

    def step(self) -> None:
        """Write a few rows of every lane into any free cells, each lane's in its order."""
        model = self._cache.model
        lanes = [lane for lane in range(N_LANES) for _ in range(self._rng.choice((1, 1, 3, 12)))]
        self._rng.shuffle(lanes)
        cells = self._rng.sample(self._free, len(lanes))
        shape = (2, len(lanes), model.n_kv_heads * model.width)
        rows = self._values.standard_normal(shape).astype(np.float16).astype(np.float32)
        self._cache.write(rows, cells, lanes)
        for at, (lane, cell) in enumerate(zip(lanes, cells, strict=True)):
            self.held[lane].append(cell)
            self.rows[lane].append(rows[:, at])
            self._free.remove(cell)

    def forget(self) -> None:
        """Take back the last rows of each lane, as where guesses were wrong."""
        for lane in range(N_LANES):
            for _ in range(self._rng.choice((0, 0, 2, 5))):
                if self.held[lane]:
                    self.rows[lane].pop()
                    cell = self.held[lane].pop()
                    self._cache.lanes[cell] = -1
                    self._free.append(cell)


UNSUNK = [model for model in MODELS if not model.has_sinks]


@pytest.mark.parametrize(("model", "n_threads"), [*((model, 1) for model in UNSUNK), (UNSUNK[0], 3)], ids=str)
def test_a_row_has_the_same_bits_wherever_the_cells_of_its_lane_lie(model: Model, n_threads: int) -> None:
    if not ggml.attends_in_order():
        pytest.skip("this build's attention follows the places of cells")
    is_moved = False
    for seed in range(10):
        queries = np.random.default_rng(seed).standard_normal((N_LANES, model.n_heads, model.width)).astype(np.float32)
        with SharedCache(model, n_threads) as cache:
            lanes = Lanes(cache, seed)
            for _ in range(6):
                lanes.step()
                lanes.forget()
            lanes.step()
            found = cache.attend(queries, list(range(N_LANES)))
        for lane in range(N_LANES):
            query = queries[lane : lane + 1]
            in_order = list(range(len(lanes.rows[lane])))
            assert np.array_equal(attend_alone(model, query, lanes.rows[lane], in_order), found[lane])
            if not is_moved:  # as if the tokens had come in the order of their places
                places = sorted(in_order, key=lanes.held[lane].__getitem__)
                is_moved = not np.array_equal(attend_alone(model, query, lanes.rows[lane], places), found[lane])
    assert is_moved, "the order of these cells must matter"


def attend_alone(model: Model, query: Rows, rows: list[Rows], order: list[int]) -> Rows:
    """Return the result of a lane's row in a separate cache, its cells written in this order. (heads, width)"""
    with SharedCache(model) as cache:
        cache.write(np.stack([rows[at] for at in order], 1), list(range(len(order))), [0] * len(order))
        return cache.attend(query, [0])[0]
