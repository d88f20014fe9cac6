"""Stages that compute on one device measure in turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayline.deploy.testing.tiny_slices import TinyShape, write_pipeline
from relayline.stage.engine.loading import Load, LoadStoppedError
from relayline.stage.speed import device_turn, host_probe
from relayline.stage.speed.device_turn import alone_on
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.settings.table import EngineSettings


def test_the_second_stage_waits_for_the_first(tmp_path: Path) -> None:
    first = alone_on(["bus0"], directory=tmp_path)
    assert first.__enter__()
    looks = []

    class Looks(Load):
        def pause(self, seconds: float) -> None:
            looks.append(seconds)
            if len(looks) == 3:
                first.__exit__(None, None, None)

    with alone_on(["bus1", "bus0"], Looks(), directory=tmp_path) as is_alone:
        assert is_alone
        assert len(looks) == 3
    with alone_on(["bus0"], directory=tmp_path, wait_max_s=0) as is_alone:
        assert is_alone, "both have given it back"


def test_other_devices_are_no_concern(tmp_path: Path) -> None:
    with (
        alone_on(["bus0"], directory=tmp_path) as first,
        alone_on(["bus1"], directory=tmp_path, wait_max_s=0) as second,
        alone_on([], directory=tmp_path, wait_max_s=0) as third,
    ):
        assert first
        assert second
        assert third


def test_nobody_waits_for_ever(tmp_path: Path) -> None:
    with alone_on(["bus0"], directory=tmp_path), alone_on(["bus0"], directory=tmp_path, wait_max_s=0) as is_alone:
        assert not is_alone


def test_a_load_that_stops_does_not_wait(tmp_path: Path) -> None:
    load = Load()
    load.stop()
    with (
        alone_on(["bus0"], directory=tmp_path),
        pytest.raises(LoadStoppedError),
        alone_on(["bus0"], load, directory=tmp_path),
    ):
        pass


def test_without_a_place_for_files_everybody_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with alone_on(["bus0"], directory=tmp_path / "file") as is_alone:
        assert not is_alone


def others_may_measure(device_id: str) -> bool:
    with alone_on([device_id], wait_max_s=0) as is_alone:
        return is_alone


def test_a_stage_keeps_others_from_its_device_while_it_measures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(device_turn, "cached_curves", lambda engine, load: found.append(others_may_measure("bus-9")))
    device_turn.measured_alone(None, pb.Place(devices=[pb.Device(id="bus-9")]), None)  # type: ignore[arg-type]
    assert found == [False]
    assert others_may_measure("bus-9")


def test_a_survey_keeps_others_from_its_device_while_it_measures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def costs(*_: object) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        found.append(others_may_measure("bus-9"))
        return [], []

    monkeypatch.setattr(host_probe, "place_of", lambda settings: pb.Place(devices=[pb.Device(id="bus-9")]))
    monkeypatch.setattr(host_probe, "row_costs", costs)
    (artifact,) = write_pipeline(tmp_path, TinyShape(n_layers=2), [])
    host_probe.measure_slice(artifact, EngineSettings(n_threads=1, n_lanes=2, ctx_tokens=64), 0.0)
    assert found == [False]
