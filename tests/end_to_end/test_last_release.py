"""The last release and this tree in one pipeline: each replaces the other while streams run, and tokens stay equal."""

from __future__ import annotations

import asyncio
import functools
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from relayline.deploy.machine.ports import free_port
from relayline.deploy.testing.processes import Running, relayline, stop_all
from tests.end_to_end.test_end_to_end import DEMO, PROMPTS
from tests.support.http_client import Client, assert_same_greedy, stopped_under_way, tokens_of
from tests.support.last_release import prefix, runs_from, unpacked

pytestmark = pytest.mark.slow  # real processes, and extensions to compile

NAMES = ("a", "b")
TOKENS, TOKENS_DISTURBED = 24, 96
TREE = None
Version = Path | None  # where it is imported from
RESUMED = r"pipeline ready .*resumed=(\d+)"
NIGHTLY = pytest.mark.nightly


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("last"))


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("split")
    done = relayline("split", DEMO, "--stages", str(len(NAMES)), "--out", directory)
    assert done.returncode == 0, done.stderr
    return directory


class Mixed:
    """A coordinator and two joined stages, each of a given version."""

    def __init__(self, split: Path, disks: Path, coordinator: Version, **stages: Version) -> None:
        self._split, self._disks = split, disks
        self._listen = [f"127.0.0.1:{free_port()}" for _ in range(2)]  # of the coordinator: joins, HTTP
        self.coordinator = self._coordinator(coordinator)
        self.join, self.url = str(self.coordinator.event["join"]), str(self.coordinator.event["url"])
        self.stages = {name: self._stage(name, version) for name, version in stages.items()}
        self.coordinator.next_event("ready")

    def _coordinator(self, version: Version) -> Running:
        """Exact rows and an exact cache, so that recomputing after a loss cannot tip a close decision."""
        flags = [
            "--join-listen",
            self._listen[0],
            "--names",
            ",".join(NAMES),
            "--http",
            self._listen[1],
            "--ctx",
            "512",
            "--lanes",
            "16",
        ]
        exact = ["--no-calibrate", "--wire", "f32", "--kv-type", "f32", "--json"]
        return _started(["serve", "--pipeline", self._split, *flags, *exact], version)

    def _stage(self, name: str, version: Version) -> Running:
        listen = f"127.0.0.{2 + NAMES.index(name)}:0"
        flags = ["--cache", self._disks / name, "--listen", listen, "--threads", "1", "--always-fetch", "--json"]
        return _started(["stage", "--join", self.join, "--name", name, *flags], version)

    def replace(self, name: str, version: Version, number: signal.Signals = signal.SIGKILL) -> None:
        """End a stage and start the other version; returns when that one serves."""
        self.stages[name].stop(number)
        self.stages[name] = self._stage(name, version)

    def replace_coordinator(self, version: Version) -> None:
        self.coordinator.stop()
        self.coordinator = self._coordinator(version)
        self.coordinator.next_event("ready")

    def stop(self) -> None:
        stop_all(*self.stages.values(), self.coordinator)


def _started(command: list[Any], version: Version) -> Running:
    started = Running(command, prefix(version))
    assert runs_from(started.process.pid, version)
    return started


@pytest_asyncio.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def client_of(pipeline: Mixed, http: aiohttp.ClientSession) -> Client:
    return Client(http, {"url": pipeline.url, "model": "relayline-demo"})


async def answers(client: Client, on_event: Any = None, n_tokens: int = TOKENS) -> list[list[int]]:
    streams = [client.stream(prompt, on_event, max_tokens=n_tokens) for prompt in PROMPTS]
    return [tokens_of(events) for events in await asyncio.gather(*streams)]


async def replaced_under_streams(pipeline: Mixed, client: Client, name: str, version: Version) -> list[list[int]]:
    """Replace a stage while every stream is under way, and hold the answers against undisturbed ones."""
    undisturbed = await answers(client, n_tokens=TOKENS_DISTURBED)
    n_epochs = len(re.findall(RESUMED, pipeline.coordinator.stderr))
    ask = functools.partial(answers, client, n_tokens=TOKENS_DISTURBED)
    disturbed = await stopped_under_way(client, ask, len(PROMPTS), pipeline.stages[name].process.pid)
    await asyncio.to_thread(pipeline.replace, name, version)
    for prompt, left, right in zip(PROMPTS, undisturbed, await disturbed, strict=True):
        await assert_same_greedy(client, prompt, left, right)
    await asyncio.to_thread(pipeline.coordinator.wait_for_log, "pipeline ready ", n_epochs + 1)
    resumed = re.findall(RESUMED, pipeline.coordinator.stderr)[n_epochs:]
    assert resumed == [str(len(PROMPTS))], "all streams paused once and continued"
    return undisturbed


