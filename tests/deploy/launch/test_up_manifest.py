"""`relayline up MANIFEST` with real processes: start, serve, restart, status, logs, down, detach, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from relayline.coordinator.engine.stage_client import StageClient
from relayline.deploy.launch.arrange import arrange
from relayline.deploy.launch.prepare import prepare
from relayline.deploy.launch.restarts import RestartPolicy
from relayline.deploy.launch.state import StateDir, state_root
from relayline.deploy.launch.supervisor import Supervisor, supervise
from relayline.deploy.machine.ports import free_port
from relayline.deploy.manifest import load_manifest
from relayline.deploy.models.mend import mender
from relayline.deploy.testing.paths import DEMO_MODEL as DEMO
from relayline.deploy.testing.processes import COMMAND, TIMEOUT_S, relayline, wait_gone
from relayline.wire.common.errors import StartError, UnauthenticatedError
from relayline.wire.links import role_tokens
from relayline.wire.links.roles import Identity, Role
from relayline.wire.links.security import LinkSecurity
from tests.support.http_client import Client, assert_same_greedy, tokens_of
from tests.support.polling import pause

pytestmark = pytest.mark.slow  # real processes, started many times

PROMPT = "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize\n"
Event = dict[str, Any]


def write_manifest(directory: Path, name: str, extra: str = "", stages: str = "3") -> Path:
    path = directory / f"{name}.yaml"
    # Calibrating takes longer than all else here and is looked at elsewhere.
    batching = "" if "batching" in extra else "  batching: {calibrate: false}\n"
    path.write_text(
        "apiVersion: relayline.dev/v1alpha1\n"
        "kind: Pipeline\n"
        f"metadata: {{name: {name}}}\n"
        "spec:\n"
        f"  model: {{path: {DEMO}}}\n"
        "  context: {tokens: 512, lanes: 8}\n"
        f"  stages: {stages}\n"
        "  coordinator: {http: {port: 0}}\n"
        f"{batching}{extra}"
    )
    return path


class Up:
    """One `relayline up MANIFEST --json` in the foreground, and the events that it prints."""

    def __init__(self, manifest: Path, *more: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "up", str(manifest), "--json", *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.events: list[Event] = []
        self.stderr = ""
        self._changed = threading.Condition()
        self._ended = False
        self._readers = [threading.Thread(target=self._read_events), threading.Thread(target=self._read_stderr)]
        for reader in self._readers:
            reader.start()

    def _read_events(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.events.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.stderr += line

    def wait_for(self, wanted: Callable[[Event], bool]) -> Event:
        """Block until an event is the wanted one; fails if the process ends first."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._ended or any(map(wanted, self.events)), TIMEOUT_S), self.stderr
            found = next((event for event in self.events if wanted(event)), None)
        if found is None:
            self._readers[1].join(TIMEOUT_S)  # it has ended, and says why
            raise AssertionError(self.stderr)
        return found

    def ready(self) -> Event:
        return self.wait_for(lambda event: event["event"] == "ready")

    def process_ready(self, name: str, restarts: int = 0) -> Event:
        return self.wait_for(
            lambda event: event["event"] == "process" and event["name"] == name and event["restarts"] == restarts
        )

    def end(self, number: signal.Signals | None = None) -> int:
        if number is not None and self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(TIMEOUT_S)
        for reader in self._readers:
            reader.join(TIMEOUT_S)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return code


@contextlib.contextmanager
def up(manifest: Path, *more: str) -> Iterator[Up]:
    running = Up(manifest, *more)
    try:
        yield running
    finally:
        running.end(signal.SIGTERM)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """State and cache of this module's pipelines, also for its commands."""
    directory = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(directory / "state"))
        patch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
        yield directory


def status(name: str) -> Event:
    done = relayline("status", name, "--json")
    assert done.stdout, done.stderr
    (found,) = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def served(home: Path) -> Iterator[Up]:
    with up(write_manifest(home, "served")) as running:
        running.ready()
        yield running


