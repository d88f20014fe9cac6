"""Three hosts as network namespaces: they find the pipeline by multicast DNS and join by the codes of `up`."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import aiohttp
import pytest

from relayline.deploy.testing.processes import COMMAND, Running, stop_all
from tests.end_to_end.test_end_to_end import DEMO
from tests.support.namespaces import Host, join_lines, network, prefix_of, refusal, start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.netns,
    pytest.mark.skipif(bool(refusal()), reason=refusal() or "allowed"),
]
MANIFEST = """apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata: {{name: lan}}
spec:
  model: {{path: {model}}}
  context: {{tokens: 512, lanes: 8}}
  stages:
  - {{name: desk, host: {desk}, layers: [0, 2]}}
  - {{name: server, host: {server}, layers: [2, 4]}}
  - {{name: old, host: {old}, layers: [4, {end}]}}
  coordinator: {{http: {{host: 0.0.0.0}}}}
  batching: {{calibrate: false}}
"""
N_LAYERS = 8


def on(host: Host, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*prefix_of(host), *COMMAND, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


async def test_hosts_find_the_pipeline_and_join_it_by_its_codes(tmp_path: Path) -> None:
    with network(3, tmp_path / "disks") as hosts:
        desk, server, old = hosts
        alone = await asyncio.to_thread(on, old, "nearby", "--wait", "1")
        assert alone.returncode == 1
        assert "no pipeline announces itself on this network" in alone.stdout
        path = tmp_path / "lan.yaml"
        addresses = {"desk": desk.address, "server": server.address, "old": old.address}
        path.write_text(MANIFEST.format(model=DEMO, end=N_LAYERS, **addresses))
        up = await asyncio.to_thread(start, desk, "up", path)
        stages: list[Running] = []
        try:
            codes = await join_lines(up, 2, "short")
            found = json.loads((await asyncio.to_thread(on, old, "nearby", "--json", "--wait", "4")).stdout)
            facts = [(each["pipeline"], each["addresses"], each["port"], each["n_stages"]) for each in found]
            assert facts == [("lan", [desk.address], 50049, 3)]
            assert "waits for " in found[0]["state"]
            slot = codes["server"].split()[-1][:3]
            wrong = await asyncio.to_thread(on, old, "join", f"{slot}-000-000")
            assert wrong.returncode == 1
            assert "the code is wrong; 4 more tries are allowed" in wrong.stderr
            server_words, old_words = codes["server"].split()[1:], codes["old"].split()[1:]
            old_words.insert(1, desk.address)  # multicast may be blocked
            starts = [(server, server_words), (old, old_words)]
            stages += await asyncio.gather(
                *(asyncio.to_thread(start, host, *words, "--always-fetch") for host, words in starts)
            )
            ready = await asyncio.to_thread(up.next_event, "ready")
            body = {"model": "relayline-demo", "prompt": "class Queue:", "max_tokens": 4, "temperature": 0}
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{ready['clients']}/v1/completions", json=body) as answer,
            ):
                assert (await answer.json())["usage"]["completion_tokens"] == 4
            used = await asyncio.to_thread(on, old, *server_words)
            assert used.returncode == 1
            assert "was used: stage server has joined" in used.stderr
            found = json.loads((await asyncio.to_thread(on, old, "nearby", "--json", "--wait", "4")).stdout)
            assert [each["state"] for each in found] == ["all stages are there"]
        finally:
            stop_all(*reversed(stages), up)
        gone = await asyncio.to_thread(on, old, "nearby", "--wait", "1", "--json")
        assert json.loads(gone.stdout) == []
