"""Leaves AMX out of builds of llama.cpp whose products by it are wrong: those without deploy/kernels/amx_batches.h."""

from __future__ import annotations

from typing import Any

_AMX_IN_BUILD = "_Z28ggml_backend_amx_buffer_typev"  # C++: ggml_backend_amx_buffer_type()
_MENDED = "relayline_amx_batches"


def amx_is_faulty(library: Any) -> bool:
    """Return whether this build computes recurrent families wrongly and aborts with those that have latent attention.

    `library` is llama.cpp's, as ctypes loads it. True only in builds for processors with AMX.
    """
    return hasattr(library, _AMX_IN_BUILD) and not hasattr(library, _MENDED)


def leave_faulty_amx(library: Any, params: Any) -> None:
    """Set in llama_model_params that weights are not laid out for AMX, if its products would be wrong.

    llama.cpp has one switch for all such layouts, so its steps of several rows become slower.
    """
    if amx_is_faulty(library):
        params.use_extra_bufts = False
