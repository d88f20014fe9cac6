"""Products of several matrices by llama.cpp's AMX kernels (deploy/kernels/amx_batches.h)."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest

from relayline.deploy.testing.paths import DEPLOY
from relayline.stage.engine.ggml_functions import InitParams
from relayline.wire.common import faulty_amx
from tests.support.ggml_calls import INT, LONG, POINTER, SIZE, function

HEADER = DEPLOY / "kernels" / "amx_batches.h"
F32 = 0
TYPES = {"f16": 1, "q4_0": 2, "q8_0": 8, "q4_K": 12}
# How many matrices of rows, and of weights: in the fourth dimension and in the third.
SHAPES = [((1, 3), (1, 1)), ((2, 3), (1, 1)), ((1, 4), (1, 4)), ((2, 4), (1, 2)), ((2, 2), (2, 1))]
N_VALUES, N_COLUMNS = 256, 64

Floats = npt.NDArray[np.float32]


def random(*shape: int) -> Floats:
    return np.random.default_rng(len(shape) + shape[-2]).standard_normal(shape).astype(np.float32)


def products_of(weights: Floats, rows: Floats) -> Floats:
    """Return (.., .., rows, columns): several matrices of rows may share one of weights."""
    for axis in (0, 1):
        weights = weights.repeat(rows.shape[axis] // weights.shape[axis], axis)
    return rows @ weights.swapaxes(2, 3)


# --- on a processor with AMX ------------------------------------------------------------------------------------------


def amx_buffers() -> int:
    """Return ggml's kind of buffers for weights that AMX multiplies; skips where there is none."""
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


def multiply_by_amx(type_id: int, weights: Floats, rows: Floats) -> tuple[Floats, Floats]:
    """Return the products, and the weights as their type holds them."""
    buffers = amx_buffers()
    new = function("ggml_init", POINTER, InitParams)
    make = function("ggml_new_tensor_4d", POINTER, POINTER, INT, LONG, LONG, LONG, LONG)
    put = function("ggml_backend_tensor_set", None, POINTER, POINTER, SIZE, SIZE)
    arenas = [new(InitParams(1 << 20, None, True)) for _ in range(2)]
    backend = function("ggml_backend_init_by_type", POINTER, INT, ctypes.c_char_p)(0, None)
    held = make(arenas[0], type_id, *reversed(weights.shape))
    blocks = np.empty(function("ggml_nbytes", SIZE, POINTER)(held), np.uint8)
    n_rows, n_values = weights.size // weights.shape[-1], weights.shape[-1]
    quantise = function("ggml_quantize_chunk", SIZE, INT, POINTER, POINTER, LONG, LONG, LONG, POINTER)
    quantise(type_id, weights.ctypes.data, blocks.ctypes.data, 0, n_rows, n_values, None)
    memories = [function("ggml_backend_alloc_ctx_tensors_from_buft", POINTER, POINTER, POINTER)(arenas[0], buffers)]
    put(held, blocks.ctypes.data, 0, blocks.nbytes)

    given = make(arenas[1], F32, *reversed(rows.shape))
    out = function("ggml_mul_mat", POINTER, POINTER, POINTER, POINTER)(arenas[1], held, given)
    graph = function("ggml_new_graph", POINTER, POINTER)(arenas[1])
    function("ggml_build_forward_expand", None, POINTER, POINTER)(graph, out)
    memories.append(function("ggml_backend_alloc_ctx_tensors", POINTER, POINTER, POINTER)(arenas[1], backend))
    put(given, rows.ctypes.data, 0, rows.nbytes)
    assert function("ggml_backend_graph_compute", INT, POINTER, POINTER)(backend, graph) == 0
    products = np.empty((*rows.shape[:-1], weights.shape[2]), np.float32)
    function("ggml_backend_tensor_get", None, POINTER, POINTER, SIZE, SIZE)(
        out, products.ctypes.data, 0, products.nbytes
    )
    for memory in memories:
        function("ggml_backend_buffer_free", None, POINTER)(memory)
    function("ggml_backend_free", None, POINTER)(backend)
    for arena in arenas:
        function("ggml_free", None, POINTER)(arena)
    return products, read(type_id, blocks, weights.shape)


def read(type_id: int, blocks: npt.NDArray[np.uint8], shape: tuple[int, ...]) -> Floats:
    if type_id == TYPES["f16"]:
        return blocks.view(np.float16).astype(np.float32).reshape(shape)
    name = next(name for name, each in TYPES.items() if each == type_id)
    values = np.empty(shape, np.float32)
    function(f"dequantize_row_{name}", None, POINTER, POINTER, LONG)(
        blocks.ctypes.data, values.ctypes.data, values.size
    )
    return values


@pytest.mark.parametrize("kind", TYPES)
def test_amx_multiplies_every_matrix(kind: str) -> None:
    for (of_rows, of_weights), n_rows in itertools.product(SHAPES, (1, 3, 40)):
        weights, rows = random(*of_weights, N_COLUMNS, N_VALUES), random(*of_rows, n_rows, N_VALUES)
        products, weights = multiply_by_amx(TYPES[kind], weights, rows)
        wanted = products_of(weights, rows)
        assert np.abs(products - wanted).max() < 0.02 * np.abs(wanted).max()  # rows are rounded to eight bits


# --- on any processor -------------------------------------------------------------------------------------------------

