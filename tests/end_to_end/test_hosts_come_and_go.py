"""Stages come, go, are drained and are lost for good under streams: real processes on loopback addresses."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relayline.deploy.testing.processes import Running, relayline
from tests.end_to_end.test_end_to_end import DEMO, PROMPTS
from tests.end_to_end.test_join import stage
from tests.end_to_end.test_moves import Gaps, answers_until
from tests.support.http_client import Client, assert_same_greedy, tokens_of
from tests.support.polling import pause

pytestmark = pytest.mark.slow  # real processes

WAIT_S = 60.0
ASKED = PROMPTS[:3]


class Pipeline:
    """A coordinator that knows its model, the stages a and b, and the spare s."""

    def __init__(self, split: Path, disks: Path) -> None:
        self.kept = disks / "layers.json"
        self.coordinator = Running(["serve", "--pipeline", split, "--model", DEMO, "--join-listen", "127.0.0.1:0",
                                    "--names", "a,b", "--spares", "s", "--takeover", "1", "--keep-layers", self.kept,
                                    "--http", "127.0.0.1:0", "--ctx", "512", "--lanes", "16", "--no-calibrate",
                                    "--wire", "f32", "--kv-type", "f32", "--json"])  # fmt: skip
        self.url, self._disks = str(self.coordinator.event["url"]), disks
        self.spare = self.started("s")
        self.more: Running | None = None
        self.stages = {name: stage(name, self._join, disks / name) for name in ("a", "b")}
        self.coordinator.next_event("ready")

    @property
    def _join(self) -> str:
        return str(self.coordinator.event["join"])

    def started(self, name: str) -> Running:
        """A stage that stands by, once it says so."""
        return Running(["stage", "--join", self._join, "--name", name, "--cache", self._disks / name, "--threads", "1",
                        "--always-fetch", "--json"])  # fmt: skip

    def stop(self) -> None:
        for process in (self.more, self.spare, *self.stages.values(), self.coordinator):
            if process is not None:
                process.stop()


@pytest.fixture
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        split = tmp_path_factory.mktemp("split")
        done = relayline("split", DEMO, "--stages", "2", "--out", split)
        assert done.returncode == 0, done.stderr
        started = Pipeline(split, tmp_path_factory.mktemp("disks"))
        try:
            yield started
        finally:
            started.stop()


class World:
    """What the steps of one story share: some streams, and what they say undisturbed."""

    def __init__(self, pipeline: Pipeline, client: Client, session: aiohttp.ClientSession) -> None:
        self.pipeline, self.client, self._session = pipeline, client, session
        self.undisturbed: list[list[int]] = []

    async def layers(self) -> dict[str, Any]:
        async with self._session.get(f"{self.pipeline.url}/v1/pipeline/layers") as response:
            return dict(await response.json())

    async def until_held_by(self, *names: str) -> dict[str, Any]:
        async with asyncio.timeout(WAIT_S):
            while True:
                found = await self.layers()
                if found["stages"] == list(names) and found["move"]["state"] == "done":
                    return found
                await pause()

    async def under_streams(self, what: Callable[[], Awaitable[object]]) -> None:
        """Do it while streams run; each answer has the tokens of an undisturbed one."""
        is_over, gaps = asyncio.Event(), Gaps()
        asking = [asyncio.create_task(answers_until(self.client, prompt, is_over, gaps)) for prompt in ASKED]
        try:
            await what()
        finally:
            is_over.set()
            answers = await asyncio.gather(*asking)
        for prompt, left, found in zip(ASKED, self.undisturbed, answers, strict=True):
            for right in found:
                await assert_same_greedy(self.client, prompt, left, right)

    async def cli(self, *arguments: str) -> str:
        done = await asyncio.to_thread(relayline, *arguments, "--url", self.pipeline.url)
        assert done.returncode == 0, done.stderr
        return done.stdout


async def started_world(pipeline: Pipeline, session: aiohttp.ClientSession) -> World:
    world = World(pipeline, Client(session, {"url": pipeline.url, "model": "relayline-demo"}), session)
    answers = await asyncio.gather(*(world.client.stream(prompt) for prompt in ASKED))
    world.undisturbed = [tokens_of(events) for events in answers]
    return world


async def test_drained_back_and_lost_for_good(pipeline: Pipeline) -> None:
    async with aiohttp.ClientSession() as session:
        world = await started_world(pipeline, session)

        async def drain() -> None:
            assert "b is drained; a, s hold layers" in await world.cli("drain", "b")

        await world.under_streams(drain)
        described = await world.client.pipeline()
        assert [(entry["name"], entry["state"]) for entry in described["idle"]] == [("b", "drained")]
        kept = json.loads(pipeline.kept.read_text())
        assert (kept["stages"], kept["drained"]) == (["a", "s"], ["b"])
        again = await asyncio.to_thread(relayline, "drain", "nobody", "--url", pipeline.url)
        assert (again.returncode, "there is no stage nobody; the stages are a, b, s" in again.stderr) == (1, True)

        assert "b is offered layers again" in await world.cli("uncordon", "b")
        described = await world.client.pipeline()
        assert [(entry["name"], entry["state"]) for entry in described["idle"]] == [("b", "spare")]

        async def lose_for_good() -> None:
            pipeline.spare.stop(signal.SIGKILL)
            await world.until_held_by("a", "b")

        await world.under_streams(lose_for_good)
        described = await world.client.pipeline()
        assert [(entry["name"], entry["state"]) for entry in described["idle"]] == [("s", "lost")]


@pytest.mark.nightly
async def test_one_more_stage_joins_what_serves_and_gets_layers(pipeline: Pipeline) -> None:
    async with aiohttp.ClientSession() as session:
        world = await started_world(pipeline, session)

        async def one_more() -> None:
            async with session.post(f"{pipeline.url}/v1/pipeline/stages", json={"name": "new"}) as response:
                assert response.status == 201, await response.text()
            pipeline.more = await asyncio.to_thread(pipeline.started, "new")
            await world.until_held_by("a", "b", "new")

        await world.under_streams(one_more)
        assert json.loads(pipeline.kept.read_text())["added"] == ["new"]
