"""Python side of `_capture.c`: rows taken natively out of the running graph, and rows written into it.

Captured is the tensor that llama.cpp names `l_out-<last layer>`, in some families otherwise: the residual stream after
the last layer of the slice, before the final norm. The graph stops there, so norm and head are never computed.

A later stage is given rows as embeddings. Some families change an embedding before their first layer, which a row of an
earlier stage must not go through again. For them the rows are written over the node behind that change. Sidebands, the
further inputs of layers, are written over nodes too.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as llama

from relayline.stage.engine import ggml
from relayline.stage.engine.artifact import StageArtifact
from relayline.stage.engine.row_parts import NO_NODES, Nodes
from relayline.wire.common.errors import NativeError
from relayline.wire.common.ggml_tensor import GgmlTensor

_REASONS = {
    1: "it is not a contiguous f32 tensor",
    2: "its size is not a whole number of rows",
    3: "it holds more rows than the step",
    4: "the tensor that rows are written over is not a contiguous f32 tensor",
    5: "the tensor that rows are written over holds more values than the step has",
}


_OF_TARGET_MAX = 3  # errors up to this are about the tensor that is copied

# llama_model_step35::graph gives the last layer's output a second name, which replaces the first.
_OTHER_NAMES = {"step35": "h_nextn"}
# Families with another name for the last layer's output (llama_model_nemotron_h::graph).
_OTHER_WORDS = {**dict.fromkeys(("nemotron_h", "nemotron_h_moe"), "nemotron_h_block_out"), "deepseek4": "l_last"}
# The node in which an embedding has its final form between two layers: normalised, or repeated as several streams of a
# row.
_ENTRIES = {
    "bloom": "inp_norm-0",
    "muse-glimmer": "embd_norm",
    **dict.fromkeys(("deepseek4", "hy_v4", "glm5-next"), "hc_init"),
}


def output_name(artifact: StageArtifact) -> str:
    """Return the name of the output of the artifact's last layer."""
    return output_names(artifact)[-1]


def output_names(artifact: StageArtifact) -> list[str]:
    """Return the names of the outputs of the artifact's layers."""
    architecture, n_layers = artifact.architecture, artifact.file_layers
    word = _OTHER_WORDS.get(architecture, "l_out")
    return [
        *(f"{word}-{layer}" for layer in range(n_layers - 1)),
        _OTHER_NAMES.get(architecture, f"{word}-{n_layers - 1}"),
    ]


def entry_name(artifact: StageArtifact) -> str:
    """Return the name of the node that incoming rows are written over; empty where they are given as embeddings."""
    return "" if artifact.is_first else _ENTRIES.get(artifact.architecture, "")


class _Entry(ctypes.Structure):
    # Mirrors struct relayline_entry in _capture.c.
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("source", ctypes.c_void_p),
        ("source_floats", ctypes.c_uint64),
        ("consumed", ctypes.c_uint64),
    ]


class _Tap(ctypes.Structure):
    # Mirrors struct relayline_tap in _capture.c.
    _fields_ = [("name", ctypes.c_char_p), ("destination", ctypes.c_void_p), ("written", ctypes.c_uint64)]


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
        ("entries", ctypes.POINTER(_Entry)),
        ("n_entries", ctypes.c_uint64),
        ("tensor_set", ctypes.c_void_p),
        ("taps", ctypes.POINTER(_Tap)),
        ("n_taps", ctypes.c_uint64),
        ("skip_from", ctypes.c_char_p),
        ("skip_last", ctypes.c_char_p),
        ("skip_to", ctypes.c_char_p),
        ("flags_at", ctypes.c_uint64),
        ("skipping", ctypes.c_int32),
        ("op_desc", ctypes.c_void_p),
        ("nrows", ctypes.c_void_p),
    ]


def _library() -> ctypes.CDLL:
    try:
        path = importlib.import_module("relayline.stage.engine._capture").__file__
    except ImportError as error:
        raise NativeError(f"the native capture module is not built ({error}); run pip install again") from error
    library = ctypes.CDLL(str(path))
    if ctypes.c_uint64.in_dll(library, "relayline_capture_size_bytes").value != ctypes.sizeof(_State):
        raise NativeError("the native capture module has another version; run pip install again")
    return library


_Names = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)  # ggml_get_name, with both as addresses


