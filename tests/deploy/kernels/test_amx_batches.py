"""Products by llama.cpp's AMX kernels (deploy/kernels/amx_batches.h, amx_few_rows.h and amx_operands.h)."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest

from relayline.deploy.testing.paths import DEPLOY
from relayline.stage.engine.ggml_functions import InitParams
from relayline.wire.common import faulty_amx
from tests.support.ggml_calls import INT, LONG, POINTER, SIZE, function

KERNELS = DEPLOY / "kernels"
F32 = 0
TYPES = {"f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 8, "q4_K": 12, "q5_K": 13, "q6_K": 14, "iq4_xs": 23}
N_VALUES, N_COLUMNS = 256, 64
# Matrices of rows in the fourth dimension and in the third, and rows of each.
SHAPES = [(1, 1, 1), (1, 3, 1), (2, 3, 1), (1, 4, 3), (2, 2, 40)]

Floats = npt.NDArray[np.float32]


def random(*shape: int) -> Floats:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


# --- on a processor with AMX ------------------------------------------------------------------------------------------


def amx_buffers() -> int:
    """Return ggml's kind of memory for weights that AMX multiplies; skips where there is none."""
    processor = function("ggml_backend_dev_by_type", POINTER, INT)(0)
    registry = function("ggml_backend_dev_backend_reg", POINTER, POINTER)(processor)
    address = function("ggml_backend_reg_get_proc_address", POINTER, POINTER, ctypes.c_char_p)
    kinds = ctypes.CFUNCTYPE(ctypes.POINTER(POINTER), POINTER)(address(registry, b"ggml_backend_dev_get_extra_bufts"))
    name_of = function("ggml_backend_buft_name", ctypes.c_char_p, POINTER)
    for kind in kinds(processor):
        if not kind:
            break  # the list ends with a null pointer
        if name_of(kind) == b"AMX":
            return int(kind)
    pytest.skip("this processor, or this build of llama.cpp, has no AMX")


@contextlib.contextmanager
def arena() -> Iterator[int]:
    """Yield a place for the heads of tensors."""
    place = function("ggml_init", POINTER, InitParams)(InitParams(1 << 20, None, True))
    yield place
    function("ggml_free", None, POINTER)(place)


@contextlib.contextmanager
def memory_for(place: int, kind: int) -> Iterator[None]:
    memory = function("ggml_backend_alloc_ctx_tensors_from_buft", POINTER, POINTER, POINTER)(place, kind)
    yield
    function("ggml_backend_buffer_free", None, POINTER)(memory)


def put(tensor: int, values: npt.NDArray[np.generic]) -> None:
    function("ggml_backend_tensor_set", None, POINTER, POINTER, SIZE, SIZE)(
        tensor, values.ctypes.data, 0, values.nbytes
    )


def new_tensor(place: int, type_id: int, *shape: int) -> int:
    make = function("ggml_new_tensor_4d", POINTER, POINTER, INT, LONG, LONG, LONG, LONG)
    return int(make(place, type_id, *reversed((1,) * (4 - len(shape)) + shape)))


def quantised(type_id: int, weights: Floats) -> tuple[npt.NDArray[np.uint8], Floats]:
    """Return the blocks of weights (columns, values), and the values that they hold."""
    blocks = np.empty(weights.nbytes, np.uint8)
    quantise = function("ggml_quantize_chunk", SIZE, INT, POINTER, POINTER, LONG, LONG, LONG, POINTER)
    n_bytes = quantise(type_id, weights.ctypes.data, blocks.ctypes.data, 0, *weights.shape, None)
    if type_id == TYPES["f16"]:
        return blocks[:n_bytes], weights.astype(np.float16).astype(np.float32)
    values, name = np.empty_like(weights), next(name for name, each in TYPES.items() if each == type_id)
    read = function(f"dequantize_row_{name}", None, POINTER, POINTER, LONG)
    read(blocks.ctypes.data, values.ctypes.data, values.size)
    return blocks[:n_bytes], values


def products(place: int, weights: int, rows: int) -> int:
    return int(function("ggml_mul_mat", POINTER, POINTER, POINTER, POINTER)(place, weights, rows))


def is_taken(product: int) -> bool:
    processor = function("ggml_backend_dev_by_type", POINTER, INT)(0)
    return bool(function("ggml_backend_dev_supports_op", ctypes.c_bool, POINTER, POINTER)(processor, product))


def compute(place: int, product: int) -> None:
    graph = function("ggml_new_graph", POINTER, POINTER)(place)
    function("ggml_build_forward_expand", None, POINTER, POINTER)(graph, product)
    backend = function("ggml_backend_init_by_type", POINTER, INT, ctypes.c_char_p)(0, None)
    assert function("ggml_backend_graph_compute", INT, POINTER, POINTER)(backend, graph) == 0
    function("ggml_backend_free", None, POINTER)(backend)


