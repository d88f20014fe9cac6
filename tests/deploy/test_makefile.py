"""`make setup`: what it asks of pip, with which CMAKE_ARGS, and when there is nothing to do. Nothing is installed.

Also `make demo`: which command it runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from relayline.deploy.testing.paths import ROOT

CUDA = "-DGGML_CUDA=on"
SOURCES = ("Makefile", "pyproject.toml", "setup.py", "stage/engine/_capture.c", "deploy/build/constraints.txt")
# A fake Python: records its calls and their flags, and takes the pin for a package name.
RECORDER = """#!/bin/sh
printf '%s | %s\\n' "$*" "$CMAKE_ARGS" >> "$RECORD"
case "$*" in
    *pinned.py*) echo pinned==1 ;;
    *built_with.py*) exit "${BUILT_WITH_CODE:-0}" ;;
    *editable*) exit "${EDITABLE_CODE:-0}" ;;
esac
"""


class Tree:
    """A source tree in which `make setup` runs for real, except for Python."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.record = directory, directory / "record"
        for name in SOURCES:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, directory / name)
        self.python = directory / ".venv" / "bin" / "python"
        self.python.parent.mkdir(parents=True)
        self.python.write_text(RECORDER)
        self.python.chmod(0o755)

    def make(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run make with these arguments and variables, without the caller's."""
        unset = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("MAKE") and name not in {"CMAKE_ARGS", "RELAYLINE_KERNELS"}
        }
        return subprocess.run(
            ["make", f"PYTHON={self.python}", *arguments],
            cwd=self.directory,
            env=unset | {"RECORD": str(self.record)} | environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def setup(self, goal: str = "setup", **environment: str) -> list[str]:
        """Run a goal that sets up; returns how llama.cpp was installed each time, empty if it was not."""
        self.record.unlink(missing_ok=True)
        done = self.make(goal, **environment)
        assert done.returncode == 0, done.stderr
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        return [line for line in lines if "pip install --verbose" in line and "pinned==1" in line]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def is_fresh(command: str) -> bool:
    """Whether a command builds even if something is installed or cached."""
    return {"--force-reinstall", "--no-deps", "--no-cache-dir"} <= set(command.split())


def test_a_plain_set_up_takes_cached_wheels_and_is_done_once(tree: Tree) -> None:
    (command,) = tree.setup()
    assert "--no-cache-dir" not in command
    assert "--force-reinstall" not in command
    assert "GGML_CUDA" not in command
    assert tree.setup() == []
    assert "Nothing to be done" in tree.make("-n", "setup").stdout


def test_a_set_up_older_than_the_note_of_its_flags_is_not_done_again(tree: Tree) -> None:
    (tree.directory / ".venv" / ".ready").touch()
    assert tree.setup() == []


@pytest.mark.parametrize("is_first", [True, False], ids=["first set-up", "over a plain one"])
def test_flags_build_again_and_pass_by_the_cache(tree: Tree, is_first: bool) -> None:
    if not is_first:
        tree.setup()
    assert "--force-reinstall" in tree.make("-n", f"CMAKE_ARGS={CUDA}", "setup").stdout
    (command,) = tree.setup(CMAKE_ARGS=CUDA)
    assert is_fresh(command)
    assert command.endswith(f"llama_minimal.cmake {CUDA}")
    assert tree.setup(CMAKE_ARGS=CUDA) == []


def test_the_last_flags_stay_until_others_are_given(tree: Tree) -> None:
    tree.setup(CMAKE_ARGS=CUDA)
    assert tree.setup() == []
    (tree.directory / ".venv" / ".ready").unlink()
    (again,) = tree.setup()  # another reason to set up, such as a new dependency
    assert CUDA in again
    assert "--no-cache-dir" in again
    assert "--force-reinstall" not in again
    (other,) = tree.setup(CMAKE_ARGS="-DGGML_VULKAN=on")
    assert is_fresh(other)
    assert CUDA not in other


def test_empty_flags_go_back_to_a_plain_build(tree: Tree) -> None:
    tree.setup(CMAKE_ARGS=CUDA)
    (command,) = tree.setup(CMAKE_ARGS="")
    assert is_fresh(command)
    assert "GGML_CUDA" not in command
    assert tree.setup() == []


@pytest.mark.parametrize("flags", ["", CUDA])
def test_a_rebuild_compiles_again_with_the_last_flags(tree: Tree, flags: str) -> None:
    tree.setup(CMAKE_ARGS=flags)
    (command,) = tree.setup(goal="rebuild")
    assert {"--force-reinstall", "--no-deps"} <= set(command.split())
    assert ("--no-cache-dir" in command) is bool(flags), "a plain build is cached, a special one never"
    assert command.endswith(f"llama_minimal.cmake {flags}")
    assert "cache remove" in tree.record.read_text(), "else the next environment would get the old wheel"
    assert tree.setup() == []


@pytest.mark.parametrize("flags", ["", CUDA])
def test_a_wheel_that_was_built_by_other_files_is_compiled_again(tree: Tree, flags: str) -> None:
    found, anew = tree.setup(CMAKE_ARGS=flags, BUILT_WITH_CODE="1")
    assert "--force-reinstall" not in found or flags
    assert {"--force-reinstall", "--no-deps"} <= set(anew.split())
    assert ("--no-cache-dir" in anew) is bool(flags)
    assert anew.endswith(f"llama_minimal.cmake {flags}")
    assert "cache remove" in tree.record.read_text(), "else the next environment would get the old wheel"
    assert tree.setup() == []


def test_kernels_stay_out_until_they_are_taken_back(tree: Tree) -> None:
    tree.setup(CMAKE_ARGS=CUDA)
    (without,) = tree.setup(RELAYLINE_KERNELS="off")
    assert is_fresh(without)
    assert without.endswith(f"{CUDA} -DRELAYLINE_KERNELS=off")
    assert f"built_with.py {CUDA} -DRELAYLINE_KERNELS=off" in tree.record.read_text()
    assert tree.setup() == tree.setup(RELAYLINE_KERNELS="off") == []
    (again,) = tree.setup(RELAYLINE_KERNELS="on")
    assert is_fresh(again)
    assert "RELAYLINE_KERNELS" not in again
    assert CUDA in again
    assert tree.setup() == tree.setup(RELAYLINE_KERNELS="on") == []


@pytest.mark.parametrize("name", ["build/some.cmake", "kernels/some.cpp", "kernels/some.h", "kernels/some.patch"])
def test_a_changed_file_of_the_build_is_a_reason_to_set_up(tree: Tree, name: str) -> None:
    file = tree.directory / "deploy" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    os.utime(file, (1, 1))
    tree.setup()
    assert tree.setup() == []
    later_s = (tree.directory / ".venv" / ".ready").stat().st_mtime + 1
    os.utime(file, (later_s, later_s))
    assert len(tree.setup()) == 1


def test_flags_with_quotes_reach_the_build_as_they_are_and_are_known_again(tree: Tree) -> None:
    quoted = """-DCMAKE_C_FLAGS="-O3 -g" -DCMAKE_INSTALL_RPATH='x y'"""
    (command,) = tree.setup(CMAKE_ARGS=quoted)
    assert command.endswith(quoted)
    assert tree.setup(CMAKE_ARGS=quoted) == []


def test_a_set_up_that_failed_after_the_build_is_finished_next_time(tree: Tree) -> None:
    tree.setup()
    os.utime(tree.directory / ".venv" / ".ready", (0, 0))
    for name in SOURCES:
        os.utime(tree.directory / name, (0, 0))
    failed = tree.make("setup", CMAKE_ARGS=CUDA, EDITABLE_CODE="1")
    assert failed.returncode != 0
    assert len(tree.setup()) == 1


def test_the_tried_versions_are_installed_unless_the_newest_are_asked_for(tree: Tree) -> None:
    tree.setup()
    assert "--constraint deploy/build/constraints.txt --editable" in tree.record.read_text()
    (tree.directory / ".venv" / ".ready").unlink()
    tree.setup(LATEST="1")
    assert "--upgrade --editable" in tree.record.read_text()
    assert "--constraint" not in tree.record.read_text()


@pytest.mark.parametrize(("arguments", "command"), [((), "demo"), (("KEEP=1",), "demo --keep")])
def test_the_demo_is_the_command_whose_errors_are_one_line(
    tree: Tree, arguments: tuple[str, ...], command: str
) -> None:
    tree.setup()
    tree.record.unlink()
    assert tree.make("demo", *arguments).returncode == 0
    assert tree.record.read_text().splitlines() == [f"-m relayline.deploy.cli {command} | "]
