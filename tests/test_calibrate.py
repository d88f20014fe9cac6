"""Calibration: a slice's curves are measured, remembered, and leave the engine as it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from stage.calibrate import cached_curves, calibrate, fresh_curves
from stage.native import EngineConfig, NativeEngine
from tests.processes import relayline
from tests.tiny_slices import TinyShape, write_pipeline
from wire.curve import LADDER


@pytest.fixture
def artifacts(tmp_path: Path) -> list[Path]:
    return write_pipeline(tmp_path, TinyShape(), [2])


@pytest.fixture(params=[0, 1], ids=["first", "last"])
def engine(request: pytest.FixtureRequest, artifacts: list[Path]) -> Iterator[NativeEngine]:
    config = EngineConfig(artifacts[request.param], n_lanes=4, ctx_tokens=16, max_rows=32, max_wanted=8, spare_lanes=1)
    with NativeEngine(config) as engine:
        yield engine


def test_both_curves_cover_what_fits_and_no_lane_keeps_anything(engine: NativeEngine) -> None:
    curves = calibrate(engine)
    decode_rows = [rows for rows, _ in curves.decode.points()]
    assert decode_rows == [rows for rows in LADDER if rows <= (8 if engine.is_last else 32)]
    assert all(ns > 0 for _, ns in curves.decode.points() + curves.prefill.points())
    assert max(rows for rows, _ in curves.prefill.points()) <= 32
    assert [engine.lane_tokens(lane) for lane in range(5)] == [0] * 5


def test_no_time_still_gives_a_curve_to_begin_with(engine: NativeEngine) -> None:
    curves = calibrate(engine, budget_s=0)
    assert curves.decode.points()[0][0] == 1
    assert curves.prefill.is_known


def test_curves_are_remembered_by_what_changes_them(engine: NativeEngine, tmp_path: Path) -> None:
    measured = cached_curves(engine, tmp_path)
    assert cached_curves(engine, tmp_path).decode.points() == measured.decode.points()
    (file,) = (tmp_path / "curves").iterdir()
    file.write_text("not a curve")
    assert cached_curves(engine, tmp_path).decode.is_known
    fresh_curves(engine, tmp_path)
    assert len(list((tmp_path / "curves").iterdir())) == 1


def test_the_command_prints_a_table_and_json(
    artifacts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = ("--threads", "1", "--ctx", "64", "--lanes", "4")
    table = relayline("calibrate", artifacts[1], *flags)
    assert table.returncode == 0, table.stderr
    assert "ms per step" in table.stdout
    rows = json.loads(relayline("calibrate", artifacts[1], *flags, "--json").stdout)
    assert [line["rows"] for line in rows["decode"]][:4] == [1, 2, 3, 4]
    assert all(line["runs_as"] >= line["rows"] for line in rows["decode"])
