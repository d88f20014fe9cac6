"""Hosts as network namespaces over mutual TLS while streams run: a fifth joins, one is drained, one is lost."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relayline.deploy.testing.processes import COMMAND, Running, relayline, stop_all
from tests.end_to_end.test_end_to_end import DEMO, PROMPTS
from tests.end_to_end.test_moves import Gaps, answers_until, eight
from tests.support.http_client import Client, assert_same_greedy
from tests.support.namespaces import Host, network, prefix_of, refusal, start
from tests.support.polling import pause

pytestmark = [
    pytest.mark.slow,
    pytest.mark.netns,
    pytest.mark.nightly,  # six processes that import everything again
    pytest.mark.skipif(bool(refusal()), reason=refusal() or "allowed"),
]
WAIT_S = 120.0
MANIFEST = """apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata: {{name: lan}}
spec:
  model: {{path: {model}}}
  context: {{tokens: 512, lanes: 16, kvType: f32}}
  wire: {{dtype: f32}}
  stages: [{{name: desk, threads: 1}}, {{name: server, host: {server}}}, {{name: laptop, host: {laptop}}}]
  spares: [{{name: old, host: {old}}}]
  coordinator: {{takeoverSeconds: 2, http: {{host: 0.0.0.0}}}}
  batching: {{calibrate: false}}
"""


class Lan:
    """The pipeline, as its user sees it from this machine, and the processes on each host."""

    def __init__(self, hosts: list[Host], directory: Path) -> None:
        self.hosts = dict(zip(("desk", "server", "laptop", "old", "more"), hosts, strict=True))
        path = directory / "lan.yaml"
        addresses = {name: host.address for name, host in self.hosts.items()}
        path.write_text(MANIFEST.format(model=DEMO, **addresses))
        self.up = start(self.hosts["desk"], "up", path, "--no-measure")
        self.stages: dict[str, Running] = {}
        self.url = ""

    async def serve(self) -> None:
        """Run the printed line on every other host, and wait until the pipeline serves."""
        event: dict[str, Any] = self.up.event
        lines: dict[str, str] = {}
        while True:
            if event["event"] == "remote":
                lines[str(event["name"])] = str(event["command"])
            if len(lines) == 3:
                break
            event = await asyncio.to_thread(self.up.next_event, "remote")
        await asyncio.gather(*(self.join(name, line) for name, line in lines.items()))
        self.url = str((await asyncio.to_thread(self.up.next_event, "ready"))["clients"])

    async def join(self, name: str, line: str) -> None:
        words = [*line.split()[1:], "--always-fetch", "--threads", "1"]
        self.stages[name] = await asyncio.to_thread(start, self.hosts[name], *words)

    def invited(self, name: str) -> str:
        """The line that `relayline invite` prints on the desk for a host that the manifest does not name."""
        command = [*prefix_of(self.hosts["desk"]), *COMMAND, "invite", name, "--host", self.hosts[name].address]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def stop(self) -> None:
        stop_all(*reversed(self.stages.values()), self.up)


@pytest.fixture
async def lan(tmp_path: Path) -> AsyncIterator[Lan]:
    with network(5, tmp_path / "disks") as hosts:
        found = await asyncio.to_thread(Lan, hosts, tmp_path)
        try:
            await found.serve()
            yield found
        finally:
            await asyncio.to_thread(found.stop)


async def test_hosts_come_go_and_are_lost_under_eight_streams(lan: Lan) -> None:
    async with aiohttp.ClientSession() as session:
        client = Client(session, {"url": lan.url, "model": "relayline-demo"})
        undisturbed = await eight(client)

        async def until_held_by(*names: str) -> None:
            async with asyncio.timeout(WAIT_S):
                while True:
                    async with session.get(f"{lan.url}/v1/pipeline/layers") as response:
                        found = await response.json()
                    if found["stages"] == list(names) and found["move"]["state"] == "done":
                        return
                    await pause()

        async def under_streams(what: Callable[[], Awaitable[object]]) -> None:
            """Do it while eight streams run; each answer has the tokens of an undisturbed one."""
            is_over, gaps = asyncio.Event(), Gaps()
            asking = [asyncio.create_task(answers_until(client, prompt, is_over, gaps)) for prompt in PROMPTS]
            try:
                await what()
            finally:
                is_over.set()
                answers = await asyncio.gather(*asking)
            for prompt, left, found in zip(PROMPTS, undisturbed, answers, strict=True):
                for right in found:
                    await assert_same_greedy(client, prompt, left, right)

        async def one_more() -> None:
            await lan.join("more", await asyncio.to_thread(lan.invited, "more"))
            await until_held_by("desk", "server", "laptop", "more")

        async def drain() -> None:
            done = await asyncio.to_thread(relayline, "drain", "more", "--url", lan.url)
            assert done.returncode == 0, done.stderr
            assert "more is drained; desk, server, laptop, old hold layers" in done.stdout

        async def lose_for_good() -> None:
            lan.hosts["server"].cut()
            await until_held_by("desk", "more", "laptop", "old")

        await under_streams(one_more)
        await under_streams(drain)
        done = await asyncio.to_thread(relayline, "uncordon", "more", "--url", lan.url)
        assert "more may hold layers again" in done.stdout
        await under_streams(lose_for_good)
        described = await client.pipeline()
        addresses = [entry["address"].partition(":")[0] for entry in described["stages"][1:]]
        assert addresses == [lan.hosts[name].address for name in ("more", "laptop", "old")]
        assert [(entry["name"], entry["state"]) for entry in described["idle"]] == [("server", "lost")]
