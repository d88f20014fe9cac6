"""The order to start again: the supervisor's arguments, its answer, and the pipelines that cannot."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import msgspec
import pytest
from click.testing import CliRunner, Result

from relayline.deploy.cli.control import down_command, status_command
from relayline.deploy.cli.restart import _until_ready, restart_command
from relayline.deploy.launch.again import (
    REASON_BYTES_MAX,
    Again,
    arguments_again,
    become_new,
    check_arguments,
    is_ordered,
    placed,
    refusal,
    refuse,
)
from relayline.deploy.launch.board import Board
from relayline.deploy.launch.control import find, launched
from relayline.deploy.launch.prepare import override
from relayline.deploy.launch.process_id import identify, wait_ended
from relayline.deploy.launch.run import Launch, before_of, check_while_it_runs, launch
from relayline.deploy.launch.state import MORE_SIGNAL, ProcessRecord, StateDir
from relayline.deploy.launch.take_on import start_more
from relayline.deploy.machine.ports import free_port
from relayline.deploy.manifest.load import ManifestError, load_manifest
from relayline.deploy.manifest.smallest import smallest_manifest
from relayline.deploy.testing.paths import DEMO_MODEL
from relayline.wire.common.errors import StartError, UsageError
from relayline.wire.common.phase import HostState, Phase
from relayline.wire.common.process import ENDING_SIGNALS
from tests.support.polling import pause


def test_a_new_start_has_the_same_arguments_without_the_pipe_to_the_starter() -> None:
    detached = ["up", "m.yaml", "--name", "chat", "--report-fd", "7"]
    assert arguments_again(detached) == ["up", "m.yaml", "--name", "chat"]
    assert check_arguments(detached) == ["up", "--check", "m.yaml", "--name", "chat"]
    assert arguments_again(["up", "m.yaml"]) == ["up", "m.yaml"]


def test_a_new_start_keeps_its_name_and_place_whatever_its_manifest_says_then(tmp_path: Path) -> None:
    place = ["--state-dir", str(tmp_path), "--name", "chat"]
    once = placed(["up", "m.yaml", "--report-fd", "7"], "chat", tmp_path)
    assert once == ["up", *place, "m.yaml"]
    assert placed(["up", "--or-before", *once[1:]], "chat", tmp_path) == once, "it grows with no restart"
    assert check_arguments(["up", "--or-before", *once[1:]]) == ["up", "--check", *place, "m.yaml"]


def test_only_an_answer_is_a_refusal(tmp_path: Path) -> None:
    order = tmp_path / "restart.json"
    assert refusal(order) == ""
    assert not is_ordered(order)
    for text in ("", "{}", '["chat"]', "{"):
        order.write_text(text)
        assert refusal(order) == ""
        assert is_ordered(order)
    order.write_text(json.dumps({"refused": "no such file"}))
    assert refusal(order) == "no such file"
    assert not is_ordered(order), "nobody has read the answer, and the next order to this supervisor is another one"


@pytest.fixture
def directory(tmp_path: Path) -> StateDir:
    found = StateDir(tmp_path)
    found.restart.write_text("{}")
    return found


async def ask(again: Again) -> None:
    again.ask(asyncio.Event())
    checking = again._checking
    again.ask(asyncio.Event())  # once is enough
    assert checking is not None
    await checking
    await again.close()
    assert again._checking is checking


async def test_a_mistake_is_answered_with_its_line_and_stops_nothing(directory: StateDir) -> None:
    missing = directory.path / "missing.yaml"
    again = Again(directory, ["up", str(missing)])
    await ask(again)
    assert not again.wanted.is_set()
    assert refusal(directory.restart) == f"{missing}: no such file"


async def test_without_a_mistake_the_pipeline_ends_and_the_order_stays_for_the_new_start(
    directory: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relayline.deploy.launch.again.check_arguments", lambda _: ["--version"])
    again = Again(directory, ["up"])
    await ask(again)
    again.ask(asyncio.Event())
    assert again._checking.done(), "it ends already, so nothing is checked again"
    assert again.wanted.is_set()
    assert directory.restart.read_text() == "{}"


def checks(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Have a program in place of the check."""
    command = [sys.executable, "-c", program]
    monkeypatch.setattr("relayline.deploy.launch.again.module_command", lambda *_: command)


