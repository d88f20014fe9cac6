"""Three hosts as network namespaces, two of which let nothing in: `up` on the first, its printed line on the others.

A host that lets nothing in drops what others send first: its address can't be reached from outside, as behind NAT.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relayline.deploy.testing.processes import COMMAND, Running, stop_all
from tests.end_to_end.test_end_to_end import DEMO
from tests.support.namespaces import Host, join_lines, network, prefix_of, refusal, start
from tests.support.polling import pause

CAN_DROP = bool(shutil.which("nft") or shutil.which("iptables"))
NEEDS = refusal() or ("" if CAN_DROP else "dropping packets takes nft or iptables")
pytestmark = [pytest.mark.slow, pytest.mark.netns, pytest.mark.skipif(bool(NEEDS), reason=NEEDS or "allowed")]
MANIFEST = """apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata: {{name: nat}}
spec:
  model: {{path: {model}}}
  context: {{tokens: 512, lanes: 8}}
  stages:
  - {{name: desk, host: {desk}, speed: {{decodeGbytesPerS: 20, prefillGflops: 100}}}}
  - {{name: laptop, host: home, relay: true}}
  - {{name: old, host: shed, relay: true}}
  coordinator: {{http: {{host: 0.0.0.0}}, host: {desk}}}
  batching: {{calibrate: false}}
"""
# Answers to what the host itself began come in; nothing else does.
NFT = (
    "add table inet in_only",
    "add chain inet in_only input { type filter hook input priority 0; policy drop; }",
    "add rule inet in_only input iif lo accept",
    "add rule inet in_only input ct state established,related accept",
    "add rule inet in_only input meta l4proto { icmp, ipv6-icmp } accept",
)
IPTABLES = (
    ("-A", "INPUT", "-i", "lo", "-j", "ACCEPT"),
    ("-A", "INPUT", "-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "ACCEPT"),
    ("-P", "INPUT", "DROP"),
)


def let_nothing_in(host: Host) -> None:
    """Drop every connection to a host that it has not begun itself; skip where the kernel cannot."""
    inside = ["ip", "netns", "exec", host.namespace]
    if shutil.which("nft"):
        commands = [[*inside, "nft", *rule.split(" ")] for rule in NFT]
    else:
        commands = [[*inside, "iptables", *rule] for rule in IPTABLES]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{' '.join(command[4:6])}: {done.stderr.strip()}")


def is_reachable(host: Host, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        try:
            probe.connect((host.address, port))
        except OSError:
            return False
    return True


async def test_hosts_that_can_only_dial_out_join_by_their_line(tmp_path: Path) -> None:
    with network(3, tmp_path / "disks") as hosts:
        desk, *others = hosts
        for host in others:
            let_nothing_in(host)
        path = tmp_path / "nat.yaml"
        path.write_text(MANIFEST.format(model=DEMO, desk=desk.address))
        up = await asyncio.to_thread(start, desk, "up", path)
        stages: list[Running] = []
        try:
            lines = await join_lines(up, 2)
            assert all(line.endswith(" --relay") for line in lines.values())
            starts = [
                asyncio.to_thread(start, host, *lines[name].split()[1:], "--always-fetch")
                for name, host in zip(("laptop", "old"), others, strict=True)
            ]
            stages += await asyncio.gather(*starts)
            ready = await asyncio.to_thread(up.next_event, "ready")
            async with aiohttp.ClientSession() as session:
                found: dict[str, Any] = {}
                while "relay" not in found.get("old", {}):  # the relay tells its figures once a second
                    await pause()
                    async with session.get(f"{ready['clients']}/v1/pipeline") as answer:
                        described = await answer.json()
                    found = {entry["name"]: entry for entry in described["stages"]}
                for name, port in (("laptop", 50_051), ("old", 50_052)):
                    assert found[name]["address"] == f"{desk.address}:{port}", "the coordinator's host"
                    assert found[name]["relay"]["connected"] == 1
                planned = {entry["name"]: entry for entry in described["planned"]["stages"]}
                for name in ("laptop", "old"):
                    assert planned[name]["is_relayed"], "its link was measured through the relay"
                    assert planned[name]["round_trip_ms"] > 0
                for host in others:
                    assert not is_reachable(host, 50_051), "nothing comes in"
                body = {"model": "relayline-demo", "prompt": "class Queue:", "max_tokens": 4, "temperature": 0}
                async with session.post(f"{ready['clients']}/v1/completions", json=body) as answer:
                    assert (await answer.json())["usage"]["completion_tokens"] == 4
            command = [*prefix_of(desk), *COMMAND, "status", "--json"]
            status = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
            details = {entry["name"]: entry["detail"] for entry in json.loads(status.stdout)[0]["processes"]}
            assert (details["desk"], details["laptop"], details["old"]) == ("", *2 * ("through the relay",))
        finally:
            stop_all(*reversed(stages), up)