class RowCapture:
    """Copies the rows of one tensor into `destination` during each decode, and overwrites other tensors with incoming
    rows. destination: f32 [max_rows, width], C-contiguous, owned by the caller; must outlive the llama context.

    So must the arrays of the nodes.
    """

    def __init__(
        self,
        tensor_name: str,
        destination: npt.NDArray[np.float32],
        nodes: Nodes = NO_NODES,
        *,
        stops: bool = True,
    ) -> None:
        """Without a tensor's name nothing is copied, and the graph is computed to its end. `stops`: nothing behind the
        tensor is computed.
        """
        self._library = _library()
        self._destination, self._sources, self._taps_to = destination, nodes.entries, nodes.taps
        self.tensor_name = tensor_name
        self._entries = (_Entry * len(self._sources))(
            *(_Entry(name=entry.name.encode(), source=entry.source.ctypes.data) for entry in self._sources)
        )
        self._taps = (_Tap * len(nodes.taps))(
            *(_Tap(name=tap.name.encode(), destination=tap.rows.ctypes.data) for tap in nodes.taps)
        )
        skipped: list[bytes | None] = [*(name.encode() for name in nodes.skipped)] or [None] * 3
        self.is_armed = True
        """Whether the next decodes copy the tensor. Only one that does not stop may be disarmed."""
        self._spare: npt.NDArray[np.float32] | None = None  # made once, where steps are cut
        self._state = _State(
            target=tensor_name.encode() or None,
            destination=destination.ctypes.data,
            capacity=destination.size,
            row_floats=destination.shape[1],
            stop=int(stops),
            get_name=ggml.address_of("ggml_get_name"),
            nbytes=ggml.address_of("ggml_nbytes"),
            element_size=ggml.address_of("ggml_element_size"),
            is_contiguous=ggml.address_of("ggml_is_contiguous"),
            tensor_get=ggml.address_of("ggml_backend_tensor_get"),
            entries=self._entries,
            n_entries=len(self._sources),
            tensor_set=ggml.address_of("ggml_backend_tensor_set"),
            taps=self._taps,
            n_taps=len(nodes.taps),
            skip_from=skipped[0],
            skip_last=skipped[1],
            skip_to=skipped[2],
            flags_at=GgmlTensor.flags.offset,
            op_desc=ggml.address_of("ggml_op_desc"),
            nrows=ggml.address_of("ggml_nrows"),
        )

    def install(self, params: Any) -> None:
        """Set the callback in llama_context_params."""
        params.cb_eval = ctypes.cast(self._library.relayline_capture_eval, llama.ggml_backend_sched_eval_callback)
        params.cb_eval_user_data = ctypes.addressof(self._state)

    @contextlib.contextmanager
    def every_node(self, note: Callable[[int, str], None]) -> Iterator[None]:
        """Call `note(address, name)` for every node of graphs that are computed meanwhile. Slow: it is for one step."""
        name_of = _Names(ggml.address_of("ggml_get_name"))

        def noted(tensor: int) -> int:
            name = int(name_of(tensor))
            note(tensor, ctypes.string_at(name).decode("utf-8", "replace"))
            return name

        callback = _Names(noted)
        before = self._state.get_name
        self._state.get_name = ctypes.cast(callback, ctypes.c_void_p).value
        try:
            yield
        finally:
            self._state.get_name = before

    @contextlib.contextmanager
    def stopping_at(self, node: str) -> Iterator[None]:
        """Let graphs end at this node meanwhile; nothing behind it is computed, and no rows are captured."""
        state = self._state
        before = (state.target, state.stop, state.n_entries, state.n_taps, state.capacity)
        state.target, state.stop, state.n_entries, state.n_taps, state.capacity = node.encode(), 1, 0, 0, 0
        try:
            yield
        finally:
            state.target, state.stop, state.n_entries, state.n_taps, state.capacity = before

    def put_in_order(self, computed: npt.NDArray[np.intp]) -> None:
        """Move the rows that were copied, which stand as they were computed, to their places in the step."""
        arrays = [self._destination] if self.tensor_name and self._state.stop else []
        arrays += [tap.rows for tap in self._taps_to]
        if not arrays:
            return
        if self._spare is None:
            self._spare = np.empty_like(arrays[0])
        rows = self._spare[: computed.size]
        for array in arrays:
            np.copyto(rows, array[: computed.size])
            array[computed] = rows

    def begin(self, n_rows: int) -> None:
        """Forget the rows of the step before. Call before each decode, with the number of its rows."""
        for entry, state in zip(self._sources, self._entries, strict=True):
            state.source_floats = n_rows * entry.source.shape[1]
            state.consumed = 0
        if not self._state.stop:
            self._state.target = self.tensor_name.encode() if self.is_armed else None
        for tap in self._taps:
            tap.written = 0
        self._state.skipping = 0
        self._state.written = 0
        self._state.n_calls = 0
        self._state.error = 0

    @property
    def n_written(self) -> int:
        """Rows that the last decode has delivered; 0 where it could not."""
        return 0 if self._state.error else int(self._state.written // self._state.row_floats)

    def check(self, n_rows: int, n_parts: int = 1) -> None:
        """Raise NativeError unless the decode delivered exactly `n_rows` rows, in that many micro-batches."""
        if self._state.error and (self._state.stop or self._state.error > _OF_TARGET_MAX):
            reason = _REASONS.get(self._state.error, f"code {self._state.error}")
            nodes = [self.tensor_name, *(entry.name for entry in self._sources), *(tap.name for tap in self._taps_to)]
            raise NativeError(f"cannot capture tensor {next(filter(None, nodes), '')}: {reason}")
        for entry, state in zip(self._sources, self._entries, strict=True):
            if state.consumed != state.source_floats:
                raise NativeError(
                    f"tensor {entry.name} took {state.consumed} floats but got {state.source_floats}: "
                    "this architecture does not take its rows under that name"
                )
        has_target = bool(self.tensor_name and self._state.stop)
        n_expected = n_rows * self._state.row_floats
        named = [(tap.name, copied.written) for tap, copied in zip(self._taps_to, self._taps, strict=True)]
        for name, n_floats in (*named, *([(self.tensor_name, self._state.written)] if has_target else [])):
            if n_floats != n_expected:
                raise NativeError(
                    f"tensor {name} gave {n_floats} floats instead of {n_expected}: "
                    "this architecture does not expose its hidden state under that name"
                )
        if has_target and self._state.n_calls != n_parts:  # llama.cpp may then have grouped the rows by sequence
            raise NativeError(
                f"llama.cpp cut a step into {self._state.n_calls} parts instead of {n_parts}; "
                "the order of its rows is unknown"
            )
