"""The KV cache's parameters for llama.cpp: types, cells, and how attention reads them (see wire.common.kv_layout)."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
from typing import Any

from llama_cpp import llama_cpp as llama

from relayline.stage.engine import ggml
from relayline.wire.common.curve import ATTENTION_TILE_ROWS
from relayline.wire.common.kv_layout import (
    CHOOSING_ARCHITECTURES,
    CHUNKED_ARCHITECTURES,
    count_cells,
    has_scores,
    keeps_window,
    window_cells,
)
from relayline.wire.settings import table
from relayline.wire.settings.table import EngineSettings

log = logging.getLogger("relayline.stage")

KV_TYPES: dict[str, int] = {name: getattr(llama, f"GGML_TYPE_{name.upper()}") for name in table.KV_TYPES}
FLASH_ATTN: dict[str, int] = {
    "auto": llama.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": llama.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": llama.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
ARCHITECTURE_BYTES = 64  # of an architecture's name, at the most
TILED_KV_TYPES = ("f16", "f32")  # of others rows are read one by one however many there are


@dataclasses.dataclass(slots=True)
class Attention:
    """How a loaded slice attends."""

    window: int  # positions of its sliding window; 0: no layer has one
    keeps_window: bool  # layers with a window keep the cells of a lane's next rows alone
    has_scores: bool  # those of a whole step are computed, without flash attention
    goes_by_tiles: bool  # see `goes_by_tiles`


def lay_out(
    params: Any, settings: EngineSettings, model: Any, *, flash_attn: str, spare_lanes: int, window: int
) -> None:
    """Set in llama_context_params all that concerns the KV cache; `n_ubatch` and `n_seq_max` must be set before.

    The settings are resolved. Flash attention "auto" leaves the choice to llama.cpp where wire.common.kv_layout does
    not know better. window: of the layers that may keep a window's cells alone; 0: none may.
    """
    n_heads = llama.llama_model_n_head(model)
    n_lanes, ctx_tokens, layout = settings.n_lanes, settings.ctx_tokens, settings.kv_layout
    params.n_ctx = count_cells(layout, n_lanes, spare_lanes, ctx_tokens, params.n_ubatch)
    params.type_k = params.type_v = KV_TYPES[settings.kv_type]
    params.kv_unified = layout == "unified"  # then a step is one micro-batch in its row order, and prefixes are free
    n_cells = params.n_ctx if layout == "unified" else params.n_ctx // params.n_seq_max
    n_needed = window_cells(
        layout, window=window, n_sequences=params.n_seq_max, n_cells=n_cells, n_rows=params.n_ubatch
    )  # fmt: skip
    # With all cells a lane can be rewound, with some exceptions in a unified cache: NativeEngine.check_rewind.
    params.swa_full = not (window and keeps_window(settings.window_cells, n_needed=n_needed, n_cells=n_cells))
    score_bytes = 4 * settings.max_rows * ctx_tokens * n_heads
    scored = has_scores(
        layout, kv_type=settings.kv_type, gpu_layers=settings.gpu_layers, score_bytes=score_bytes,
        reads_own_cells=ggml.attends_own_cells(n_rows=1, n_heads=n_heads, n_kv_heads=n_heads),
    )  # fmt: skip
    architecture = _architecture_of(model)
    scored = scored and architecture not in CHOOSING_ARCHITECTURES
    if layout == "unified" and architecture in CHOOSING_ARCHITECTURES:
        text = "with shared KV cells %s attends to all tokens, not to those its layers choose; use --kv-layout auto"
        log.warning(text, architecture)
    params.flash_attn_type = FLASH_ATTN["off" if flash_attn == "auto" and scored else flash_attn]


def _architecture_of(model: Any) -> str:
    found = ctypes.create_string_buffer(ARCHITECTURE_BYTES)
    llama.llama_model_meta_val_str(model, b"general.architecture", found, len(found))
    return found.value.decode(errors="replace")


def window_of(architecture: str, window: int) -> int:
    """Return the positions of a model's sliding window; 0 where its cells cannot be kept alone: see kv_layout."""
    return 0 if architecture in CHUNKED_ARCHITECTURES else window


def takes_lanes_apart(kv_type: str) -> bool:
    """Return whether such tiles are only for steps most of whose rows are of few lanes, as those of prompts."""
    return kv_type == "f16" and ggml.attends_lanes_apart()


def goes_by_tiles(model: Any, kv_type: str) -> bool:
    """Return whether flash attention on the processor takes many rows in tiles, whose lanes are all read for each."""
    n_heads, n_kv_heads = llama.llama_model_n_head(model), llama.llama_model_n_head_kv(model)
    if kv_type == "f16" and ggml.attends_own_cells(n_rows=ATTENTION_TILE_ROWS, n_heads=n_heads, n_kv_heads=n_kv_heads):
        return False
    return kv_type in TILED_KV_TYPES


def remedy(reason: str) -> str:
    """Return what helps where llama.cpp makes no context, for the reason in its log."""
    if "block size" in reason:  # of a quantised cache: a head's width is no multiple of it
        return "--kv-type f16 suits heads of any width"
    return "a smaller --ctx or fewer --lanes need less memory"