# Stands for llama.cpp's file: one matrix alone, whose packed weights are the values in double precision.
STANDS_FOR_AMX = """
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#ifdef __AMX_INT8__
#define GGML_ASSERT assert
struct ggml_tensor { int64_t ne[4]; size_t nb[4]; ggml_tensor * src[2]; void * data; };
struct ggml_compute_params { int * threadpool; };
static void ggml_barrier(int * n_barriers) { ++*n_barriers; }
static size_t ggml_nbytes(const ggml_tensor * tensor) { return tensor->ne[3] * tensor->nb[3]; }
size_t ggml_backend_amx_get_alloc_size(const ggml_tensor * tensor) {
    assert(tensor->ne[2] == 1 && tensor->ne[3] == 1);
    return 8 * tensor->ne[0] * tensor->ne[1];
}
void ggml_backend_amx_convert_weight(ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    assert(offset == 0 && size == ggml_nbytes(tensor) && tensor->ne[2] == 1 && tensor->ne[3] == 1);
    for (size_t i = 0; i < size / 4; ++i) ((double *) tensor->data)[i] = ((const float *) data)[i];
}
void ggml_backend_amx_mul_mat(const ggml_compute_params *, ggml_tensor * products) {
    const ggml_tensor * weights = products->src[0], * rows = products->src[1];
    for (const ggml_tensor * each : {weights, rows, (const ggml_tensor *) products}) {
        assert(each->ne[2] == 1 && each->ne[3] == 1);
    }
    const int64_t n_values = weights->ne[0], n_columns = weights->ne[1];
    for (int64_t row = 0; row < products->ne[1]; ++row) for (int64_t column = 0; column < n_columns; ++column) {
        double sum = 0;
        for (int64_t i = 0; i < n_values; ++i) {
            sum += ((double *) weights->data)[column * n_values + i] * ((float *) rows->data)[row * n_values + i];
        }
        ((float *) products->data)[row * n_columns + column] = sum;
    }
}
#endif
"""
CALLS = """
extern "C" int multiply(const int64_t ne[3][4], const float * weights, float * rows, float * out, double * packed) {
    ggml_tensor tensors[3];
    void * data[3] = {packed, rows, out};
    for (int t = 0; t < 3; ++t) {
        size_t n_bytes = 4;
        for (int i = 0; i < 4; ++i) {
            tensors[t].ne[i] = ne[t][i];
            tensors[t].nb[i] = n_bytes;
            n_bytes *= ne[t][i];
        }
        tensors[t].data = data[t];
    }
    assert(ggml_backend_amx_get_alloc_size(&tensors[0]) == 2 * ggml_nbytes(&tensors[0]));
    ggml_backend_amx_convert_weight(&tensors[0], weights, 0, ggml_nbytes(&tensors[0]));
    tensors[2].src[0] = &tensors[0];
    tensors[2].src[1] = &tensors[1];
    int n_barriers = 0;
    ggml_compute_params params = {&n_barriers};
    ggml_backend_amx_mul_mat(&params, &tensors[2]);
    return n_barriers;
}
"""


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The header around a file that stands for llama.cpp's, compiled for this processor."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    root: Path = tmp_path_factory.mktemp("amx")
    (root / "amx").mkdir()
    source = root / "amx" / "mmq.cpp"
    source.write_text(STANDS_FOR_AMX)
    (root / "calls.cpp").write_text(f'#include "{HEADER}"\n#include "amx/mmq.cpp"\n{CALLS}')
    claims = ["-D__AMX_INT8__=1", "-D__AVX512VNNI__=1"]
    command = [compiler, "-std=c++17", "-shared", "-fPIC", f"-I{root}", *claims, "-o", root / "it.so"]
    subprocess.run([*command, root / "calls.cpp"], check=True, capture_output=True)
    return ctypes.CDLL(str(root / "it.so"))


@pytest.mark.parametrize(("of_rows", "of_weights"), SHAPES)
def test_each_call_has_one_matrix(header: ctypes.CDLL, of_rows: tuple[int, int], of_weights: tuple[int, int]) -> None:
    weights, rows = random(*of_weights, 8, 4), random(*of_rows, 3, 4)
    products, packed = np.empty((*of_rows, 3, 8), np.float32), np.empty(weights.shape)
    arrays = (weights, rows, products)
    shapes = np.array([array.shape[::-1] for array in arrays], np.int64)
    places = [ctypes.c_void_p(array.ctypes.data) for array in (shapes, *arrays, packed)]
    n_calls = 1 + header.multiply(*places)  # a barrier between two
    np.testing.assert_allclose(products, products_of(weights, rows), rtol=1e-5)
    assert n_calls == (1 if of_weights == (1, 1) else of_rows[0] * of_rows[1])
    assert faulty_amx.amx_is_faulty(header) is False


def test_a_build_with_amx_and_without_the_header_lays_nothing_out_for_it() -> None:
    params = SimpleNamespace(use_extra_bufts=True)
    faulty_amx.leave_faulty_amx(SimpleNamespace(), params)
    assert params.use_extra_bufts
    faulty_amx.leave_faulty_amx(SimpleNamespace(_Z28ggml_backend_amx_buffer_typev=1, relayline_amx_batches=1), params)
    assert params.use_extra_bufts
    faulty_amx.leave_faulty_amx(SimpleNamespace(_Z28ggml_backend_amx_buffer_typev=1), params)
    assert not params.use_extra_bufts