def test_every_process_is_reported_when_ready_the_coordinator_last(served: Up) -> None:
    served.ready()
    names = [event["name"] for event in served.events if event["event"] == "process" and not event["restarts"]]
    assert sorted(names[:-1]) == ["stage-0", "stage-1", "stage-2"]
    assert names[-1] == "coordinator"
    assert served.process_ready("stage-0")["layers"][0] == 0


async def test_a_killed_stage_comes_back_and_the_stream_goes_on(served: Up) -> None:
    async with aiohttp.ClientSession() as session:
        client = Client(session, served.ready())
        undisturbed = tokens_of(await client.stream(PROMPT, max_tokens=400))
        assert undisturbed
        pid = served.process_ready("stage-1")["pid"]
        seen = 0

        def kill_once(_: Event) -> None:
            nonlocal seen
            seen += 1
            if seen == 3:
                os.kill(pid, signal.SIGKILL)

        disturbed = tokens_of(await client.stream(PROMPT, kill_once, max_tokens=400))
        await assert_same_greedy(client, PROMPT, undisturbed, disturbed)
    again = await asyncio.to_thread(served.process_ready, "stage-1", 1)
    assert again["pid"] != pid
    facts = await asyncio.to_thread(status, "served")
    assert facts["phase"] == "ready"
    assert [entry["n_restarts"] for entry in facts["processes"] if entry["name"] == "stage-1"] == [1]


def test_a_killed_coordinator_comes_back_where_it_was(served: Up) -> None:
    before = served.ready()["url"]
    os.kill(served.process_ready("coordinator")["pid"], signal.SIGKILL)
    assert served.process_ready("coordinator", 1)["address"] == before


def test_status_shows_processes_and_requests(served: Up) -> None:
    facts = status("served")
    assert (facts["pid"], facts["url"]) == (served.process.pid, served.ready()["url"])
    assert facts["requests"] == {"running": 0, "waiting": 0}
    assert [entry["name"] for entry in facts["processes"]] == ["coordinator", "stage-0", "stage-1", "stage-2"]
    for entry in facts["processes"]:
        assert entry["pid"]
        assert entry["uptime_s"] >= 0
        assert entry["address"]
    assert all(entry["metrics"] for entry in facts["processes"] if entry["role"] == "stage")
    text = relayline("status").stdout
    assert text.startswith("served: ready for")
    assert "stage-2" in text


def test_logs_are_kept_per_process(served: Up) -> None:
    whole = relayline("logs", "served").stdout
    assert "[stage-1] " in whole
    assert "[coordinator] " in whole
    one = relayline("logs", "served", "coordinator", "--lines", "1").stdout
    assert len(one.splitlines()) == 1
    refused = relayline("logs", "served", "stage-9")
    assert refused.returncode == 2
    assert "stage-2" in refused.stderr


def test_logs_follow_new_lines(served: Up, home: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "logs", "served", "stage-0", "--lines", "1", "--follow"], stdout=subprocess.PIPE, text=True
    ) as follower:
        try:
            assert follower.stdout is not None
            assert follower.stdout.readline()
            with (home / "state" / "relayline" / "served" / "logs" / "stage-0.log").open("a") as file:
                file.write("a new line\n")
            assert follower.stdout.readline() == "a new line\n"
            follower.send_signal(signal.SIGINT)
            assert follower.wait(TIMEOUT_S) == 0
        finally:
            follower.kill()


@pytest.mark.usefixtures("served")
def test_up_of_a_running_pipeline_changes_nothing_or_names_changes_that_need_a_restart(home: Path) -> None:
    same = relayline("up", home / "served.yaml", "--detach")
    assert (same.returncode, same.stdout) == (0, "served already runs with these settings; nothing to change\n")
    other = relayline("up", home / "served.yaml", "--lanes", "4")
    assert other.returncode == 1
    assert other.stdout == "context.lanes: 8 -> 4: needs a new start\n"
    assert "served runs, and nothing was changed: context.lanes cannot change while it serves" in other.stderr
    assert relayline("up", home / "served.yaml", "--lanes", "4", "--dry-run").returncode == 0


