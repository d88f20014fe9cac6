"""A pipeline that was given a state directory of its own is found without it, from its first start on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from relayline.deploy.launch.process_id import identify
from relayline.deploy.launch.state import ELSEWHERE, STATE_VERSION, LaunchState, StateDir, find_running, register
from relayline.wire.common.phase import Phase


def found() -> list[str]:
    return [state.name for _, state in find_running(None, "")]


def test_a_command_during_the_first_start_does_not_forget_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model may be split for minutes before there is a state."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    directory, me = StateDir(tmp_path / "own"), identify(os.getpid())
    assert me is not None
    with directory.locked("m"):
        register(directory.path)
        assert found() == []
        directory.store(LaunchState(STATE_VERSION, "m", "m.gguf", Phase.STARTING, me.pid, me.start_ticks))
        assert found() == ["m"]
    place = tmp_path / "state" / "relayline" / ELSEWHERE
    (note,) = place.iterdir()
    (place / f".{note.name}.01234567").write_bytes(note.read_bytes())  # another one writes it, or was killed there
    assert found() == ["m"]
    shutil.rmtree(directory.path)
    assert found() == []
    assert not note.exists()
