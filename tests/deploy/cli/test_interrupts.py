"""Ctrl-C ends a command with exit code 130 and one line or none, whenever it comes."""

import os
import subprocess
from pathlib import Path

import pytest

from relayline.deploy.cli.interrupts import INTERRUPTED
from relayline.deploy.testing.processes import relayline
from relayline.wire.common.child_command import code_command

DEMO = Path(__file__).parents[3] / "deploy" / "demo" / "relayline-demo.gguf"
TIMEOUT_S = 60.0
# A command that is interrupted as it imports the module that the first argument names.
AT_AN_IMPORT = """
import importlib.abc, os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # this process may have been started with it ignored
at = sys.argv.pop(1)

class Placed(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == at:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Placed())
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
    done = interrupted(AT_AN_IMPORT, module, "status")
    assert done.returncode == INTERRUPTED, done.stderr
    assert done.stderr.strip() in ("", "relayline: error: interrupted")
    assert not done.stdout.strip()


def test_an_interrupt_ends_a_measurement_though_native_code_runs(tmp_path: Path) -> None:
    split = relayline("split", DEMO, "--stages", "2", "--out", tmp_path)
    assert split.returncode == 0, split.stderr
    done = interrupted(IN_A_CALLBACK, "calibrate", tmp_path / "stage-0.gguf", "--ctx", "64", "--threads", "1")
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", "")
