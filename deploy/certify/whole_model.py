"""The unsplit model, decoded by tokens through bare llama.cpp: what `certify` holds every split against.

The only module of deploy/ that touches llama_cpp. Of the stage's code it uses just the log, the KV cache's layout and
the choice of rope factors, so that a mistake in a stage's decode cannot repeat itself here. It knows rows, positions
and lanes; not sessions, not comparisons.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as llama

from relayline.stage.engine import ggml
from relayline.stage.engine.kv_cache import lay_out
from relayline.stage.engine.rope_choice import choose_rope
from relayline.wire.common.errors import InternalError, ModelFileError, NativeError
from relayline.wire.common.faulty_amx import leave_faulty_amx
from relayline.wire.common.kv_layout import count_cells
from relayline.wire.common.rope_factors import LongRope
from relayline.wire.settings.table import EngineSettings

_VOCAB_TYPE_NONE = 0
_UNFIT_ATTRIBUTES = llama.LLAMA_TOKEN_ATTR_UNKNOWN | llama.LLAMA_TOKEN_ATTR_UNUSED | llama.LLAMA_TOKEN_ATTR_CONTROL


@dataclasses.dataclass(frozen=True, slots=True)
class WholeConfig:
    """How to load the unsplit model. Everything a stage's context also has must be equal there."""

    path: Path
    """The GGUF file, or the first of its shards."""
    settings: EngineSettings
    """As a stage has them, resolved: the layout of KV cells decides how attention is computed, too."""
    max_wanted: int = 64
    """Rows of one decode whose logits may be asked for."""
    long_rope: LongRope | None = None
    """Given for a model with two sets of rope factors: which is taken follows from the length of a lane."""


class Row(NamedTuple):
    """One row of a decode."""

    token: int
    position: int
    lane: int
    wanted: bool  # whether its logits are returned


class WholeModel:
    """One loaded model with its context. Not thread-safe; one decode at a time."""

    def __init__(self, config: WholeConfig) -> None:
        """Load the model. Raises ModelFileError or NativeError with llama.cpp's own reason."""
        self.config = config
        self._model: Any = None
        self._context: Any = None
        self._batch: Any = None
        llama.llama_backend_init()
        try:
            self._model = _load(config.path, config=config)
            if llama.llama_model_has_encoder(self._model) or not llama.llama_model_has_decoder(self._model):
                raise ModelFileError(f"{config.path}: not a model that generates text token by token")
            self._context = self._open_context()
            self._batch = llama.llama_batch_init(config.settings.max_rows, 0, 1)
        except BaseException:
            self.close()
            raise
        self.n_ctx = int(llama.llama_n_ctx(self._context))
        self.n_vocab = int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model)))

    def _open_context(self) -> Any:
        config, settings = self.config, self.config.settings
        n_rows = max(settings.max_rows, settings.n_lanes)
        params = llama.llama_context_default_params()
        params.n_batch = params.n_ubatch = n_rows
        params.n_seq_max = settings.n_lanes
        lay_out(
            params,
            settings,
            self._model,
            flash_attn="auto",
            spare_lanes=0,
            window=0,  # the reference keeps all cells
        )
        if params.kv_unified:  # stages have a spare lane
            params.n_ctx = count_cells(settings.kv_layout, settings.n_lanes, 1, settings.ctx_tokens, n_rows)
        params.n_outputs_max = max(config.max_wanted, settings.n_lanes)
        params.n_threads = params.n_threads_batch = settings.n_threads
        params.no_perf = True
        ggml.LOG.watch()
        context = llama.llama_init_from_model(self._model, params)
        if not context:
            raise NativeError(f"cannot make a context of {params.n_ctx} tokens: {ggml.LOG.reason('no reason given')}")
        return context

    def decode(self, rows: Sequence[Row]) -> npt.NDArray[np.float32]:
        """Decode rows that continue their lanes; return a copy of the wanted rows' logits: f32 [n_wanted, n_vocab].

        Raises NativeError if llama.cpp refuses, InternalError for more rows than the model was opened for.
        """
        wanted = [index for index, row in enumerate(rows) if row.wanted]
        if not 0 < len(rows) <= self.config.settings.max_rows or len(wanted) > self.config.max_wanted:
            raise InternalError(f"a decode of {len(rows)} rows with {len(wanted)} wanted is beyond what was opened")
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, row in enumerate(rows):
            batch.token[index], batch.pos[index] = row.token, row.position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row.lane
            batch.logits[index] = int(row.wanted)
        ggml.LOG.watch()
        code = llama.llama_decode(self._context, batch)
        if code != 0:
            reason = ggml.LOG.reason("llama.cpp gave no reason")
            raise NativeError(f"the unsplit model cannot be decoded (code {code}): {reason}")
        logits = np.empty((len(wanted), self.n_vocab), np.float32)
        for place, index in enumerate(wanted):
            pointer = llama.llama_get_logits_ith(self._context, index)
            if not pointer:
                raise NativeError("the unsplit model gives no logits")
            logits[place] = np.ctypeslib.as_array(pointer, (self.n_vocab,))
        return logits

    def clear(self) -> None:
        """Empty every lane, so that what follows takes the same cache cells as in a fresh context."""
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)

    def close(self) -> None:
        """Free everything. May be called twice."""
        if self._batch is not None:
            llama.llama_batch_free(self._batch)
            self._batch = None
        if self._context:
            llama.llama_free(self._context)
            self._context = None
        if self._model:
            llama.llama_model_free(self._model)
            self._model = None

    def __enter__(self) -> WholeModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def plain_tokens(path: Path, n_vocab: int) -> npt.NDArray[np.int32]:
    """Return the token ids, i32 [n], that may be in a prompt without special meaning.

    Control, unknown, unused and end-of-generation tokens are left out where the vocabulary marks them. A vocabulary
    without texts marks none, so all `n_vocab` ids of the embedding table count. Reads no weights. Raises ModelFileError
    when there are fewer than two.
    """
    llama.llama_backend_init()
    model = _load(path)
    try:
        vocab = llama.llama_model_get_vocab(model)
        if int(llama.llama_vocab_type(vocab)) == _VOCAB_TYPE_NONE:
            fit = list(range(n_vocab))
        else:
            fit = [
                token
                for token in range(min(n_vocab, int(llama.llama_vocab_n_tokens(vocab))))
                if not llama.llama_vocab_get_attr(vocab, token) & _UNFIT_ATTRIBUTES
                and not llama.llama_vocab_is_eog(vocab, token)
            ]
    finally:
        llama.llama_model_free(model)
    if len(fit) < 2:
        raise ModelFileError(f"{path}: its vocabulary has {len(fit)} ordinary tokens; there is nothing to compare")
    return np.asarray(fit, np.int32)


def _load(path: Path, *, config: WholeConfig | None = None) -> Any:
    """Load the model as configured, or its vocabulary alone."""
    params = llama.llama_model_default_params()
    rope = None  # llama.cpp reads from it until the model is loaded
    params.n_gpu_layers = config.settings.gpu_layers if config is not None else 0
    if not params.n_gpu_layers:
        ggml.leave_gpus(params)
    leave_faulty_amx(llama._lib, params)
    if config is None:
        params.vocab_only = True
    else:
        rope = choose_rope(params, config.long_rope, config.settings.ctx_tokens)
    ggml.LOG.watch()
    model = llama.llama_model_load_from_file(bytes(path), params)
    del rope
    if not model:
        raise ModelFileError(f"{path}: llama.cpp cannot load it: {ggml.LOG.reason('it gave no reason')}")
    return model
