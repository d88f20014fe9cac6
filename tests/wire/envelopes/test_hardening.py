"""Goal: the C extensions are compiled with every hardening flag that the compiler knows, by any compiler."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from relayline.deploy.testing.paths import ROOT

pytest.importorskip("setuptools")


@pytest.fixture(scope="module", name="build")
def build_fixture() -> types.ModuleType:
    """setup.py as a module."""
    spec = importlib.util.spec_from_file_location("setup_of_relayline", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Compiler:
    """Knows some flags, and fails on every other as compilers do."""

    def __init__(self, error: type[Exception], *known: str) -> None:
        self._error, self._known = error, known

    def compile(self, sources: list[str], output_dir: str, extra_postargs: list[str]) -> None:
        assert Path(sources[0]).read_text().startswith("int main")
        if unknown := [flag for flag in extra_postargs if flag not in self._known]:
            raise self._error(f"unrecognized command-line option '{unknown[0]}'")


def test_only_flags_that_the_compiler_knows_are_used(build: types.ModuleType) -> None:
    for flags in build.HARDENING:
        assert not build.knows(Compiler(build.CompileError), flags)
        assert build.knows(Compiler(build.CompileError, *flags), flags)


def test_built_extensions_have_the_stack_protector(tmp_path: Path) -> None:
    """By the compiler of this machine, which is gcc or clang wherever relayline runs."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", tmp_path, "--build-temp", tmp_path / "t"]
    done: Any = subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr
    built = {path.name.split(".")[0]: path.read_bytes() for path in tmp_path.rglob("_*.so")}
    assert {"_frames", "_rows", "_weigh", "_capture"} <= built.keys()
    assert b"__stack_chk_fail" in built["_frames"]
    assert b"__stack_chk_fail" in built["_weigh"]
