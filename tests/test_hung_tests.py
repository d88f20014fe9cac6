"""Tests that hang fail with stacks, and nothing of them lives on: see tests.support.hung_tests."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest

# pytest-timeout cannot reach what takes no signals: the last test, and the teardown of the one before.
_TESTS = """
import asyncio, contextlib, os, signal, subprocess, sys, time
import pytest
from tests.support import hung_tests

hung_tests.GRACE_S = GRACE_S
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
    path.write_text(_TESTS.replace("GRACE_S = GRACE_S", f"GRACE_S = {grace_s}"))
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
