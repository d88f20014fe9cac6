"""Stages join, leave, are drained and lost for good while streams run: real processes on loopback addresses."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
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

WAIT_S = 120.0
ASKED = PROMPTS[:3]


class Pipeline:
    """A coordinator that knows its model, the stages a and b, and the spare s."""

    def __init__(self, split: Path, disks: Path) -> None:
        self.kept, self._disks = disks / "layers.json", disks
        self.coordinator = Running(["serve", "--pipeline", split, "--model", DEMO, "--join-listen", "127.0.0.1:0",
                                    "--names", "a,b", "--spares", "s", "--takeover", "1", "--keep-layers", self.kept,
                                    "--http", "127.0.0.1:0", "--ctx", "512", "--lanes", "16", "--no-calibrate",
                                    "--wire", "f32", "--kv-type", "f32", "--json", *self._more_flags()])  # fmt: skip
        self.url = str(self.coordinator.event["url"])
        self.spare = self.started("s")
        self.more: Running | None = None
        self.stages = {name: self._stage(name) for name in ("a", "b")}
        self.coordinator.next_event("ready")

    def _more_flags(self) -> tuple[str | Path, ...]:
        return ()

    def _stage(self, name: str) -> Running:
        return stage(name, self._join, self._disks / name)

    @property
    def _join(self) -> str:
        return str(self.coordinator.event["join"])

    def started(self, name: str) -> Running:
        """A spare stage, once it reports itself."""
        return Running(["stage", "--join", self._join, "--name", name, "--cache", self._disks / name, "--threads", "1",
                        "--always-fetch", "--json"])  # fmt: skip

    def stop(self) -> None:
        for process in (self.more, self.spare, *self.stages.values(), self.coordinator):
            if process is not None:
                process.stop()


class PrivatePipeline(Pipeline):
    """The same over mutual TLS: every stage joins by a token, on its own address."""

    HOSTS = ("a", "b", "s")

    def _more_flags(self) -> tuple[str | Path, ...]:
        authority = self._disks / "tls"
        for command in (("init", authority), ("issue", authority, "127.0.0.1", "--coordinator")):
            done = relayline("certs", *command)
            assert done.returncode == 0, done.stderr
        return ("--tls", authority / "coordinator", "--enrol-listen", "127.0.0.1:0", "--authority", authority)

    def _stage(self, name: str) -> Running:
        return self.started(name)

    def started(self, name: str, *, is_new: bool = True) -> Running:
        host, disk = f"127.0.0.{2 + self.HOSTS.index(name)}", self._disks / name
        joining: tuple[str, ...] = ()
        if is_new:
            done = relayline("certs", "invite", self._disks / "tls", host, "--stage", name)
            assert done.returncode == 0, done.stderr
            joining = (str(self.coordinator.event["enrol"]), done.stdout.split()[-1])
        return self.joined_by(joining, host, disk)

    def joined_by(self, joining: Sequence[str], host: str, disk: Path | None = None) -> Running:
        """The stage that a join line makes, on a host of its own; with its earlier disk if that is given."""
        disk = disk or self._disks / host
        return Running(["join", *joining, "--listen", f"{host}:0", "--advertise", host, "--metrics", "127.0.0.1:0",
                        "--cache", disk, "--state", disk / "joined", "--threads", "1", "--always-fetch",
                        "--json"])  # fmt: skip


@pytest.fixture
def pipeline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    kind: type[Pipeline] = getattr(request, "param", Pipeline)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        split = tmp_path_factory.mktemp("split")
        done = relayline("split", DEMO, "--stages", "2", "--out", split)
        assert done.returncode == 0, done.stderr
        started = kind(split, tmp_path_factory.mktemp("disks"))
        try:
            yield started
        finally:
            started.stop()


class World:
    """The shared state of one story's steps: some streams, and their undisturbed answers."""

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

        assert "b may hold layers again" in await world.cli("uncordon", "b")
        described = await world.client.pipeline()
        assert [(entry["name"], entry["state"]) for entry in described["idle"]] == [("b", "spare")]

        async def lose_for_good() -> None:
            pipeline.spare.stop(signal.SIGKILL)
            await world.until_held_by("a", "b")

        await world.under_streams(lose_for_good)
        described = await world.client.pipeline()
        assert [(entry["name"], entry["state"]) for entry in described["idle"]] == [("s", "lost")]


@pytest.mark.parametrize("pipeline", [PrivatePipeline], indirect=True)
async def test_a_spare_that_joined_by_token_takes_over_over_tls(pipeline: PrivatePipeline) -> None:
    async with aiohttp.ClientSession() as session:
        world = await started_world(pipeline, session)
        before = await world.layers()

        async def lose_for_good() -> None:
            pipeline.stages["b"].stop(signal.SIGKILL)
            await world.until_held_by("a", "s")

        await world.under_streams(lose_for_good)
        after = await world.layers()
        assert after["layers"] == before["layers"], "exactly those of the lost one"
        described = await world.client.pipeline()
        assert [entry["address"].partition(":")[0] for entry in described["stages"]] == ["127.0.0.2", "127.0.0.4"]
        # It comes back with its old certificate, and is a spare.
        pipeline.stages["b"] = await asyncio.to_thread(pipeline.started, "b", is_new=False)
        assert pipeline.stages["b"].event["event"] == "idle"
        async with asyncio.timeout(WAIT_S):
            while [(one["name"], one["state"]) for one in (await world.client.pipeline())["idle"]] != [("b", "spare")]:
                await pause()


@pytest.mark.nightly
async def test_one_more_stage_joins_a_serving_pipeline_and_gets_layers(pipeline: Pipeline) -> None:
    async with aiohttp.ClientSession() as session:
        world = await started_world(pipeline, session)

        async def one_more() -> None:
            async with session.post(f"{pipeline.url}/v1/pipeline/stages", json={"name": "new"}) as response:
                assert response.status == 201, await response.text()
            pipeline.more = await asyncio.to_thread(pipeline.started, "new")
            await world.until_held_by("a", "b", "new")

        await world.under_streams(one_more)
        assert json.loads(pipeline.kept.read_text())["added"] == ["new"]
