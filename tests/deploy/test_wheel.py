"""The wheel of `make wheel` runs without the tree that it was made from."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from relayline.deploy.testing.paths import ROOT

pytestmark = pytest.mark.slow  # compiles the C extensions

SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "wire", "stage", "coordinator", "deploy")
LOOK = """
import json, importlib, sys
import relayline.wire
from relayline.deploy.testing.paths import DEMO_MODEL
for name in ("stage.engine._capture", "wire.envelopes._frames", "wire.envelopes._rows", "wire.envelopes._weigh",
             "wire.telemetry._otlp"):
    importlib.import_module(f"relayline.{name}")
from relayline.deploy.manifest.schema import SCHEMA_FILE
print(relayline.wire.__file__, DEMO_MODEL.is_file(), SCHEMA_FILE.is_file())
"""


def test_a_wheel_holds_all_that_runs(tmp_path: Path) -> None:
    tree, wheels, installed = tmp_path / "tree", tmp_path / "wheels", tmp_path / "installed"
    tree.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / name, tree / name)
    make = [sys.executable, "-c", "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"]
    wheels.mkdir()
    made = subprocess.run([*make, str(wheels)], cwd=tree, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-2_000:]
    (wheel,) = wheels.glob("*.whl")
    assert f"cp{sys.version_info.major}{sys.version_info.minor}" in wheel.name, "its extensions are of this CPython"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
        assert not [name for name in archive.namelist() if name.startswith(("tests/", "benches/", "build/"))]
    environment = os.environ | {"PYTHONPATH": str(installed)}
    looked = subprocess.run(
        [sys.executable, "-P", "-c", LOOK], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert looked.returncode == 0, looked.stderr
    assert looked.stdout.split() == [str(installed / "relayline" / "wire" / "__init__.py"), "True", "True"]
    command = [sys.executable, "-P", "-m", "relayline.deploy.cli", "--version"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("relayline, version "), done.stderr
