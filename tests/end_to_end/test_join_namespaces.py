"""Four hosts as network namespaces: stages join over mutual TLS from empty disks, and one host loses its cable."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from relayline.deploy.testing.processes import Running, relayline, stop_all
from tests.end_to_end.test_end_to_end import DEMO, PROMPTS
from tests.support.http_client import Client, OnceAllBegan, assert_same_greedy, tokens_of
from tests.support.namespaces import Host, network, refusal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.netns,
    pytest.mark.skipif(bool(refusal()), reason=refusal() or "allowed"),
]
NAMES = ("box1", "box2", "box3", "box4")
TOKENS = 240


class Site:
    """The hosts, their certificates, and their processes. The coordinator is on the first."""

    def __init__(self, hosts: list[Host], directory: Path) -> None:
        self.hosts = dict(zip(NAMES, hosts, strict=True))
        self._directory = directory
        self._running: list[Running] = []
        self._do("split", DEMO, "--stages", "4", "--out", directory / "split")
        self._do("certs", "init", directory / "ca")
        issue = ("certs", "issue", directory / "ca")
        self._do(*issue, hosts[0].address, "--coordinator", "--out", hosts[0].disk / "coordinator")
        for name, host in self.hosts.items():
            self._do(*issue, host.address, "--stage", name, "--out", host.disk / "tls", "--dns", name)
        self.join = f"{hosts[0].address}:7000"
        self.coordinator = self._start(
            hosts[0], "serve", "--pipeline", directory / "split", "--join-listen", self.join, "--names",
            ",".join(NAMES), "--http", f"{hosts[0].address}:8080", "--tls", hosts[0].disk / "coordinator",
            "--ctx", "512", "--lanes", "16", "--no-calibrate", "--wire", "f32", "--kv-type", "f32",
        )  # fmt: skip

    def _do(self, *arguments: str | Path) -> None:
        done = relayline(*arguments)
        assert done.returncode == 0, done.stderr

    def _start(self, host: Host, *arguments: str | Path) -> Running:
        started = host.run(*arguments, "--json")
        self._running.append(started)
        return started

    def stage(self, name: str, *more: str | Path) -> Running:
        """Start a stage on its host with an empty disk; returns when it serves."""
        host = self.hosts[name]
        return self._start(
            host, "stage", "--join", self.join, "--name", name, "--cache", host.disk / "artifacts",
            "--tls", host.disk / "tls", "--threads", "1", "--always-fetch", *more,
        )  # fmt: skip

    def stop(self) -> None:
        stop_all(*reversed(self._running))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    with network(len(NAMES), directory / "disks") as hosts:
        made = Site(hosts, directory)
        try:
            yield made
        finally:
            made.stop()


async def test_four_hosts_join_over_mutual_tls_and_survive_the_loss_of_one(site: Site) -> None:
    stages = await asyncio.gather(*(asyncio.to_thread(site.stage, name) for name in NAMES))
    assert [stage.event["stage"] for stage in stages] == [0, 1, 2, 3]
    await asyncio.to_thread(site.coordinator.next_event, "ready")
    async with aiohttp.ClientSession() as session:
        client = Client(session, {"url": site.coordinator.event["url"], "model": "relayline-demo"})
        before = await client.pipeline()
        assert [entry["address"].split(":")[0] for entry in before["stages"]] == [
            host.address for host in site.hosts.values()
        ]
        for index, host in enumerate(site.hosts.values()):
            assert [path.name for path in host.disk.rglob("*.gguf")] == [f"stage-{index}.gguf"]
        asked = [client.stream(prompt, max_tokens=TOKENS) for prompt in PROMPTS]
        undisturbed = [tokens_of(events) for events in await asyncio.gather(*asked)]
        loss = OnceAllBegan(len(PROMPTS), site.hosts["box3"].cut)
        streams = [asyncio.create_task(client.stream(prompt, loss, max_tokens=TOKENS)) for prompt in PROMPTS]
        await loss.acted.wait()
        await asyncio.to_thread(site.coordinator.wait_for_log, "pipeline lost, recovering")
        assert not all(stream.done() for stream in streams), "answers are long enough for a loss inside them"
        site.hosts["box3"].plug()
        disturbed = [tokens_of(events) for events in await asyncio.gather(*streams)]
        for prompt, left, right in zip(PROMPTS, undisturbed, disturbed, strict=True):
            await assert_same_greedy(client, prompt, left, right)
        after = await client.pipeline()
        assert after["epoch"] > before["epoch"]
        instances = [[entry["instance_id"] for entry in described["stages"]] for described in (before, after)]
        assert instances[0] == instances[1], "no stage had to load again"


async def test_a_host_without_a_certificate_of_this_pipeline_is_kept_out(site: Site, tmp_path: Path) -> None:
    site._do("certs", "init", tmp_path / "other")
    address = site.hosts["box4"].address
    site._do("certs", "issue", tmp_path / "other", address, "--stage", "box4", "--out", tmp_path / "tls")
    shutil.copy(site.hosts["box4"].disk / "tls" / "token", tmp_path / "tls" / "token")
    with pytest.raises(AssertionError, match=r"exit code 1: .*does not come from the CA in"):
        await asyncio.to_thread(site.stage, "box4", "--tls", str(tmp_path / "tls"))
    await asyncio.to_thread(site.coordinator.wait_for_log, f"refused {site.hosts['box4'].address}")
    with pytest.raises(AssertionError, match=r"not ready, exit code 2: .*TLS is not set up"):
        await asyncio.to_thread(
            site.hosts["box4"].run, "stage", "--join", site.join, "--name", "box4", "--cache", tmp_path
        )
