"""Ctrl-C ends a command with exit code 130 and one line or none, whenever it comes. SIGHUP ends none that reads its
API keys again.
"""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click import Command
from click.testing import CliRunner

from relayline.deploy.cli.gateway import gateway_command
from relayline.deploy.cli.interrupts import INTERRUPTED
from relayline.deploy.cli.serve import serve_command
from relayline.deploy.testing.processes import relayline
from relayline.wire.common.child_command import code_command
from relayline.wire.common.errors import UsageError

DEMO = Path(__file__).parents[3] / "deploy" / "demo" / "relayline-demo.gguf"
TIMEOUT_S = 120.0
# A command that gets the signal of the second argument as it imports the module that the first one names.
AT_AN_IMPORT = """
import importlib.abc, os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # this process may have been started with it ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)
at, number = sys.argv.pop(1), int(sys.argv.pop(1))

class Placed(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == at:
            os.kill(os.getpid(), number)

sys.meta_path.insert(0, Placed())
runpy.run_module("relayline.deploy.cli", run_name="__main__", alter_sys=True)
"""
# A command that is interrupted when Python, at its end, has given up its own handlers of signals.
AT_THE_END = """
import os, runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT):
        kill(pid, number)

last = Last()
runpy.run_module("relayline.deploy.cli", run_name="__main__", alter_sys=True)
"""
# A command that is interrupted while native code calls Python in the middle of a measurement.
IN_A_CALLBACK = """
import ctypes, os, runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from relayline.stage.speed import calibrate

@ctypes.CFUNCTYPE(None)
def called():
    os.kill(os.getpid(), signal.SIGINT)
    sum(range(1000))

def measured(engine):
    called()
    print("measured all the same")

calibrate.fresh_curves = measured
runpy.run_module("relayline.deploy.cli", run_name="__main__", alter_sys=True)
"""


# A command that is ended as by `timeout` while slices of the model lie in its cache.
AS_IT_MEASURES = """
import os, runpy, signal
from relayline.deploy.planning import measure

def calibrated(artifact, arguments, n_at_once):
    assert artifact.is_file()
    os.kill(os.getpid(), signal.SIGTERM)
    sum(range(1000))

measure._calibrate = calibrated
runpy.run_module("relayline.deploy.cli", run_name="__main__", alter_sys=True)
"""


def interrupted(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # or it would start itself anew
    return subprocess.run(
        code_command(program, *map(str, arguments)),
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment,
    )  # fmt: skip


@pytest.mark.parametrize(
    "module",
    [
        "relayline.deploy.cli.main",
        "click",
        "relayline.wire.common.errors",
        "relayline.deploy.cli.control",
        "relayline.deploy.launch.control",
    ],
)
def test_an_interrupt_during_imports_leaves_no_traceback(module: str) -> None:
    done = interrupted(AT_AN_IMPORT, module, str(int(signal.SIGINT)), "status")
    assert done.returncode == INTERRUPTED, done.stderr
    assert done.stderr.strip() in ("", "relayline: error: interrupted")
    assert not done.stdout.strip()


def test_the_end_of_a_plan_that_measures_leaves_no_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = interrupted(AS_IT_MEASURES, "plan", DEMO, "--measure")
    assert done.returncode == INTERRUPTED, done.stderr
    assert "Traceback" not in done.stderr
    assert [path for path in tmp_path.rglob("*.gguf") if path.is_file()] == []


def test_an_interrupt_when_all_is_done_changes_nothing() -> None:
    done = interrupted(AT_THE_END, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("relayline")


def test_an_interrupt_ends_a_measurement_though_native_code_runs(tmp_path: Path) -> None:
    split = relayline("split", DEMO, "--stages", "2", "--out", tmp_path)
    assert split.returncode == 0, split.stderr
    done = interrupted(IN_A_CALLBACK, "calibrate", tmp_path / "stage-0.gguf", "--ctx", "64", "--threads", "1")
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", "")


@pytest.mark.parametrize("command", ["serve", "gateway"])
@pytest.mark.parametrize("module", ["relayline.deploy.cli.main", "relayline.coordinator.http.edge.listener"])
def test_a_hangup_before_there_are_keys_ends_no_supervised_command(command: str, module: str, tmp_path: Path) -> None:
    """It would have to be started again, and after some such signals nobody would."""
    missing = tmp_path / "keys"
    flags = ("--exit-with-stdin", "--api-keys", missing)
    done = interrupted(AT_AN_IMPORT, module, str(int(signal.SIGHUP)), command, *flags)
    assert done.returncode in (2, -signal.SIGTERM), done.stderr  # by its flags, or by its stdin
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("has_keys", [True, False])
@pytest.mark.parametrize(
    ("command", "flags", "last"),
    [
        (serve_command, ("--stages", "127.0.0.1:1"), "relayline.deploy.cli.serve.check_named"),
        (gateway_command, ("--backend", "http://127.0.0.1:1"), "relayline.wire.common.process.run"),
    ],
)
def test_a_command_with_keys_ignores_hangups_until_it_serves(
    has_keys: bool, command: Command, flags: tuple[str, ...], last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To split a model takes minutes. Without keys the signal says that the terminal has gone."""
    keys, found = tmp_path / "keys", list[Any]()
    keys.write_text("k" * 32)

    def note(*_: object, **__: object) -> None:
        found.append(signal.getsignal(signal.SIGHUP))
        raise UsageError("far enough")

    monkeypatch.setattr(last, note)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        CliRunner().invoke(command, [*flags, *(["--api-keys", str(keys)] if has_keys else [])])
    finally:
        signal.signal(signal.SIGHUP, before)
    assert found == [signal.SIG_IGN if has_keys else signal.SIG_DFL]
