"""Parts of rows of logits that stay on the device: the largest of each block, and the logits of some tokens.

A row of 128,256 logits is 513 kB, and a draw looks at few of them (`stage.sampling.device_draws`). After a step two
small graphs of our own run on the device that holds its logits: a maximum over the places of each block, and a gather.
Steps that draw nothing do not run them. They read the memory of the step's tensor, which is valid until the next
decode.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from relayline.stage.engine.ggml_functions import InitParams, calls
from relayline.stage.sampling.draws import BLOCK, BLOCKS_FROM
from relayline.wire.common.errors import NativeError
from relayline.wire.common.ggml_tensor import GgmlTensor

GATHERED_MAX = 65_536  # logits that one graph gathers
_F32, _I32, _POOL_MAX, _CPU = 0, 26, 0, 0  # of ggml.h's enums


def n_blocks_of(n_vocab: int) -> int:
    """Return the blocks of a vocabulary; 0 where it has none, or they are not all whole."""
    return n_vocab // BLOCK if n_vocab >= BLOCKS_FROM and n_vocab % BLOCK == 0 else 0


class DeviceRows:
    """Two graphs on the device that holds a context's logits. Decode thread only."""

    def __init__(self, n_vocab: int, max_rows: int, logits: int) -> None:
        """`logits` is the tensor of a step that was computed. Raises NativeError where its device runs no graph."""
        self._n_vocab, self._n_blocks = n_vocab, n_blocks_of(n_vocab)
        self._arena = self._buffer = None
        kind = calls.ggml_backend_buffer_get_type(GgmlTensor.from_address(logits).buffer)
        device = calls.ggml_backend_buft_get_device(kind) or calls.ggml_backend_dev_by_type(_CPU)  # a CPU's has none
        self._backend: Any = calls.ggml_backend_dev_init(device, None) if device else None
        if not self._backend:
            raise NativeError("this device runs no graph beside llama.cpp's; use --device-sampling on")
        self._arena = arena = calls.ggml_init(InitParams(1 << 20, None, True))
        # Stand for the logits of a step; their memory is the step's own.
        self._blocks = calls.ggml_new_tensor_3d(arena, _F32, self._n_blocks, BLOCK, max_rows)
        self._tokens = calls.ggml_new_tensor_2d(arena, _F32, 1, n_vocab * max_rows)
        for tensor in (self._blocks, self._tokens):
            _use(tensor, logits)
        self._places = calls.ggml_new_tensor_1d(arena, _I32, GATHERED_MAX)
        self._maxima = calls.ggml_pool_2d(arena, self._blocks, _POOL_MAX, 1, BLOCK, 1, BLOCK, 0.0, 0.0)
        self._gathered = calls.ggml_get_rows(arena, self._tokens, self._places)
        if not all(calls.ggml_backend_dev_supports_op(device, each) for each in (self._maxima, self._gathered)):
            raise NativeError("this device has no operation for parts of its logits; use --device-sampling on")
        self._graphs = []
        for tensor in (self._maxima, self._gathered):
            graph = calls.ggml_new_graph(arena)
            calls.ggml_build_forward_expand(graph, tensor)
            self._graphs.append(graph)
        self._buffer = calls.ggml_backend_alloc_ctx_tensors(arena, self._backend)
        if not self._buffer:
            raise NativeError("the device has no memory left for parts of its logits; use --device-sampling on")

    def maxima(self, logits: int, n_rows: int) -> npt.NDArray[np.float32]:
        """Return the largest logit of each block of a step's first rows: f32 [n_rows, n_blocks]. A NaN may be left out.

        Raises NativeError.
        """
        _use(self._blocks, logits)
        for tensor in (self._blocks, self._maxima):
            GgmlTensor.from_address(tensor).ne[2] = n_rows
        self._run(0)
        found = np.empty((n_rows, self._n_blocks), np.float32)
        calls.ggml_backend_tensor_get(self._maxima, found.ctypes.data, 0, found.nbytes)
        return found

    def gathered(self, logits: int, n_rows: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return logits of a step's first rows: f32 [n], of places: row x n_vocab + token. Raises NativeError."""
        _use(self._tokens, logits)
        GgmlTensor.from_address(self._tokens).ne[1] = n_rows * self._n_vocab
        found = np.empty(places.size, np.float32)
        for begin in range(0, places.size, GATHERED_MAX):
            some, part = places[begin : begin + GATHERED_MAX].astype(np.int32), found[begin : begin + GATHERED_MAX]
            GgmlTensor.from_address(self._places).ne[0] = some.size
            GgmlTensor.from_address(self._gathered).ne[1] = some.size
            calls.ggml_backend_tensor_set(self._places, some.ctypes.data, 0, some.nbytes)
            self._run(1)
            calls.ggml_backend_tensor_get(self._gathered, part.ctypes.data, 0, part.nbytes)
        return found

    def _run(self, graph: int) -> None:
        code = calls.ggml_backend_graph_compute(self._backend, self._graphs[graph])
        if code != 0:
            raise NativeError(f"the device failed with code {code} on its logits; use --device-sampling on")

    def close(self) -> None:
        """Give the device's memory back. May be called twice."""
        if self._buffer:
            calls.ggml_backend_buffer_free(self._buffer)
        if self._arena:
            calls.ggml_free(self._arena)
        if self._backend:
            calls.ggml_backend_free(self._backend)
        self._buffer = self._arena = self._backend = None


def _use(tensor: int, other: int) -> None:
    """Let a tensor have another one's memory."""
    mine, theirs = GgmlTensor.from_address(tensor), GgmlTensor.from_address(other)
    mine.data, mine.buffer = theirs.data, theirs.buffer
