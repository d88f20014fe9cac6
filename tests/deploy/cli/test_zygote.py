"""Commands that tests run in forks of one process: each meets what a process of its own would meet."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest

from relayline.deploy.testing.processes import COMMAND, relayline
from relayline.deploy.testing.zygote import UNFORKABLE, Zygote

HERE = ("--help",), ("inspect", "nowhere.gguf"), ("nonsense",), ("status",)


@pytest.mark.parametrize("arguments", HERE, ids=" ".join)
def test_a_fork_says_and_returns_what_a_process_does(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    forked = relayline(*arguments)
    own = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
    assert (forked.returncode, forked.stdout, forked.stderr) == (own.returncode, own.stdout, own.stderr)


def test_its_directory_is_where_the_caller_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.gguf").write_bytes(b"GGUF")
        monkeypatch.chdir(tmp_path / name)
        (tmp_path / name / "model.gguf").rename(tmp_path / name / f"{name}.gguf")
        assert "no such file" in relayline("inspect", "model.gguf").stderr
        assert "no such file" not in relayline("inspect", f"{name}.gguf").stderr


def test_a_command_that_does_not_end_is_ended() -> None:
    zygote = Zygote()
    with tempfile.TemporaryFile("w+") as out, pytest.raises(subprocess.TimeoutExpired):
        zygote.run(["--help"], out, out, timeout_s=0)


def test_what_python_reads_as_it_starts_takes_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    zygote = Zygote()
    with tempfile.TemporaryFile("w+") as out:
        zygote.run(["--version"], out, out, timeout_s=60)
    assert zygote.fits(["status"])
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    assert not zygote.fits(["status"])


@pytest.mark.parametrize("command", UNFORKABLE)
def test_commands_that_start_anew_are_not_forked(command: str) -> None:
    assert not Zygote().fits([command])
