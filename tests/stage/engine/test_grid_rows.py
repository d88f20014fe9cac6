"""Image rows with positions on several axes in a real engine: cut, copied, saved, and after a failed step.

tests/end_to_end/test_images_pipeline.py compares them with the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from relayline.coordinator.model.split import split_model
from relayline.deploy.testing.engines import engine_config
from relayline.stage.engine.lane_places import Grid
from relayline.stage.engine.native import NativeEngine
from relayline.wire.common.errors import InternalError, NativeError, PositionGapError
from tests.support.tiny_models import make_tiny
from tests.support.tiny_shapes import N_EMBD

ROWS = np.random.default_rng(5).standard_normal((40, N_EMBD)).astype(np.float32)
START, WIDTH, HEIGHT = 5, 4, 3
END = START + WIDTH * HEIGHT
NEAR = 1e-3  # logits have a standard deviation over 1


@pytest.fixture(scope="module", name="paths")
def paths_fixture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for family in ("qwen2vl", "qwen35", "llama"):
        directory = tmp_path_factory.mktemp(family)
        file = split_model(make_tiny(family, directory / "model.gguf"), directory / "out", cuts=())
        found[family] = directory / "out" / file.stages[0].file
    return found


@pytest.fixture(name="engine", params=["unified", "per-lane", "qwen35"])
def engine_fixture(paths: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[NativeEngine]:
    path = paths["qwen35" if request.param == "qwen35" else "qwen2vl"]
    layout = "unified" if request.param == "qwen35" else request.param
    with NativeEngine(engine_config(path, 3, 128, 32, kv_layout=layout)) as engine:
        yield engine


def read(engine: NativeEngine, lane: int, begin: int, end: int, grid: Grid | None = None) -> np.ndarray:
    """Decode rows of a lane in one step; returns the logits of the last."""
    n_rows = end - begin
    engine.input_rows[:n_rows] = ROWS[begin:end]
    engine.positions[:n_rows] = np.arange(begin, end)
    engine.seq_ids[:n_rows], engine.wants[:n_rows] = lane, 1
    engine.decode(n_rows, grids=() if grid is None else [grid])
    return engine.logits(n_rows - 1).copy()


def see(engine: NativeEngine, lane: int, *borders: int) -> None:
    """Decode an image in parts that end at some of its rows."""
    at = 0
    for border in (*borders, WIDTH * HEIGHT):
        read(engine, lane, START + at, START + border, Grid(0, border - at, lane, START, at, WIDTH, HEIGHT))
        at = border


@pytest.fixture(name="expected")
def expected_fixture(engine: NativeEngine) -> np.ndarray:
    read(engine, 2, 0, START)
    see(engine, 2)
    logits = read(engine, 2, END, END + 6)
    engine.clear(2)
    return logits


def test_parts_of_an_image_are_the_image(engine: NativeEngine, expected: np.ndarray) -> None:
    read(engine, 0, 0, START)
    see(engine, 0, 5, 7)
    assert engine.lane_tokens(0) == END
    assert np.abs(read(engine, 0, END, END + 6) - expected).max() < NEAR
    assert engine.lane_tokens(0) == END + 6
    engine.clear(0)
    read(engine, 0, 0, START)
    read(engine, 0, START, END)  # as if they were text
    assert np.abs(read(engine, 0, END, END + 6) - expected).max() > 20 * NEAR


def test_a_lane_is_cut_behind_and_before_an_image_and_not_inside(engine: NativeEngine, expected: np.ndarray) -> None:
    read(engine, 0, 0, START)
    engine.checkpoint(0)
    see(engine, 0)
    engine.checkpoint(0)
    read(engine, 0, END, END + 3)
    with pytest.raises(PositionGapError, match="inside an image"):
        engine.check_rewind(0, START + 3)
    for position in (END, START):
        engine.check_rewind(0, position)
        engine.drop_from(0, position)
        assert engine.lane_tokens(0) == position
        if position == START:
            see(engine, 0, 4)
        assert np.abs(read(engine, 0, END, END + 6) - expected).max() < NEAR
        engine.checkpoint(0)


def test_copies_and_saved_lanes_hold_their_images(engine: NativeEngine, expected: np.ndarray) -> None:
    read(engine, 0, 0, START)
    see(engine, 0)
    engine.checkpoint(0)
    engine.copy_prefix(0, 1, END)
    assert engine.lane_tokens(1) == END
    assert np.abs(read(engine, 1, END, END + 6) - expected).max() < NEAR
    engine.clear(1)
    saved = engine.saved.save(0)
    assert engine.saved.restore(1, saved) == END
    assert np.abs(read(engine, 1, END, END + 6) - expected).max() < NEAR
    engine.clear(1)
    with pytest.raises(NativeError):
        engine.saved.restore(1, saved[:40])
    with pytest.raises(NativeError):
        engine.saved.cells(0)
    assert engine.lane_tokens(1) == 0
    assert np.abs(read(engine, 0, END, END + 6) - expected).max() < NEAR


def test_a_step_that_failed_leaves_no_image(
    engine: NativeEngine, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(engine, 0, 0, START)
    with monkeypatch.context() as patch:
        patch.setattr("relayline.stage.engine.native.llama.llama_synchronize", _fail)
        with pytest.raises(OSError, match="placed"):
            see(engine, 0)
    begin = engine.lane_tokens(0)
    assert begin in (0, START)
    if not begin:
        read(engine, 0, 0, START)
    see(engine, 0)
    assert np.abs(read(engine, 0, END, END + 6) - expected).max() < NEAR


def _fail(_: object) -> None:
    raise OSError("a placed fault")


def test_a_model_without_such_axes_refuses_them(paths: dict[str, Path]) -> None:
    with NativeEngine(engine_config(paths["llama"], 1, 64, 32)) as engine, pytest.raises(InternalError, match="axes"):
        read(engine, 0, 0, 6, Grid(0, 6, 0, 0, 0, 3, 2))