async def test_the_reason_is_the_last_line_of_any_output(directory: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    said = f"'x' * {3 * REASON_BYTES_MAX} + '\\nrelayline: error: too few\\n'"
    checks(monkeypatch, f"import sys; sys.stderr.write({said}); sys.exit(1)")
    again = Again(directory, ["up"])
    await ask(again)
    assert refusal(directory.restart) == "too few"


async def test_a_full_disk_keeps_the_supervisor(
    directory: StateDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, _: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("relayline.deploy.launch.again.write_again", full)
    again = Again(directory, ["up", str(directory.path / "missing.yaml")])
    await ask(again)
    assert not again.wanted.is_set()
    assert "the answer cannot be written: No space left on device" in caplog.text


async def test_a_check_ends_with_the_supervisor(directory: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    began = directory.path / "pid"
    tells = f"pathlib.Path({str(began)!r}).write_text(str(os.getpid()))"
    checks(monkeypatch, f"import os, pathlib, signal; {tells}; signal.pause()")
    again = Again(directory, ["up"])
    again.ask(asyncio.Event())
    while not began.exists() or not began.read_text():
        await pause()
    process = identify(int(began.read_text()))
    assert process is not None
    await again.close()
    assert await asyncio.to_thread(wait_ended, process, 60.0)
    assert not again.wanted.is_set()
    assert refusal(directory.restart) == ""


class Serving:
    """A supervisor whose pipeline serves at once, gets an order to start again, and ends."""

    is_signalled = False
    more = ""  # the manifest with one more stage, which `relayline up` adds meanwhile

    def __init__(self, _plan: object, directory: StateDir, *_: object, **__: object) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.board = SimpleNamespace(set_starts_again=lambda _: None, names=tuple)
        self._directory = directory

    async def start(self) -> dict[str, str]:
        self._directory.restart.write_text("{}")
        if self.more:
            self._directory.more.write_text(self.more)
        os.kill(os.getpid(), MORE_SIGNAL)
        return {"event": "ready", "url": "http://127.0.0.1:1"}

    async def stop(self) -> None:
        if self.is_signalled:
            os.kill(os.getpid(), signal.SIGTERM)
            while signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # as it is after the first signal
                await pause()


@pytest.fixture
def to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    monkeypatch.setattr("relayline.deploy.launch.state.state_root", lambda: tmp_path)
    monkeypatch.setattr("relayline.deploy.launch.run.Supervisor", Serving)
    monkeypatch.setattr("relayline.deploy.launch.again.check_arguments", lambda _: ["--version"])
    before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    manifest = override(smallest_manifest(DEMO_MODEL), {"coordinator.http.port": 0})  # any port may be taken
    yield Launch(manifest, DEMO_MODEL)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("is_signalled", [False, True])
def test_a_signal_has_the_last_word(
    to_start: Launch, directory: StateDir, monkeypatch: pytest.MonkeyPatch, is_signalled: bool
) -> None:
    monkeypatch.setattr("relayline.deploy.launch.run.plan_of", lambda *_: (None, None))
    monkeypatch.setattr(Serving, "is_signalled", is_signalled)
    is_wanted = launch(to_start, directory, lambda _: None, arguments=["up"])
    assert is_wanted is not is_signalled, "`relayline down` ends it, even while it is about to start again"
    assert refusal(directory.restart) == ("it was told to end meanwhile" if is_signalled else "")


def test_a_stage_that_is_added_during_the_check_is_started(
    to_start: Launch, directory: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[object] = []
    monkeypatch.setattr("relayline.deploy.launch.run.plan_of", lambda *_: (None, None))
    monkeypatch.setattr("relayline.deploy.launch.run._take_on", lambda *_: taken.append(directory.more.read_text()))
    monkeypatch.setattr(Serving, "more", "{}")
    assert launch(to_start, directory, lambda _: None, arguments=["up"])
    assert taken == ["{}"]


def test_a_new_start_that_fails_answers_the_order(
    to_start: Launch, directory: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise UsageError("2 GiB are missing")

    monkeypatch.setattr("relayline.deploy.launch.run.plan_of", fail)
    with pytest.raises(UsageError):
        launch(to_start, directory, lambda _: None, arguments=["up"])
    assert refusal(directory.restart) == "2 GiB are missing"


class Told:
    """A supervisor of one manifest, which `plans` names: its start fails as the test says, or it serves and ends."""

    plans: ClassVar[list[int]] = []  # the context of each that was started
    fails: ClassVar[dict[int, str]] = {}  # by context, why it does not start
    dies = ""  # why the one that serves ends

    def __init__(self, n_tokens: int, _: StateDir, tell: Callable[[dict[str, str]], None], **__: object) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.board = SimpleNamespace(set_starts_again=lambda _: None, names=tuple)
        self._n_tokens, self._tell = n_tokens, tell

    async def start(self) -> dict[str, str]:
        self.plans.append(self._n_tokens)
        if self._n_tokens in self.fails:
            raise StartError(self.fails[self._n_tokens])
        if self.dies:
            self.failed.set_exception(StartError(self.dies))
        else:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"event": "ready", "url": "http://127.0.0.1:1"}

    async def stop(self) -> None:
        pass


OLD, NEW = 512, 1024


@pytest.fixture
def restarted(to_start: Launch, directory: StateDir, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """A launch with another manifest, in a process whose pipeline has ended to start again."""

    def plan(what: Launch, _: StateDir) -> tuple[int, None]:
        n_tokens = what.manifest.engine.ctx_tokens
        if n_tokens in Told.fails and Told.fails[n_tokens].startswith("plan"):
            Told.plans.append(n_tokens)
            raise UsageError(Told.fails[n_tokens])
        return n_tokens, None

    monkeypatch.setattr("relayline.deploy.launch.run.plan_of", plan)
    at = {n: dataclasses.replace(to_start, manifest=override(to_start.manifest, {"context.tokens": n}))
          for n in (OLD, NEW)}  # fmt: skip
    assert launch(at[OLD], directory, lambda _: None, arguments=["up"]), "it is to start again"
    monkeypatch.setattr("relayline.deploy.launch.run.Supervisor", Told)
    monkeypatch.setattr(Told, "plans", [])
    return at[NEW]


@pytest.mark.parametrize("reason", ["plan: 2 GiB are missing", "the coordinator ended"])
def test_what_cannot_start_again_starts_as_it_was_before(
    restarted: Launch,
    directory: StateDir,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    reason: str,
) -> None:
    monkeypatch.setattr(Told, "fails", {NEW: reason})
    told: list[dict[str, str]] = []
    assert not launch(restarted, directory, told.append, arguments=["up"])
    assert Told.plans == [NEW, OLD]
    assert [event["event"] for event in told] == ["ready"]
    assert refusal(directory.restart) == reason, "for the commands that wait"
    assert f"the new start failed, so the pipeline starts as it was before: {reason}" in caplog.messages
    assert not directory.before.exists()


def test_a_mistake_since_the_check_starts_what_was_before(
    restarted: Launch, directory: StateDir, tmp_path: Path
) -> None:
    me, mistake = identify(os.getpid()), ManifestError(["m.yaml:5: unknown key"])
    assert me is not None
    Board(directory, "chat", str(tmp_path / "m.yaml"), me, ())
    manifest, source = before_of(directory, mistake)
    assert (manifest.engine.ctx_tokens, source) == (OLD, tmp_path / "m.yaml")
    before = Launch(manifest, source, or_before=True)
    assert not launch(before, directory, lambda _: None, arguments=["up"], failed=mistake)
    assert Told.plans == [OLD]
    assert refusal(directory.restart) == "m.yaml:5: unknown key"
    with pytest.raises(ManifestError):
        before_of(directory, mistake)  # it has served since
    assert restarted.manifest.engine.ctx_tokens == NEW


def test_behind_a_gateway_another_process_starts_what_served_before(
    restarted: Launch, directory: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = identify(os.getppid())
    assert ended is not None
    Board(directory, "house-chat", "/nowhere/m.yaml", ended, ())
    port = {"coordinator.http.port": free_port()}
    moved = dataclasses.replace(restarted, manifest=override(restarted.manifest, port), is_behind=True, or_before=True)
    monkeypatch.setattr(Told, "fails", {NEW: "too large"})
    told: list[dict[str, str]] = []
    for _ in range(2):  # what serves is kept for the process after this one, however this one ends
        assert not launch(moved, directory, told.append, arguments=["up"])
        kept = load_manifest(directory.before)
        assert kept.engine.ctx_tokens == OLD
        assert kept.spec.coordinator.http.port == port["coordinator.http.port"], "where the gateway looks for it now"
    assert Told.plans == [NEW, OLD, NEW, OLD]
    assert [event["as_before"] for event in told] == ["too large", "too large"]
    with pytest.raises(StartError, match="too large"):  # the gateway itself has started since
        launch(dataclasses.replace(moved, or_before=False), directory, lambda _: None, arguments=["up"])


def test_where_neither_starts_both_reasons_are_told(
    restarted: Launch, directory: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Told, "fails", {NEW: "too large", OLD: "the model is gone"})
    with pytest.raises(StartError, match="the model is gone"):
        launch(restarted, directory, lambda _: None, arguments=["up"])
    assert Told.plans == [NEW, OLD]
    assert refusal(directory.restart) == "too large; nor does it as it was before: the model is gone"


def test_what_has_served_since_is_not_taken_back(
    restarted: Launch, directory: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Told, "dies", "a stage died 6 times in a row")
    with pytest.raises(StartError, match="a stage died"):
        launch(restarted, directory, lambda _: None, arguments=["up"])
    assert Told.plans == [NEW]


def test_the_manifest_of_another_process_is_no_way_back(
    restarted: Launch, directory: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Told, "fails", {NEW: "too large"})
    killed = identify(os.getppid())
    assert killed is not None
    Board(directory, "chat", "/nowhere/m.yaml", killed, ())
    with pytest.raises(StartError, match="too large"):
        launch(restarted, directory, lambda _: None, arguments=["up"])
    assert Told.plans == [NEW]


def test_state_that_cannot_be_kept_is_told(
    to_start: Launch, directory: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept_by_another(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "state.json")

    monkeypatch.setattr("relayline.deploy.launch.run.plan_of", lambda *_: (None, None))
    monkeypatch.setattr("relayline.deploy.launch.run.Supervisor", kept_by_another)
    with pytest.raises(StartError, match=r"^state\.json: Permission denied$"):
        launch(to_start, directory, lambda _: None, arguments=["up"])
    assert refusal(directory.restart) == "state.json: Permission denied"


def test_the_check_refuses_a_model_that_no_free_memory_could_hold(
    to_start: Launch, directory: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relayline.deploy.planning.inputs.machine.available_memory_bytes", lambda: 1 << 20)
    check_while_it_runs(to_start, directory)  # the running one holds the rest
    monkeypatch.setattr("relayline.deploy.planning.inputs.machine.total_memory_bytes", lambda: 1 << 20)
    with pytest.raises(UsageError, match="the model does not fit"):
        check_while_it_runs(to_start, directory)


def test_the_check_finds_a_full_disk(to_start: Launch, directory: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("relayline.deploy.launch.run.try_writing", full)
    with pytest.raises(OSError, match="No space left") as found:
        check_while_it_runs(to_start, directory)
    assert found.value.filename == str(directory.path)


def test_the_new_start_stays_in_the_same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _, command: began.append(command))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv("RELAYLINE_DETACH", "1")
    become_new(["up", "m.yaml", "--report-fd", "6"])
    assert [command[-3:] for command in began] == [["up", "--or-before", "m.yaml"]]
    assert "RELAYLINE_DETACH" not in os.environ, "it would start another one in the background and end"


class World:
    """State directories of this process's pipelines."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def board(self, name: str, *records: ProcessRecord) -> Board:
        me = identify(os.getpid())
        assert me is not None
        (self.root / name).mkdir(parents=True)
        directory = StateDir(self.root / name)
        directory.manifest.write_text("{}")
        return Board(directory, name, "/nowhere/m.yaml", me, records)

    def restart(self, *arguments: str) -> Result:
        return CliRunner().invoke(restart_command, arguments)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr("relayline.deploy.launch.control.state_root", lambda: tmp_path)
    monkeypatch.setattr("relayline.deploy.launch.state.state_root", lambda: tmp_path)
    return World(tmp_path)


def refused(result: Result) -> str:
    assert isinstance(result.exception, UsageError)
    return result.exception.message


def test_a_full_disk_leaves_no_half_order(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the next signal, as of a stage that is added, the supervisor would have started the pipeline again."""

    def full(path: Path, *_: object, **__: object) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    board, directory = world.board("chat"), StateDir(world.root / "chat")
    board.set_phase(Phase.READY)
    board.set_starts_again(True)
    (found,) = launched(directory.path)
    manifest = smallest_manifest(DEMO_MODEL, "chat")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        patched.setattr(Path, "write_bytes", full)
        assert isinstance(world.restart("chat").exception, OSError)
        with pytest.raises(OSError, match="No space left"):
            start_more(found, manifest, ())
    assert not is_ordered(directory.restart)
    assert not directory.more.exists()


def test_every_command_that_waits_hears_why_it_does_not_start(world: World) -> None:
    board, directory = world.board("chat"), StateDir(world.root / "chat")
    board.set_phase(Phase.READY)
    refuse(directory.restart, "no such file")
    (found,) = launched(directory.path)
    ended = dataclasses.replace(found, state=msgspec.structs.replace(found.state, supervisor_start_ticks=0))
    for each, told in ((found, "serves as before"), (ended, "has ended and did not start again")):
        for _ in range(2):
            with pytest.raises(StartError, match=f"chat {told}.*: no such file"):
                asyncio.run(_until_ready(each, as_json=False))


async def test_a_command_waits_until_it_serves_as_before(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    board, directory = world.board("chat"), StateDir(world.root / "chat")
    board.set_phase(Phase.FAILED)
    refuse(directory.restart, "too large")
    directory.before.touch()
    (found,) = launched(directory.path)
    assert found.phase is Phase.STARTING
    waiting = asyncio.ensure_future(_until_ready(found, as_json=False))
    said = ""
    while not said:
        await pause()
        said = capsys.readouterr().err
    assert said == "the new start failed; it starts as it was before\n"
    board.set_phase(Phase.READY)
    with pytest.raises(StartError, match="chat serves as before, because it could not start again: too large"):
        await waiting


async def test_one_that_is_ended_meanwhile_is_not_said_to_have_failed(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    board, directory = world.board("chat"), StateDir(world.root / "chat")
    board.set_phase(Phase.STOPPED)
    refuse(directory.restart, "it was told to end meanwhile")
    (found,) = launched(directory.path)
    waiting = asyncio.ensure_future(_until_ready(found, as_json=False))
    await pause()
    assert capsys.readouterr().err == "", "its process ends in a moment, and then that is said"
    assert not waiting.done()
    waiting.cancel()


def test_what_is_about_to_start_again_is_not_called_stopped(world: World) -> None:
    board, directory = world.board("chat"), StateDir(world.root / "chat")
    board.set_phase(Phase.STOPPED)
    (found,) = launched(directory.path)
    assert found.phase is Phase.STOPPED
    directory.restart.write_text("{}")
    assert found.phase is Phase.STARTING


def test_after_a_reboot_status_names_what_ran_until_it_is_ended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relayline.deploy.cli.control.joined_dir", lambda: world.root / "no-host")
    for name, phase in (("chat", Phase.READY), ("old", Phase.STOPPED)):
        world.board(name).set_phase(phase)
        directory = StateDir(world.root / name)
        state = directory.load()
        assert state is not None
        directory.store(msgspec.structs.replace(state, supervisor_start_ticks=state.supervisor_start_ticks - 1))

    def status() -> list[str]:
        return CliRunner().invoke(status_command, []).output.splitlines()

    again = "chat ended unexpectedly; `relayline up` starts it again (it was /nowhere/m.yaml)"
    assert status() == ["nothing runs here", again]
    assert CliRunner().invoke(down_command, ["chat"]).output == "chat was not running\n"
    assert status() == ["nothing runs here"]


def test_a_pipeline_that_cannot_start_again_says_what_to_do(world: World) -> None:
    assert refused(world.restart()) == "nothing runs here; `relayline up` starts a pipeline"
    board = world.board("chat")
    by_hand = "run `relayline down chat`, then `relayline up` again"
    assert refused(world.restart("chat")) == f"chat was started by an older relayline, or not by `up`; {by_hand}"
    board.set_starts_again(True)
    assert refused(world.restart("chat")) == f"chat is starting; wait until it is ready, or {by_hand}"
    board.set_phase(Phase.READY)
    assert "name it alone" in refused(world.restart("chat", "other"))
    record = ProcessRecord("house-chat", "pipeline", "localhost", HostState.READY, pid=os.getpid())
    world.board("house", record)
    assert refused(world.restart("chat")) == "chat runs for the gateway house; run `relayline restart house chat`"
    assert not (world.root / "chat" / "restart.json").exists(), "nothing was ordered"


def test_what_a_manifest_has_started_is_found_though_there_is_a_mistake_in_it_by_now(
    world: World, tmp_path: Path
) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("spec: {context: {tokenz: 512}}\n")
    me = identify(os.getpid())
    assert me is not None
    (tmp_path / "chat").mkdir()
    with pytest.raises(UsageError, match="tokenz"):
        find(str(path), None)
    Board(StateDir(tmp_path / "chat"), "chat", str(path), me, ())
    found = find(str(path), None)
    assert found is not None
    assert found.state.name == "chat"
    assert refused(world.restart(str(path))).startswith("chat was started by an older relayline")


def test_a_pipeline_behind_a_gateway_ends_with_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relayline.deploy.launch.control.end", mock.Mock())  # the test's own process runs it
    world.board("chat").set_phase(Phase.READY)
    world.board("house", ProcessRecord("house-chat", "pipeline", "localhost", HostState.READY, pid=os.getpid()))
    text = refused(CliRunner().invoke(down_command, ["chat"]))
    assert text.startswith("chat runs for the gateway house, which would start it again; ")
    assert text.endswith("or end all of them with `relayline down house`")


def test_one_that_is_ended_while_it_starts_again_is_not_said_to_have_a_reason(world: World) -> None:
    board, directory = world.board("chat"), StateDir(world.root / "chat")
    board.set_phase(Phase.STOPPED)
    (found,) = launched(directory.path)
    ended = dataclasses.replace(found, state=msgspec.structs.replace(found.state, supervisor_start_ticks=0))
    with pytest.raises(StartError, match="chat has ended and did not start again: it was told to end meanwhile, or"):
        asyncio.run(_until_ready(ended, as_json=False))
