"""Lanes that are saved and restored into others: both layouts, quantised, with windows, with a recurrent state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from relayline.coordinator.model.split import split_model
from relayline.deploy.testing.engines import engine_config
from relayline.deploy.testing.tiny_slices import TinyShape, write_stage
from relayline.stage.engine.native import NativeEngine
from relayline.wire.common.errors import NativeError, PositionGapError
from tests.support.tiny_models import make_tiny

CTX_TOKENS, N_LANES = 96, 3
N_HELD, N_MORE = 40, 6
KINDS = (
    "unified", "unified q8_0", "per-lane", "per-lane q8_0", "gemma3:pattern unified", "gemma3:pattern per-lane",
    "lfm2 unified", "lfm2 per-lane",
)  # fmt: skip
OTHER_SHAPE = 3e-2  # as in test_native.py


def stage_of(kind: str, directory: Path) -> Path:
    if not kind:
        return write_stage(directory / "only.gguf", TinyShape(n_heads=2), 0, [])
    split_model(make_tiny(kind, directory / "model.gguf"), directory / "out", cuts=())
    return directory / "out" / "stage-0.gguf"


@pytest.fixture(scope="module", name="loaded", params=KINDS)
def loaded_fixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeEngine]:
    tmp_path = tmp_path_factory.mktemp("stage")
    words = request.param.split()
    family = words.pop(0) if words[0] not in ("unified", "per-lane") else ""
    kv_type = words[1] if len(words) > 1 else "f16"
    config = engine_config(
        stage_of(family, tmp_path), N_LANES, CTX_TOKENS, CTX_TOKENS, kv_layout=words[0], kv_type=kv_type
    )
    with NativeEngine(config) as engine:
        yield engine


@pytest.fixture(name="engine")
def engine_fixture(loaded: NativeEngine) -> NativeEngine:
    for lane in range(N_LANES):
        loaded.clear(lane)
    return loaded


def rows_of(engine: NativeEngine) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((CTX_TOKENS, engine.n_embd), np.float32)


def feed(engine: NativeEngine, lane: int, first: int, end: int) -> np.ndarray:
    """Decode rows [first:end) of the one history; returns the last one's logits."""
    n_rows = end - first
    engine.input_rows[:n_rows] = rows_of(engine)[first:end]
    engine.seq_ids[:n_rows], engine.positions[:n_rows] = lane, range(first, end)
    engine.wants[:n_rows] = 1
    engine.decode(n_rows)
    return engine.logits(n_rows - 1).copy()


def test_a_lane_goes_on_in_another_as_if_it_had_not_been_away(engine: NativeEngine) -> None:
    feed(engine, 0, 0, N_HELD)
    saved = engine.saved.save(0)
    expected = feed(engine, 0, N_HELD, N_HELD + N_MORE)
    engine.clear(0)
    engine.input_rows[:3] = 1.0  # another stream has had the lane in between
    engine.seq_ids[:3], engine.positions[:3] = 0, range(3)
    engine.decode(3)
    assert engine.saved.restore(2, saved) == N_HELD
    assert engine.lane_tokens(2) == N_HELD
    got = feed(engine, 2, N_HELD, N_HELD + N_MORE)
    assert np.abs(got - expected).max() < OTHER_SHAPE
    assert engine.saved.token_ns > 0


def test_checkpoints_come_back_with_their_lane(engine: NativeEngine) -> None:
    feed(engine, 0, 0, 24)
    engine.checkpoint(0)
    feed(engine, 0, 24, N_HELD)
    saved = engine.saved.save(0)
    engine.clear(0)
    engine.saved.restore(1, saved)
    try:
        engine.check_rewind(1, 24)
    except PositionGapError:
        assert engine.attention.window, "cells that no next row would read are not saved"
        return
    engine.drop_from(1, 24)
    got = feed(engine, 1, 24, N_HELD)
    assert np.abs(got - feed(engine, 2, 0, N_HELD)).max() < OTHER_SHAPE


def test_a_copy_that_llama_cpp_puts_off_is_saved_too(engine: NativeEngine) -> None:
    feed(engine, 0, 0, N_HELD)
    engine.copy_prefix(0, 1, N_HELD)
    try:
        saved = engine.saved.save(1)
    except NativeError:
        assert engine.keeps_state, "it may be refused where the lane could not forget a row"
        return
    engine.clear(0)
    engine.clear(1)
    engine.saved.restore(2, saved)
    got = feed(engine, 2, N_HELD, N_HELD + N_MORE)
    expected = feed(engine, 0, 0, N_HELD + N_MORE)
    assert np.abs(got - expected).max() < OTHER_SHAPE


def test_a_state_of_another_engine_is_refused(engine: NativeEngine) -> None:
    feed(engine, 0, 0, N_HELD)
    saved = engine.saved.save(0)
    for broken in (saved[:20], saved[:-8], np.zeros(4_096, np.uint8), np.full(4_096, 255, np.uint8)):
        with pytest.raises(NativeError):
            engine.saved.restore(1, broken.copy())
        assert engine.lane_tokens(1) == 0
