"""The unsplit model, run through bare llama.cpp: the reference for every split. It shares no code with
stage/engine/native.py except llama_cpp itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as llama

from relayline.stage.engine import ggml  # also silences llama.cpp's log
from relayline.stage.engine.kv_cache import FLASH_ATTN
from relayline.wire.common.faulty_amx import leave_faulty_amx

# From 64 rows on llama.cpp computes attention on CPUs in tiles. This moves the logits of a llama-1b by 0.45 deviations,
# and the distance of its own answers from the best token from 0.0 to 0.33. Answers are decoded in smaller steps, so
# they must be read in smaller steps too.
UNTILED_ROWS = 32


# The attention of stages on CPUs with lanes that have their own cells (see stage.engine.kv_cache).
LANE_ATTENTION = "auto" if ggml.attends_own_cells(n_rows=1, n_heads=1, n_kv_heads=1) else "off"


class ReferenceModel:
    """One context over a whole GGUF. `n_ctx` is the sum over all sequences."""

    def __init__(
        self,
        path: Path,
        n_ctx: int,
        n_seq_max: int,
        *,
        max_rows: int = 512,
        n_threads: int = 1,
        kv_type: int | None = None,
        flash_attn: str = "auto",
        adapters: Sequence[tuple[Path, float]] = (),
    ) -> None:
        """`adapters`: LoRA files with their scales."""
        llama.llama_backend_init()
        self._context = self._model = None
        model_params = llama.llama_model_default_params()
        ggml.leave_gpus(model_params)
        leave_faulty_amx(llama._lib, model_params)
        self._model = llama.llama_model_load_from_file(str(path).encode(), model_params)
        assert self._model, f"{path} does not load"
        loaded = [llama.llama_adapter_lora_init(self._model, str(lora).encode()) for lora, _ in adapters]
        assert all(loaded), "an adapter does not load"
        params = llama.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = max_rows
        params.n_seq_max = n_seq_max
        params.n_threads = params.n_threads_batch = n_threads
        params.kv_unified = True
        params.swa_full = True
        params.flash_attn_type = FLASH_ATTN[flash_attn]
        if kv_type is not None:
            params.type_k = params.type_v = kv_type
        self._context = llama.llama_init_from_model(self._model, params)
        assert self._context, "no context"
        self._use(loaded, [scale for _, scale in adapters])
        self.n_vocab: int = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self.n_embd: int = llama.llama_model_n_embd(self._model)
        self._batch = llama.llama_batch_init(max_rows, 0, 1)

    def _use(self, adapters: list[Any], scales: list[float]) -> None:
        handles = (llama.llama_adapter_lora_p_ctypes * len(adapters))(*adapters)
        factors = (ctypes.c_float * len(scales))(*scales)
        assert llama.llama_set_adapters_lora(self._context, handles, len(adapters), factors) == 0

    def read(self, tokens: Sequence[int], first_position: int) -> np.ndarray:
        """Decode consecutive tokens of sequence 0, UNTILED_ROWS per step: f32 [len(tokens), n_vocab]."""
        rows = [np.empty((0, self.n_vocab), np.float32)]
        for start in range(0, len(tokens), UNTILED_ROWS):
            step = tokens[start : start + UNTILED_ROWS]
            first = first_position + start
            rows.append(self.decode(step, range(first, first + len(step)), [0] * len(step), [True] * len(step)))
        return np.concatenate(rows)

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], seq_ids: Sequence[int], wants: Sequence[bool]
    ) -> np.ndarray:
        """One llama_decode. Returns a copy of the wanted rows' logits, in row order: f32 [sum(wants), n_vocab]."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for row, (token, position, seq_id, want) in enumerate(zip(tokens, positions, seq_ids, wants, strict=True)):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = seq_id
            batch.logits[row] = int(want)
        code = llama.llama_decode(self._context, batch)
        assert code == 0, f"llama_decode gave {code}"
        wanted = [row for row, want in enumerate(wants) if want]
        logits = np.empty((len(wanted), self.n_vocab), np.float32)
        for index, row in enumerate(wanted):
            logits[index] = np.ctypeslib.as_array(llama.llama_get_logits_ith(self._context, row), (self.n_vocab,))
        return logits

    def drop_from(self, seq_id: int, position: int) -> None:
        """Forget positions at and above `position`."""
        assert llama.llama_memory_seq_rm(llama.llama_get_memory(self._context), seq_id, position, -1)

    def greedy(self, prompt: Sequence[int], n_tokens: int, seq_id: int = 0) -> list[int]:
        """The greedy continuation of `prompt`, one token a step, on an empty sequence."""
        logits = self.decode(prompt, range(len(prompt)), [seq_id] * len(prompt), [False] * (len(prompt) - 1) + [True])
        tokens = [int(logits[0].argmax())]
        while len(tokens) < n_tokens:
            position = len(prompt) + len(tokens) - 1
            logits = self.decode([tokens[-1]], [position], [seq_id], [True])
            tokens.append(int(logits[0].argmax()))
        return tokens

    def close(self) -> None:
        """Free batch, context and model."""
        if self._context:
            llama.llama_batch_free(self._batch)
            llama.llama_free(self._context)
            self._context = None
        if self._model:
            llama.llama_model_free(self._model)
            self._model = None

    def __enter__(self) -> ReferenceModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
