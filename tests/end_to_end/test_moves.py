"""Layers move while eight streams run: real processes on loopback addresses, each with its own disk."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relayline.deploy.testing.processes import Running, relayline
from tests.end_to_end.test_end_to_end import DEMO, PROMPTS
from tests.end_to_end.test_join import NAMES, LongClient, eight, stage
from tests.support.http_client import Client, assert_same_greedy, tokens_of

pytestmark = pytest.mark.slow  # real processes

PAUSE_MAX_S = 20.0  # tenths of a second: a switch that waits for what never comes takes longer, not a busy machine


class Pipeline:
    """A coordinator that knows its model, and its stages."""

    def __init__(self, split: Path, disks: Path) -> None:
        self.coordinator = Running(["serve", "--pipeline", split, "--model", DEMO, "--join-listen", "127.0.0.1:0",
                                    "--names", ",".join(NAMES), "--http", "127.0.0.1:0", "--ctx", "512",
                                    "--lanes", "16", "--no-calibrate", "--wire", "f32", "--kv-type", "f32",
                                    "--json"])  # fmt: skip
        self.url, self._disks = str(self.coordinator.event["url"]), disks
        self.stages = [self.stage(name) for name in NAMES]
        self.coordinator.next_event("ready")

    def stage(self, name: str) -> Running:
        return stage(name, str(self.coordinator.event["join"]), self._disks / name)

    def stop(self) -> None:
        for process in (*self.stages, self.coordinator):
            process.stop()


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        split = tmp_path_factory.mktemp("split")
        done = relayline("split", DEMO, "--stages", str(len(NAMES)), "--out", split)
        assert done.returncode == 0, done.stderr
        started = Pipeline(split, tmp_path_factory.mktemp("disks"))
        try:
            yield started
        finally:
            started.stop()


class Gaps:
    """The longest time without an event of any stream."""

    def __init__(self) -> None:
        self.longest_s = self._last_s = 0.0

    def __call__(self, _: Any) -> None:
        now_s = time.monotonic()
        if self._last_s:
            self.longest_s = max(self.longest_s, now_s - self._last_s)
        self._last_s = now_s


async def layers(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(f"{url}/v1/pipeline/layers") as response:
        assert response.status == 200
        return dict(await response.json())


async def move(pipeline: Pipeline, cuts: str) -> str:
    done = await asyncio.to_thread(relayline, "move", "--cuts", cuts, "--url", str(pipeline.url))
    assert done.returncode == 0, done.stderr
    return done.stdout


async def answers_until(client: Client, prompt: str, is_over: asyncio.Event, gaps: Gaps) -> list[list[int]]:
    """Repeat the same request, so that something always runs; one more when it is over."""
    answers = [tokens_of(await client.stream(prompt, gaps))]
    while not is_over.is_set():
        answers.append(tokens_of(await client.stream(prompt, gaps)))
    return [*answers, tokens_of(await client.stream(prompt, gaps))]


async def test_layers_move_under_eight_streams(pipeline: Pipeline) -> None:
    async with aiohttp.ClientSession() as session:
        client = LongClient(session, {"url": pipeline.url, "model": "relayline-demo"})
        undisturbed = await eight(client)
        before, was = await client.stages(), await layers(session, pipeline.url)
        first, second = was["cuts"]
        is_over, gaps = asyncio.Event(), Gaps()
        asking = [asyncio.create_task(answers_until(client, prompt, is_over, gaps)) for prompt in PROMPTS]
        output = await move(pipeline, f"{first},{second - 1}")
        is_over.set()
        moved = await asyncio.gather(*asking)
        print(output.strip(), f"; longest silence for clients {gaps.longest_s:.2f} s")
        for prompt, left, answers in zip(PROMPTS, undisturbed, moved, strict=True):
            for right in answers:
                await assert_same_greedy(client, prompt, left, right)
        resumed = [int(found) for found in re.findall(r"pipeline ready.* resumed=(\d+)", pipeline.coordinator.stderr)]
        assert resumed[0] == 0
        assert resumed[1] > 0, "nothing ran when the layers were switched"
        assert len(resumed) == 2, "one planned switch is one new epoch"
        after, now = await client.stages(), await layers(session, pipeline.url)
        assert now["cuts"] == [first, second - 1]
        assert (now["move"]["state"], now["move"]["keep"], now["move"]["problem"]) == ("done", ["a"], "")
        assert now["move"]["paused_s"] < PAUSE_MAX_S
        # A step that takes longer than the switch waits for is computed again.
        assert now["move"]["replayed_tokens"] < now["move"]["kept_tokens"]
        assert "; running requests kept " in output
        old, new = ([entry["instance_id"] for entry in seen] for seen in (before, after))
        assert [one == other for one, other in zip(old, new, strict=True)] == [True, False, False]
        assert [entry["restarts"] for entry in after] == [0, 0, 0], "a switch is no restart"


async def test_an_impossible_move_is_refused_in_one_line(pipeline: Pipeline) -> None:
    async with aiohttp.ClientSession() as session:
        was = await layers(session, pipeline.url)
        same = ",".join(map(str, was["cuts"]))
        for cuts, words in (
            (same, "already have these layers"),
            ("5,3", "cuts must ascend"),
            ("4", "3 stages need 2 cuts"),
        ):
            done = await asyncio.to_thread(relayline, "move", "--cuts", cuts, "--url", pipeline.url)
            assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
            assert words in done.stderr
        assert (await layers(session, pipeline.url))["cuts"] == was["cuts"]
        assert (await asyncio.to_thread(relayline, "move", "--url", pipeline.url)).stdout.startswith("layers 0-")


async def test_a_stage_that_dies_after_a_move_comes_back_with_the_new_layers(pipeline: Pipeline) -> None:
    async with aiohttp.ClientSession() as session:
        client = LongClient(session, {"url": pipeline.url, "model": "relayline-demo"})
        now, undisturbed = await layers(session, pipeline.url), tokens_of(await client.stream(PROMPTS[0]))
        pipeline.stages[2].stop(signal.SIGKILL)
        pipeline.stages[2] = await asyncio.to_thread(pipeline.stage, "c")
        assert pipeline.stages[2].event["layers"] == now["layers"][2]
        await assert_same_greedy(client, PROMPTS[0], undisturbed, tokens_of(await client.stream(PROMPTS[0])))
