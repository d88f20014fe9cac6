"""The architectures that the installed llama.cpp knows, by a function that its library exports for its own tests."""

from __future__ import annotations

import ctypes

from llama_cpp import llama_cpp as llama

ARCHITECTURES_MAX = 1_000


def architectures() -> list[str]:
    """Return every name that general.architecture may have, in llama.cpp's order."""
    function = llama._lib["_Z13llm_arch_name8llm_arch"]  # const char * llm_arch_name(llm_arch)
    function.argtypes, function.restype = [ctypes.c_int], ctypes.c_char_p
    names = []
    for number in range(ARCHITECTURES_MAX):
        name = function(number).decode()
        if name == "(unknown)":
            return names
        names.append(name)
    raise AssertionError("llama.cpp's list of architectures has no end")
