"""Parts of the launcher: back-off, identity of processes, state and lock, log files."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import http.server
import json
import logging
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest
from click.testing import CliRunner

from relayline.deploy.cli.control import _process_table, _show, _status_text
from relayline.deploy.cli.top import top_command
from relayline.deploy.launch import board as board_module
from relayline.deploy.launch import process_id
from relayline.deploy.launch.board import Board
from relayline.deploy.launch.control import Launched, describe, end, find
from relayline.deploy.launch.leftovers import end_leftovers
from relayline.deploy.launch.log_files import LogReader, LogWriter, merged
from relayline.deploy.launch.plan_file import write_plan
from relayline.deploy.launch.process_id import ProcessId, age_s, identify, is_running, send_signal, wait_ended
from relayline.deploy.launch.restarts import RestartHistory, RestartPolicy
from relayline.deploy.launch.run import log_file
from relayline.deploy.launch.state import LaunchState, ProcessRecord, StateDir
from relayline.deploy.testing.processes import COMMAND, TIMEOUT_S, relayline
from relayline.wire.common.errors import StartError, UsageError
from relayline.wire.common.phase import HostState, Phase
from tests.support.polling import pause

# --- back-off ---------------------------------------------------------------------------------------------------------


def test_delays_double_up_to_a_limit_and_then_it_is_given_up() -> None:
    history = RestartHistory(RestartPolicy(first_s=1, factor=2, max_s=5, deaths_max=4))
    assert [history.died(0) for _ in range(5)] == [1, 2, 4, 5, None]


def test_being_ready_takes_deaths_off_the_record_however_it_is_parted() -> None:
    history = RestartHistory(RestartPolicy(first_s=1, max_s=99, deaths_max=3, healthy_s=10))
    lives_s = [0, 9, 9, 9, 9, 0, 0]
    assert [history.died(each) for each in lives_s] == [1, 2, 2, 2, 2, 4, None]
    history = RestartHistory(RestartPolicy(first_s=1, max_s=99, deaths_max=3, healthy_s=10))
    assert [history.died(each) for each in (0, 0, 1_000, 9, 9)] == [1, 2, 1, 2, 2], "a long life is not saved up"


def test_a_process_is_given_up_unless_it_serves_between_its_deaths() -> None:
    history = RestartHistory(RestartPolicy())
    assert None not in [history.died(ready_for_s, -9) for ready_for_s in [12.0, 8.0, 15.0, 6.0] * 50]
    history = RestartHistory(RestartPolicy())
    assert [history.died(1.0, -9) is None for _ in range(6)] == [False] * 5 + [True]


def test_a_process_with_impossible_arguments_is_given_up_at_once() -> None:
    history = RestartHistory(RestartPolicy())
    assert history.died(100, 2) is None
    assert history.ended_because("coordinator ended with exit code 2") == "coordinator ended with exit code 2"


def test_starts_that_a_native_fault_ended_are_given_up_earlier() -> None:
    history = RestartHistory(RestartPolicy(deaths_max=9, starts_max=3))
    assert [history.died(0, -6) is None for _ in range(3)] == [False, False, True]
    history = RestartHistory(RestartPolicy(deaths_max=9, starts_max=3))
    lives = [(0.0, -6), (0.0, -6), (5.0, -6), (0.0, -6), (0.0, 1), (0.0, -6), (0.0, -6)]
    assert None not in [history.died(ready_for_s, exit_code) for ready_for_s, exit_code in lives]


def test_three_deaths_of_an_artifact_that_is_damaged_are_enough_however_the_first_one_served() -> None:
    history = RestartHistory(RestartPolicy(deaths_max=9, starts_max=3))
    delays = [history.died(ready_for_s, 1, is_damaged=True) for ready_for_s in (5.0, 0.0, 0.0)]
    assert [delay is None for delay in delays] == [False, False, True]
    assert history.died(0.0, 1) is not None, "it was made again"


# --- which process ----------------------------------------------------------------------------------------------------


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])


@pytest.fixture(params=["proc", "ps"])
def way(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are known by /proc and pidfds, and by what there is without (macOS)."""
    if request.param == "ps":
        if shutil.which("ps") is None:
            pytest.skip("no ps is installed")
        monkeypatch.setattr(process_id, "PROCESSES", tmp_path)
        for module, name in ((os, "pidfd_open"), (signal, "pidfd_send_signal"), (time, "CLOCK_BOOTTIME")):
            monkeypatch.delattr(module, name)


