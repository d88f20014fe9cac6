"""Processes that hold weights start with glibc's huge pages enabled, however they are started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from relayline.deploy.cli import main as cli
from relayline.deploy.machine import huge_pages
from relayline.deploy.machine.huge_pages import environment_of

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux alone")
ASKED = "glibc.malloc.hugetlb=1"


@on_linux
@pytest.mark.parametrize(
    ("command", "before", "after"),
    [
        ("stage", None, ASKED),
        ("calibrate", None, ASKED),
        ("serve", None, None),
        ("stage", "glibc.malloc.check=1", f"glibc.malloc.check=1:{ASKED}"),
        ("stage", "glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_only_processes_with_weights_ask_and_a_users_setting_stays(
    command: str, before: str | None, after: str | None
) -> None:
    environment = {"PATH": "/bin"} | ({"GLIBC_TUNABLES": before} if before else {})
    made = environment_of([command, "--threads", "1"], environment)
    assert made.get("GLIBC_TUNABLES") == after
    assert made["PATH"] == "/bin"


@on_linux
@pytest.mark.parametrize(("size", "is_asked"), [("2097152\n", True), ("33554432\n", False), ("536870912\n", False)])
def test_huge_pages_of_arm_kernels_with_large_pages_are_too_large(
    size: str, is_asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "HUGE_PAGE_SIZE", tmp_path / "size")
    huge_pages.HUGE_PAGE_SIZE.write_text(size)
    assert ("GLIBC_TUNABLES" in environment_of(["stage"], {})) == is_asked


def test_elsewhere_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert environment_of(["stage"], {}) == {}


@on_linux
def test_a_process_becomes_itself_in_that_environment_once() -> None:
    code = (
        "import os; print(os.getpid(), flush=True); "
        "from relayline.deploy.machine.huge_pages import restart_with_huge_pages; restart_with_huge_pages(['stage'])"
    )
    command = [sys.executable, "-c", f"{code}; print(os.environ['GLIBC_TUNABLES'])"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": ""})
    first, again, tunables = done.stdout.split()
    assert (first, tunables) == (again, ASKED)


@pytest.mark.parametrize("arguments", [["stage", "--help"], ["--version"], []])
def test_the_command_line_names_its_processes(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(cli, "restart_with_huge_pages", asked.append)
    monkeypatch.setattr(sys, "argv", ["relayline", *arguments])
    with pytest.raises(SystemExit):
        cli.main()
    assert asked == [arguments]
