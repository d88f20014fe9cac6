"""Goal: a pipeline that nobody uses frees its memory, and any request wakes it with the same tokens: real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relayline.deploy.testing.processes import Running, relayline, stop_all
from tests.end_to_end.test_end_to_end import DEMO, PROMPTS
from tests.end_to_end.test_join import stage
from tests.support.http_client import Client, tokens_of
from tests.support.polling import pause

pytestmark = pytest.mark.slow  # real processes

WAIT_S = 120.0
FREED_BYTES = 20 << 20  # at least, of each stage: its cells and its weights
ASKED = PROMPTS[:2]


class Pipeline:
    """A coordinator with the stages a and b, which sleep after a second without requests."""

    def __init__(self, split: Path, disks: Path) -> None:
        self._disks = disks
        self.coordinator = Running(["serve", "--pipeline", split, "--join-listen", "127.0.0.1:0", "--names", "a,b",
                                    "--http", "127.0.0.1:0", "--ctx", "512", "--lanes", "16", "--no-calibrate",
                                    "--wire", "f32", "--kv-type", "f32", "--sleep-idle-seconds", "1",
                                    "--json"])  # fmt: skip
        self.url = str(self.coordinator.event["url"])
        self.stages = {name: self.started(name) for name in ("a", "b")}
        self.coordinator.next_event("ready")

    def started(self, name: str) -> Running:
        return stage(name, str(self.coordinator.event["join"]), self._disks / name)

    def stop(self) -> None:
        stop_all(*self.stages.values(), self.coordinator)

    def resident_bytes(self) -> list[int]:
        """Of each stage."""
        return [_resident_bytes(running.process.pid) for running in self.stages.values()]


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.fixture
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    split = tmp_path_factory.mktemp("split")
    done = relayline("split", DEMO, "--stages", "2", "--out", split)
    assert done.returncode == 0, done.stderr
    started = Pipeline(split, tmp_path_factory.mktemp("disks"))
    try:
        yield started
    finally:
        started.stop()


class World:
    """The pipeline over HTTP, and its undisturbed answers."""

    def __init__(self, pipeline: Pipeline, session: aiohttp.ClientSession) -> None:
        self.pipeline, self._session = pipeline, session
        self.client = Client(session, {"url": pipeline.url, "model": "relayline-demo"})

    async def get(self, path: str) -> tuple[int, Any]:
        async with self._session.get(f"{self.pipeline.url}{path}") as response:
            return response.status, await response.json()

    async def post(self, path: str) -> tuple[int, Any]:
        async with self._session.post(f"{self.pipeline.url}{path}") as response:
            return response.status, await response.json()

    async def answers(self, on_event: Any = None) -> list[list[int]]:
        streams = [self.client.stream(prompt, on_event) for prompt in ASKED]
        return [tokens_of(each) for each in await asyncio.gather(*streams)]

    async def until_asleep(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while (await self.client.pipeline())["phase"] != "sleeping" or not await self._are_asleep():
                await pause()

    async def _are_asleep(self) -> bool:
        return [each["state"] for each in (await self.client.pipeline())["stages"]] == ["sleeping"] * 2


async def test_an_idle_pipeline_frees_its_memory_and_any_request_wakes_it(pipeline: Pipeline) -> None:
    async with aiohttp.ClientSession() as session:
        world = World(pipeline, session)
        awake_bytes = [0, 0]

        def weigh(_: dict[str, Any]) -> None:  # behind its answers it may be asleep before a busy client looks
            awake_bytes[:] = map(max, awake_bytes, pipeline.resident_bytes())

        undisturbed = await world.answers(weigh)
        await world.until_asleep()
        async with asyncio.timeout(WAIT_S):  # it is being freed
            while any(
                now > then - FREED_BYTES for then, now in zip(awake_bytes, pipeline.resident_bytes(), strict=True)
            ):
                await pause()

        assert await world.get("/health") == (200, {"status": "sleeping"})
        assert (await world.get("/props"))[1]["is_sleeping"]
        assert (await world.get("/v1/models"))[0] == 200
        assert (await world.get("/is_sleeping"))[1]["state"] == "asleep", "none of these has woken it"

        assert await world.answers() == undisturbed
        found = (await world.get("/is_sleeping"))[1]
        assert found["wakes"] == 1, "it may sleep again by now: a busy machine can take a second for one question"
        assert found["woke_in_s"] > 0

        await world.until_asleep()
        embedded = await world.client.post("/v1/embeddings", {"input": "hello"})
        assert len(embedded["data"]) == 1, "so do embeddings"


async def test_a_stage_that_dies_asleep_comes_back_asleep(pipeline: Pipeline) -> None:
    async with aiohttp.ClientSession() as session:
        world = World(pipeline, session)
        undisturbed = await world.answers()
        await world.until_asleep()
        await asyncio.to_thread(pipeline.stages["b"].stop, signal.SIGKILL)
        pipeline.stages["b"] = await asyncio.to_thread(pipeline.started, "b")
        assert pipeline.stages["b"].event["event"] == "idle", "it has loaded nothing"
        await world.until_asleep()
        assert await world.answers() == undisturbed


async def test_without_a_lost_stage_the_others_sleep_too_and_wake_once_it_is_back(pipeline: Pipeline) -> None:
    async with aiohttp.ClientSession() as session:
        world = World(pipeline, session)
        undisturbed = await world.answers()
        await asyncio.to_thread(pipeline.stages["b"].stop, signal.SIGKILL)
        async with asyncio.timeout(WAIT_S):
            while not (await world.post("/sleep"))[1].get("is_sleeping"):  # until its loss is noticed
                await pause()
        status, found = await world.post("/wake_up")
        assert (status, "it waits for" in found["error"]["message"]) == (503, True)
        assert (await world.post("/sleep"))[0] == 200
        pipeline.stages["b"] = await asyncio.to_thread(pipeline.started, "b")
        await world.until_asleep()
        assert await world.answers() == undisturbed


async def test_told_to_sleep_it_answers_first_what_was_asked(pipeline: Pipeline) -> None:
    async with aiohttp.ClientSession() as session:
        world = World(pipeline, session)
        stage_pid = pipeline.stages["a"].process.pid
        os.kill(stage_pid, signal.SIGSTOP)  # no answer ends before
        try:
            streaming = asyncio.create_task(world.client.stream(ASKED[0], max_tokens=400))
            while (await world.client.pipeline())["running"] != 1:
                await pause()
            status, found = await world.post("/sleep")
        finally:
            os.kill(stage_pid, signal.SIGCONT)
        assert len(tokens_of(await streaming)) == 400
        assert (status, found["is_asked"], found["requests"]) == (202, True, 1)
        await world.until_asleep()
        while (await world.post("/wake_up"))[1].get("state") != "awake":  # a busy host takes longer than it waits
            await pause()
        assert (await world.post("/sleep"))[0] == 200