def test_changed_layers_are_applied_and_outlive_the_coordinator(home: Path) -> None:
    with up(write_manifest(home, "moved", stages="2")) as running:
        running.ready()
        layers = "[{name: stage-0, layers: [0, 3]}, {name: stage-1, layers: [3, 8]}]"
        applied = relayline("up", write_manifest(home, "moved", stages=layers))
        assert applied.returncode == 0, applied.stderr
        assert "layers 0-2, 3-7: moved in" in applied.stdout
        os.kill(running.process_ready("coordinator")["pid"], signal.SIGKILL)
        running.process_ready("coordinator", 1)
        found = json.loads(relayline("move", "--json", "--pipeline", "moved").stdout)
        assert (found["cuts"], found["move"]) == ([3], None), "a new coordinator, the moved layers"


def test_down_ends_everything_and_says_so(home: Path) -> None:
    running = Up(write_manifest(home, "ended", stages="2"))
    url = running.ready()["url"]
    with urllib.request.urlopen(f"{url}/v1/completions", b'{"prompt": "def", "max_tokens": 8}', TIMEOUT_S) as answer:
        assert answer.status == 200
    pids = [running.process.pid, *(entry["pid"] for entry in status("ended")["processes"])]
    shared = "share cores and have more threads"  # so they do where the tests have one core
    done = relayline("down", "ended")
    assert (done.returncode, done.stdout) == (0, "ended has ended\n")
    assert running.end() == 0
    wait_gone(pids)
    logs = {path.name: path.read_text() for path in (home / "state" / "relayline" / "ended" / "logs").iterdir()}
    assert sorted(logs) == ["coordinator.log", "stage-0.log", "stage-1.log", "up.log"]
    of_the_end = [line for text in (*logs.values(), running.stderr) for line in text.splitlines()]
    wrong = [line for line in of_the_end if re.search(r"^\S+ (warning|error)|Traceback|never awaited", line)]
    assert [line for line in wrong if shared not in line] == []
    assert status("ended")["phase"] == "stopped"
    assert relayline("status", "ended").returncode == 1
    again = relayline("down", "ended")
    assert (again.returncode, again.stdout) == (0, "ended was not running\n")
    assert relayline("down", "never").returncode == 2


def test_detached_it_goes_on_without_its_starter(home: Path) -> None:
    manifest = write_manifest(home, "background", stages="2")
    done = relayline("up", manifest, "--detach")
    try:
        assert done.returncode == 0, done.stderr
        assert "ready: http://" in done.stdout
        facts = status("background")
        assert facts["phase"] == "ready"
        assert all(entry["state"] == "ready" for entry in facts["processes"])
    finally:
        assert relayline("down", manifest).returncode == 0


async def test_detached_a_hangup_has_the_keys_read_again(home: Path) -> None:
    keys = home / "keys"
    keys.write_text(f"alice: {'a' * 32}\n")
    keys.chmod(0o600)
    manifest = write_manifest(home, "hung-up-behind", stages="1")
    try:
        assert relayline("up", manifest, "--detach", "--api-keys", keys).returncode == 0
        facts = status("hung-up-behind")
        keys.write_text(f"bob: {'b' * 32}\n")
        os.kill(facts["pid"], signal.SIGHUP)  # the pid of `up` itself, which `status` shows first
        log = StateDir(Path(facts["state_dir"])).log("coordinator")
        async with asyncio.timeout(TIMEOUT_S):
            while "API keys were read again; known keys: bob" not in log.read_text():
                await pause()
        assert status("hung-up-behind")["phase"] == "ready"
    finally:
        assert relayline("down", manifest).returncode == 0


