"""The beginning of `struct ggml_tensor`, for those who look into a graph of llama.cpp or libmtmd."""

from __future__ import annotations

import ctypes

_MAX_DIMS, _N_PARAMS, _MAX_SRC = 4, 16, 10  # of ggml.h


class GgmlTensor(ctypes.Structure):
    """A tensor as ggml.h lays it out, up to the address of its data. Read it with `from_address`."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * _MAX_DIMS),
        ("nb", ctypes.c_size_t * _MAX_DIMS),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_float * _N_PARAMS),  # 64 bytes, whose meaning depends on `op`
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * _MAX_SRC),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
    ]