@pytest.mark.usefixtures("way")
def test_a_recycled_pid_is_never_signalled() -> None:
    with sleeper() as process:
        real = identify(process.pid)
        assert real is not None
        other = ProcessId(real.pid, real.start_ticks - 1)
        assert not is_running(other)
        assert not send_signal(other, signal.SIGKILL)
        assert wait_ended(other, 0)
        assert is_running(real)
        assert not wait_ended(real, 0)
        assert age_s(real) < 60
        assert send_signal(real, signal.SIGKILL)
        assert wait_ended(real, 10)
    assert not is_running(real)
    assert not send_signal(real, signal.SIGTERM)


@pytest.mark.usefixtures("way")
def test_a_zombie_does_not_run() -> None:
    process = sleeper()
    real = identify(process.pid)
    assert real is not None
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, not yet reaped
    assert not is_running(real)
    process.wait()


# --- state ------------------------------------------------------------------------------------------------------------


def board_of(directory: StateDir, supervisor: ProcessId, **stage: object) -> Board:
    records = (ProcessRecord("coordinator", "coordinator", "localhost", "ready"),
               ProcessRecord("stage-0", "stage", "localhost", "ready", **stage))  # type: ignore[arg-type]  # fmt: skip
    return Board(directory, "small", "/nowhere/small.yaml", supervisor, records)


def me() -> ProcessId:
    found = identify(os.getpid())
    assert found is not None
    return found


def test_the_lock_is_held_by_one_and_stale_without_a_holder(tmp_path: Path) -> None:
    directory = StateDir(tmp_path / "small")
    with directory.locked("small"):
        board_of(directory, me())
        with pytest.raises(StartError, match=rf"already running \(pid {os.getpid()}"), directory.locked("small"):
            raise AssertionError("a second one got in")
    with directory.locked("small"):
        pass


def test_state_has_a_place_whose_name_is_text(tmp_path: Path) -> None:
    """The manifest that is kept there names files beside it."""
    directory = tmp_path / os.fsdecode(b"home\xff") / "small"
    says = (
        "cannot keep state here: the name is not UTF-8; rename it; XDG_STATE_HOME=DIRECTORY keeps all state elsewhere"
    )
    with pytest.raises(StartError, match=says), StateDir(directory).locked("small"):
        raise AssertionError("it got in")
    assert not directory.parent.exists()