def test_detached_failures_reach_the_starter(home: Path) -> None:
    manifest = write_manifest(home, "failing", "  batching: {maxRows: 1}\n", stages="2")
    manifest.write_text(manifest.read_text().replace("lanes: 8", "lanes: 300"))  # more than a stage can hold
    done = relayline("up", manifest, "--detach")
    assert done.returncode in (1, 2)
    assert "300" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_terminal_ends_a_pipeline_properly(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests themselves may run under nohup, whose children ignore the signal.
    heeding = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    )
    monkeypatch.setattr(sys.modules[__name__], "COMMAND", (sys.executable, "-c", heeding, *COMMAND))
    running = Up(write_manifest(home, "hung-up", stages="2"))
    running.ready()
    assert running.end(signal.SIGHUP) == 0
    assert status("hung-up")["phase"] == "stopped"


def test_leftovers_of_a_killed_supervisor_are_cleaned_up(home: Path) -> None:
    manifest = write_manifest(home, "orphaned", stages="2")
    running = Up(manifest)
    running.ready()
    pids = [entry["pid"] for entry in status("orphaned")["processes"]]
    running.end(signal.SIGKILL)
    wait_gone(pids)
    assert status("orphaned")["phase"] == "dead"
    with up(manifest) as again:
        again.ready()
        assert status("orphaned")["phase"] == "ready"
    assert "did not end properly" in again.stderr


def test_flags_win_over_variables_and_these_over_the_manifest(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = write_manifest(home, "flags", "  batching: {policy: drain}\n", stages="1")
    monkeypatch.setenv("RELAYLINE_CTX", "64")
    monkeypatch.setenv("RELAYLINE_LANES", "3")
    with up(manifest, "--lanes", "2", "--model-id", "mine") as running:
        ready = running.ready()
    assert (ready["ctx"], ready["lanes"], ready["model"]) == (64, 2, "mine")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("MANIFEST", "--model", str(DEMO)), "give the model either as MODEL or with --model"),
        (("MANIFEST", "--cuts", "99"), "99"),
        (("MANIFEST", "--cuts", "4", "--stages", "2"), "give either --stages or --cuts"),
        (("MANIFEST", "--name", "No Name"), "--name 'No Name' is not a name"),
        ((str(DEMO), "--name", "No Name"), "--name 'No Name' is not a name"),
        ((str(DEMO), "--http", "127.0.0.1:0", "--api-keys", "nowhere"), "nowhere: no such file"),
        (("org/model", "--name", "No Name"), "--name 'No Name' is not a name"),
        (("http://10.0.0.1/model.gguf",), "URLs are not loaded; download the file"),
        (("nowhere.yaml",), "nowhere.yaml"),
        (("nowhere",), "nowhere: no such file"),
    ],
)
def test_forms_that_do_not_go_together(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, "forms")
    done = relayline("up", *(str(manifest) if part == "MANIFEST" else part for part in arguments))
    assert done.returncode in (1, 2)
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert "ended" not in done.stderr, "nothing was started"


@pytest.mark.parametrize("command", ["up", "plan"])
def test_a_model_that_is_missing_is_said_to_be_the_manifests(command: str, tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, "gone")
    manifest.write_text(re.sub(r"path: \S+?gguf", "path: gone.gguf", manifest.read_text()))
    done = relayline(command, str(manifest))
    assert done.returncode == 2
    assert "gone.gguf: no such file; spec.model.path of the manifest names it" in done.stderr


def test_nothing_is_started_where_a_port_is_taken(served: Up, home: Path) -> None:
    port = served.ready()["url"].rpartition(":")[2]
    manifest = write_manifest(home, "taken")
    done = relayline("up", manifest, "--http", f"127.0.0.1:{port}")
    assert done.returncode == 1
    assert f"127.0.0.1:{port} is taken by the pipeline served; `relayline down served` ends it" in done.stderr
    assert not (home / "state" / "relayline" / "taken" / "state.json").exists()
    gone = relayline("up", home / "nowhere.gguf", "--http", f"127.0.0.1:{port}")
    assert "nowhere.gguf: no such file" in gone.stderr, "what is asked for comes before what is in its way"


