"""Agents with long prompts that come back after others took their lanes, and after a stage was killed: over real
processes, only what is new is read, and no token changes.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from relayline.coordinator.model.split import split_model
from relayline.deploy.testing.processes import TIMEOUT_S, Running, stop_all
from tests.end_to_end.test_end_to_end import DEMO
from tests.support.http_client import Client, assert_same_greedy, tokens_of
from tests.support.polling import pause

pytestmark = pytest.mark.slow  # real processes

NAMES = ("a", "b", "c")
N_AGENTS, N_LANES, N_PROMPT, N_SAID, N_TOKENS = 3, 2, 300, 20, 8


class Agents:
    """A coordinator, three stages that keep prefixes on disks, and the agents' histories."""

    def __init__(self, directory: Path) -> None:
        split_model(DEMO, directory / "split", n_stages=len(NAMES))
        self.directory = directory
        exact = ["--no-calibrate", "--wire", "f32", "--kv-type", "f32", "--draft", "off", "--json"]
        kept = ["--prefix-disk-bytes", str(1 << 30)]
        flags = ["--join-listen", "127.0.0.1:0", "--names", ",".join(NAMES), "--http", "127.0.0.1:0", "--ctx", "1024"]
        self.coordinator = Running(
            ["serve", "--pipeline", directory / "split", *flags, "--lanes", str(N_LANES), *exact, *kept]
        )
        self.stages = {name: self.stage(name) for name in NAMES}
        self.coordinator.next_event("ready")
        draw = random.Random(4)
        self.histories = [[draw.randrange(256) for _ in range(N_PROMPT)] for _ in range(N_AGENTS)]
        self.additions = [[draw.randrange(256) for _ in range(N_SAID)] for _ in range(N_AGENTS)]

    def stage(self, name: str) -> Running:
        listen = f"127.0.0.{2 + NAMES.index(name)}:0"
        flags = ["--cache", self.directory / f"cache-{name}", "--listen", listen, "--threads", "1", "--json"]
        flags += ["--prefix-disk-dir", self.directory / f"disk-{name}"]
        return Running(["stage", "--join", str(self.coordinator.event["join"]), "--name", name, *flags])

    def restart(self, name: str) -> None:
        """Kill a stage as if the power had failed, and start it again."""
        n_ready = sum("pipeline ready" in line for line in self.coordinator.lines)
        self.stages[name].stop(signal.SIGKILL)
        self.stages[name] = self.stage(name)
        self.coordinator.wait_for_log("pipeline ready", n_ready + 1)

    def files(self, name: str) -> list[Path]:
        return sorted((self.directory / f"disk-{name}").glob("*/*.state"))

    def stop(self) -> None:
        stop_all(*self.stages.values(), self.coordinator)


@pytest.fixture(name="agents")
def agents_fixture(tmp_path: Path) -> Iterator[Agents]:
    made = Agents(tmp_path)
    try:
        yield made
    finally:
        made.stop()


@pytest_asyncio.fixture(name="client")
async def client_fixture(agents: Agents) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession() as session:
        yield Client(session, {"url": str(agents.coordinator.event["url"]), "model": "relayline-demo"})


async def turn(client: Client, prompt: list[int], **more: Any) -> tuple[list[int], int]:
    """Returns the answer and how many tokens of the prompt were not read."""
    options: dict[str, Any] = {"max_tokens": N_TOKENS, "stream_options": {"include_usage": True}} | more
    events = await client.stream(prompt, **options)
    usage = next(event["usage"] for event in reversed(events) if event.get("usage"))
    return tokens_of(events), usage["prompt_tokens_details"]["cached_tokens"]


async def until_on_disk(client: Client, n_states: int) -> list[dict[str, Any]]:
    """Wait until every stage has written this many prefixes; returns their tiers."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            tiers: list[dict[str, Any]] = [stage["tier"] for stage in await client.stages()]
            if all(tier["disk_bytes"] > 0 and tier["states"] >= n_states for tier in tiers):
                return tiers
            await pause()


async def all_turns(agents: Agents, client: Client) -> list[int]:
    """Every agent asks once, one after the other; returns how much of each prompt was not read."""
    found = []
    for agent, history in enumerate(agents.histories):
        tokens, n_cached = await turn(client, history)
        expected, n_none = await turn(client, history, cache_prompt=False)
        await assert_same_greedy(client, history, tokens, expected)
        assert n_none == 0
        found.append(n_cached)
        agents.histories[agent] = [*history, *tokens, *agents.additions[agent]]
    return found


async def test_only_what_is_new_is_read(agents: Agents, client: Client) -> None:
    assert await all_turns(agents, client) == [0] * N_AGENTS
    tiers = await until_on_disk(client, N_AGENTS)
    assert all(tier["misses"] == 0 for tier in tiers)
    n_held = N_PROMPT + N_TOKENS - 1  # the last token was sampled, and not read
    assert await all_turns(agents, client) == [n_held] * N_AGENTS, "others had the lanes in between"
    await until_on_disk(client, N_AGENTS)

    await asyncio.to_thread(agents.restart, "b")
    n_held += N_SAID + N_TOKENS
    assert await all_turns(agents, client) == [n_held] * N_AGENTS, "the killed stage offers its disk again"
    tiers = await until_on_disk(client, N_AGENTS)
    assert all(tier["misses"] == 0 for tier in tiers)

    # The disk of one stage is damaged behind its back: one file cut, one changed, one half-written.
    await asyncio.to_thread(agents.stages["c"].stop, signal.SIGKILL)
    cut, changed, *_ = agents.files("c")
    cut.write_bytes(cut.read_bytes()[:-100])
    data = bytearray(changed.read_bytes())
    data[len(data) // 2] ^= 1
    changed.write_bytes(data)
    (changed.parent / ".0000000000000001.part").write_bytes(b"rlstate1")
    (changed.parent / f"{2:016x}.state").write_bytes(b"of something else")
    agents.stages["c"] = await asyncio.to_thread(agents.stage, "c")
    n_held += N_SAID + N_TOKENS
    found = await all_turns(agents, client)
    assert sorted(found)[:2] == [0, 0], "what was cut and what was changed is read again"
    assert set(found) <= {0, n_held}
    assert not list(changed.parent.glob(".*.part"))
    log = agents.stages["c"].stderr
    assert log.count("is damaged and was removed") == 3, log
