"""The commands that install and run suites. Each has a time limit and a log, and inherits no settings of ours."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

SUITES_DIR = Path(__file__).parent / "suites"
INSTALL_S, RUN_S = 600, 900


class NotInstalledError(Exception):
    """A suite that cannot be had here."""


class NotEndedError(Exception):
    """A suite that ran out of its time."""


def program(name: str) -> str:
    """Return the path of a program, or raise NotInstalledError."""
    found = shutil.which(name)
    if found is None:
        raise NotInstalledError(f"there is no {name} here")
    return found


def call(command: Sequence[object], cwd: Path | None = None) -> None:
    """Run a command that installs; raise NotInstalledError with its last words where it fails."""
    try:
        done = subprocess.run(
            list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NotInstalledError(f"{command[0]} did not end within {INSTALL_S} s") from error
    if done.returncode:
        raise NotInstalledError(done.stderr.strip() or done.stdout.strip() or f"{command[0]} failed")


def run(command: Sequence[object], cwd: Path, output: Path, environment: Mapping[str, str]) -> None:
    """Run a suite; its output goes to a file, and its report says what passed. After RUN_S raise NotEndedError."""
    whole = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | dict(environment)
    with output.open("w") as log:
        suite = subprocess.Popen(
            list(map(str, command)), cwd=cwd, env=whole, stdout=log, stderr=log, start_new_session=True
        )
        try:
            suite.wait(RUN_S)
        except subprocess.TimeoutExpired as error:
            raise NotEndedError(f"it did not end within {RUN_S} s") from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(suite.pid, signal.SIGKILL)  # with its child processes
            suite.wait()


def new(report: Path) -> Path:
    """Return a path at which no older report lies."""
    report.unlink(missing_ok=True)
    return report
