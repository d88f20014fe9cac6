"""Processes that tests start as forks of one process behave as newly started ones."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest
import uvloop

from relayline.deploy.cli import main as cli
from relayline.deploy.testing.forked import _unwrapped, own_processes
from relayline.deploy.testing.paths import DEMO_MODEL as DEMO
from relayline.deploy.testing.processes import COMMAND, children, relayline, running
from relayline.deploy.testing.zygote import ALONE, Zygote, starts_processes
from relayline.wire.common.child_command import code_command, module_command
from tests.support.namespaces import network, refusal

HERE = ("--help",), ("inspect", "nowhere.gguf"), ("nonsense",), ("status",), ("stage",), ("serve", "--pipeline", "none")


def is_fork(pid: int) -> bool:
    """Whether it has the addresses that the kernel chose for a fork server: each new program gets random ones."""
    servers = (child for child in children(os.getpid()) if any("zygote" in argument for argument in shown(child)))
    return any(addresses(pid) == addresses(server) for server in servers)


def addresses(pid: int) -> bytes:
    return Path(f"/proc/{pid}/auxv").read_bytes()


def shown(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")


def answers(process: subprocess.Popen[bytes]) -> bool:
    """Whether a grammar worker has judged one, so that it has become a worker."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b'{"text": "start: \\"a\\"", "is_gbnf": false}\n')
    process.stdin.flush()
    return process.stdout.readline().startswith(b"{")


@pytest.mark.parametrize("arguments", HERE, ids=" ".join)
def test_a_fork_prints_and_returns_as_a_process_does(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    forked = relayline(*arguments)
    with own_processes():
        own = relayline(*arguments)
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
    with pytest.raises(subprocess.TimeoutExpired):
        relayline("--help", timeout_s=0)


def test_variables_that_python_reads_at_its_start_need_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    zygote, words = Zygote(), [*COMMAND, "status"]
    monkeypatch.setattr(zygote, "_control", object())
    assert zygote.fits(words, os.environ)
    assert zygote.fits(words, {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})
    assert not zygote.fits(words, {**os.environ, "PYTHONIOENCODING": "ascii"})
    assert not zygote.fits(words, {**os.environ, "OTEL_SPAN_LINK_COUNT_LIMIT": "1"})


def test_only_commands_that_start_processes_have_a_fork_server() -> None:
    """To make one takes about as long as a short command."""
    assert ALONE - {"--help", "--version"} <= cli.COMMANDS.keys()
    assert all(starts_processes([*COMMAND, name]) for name in ("up", "serve", "doctor", "certify", "split", "plan"))
    assert not starts_processes([*COMMAND, "status", "--json"])
    assert not starts_processes(module_command("relayline.stage.engine.probe"))


def test_other_commands_start_a_new_process() -> None:
    zygote = Zygote()
    for words in (["true"], code_command("pass"), module_command("http.server"), ["python", "-m", *COMMAND[3:]]):
        assert not zygote.fits(words, os.environ)
    with subprocess.Popen(code_command("input()"), stdin=subprocess.PIPE) as process:
        assert not is_fork(process.pid)


def test_a_fork_of_a_test_starts_new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent of a fork owns the server, so no other process could wait for it."""
    zygote = Zygote()
    assert zygote.fits([*COMMAND, "status"], os.environ)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert not zygote.fits([*COMMAND, "status"], os.environ)


def test_a_fork_is_a_child_with_the_command_line_session_and_end_that_were_asked_for() -> None:
    command = module_command("relayline.coordinator.text.grammar_worker")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert answers(process)
        assert is_fork(process.pid)
        assert process.pid in children(os.getpid())
        assert shown(process.pid) == command
        assert os.getsid(process.pid) == process.pid
        assert sorted(os.listdir(f"/proc/{process.pid}/fd")) == ["0", "1", "2"]
        process.kill()
        assert process.wait(60) == -signal.SIGKILL


@pytest.mark.netns
@pytest.mark.skipif(bool(refusal()), reason=refusal() or "allowed")
def test_a_fork_is_in_the_network_namespace_that_was_asked_for(tmp_path: Path) -> None:
    command = module_command("relayline.coordinator.text.grammar_worker")
    with network(1, tmp_path) as (host,):
        prefix = ["ip", "netns", "exec", host.namespace, "env", "WHERE=there"]
        with subprocess.Popen([*prefix, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert is_fork(process.pid)
            assert answers(process)
            assert shown(process.pid) == command
            there = Path(f"/run/netns/{host.namespace}").stat()
            assert Path(f"/proc/{process.pid}/ns/net").stat().st_ino == there.st_ino
    assert _unwrapped([*prefix, *command], {"A": "1"}) == (host.namespace, command, {"A": "1", "WHERE": "there"})


def test_uvloop_gets_a_fork_as_well() -> None:
    pipe = asyncio.subprocess.PIPE

    async def looked_at() -> tuple[bool, bool, int]:
        """One that waits for its stdin: any other may have ended, and been waited for, before anyone looks."""
        command = module_command("relayline.coordinator.text.grammar_worker")
        begun = await asyncio.create_subprocess_exec(*command, stdin=pipe)
        seen = is_fork(begun.pid), begun.pid in children(os.getpid())
        begun.kill()
        return *seen, await begun.wait()

    async def heard() -> tuple[bytes, bytes, int | None]:
        begun = await asyncio.create_subprocess_exec(*COMMAND, "nonsense", stdin=pipe, stdout=pipe, stderr=pipe)
        return *await begun.communicate(), begun.returncode

    assert uvloop.run(looked_at()) == (True, True, -signal.SIGKILL)
    out, err, code = uvloop.run(heard())
    assert (out, code) == (b"", 2)
    assert b"No such command" in err


def test_processes_that_a_fork_starts_are_forks_and_its_children(tmp_path: Path) -> None:
    flags = ("--stages", "2", "--split-dir", tmp_path / "split", "--http", "127.0.0.1:0", "--no-calibrate", "--json")
    with running("up", DEMO, *flags) as up:
        below = children(up.process.pid)
        named = {" ".join(shown(pid)).partition(" --name ")[2].partition(" ")[0] for pid in below}
        assert {"stage-0", "stage-1"} <= named
        assert all(is_fork(pid) for pid in (up.process.pid, *below))
        (serve,) = [pid for pid in below if "serve" in shown(pid)]
        assert any("relayline.coordinator.http.workers.fork_server" in shown(pid) for pid in children(serve))
