"""Drafts by an EAGLE-3 model on the last stage, from the inner rows that all stages hand on. Decode thread only.

The model's encoder makes one row of the inner rows of a position. Its decoder pairs that row with the token of the next
position, and attends to its own KV cells, in a llama.cpp context of its own. Where a draft is wanted, it goes on from
its own output. The driver of llama.cpp's `draft-eagle3` does the same. Lanes, and what becomes of missing cells, are as
with prediction layers: see stage.engine.prediction.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as llama

from relayline.stage.engine import ggml
from relayline.stage.engine.artifact import StageArtifact
from relayline.stage.engine.devices import place
from relayline.stage.engine.prediction import LatestStep, Predictor, params_like
from relayline.stage.engine.told_rows import Guess, Rows, Told
from relayline.wire.common.errors import NativeError, UsageError
from relayline.wire.common.faulty_amx import leave_faulty_amx
from relayline.wire.model_files.eagle3 import GUESSES, read_eagle3
from relayline.wire.settings.table import EngineSettings

ENCODED_ROWS = 64  # at once: llama.cpp has room for the logits of as many, though the encoder gives none


class Inner(LatestStep, Protocol):
    """The rows of the engine's last step, with their inner rows; see stage.engine.step_batch.StepBatch."""

    def inner_rows(self, rows: npt.NDArray[np.intp]) -> Rows:
        """Return the inner rows of such rows, as the model reads them."""


class EaglePredictor(Predictor):
    """An EAGLE-3 model with its cells."""

    begins_with_zeros = False
    what = "the draft model"
    _shift = 1

    def __init__(
        self, path: Path, settings: EngineSettings, artifact: StageArtifact, context: Any, params: Any, batch: Inner
    ) -> None:
        """`params`, `batch`: those of the engine's own `context`, whose model's head it uses if it has none.

        Raises UsageError for a model that has no token table, ModelFileError for a damaged one or one for another
        model, NativeError for missing memory.
        """
        file = read_eagle3(path)
        file.check_target(artifact.source_layers, artifact.n_embd, artifact.n_vocab)
        if not file.has_table:
            text = "it has no token table; a coordinator adds the model's for stages that join (up, or stage --join)"
            raise UsageError(f"{path}: {text}")
        self._inner, self.n_drafts = batch, GUESSES
        self._draft_model, self._context = _load(path, settings, artifact), None
        try:
            opened = functools.partial(_open, path, self._draft_model, context, params)
            self._begin(self._draft_model, opened, params)
        except BaseException:
            self.close()
            raise
        n_columns = file.target_width * len(file.layers)
        self._encoded = np.zeros((min(ENCODED_ROWS, self._n_rows), n_columns), np.float32)
        self._encoder_batch = type(self._batch).from_buffer_copy(self._batch)
        self._encoder_batch.token = ctypes.POINTER(llama.llama_token)()
        self._encoder_batch.embd = ggml.pointer(self._encoded, ctypes.c_float)

    def hidden(self, rows: npt.NDArray[np.intp]) -> Rows:
        """Return a copy of the inner rows of rows of the engine's last step. Raises NativeError."""
        return self._inner.inner_rows(rows)

    def take(self, told: Sequence[Told]) -> list[list[Guess]]:
        """Take one step's rows in, and return the guesses behind each part.

        Raises NativeError; then no lane has any cells.
        """
        try:
            rows = self._encode(np.concatenate([part.rows for part in told]))
        except NativeError:
            self.forget()
            raise
        ends = np.cumsum([len(part.rows) for part in told])[:-1]
        parts = zip(told, np.split(rows, ends), strict=True)
        return super().take([dataclasses.replace(part, rows=encoded) for part, encoded in parts])

    def _encode(self, inner: Rows) -> Rows:
        made = np.empty((len(inner), self._width), np.float32)
        batch, n_most = self._encoder_batch, len(self._encoded)
        first = int(llama.llama_memory_seq_pos_max(self._memory, 0)) + 1  # llama.cpp insists, and does not use them
        for start in range(0, len(inner), n_most):
            n_rows = min(n_most, len(inner) - start)
            np.copyto(self._encoded[:n_rows], inner[start : start + n_rows])
            batch.n_tokens = n_rows
            self._wants[:n_rows], self._lanes[:n_rows] = 1, 0
            self._positions[:n_rows] = np.arange(first, first + n_rows)
            self._encode_batch(batch)
            made[start : start + n_rows] = self._rows_of(self._context, n_rows)
        return made

    def close(self) -> None:
        """Free context and model. May be called twice."""
        super().close()
        if self._draft_model is not None:
            llama.llama_model_free(self._draft_model)
            self._draft_model = None


def _load(path: Path, settings: EngineSettings, artifact: StageArtifact) -> Any:
    """Return the model, on the GPU where the stage's head is. Raises NativeError."""
    has_head_there = settings.gpu_layers < 0 or settings.gpu_layers > artifact.own_layers
    own = dataclasses.replace(
        settings, gpu_layers=-1 if has_head_there else 0, n_cpu_moe=0, override_tensor="", tensor_split="",
        split_mode="none" if settings.split_mode == "tensor" else settings.split_mode,
    )  # fmt: skip
    params = llama.llama_model_default_params()
    placed = place(params, own, artifact, ggml.list_devices())  # held by its name until the call is over
    leave_faulty_amx(llama._lib, params)
    params.load_mode = llama.LLAMA_LOAD_MODE_MMAP
    ggml.LOG.watch()
    model = llama.llama_model_load_from_file(bytes(path), params)
    del placed
    if not model:
        raise NativeError(f"{path}: cannot be loaded: {ggml.LOG.reason('llama.cpp gave no reason')}")
    return model


def _open(path: Path, model: Any, context: Any, params: Any) -> Any:
    own = params_like(params)
    own.n_outputs_max = max(params.n_seq_max, min(ENCODED_ROWS, own.n_batch))
    own.ctx_other = context
    ggml.LOG.watch()
    made = llama.llama_init_from_model(model, own)
    if not made:
        raise NativeError(f"{path}: cannot make a context for it: {ggml.LOG.reason('no reason given')}")
    return made