async def test_a_stage_of_the_last_release_serves_either_coordinator_and_is_replaced_under_streams(
    last: Path, split: Path, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    """Few processes start, since each costs two seconds of a core; the nightly cases replace all of them."""
    pipeline = await asyncio.to_thread(Mixed, split, tmp_path, last, a=TREE, b=last)
    client = client_of(pipeline, http)
    try:
        by_the_older = await answers(client)
        await asyncio.to_thread(pipeline.replace_coordinator, TREE)
        await an_older_last_stage_is_asked_for_nothing_that_it_does_not_know(client)
        by_the_newer = await replaced_under_streams(pipeline, client, "b", TREE)
        for prompt, left, right in zip(PROMPTS, by_the_older, by_the_newer, strict=True):
            await assert_same_greedy(client, prompt, left, right[:TOKENS])
        assert (await client.complete("x", repetition_penalty=1.3))["choices"], "a newer last stage knows it"
    finally:
        await asyncio.to_thread(pipeline.stop)


async def an_older_last_stage_is_asked_for_nothing_that_it_does_not_know(client: Client) -> None:
    body = client.body("x", repetition_penalty=1.3)
    async with client.session.post(f"{client.url}/v1/completions", json=body) as response:
        assert response.status == 501
        assert "does not know repetition_penalty; upgrade that stage" in await response.text()
    known: dict[str, Any] = {"frequency_penalty": 0.5, "logit_bias": {"65": 2}, "top_p": 0.9, "temperature": 0.7}
    reply = await client.complete("x", seed=7, logprobs=2, max_tokens=8, **known)
    assert reply["usage"]["completion_tokens"] == 8


@NIGHTLY
@pytest.mark.parametrize("is_upgrade", [True, False], ids=["upgrade", "downgrade"])
async def test_every_process_is_replaced_in_the_order_of_the_docs(
    last: Path, split: Path, tmp_path: Path, http: aiohttp.ClientSession, is_upgrade: bool
) -> None:
    """Stages first, the coordinator last; back in the opposite order."""
    begin, end = (last, TREE) if is_upgrade else (TREE, last)
    pipeline = await asyncio.to_thread(Mixed, split, tmp_path, begin, a=begin, b=begin)
    client = client_of(pipeline, http)
    try:
        before = await answers(client)
        if not is_upgrade:
            await asyncio.to_thread(pipeline.replace_coordinator, end)
        for name in NAMES:
            await replaced_under_streams(pipeline, client, name, end)
        if is_upgrade:
            await asyncio.to_thread(pipeline.replace_coordinator, end)
        for prompt, left, right in zip(PROMPTS, before, await answers(client), strict=True):
            await assert_same_greedy(client, prompt, left, right)
    finally:
        await asyncio.to_thread(pipeline.stop)


@NIGHTLY
@pytest.mark.parametrize("old", ["a", "b"])
async def test_features_of_both_versions_give_the_same_answers(
    last: Path, split: Path, tmp_path: Path, http: aiohttp.ClientSession, old: str
) -> None:
    """Grammars, penalties and biases with a stage of the last release, as with two stages of the tree.

    So are draws if the last stage is the tree's. The last release draws other tokens from the same seed, as the docs
    say of versions.
    """
    shape = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "required": ["n"],
             "properties": {"n": {"type": "integer"}}, "additionalProperties": False}}}  # fmt: skip
    asked: list[dict[str, Any]] = [
        *([{"temperature": 0.8, "top_k": 20, "seed": 3}] if old != NAMES[-1] else []),
        {"frequency_penalty": 1.0, "presence_penalty": 0.5},
        {"logit_bias": {"65": 3.0}, "logprobs": 3},
        {"response_format": shape, "ignore_eos": False},
    ]
    pipeline = await asyncio.to_thread(Mixed, split, tmp_path, TREE, a=TREE, b=TREE)
    client = client_of(pipeline, http)
    try:
        by_the_tree = [tokens_of(await client.stream(PROMPTS[0], **more)) for more in asked]
        await asyncio.to_thread(pipeline.replace, old, last)
        mixed = [tokens_of(await client.stream(PROMPTS[0], **more)) for more in asked]
        assert by_the_tree == mixed
    finally:
        await asyncio.to_thread(pipeline.stop)
