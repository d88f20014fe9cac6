"""Tests that hang fail with stacks, and nothing of them lives on: see tests.support.hung_tests."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tests.support import hung_tests

# pytest-timeout cannot reach what takes no signals: the last test, and the teardown of the one before.
_TESTS = """
import asyncio, contextlib, os, signal, subprocess, sys, time
import pytest
from tests.support import hung_tests

hung_tests.GRACE_S, hung_tests.SLACK_S = GRACE_S, 0.0
hung_tests.end_processes_with_this_one()


async def never_comes():
    await asyncio.Event().wait()


async def test_async():
    helper = asyncio.create_task(never_comes(), name="helper")
    await helper


def hang():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(1_000)


@pytest.fixture
def never_ends():
    yield
    hang()


def test_teardown(never_ends):
    pytest.fail("a failure ends faulthandler's timer")


def test_deaf():
    process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print("started", process.pid, file=sys.__stdout__, flush=True)
    hang()
"""


def run(directory: Path, test: str, *, timeout_s: int, grace_s: int) -> tuple[int, str]:
    path = directory / "test_sample.py"
    path.write_text(_TESTS.replace(" = GRACE_S,", f" = {grace_s},"))
    options = [
        "-p",
        "tests.support.hung_tests",
        f"--timeout={timeout_s}",
        "--rootdir",
        str(directory),
        "-c",
        os.devnull,
    ]
    command = [sys.executable, "-m", "pytest", *options, "-o", "asyncio_mode=auto", "-s", f"{path}::{test}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    return done.returncode, done.stdout + done.stderr


def test_a_hung_task_is_shown_with_what_it_waits_for(tmp_path: Path) -> None:
    code, text = run(tmp_path, "test_async", timeout_s=2, grace_s=100)
    assert code == 1
    assert "Failed: Timeout" in text
    assert re.search(r"helper:\n.*test_sample.py:\d+ never_comes\n", text)


def test_a_hung_teardown_ends_the_process(tmp_path: Path) -> None:
    code, text = run(tmp_path, "test_teardown", timeout_s=100, grace_s=3)
    assert code == 1
    assert re.search(r"Timeout \(0:00:03\)!\n(.*\n)+.* in never_ends\n", text)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes end with their tests on Linux alone")
def test_a_process_that_hears_nothing_ends_with_all_that_it_started(tmp_path: Path) -> None:
    code, text = run(tmp_path, "test_deaf", timeout_s=2, grace_s=1)
    assert code == 1
    assert re.search(r"Timeout \(0:00:03\)!\n(.*\n)+.* in test_deaf\n", text)
    started = re.search(r"started (\d+)", text)
    assert started is not None
    try:
        left = os.pidfd_open(int(started[1]))
    except ProcessLookupError:
        return
    with os.fdopen(left):
        select.select([left], [], [])


def test_short_tests_share_a_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer stays for a later test if it leaves that one its time, and no more than the slack above it."""
    now_s, started = 1_000.0, list[float]()
    clock = types.SimpleNamespace(monotonic=lambda: now_s)
    timers = types.SimpleNamespace(
        dump_traceback_later=lambda seconds, exit, file: started.append(now_s + seconds),
        cancel_dump_traceback_later=lambda: None,
    )
    monkeypatch.setattr(hung_tests, "time", clock)
    monkeypatch.setattr(hung_tests, "faulthandler", timers)
    timer = hung_tests.Timer()

    def begins(after_s: float, seconds: float, slack_s: float = 30.0) -> float:
        nonlocal now_s
        now_s += after_s
        timer.start(seconds, slack_s, 2)
        return started[-1] - now_s

    assert [begins(0, 360), begins(1, 360), begins(29, 360)] == [390, 389, 360]
    assert begins(1, 360) == 390
    assert begins(0, 240) == 270, "another bound has its own timer"
    assert begins(0, 60, slack_s=0) == 60
    assert begins(0, 60, slack_s=0) == 60
    assert begins(0, 240) == 270
    timer.cancel()
    n_before = len(started)
    assert begins(0, 240) == 270
    assert len(started) == n_before + 1
