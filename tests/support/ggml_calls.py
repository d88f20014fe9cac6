"""Calls of ggml's own functions, for tests of a single operation."""

from __future__ import annotations

import ctypes
from typing import Any

from llama_cpp import llama_cpp as llama

MEMORY_BYTES = 64 << 20  # for the tensors of one operation
POINTER, LONG, INT, SIZE, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_size_t, ctypes.c_float


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def function(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of ggml that takes these types and returns that one."""
    found = llama._lib[name]  # types of an attribute would hold for the product too
    found.restype, found.argtypes = result, arguments
    return found


def new_context() -> Any:
    """Return memory for tensors, which ggml_free gives back."""
    return function("ggml_init", POINTER, _InitParams)(_InitParams(MEMORY_BYTES, None, False))
