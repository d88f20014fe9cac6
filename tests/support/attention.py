"""How far results may differ when other rows or cells are in the batch: it depends on the build's attention."""

from __future__ import annotations

from relayline.stage.engine import ggml


def near(with_ours: float, with_llama_cpp: float) -> float:
    """Return the bound for this process. llama.cpp's own flash attention adds up in half precision, in cells' order."""
    return with_ours if ggml.attends_own_cells(n_rows=1, n_heads=4, n_kv_heads=2) else with_llama_cpp
