"""`relayline restart` of one pipeline: another model at the same place, with a stage of another host that stays."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relayline.deploy.launch.state import StateDir
from relayline.deploy.machine.ports import free_port
from relayline.deploy.testing.paths import DEMO_MODEL, HYBRID_DEMO_MODEL
from relayline.deploy.testing.processes import Running, children, relayline
from relayline.deploy.testing.slow_hosts import local_command
from relayline.wire.common.phase import Phase
from tests.support.http_client import Client
from tests.support.polling import pause

pytestmark = pytest.mark.slow  # real processes

TOKENS = 60
TIMEOUT_S = 150.0
MANIFEST = """apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata: {{name: swap}}
spec:
  model: {{path: {model}}}
  context: {{tokens: 512, lanes: 4}}
  wire: {{tls: {{mode: "off"}}}}
  batching: {{calibrate: false}}
  coordinator: {{host: 127.0.0.1, joinPort: {join}, http: {{port: {http}}}}}
  stages:
    - {{name: here, threads: 1}}
    - {{name: there, host: 203.0.113.1, threads: 1, port: {stage}}}
"""


class Swap:
    """`relayline up` of the manifest, and the stage of the other host."""

    def __init__(self, directory: Path) -> None:
        self.path, self.state = directory / "swap.yaml", directory / "state"
        self._ports = {name: free_port() for name in ("join", "http", "stage")}
        self.write(DEMO_MODEL)
        flags = ("up", self.path, "--no-measure", "--json", "--state-dir", self.state)
        self.up = Running(flags, is_ready=False)
        remote = self.up.event if self.up.event["event"] == "remote" else self.up.next_event("remote")
        words = local_command(str(remote["command"]), self.state)
        self.there = Running([*words, "--cache", directory / "cache", "--always-fetch", "--json"])
        self.url = str(self.up.next_event("ready")["url"])

    def write(self, model: Path) -> None:
        self.path.write_text(MANIFEST.format(model=model, **self._ports))

    def restart(self) -> Any:
        return relayline("restart", "swap", "--state-dir", self.state, timeout_s=TIMEOUT_S)

    def stop(self) -> None:
        for process in (self.there, self.up):
            process.stop()


@pytest.fixture
def swap(tmp_path: Path) -> Iterator[Swap]:
    started = Swap(tmp_path)
    try:
        yield started
    finally:
        started.stop()


async def model_of(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as answer:
        return str((await answer.json())["data"][0]["id"])


async def answers_until_refused(url: str, model: str) -> int:
    """Ask one answer after the other, each of which must be whole, until one is refused; return how many there were."""
    body = {"model": model, "prompt": "def copy(", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession(url) as session:
        for n_answers in itertools.count():
            try:
                async with session.post("/v1/completions", json=body) as answer:
                    if answer.status != 200:
                        return n_answers
                    raw = await answer.content.read()
            except aiohttp.ClientConnectionError:  # before an answer: one that breaks off is another error
                return n_answers
            assert raw.endswith(b"data: [DONE]\n\n"), raw[-200:]
    raise AssertionError("it counts for ever")


async def test_another_model_serves_at_the_same_place_once_running_answers_have_ended(swap: Swap) -> None:
    before, model = children(swap.up.process.pid), await model_of(swap.url)
    answers = [asyncio.create_task(answers_until_refused(swap.url, model)) for _ in range(3)]
    swap.write(HYBRID_DEMO_MODEL)
    done = await asyncio.to_thread(swap.restart)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"swap serves: {swap.url}/v1\n", "and no line for a host that comes back by itself"
    assert all(await asyncio.gather(*answers)), "each client had answers, and none of them was cut"
    assert await model_of(swap.url) == HYBRID_DEMO_MODEL.stem != model
    assert swap.up.process.poll() is None, "it is the same process"
    assert not {*before} & {*children(swap.up.process.pid)}, "with others of its own"
    assert swap.there.process.poll() is None, "and the other host's has stayed"
    assert not (swap.state / "restart.json").exists()
    async with aiohttp.ClientSession() as session:
        again = await Client(session, {"url": swap.url, "model": HYBRID_DEMO_MODEL.stem}).complete("def copy(")
    assert again["usage"]["completion_tokens"] == 40


async def test_a_manifest_with_a_mistake_changes_nothing(swap: Swap, tmp_path: Path) -> None:
    before = children(swap.up.process.pid)
    swap.write(tmp_path / "nowhere.gguf")
    text = f"swap serves as before, because it could not start again: {tmp_path / 'nowhere.gguf'}: no such file"
    for done in await asyncio.gather(*(asyncio.to_thread(swap.restart) for _ in range(2))):  # each hears it
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"relayline: error: {text}")
        assert done.stderr.count("\n") == 1
    assert {*before} <= {*children(swap.up.process.pid)}, "the same processes"
    assert await model_of(swap.url) == DEMO_MODEL.stem
    swap.write(DEMO_MODEL)
    assert (await asyncio.to_thread(swap.restart)).returncode == 0, "it is an order of its own"


async def test_a_mistake_that_comes_after_the_check_brings_back_what_served_before(swap: Swap) -> None:
    restarting = asyncio.create_task(asyncio.to_thread(swap.restart))
    while (state := StateDir(swap.state).load()) is None or state.phase not in (Phase.DRAINING, Phase.STOPPED):
        await pause()
    swap.path.write_text(swap.path.read_text().replace("tokens:", "tokenz:"))
    done = await restarting
    assert (done.returncode, done.stdout) == (1, "")
    error = f'swap serves as before, because it could not start again: {swap.path}:6: unknown key "tokenz"'
    assert done.stderr.splitlines()[-1].startswith(f"relayline: error: {error}")
    assert await model_of(swap.url) == DEMO_MODEL.stem
    assert swap.up.process.poll() is None


async def test_a_start_that_fails_brings_back_what_served_before(swap: Swap, tmp_path: Path) -> None:
    following = Path(shutil.copy(HYBRID_DEMO_MODEL, tmp_path / "following.gguf"))
    swap.write(following)
    restarting = asyncio.create_task(asyncio.to_thread(swap.restart))
    while (state := StateDir(swap.state).load()) is None or state.phase not in (Phase.DRAINING, Phase.STOPPED):
        await pause()
    os.unlink(following)  # after the check
    done = await restarting
    assert (done.returncode, done.stdout) == (1, "")
    error = f"swap serves as before, because it could not start again: {following}: no such file"
    assert done.stderr.splitlines()[-1].startswith(f"relayline: error: {error}")
    assert await model_of(swap.url) == DEMO_MODEL.stem
    assert swap.up.process.poll() is None
    assert swap.there.process.poll() is None
