"""The memory of prediction layers is the last stage's, and nobody's if they are not used."""

from __future__ import annotations

import dataclasses

import pytest

from relayline.coordinator.planner.instance import Gpu, Load, ModelShape, Offload
from relayline.coordinator.planner.memory import stage_memory

MODEL = ModelShape(
    layer_bytes=(1_000, 1_000), head_bytes=500, embedding_bytes=500, kv_bytes=(64, 64), n_embd=8, n_vocab=100, n_ff=32,
    prediction_bytes=700, prediction_kv_bytes=64,
)  # fmt: skip
OFF = Load(ctx_tokens=256, n_lanes=2, max_rows=16, kv_layout="per-lane")
ON = dataclasses.replace(OFF, mtp_drafts=3)


@pytest.mark.parametrize(
    ("stage", "weights", "cells"), [((0, 1), 0, 0), ((1, 2), 700, 64 * 512), ((0, 2), 700, 64 * 512)]
)
def test_weights_and_cells_are_counted_at_the_last_stage(stage: tuple[int, int], weights: int, cells: int) -> None:
    off, on = (stage_memory(MODEL, load, *stage) for load in (OFF, ON))
    assert (on.weights_bytes - off.weights_bytes, on.kv_bytes - off.kv_bytes) == (weights, cells)


def test_they_are_where_the_head_is() -> None:
    off, on = (stage_memory(MODEL, load, 1, 2, Offload(Gpu("CUDA0"))) for load in (OFF, ON))
    assert on.gpu is not None
    assert off.gpu is not None
    assert on.gpu.weights_bytes - off.gpu.weights_bytes == 700
    assert on.gpu.kv_bytes - off.gpu.kv_bytes == 64 * 512
    assert (on.weights_bytes, on.kv_bytes) == (off.weights_bytes, off.kv_bytes)