@pytest.mark.parametrize("is_permuted", [False, True], ids=["contiguous", "permuted"])
@pytest.mark.parametrize("kind", TYPES)
def test_amx_multiplies_the_rows_of_all_matrices(kind: str, is_permuted: bool) -> None:
    blocks, values = quantised(TYPES[kind], random(N_COLUMNS, N_VALUES))
    for shape in SHAPES:
        rows = random(*shape, N_VALUES)
        with arena() as for_weights, arena() as for_rows:
            weights = new_tensor(for_weights, TYPES[kind], N_COLUMNS, N_VALUES)
            stored = np.ascontiguousarray(rows.swapaxes(1, 2)) if is_permuted else rows
            given = new_tensor(for_rows, F32, *stored.shape)
            permute = function("ggml_permute", POINTER, POINTER, POINTER, INT, INT, INT, INT)
            seen = permute(for_rows, given, 0, 2, 1, 3) if is_permuted else given
            out = products(for_rows, weights, seen)
            host = function("ggml_backend_cpu_buffer_type", POINTER)()
            with memory_for(for_weights, amx_buffers()), memory_for(for_rows, host):
                assert is_taken(out)
                put(weights, blocks)
                put(given, stored)
                compute(for_rows, out)
                found = np.empty((*shape, N_COLUMNS), np.float32)
                read = function("ggml_backend_tensor_get", None, POINTER, POINTER, SIZE, SIZE)
                read(out, found.ctypes.data, 0, found.nbytes)
        wanted = rows @ values.T
        assert np.abs(found - wanted).max() < 0.02 * np.abs(wanted).max()  # rows are rounded to eight bits


def multiplied(kind: str, blocks: npt.NDArray[np.uint8], n_columns: int, rows: Floats) -> Floats:
    """Return the products of rows (any number, values) by weights in AMX's memory."""
    with arena() as for_weights, arena() as for_rows:
        weights = new_tensor(for_weights, TYPES[kind], n_columns, rows.shape[1])
        given = new_tensor(for_rows, F32, *rows.shape)
        out = products(for_rows, weights, given)
        host = function("ggml_backend_cpu_buffer_type", POINTER)()
        with memory_for(for_weights, amx_buffers()), memory_for(for_rows, host):
            put(weights, blocks)
            put(given, rows)
            compute(for_rows, out)
            found = np.empty((len(rows), n_columns), np.float32)
            read = function("ggml_backend_tensor_get", None, POINTER, POINTER, SIZE, SIZE)
            read(out, found.ctypes.data, 0, found.nbytes)
    return found


@pytest.mark.parametrize("n_columns", [96, 2_080], ids=["narrow blocks", "wide blocks and a rest"])
@pytest.mark.parametrize("kind", [name for name in TYPES if name != "f16"])
def test_a_row_has_the_same_bits_alone_among_few_and_among_many(kind: str, n_columns: int) -> None:
    rows = random(9, N_VALUES)
    blocks, _ = quantised(TYPES[kind], random(n_columns, N_VALUES))
    alone = np.concatenate([multiplied(kind, blocks, n_columns, row[np.newaxis]) for row in rows])
    for n_rows in range(2, len(rows) + 1):
        assert np.array_equal(multiplied(kind, blocks, n_columns, rows[:n_rows]), alone[:n_rows]), n_rows


def test_weights_of_several_matrices_are_not_for_amx() -> None:
    with arena() as for_weights, arena() as for_rows:
        for matrices, is_for_amx in [((), True), ((2,), False), ((2, 1), False)]:
            weights = new_tensor(for_weights, TYPES["q8_0"], *matrices, N_COLUMNS, N_VALUES)
            out = products(for_rows, weights, new_tensor(for_rows, F32, *matrices, 3, N_VALUES))
            with memory_for(for_weights, amx_buffers()):
                assert is_taken(out) == is_for_amx


# --- on any processor -------------------------------------------------------------------------------------------------