def test_a_lock_dies_with_its_holder(tmp_path: Path) -> None:
    program = (
        "import sys, signal; from pathlib import Path; from relayline.deploy.launch.state import StateDir\n"
        f"with StateDir(Path({str(tmp_path)!r})).locked('small'): print('held', flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(StartError, match="is being started by another"), StateDir(tmp_path).locked("small"):
            raise AssertionError("a second one got in")
        holder.kill()
    with StateDir(tmp_path).locked("small"):
        pass


def test_state_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{nonsense")
    with pytest.raises(UsageError, match="not a state file"):
        StateDir(tmp_path).load()
    assert StateDir(tmp_path / "none").load() is None


def test_the_phase_follows_the_processes(tmp_path: Path) -> None:
    directory = StateDir(tmp_path)
    board = board_of(directory, me())
    board.set_phase(Phase.READY)
    board.set_process("stage-0", state="restarting")
    assert board.state.phase == "recovering"
    board.set_process("stage-0", state="ready", n_restarts=1)
    assert directory.load() == board.state
    assert board.state.phase == "ready"
    with pytest.raises(KeyError):
        board["stage-9"]


def test_a_state_directory_is_its_users_alone(tmp_path: Path) -> None:
    with StateDir(tmp_path / "root" / "small").locked("small"):
        assert (tmp_path / "root" / "small").stat().st_mode & 0o777 == 0o700


async def test_a_full_disk_ends_no_running_process_and_the_state_follows_once_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_module, "AGAIN_S", 0.0)
    caplog.set_level("INFO")
    directory = StateDir(tmp_path)
    board = board_of(directory, me())
    (tmp_path / "state.partial").mkdir()  # nothing can be written there any more
    for state in ("lost", "ready", "lost"):
        board.set_process("stage-0", state=state)
        await pause()
    assert board["stage-0"].state == "lost"
    assert caplog.text.count("the state cannot be stored, which is tried again: ") == 1
    (tmp_path / "state.partial").rmdir()
    async with asyncio.timeout(20):
        while directory.load() != board.state:
            await pause()
    assert "the state is stored again" in caplog.text


def test_status_tells_a_dead_supervisor_from_a_stopped_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = StateDir(tmp_path / "small")
    with sleeper() as process:
        supervisor = identify(process.pid)
        assert supervisor is not None
        directory.path.mkdir()
        board = board_of(directory, supervisor, pid=1, start_ticks=1)
        board.set_phase(Phase.READY)
        process.kill()
    pipeline = find("small", directory.path)
    assert pipeline is not None
    assert not pipeline.is_running
    facts = describe(pipeline)
    assert (facts["phase"], facts["pid"], facts["processes"][1]["pid"]) == ("dead", None, None)
    (directory.path / "state.partial").mkdir()  # nothing can be written there, as on a full disk
    end(pipeline, 1, force=False)
    assert "warning: that small has ended cannot be noted: " in capsys.readouterr().err
    (directory.path / "state.partial").rmdir()
    end(pipeline, 1, force=False)
    left = directory.load()
    assert left is not None
    assert left.phase == "stopped"


def test_leftovers_are_ended_and_strangers_spared(tmp_path: Path) -> None:
    with sleeper() as mine, sleeper() as stranger:
        known, unknown = identify(mine.pid), identify(stranger.pid)
        assert known is not None
        assert unknown is not None
        records = (
            ProcessRecord("a", "stage", "localhost", "ready", known.pid, known.start_ticks),
            ProcessRecord("b", "stage", "localhost", "ready", unknown.pid, unknown.start_ticks + 1),
            ProcessRecord("c", "stage", "box", "ready"),
        )
        state = LaunchState(1, "small", "m", "ready", 1, 1, processes=records)
        assert end_leftovers(state) == 1
        assert mine.wait(60) == -signal.SIGTERM
        assert is_running(unknown)
        stranger.kill()
    assert end_leftovers(None) == 0


def test_what_another_supervisor_has_is_not_noted_as_ended(tmp_path: Path) -> None:
    """It has just begun to start it, or runs on another machine with the same home: its process is not known here."""
    directory = StateDir(tmp_path / "small")
    state = LaunchState(1, "small", "m", "ready", me().pid, me().start_ticks + 1)
    with directory.locked("small"):
        directory.store(state)
        with pytest.raises(StartError, match=f"another machine that shares {directory.path}: end it there"):
            end(Launched(directory, state), 1.0, force=True)
        assert directory.load() == state
        told = (
            f"small is being started by another `relayline up`, or runs on another machine that shares {directory.path}"
        )
        with pytest.raises(StartError, match=told), directory.locked("small"):
            pass
        directory.store(LaunchState(1, "small", "m", "ready", me().pid, me().start_ticks))
        with pytest.raises(StartError, match=f"small is already running .pid {os.getpid()}"), directory.locked("small"):
            pass
        directory.store(state)
    end(Launched(directory, state), 1.0, force=True)
    ended = directory.load()
    assert ended is not None
    assert ended.phase is Phase.STOPPED


def test_names_nobody_launched(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no pipeline 'x' was launched here"):
        find("x", tmp_path)
    assert find(None, tmp_path) is None


def test_several_running_need_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("a", "b"):
        directory = StateDir(tmp_path / "relayline" / name)
        directory.path.mkdir(parents=True)
        directory.store(LaunchState(1, name, "m", "ready", me().pid, me().start_ticks))
    with pytest.raises(UsageError, match="a, b"):
        find(None, None)
    found = find("b", None)
    assert isinstance(found, Launched)
    assert found.state.name == "b"
    assert "nothing" not in relayline("status").stdout


@pytest.mark.parametrize("text", ["{nonsense", '{"version": 0}', None], ids=["broken", "older", "another version"])
def test_state_that_cannot_be_read_hides_no_other_pipeline(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("bad", "good"):
        directory = StateDir(tmp_path / "relayline" / name)
        directory.path.mkdir(parents=True)
        directory.store(LaunchState(1 if name == "good" else 99, name, "m", "ready", me().pid, me().start_ticks))
    bad = tmp_path / "relayline" / "bad"
    if text is not None:
        (bad / "state.json").write_text(text)
    for arguments in (("status",), ("status", "good"), ("logs", "good"), ("logs",)):
        seen = relayline(*arguments)
        assert seen.returncode == 0, seen.stderr
        (line,) = seen.stderr.splitlines()
        assert line.startswith(f"relayline: warning: bad is ignored: {bad / 'state.json'}: ")
    assert "good: ready" in relayline("status").stdout
    for arguments in (("status", "bad"), ("down", "bad"), ("logs", "--state-dir", str(bad))):
        seen = relayline(*arguments)
        assert seen.returncode == 2
        assert seen.stderr.startswith(f"relayline: error: {bad / 'state.json'}: ")


# --- logs -------------------------------------------------------------------------------------------------------------


def test_logs_are_shown_to_nobody_where_stdout_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `relayline logs one >&-`: Python has no stream then."""
    directory = StateDir(tmp_path)
    directory.log("up").parent.mkdir(parents=True, exist_ok=True)
    directory.log("up").write_text("a line\n")
    one = Launched(directory, LaunchState(1, "one", "m", Phase.READY, 0, 0))
    monkeypatch.setattr(sys, "stdout", None)
    asyncio.run(_show(one, ["up"], 5, follow=False))


def test_logs_that_are_followed_end_with_their_reader(tmp_path: Path) -> None:
    """As behind `| head -1`: no further line comes that it could fail to write."""
    directory = StateDir(tmp_path)
    directory.log("up").parent.mkdir(parents=True, exist_ok=True)
    directory.log("up").write_text("a line\n")
    directory.store(LaunchState(1, "one", "m", "ready", me().pid, me().start_ticks))
    command = [*COMMAND, "logs", "--state-dir", str(tmp_path), "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert following.stderr is not None
        try:
            assert following.stdout.readline() == "a line\n"
            following.stdout.close()
            assert (following.wait(TIMEOUT_S), following.stderr.read()) == (1, "")
        finally:
            following.kill()


def last_lines(path: Path, n_lines: int) -> list[str]:
    with contextlib.closing(LogReader(path)) as reader:
        return reader.last_lines(n_lines)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no disk that is always full")
def test_a_log_on_a_full_disk_hides_no_other_error() -> None:
    writer = LogWriter(Path("/dev/full"))
    writer.write("lost")
    writer.close()
    with log_file(Path("/dev/full")) as handler:
        handler.handle(logging.makeLogRecord({"msg": "lost"}))


def test_logs_are_rotated_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    writer = LogWriter(path, bytes_max=100)
    for number in range(95):
        writer.write(f"line {number:04}")
    writer.close()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 4 * 100
    assert last_lines(path, 3) == ["line 0092", "line 0093", "line 0094"]
    assert len(last_lines(path, 1_000)) > 10, "the rotated predecessor counts too"
    assert last_lines(tmp_path / "none.log", 5) == []


def test_logs_are_merged_by_time_over_midnight() -> None:
    up = ["23:59:58 info    starts", "00:00:01 error   ends", "Traceback: its reason"]
    stage = ["no time", "12:00:00 info    a day before", "11:59:59 info    a little late", "00:00:00 info    joined"]
    old = ['{"time": "2026-03-01T23:59:59.1+00:00", "message": "as JSON"}']
    changed_s = datetime.datetime(2026, 3, 2, 0, 0, 1).timestamp()
    logs = [("up", up, changed_s), ("b", stage, changed_s), ("c", old, changed_s), ("d", [], 0.0)]
    expected = [*stage[:3], up[0], old[0], stage[3], *up[1:]]
    assert [line for _, line in merged(logs)] == expected
    assert [name for name, _ in merged(logs)] == ["b", "b", "b", "up", "c", "b", "up", "up"]


async def test_following_survives_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    writer = LogWriter(path, bytes_max=60)
    writer.write("before")
    reader = LogReader(path)
    assert reader.last_lines(5) == ["before"]
    sent = [f"line {number}" for number in range(12)]
    for line in sent:
        writer.write(line)
    lines = reader.follow()
    got = [await anext(lines) for _ in sent]
    reader.close()
    writer.close()
    assert got == sent
    assert path.with_name("x.log.1").exists()


async def test_a_log_that_does_not_exist_yet_is_awaited(tmp_path: Path) -> None:
    reader = LogReader(tmp_path / "x.log")
    assert reader.last_lines(5) == []
    lines = reader.follow()
    first = asyncio.ensure_future(anext(lines))
    await asyncio.sleep(0)
    (tmp_path / "x.log").write_text("half")
    with (tmp_path / "x.log").open("a") as file:
        file.write(" a line\nnext")
    assert await first == "half a line"
    reader.close()


class Answers(http.server.BaseHTTPRequestHandler):
    """A coordinator with scripted answers: by path, a status and JSON."""

    answers: ClassVar[dict[str, tuple[int, dict[str, object]]]] = {}

    def do_GET(self) -> None:
        status, body = self.answers[self.path]
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def coordinator() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            serving.join()


def described(
    tmp_path: Path, url: str, state: HostState = HostState.READY, phase: Phase = Phase.READY
) -> dict[str, Any]:
    """The output of `status` for a pipeline whose supervisor sees its processes in this state."""
    directory = StateDir(tmp_path / "small")
    directory.path.mkdir(exist_ok=True)
    board = board_of(directory, me())
    for record in board.state.processes:
        board.set_process(record.name, state=state)
    board.set_phase(phase)
    board.set_addresses(url, "127.0.0.1:1")
    pipeline = find("small", directory.path)
    assert pipeline is not None
    return describe(pipeline)


@pytest.mark.parametrize("phase", [Phase.LOADING, Phase.RECOVERING, Phase.UNREACHABLE, Phase.DRAINING])
@pytest.mark.parametrize("has_key", [True, False])
def test_status_shows_the_state_for_clients(tmp_path: Path, coordinator: str, phase: Phase, has_key: bool) -> None:
    stage = {"name": "stage-0", "last_heard_s": 12.3, "silent": True}
    live = {"phase": phase.value, "phase_s": 70.0, "running": 1, "waiting": 2, "stages": [stage]}
    Answers.answers = {
        "/v1/pipeline": (200, live) if has_key else (401, {}),
        "/health": (503, {"status": phase.value}),
    }
    facts = described(tmp_path, coordinator)
    text = _status_text(facts)
    assert (facts["phase"], facts["phase_s"]) == (phase.value, 70.0 if has_key else None)
    first = text.splitlines()[0]
    assert first.startswith(f"small: {phase.value} for 1 min 10 s, up " if has_key else f"small: {phase.value}, up ")
    if has_key:
        (row,) = (line for line in text.splitlines() if line.startswith("  stage-0"))
        assert "silent" in row
        assert "12 s ago" in row
        assert row.endswith("has not answered for 12 s")
    else:
        assert "an API key is needed" in text


def test_a_gateway_that_has_reached_no_pipeline_yet_is_starting(tmp_path: Path, coordinator: str) -> None:
    live = {"phase": Phase.UNREACHABLE.value, "running": 0, "waiting": 0, "stages": [], "pipelines": []}
    Answers.answers = {"/v1/pipeline": (200, live)}
    assert described(tmp_path, coordinator)["phase"] == Phase.UNREACHABLE.value
    assert described(tmp_path, coordinator, phase=Phase.STARTING)["phase"] == Phase.STARTING.value


@pytest.mark.parametrize("seen", [HostState.STARTING, HostState.LOADING])
def test_no_process_of_a_pipeline_that_is_ready_still_begins(tmp_path: Path, coordinator: str, seen: HostState) -> None:
    live = {"phase": Phase.READY.value, "phase_s": 0.1, "running": 0, "waiting": 0,
            "stages": [{"name": "stage-0", "state": "ready"}, {"name": "stage-1", "state": "loading"}]}  # fmt: skip
    Answers.answers = {"/v1/pipeline": (200, live), "/health": (200, {"status": "ready"})}
    states = {entry["name"]: entry["state"] for entry in described(tmp_path, coordinator, seen)["processes"]}
    assert (states["coordinator"], states["stage-0"]) == ("ready", "ready")
    live["phase"] = Phase.LOADING.value
    states = {entry["name"]: entry["state"] for entry in described(tmp_path, coordinator, seen)["processes"]}
    assert states["coordinator"] == seen.value


def test_status_shows_how_far_a_fetch_is(tmp_path: Path, coordinator: str) -> None:
    stage = {"name": "stage-0", "state": "fetching", "fetched_bytes": 12 * 10**8, "fetch_total_bytes": 34 * 10**8}
    live = {"phase": Phase.LOADING.value, "phase_s": 1.0, "running": 0, "waiting": 0, "stages": [stage]}
    Answers.answers = {"/v1/pipeline": (200, live), "/health": (503, {"status": "loading"})}
    (row,) = (line for line in _status_text(described(tmp_path, coordinator)).splitlines() if "stage-0" in line)
    assert row.endswith("has 1.20 of 3.40 GB of its layers")
    stage["fetch_trouble"] = "hf://org/repo/f.gguf: the hub cannot be reached"
    (row,) = (line for line in _status_text(described(tmp_path, coordinator)).splitlines() if "stage-0" in line)
    assert row.endswith(f"3.40 GB of its layers; nothing comes just now: {stage['fetch_trouble']}")


def test_status_says_why_a_stage_that_left_could_not_go_on(tmp_path: Path, coordinator: str) -> None:
    why = "/cache has 0.06 GiB free, and stage-2.gguf needs 0.13 GiB more"
    stage: dict[str, Any] = {"name": "stage-0", "state": "lost", "failure": why}
    live = {"phase": Phase.LOADING.value, "phase_s": 1.0, "running": 0, "waiting": 0, "stages": [stage]}
    Answers.answers = {"/v1/pipeline": (200, live), "/health": (503, {"status": "loading"})}
    (row,) = (line for line in _status_text(described(tmp_path, coordinator)).splitlines() if "stage-0" in line)
    assert row.endswith(f"it ended: {why}")
    stage["takeover_in_s"] = 27.4
    (row,) = (line for line in _status_text(described(tmp_path, coordinator)).splitlines() if "stage-0" in line)
    assert row.endswith(f"other stages take over its layers in 27 s; it ended: {why}")


def test_status_says_since_when_a_stage_is_lost_whose_layers_others_hold(tmp_path: Path, coordinator: str) -> None:
    idle = {"name": "stage-0", "state": "lost", "state_s": 70.4, "here": False}
    live = {"phase": "ready", "phase_s": 1.0, "running": 0, "waiting": 0, "stages": [], "idle": [idle]}
    Answers.answers = {"/v1/pipeline": (200, live), "/health": (200, {"status": "ready"})}
    (row,) = (line for line in _status_text(described(tmp_path, coordinator)).splitlines() if "stage-0" in line)
    assert "1 min 10 s ago" in row
    idle["state"] = "waiting"
    (row,) = (line for line in _status_text(described(tmp_path, coordinator)).splitlines() if "stage-0" in line)
    assert "ago" not in row, "it never came"


def test_status_shows_how_far_a_fetch_of_next_layers_is(tmp_path: Path, coordinator: str) -> None:
    fetch = {"done_bytes": 12 * 10**8, "total_bytes": 34 * 10**8, "trouble": ""}
    live = {"phase": Phase.READY.value, "phase_s": 1.0, "running": 0, "waiting": 0,
            "stages": [{"name": "stage-0", "state": "ready"}],
            "layers": {"move": {"fetches": {"stage-0": fetch, "gone": fetch}}}}  # fmt: skip
    Answers.answers = {"/v1/pipeline": (200, live), "/health": (200, {"status": "ready"})}
    (row,) = (line for line in _status_text(described(tmp_path, coordinator)).splitlines() if "stage-0" in line)
    assert row.endswith("has 1.20 of 3.40 GB of its next layers")
    fetch["trouble"] = "hf://org/repo/f.gguf: the hub cannot be reached"
    (row,) = (line for line in _status_text(described(tmp_path, coordinator)).splitlines() if "stage-0" in line)
    assert row.endswith(f"of its next layers; nothing comes just now: {fetch['trouble']}")
    live["layers"] = {"move": None}
    (row,) = (line for line in _status_text(described(tmp_path, coordinator)).splitlines() if "stage-0" in line)
    assert "layers" not in row


def test_status_fits_a_narrow_terminal_and_keeps_what_says_most() -> None:
    entry = {"host": "localhost", "layers": [0, 40], "pid": 12_345, "uptime_s": 80.0, "n_restarts": 0,
             "last_heard_s": 0.4, "address": "127.0.0.1:43773", "detail": "d" * 90}  # fmt: skip
    processes = [entry | {"name": name, "state": "ready"} for name in ("stage-0", "stage-1")]

    def heading(width: int | None, **changes: Any) -> list[str]:
        lines = _process_table([each | changes for each in processes], width)
        assert width is None or all(len(line) - 92 <= width for line in lines[1:]), "details may be longer"
        return lines[0].split()

    assert heading(None) == ["process", "state", "layers", "pid", "up", "restarts", "heard", "address"]
    assert heading(78) == ["process", "state", "layers", "pid", "up", "heard", "address"]
    assert heading(66) == ["process", "state", "layers", "pid", "up", "address"]
    assert heading(48) == ["process", "state", "layers", "address"]
    assert "restarts" in heading(66, n_restarts=2)
    assert heading(56, host="10.0.0.2", pid=None)[3:6] == ["pid", "or", "host"]


def test_status_shows_the_layers_that_run_and_no_plan_of_before(tmp_path: Path, coordinator: str) -> None:
    def planned(*layers: int) -> dict[str, Any]:
        stage = {"name": "stage-0", "layers": list(layers), "relative_speed": 1.0, "memory_bytes": 1, "is_full": False}
        stage |= {"memory_limit_bytes": None, "speed_source": "measured"}
        plan = {"streams": 1, "tok_s": 7.5, "equal_tok_s": None, "limit": "", "stages": [stage]}
        return {"from": "measured", **plan, "is_moved": layers == (0, 5)}

    live = {"phase": "ready", "phase_s": 1.0, "running": 0, "waiting": 0, "imbalance": None}
    live |= {"stages": [{"name": "stage-0", "layers": [0, 5]}], "idle": [{"name": "stage-1", "state": "spare"}]}
    Answers.answers = {"/v1/pipeline": (200, live)}
    write_plan(StateDir(tmp_path / "small").plan, planned(0, 8))
    facts = described(tmp_path, coordinator)
    assert facts["planned"] is None
    assert facts["stages"] == [{"name": "stage-0", "layers": [0, 5]}]
    text = _status_text(facts)
    assert "planned" not in text
    (row,) = (line for line in text.splitlines() if line.startswith("  stage-0"))
    assert row.split()[2] == "0-4"
    Answers.answers = {"/v1/pipeline": (200, live | {"planned": planned(0, 5)})}
    pipeline = find("small", tmp_path / "small")
    assert pipeline is not None
    assert "layers have moved since the start; by measured hosts: stage-0 1.0x" in _status_text(describe(pipeline))
    guessed = planned(0, 5) | {"from": "estimated"}
    Answers.answers = {"/v1/pipeline": (200, live | {"planned": guessed})}
    assert "layers have moved" not in _status_text(describe(pipeline)), "nothing was measured"
    guessed["stages"][0] |= {"speed_source": "estimated", "is_doubtful": True}
    text = _status_text(describe(pipeline))
    assert "layers have moved since the start; by estimates: stage-0 1.0x" in text
    assert "busy when it was measured: the next start measures it again, its speed is an estimate" in text


def test_status_shows_the_stored_prefixes(tmp_path: Path, coordinator: str) -> None:
    tier = {"memory_bytes": 3 << 20, "disk_bytes": 0, "states": 2, "hits": 5, "misses": 0}
    live = {"phase": "ready", "phase_s": 1.0, "running": 0, "waiting": 0, "imbalance": None}
    live |= {"stages": [{"name": "stage-0", "layers": [0, 8], "tier": tier}, {"name": "stage-1", "layers": [8, 9]}]}
    stored = {"prefixes": 2, "tokens": 60_000, "stored": 7, "restored": 5}
    Answers.answers = {"/v1/pipeline": (200, live | {"stored_prefixes": stored})}
    facts = described(tmp_path, coordinator)
    assert facts["prefixes"] == stored | {"memory_bytes": 3 << 20, "disk_bytes": 0}
    text = _status_text(facts)
    assert "  prefixes: 2 stored with 60,000 tokens, 3.0 MiB in memory; 5 restored so far" in text
    Answers.answers = {"/v1/pipeline": (200, live)}
    pipeline = find("small", tmp_path / "small")
    assert pipeline is not None
    assert "prefixes" not in _status_text(describe(pipeline)), "an older coordinator says nothing of them"


def test_status_shows_an_address_to_connect_to(tmp_path: Path, coordinator: str) -> None:
    Answers.answers = {"/v1/pipeline": (401, {}), "/health": (200, {"status": "ready"})}
    facts = described(tmp_path, coordinator.replace("127.0.0.1", "0.0.0.0"))
    (entry,) = (entry for entry in facts["processes"] if entry["name"] == "coordinator")
    entry["address"] = "http://10.0.0.9:8080"
    assert _status_text(facts).splitlines()[0].endswith(", http://10.0.0.9:8080/v1")


@pytest.mark.parametrize(
    ("reached", "shown"), [("http://10.0.0.9:8080", "http://10.0.0.9:8080"), ("", "http://127.0.0.1:PORT")]
)
def test_top_shows_the_address_that_status_shows(
    tmp_path: Path, coordinator: str, reached: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks where the coordinator listens, which is every interface."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    port = coordinator.rpartition(":")[2]
    live = {"model": "m", "phase": "ready", "epoch": 1, "now_ns": 1, "generated_tokens": 0, "running": 0, "waiting": 0,
            "lanes": 8, "ctx_tokens": 100, "kv_tokens": 0, "plan": {"n_groups": 1, "group_rows": 1}, "overlap": {},
            "stages": []}  # fmt: skip
    Answers.answers = {"/v1/pipeline": (200, live)}
    directory = StateDir(tmp_path / "relayline" / "small")
    directory.path.mkdir(parents=True)
    board = board_of(directory, me())
    board.set_phase(Phase.READY)
    board.set_addresses(f"http://0.0.0.0:{port}", "127.0.0.1:1")
    board.set_process("coordinator", address=reached)
    done = CliRunner().invoke(top_command, ["--once", "--interval", "0.2", "--pipeline", "small"])
    assert done.exit_code == 0, done.output
    assert f"m  {shown.replace('PORT', port)}  ready" in done.stdout
    assert board.state.shown_url == shown.replace("PORT", port)


def test_status_of_a_coordinator_that_does_not_answer(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        facts = described(tmp_path, f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert facts["phase"] == "unreachable"
    assert "does not answer" in facts["problem"]


def test_status_of_a_coordinator_whose_certificate_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers: that is no reason to call it unreachable."""

    def refuse(*_: object, **named: object) -> NoReturn:
        raise urllib.error.URLError(ssl.SSLCertVerificationError("self-signed certificate"))

    monkeypatch.setattr(urllib.request.OpenerDirector, "open", refuse)
    facts = described(tmp_path, "https://127.0.0.1:1")
    assert facts["phase"] == "ready"
    assert "  requests: its certificate is not trusted here; set SSL_CERT_FILE to the CA's file" in _status_text(facts)


def test_status_counts_the_time_of_the_phase_and_not_of_the_process(tmp_path: Path) -> None:
    directory = StateDir(tmp_path)
    board = board_of(directory, me())
    began_ns = board.state.phase_since_ns
    board.set_phase(Phase.READY)
    ready_ns = board.state.phase_since_ns
    board.set_process("stage-0", state=HostState.LOST)
    lost_ns = board.state.phase_since_ns
    board.set_process("stage-0", detail="another word about it")
    assert began_ns < ready_ns < lost_ns == board.state.phase_since_ns
