"""What llama.cpp is told of its KV cache: types, cells, and how attention reads them (see wire.common.kv_layout)."""

from __future__ import annotations

from typing import Any

from llama_cpp import llama_cpp as llama

from relayline.stage.engine import ggml
from relayline.wire.common.curve import ATTENTION_TILE_ROWS
from relayline.wire.common.kv_layout import has_scores

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
TILED_KV_TYPES = ("f16", "f32")  # of others rows are read one by one however many there are
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

    kv_layout is no longer "auto" here. Flash attention "auto" leaves the choice to llama.cpp where
    wire.common.kv_layout does not know better.
    """
    n_rows = params.n_ubatch
    params.n_ctx = count_cells(kv_layout, n_lanes, spare_lanes, ctx_tokens, n_rows)
    params.n_seq_max = n_lanes + spare_lanes
    params.type_k = params.type_v = KV_TYPES[kv_type]
    params.kv_unified = kv_layout == "unified"  # then a step is one micro-batch in its row order, and prefixes are free
    params.swa_full = True  # a lane can be rewound, with some exceptions in a unified cache: NativeEngine.check_rewind
    score_bytes = 4 * max_rows * ctx_tokens * n_heads
    scored = has_scores(
        kv_layout, kv_type=kv_type, gpu_layers=gpu_layers, score_bytes=score_bytes,
        reads_own_cells=ggml.attends_own_cells(n_rows=1, n_heads=n_heads, n_kv_heads=n_heads),
    )  # fmt: skip
    params.flash_attn_type = FLASH_ATTN["off" if flash_attn == "auto" and scored else flash_attn]


def goes_by_tiles(model: Any, kv_type: str) -> bool:
    """Return whether flash attention on the processor takes many rows in tiles, whose lanes are all read for each."""
    n_heads, n_kv_heads = llama.llama_model_n_head(model), llama.llama_model_n_head_kv(model)
    if kv_type == "f16" and ggml.attends_own_cells(n_rows=ATTENTION_TILE_ROWS, n_heads=n_heads, n_kv_heads=n_kv_heads):
        return False
    return kv_type in TILED_KV_TYPES
