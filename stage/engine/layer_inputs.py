"""The inputs that each layer of gemma4's E2B and E4B takes besides its row, computed at stage 0 for all layers.

They follow llama_model_gemma4::graph: a product of the embedding, normalised for each layer, plus the token's own
values for each layer. llama.cpp computes them on the processor, wherever its layers run, and so does this module, with
ggml's own operations. llama.cpp's graph of a slice cannot do it: it knows only the slice's layers, and looks tokens up
only without embeddings.
"""

from __future__ import annotations

import ctypes
import math

import numpy as np
import numpy.typing as npt

from relayline.stage.engine import ggml
from relayline.stage.engine.artifact import StageArtifact, TableSection
from relayline.stage.engine.ggml_functions import InitParams, calls
from relayline.stage.engine.table_rows import TableRows
from relayline.wire.common.errors import ArtifactError, NativeError

ROWS_AT_ONCE = 128  # bounds the rows computed at once; steps of more rows go in parts
_F32, _CPU = 0, 0  # enum ggml_type, enum ggml_backend_dev_type
_GRAPH_NODES, _TENSORS = 16, 16


def _root(value: float) -> np.float32:
    return np.float32(math.sqrt(value))


class LayerInputTable:
    """The tables of one stage-0 artifact, with a private ggml processor backend. One thread at a time."""

    _allocator = _buffer = _weights = _backend = 0  # what ggml holds for it

    def __init__(self, artifact: StageArtifact, n_tokens: int, n_threads: int) -> None:
        """Map the rows by token, and read the product's matrix. Raises ArtifactError or NativeError."""
        inputs = artifact.layer_inputs
        assert inputs is not None
        if inputs.tokens is None or inputs.product is None or inputs.norm is None:
            raise ArtifactError(f"{artifact.path}: its tables of inputs for layers are missing; split the model again")
        self._artifact, self._width, self._n_layers = artifact, inputs.width, artifact.source_layers
        self.n_values, self._epsilon = inputs.width * artifact.source_layers, inputs.epsilon
        self._tokens = TableRows(
            artifact.path,
            "table of inputs for layers",
            offset_bytes=inputs.tokens.offset_bytes,
            type_id=inputs.tokens.type_id,
            n_rows=n_tokens,
            n_columns=self.n_values,
        )
        self._token_rows = np.empty((ROWS_AT_ONCE, self.n_values), np.float32)
        self._embeddings = np.empty((ROWS_AT_ONCE, artifact.n_embd), np.float32)
        size = _TENSORS * calls.ggml_tensor_overhead() + calls.ggml_graph_overhead_custom(_GRAPH_NODES, False)
        self._memory = ctypes.create_string_buffer(size)  # of one graph's description; its values are elsewhere
        for section, n_columns in ((inputs.product, artifact.n_embd), (inputs.norm, inputs.width)):
            traits = ggml.type_traits(section.type_id)
            if traits is None or n_columns % traits.block_elements or (section is inputs.norm and traits.name != "f32"):
                raise ArtifactError(f"{artifact.path}: inputs of layers of ggml type {section.type_id}; split again")
        self._open(inputs.product, inputs.norm, n_threads)

    def _open(self, product: TableSection, norm: TableSection, n_threads: int) -> None:
        self._backend = calls.ggml_backend_init_by_type(_CPU, None)
        if not self._backend:
            raise NativeError("this build of ggml cannot compute on the processor")
        registry = calls.ggml_backend_dev_backend_reg(calls.ggml_backend_get_device(self._backend))
        set_threads = calls.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_set_n_threads")
        if set_threads:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(set_threads)(self._backend, n_threads)
        size = 2 * calls.ggml_tensor_overhead()
        self._weights = calls.ggml_init(InitParams(size, None, True))
        n_embd = self._artifact.n_embd
        self._product = calls.ggml_new_tensor_2d(self._weights, product.type_id, n_embd, self.n_values)
        self._norm = calls.ggml_new_tensor_1d(self._weights, norm.type_id, self._width)
        self._buffer = calls.ggml_backend_alloc_ctx_tensors(self._weights, self._backend)
        if not self._buffer:
            raise NativeError("not enough memory for the inputs of layers")
        for tensor, section in ((self._product, product), (self._norm, norm)):
            self._read(tensor, section.offset_bytes)
        self._allocator = calls.ggml_gallocr_new(calls.ggml_backend_get_default_buffer_type(self._backend))

    def _read(self, tensor: int, offset_bytes: int) -> None:
        path, size_bytes = self._artifact.path, calls.ggml_nbytes(tensor)
        if path.stat().st_size < offset_bytes + size_bytes:
            raise ArtifactError(f"{path}: ends before its inputs of layers do; copy it again")
        mapped = np.memmap(path, np.uint8, mode="r", offset=offset_bytes, shape=(size_bytes,))
        calls.ggml_backend_tensor_set(tensor, mapped.ctypes.data, 0, size_bytes)

    def compute(self, tokens: list[int], embeddings: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> None:
        """Write the inputs of all layers for each token: f32 [n, n_layers x width], whose rows may lie apart.

        embeddings: f32 [n, n_embd], as the first layer gets them, and not always those of the tokens. Raises
        NativeError.
        """
        for start in range(0, len(tokens), ROWS_AT_ONCE):
            end = min(len(tokens), start + ROWS_AT_ONCE)
            np.copyto(self._embeddings[: end - start], embeddings[start:end])
            self._tokens.read(tokens[start:end], self._token_rows[: end - start])
            self._compute(end - start)
            out[start:end] = self._token_rows[: end - start]

    def _compute(self, n_rows: int) -> None:
        """Replace the rows by token by what layers are given."""
        n_embd = self._artifact.n_embd
        context = calls.ggml_init(InitParams(len(self._memory), ctypes.addressof(self._memory), True))
        try:
            rows = calls.ggml_new_tensor_2d(context, _F32, n_embd, n_rows)
            by_token = calls.ggml_new_tensor_2d(context, _F32, self.n_values, n_rows)
            for tensor in (rows, by_token):
                calls.ggml_set_input(tensor)
            made = calls.ggml_mul_mat(context, self._product, rows)
            made = calls.ggml_scale(context, made, np.float32(1.0) / _root(n_embd))
            made = calls.ggml_reshape_3d(context, made, self._width, self._n_layers, n_rows)
            made = calls.ggml_mul(context, calls.ggml_rms_norm(context, made, self._epsilon), self._norm)
            looked_up = calls.ggml_reshape_3d(context, by_token, self._width, self._n_layers, n_rows)
            looked_up = calls.ggml_scale(context, looked_up, _root(self._width))
            found = calls.ggml_scale(context, calls.ggml_add(context, made, looked_up), np.float32(1) / _root(2))
            graph = calls.ggml_new_graph_custom(context, _GRAPH_NODES, False)
            calls.ggml_build_forward_expand(graph, found)
            if not calls.ggml_gallocr_alloc_graph(self._allocator, graph):
                raise NativeError("not enough memory for the inputs of layers")
            for tensor, array in ((rows, self._embeddings), (by_token, self._token_rows)):
                calls.ggml_backend_tensor_set(tensor, array.ctypes.data, 0, array[:n_rows].nbytes)
            if calls.ggml_backend_graph_compute(self._backend, graph):
                raise NativeError("ggml could not compute the inputs of layers")
            size_bytes = self._token_rows[:n_rows].nbytes
            calls.ggml_backend_tensor_get(found, self._token_rows.ctypes.data, 0, size_bytes)
        finally:
            calls.ggml_free(context)

    def close(self) -> None:
        """Free what ggml holds. May be called twice."""
        for name, free in (
            ("_allocator", calls.ggml_gallocr_free),
            ("_buffer", calls.ggml_backend_buffer_free),
            ("_weights", calls.ggml_free),
            ("_backend", calls.ggml_backend_free),
        ):
            held = getattr(self, name)
            setattr(self, name, 0)
            if held:
                free(held)

    def __del__(self) -> None:
        self.close()