def test_up_of_a_running_model_is_no_port_that_is_taken(home: Path) -> None:
    port = free_port()
    with up(DEMO, "--name", "twice", "--http", f"127.0.0.1:{port}") as running:
        running.ready()
        again = relayline("up", DEMO, "--name", "twice", "--http", f"127.0.0.1:{port}")
    assert (again.returncode, again.stdout) == (0, "twice already runs with these settings; nothing to change\n")


async def test_a_stage_that_keeps_dying_ends_the_whole_with_the_telling_line(home: Path, tmp_path: Path) -> None:
    directory = StateDir(tmp_path / "state")
    prepared = await asyncio.to_thread(prepare, load_manifest(write_manifest(tmp_path, "crashing")))
    with directory.locked("crashing"):
        directory.manifest.write_text(prepared.manifest.model_dump_json(by_alias=True, exclude_none=True))
        events: list[Event] = []
        changed = asyncio.Event()

        def emit(event: Event) -> None:
            events.append(event)
            if event["event"] == "process" and event["name"] == "stage-1":
                os.kill(event["pid"], signal.SIGSEGV)
            changed.set()

        policy = RestartPolicy(first_s=0.01, max_s=0.02, deaths_max=2)
        plan = arrange(prepared.manifest, tmp_path / "crashing.yaml", directory.manifest)
        supervisor = Supervisor(plan, directory, emit, policy=policy)
        seen: list[tuple[str, int]] = []  # states of the stage on the board, and its restarts
        set_process = supervisor.board.set_process

        def noted(name: str, **changes: Any) -> Any:
            record = set_process(name, **changes)
            now = supervisor.board[name]
            if name == "stage-1" and seen[-1:] != [(now.state, now.n_restarts)]:
                seen.append((now.state, now.n_restarts))
            return record

        supervisor.board.set_process = noted  # type: ignore[method-assign]
        why = r"stage-1 ended with signal SIGSEGV \(`relayline doctor`.*; it died 3 times in a row"
        with pytest.raises(StartError, match=why):
            await supervise(supervisor, asyncio.Event(), emit)
    state = directory.load()
    assert state is not None
    assert state.phase == "failed"
    assert "SIGSEGV" in state.reason
    assert {record.name: record.state for record in state.processes}["stage-1"] == "failed"
    assert not any(record.pid for record in state.processes)
    assert "SIGSEGV" in directory.log("stage-1").read_text()
    assert [event["restarts"] for event in events if event.get("name") == "stage-1"] == [0, 1, 2]
    assert [each for each in seen if each[0] == "restarting"] == [("restarting", 1), ("restarting", 2)]


async def test_a_slice_that_is_damaged_under_a_running_stage_is_made_again(home: Path, tmp_path: Path) -> None:
    directory = StateDir(tmp_path / "state")
    manifest = write_manifest(tmp_path, "damaged")
    prepared = await asyncio.to_thread(prepare, load_manifest(manifest))
    slice_path = prepared.pipeline_dir / prepared.file.stages[1].file
    whole = slice_path.read_bytes()
    with directory.locked("damaged"):
        directory.manifest.write_text(prepared.manifest.model_dump_json(by_alias=True, exclude_none=True))
        emitted, stopping = list[Event](), asyncio.Event()

        def emit(event: Event) -> None:
            emitted.append(event)
            if event["event"] == "process" and event["name"] == "stage-1":
                if event["restarts"]:
                    stopping.set()
                    return
                os.truncate(slice_path, 4096)
                os.kill(event["pid"], signal.SIGKILL)

        policy = RestartPolicy(first_s=0.01, max_s=0.02)
        plan = arrange(prepared.manifest, manifest, directory.manifest)
        mend = mender(DEMO, prepared.pipeline_dir, prepared.file)
        supervisor = Supervisor(plan, directory, emit, policy=policy, mend=mend)
        await supervise(supervisor, stopping, emit)
    assert slice_path.read_bytes() == whole


