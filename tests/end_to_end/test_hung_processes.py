"""Goal: a stopped (not ended) process is noticed within 12 s at every link, and every page and command reports it.

Method: real processes and SIGSTOP. A stopped process keeps its connections, so only missing heartbeats reveal it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from relayline.deploy.testing.processes import Running, relayline, stop_all
from tests.end_to_end.test_end_to_end import DEMO
from tests.support.http_client import Client, tokens_of
from tests.support.polling import pause

pytestmark = pytest.mark.slow  # real processes, each stopped for some ten seconds

NAMES = ("desk", "laptop", "tower")
# A busy machine keeps everything waiting, so these are generous: 12 s and 15 s on one that has time. Without heartbeats
# nothing is noticed for minutes.
NOTICED_MAX_S = 40.0
ANSWERED_MAX_S = 45.0
READY_MAX_S = 120.0
PROMPT, N_TOKENS = "def f(", 400


class Pipeline:
    """A coordinator and three joined stages."""

    def __init__(self, split: Path, disks: Path) -> None:
        self.coordinator = Running(["serve", "--pipeline", split, "--join-listen", "127.0.0.1:0",
                                    "--names", ",".join(NAMES), "--http", "127.0.0.1:0", "--ctx", "512", "--lanes", "8",
                                    "--no-calibrate", "--wire", "f32", "--kv-type", "f32", "--json"])  # fmt: skip
        self.url, join = str(self.coordinator.event["url"]), self.coordinator.event["join"]
        self.n_tokens: int | None = None
        self.stages: dict[str, Running] = {}
        for name in NAMES:
            self.stages[name] = Running(["stage", "--join", join, "--name", name, "--cache", disks / name,
                                         "--threads", "1", "--json"])  # fmt: skip

    def stop(self) -> None:
        for process in (*self.stages.values(), self.coordinator):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.process.pid, signal.SIGCONT)
            stop_all(process)

    @contextlib.contextmanager
    def stopped(self, process: Running) -> Iterator[float]:
        """Stop a process for the length of a with block; yields when that was (monotonic seconds)."""
        process.process.send_signal(signal.SIGSTOP)
        try:
            yield time.monotonic()
        finally:
            process.process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    split = tmp_path_factory.mktemp("split")
    done = relayline("split", DEMO, "--stages", str(len(NAMES)), "--out", split)
    assert done.returncode == 0, done.stderr
    started = Pipeline(split, tmp_path_factory.mktemp("disks"))
    try:
        started.coordinator.next_event("ready")
        yield started
    finally:
        started.stop()


@contextlib.asynccontextmanager
async def client_of(pipeline: Pipeline) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession() as session:
        yield Client(session, {"url": pipeline.url, "model": "relayline-demo"})


async def n_undisturbed(pipeline: Pipeline, client: Client) -> int:
    """Tokens of an undisturbed stream. It is greedy, so one is enough for all."""
    if pipeline.n_tokens is None:
        pipeline.n_tokens = len(tokens_of(await client.stream(PROMPT, max_tokens=N_TOKENS)))
    return pipeline.n_tokens


async def health(client: Client) -> tuple[int, str]:
    async with client.session.get(f"{client.url}/health") as reply:
        return reply.status, (await reply.json())["status"]


async def until_ready(client: Client) -> None:
    async with asyncio.timeout(READY_MAX_S):
        while (await health(client))[0] != 200:
            await pause()


async def logged(process: Running, text: str, count: int) -> float:
    await asyncio.to_thread(process.wait_for_log, text, count)
    return time.monotonic()


def count(process: Running, text: str) -> int:
    return sum(text in line for line in process.lines)


@pytest.mark.parametrize(("name", "is_idle"), [("desk", True), ("laptop", False), ("tower", False)])
async def test_a_stage_that_is_stopped(pipeline: Pipeline, name: str, is_idle: bool) -> None:
    head = pipeline.coordinator
    async with client_of(pipeline) as client:
        await until_ready(client)
        begun = asyncio.Event()
        streaming = None
        if not is_idle:
            streaming = asyncio.create_task(client.stream(PROMPT, lambda _: begun.set(), max_tokens=N_TOKENS))
            await begun.wait()
        quiet, lost = f"{name} has not answered for 5 s", "pipeline lost"
        n_quiet, n_lost = count(head, quiet), count(head, lost)
        with pipeline.stopped(pipeline.stages[name]) as stopped_s:
            quiet_s = await logged(head, quiet, n_quiet + 1) - stopped_s
            (entry,) = (stage for stage in (await client.pipeline())["stages"] if stage["name"] == name)
            if count(head, lost) == n_lost:  # a busy client may ask when it is lost already
                assert (entry["state"], entry["silent"]) == ("silent", True)
                assert 4 < entry["last_heard_s"] < NOTICED_MAX_S
            noticed_s = await logged(head, lost, n_lost + 1) - stopped_s
            assert (await health(client))[1] in ("recovering", "unreachable")
        print(
            f"{name}, {'idle' if is_idle else 'streaming'}: quiet after {quiet_s:.1f} s, lost after {noticed_s:.1f} s"
        )
        assert noticed_s < NOTICED_MAX_S
        await until_ready(client)
        if streaming is not None:
            assert len(tokens_of(await streaming)) == await n_undisturbed(pipeline, client)


async def test_a_request_while_a_stage_is_stopped_gets_retry_after(pipeline: Pipeline) -> None:
    async with client_of(pipeline) as client:
        await until_ready(client)
        body = client.body("def g(", stream=True, max_tokens=4)
        with pipeline.stopped(pipeline.stages["laptop"]) as stopped_s:
            async with client.session.post(f"{client.url}/v1/completions", json=body) as reply:
                answered_s = time.monotonic() - stopped_s
                assert (reply.status, (await reply.json())["error"]["code"]) == (503, "not_ready")
                assert int(reply.headers["Retry-After"]) >= 1
            print(f"503 after {answered_s:.1f} s")
            assert answered_s < ANSWERED_MAX_S
            assert await health(client) == (503, "unreachable")
            async with client.session.post(f"{client.url}/v1/completions", json=body) as reply:
                assert reply.status == 503
        await until_ready(client)
        assert (await client.complete("def g(", max_tokens=4))["usage"]["completion_tokens"] == 4


async def test_a_coordinator_that_is_stopped(pipeline: Pipeline) -> None:
    """Every stage ends its membership. (test_watch has the end of a route's epoch: here links may fall first.)"""
    async with client_of(pipeline) as client:
        await until_ready(client)
        text = "membership ended: the coordinator at"
        n_before = {name: count(stage, text) for name, stage in pipeline.stages.items()}
        with pipeline.stopped(pipeline.coordinator) as stopped_s:
            for name, stage in pipeline.stages.items():
                noticed_s = await logged(stage, text, n_before[name] + 1) - stopped_s
                print(f"{name}: {text!r} after {noticed_s:.1f} s")
                assert noticed_s < NOTICED_MAX_S
        async with asyncio.timeout(READY_MAX_S):  # for a moment it still believes that all is as it was
            while (await client.pipeline())["missing"] or (await health(client))[0] != 200:
                await pause()
        assert (await client.complete("def g(", max_tokens=4))["usage"]["completion_tokens"] == 4
