"""An unsplit model's own guesses by its prediction layers, as llama.cpp's `draft-mtp` computes them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llama_cpp import llama_cpp as llama

from relayline.stage.engine import ggml
from relayline.stage.engine.kv_cache import FLASH_ATTN

CTX = 256


class WholePredictions:
    """The whole model and its prediction layers in bare llama.cpp, without any code of the stages."""

    def __init__(self, path: Path, flash_attn: str = "auto") -> None:
        params = llama.llama_model_default_params()
        ggml.leave_gpus(params)
        params.load_mtp = True
        self._model = llama.llama_model_load_from_file(str(path).encode(), params)
        assert self._model
        self.width = llama.llama_model_n_embd_out(self._model)
        self.n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(CTX, 0, 1)
        give = llama._lib["_Z26llama_set_embeddings_nextnP13llama_contextbb"]
        give.restype, give.argtypes = None, [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool]
        self._rows = llama._lib["_Z26llama_get_embeddings_nextnP13llama_context"]
        self._rows.restype, self._rows.argtypes = ctypes.POINTER(ctypes.c_float), [ctypes.c_void_p]
        self._contexts = []
        for kind in (llama.LLAMA_CONTEXT_TYPE_DEFAULT, llama.LLAMA_CONTEXT_TYPE_MTP):
            own = llama.llama_context_default_params()
            own.n_ctx = own.n_batch = own.n_ubatch = CTX
            own.n_threads = own.n_threads_batch = 1
            own.swa_full = True
            own.flash_attn_type = FLASH_ATTN[flash_attn]
            own.ctx_type = kind
            context = llama.llama_init_from_model(self._model, own)
            assert context
            give(context, True, kind == llama.LLAMA_CONTEXT_TYPE_MTP)  # there all rows are wanted
            self._contexts.append(context)

    def guesses(self, tokens: Sequence[int], n_guesses: int) -> list[tuple[int, float]]:
        """Read a text on empty caches and guess behind it: each token with its probability."""
        main, draft = self._contexts
        for context in self._contexts:
            llama.llama_memory_clear(llama.llama_get_memory(context), False)
        self._decode(main, tokens[:-1], 0)
        rows = np.zeros((len(tokens), self.width), np.float32)
        rows[1:] = self._hidden(main, len(tokens) - 1)
        found: list[tuple[int, float]] = []
        position, given = 0, list(tokens)
        while len(found) < n_guesses:
            logits = self._decode(draft, given, position, rows)[-1].astype(np.float64)
            position += len(given)
            rows = self._hidden(draft, len(given))[-1:]
            chances = np.exp(logits - logits.max())
            given = [int(logits.argmax())]
            found.append((given[0], float(chances.max() / chances.sum())))
        return found

    def _hidden(self, context: object, n_rows: int) -> np.ndarray:
        return np.ctypeslib.as_array(self._rows(context), (n_rows, self.width)).copy()

    def _decode(self, context: object, tokens: Sequence[int], first: int, rows: np.ndarray | None = None) -> np.ndarray:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.logits[row] = token, first + row, 1, 1
            batch.seq_id[row][0] = 0
        if rows is not None:
            rows = np.ascontiguousarray(rows)
            batch.embd = rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        assert llama.llama_decode(context, batch) == 0
        batch.embd = None  # these rows are not the batch's to free
        return np.ctypeslib.as_array(llama.llama_get_logits(context), (len(tokens), self.n_vocab)).copy()

    def close(self) -> None:
        llama.llama_batch_free(self._batch)
        for context in self._contexts:
            llama.llama_free(context)
        llama.llama_model_free(self._model)
