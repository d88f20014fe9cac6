"""The model that drafts, in llama.cpp: rows in, the likeliest next token behind each last row out.

It runs in a child process (`process.py`). One thread uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from llama_cpp import llama_cpp as llama

from relayline.coordinator.drafting.streams import STEP_ROWS_MAX, Row
from relayline.coordinator.text.llama_errors import LlamaErrors
from relayline.wire.common.bounds import DRAFT_SEQUENCES_MAX
from relayline.wire.common.errors import InternalError, UsageError
from relayline.wire.common.faulty_amx import leave_faulty_amx

# Padding of vocabularies differs between sizes of a family; llama.cpp's own speculative decoding allows the same.
_VOCAB_DIFFERENCE_MAX = 128
_SAME = "a draft model needs the same vocabulary"


class DraftSettings(NamedTuple):
    """How the model is loaded."""

    n_cells: int
    n_threads: int
    gpu_layers: int  # -1: all


class DraftModel:
    """A loaded model, whose vocabulary is that of the served one."""

    def __init__(self, path: Path, vocabulary: Path, settings: DraftSettings) -> None:
        """Load it. `vocabulary`: a GGUF file with that of the served model.

        Raises UsageError where it cannot draft for that model, StartError where memory is missing.
        """
        self._path = path
        self._errors = LlamaErrors()
        served = _loaded(vocabulary, self._errors)
        self._model = _loaded(path, self._errors, vocab_only=False, gpu_layers=settings.gpu_layers)
        _check_pair(path, self._model, served)
        self._n_served = _n_tokens(served)
        llama.llama_model_free(served)
        self._vocab, self.n_vocab = llama.llama_model_get_vocab(self._model), _n_tokens(self._model)
        self._context = self._context_of(settings)
        self._memory = llama.llama_get_memory(self._context)
        self._batch = llama.llama_batch_init(STEP_ROWS_MAX, 0, 1)

    def ends(self, token: int) -> bool:
        """Return whether an answer ends with this token, or the served model has no such token."""
        return token >= self._n_served or bool(llama.llama_vocab_is_eog(self._vocab, token))

    def drop(self, sequence: int, position: int) -> None:
        """Drop a sequence's cells from this position on. Raises InternalError where llama.cpp cannot."""
        if not llama.llama_memory_seq_rm(self._memory, sequence, position, -1):
            raise InternalError(f"llama.cpp cannot take the draft model's cells back to {position}")

    def decode(self, rows: Sequence[Row]) -> list[tuple[int, float]] | None:
        """Compute rows, at most STEP_ROWS_MAX. Returns the likeliest token behind each last row and its probability.

        None: there are no cells for them. Raises InternalError where llama.cpp fails.
        """
        batch = self._batch
        batch.n_tokens = len(rows)
        for at, row in enumerate(rows):
            batch.token[at], batch.pos[at] = row.token, row.position
            batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = 1, row.sequence, row.is_last
        code = llama.llama_decode(self._context, batch)
        if code == 1:
            return None
        if code:
            raise InternalError(f"the draft model's llama_decode returned {code}: {self._errors.reason()}")
        return [self._likeliest(at) for at, row in enumerate(rows) if row.is_last]

    def _likeliest(self, at: int) -> tuple[int, float]:
        found = llama.llama_get_logits_ith(self._context, at)
        logits = np.ctypeslib.as_array(found, (self.n_vocab,))
        token = int(logits.argmax())
        return token, float(1 / np.exp(logits - logits[token]).sum(dtype=np.float64))

    def _context_of(self, settings: DraftSettings) -> Any:
        params = llama.llama_context_default_params()
        params.n_ctx = settings.n_cells
        params.n_batch = params.n_ubatch = STEP_ROWS_MAX
        params.n_seq_max = DRAFT_SEQUENCES_MAX
        params.kv_unified = True
        params.swa_full = True  # a window's old cells are wanted again after a wrong guess
        params.n_threads = params.n_threads_batch = settings.n_threads
        params.no_perf = True
        context = llama.llama_init_from_model(self._model, params)
        if not context:
            raise self._errors.error(f"{self._path}: llama.cpp cannot make a context")
        return context


def check_drafts(path: Path, model: Path, *, reads_rows: bool = False) -> None:
    """Raise UsageError unless a model can draft for another one. Only vocabularies are read.

    `reads_rows`: it drafts from the other one's inner rows, so only its vocabulary must be that of a draft model.
    """
    errors = LlamaErrors()
    draft = _loaded(path, errors)
    try:
        served = _loaded(model, errors)
        try:
            (_check_vocabularies if reads_rows else _check_pair)(path, draft, served)
        finally:
            llama.llama_model_free(served)
    finally:
        llama.llama_model_free(draft)


def _loaded(path: Path, errors: LlamaErrors, *, vocab_only: bool = True, gpu_layers: int = 0) -> Any:
    params = llama.llama_model_default_params()
    leave_faulty_amx(llama._lib, params)
    params.vocab_only = vocab_only
    params.n_gpu_layers = gpu_layers
    model = llama.llama_model_load_from_file(bytes(path), params)
    if not model:
        raise errors.error(str(path))
    return model


def _n_tokens(model: Any) -> int:
    return int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model)))


def _check_pair(path: Path, draft: Any, served: Any) -> None:
    if llama.llama_model_is_recurrent(draft) or llama.llama_model_is_hybrid(draft):
        raise UsageError(f"{path}: it has recurrent states, which cannot be taken back after a wrong guess")
    if llama.llama_model_has_encoder(draft) or not llama.llama_model_has_decoder(draft):
        raise UsageError(f"{path}: it is no model that continues text")
    _check_vocabularies(path, draft, served)


def _check_vocabularies(path: Path, draft: Any, served: Any) -> None:
    n_draft, n_served = _n_tokens(draft), _n_tokens(served)
    if abs(n_draft - n_served) > _VOCAB_DIFFERENCE_MAX:
        text = f"its vocabulary has {n_draft:,} tokens, that of the model {n_served:,}"
        raise UsageError(f"{path}: {text}; {_SAME}")
    vocabularies = [llama.llama_model_get_vocab(each) for each in (draft, served)]
    have_texts = [llama.llama_vocab_type(each) != llama.LLAMA_VOCAB_TYPE_NONE for each in vocabularies]
    if not any(have_texts):
        return
    if not all(have_texts):  # llama.cpp would abort
        who = "its tokens" if have_texts[1] else "the model's tokens"
        raise UsageError(f"{path}: {who} have no texts; {_SAME}")
    for token in range(min(n_draft, n_served)):
        ours, theirs = (llama.llama_vocab_get_text(each, token) for each in vocabularies)
        if ours != theirs:
            raise UsageError(f"{path}: token {token} is {_shown(ours)}, in the model {_shown(theirs)}; {_SAME}")


def _shown(text: bytes | None) -> str:
    return repr((text or b"").decode("utf-8", errors="replace"))[:60]
