"""Goal: stages that nobody can dial answer through the coordinator's relay as they do without, whatever breaks.

Method: real processes on loopback. A relayed stage listens on 127.0.0.1 at a port that it tells to no one.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relayline.deploy.testing.processes import Running, child_running, relayline, stop_all, wait_gone
from tests.end_to_end.test_end_to_end import DEMO, PROMPTS
from tests.end_to_end.test_join import LongClient
from tests.support.http_client import OnceAllBegan, assert_same_greedy, tokens_of

pytestmark = pytest.mark.slow  # real processes, started many times

NAMES = ("a", "b", "c")
RELAYED = ("b", "c")  # b's neighbours are dialled and relayed, c's are both relayed or the coordinator


class Site:
    """A coordinator and three stages, two of them relayed, over mutual TLS."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._do("split", DEMO, "--stages", str(len(NAMES)), "--out", directory / "split")
        self._do("certs", "init", directory / "ca")
        self._do("certs", "issue", directory / "ca", "localhost", "--coordinator", "--out", directory / "coordinator")
        for name in NAMES:
            self._do(
                "certs", "issue", directory / "ca", "localhost", "--stage", name, "--out", directory / name / "tls"
            )
        self.coordinator = Running(
            ["serve", "--pipeline", directory / "split", "--model", DEMO, "--http", "127.0.0.1:0",
             "--join-listen", "127.0.0.1:0", "--names", ",".join(NAMES), "--ctx", "512", "--lanes", "16",
             "--no-calibrate", "--wire", "f32", "--kv-type", "f32", "--tls", directory / "coordinator", "--json"]
        )  # fmt: skip
        self.join, self.url = self.coordinator.event["join"], self.coordinator.event["url"]
        self.stages: dict[str, Running] = {}

    def _do(self, *arguments: str | Path) -> None:
        done = relayline(*arguments)
        assert done.returncode == 0, done.stderr

    def start(self, name: str, *, is_relayed: bool) -> Running:
        disk = self._directory / name
        more = ("--relay",) if is_relayed else ()
        self.stages[name] = Running(
            ["stage", "--join", self.join, "--name", name, "--cache", disk, "--tls", disk / "tls", "--threads", "1",
             "--always-fetch", "--json", *more]
        )  # fmt: skip
        return self.stages[name]

    @property
    def relay(self) -> int:
        """The relay's process."""
        return child_running(self.coordinator.process.pid, "coordinator.relay.process")

    def stop(self) -> None:
        stop_all(*self.stages.values(), self.coordinator)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("site"))
    try:
        yield made
    finally:
        made.stop()


async def streams(client: LongClient, on_event: Any = None) -> list[list[int]]:
    return [tokens_of(events) for events in await asyncio.gather(*(client.stream(p, on_event) for p in PROMPTS))]


@pytest.fixture
async def client(site: Site) -> Any:
    async with aiohttp.ClientSession() as session:
        yield LongClient(session, {"url": site.url, "model": "relayline-demo"})


@pytest.fixture(scope="module")
def undisturbed(site: Site) -> list[list[int]]:
    """The answers of the same stages, none of them relayed."""

    async def ask() -> list[list[int]]:
        async with aiohttp.ClientSession() as session:
            return await streams(LongClient(session, {"url": site.url, "model": "relayline-demo"}))

    for name in NAMES:
        site.start(name, is_relayed=False)
    site.coordinator.next_event("ready")
    found = asyncio.run(ask())
    for name in RELAYED:
        site.stages[name].stop()
        started = site.start(name, is_relayed=True)
        assert started.event["address"].startswith("127.0.0.1:")
    return found


async def test_answers_are_those_of_stages_that_are_dialled(
    site: Site, client: LongClient, undisturbed: list[list[int]]
) -> None:
    described = await client.until_ready(1)
    assert [entry["host"]["is_relayed"] for entry in described["stages"]] == [False, True, True]
    for name, entry in zip(NAMES, described["stages"], strict=True):
        own = site.stages[name].event["address"].rpartition(":")[2]
        assert (entry["address"].rpartition(":")[2] == own) is (name not in RELAYED)
    for prompt, left, right in zip(PROMPTS, undisturbed, await streams(client), strict=True):
        await assert_same_greedy(client, prompt, left, right)


async def test_no_token_is_lost_when_the_relay_dies_in_the_middle_of_answers(
    site: Site, client: LongClient, undisturbed: list[list[int]]
) -> None:
    await _disturbed(client, undisturbed, lambda: os.kill(site.relay, signal.SIGKILL))
    await asyncio.to_thread(site.coordinator.wait_for_log, "relay does not run")


async def test_no_token_is_lost_when_a_relayed_stage_is_killed(
    site: Site, client: LongClient, undisturbed: list[list[int]]
) -> None:
    restarted: list[asyncio.Task[Running]] = []

    def kill_and_start() -> None:
        site.stages["b"].stop(signal.SIGKILL)
        restarted.append(asyncio.create_task(asyncio.to_thread(site.start, "b", is_relayed=True)))

    await _disturbed(client, undisturbed, kill_and_start)
    await restarted[0]


async def _disturbed(client: LongClient, undisturbed: list[list[int]], disturb: Any) -> None:
    before = await client.until_ready()
    disturbed = await streams(client, OnceAllBegan(len(PROMPTS), disturb))
    for prompt, left, right in zip(PROMPTS, undisturbed, disturbed, strict=True):
        await assert_same_greedy(client, prompt, left, right)
    assert (await client.until_ready(before["epoch"]))["missing"] == []


async def test_layers_move_between_relayed_stages(site: Site, client: LongClient, undisturbed: list[list[int]]) -> None:
    before = await client.until_ready()
    moved = await asyncio.to_thread(relayline, "move", "--cuts", "2,6", "--url", site.url)
    assert moved.stdout.startswith("layers 0-1, 2-5, 6-7: moved"), moved.stderr
    assert (await client.until_ready(before["epoch"]))["missing"] == []
    for prompt, left, right in zip(PROMPTS, undisturbed, await streams(client), strict=True):
        await assert_same_greedy(client, prompt, left, right)


async def test_the_relay_goes_with_its_coordinator(site: Site, undisturbed: list[list[int]]) -> None:
    relay = site.relay
    site.stop()
    await asyncio.to_thread(wait_gone, [relay])
