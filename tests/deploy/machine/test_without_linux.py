"""What only Linux has is done without elsewhere (macOS): cores of a process, limits, the end of a parent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from relayline.deploy.launch.local import threads_per_stage
from relayline.deploy.machine import cores
from relayline.wire.common.errors import UsageError
from relayline.wire.common.usable_cores import usable_cores
from relayline.wire.settings.table import EngineSettings

WORKER = """
import ctypes, os, resource, sys
from pathlib import Path
from relayline.coordinator.http.workers import body_worker
from relayline.wire.common import memory

class NoPrctl:
    def __init__(self, name): pass

def refuse(kind, limits):
    raise ValueError("current limit exceeds maximum limit")

sys.platform, ctypes.CDLL, memory.STATM, resource.setrlimit = SYSTEM, NoPrctl, Path("/none"), refuse
body_worker.end_with_parent(os.getppid())
body_worker._limit_self(0)
print("lives")
"""


@pytest.fixture
def unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system keeps no process to cores."""
    for name in ("sched_getaffinity", "sched_setaffinity"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)


@pytest.mark.usefixtures("unbound")
def test_a_system_that_binds_no_process_gives_it_all_cores() -> None:
    assert usable_cores() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert EngineSettings().threads_used == 8
    assert threads_per_stage(3) == 2


@pytest.mark.usefixtures("unbound")
def test_a_stage_cannot_be_kept_to_cores_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "SYSTEM", tmp_path)
    assert cores.shares([2, 2]) is None
    with pytest.raises(UsageError, match="keeps no process to cores"):
        cores.keep_to((0, 1))


@pytest.mark.parametrize(("system", "lives"), [("darwin", True), ("linux", False)])
def test_limits_that_macos_refuses_leave_a_reader_of_bodies_alive(system: str, lives: bool) -> None:
    """On Linux a reader of bodies without its bounds must not live."""
    command = [sys.executable, "-c", WORKER.replace("SYSTEM", repr(system), 1)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout == "lives\n") == lives, done.stderr
