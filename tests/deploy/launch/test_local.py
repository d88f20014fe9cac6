"""`relayline up MODEL`: the arguments of its children, and children that end, fail to start or are still starting."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relayline.deploy.launch import own_tls
from relayline.deploy.launch.arrange import arrange
from relayline.deploy.launch.child import Child, child_environment
from relayline.deploy.launch.own_tls import make_own_token
from relayline.deploy.launch.restarts import RestartPolicy
from relayline.deploy.launch.state import StateDir
from relayline.deploy.launch.supervisor import Supervisor, _Kept
from relayline.deploy.manifest.smallest import smallest_manifest
from relayline.deploy.testing.paths import DEMO_MODEL as DEMO
from relayline.deploy.testing.processes import TIMEOUT_S, child_running, relayline, running, wait_gone
from relayline.wire.common.errors import StartError
from relayline.wire.links import role_tokens
from relayline.wire.links.security import read_token

QUICK = ("--version",)  # a child that ends by itself


# --- arguments of children --------------------------------------------------------------------------------------------


def test_children_inherit_everything_but_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {
        "RELAYLINE_API_KEY": "key",
        "RELAYLINE_KERNELS": "off",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317",
        "HTTPS_PROXY": "http://proxy:3128",
        "LD_LIBRARY_PATH": "/opt/cuda",
    }
    flags = ("RELAYLINE_CTX", "RELAYLINE_LANES", "RELAYLINE_JOIN_LISTEN", "RELAYLINE_NAMES", "RELAYLINE_HTTP",
             "RELAYLINE_API_KEYS", "RELAYLINE_PROTECT_METRICS")  # fmt: skip
    monkeypatch.setenv("RELAYLINE_TOKEN", "the supervisor's own")
    for name, value in kept.items() | {(flag, "1") for flag in flags}:
        monkeypatch.setenv(name, value)
    environment = child_environment()
    assert {name: environment.get(name) for name in kept} == kept
    assert not environment.keys() & set(flags)
    assert environment["PATH"]
    assert "RELAYLINE_TOKEN" not in environment, "every child has its own"
    assert child_environment("a-token")["RELAYLINE_TOKEN"] == "a-token"


def test_variables_are_flags_of_up_and_not_of_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text("me: 0123456789abcdef\n")
    keys.chmod(0o600)
    for name, value in (("CTX", "64"), ("LANES", "3"), ("NO_CALIBRATE", "1"), ("MODEL_ID", "mine"), ("API_KEYS", keys)):
        monkeypatch.setenv(f"RELAYLINE_{name}", str(value))
    flags = ("--split-dir", tmp_path / "split", "--threads", "1", "--http", "127.0.0.1:0", "--json")
    with running("up", DEMO, *flags) as up:
        assert (up.event["ctx"], up.event["lanes"], up.event["model"]) == (64, 3, "mine")
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            urllib.request.urlopen(f"{up.event['url']}/v1/models", timeout=TIMEOUT_S)
        refused.value.close()
        load = ("bench", up.event["url"], "--streams", "1", "--tokens", "4", "--prompt-tokens", "4", "--json")
        assert relayline(*load).returncode == 1
        for key in ("--api-key", "0123456789abcdef"), ():
            answered = relayline(*load, *key)
            assert answered.returncode == 0, answered.stderr
            assert json.loads(answered.stdout)["n_complete"] == 1
            monkeypatch.setenv("RELAYLINE_API_KEY", "0123456789abcdef")


# --- children that end, fail to start or are being started ------------------------------------------------------------


class Ending(Child):
    """A child that ends at once, again and again. `was_asked` is set when its cause of death has been asked for."""

    def __init__(self) -> None:
        super().__init__("stage-0", QUICK, lambda *_: None)
        self.was_asked = asyncio.Event()
        self.n_starts = 0

    async def start(self) -> None:
        self.n_starts += 1
        await super().start()

    def cause_of_death(self) -> str:
        self.was_asked.set()
        return super().cause_of_death()


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Callable[..., Supervisor]]:
    """Make the supervisor of two stages here, none of which has been started."""
    directory = StateDir(tmp_path / "state")
    made: list[Supervisor] = []

    def make(policy: RestartPolicy) -> Supervisor:
        manifest = smallest_manifest(Path("model.gguf"))
        plan = arrange(manifest, tmp_path / "model.gguf", directory.manifest)
        made.append(Supervisor(plan, directory, lambda _: None, policy=policy))
        return made[0]

    with directory.locked("model"):
        yield make
    for each in made:
        each._coordinator.log.close()


def kept(whole: Supervisor, child: Child) -> _Kept:
    """Put a child into the place of a stage, or of the coordinator."""
    if child.name == "coordinator":
        whole._coordinator.child = child
        return whole._coordinator
    place = whole._kept(child.name, (), None)
    place.child = child
    whole._stages[child.name] = place
    return place


async def test_a_start_that_is_cancelled_leaves_a_child_that_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Ending()
    await child.start()
    await child.exited.wait()
    spawn, entered, go_on, pids = asyncio.create_subprocess_exec, asyncio.Event(), asyncio.Event(), []

    async def held(*arguments: Any, **named: Any) -> asyncio.subprocess.Process:
        entered.set()
        await go_on.wait()
        process = await spawn(*arguments, **named)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", held)
    again = asyncio.create_task(child.start())
    await entered.wait()
    again.cancel()
    await asyncio.gather(again, return_exceptions=True)
    go_on.set()
    async with asyncio.timeout(TIMEOUT_S):
        await child.stop(TIMEOUT_S)
    assert child.exited.is_set()
    assert len(pids) == 1, "the system had been asked for a process"
    wait_gone(pids)


async def test_a_child_that_never_ran_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Ending()
    await child.stop(TIMEOUT_S)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_process)
    with pytest.raises(OSError, match="Too many open files"):
        await child.start()
    async with asyncio.timeout(TIMEOUT_S):
        await child.stop(TIMEOUT_S)


async def no_process(*_: Any, **__: Any) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def test_a_stage_that_cannot_be_started_again_ends_the_whole(
    supervisor: Callable[..., Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, stage = supervisor(AT_ONCE), Ending()
    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_process)
    whole._keep(kept(whole, stage))
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(StartError, match=r"^a process cannot be started: .* no more files; raise `ulimit -n`$"):
            await whole.failed
        await whole.stop()


async def test_reports_that_nobody_reads_end_a_start_but_nothing_that_serves(
    supervisor: Callable[..., Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ready(Ending):
        pid = property(lambda _: os.getpid())

    def nobody_reads(_: dict[str, Any]) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    async def live(place: _Kept) -> None:
        whole._on_ready(place.child, {"address": "127.0.0.1:1"})

    whole, stage = supervisor(AT_ONCE), Ready()
    monkeypatch.setattr(whole, "_emit", nobody_reads)
    monkeypatch.setattr(whole, "_live", live)
    place = kept(whole, stage)
    whole._keep(place)
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(BrokenPipeError):  # which the command takes for what it is, and not for a failed start
            await whole.failed
    whole._ready.set_result({})
    await live(place)
    await whole.stop()


async def test_nothing_is_started_again_while_the_coordinator_drains(supervisor: Callable[..., Supervisor]) -> None:
    whole, stage = supervisor(RestartPolicy(first_s=3_600.0, max_s=3_600.0)), Ending()

    class Draining(Child):
        async def stop(self, timeout_s: float) -> None:
            await asyncio.wait(whole._tasks)

    kept(whole, Draining("coordinator", QUICK, lambda *_: None))
    whole._keep(kept(whole, stage))
    await stage.was_asked.wait()  # its end has been seen, and now the delay runs
    async with asyncio.timeout(TIMEOUT_S):
        await whole.stop()
    assert stage.n_starts == 1


class Scripted(Child):
    """A child that ends at once, `n_lives` times: after its ready line, or before it. Then it runs on."""

    def __init__(self, name: str, n_lives: int, exit_code: int, *, is_ready: bool) -> None:
        super().__init__(name, (), lambda *_: None)
        self.n_lives, self.n_starts, self.code, self.is_ready = n_lives, 0, exit_code, is_ready

    async def start(self) -> None:
        self.n_starts += 1
        self.ready = asyncio.get_running_loop().create_future()
        self.exited = asyncio.Event()
        if self.n_starts > self.n_lives:
            return
        if self.is_ready:
            self.ready.set_result({"event": "ready", "url": "http://127.0.0.1:1"})
        else:
            self.ready.set_exception(StartError("it died"))
        self.exited.set()

    @property
    def pid(self) -> int:
        return os.getpid()

    @property
    def exit_code(self) -> int | None:
        return self.code

    def cause_of_death(self) -> str:
        return f"{self.name} ended with code {self.code}"

    async def stop(self, timeout_s: float) -> None:
        if not self.ready.done():
            self.ready.set_exception(StartError("it was stopped"))
        self.exited.set()


AT_ONCE = RestartPolicy(first_s=0, max_s=0, deaths_max=3, starts_max=2)


@pytest.mark.parametrize("name", ["coordinator", "stage-0"])
async def test_a_process_that_dies_is_started_again_and_goes_on(
    name: str, supervisor: Callable[..., Supervisor]
) -> None:
    whole, child = supervisor(AT_ONCE), Scripted(name, 3, 1, is_ready=True)
    whole._keep(kept(whole, child))
    async with asyncio.timeout(TIMEOUT_S):
        while child.n_starts < 4:  # noqa: ASYNC110 - nothing tells of a start
            await asyncio.sleep(0)
        assert not whole.failed.done()
        await whole.stop()
    assert child.n_starts == 4


@pytest.mark.parametrize("name", ["coordinator", "stage-0"])
@pytest.mark.parametrize(
    ("exit_code", "is_ready", "n_starts", "text"),
    [
        (1, True, 4, "code 1; it died 4 times in a row"),
        (2, True, 1, "code 2"),
        (-signal.SIGSEGV, False, 2, f"code {-signal.SIGSEGV}; it died 2 times in a row"),
    ],
    ids=["again and again", "told something impossible", "at every start, by what it loads"],
)
async def test_a_process_that_keeps_dying_ends_the_whole(
    exit_code: int, is_ready: bool, n_starts: int, text: str, name: str, supervisor: Callable[..., Supervisor]
) -> None:
    whole, child = supervisor(AT_ONCE), Scripted(name, 9, exit_code, is_ready=is_ready)
    if not whole._ready.done():
        whole._ready.set_result({})  # the pipeline has served before
    whole._keep(kept(whole, child))
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(StartError, match=f"^{name} ended with {text}$"):
            await whole.failed
        await whole.stop()
    assert child.n_starts == n_starts


@pytest.mark.parametrize("state", ["spare", "drained", "sleeping"])
async def test_a_stage_that_is_killed_while_it_rests_has_not_failed_to_start(
    state: str, supervisor: Callable[..., Supervisor]
) -> None:
    """Such a stage says no ready line, perhaps for days; AT_ONCE allows three deaths, but only one start in vain."""
    whole = supervisor(AT_ONCE)

    class Resting(Scripted):
        async def start(self) -> None:
            await super().start()
            whole._on_event({"event": "stage", "name": self.name, "state": state, "host": "localhost"})

    child = Resting("stage-0", 3, -signal.SIGKILL, is_ready=False)
    whole._keep(kept(whole, child))
    async with asyncio.timeout(TIMEOUT_S):
        while child.n_starts < 4 and not whole.failed.done():  # noqa: ASYNC110 - nothing tells of a start
            await asyncio.sleep(0)
        assert not whole.failed.done(), whole.failed.exception()
        await whole.stop()


@pytest.mark.slow
def test_a_coordinator_that_is_killed_comes_back_at_its_port(tmp_path: Path) -> None:
    flags = ("--split-dir", tmp_path, "--threads", "1", "--http", "127.0.0.1:0", "--ctx", "64", "--lanes", "2")
    with running("up", DEMO, *flags, "--no-calibrate", "--json") as up:
        os.kill(child_running(up.process.pid, "serve"), signal.SIGKILL)
        while (again := up.next_event("process"))["name"] != "coordinator":
            pass
        assert (again["restarts"], again["address"]) == (1, up.event["url"])
        load = ("bench", up.event["url"], "--streams", "1", "--tokens", "4", "--prompt-tokens", "4", "--json")
        answered = relayline(*load)
        assert json.loads(answered.stdout)["n_complete"] == 1, answered.stderr


def test_a_coordinators_token_of_the_caller_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Benches ask a pipeline's stages themselves; every other pipeline has a token that no other process knows."""
    root = role_tokens.new_root()
    for text, expected in ((root, root), ("", ""), ("something", ""), ("coordinator/", "")):
        monkeypatch.setenv("RELAYLINE_TOKEN", text)
        assert own_tls.given_root() == expected
        if expected:
            assert read_token(make_own_token(tmp_path / "token")) == root
