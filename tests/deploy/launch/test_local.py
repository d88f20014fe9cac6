"""`relayline up --model`: what its children are told, and children that end, fail to start or are being started."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from relayline.coordinator.model.split import split_model
from relayline.deploy.launch import local
from relayline.deploy.launch.backoff import RestartPolicy
from relayline.deploy.launch.child import Child, child_environment
from relayline.deploy.launch.local import LocalConfig, LocalPipeline
from relayline.deploy.testing.paths import DEMO_MODEL as DEMO
from relayline.deploy.testing.processes import TIMEOUT_S, child_running, relayline, running, wait_gone
from relayline.wire.common.errors import StartError
from relayline.wire.links import role_tokens
from tests.support.tiny_models import make_tiny

QUICK = ("--version",)  # a child that ends by itself


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny.gguf", n_layers=4, tokenizer=True)


# --- what children are told -------------------------------------------------------------------------------------------


def test_children_inherit_everything_but_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {
        "RELAYLINE_API_KEY": "key",
        "RELAYLINE_API_KEYS": "keys",
        "RELAYLINE_PROTECT_METRICS": "1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317",
        "HTTPS_PROXY": "http://proxy:3128",
        "LD_LIBRARY_PATH": "/opt/cuda",
    }
    flags = ("RELAYLINE_CTX", "RELAYLINE_LANES", "RELAYLINE_JOIN_LISTEN", "RELAYLINE_NAMES", "RELAYLINE_HTTP")
    monkeypatch.setenv("RELAYLINE_TOKEN", "the supervisor's own")
    for name, value in kept.items() | {(flag, "1") for flag in flags}:
        monkeypatch.setenv(name, value)
    environment = child_environment()
    assert {name: environment.get(name) for name in kept} == kept
    assert not environment.keys() & set(flags)
    assert environment["PATH"]
    assert "RELAYLINE_TOKEN" not in environment, "every child has one of its own"
    assert child_environment("a-token")["RELAYLINE_TOKEN"] == "a-token"


def test_variables_are_flags_of_up_and_not_of_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text("me: 0123456789abcdef\n")
    keys.chmod(0o600)
    for name, value in (("CTX", "64"), ("LANES", "3"), ("NO_CALIBRATE", "1"), ("MODEL_ID", "mine"), ("API_KEYS", keys)):
        monkeypatch.setenv(f"RELAYLINE_{name}", str(value))
    flags = ("--split-dir", tmp_path / "split", "--threads", "1", "--http", "127.0.0.1:0", "--json")
    with running("up", "--model", DEMO, *flags) as up:
        assert (up.event["ctx"], up.event["lanes"], up.event["model"]) == (64, 3, "mine")
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            urllib.request.urlopen(f"{up.event['url']}/v1/models", timeout=60)
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
    """A child that ends at once, again and again. `told` is set when somebody has asked why."""

    def __init__(self) -> None:
        super().__init__("stage-0", QUICK, lambda *_: None)
        self.told = asyncio.Event()
        self.n_starts = 0

    async def start(self) -> None:
        self.n_starts += 1
        await super().start()

    def cause_of_death(self) -> str:
        self.told.set()
        return super().cause_of_death()


@pytest.fixture
def pipeline(model: Path, tmp_path: Path) -> Any:
    """Make a pipeline of a split model, of which nothing has been started."""
    split_model(model, tmp_path, n_stages=2)
    return lambda **more: LocalPipeline(LocalConfig(tmp_path, ("127.0.0.1", 0), **more), lambda *_: None)


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
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "RESTARTS", RestartPolicy(first_s=0.0))
    whole, stage = pipeline(), Ending()
    whole.stages = [stage]
    await stage.start()
    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_process)
    whole._watch(stage.name, whole._keep_alive(stage))
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(StartError, match=r"^stage-0 cannot be started again: Too many open files$"):
            await whole.failed
        await whole.stop()


async def test_nothing_is_started_again_while_the_coordinator_drains(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "RESTARTS", RestartPolicy(first_s=3_600.0, max_s=3_600.0))
    whole, stage = pipeline(), Ending()

    class Draining(Child):
        async def stop(self, timeout_s: float) -> None:
            await asyncio.wait(whole._watchers)

    whole.stages, whole.coordinator = [stage], Draining("coordinator", QUICK, lambda *_: None)
    await stage.start()
    await stage.exited.wait()
    stage.told.clear()
    whole._watch(stage.name, whole._keep_alive(stage))
    await stage.told.wait()  # its end has been seen, and now the delay runs
    async with asyncio.timeout(TIMEOUT_S):
        await whole.stop()
    assert stage.n_starts == 1


class Serving(Child):
    """A coordinator that says it is ready and ends at once, `n_lives` times; then its ready line does not come."""

    def __init__(self, n_lives: int, exit_code: int = 1) -> None:
        super().__init__("coordinator", (), lambda *_: None)
        self.n_lives, self.n_starts, self.code = n_lives, 0, exit_code
        self.started: list[tuple[str, ...]] = []

    async def start(self) -> None:
        self.started.append(self.arguments)
        self.ready = asyncio.get_running_loop().create_future()
        self.exited = asyncio.Event()
        if len(self.started) < self.n_lives:
            self.ready.set_result({"event": "ready"})
            self.exited.set()
        elif len(self.started) > self.n_lives:
            raise AssertionError("it had been given up")

    @property
    def exit_code(self) -> int | None:
        return self.code

    def cause_of_death(self) -> str:
        return f"coordinator ended with exit code {self.code}"

    async def stop(self, timeout_s: float) -> None:
        if not self.ready.done():
            self.ready.set_exception(StartError("it was stopped"))
        self.exited.set()


def keep(whole: LocalPipeline, coordinator: Child) -> None:
    whole.coordinator = coordinator
    whole._watch(coordinator.name, whole._keep_coordinator(coordinator))


AT_ONCE = RestartPolicy(first_s=0, max_s=0, deaths_max=3)


async def test_a_coordinator_that_dies_is_started_again_and_goes_on(pipeline: Any) -> None:
    whole, coordinator = pipeline(policy=AT_ONCE), Serving(n_lives=4)
    await coordinator.start()
    keep(whole, coordinator)
    async with asyncio.timeout(TIMEOUT_S):
        while len(coordinator.started) < 4:  # noqa: ASYNC110 - nothing tells of a start
            await asyncio.sleep(0)
        assert not whole.failed.done()
        await whole.stop()
    assert len(coordinator.started) == 4


@pytest.mark.parametrize(
    ("exit_code", "n_starts", "text"),
    [(1, 4, "exit code 1; it died 4 times in a row"), (2, 1, "exit code 2")],
    ids=["again and again", "told something impossible"],
)
async def test_a_coordinator_that_keeps_dying_ends_the_whole(
    pipeline: Any, exit_code: int, n_starts: int, text: str
) -> None:
    whole, coordinator = pipeline(policy=AT_ONCE), Serving(n_lives=9, exit_code=exit_code)
    await coordinator.start()
    keep(whole, coordinator)
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(StartError, match=f"^coordinator ended with {text}$"):
            await whole.failed
        await whole.stop()
    assert len(coordinator.started) == n_starts


@pytest.mark.slow
def test_a_coordinator_that_is_killed_comes_back_at_its_port(tmp_path: Path) -> None:
    flags = ("--split-dir", tmp_path, "--threads", "1", "--http", "127.0.0.1:0", "--ctx", "64", "--lanes", "2")
    with running("up", "--model", DEMO, *flags, "--no-calibrate", "--json") as up:
        os.kill(child_running(up.process.pid, "serve"), signal.SIGKILL)
        up.wait_for_log("coordinator serves again")
        load = ("bench", up.event["url"], "--streams", "1", "--tokens", "4", "--prompt-tokens", "4", "--json")
        answered = relayline(*load)
        assert json.loads(answered.stdout)["n_complete"] == 1, answered.stderr


def test_a_coordinators_token_of_the_caller_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benches ask the stages of a pipeline themselves; every other one has a token that nobody else knows."""
    root = role_tokens.new_root()
    for text, expected in ((root, root), ("", ""), ("something", ""), ("coordinator/", "")):
        monkeypatch.setenv("RELAYLINE_TOKEN", text)
        assert local.given_root() == expected
