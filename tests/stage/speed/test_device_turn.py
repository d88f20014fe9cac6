"""Stages that compute on one device measure in turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayline.stage.engine.loading import Load, LoadStoppedError
from relayline.stage.speed.device_turn import alone_on


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
