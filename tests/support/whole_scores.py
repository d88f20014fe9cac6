"""The pooled rows of a whole model, and the scores of a whole reranker, by llama.cpp itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as llama

from relayline.stage.engine import ggml

CTX = 512
RANK = 4  # LLAMA_POOLING_TYPE_RANK


def whole_chances(path: Path, prompt: Sequence[int]) -> npt.NDArray[np.float32]:
    """Return the chances of all labels for a prompt, by the pooling that the file states."""
    return whole_pooled(path, prompt, None)


def whole_pooled(path: Path, prompt: Sequence[int], pooling: int | None) -> npt.NDArray[np.float32]:
    """Return the pooled row of a prompt, f32 [n_embd]; with `pooling` None, what a reranker's head makes of it."""
    params = llama.llama_model_default_params()
    ggml.leave_gpus(params)
    model = llama.llama_model_load_from_file(str(path).encode(), params)
    options = llama.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = CTX
    options.embeddings, options.n_threads = True, 1
    if pooling is not None:
        options.pooling_type = pooling
    context = llama.llama_init_from_model(model, options)
    batch = llama.llama_batch_init(CTX, 0, 1)
    try:
        assert llama.llama_pooling_type(context) == (RANK if pooling is None else pooling)
        batch.n_tokens = len(prompt)
        for row, token in enumerate(prompt):
            batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.logits[row] = token, row, 1, 1
            batch.seq_id[row][0] = 0
        assert llama.llama_decode(context, batch) == 0
        found = llama.llama_get_embeddings_seq(context, 0)
        n_values = llama.llama_model_n_cls_out(model) if pooling is None else llama.llama_model_n_embd(model)
        return np.ctypeslib.as_array(found, (n_values,)).copy()
    finally:
        llama.llama_batch_free(batch)
        llama.llama_free(context)
        llama.llama_model_free(model)
