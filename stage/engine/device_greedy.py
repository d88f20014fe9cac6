"""The largest logit of each row, found where the last stage computes: its token travels, and no row of logits does.

llama.cpp copies every row of logits to the host unless the row's lane has a backend sampler. So each lane has one. All
of them together add two small operations to the graph: for every row the token of its largest logit, and the sum of its
logits, which is not finite if one of them is not. A row that the host needs is fetched alone. Of rows that draw, parts
can be fetched (`stage.engine.device_rows`).

Of equal largest logits the device may name another than the host, which takes the first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as llama

from relayline.stage.engine.artifact import StageArtifact
from relayline.stage.engine.device_rows import DeviceRows, n_blocks_of
from relayline.stage.engine.ggml_functions import calls
from relayline.wire.common.errors import InternalError, NativeError
from relayline.wire.common.ggml_tensor import GgmlTensor
from relayline.wire.settings.table import EngineSettings


def is_asked_for(settings: EngineSettings, artifact: StageArtifact) -> bool:
    """Return whether a last stage shall leave logits where it computes: auto means, where that is a GPU."""
    if settings.device_sampling != "auto":
        return settings.device_sampling != "off"
    n_layers = artifact.layer_end - artifact.layer_start
    has_head = settings.gpu_layers < 0 or settings.gpu_layers > n_layers  # llama.cpp counts the head as one more
    return has_head and bool(llama.llama_supports_gpu_offload())


def gives_parts(settings: EngineSettings) -> bool:
    """Return whether a last stage copies of rows that draw what the draws look at, and not whole rows."""
    return settings.device_sampling == "all"


class DeviceGreedy:
    """The backend samplers of one context's lanes, and their results for its last step."""

    def __init__(self, n_vocab: int, wants: npt.NDArray[np.int8], max_wanted: int, *, gives_parts: bool) -> None:
        """`wants` is the engine's, 1 for each row of a step whose logits are wanted. `gives_parts`: of drawn rows."""
        self._n_vocab, self._wants = n_vocab, wants
        self.gives_parts = gives_parts and n_blocks_of(n_vocab) > 0
        self._parts: DeviceRows | None = None  # made when first needed
        self._rows = np.empty((max_wanted, n_vocab), np.float32)  # pages come with the first use
        self._by_kind: dict[bool, tuple[int, int, int]] = {}  # logits, tokens and sums, by whether rows are wanted
        self._is_new = True  # no operations are in the graph that is being built
        self._places: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # of each row among the wanted ones
        self._n_wanted = 0
        self._fetched: set[int] = set()
        self._found: tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None = None
        self._interface = llama.llama_sampler_i(
            apply=llama.llama_sampler_i_apply(lambda *_: None),
            backend_init=llama.llama_sampler_i_backend_init(lambda *_: True),
            backend_apply=llama.llama_sampler_i_backend_apply(self._apply),
            backend_reset=llama.llama_sampler_i_backend_reset(self._reset),
        )
        self._chains: list[Any] = []

    def install(self, context: Any, n_sequences: int) -> None:
        """Give every lane its sampler. Raises NativeError."""
        for lane in range(n_sequences):
            chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
            self._chains.append(chain)
            llama.llama_sampler_chain_add(chain, llama.llama_sampler_init(ctypes.byref(self._interface), None))
            if not llama.llama_set_sampler(context, lane, chain):
                raise NativeError("this llama.cpp cannot sample on its device; use --device-sampling off")

    def _reset(self, _sampler: Any) -> None:
        self._is_new = True  # a graph begins

    def _apply(self, _sampler: Any, ggml_context: int, graph: int, data: Any) -> None:
        row = data.contents.logits
        data.contents.logits = None  # nothing that llama.cpp would copy row by row
        if not self._is_new:
            return
        self._is_new = False
        # A lane's row is a view into the logits of all rows; the trial graph of a new chain has a row alone.
        whole = GgmlTensor.from_address(row).view_src or row
        tokens, sums = calls.ggml_argmax(ggml_context, whole), calls.ggml_sum_rows(ggml_context, whole)
        for tensor in (whole, tokens, sums):
            calls.ggml_set_output(tensor)  # its memory is not used again within the graph
            calls.ggml_build_forward_expand(graph, tensor)
        # llama.cpp keeps two graphs, of steps with and without wanted rows; behind the wanted ones it adds a row.
        self._by_kind[calls.ggml_nrows(whole) > 1] = (whole, tokens, sums)

    def begin(self, n_rows: int) -> None:
        """Forget the step before. Call before each decode."""
        self._places = np.cumsum(self._wants[:n_rows], dtype=np.int64) - 1
        self._n_wanted, self._found = int(self._places[-1]) + 1, None
        self._fetched.clear()

    def token(self, row: int) -> int | None:
        """Return the token of a wanted row's largest logit; None where some logit is not finite."""
        place = self._place_of(row)
        if self._found is None:
            _, tokens, sums = self._of_step()
            found = np.empty(self._n_wanted, np.int32), np.empty(self._n_wanted, np.float32)
            for tensor, array in zip((tokens, sums), found, strict=True):
                calls.ggml_backend_tensor_get(tensor, array.ctypes.data, 0, array.nbytes)
            self._found = found
        token = int(self._found[0][place])
        return token if np.isfinite(self._found[1][place]) and 0 <= token < self._n_vocab else None

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Return a wanted row's logits: f32 [n_vocab], a view valid until the next decode."""
        place = self._place_of(row)
        logits: npt.NDArray[np.float32] = self._rows[place]
        if place not in self._fetched:
            calls.ggml_backend_tensor_get(self._of_step()[0], logits.ctypes.data, place * logits.nbytes, logits.nbytes)
            self._fetched.add(place)
        return logits

    def maxima(self, rows: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return the largest logit of each block of wanted rows: f32 [n_rows, n_blocks], see `Draws.maxima`.

        Not where a row is not finite. Raises NativeError, also where the device cannot do it.
        """
        logits = self._of_step()[0]
        if self._parts is None:
            self._parts = DeviceRows(self._n_vocab, len(self._rows), logits)
        found: npt.NDArray[np.float32] = self._parts.maxima(logits, self._n_wanted)
        return found[[self._place_of(row) for row in rows]]

    def gathered(
        self, rows: Sequence[int], at: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        """Return some logits of the rows that `maxima` was asked for: f32 [n].

        Each is that of a token and of the row at a place among these. Raises NativeError.
        """
        assert self._parts is not None
        places = np.array([self._place_of(row) for row in rows], np.int64)[at] * self._n_vocab + tokens
        return self._parts.gathered(self._of_step()[0], self._n_wanted, places)

    def _place_of(self, row: int) -> int:
        if not (0 <= row < self._places.size and self._wants[row]):
            raise InternalError(f"the step did not keep the logits of row {row}")
        return int(self._places[row])

    def _of_step(self) -> tuple[int, int, int]:
        tensors = self._by_kind.get(True)
        if tensors is None or calls.ggml_nrows(tensors[0]) != self._n_wanted + 1:
            raise NativeError(f"a step of {self._n_wanted} wanted rows left no logits; use --device-sampling off")
        return tensors

    def close(self) -> None:
        """Free the samplers, after the context. May be called twice."""
        if self._parts is not None:
            self._parts.close()
        while self._chains:
            llama.llama_sampler_free(self._chains.pop())
