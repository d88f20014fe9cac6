"""Products of several rows with stored Q6_K, Q5_K and Q8_0 weights (deploy/kernels/stored_*.cpp), through ggml."""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import numpy.typing as npt
import pytest

from relayline.stage.engine import ggml
from tests.support.ggml_calls import INT, LONG, POINTER, SIZE, function, new_context


@dataclasses.dataclass(frozen=True)
class Type:
    name: str
    id: int
    block_values: int
    block_bytes: int
    halves: tuple[int, ...]  # the start of its half floats
    rows: str = "q8_K"  # the precision of rounded rows
    row_block_bytes: int = 292


F32 = 0
TYPES = [
    Type("q5_K", 13, 256, 176, (0, 2)),
    Type("q6_K", 14, 256, 210, (208,)),
    Type("q8_0", 8, 32, 34, (0,), "q8_0", 34),
]
ROWS = 15  # with more, tiles take some

Rows = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def need_own_products(stored: Type) -> None:
    if stored.name not in ggml.kernels().split():  # those by Q8_0 need an instruction
        pytest.skip("llama.cpp's own products are in use")


def weights_of(stored: Type, n_values: int, n_columns: int) -> Bytes:
    """Random blocks with finite scales, (columns, blocks, bytes)."""
    generator = np.random.default_rng(n_values + n_columns)
    shape = (n_columns, n_values // stored.block_values, stored.block_bytes)
    weights = generator.integers(0, 256, shape, dtype=np.uint8)
    for at in stored.halves:
        scales = generator.uniform(0.001, 0.01, (*weights.shape[:2], 1)).astype(np.float16)
        weights[:, :, at : at + 2] = scales.view(np.uint8)
    return weights


def rows_of(*shape: int) -> Rows:
    return np.random.default_rng(6).standard_normal(shape).astype(np.float32)


def multiply(stored: Type, weights: Bytes, rows: Rows, *, n_threads: int = 1) -> Rows:
    """Return (..., rows, columns) of rows (..., rows, values), as ggml computes it."""
    n_columns, n_values = len(weights), rows.shape[-1]
    context = new_context()
    make = function("ggml_new_tensor_4d", POINTER, POINTER, INT, LONG, LONG, LONG, LONG)
    data = function("ggml_get_data", POINTER, POINTER)
    try:
        blocks = make(context, stored.id, n_values, n_columns, 1, 1)
        given = make(context, F32, *reversed(rows.shape), *(1,) * (4 - rows.ndim))
        for tensor, values in ((blocks, weights), (given, rows)):
            ctypes.memmove(data(tensor), values.ctypes.data, values.nbytes)
        out = function("ggml_mul_mat", POINTER, POINTER, POINTER, POINTER)(context, blocks, given)
        graph = function("ggml_new_graph", POINTER, POINTER)(context)
        function("ggml_build_forward_expand", None, POINTER, POINTER)(graph, out)
        assert function("ggml_graph_compute_with_ctx", INT, POINTER, POINTER, INT)(context, graph, n_threads) == 0
        products = np.empty((*rows.shape[:-1], n_columns), np.float32)
        ctypes.memmove(products.ctypes.data, data(out), products.nbytes)
        return products
    finally:
        function("ggml_free", None, POINTER)(context)


def one_by_one(stored: Type, weights: Bytes, rows: Rows) -> Rows:
    """Return (rows, columns) by llama.cpp's product of one row by one row of weights."""
    function("ggml_cpu_init", None)()  # its table of half floats
    n_values, products = rows.shape[1], np.empty((len(rows), len(weights)), np.float32)
    round_to_bytes = function(f"quantize_row_{stored.rows}", None, POINTER, POINTER, LONG)
    arguments = (INT, POINTER, SIZE, POINTER, SIZE, POINTER, SIZE, INT)
    dot = function(f"ggml_vec_dot_{stored.name}_{stored.rows}", None, *arguments)
    for row, of_row in zip(np.ascontiguousarray(rows), products, strict=True):
        rounded = np.empty((n_values // stored.block_values, stored.row_block_bytes), np.uint8)
        round_to_bytes(row.ctypes.data, rounded.ctypes.data, n_values)
        for index, column in enumerate(weights):
            place = of_row[index:].ctypes.data
            dot(n_values, place, 0, column.ctypes.data, 0, rounded.ctypes.data, 0, 1)
    return products


def exact(stored: Type, weights: Bytes, rows: Rows) -> npt.NDArray[np.float64]:
    """Return (rows, columns) in double precision, by ggml's own reading of the blocks."""
    values = np.empty((len(weights), rows.shape[1]), np.float32)
    read = function(f"dequantize_row_{stored.name}", None, POINTER, POINTER, LONG)
    read(weights.ctypes.data, values.ctypes.data, values.size)
    return rows.astype(np.float64) @ values.astype(np.float64).T


@pytest.mark.parametrize("n_values", [256, 2048, 8192])  # of the last, not even eight rows fit the first cache
@pytest.mark.parametrize("n_columns", [1, 37, 160])
@pytest.mark.parametrize("stored", TYPES, ids=str)
def test_rows_have_the_bits_that_llama_cpp_gives_each_alone(stored: Type, n_columns: int, n_values: int) -> None:
    need_own_products(stored)
    weights, rows = weights_of(stored, n_values, n_columns), rows_of(ROWS, n_values)
    alone, wanted = one_by_one(stored, weights, rows), exact(stored, weights, rows)
    assert np.abs(alone - wanted).max() < 0.02 * np.abs(wanted).max()  # rows are rounded to eight bits
    for n_rows in (1, 2, 3, 5, 7, 8, 9, ROWS):
        for n_threads in (1, 3):
            assert np.array_equal(multiply(stored, weights, rows[:n_rows], n_threads=n_threads), alone[:n_rows])


@pytest.mark.parametrize("n_rows", [ROWS + 1, 40, 100])
@pytest.mark.parametrize("stored", TYPES, ids=str)
def test_many_rows_are_multiplied_by_tiles_or_here(stored: Type, n_rows: int) -> None:
    need_own_products(stored)
    weights, rows = weights_of(stored, 512, 64), rows_of(n_rows, 512)
    alone = one_by_one(stored, weights, rows)
    assert np.abs(multiply(stored, weights, rows) - alone).max() < 1e-5 * np.abs(alone).max()


@pytest.mark.parametrize("stored", TYPES, ids=str)
def test_several_matrices_of_rows_stay_apart(stored: Type) -> None:
    need_own_products(stored)
    weights, rows = weights_of(stored, 512, 64), rows_of(2, 3, 512)
    products = multiply(stored, weights, rows)
    assert np.array_equal(products.reshape(6, 64), one_by_one(stored, weights, rows.reshape(6, 512)))
