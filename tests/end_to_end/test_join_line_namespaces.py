"""Three hosts as network namespaces: `up` on the first, its printed line on the others, from empty disks."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import aiohttp
import pytest

from relayline.deploy.testing.processes import COMMAND, Running, stop_all
from tests.end_to_end.test_end_to_end import DEMO
from tests.support.namespaces import join_lines, network, prefix_of, refusal, start

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
  - {{name: desk, host: {desk}, speed: {{decodeGbytesPerS: 20, prefillGflops: 100}}}}
  - {{name: server, host: {server}}}
  - {{name: old, host: {old}, speed: {{decodeGbytesPerS: 10, prefillGflops: 50}}}}
  coordinator: {{http: {{host: 0.0.0.0}}}}
  batching: {{calibrate: false}}
"""


async def test_every_other_host_joins_by_one_line(tmp_path: Path) -> None:
    with network(3, tmp_path / "disks") as hosts:
        desk, server, old = hosts
        path = tmp_path / "lan.yaml"
        addresses = {"desk": desk.address, "server": server.address, "old": old.address}
        path.write_text(MANIFEST.format(model=DEMO, **addresses))
        up = await asyncio.to_thread(start, desk, "up", path)
        stages: list[Running] = []
        try:
            lines = await join_lines(up, 2)
            assert {*lines} == {"server", "old"}, "the desk is this machine: it starts here"
            starts = []
            for name, host in (("server", server), ("old", old)):
                words = lines[name].split()
                assert words[:3] == ["relayline", "join", f"{desk.address}:50049"], "the address that faces the others"
                starts.append(asyncio.to_thread(start, host, *words[1:], "--always-fetch"))
            stages += await asyncio.gather(*starts)  # together: the plan waits for all, and measures one
            ready = await asyncio.to_thread(up.next_event, "ready")
            assert ready["clients"] == f"http://{desk.address}:8080"
            async with aiohttp.ClientSession() as session:
                async with session.get(f"{ready['clients']}/v1/pipeline") as answer:
                    described = await answer.json()
                found = [entry["address"].split(":")[0] for entry in described["stages"]]
                assert found == [desk.address, server.address, old.address]
                assert described["stages"][1]["address"].endswith(":50051"), "the port that a firewall was opened for"
                body = {"model": "relayline-demo", "prompt": "class Queue:", "max_tokens": 4, "temperature": 0}
                async with session.post(f"{ready['clients']}/v1/completions", json=body) as answer:
                    assert answer.status == 200
                    assert (await answer.json())["usage"]["completion_tokens"] == 4
            command = [*prefix_of(old), *COMMAND, *lines["server"].split()[1:]]
            used = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
            assert used.returncode == 1
            assert f"was already used, by {server.address}" in used.stderr, "on another host"
        finally:
            stop_all(*reversed(stages), up)
