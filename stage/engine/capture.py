"""Python side of `_capture.c`: the output of a stage that is not last, taken natively out of the running graph.

Captured is the tensor that llama.cpp names `l_out-<last layer>`, in one family otherwise: the residual stream after the
last layer of the slice, before the final norm. The graph stops there, so norm and head are never computed.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as llama

from relayline.stage.engine import ggml
from relayline.stage.engine.artifact import StageArtifact
from relayline.wire.common.errors import NativeError

_REASONS = {
    1: "it is not a contiguous f32 tensor",
    2: "its size is not a whole number of rows",
    3: "it holds more rows than the step",
}


# llama_model_step35::graph gives the last layer's output a second name, which replaces the first.
_OTHER_NAMES = {"step35": "h_nextn"}
# Families that have a word of their own for what leaves a layer (llama_model_nemotron_h::graph).
_OTHER_WORDS = dict.fromkeys(("nemotron_h", "nemotron_h_moe"), "nemotron_h_block_out")


def output_name(artifact: StageArtifact) -> str:
    """Return the name of what leaves the artifact's last layer."""
    architecture, last = artifact.architecture, artifact.layer_end - artifact.layer_start - 1
    return _OTHER_NAMES.get(architecture, f"{_OTHER_WORDS.get(architecture, 'l_out')}-{last}")


class _State(ctypes.Structure):
    # Mirrors struct relayline_capture in _capture.c, which says what each field is.
    _fields_ = [
        ("target", ctypes.c_char_p),
        ("destination", ctypes.c_void_p),
        ("capacity", ctypes.c_uint64),
        ("row_floats", ctypes.c_uint64),
        ("written", ctypes.c_uint64),
        ("n_calls", ctypes.c_uint64),
        ("error", ctypes.c_int32),
        ("stop", ctypes.c_int32),
        ("get_name", ctypes.c_void_p),
        ("nbytes", ctypes.c_void_p),
        ("element_size", ctypes.c_void_p),
        ("is_contiguous", ctypes.c_void_p),
        ("tensor_get", ctypes.c_void_p),
    ]


def _library() -> ctypes.CDLL:
    try:
        path = importlib.import_module("relayline.stage.engine._capture").__file__
    except ImportError as error:
        raise NativeError(f"the native capture module is not built ({error}); run pip install again") from error
    library = ctypes.CDLL(str(path))
    if ctypes.c_uint64.in_dll(library, "relayline_capture_size_bytes").value != ctypes.sizeof(_State):
        raise NativeError("the native capture module is of another version; run pip install again")
    return library


class RowCapture:
    """Copies the rows of one tensor into `destination` during each decode.

    destination: f32 [max_rows, n_embd], C-contiguous, owned by the caller; must outlive the llama context.
    """

    def __init__(self, tensor_name: str, destination: npt.NDArray[np.float32]) -> None:
        self._library = _library()
        self._destination = destination
        self.tensor_name = tensor_name
        self._state = _State(
            target=tensor_name.encode(),
            destination=destination.ctypes.data,
            capacity=destination.size,
            row_floats=destination.shape[1],
            stop=1,
            get_name=ggml.address_of("ggml_get_name"),
            nbytes=ggml.address_of("ggml_nbytes"),
            element_size=ggml.address_of("ggml_element_size"),
            is_contiguous=ggml.address_of("ggml_is_contiguous"),
            tensor_get=ggml.address_of("ggml_backend_tensor_get"),
        )

    def install(self, params: Any) -> None:
        """Set the callback in llama_context_params."""
        params.cb_eval = ctypes.cast(self._library.relayline_capture_eval, llama.ggml_backend_sched_eval_callback)
        params.cb_eval_user_data = ctypes.addressof(self._state)

    def begin(self) -> None:
        """Forget the rows of the step before. Call before each decode."""
        self._state.written = 0
        self._state.n_calls = 0
        self._state.error = 0

    def check(self, n_rows: int, n_parts: int = 1) -> None:
        """Raise NativeError unless the decode delivered exactly `n_rows` rows, in that many micro-batches."""
        if self._state.error:
            reason = _REASONS.get(self._state.error, f"code {self._state.error}")
            raise NativeError(f"cannot capture tensor {self.tensor_name}: {reason}")
        n_expected = n_rows * self._state.row_floats
        if self._state.written != n_expected:
            raise NativeError(
                f"tensor {self.tensor_name} gave {self._state.written} floats where {n_expected} were expected: "
                "this architecture does not expose its hidden state under that name"
            )
        if self._state.n_calls != n_parts:  # llama.cpp may then have grouped the rows by sequence
            raise NativeError(
                f"llama.cpp cut a step into {self._state.n_calls} parts where {n_parts} were expected; "
                "the order of its rows is unknown"
            )
