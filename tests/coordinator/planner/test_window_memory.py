"""Plans of models with sliding windows: memory of their cells, and the context that they have room for."""

from __future__ import annotations

import dataclasses

import pytest

from relayline.coordinator.planner.instance import Load, ModelShape
from relayline.coordinator.planner.memory import compute_bytes, kv_cells, stage_memory, window_kv_cells
from relayline.wire.common.checkpoints import CHECKPOINTS_PER_LANE_MAX
from relayline.wire.common.kv_layout import keeps_window, window_cells
from relayline.wire.common.units import GIB

KV_BYTES = 4_096
# Twelve layers, of which every sixth has no window, as in Gemma 3.
SHAPE = ModelShape(
    layer_bytes=(GIB // 4,) * 12,
    head_bytes=GIB // 4,
    embedding_bytes=GIB // 4,
    kv_bytes=(KV_BYTES,) * 12,
    n_embd=1_024,
    n_vocab=32_000,
    n_ff=4_096,
    windows=(True, True, True, True, True, False) * 2,
    window_tokens=1_024,
    n_masks=2,
)
LOAD = Load(ctx_tokens=8_192, n_lanes=8, kv_layout="per-lane", max_rows=512)


@pytest.mark.parametrize(
    ("asked", "n_needed", "n_cells", "keeps"),
    [
        ("auto", 1_024, 2_048, True),
        ("auto", 1_024, 2_047, False),
        ("window", 1_024, 1_025, True),
        ("window", 1_024, 1_024, False),
        ("all", 256, 65_536, False),
    ],
)
def test_windows_are_kept_alone_where_that_pays(asked: str, n_needed: int, n_cells: int, keeps: bool) -> None:
    assert keeps_window(asked, n_needed=n_needed, n_cells=n_cells) is keeps


@pytest.mark.parametrize(
    ("layout", "n_cells", "found"),
    [("per-lane", 8_192, 1_024 + 512), ("unified", 65_536, 9 * 1_024 + 512), ("unified", 1_000, 1_024)],
)
def test_there_are_cells_for_the_windows_and_a_step(layout: str, n_cells: int, found: int) -> None:
    assert window_cells(layout, window=1_024, n_sequences=9, n_cells=n_cells, n_rows=512) == found


def test_layers_with_a_window_take_the_cells_of_windows_and_the_host_their_checkpoints() -> None:
    assert window_kv_cells(SHAPE, LOAD) == 8 * (1_024 + 512)
    few, all_cells = (
        stage_memory(SHAPE, dataclasses.replace(LOAD, window_cells=cells), 0, 6) for cells in ("auto", "all")
    )
    assert all_cells.kv_bytes == 6 * KV_BYTES * 8 * 8_192
    checkpoints = 5 * KV_BYTES * 1_024 * 8 * CHECKPOINTS_PER_LANE_MAX
    assert few.kv_bytes == KV_BYTES * 8 * (8_192 + 5 * (1_024 + 512)) + checkpoints


def test_a_quantised_cache_has_smaller_windows_too() -> None:
    f16, q8 = (stage_memory(SHAPE, dataclasses.replace(LOAD, kv_type=kind), 0, 6) for kind in ("f16", "q8_0"))
    assert q8.kv_bytes == pytest.approx(f16.kv_bytes * 34 / 64)


def test_a_mask_for_windows_is_as_wide_as_their_cells() -> None:
    one = dataclasses.replace(SHAPE, n_masks=1)
    more = compute_bytes(SHAPE, LOAD, is_last=False) - compute_bytes(one, LOAD, is_last=False)
    assert more == 2 * LOAD.max_rows * (1_024 + 512)


def test_a_model_with_recurrent_states_too_keeps_all_cells() -> None:
    hybrid = dataclasses.replace(SHAPE, state_bytes=(1_000,) * 12)
    assert window_kv_cells(hybrid, LOAD) == kv_cells(LOAD)
    assert window_kv_cells(dataclasses.replace(SHAPE, windows=(), window_tokens=0), LOAD) == kv_cells(LOAD)
