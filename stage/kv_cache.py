"""What llama.cpp is told of its KV cache: types, cells, and how attention reads them. Pure.

On a CPU llama.cpp's flash attention goes through the cells one by one for each row and head, masked ones too (some 8 ns
each), which in a unified cache are those of all other lanes. Measured on 16 rows of 16 lanes of 1,024 tokens (10 layers
of a 1B shape, 1 thread): unified 1,504 ms, a cache for each lane 655 ms, and 451 ms without flash attention, since all
scores of a lane are then one product of matrices. Without context it is 320 ms whatever the layout.
"""

from __future__ import annotations

from typing import Any

from llama_cpp import llama_cpp as llama

KV_TYPES: dict[str, int] = {
    "f32": llama.GGML_TYPE_F32,
    "f16": llama.GGML_TYPE_F16,
    "q8_0": llama.GGML_TYPE_Q8_0,
    "q5_1": llama.GGML_TYPE_Q5_1,
    "q5_0": llama.GGML_TYPE_Q5_0,
    "q4_1": llama.GGML_TYPE_Q4_1,
    "q4_0": llama.GGML_TYPE_Q4_0,
}
FLASH_ATTN: dict[str, int] = {
    "auto": llama.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": llama.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": llama.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
UNQUANTISED = ("f16", "f32")  # a quantised cache needs flash attention
SCORE_BYTES_MAX = 1 << 30  # of scores without flash attention, f32
CTX_STEP_TOKENS = 256  # llama.cpp rounds a context up to this; done here first, so that n_batch is not clipped
SPARE_CELLS = 256  # of one spare lane, in a unified cache


def count_cells(kv_layout: str, n_lanes: int, spare_lanes: int, ctx_tokens: int, n_rows: int) -> int:
    """Return the cells of all lanes, at least `n_rows`, as llama.cpp would round them."""
    if kv_layout == "per-lane":  # spare lanes too are as long as the others
        n_sequences = n_lanes + spare_lanes
        lane_cells = max(ctx_tokens, -(-n_rows // n_sequences))
        return -(-lane_cells // CTX_STEP_TOKENS) * CTX_STEP_TOKENS * n_sequences
    n_cells = max(n_lanes * ctx_tokens + spare_lanes * SPARE_CELLS, n_rows)
    return -(-n_cells // CTX_STEP_TOKENS) * CTX_STEP_TOKENS


def lay_out(
    params: Any,
    *,
    kv_layout: str,
    kv_type: str,
    flash_attn: str,
    n_lanes: int,
    spare_lanes: int,
    ctx_tokens: int,
    max_rows: int,
    gpu_layers: int,
    n_heads: int,
) -> None:
    """Set in llama_context_params all that concerns the KV cache; `n_ubatch` must be set before.

    Flash attention "auto" leaves the choice to llama.cpp, unless it is slow and the scores that there are without it
    fit into memory.
    """
    n_rows = params.n_ubatch
    params.n_ctx = count_cells(kv_layout, n_lanes, spare_lanes, ctx_tokens, n_rows)
    params.n_seq_max = n_lanes + spare_lanes
    params.type_k = params.type_v = KV_TYPES[kv_type]
    params.kv_unified = kv_layout == "unified"  # then a step is one micro-batch in its row order, and prefixes are free
    params.swa_full = True  # a lane can be rewound to any position
    is_slow = kv_layout == "per-lane" and not gpu_layers and kv_type in UNQUANTISED
    scores_fit = 4 * max_rows * ctx_tokens * n_heads <= SCORE_BYTES_MAX
    params.flash_attn_type = FLASH_ATTN["off" if flash_attn == "auto" and is_slow and scores_fit else flash_attn]