# Stands for llama.cpp's kernels, which know one matrix alone.
ONE_MATRIX = """
#include <cassert>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#ifdef __AMX_INT8__
#define GGML_PAD(n, to) (((n) + (to) - 1) / (to) * (to))
struct ggml_tensor { int64_t ne[4]; size_t nb[4]; ggml_tensor * src[2]; void * data; };
struct ggml_compute_params { int ith, nth; char * wdata; int * threadpool; };
static void ggml_barrier(int * n_barriers) { ++*n_barriers; }
static int64_t ggml_nrows(const ggml_tensor * tensor) { return tensor->ne[1] * tensor->ne[2] * tensor->ne[3]; }
static bool ggml_is_contiguous(const ggml_tensor * tensor) {
    size_t n_bytes = 4;
    for (int i = 0; i < 4; n_bytes *= tensor->ne[i++]) if (tensor->nb[i] != n_bytes) return false;
    return true;
}
size_t ggml_backend_amx_desired_wsize(const ggml_tensor *) { return 5; }
void ggml_backend_amx_mul_mat(const ggml_compute_params * params, ggml_tensor * products) {
    const ggml_tensor * weights = products->src[0], * rows = products->src[1];
    for (const ggml_tensor * each : {weights, rows, (const ggml_tensor *) products}) {
        assert(each->ne[2] == 1 && each->ne[3] == 1 && ggml_is_contiguous(each));
    }
    memset(params->wdata, 1, 5);
    const int64_t n_values = weights->ne[0], n_columns = weights->ne[1];
    for (int64_t row = 0; row < products->ne[1]; ++row) for (int64_t column = 0; column < n_columns; ++column) {
        double sum = 0;
        for (int64_t i = 0; i < n_values; ++i) {
            sum += ((float *) weights->data)[column * n_values + i] * ((float *) rows->data)[row * n_values + i];
        }
        ((float *) products->data)[row * n_columns + column] = sum;
    }
}
#endif
"""
CALL = """
extern "C" size_t multiply(ggml_tensor * products, char * work) {
    int n_barriers = 0;
    ggml_compute_params params = {0, 1, work, &n_barriers};
    ggml_backend_amx_mul_mat(&params, products);
    return ggml_backend_amx_desired_wsize(products);
}
"""


class Tensor(ctypes.Structure):
    """As in ONE_MATRIX."""

    _fields_ = [("ne", LONG * 4), ("nb", SIZE * 4), ("src", POINTER * 2), ("data", POINTER)]


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The header around a file that stands for llama.cpp's, compiled for this processor."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    root: Path = tmp_path_factory.mktemp("amx")
    (root / "amx").mkdir()
    (root / "amx" / "mmq.cpp").write_text(ONE_MATRIX)
    (root / "calls.cpp").write_text(f'#include "{KERNELS / "amx_batches.h"}"\n#include "amx/mmq.cpp"\n{CALL}')
    claims = ["-D__AMX_INT8__=1", "-D__AVX512VNNI__=1"]
    command = [compiler, "-std=c++17", "-shared", "-fPIC", *claims, f"-I{root}", "-o", f"{root}/it.so"]
    subprocess.run([*command, f"{root}/calls.cpp"], check=True, capture_output=True)
    return ctypes.CDLL(str(root / "it.so"))


def tensor_over(values: Floats) -> Tensor:
    ne, nb = [*reversed(values.shape)], [*reversed(values.strides)]
    return Tensor((LONG * 4)(*ne), (SIZE * 4)(*nb), (POINTER * 2)(), values.ctypes.data)


@pytest.mark.parametrize("is_permuted", [False, True], ids=["contiguous", "permuted"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_get_one_matrix(header: ctypes.CDLL, shape: tuple[int, int, int], is_permuted: bool) -> None:
    weights, rows, found = random(1, 1, 8, 4), random(*shape, 4), np.empty((*shape, 8), np.float32)
    seen = np.ascontiguousarray(rows.swapaxes(1, 2)).swapaxes(1, 2) if is_permuted else rows
    tensors = [tensor_over(values) for values in (weights, seen, found)]
    tensors[2].src = (POINTER * 2)(*map(ctypes.addressof, tensors[:2]))
    work = np.zeros(64 + rows.nbytes + 1, np.uint8)
    header.multiply.restype = SIZE
    n_bytes = header.multiply(ctypes.byref(tensors[2]), ctypes.c_void_p(work.ctypes.data))
    np.testing.assert_allclose(found, rows @ weights[0, 0].T, rtol=1e-4, atol=1e-5)
    assert n_bytes == (64 + rows.nbytes if not seen.flags.c_contiguous else 64)
    assert not faulty_amx.amx_is_faulty(header)


def test_a_build_with_amx_and_without_the_headers_lays_nothing_out_for_it() -> None:
    params = SimpleNamespace(use_extra_bufts=True)
    faulty_amx.leave_faulty_amx(SimpleNamespace(), params)
    assert params.use_extra_bufts
    faulty_amx.leave_faulty_amx(SimpleNamespace(_Z28ggml_backend_amx_buffer_typev=1, relayline_amx_batches=1), params)
    assert params.use_extra_bufts
    faulty_amx.leave_faulty_amx(SimpleNamespace(_Z28ggml_backend_amx_buffer_typev=1), params)
    assert not params.use_extra_bufts