def test_the_slices_of_a_model_that_has_changed_or_gone_are_left_alone(home: Path, tmp_path: Path) -> None:
    prepared = prepare(load_manifest(write_manifest(tmp_path, "changed")))
    slice_path = prepared.pipeline_dir / prepared.file.stages[1].file
    slice_path.unlink()
    source = prepared.file.source
    touched = tuple(msgspec.structs.replace(each, mtime_ns=each.mtime_ns - 1) for each in source.files)
    for changed in ({"sha256": "0"}, {"files": touched}):
        other = msgspec.structs.replace(prepared.file, source=msgspec.structs.replace(source, **changed))
        assert not asyncio.run(mender(DEMO, prepared.pipeline_dir, other)())
    assert not asyncio.run(mender(tmp_path / "gone.gguf", prepared.pipeline_dir, prepared.file)())
    assert not slice_path.exists()


def test_another_host_gets_its_one_command(home: Path) -> None:
    """A stage of another name joins by that line from an empty disk, over mutual TLS. No measurement is needed."""
    speed = "speed: {decodeGbytesPerS: 20, prefillGflops: 100}"
    stages = f"[{{name: here, {speed}}}, {{name: there, host: box.test, {speed}}}]"
    manifest = write_manifest(home, "apart", stages=stages)
    ports = f"host: 127.0.0.1, joinPort: {free_port()}, enrolPort: {free_port()}, http: {{port: 0}}"
    text = manifest.read_text().replace("http: {port: 0}", ports)
    manifest.write_text(text)
    with up(manifest) as running:
        remote = running.wait_for(lambda event: event["event"] == "remote")
        assert (remote["name"], remote["host"]) == ("there", "box.test")
        words = remote["command"].split()
        assert words[:2] == ["relayline", "join"]
        assert len(words) == 4, "an address and a token, and nothing to copy"
        assert not remote["bring"]
        words += ["--listen", "127.0.0.2:0", "--advertise", "127.0.0.2", "--metrics", "127.0.0.2:0"]
        words += ["--state", str(home / "there"), "--cache", str(home / "there")]
        assert status("apart")["phase"] in ("starting", "loading")
        assert remote["command"] in relayline("status", "apart").stdout, "for a user who has closed that terminal"
        with subprocess.Popen([*COMMAND, *words[1:]], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as stage:
            try:
                joined = running.wait_for(lambda event: event["event"] == "waiting" and not event["missing"])
                assert joined["message"] == "2 of 2 joined"
                running.ready()
                (there,) = (entry for entry in status("apart")["processes"] if entry["name"] == "there")
                assert (there["state"], there["host"], there["pid"]) == ("ready", "box.test", None)
            finally:
                stage.terminate()
                stage.communicate(timeout=TIMEOUT_S)


def command_line(pid: int) -> str:
    """The visible command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_text()


async def test_other_users_of_the_machine_cannot_talk_to_the_stages(home: Path) -> None:
    """Neither with nothing to show nor with another pipeline's token; no command line shows the token."""
    with up(write_manifest(home, "kept", stages="2")) as running:
        running.ready()
        tokens = sorted((state_root() / "kept" / "join").iterdir())
        assert [path.name for path in tokens] == ["stage-0.token", "stage-1.token", "token"]
        assert {path.stat().st_mode & 0o777 for path in tokens} == {0o600}
        processes = status("kept")["processes"]
        for entry in processes:
            shown = command_line(entry["pid"])
            assert not any(path.read_text().strip() in shown for path in tokens)
        for entry in processes[1:]:
            who = Identity(Role.STAGE, "localhost", entry["name"])
            for token in ("", role_tokens.new_root()):
                client = StageClient(entry["address"], LinkSecurity(token=token), who)
                with pytest.raises(UnauthenticatedError, match="join token"):
                    await client.describe()
                await client.close()
            client = StageClient(entry["address"], LinkSecurity(token=tokens[-1].read_text().strip()), who)
            assert (await client.describe()).name == entry["name"]
            await client.close()
