"""What a machine lacks for `make setup` is named before it begins, in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from relayline.deploy.build.needs import fault, has_pip
from relayline.deploy.testing.paths import ROOT


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A PATH with cc and c++ alone."""
    for name in ("cc", "c++"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def test_a_machine_with_all_that_is_needed(path: Path) -> None:
    assert fault({"PATH": str(path)}, {}.get) == ""


@pytest.mark.parametrize(("removed", "language", "package"), [("cc", "C", "gcc"), ("c++", "C++", "g++")])
def test_each_compiler_is_named(path: Path, removed: str, language: str, package: str) -> None:
    (path / removed).unlink()
    line = fault({"PATH": str(path)}, {}.get)
    assert line.startswith(f"there is no {language} compiler: {removed} is not in PATH")
    assert f"apt install {package})" in line
    assert "\n" not in line


def test_the_compiler_that_the_build_takes_is_the_one_that_is_looked_for(path: Path) -> None:
    of_the_interpreter = {"CC": "some-gcc -pthread", "CXX": "c++"}.get
    assert "some-gcc is not in PATH" in fault({"PATH": str(path)}, of_the_interpreter)
    assert fault({"PATH": str(path), "CC": "cc -m64"}, of_the_interpreter) == ""
    assert "clang++ is not in PATH" in fault({"PATH": str(path), "CXX": "clang++"}, {}.get)


def test_a_python_without_venv_is_named_unless_the_environment_is_there(path: Path) -> None:
    modules = ("venv", "a_module_that_is_not_there")
    line = fault({"PATH": str(path)}, {}.get, venv_modules=modules)
    assert line.startswith(f"{sys.executable} cannot make environments")
    assert f"apt install python3.{sys.version_info.minor}-venv" in line
    assert "\n" not in line
    assert fault({"PATH": str(path)}, {}.get, venv_modules=modules, has_pip=True) == ""


def test_an_environment_that_was_left_half_made_is_none(tmp_path: Path) -> None:
    assert not has_pip(tmp_path / "none")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "half")], check=True)
    assert not has_pip(tmp_path / "half")
    assert has_pip(Path(sys.prefix))


def test_the_program_says_its_line_and_fails(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "deploy" / "build" / "needs.py", sys.prefix]
    environment = {"PATH": str(tmp_path), "CC": "cc"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().startswith("there is no C compiler: cc is not in PATH")
    assert done.stderr.count("\n") == 1
