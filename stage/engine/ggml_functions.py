"""Functions of ggml that build and run graphs, with their C types, for graphs of our own.

Attributes of `llama._lib` are shared: what one module says of a function's types holds for all that call it there. So
these are function objects of their own, and each function is described once.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

from llama_cpp import llama_cpp as llama


class InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


_POINTER, _SIZE, _FLOAT, _INT, _DIM = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float, ctypes.c_int, ctypes.c_int64
_FUNCTIONS: dict[str, tuple[list[Any], Any]] = {
    # Tensors and their memory.
    "ggml_init": ([InitParams], _POINTER),
    "ggml_free": ([_POINTER], None),
    "ggml_tensor_overhead": ([], _SIZE),
    "ggml_new_tensor_1d": ([_POINTER, _INT, _DIM], _POINTER),
    "ggml_new_tensor_2d": ([_POINTER, _INT, _DIM, _DIM], _POINTER),
    "ggml_new_tensor_3d": ([_POINTER, _INT, _DIM, _DIM, _DIM], _POINTER),
    "ggml_get_name": ([_POINTER], _POINTER),
    "ggml_nbytes": ([_POINTER], _SIZE),
    "ggml_nrows": ([_POINTER], _DIM),
    "ggml_set_input": ([_POINTER], None),
    "ggml_set_output": ([_POINTER], None),
    # Operations.
    "ggml_add": ([_POINTER] * 3, _POINTER),
    "ggml_argmax": ([_POINTER] * 2, _POINTER),
    "ggml_get_rows": ([_POINTER] * 3, _POINTER),
    "ggml_mul": ([_POINTER] * 3, _POINTER),
    "ggml_mul_mat": ([_POINTER] * 3, _POINTER),
    "ggml_pool_2d": ([_POINTER, _POINTER, *[_INT] * 5, *[_FLOAT] * 2], _POINTER),
    "ggml_reshape_3d": ([_POINTER, _POINTER, _DIM, _DIM, _DIM], _POINTER),
    "ggml_rms_norm": ([_POINTER, _POINTER, _FLOAT], _POINTER),
    "ggml_scale": ([_POINTER, _POINTER, _FLOAT], _POINTER),
    "ggml_sum_rows": ([_POINTER] * 2, _POINTER),
    # Graphs.
    "ggml_graph_overhead_custom": ([_SIZE, ctypes.c_bool], _SIZE),
    "ggml_new_graph": ([_POINTER], _POINTER),
    "ggml_new_graph_custom": ([_POINTER, _SIZE, ctypes.c_bool], _POINTER),
    "ggml_build_forward_expand": ([_POINTER] * 2, None),
    "ggml_gallocr_new": ([_POINTER], _POINTER),
    "ggml_gallocr_alloc_graph": ([_POINTER] * 2, ctypes.c_bool),
    "ggml_gallocr_free": ([_POINTER], None),
    # Devices.
    "ggml_backend_init_by_type": ([_INT, ctypes.c_char_p], _POINTER),
    "ggml_backend_dev_by_type": ([_INT], _POINTER),
    "ggml_backend_dev_init": ([_POINTER, ctypes.c_char_p], _POINTER),
    "ggml_backend_dev_supports_op": ([_POINTER] * 2, ctypes.c_bool),
    "ggml_backend_dev_backend_reg": ([_POINTER], _POINTER),
    "ggml_backend_reg_get_proc_address": ([_POINTER, ctypes.c_char_p], _POINTER),
    "ggml_backend_get_device": ([_POINTER], _POINTER),
    "ggml_backend_get_default_buffer_type": ([_POINTER], _POINTER),
    "ggml_backend_buft_get_device": ([_POINTER], _POINTER),
    "ggml_backend_buffer_get_type": ([_POINTER], _POINTER),
    "ggml_backend_buffer_is_host": ([_POINTER], ctypes.c_bool),
    "ggml_backend_buffer_free": ([_POINTER], None),
    "ggml_backend_alloc_ctx_tensors": ([_POINTER] * 2, _POINTER),
    "ggml_backend_tensor_set": ([_POINTER, _POINTER, _SIZE, _SIZE], None),
    "ggml_backend_tensor_get": ([_POINTER, _POINTER, _SIZE, _SIZE], None),
    "ggml_backend_graph_compute": ([_POINTER] * 2, _INT),
    "ggml_backend_free": ([_POINTER], None),
}


def _function(name: str) -> Any:
    found = llama._lib[name]  # a new object at each call, which an attribute is not
    found.argtypes, found.restype = _FUNCTIONS[name]
    return found


calls: Any = SimpleNamespace(**{name: _function(name) for name in _FUNCTIONS})
