"""The layout of a stage's KV cells, and whether attention then computes all scores of a step at once. Pure.

Stages and the planner both ask here. Unified, all lanes share the cells and a step is one micro-batch in its row order.
Per-lane, each lane has its own cells. Attention then walks only as many cells as the longest lane of the micro-batch
has, but llama.cpp computes only neighbouring lanes at once (stage.engine.micro_batches).

On a CPU llama.cpp's flash attention goes through the cells one by one for each row and head. It includes masked cells,
which in a unified cache are those of all other lanes. With 64 tokens in each lane, 16 rows of 16 lanes took 103 ms
unified and 111 ms per lane; with 256: 142 and 118, with 1,024: 429 and 174, with 2,048: 745 and 179
(`python -m benches.contexts`).
Hence "auto": streams that may grow long get their own cells on a CPU. Where the build's attention goes through the seen
cells alone (stage.engine.ggml.attends_own_cells) both take the same time, except that per-lane steps go in parts.
"auto" ignores this, since one layout must suit the builds of all stages. On a GPU cells are shared: there a
micro-batch of few rows takes half as long as a step of 32, and tokens are found on the device with shared cells alone.
With more than about 18,000 tokens in all lanes, cells per lane should be faster (docs/results/gpu.md).

All stages of a pipeline need the same layout, because the coordinator's plans and kept lanes are made for one.

In layers with a sliding window, a lane's next row reads the latest cells alone (`keeps_window`). A stage may keep all
others too, or give their memory up. A lane can then be taken back by some rows, and further to checkpoints alone.
"""

from __future__ import annotations

from collections.abc import Iterable

LAYOUTS = ("unified", "per-lane")
KV_LAYOUTS = ("auto", *LAYOUTS)  # the possible settings
LONG_LANE_TOKENS = 1_024  # from which on a lane is taken for one whose stream grows long
# Architectures on which llama.cpp aborts if lanes have separate cells (ggml_can_repeat in the model's graph).
UNIFIED_ARCHITECTURES = frozenset({"kimi-linear"})
# For these, llama.cpp gives each lane its own cells whatever the setting, each lane with as many as all lanes together
# would share.
PER_LANE_ARCHITECTURES = frozenset({"deepseek4"})
# Of these, layers choose what they attend to only where lanes have separate cells, and with flash attention. Elsewhere
# llama.cpp lets them attend to everything (llama_model_minimax_m3::graph), which gives other answers.
CHOOSING_ARCHITECTURES = frozenset({"minimax-m3"})
WINDOW_CELLS = ("auto", "window", "all")  # the possible settings
# Of these, windows are chunks: a row reads those before it in its chunk. So their first cell says little about what a
# lane can be taken back to, and stages keep all.
CHUNKED_ARCHITECTURES = frozenset({"llama4"})
CTX_STEP_TOKENS = 256  # llama.cpp rounds a context up to this; stages do so first, so that n_batch is not clipped
SPARE_CELLS = 256  # of one spare lane, in a unified cache
WINDOW_CELLS_STEP = 256  # llama_kv_cache_iswa rounds the cells of windows up to this
SCORED_KV_TYPES = ("f16", "f32")  # a quantised cache needs flash attention
SCORE_BYTES_MAX = 1 << 30  # of one step's scores, f32; with more, flash attention stays


def choose_layout(asked: str, *, ctx_tokens: int, gpu_layers: int) -> str:
    """Return "unified" or "per-lane" for a key of KV_LAYOUTS, the tokens of a lane and the layers on a GPU."""
    if asked != "auto":
        return asked
    return "per-lane" if ctx_tokens >= LONG_LANE_TOKENS and not gpu_layers else "unified"


def asked_layout(asked: str, architecture: str) -> str:
    """Return the layout to ask for with a model of this architecture: where only one will do, "auto" means that one."""
    if asked != "auto":
        return asked
    if architecture in UNIFIED_ARCHITECTURES:
        return "unified"
    return "per-lane" if architecture in PER_LANE_ARCHITECTURES | CHOOSING_ARCHITECTURES else asked


def layout_refusal(layout: str, architecture: str) -> str | None:
    """Return why a model of this architecture does not run with a layout, or None."""
    if layout == "per-lane" and architecture in UNIFIED_ARCHITECTURES:
        return f"{architecture} runs with shared KV cells only; use --kv-layout unified"
    if layout == "unified" and architecture in PER_LANE_ARCHITECTURES:
        return f"{architecture} gives each lane its own cells; use --kv-layout per-lane"
    return None


def choose_pipeline_layout(asked: str, architecture: str, *, ctx_tokens: int, gpu_layers: Iterable[int]) -> str:
    """Return the one layout of stages with these layers on a GPU: as for a CPU if any of them has none there.

    `architecture`: of the model; empty if nobody knows it yet.
    """
    return choose_layout(asked_layout(asked, architecture), ctx_tokens=ctx_tokens, gpu_layers=int(all(gpu_layers)))


def count_cells(kv_layout: str, n_lanes: int, spare_lanes: int, ctx_tokens: int, n_rows: int) -> int:
    """Return the cells of all lanes, at least `n_rows`, as llama.cpp would round them."""
    if kv_layout == "per-lane":  # spare lanes too are as long as the others
        n_sequences = n_lanes + spare_lanes
        lane_cells = max(ctx_tokens, -(-n_rows // n_sequences))
        return -(-lane_cells // CTX_STEP_TOKENS) * CTX_STEP_TOKENS * n_sequences
    n_cells = max(n_lanes * ctx_tokens + spare_lanes * SPARE_CELLS, n_rows)
    return -(-n_cells // CTX_STEP_TOKENS) * CTX_STEP_TOKENS


def window_cells(layout: str, *, window: int, n_sequences: int, n_cells: int, n_rows: int) -> int:
    """Return the cells of a layer with a sliding window that llama.cpp needs: of each lane, or of all if they share.

    window: positions that a row reads, its own included. n_cells: those of a layer without a window. n_rows: of the
    largest step. As llama_kv_cache_iswa computes it.
    """
    n_windows = n_sequences if layout == "unified" else 1
    least = min(n_cells, window * n_windows + n_rows)
    return -(-least // WINDOW_CELLS_STEP) * WINDOW_CELLS_STEP


def keeps_window(asked: str, *, n_needed: int, n_cells: int) -> bool:
    """Return whether layers with a sliding window keep only n_needed cells (`window_cells`) instead of n_cells.

    "auto" gives the others up where that saves at least half of them.
    """
    if asked == "auto":
        return 2 * n_needed <= n_cells
    return asked == "window" and n_needed < n_cells


def has_scores(layout: str, *, kv_type: str, gpu_layers: int, score_bytes: int, reads_own_cells: bool) -> bool:
    """Return whether attention does without flash attention: llama.cpp's is slower for a lane's own cells on a CPU.

    score_bytes: of all scores of the largest step, 4 x rows x cells x heads. reads_own_cells: the build's flash
    attention is the one that goes through the seen cells alone, which it does where they are f16.
    """
    is_slower = kv_type in SCORED_KV_TYPES and not (reads_own_cells and kv_type == "f16")
    return layout == "per-lane" and not gpu_layers and is_slower and 0 < score_bytes <= SCORE_BYTES_MAX
