"""Joining stages as real processes on loopback addresses: empty disks, cuts, kills, a restarted coordinator."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relayline.deploy.machine.ports import free_port
from relayline.deploy.testing.processes import Running, relayline, running, stop_all
from tests.end_to_end.test_end_to_end import DEMO, PROMPTS
from tests.support.cutting_proxy import cutting_proxy
from tests.support.http_client import Client, OnceAllBegan, assert_same_greedy, tokens_of
from tests.support.polling import pause

pytestmark = pytest.mark.slow  # real processes, started many times

NAMES = ("a", "b", "c")
TOKENS = 100


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("split")
    done = relayline("split", DEMO, "--stages", str(len(NAMES)), "--out", directory)
    assert done.returncode == 0, done.stderr
    return directory


def coordinator(split: Path, join: str, http: str) -> Running:
    """Exact rows and an exact cache, so that recomputing after a loss cannot tip a close decision."""
    return Running(["serve", "--pipeline", split, "--join-listen", join, "--names", ",".join(NAMES), "--http", http,
                    "--ctx", "512", "--lanes", "16", "--no-calibrate", "--wire", "f32", "--kv-type", "f32",
                    "--json"])  # fmt: skip


def stage(name: str, join: str, cache: Path, *more: str) -> Running:
    """Start a stage on its own loopback address; returns when it serves."""
    host = f"127.0.0.{2 + NAMES.index(name)}"
    return Running(["stage", "--join", join, "--name", name, "--cache", cache, "--listen", f"{host}:0",
                    "--threads", "1", "--always-fetch", "--json", *more])  # fmt: skip


class LongClient(Client):
    """Asks for TOKENS tokens."""

    def body(self, prompt: str | Sequence[int], **more: Any) -> dict[str, Any]:
        return super().body(prompt, **({"max_tokens": TOKENS} | more))


class Pipeline:
    """One coordinator and its stages, each with its own disk."""

    def __init__(self, split: Path, disks: Path) -> None:
        self.split, self.disks = split, disks
        join, http = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self.coordinator = coordinator(split, join, http)
        self.join, self.url = self.coordinator.event["join"], self.coordinator.event["url"]
        self.stages: dict[str, Running] = {}

    def start(self, name: str, disk: str = "") -> Running:
        self.stages[name] = stage(name, self.join, self.disks / (disk or name))
        return self.stages[name]

    def stop(self) -> None:
        stop_all(*self.stages.values(), self.coordinator)


@pytest.fixture(scope="module")
def pipeline(split: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    started = Pipeline(split, tmp_path_factory.mktemp("disks"))
    try:
        yield started
    finally:
        started.stop()


async def eight(client: Client, on_event: Any = None) -> list[list[int]]:
    streams = [client.stream(prompt, on_event) for prompt in PROMPTS]
    return [tokens_of(events) for events in await asyncio.gather(*streams)]


async def test_stages_join_from_empty_disks(pipeline: Pipeline) -> None:
    assert pipeline.coordinator.event["event"] == "joinable"
    assert pipeline.coordinator.event["stages"] == list(NAMES)
    async with aiohttp.ClientSession() as session:
        client = LongClient(session, {"url": pipeline.url, "model": "relayline-demo"})
        described = await client.pipeline()
        assert (described["phase"], described["missing"]) == ("loading", list(NAMES))
        async with session.get(f"{pipeline.url}/health") as response:
            assert response.status == 503
        for index, name in enumerate(NAMES):
            started = await asyncio.to_thread(pipeline.start, name)
            assert (started.event["name"], started.event["stage"]) == (name, index)
        ready = await asyncio.to_thread(pipeline.coordinator.next_event, "ready")
        assert (ready["event"], ready["stages"], ready["lanes"], ready["ctx"]) == ("ready", 3, 16, 512)
        described = await client.pipeline()
        assert described["missing"] == []
        assert [entry["address"].split(":")[0] for entry in described["stages"]] == [f"127.0.0.{n}" for n in (2, 3, 4)]
        assert [entry["name"] for entry in described["stages"]] == list(NAMES)
        assert (await client.complete("def f(", max_tokens=4))["usage"]["completion_tokens"] == 4
    for index, name in enumerate(NAMES):
        files = [path.name for path in (pipeline.disks / name).rglob("*.gguf")]
        assert files == [f"stage-{index}.gguf"], "a stage has its own slice and nothing else"


async def test_eight_streams_while_a_stage_is_killed_and_comes_back_elsewhere(pipeline: Pipeline) -> None:
    async with aiohttp.ClientSession() as session:
        client = LongClient(session, {"url": pipeline.url, "model": "relayline-demo"})
        undisturbed = await eight(client)
        before = await client.pipeline()
        loss = OnceAllBegan(len(PROMPTS), pipeline.stages["b"].process.kill)
        disturbed = asyncio.create_task(eight(client, loss))
        await loss.acted.wait()
        await asyncio.to_thread(pipeline.stages["b"].stop, signal.SIGKILL)
        await asyncio.to_thread(pipeline.start, "b", "b-anew")
        for prompt, left, right in zip(PROMPTS, undisturbed, await disturbed, strict=True):
            await assert_same_greedy(client, prompt, left, right)
        after = await client.until_ready(before["epoch"])
        moved = [
            old["name"]
            for old, new in zip(before["stages"], after["stages"], strict=True)
            if old["address"] != new["address"]
        ]
        assert moved == ["b"]
        assert list((pipeline.disks / "b-anew").rglob("stage-1.gguf")), "the new process fetched onto an empty disk"


async def test_stages_keep_their_engines_over_a_restart_of_the_coordinator(pipeline: Pipeline) -> None:
    async with aiohttp.ClientSession() as session:
        client = LongClient(session, {"url": pipeline.url, "model": "relayline-demo"})
        before = [entry["instance_id"] for entry in await client.stages()]
        first = tokens_of(await client.stream(PROMPTS[0]))
        pipeline.coordinator.stop(signal.SIGKILL)
        http = pipeline.url.removeprefix("http://")
        pipeline.coordinator = await asyncio.to_thread(coordinator, pipeline.split, pipeline.join, http)
        ready = await asyncio.to_thread(pipeline.coordinator.next_event, "ready")
        assert ready["event"] == "ready"
        assert [entry["instance_id"] for entry in await client.stages()] == before
        await assert_same_greedy(client, PROMPTS[0], first, tokens_of(await client.stream(PROMPTS[0])))


async def test_a_stage_that_ends_says_goodbye_and_a_coordinator_that_ends_does_too(pipeline: Pipeline) -> None:
    assert await asyncio.to_thread(pipeline.stages["c"].stop) == 0
    await asyncio.to_thread(pipeline.coordinator.wait_for_log, 'reason="it said goodbye"')
    assert await asyncio.to_thread(pipeline.coordinator.stop) == 0
    await asyncio.to_thread(pipeline.stages["a"].wait_for_log, "the coordinator is shutting down")
    assert [pipeline.stages[name].stop() for name in ("a", "b")] == [0, 0]


async def fetched_bytes(served: Running, index: int) -> int:
    """Ask the coordinator how much of its artifact a stage says is on its disk."""
    async with aiohttp.ClientSession() as session:
        client = Client(session, {"url": served.event["url"], "model": "relayline-demo"})
        return int((await client.pipeline())["stages"][index].get("fetched_bytes", 0))


async def test_a_fetch_that_is_cut_goes_on_after_rejoining(split: Path, tmp_path: Path) -> None:
    served = await asyncio.to_thread(coordinator, split, "127.0.0.1:0", "127.0.0.1:0")
    try:
        async with cutting_proxy(served.event["join"], hold_after_bytes=1_100_000) as proxy:
            joining = asyncio.create_task(asyncio.to_thread(stage, "b", proxy.address, tmp_path / "disk"))
            held = asyncio.create_task(proxy.held.wait())
            await asyncio.wait({joining, held}, return_when=asyncio.FIRST_COMPLETED)
            while not joining.done() and not await fetched_bytes(served, 1):
                await pause()
            held.cancel()
            proxy.cut()
            joined = await joining
            assert joined.event["stage"] == 1
            begins = [
                int(line.split("from_byte=")[1].split()[0]) for line in joined.lines if "fetching the artifact" in line
            ]
            assert begins[0] == 0
            assert begins[-1] > 0, joined.stderr
            await asyncio.to_thread(joined.stop)
    finally:
        await asyncio.to_thread(served.stop)


def test_refusals_are_one_line_on_both_sides(split: Path, tmp_path: Path) -> None:
    with running("serve", "--pipeline", split, "--join-listen", "127.0.0.1:0", "--http", "127.0.0.1:0",
                 "--json") as served:  # fmt: skip
        join = served.event["join"]
        assert served.event["stages"] == ["stage-0", "stage-1", "stage-2"]
        refused = relayline("stage", "--join", join, "--name", "stage-9", "--cache", tmp_path)
        assert refused.returncode == 2
        (line,) = (line for line in refused.stderr.splitlines() if "error" in line)
        assert "no stage 'stage-9'; its stages are stage-0, stage-1, stage-2" in line
        served.wait_for_log("no stage 'stage-9'")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("stage",), "give either --artifact FILE, or --join"),
        (
            ("stage", "--artifact", "SPLIT/stage-0.gguf", "--join", "127.0.0.1:1"),
            "give either --artifact FILE, or --join",
        ),
        (("stage", "--join", "127.0.0.1:1"), "needs --name"),
        (("stage", "--join", "127.0.0.1:1", "--name", "a", "--ctx", "64"), "--ctx is set by the coordinator"),
        (("stage", "--artifact", "SPLIT/stage-0.gguf", "--name", "a"), "--name belongs to --join"),
        (("stage", "--artifact", "SPLIT/stage-0.gguf", "--relay"), "--relay belongs to --join"),
        (("join", "127.0.0.1:1", "--relay", "--listen", "127.0.0.1:0"), "--relay and --listen contradict each other"),
        (("stage", "--join", "127.0.0.1:1", "--name", "a", "--relay", "--advertise", "b"), "--relay and --advertise"),
        (("stage", "--join", "127.0.0.1:1", "--name", "a", "--advertise", "h:1"), "is not a host"),
        (("serve", "--pipeline", "SPLIT"), "give either --stages"),
        (
            ("serve", "--pipeline", "SPLIT", "--stages", "127.0.0.1:1", "--lanes", "4"),
            "--lanes is for stages that join",
        ),
        (("serve", "--pipeline", "SPLIT", "--join-listen", "127.0.0.1:0", "--names", "a,b"), "2 names were given"),
        (("serve", "--pipeline", "SPLIT", "--join-listen", "127.0.0.1:0", "--names", "A,b,c"), "DNS label"),
    ],
)
def test_flags_that_make_no_sense_are_a_usage_error(split: Path, arguments: tuple[str, ...], words: str) -> None:
    done = relayline(*(argument.replace("SPLIT", str(split)) for argument in arguments))
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
