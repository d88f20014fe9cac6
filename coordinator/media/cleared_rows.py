"""Rows that llama.cpp means to be zeros, and makes by scaling memory that nobody has written by 0.0.

Where that memory holds NaN or an infinity the rows are NaN, and so is the image. libmtmd's graph for pixtral does this
for the rows that end lines (`tools/mtmd/models/pixtral.cpp`). It depends on what the memory held before: new memory of
a CPU's system is zeros, that of a GPU or of a busy process is anything.
"""

from __future__ import annotations

import ctypes
from typing import Any

from relayline.wire.common.ggml_tensor import GgmlTensor

_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
_SCALE = b"SCALE"  # ggml's name of the operation


def clearing(library: ctypes.CDLL) -> Any:
    """Return a callback for graphs' nodes (`cb_eval`) that clears what was scaled by zero, once it is computed.

    `library` is libmtmd, through whose handle ggml's functions are found. The caller keeps the callback alive.
    """
    ggml = ctypes.CDLL(None, handle=library._handle)  # types that are given here hold for this object alone
    ggml.ggml_op_desc.argtypes, ggml.ggml_op_desc.restype = [ctypes.c_void_p], ctypes.c_char_p
    ggml.ggml_nbytes.argtypes, ggml.ggml_nbytes.restype = [ctypes.c_void_p], ctypes.c_size_t
    ggml.ggml_backend_tensor_memset.argtypes = [ctypes.c_void_p, ctypes.c_uint8, ctypes.c_size_t, ctypes.c_size_t]
    ggml.ggml_backend_tensor_memset.restype = None

    def visit(node: int, is_question: bool, _user_data: object) -> bool:
        if not is_question:
            ggml.ggml_backend_tensor_memset(node, 0, 0, ggml.ggml_nbytes(node))
            return True  # go on
        factor, bias, *_ = GgmlTensor.from_address(node).op_params
        return (factor, bias) == (0.0, 0.0) and ggml.ggml_op_desc(node) == _SCALE

    return _CALLBACK(visit)
