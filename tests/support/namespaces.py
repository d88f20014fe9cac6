"""Hosts on one machine: network namespaces on a bridge, each with its own address, disk and cable. Needs root."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relayline.deploy.testing.processes import Running


def ip(*arguments: str) -> None:
    """Run one `ip` command; a failure is shown with its output."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


@functools.cache
def refusal() -> str:
    """Why namespaces cannot be made here; empty if they can."""
    if shutil.which("ip") is None:
        return "there is no `ip` command"
    if os.geteuid() != 0:
        return "network namespaces take root"
    name = f"rl{os.getpid()}probe"
    try:
        ip("netns", "add", name)
        ip("netns", "delete", name)
        ip("link", "add", name[:15], "type", "bridge")
        ip("link", "delete", name[:15])
    except AssertionError as error:
        return f"network namespaces are not allowed here ({error})"
    return ""


class Host:
    """One namespace: `address` on the common network, `disk` for the files of its processes."""

    def __init__(self, namespace: str, cable: str, address: str, disk: Path) -> None:
        self.namespace, self.cable, self.address, self.disk = namespace, cable, address, disk

    def run(self, *arguments: str | Path) -> Running:
        """Run a relayline command on this host."""
        prefix = ["ip", "netns", "exec", self.namespace, "env", f"XDG_CACHE_HOME={self.disk}"]
        return Running(arguments, prefix)

    def cut(self) -> None:
        """Pull the cable."""
        ip("link", "set", self.cable, "down")

    def plug(self) -> None:
        """Put the cable back."""
        ip("link", "set", self.cable, "up")


@contextlib.contextmanager
def network(n_hosts: int, disks: Path) -> Iterator[list[Host]]:
    """Make hosts 1..n on a network that this machine is on too; everything is gone at the end."""
    tag, subnet = f"rl{os.getpid()}", f"10.{os.getpid() // 250 % 250}.{os.getpid() % 250}"
    bridge = f"{tag}br"
    hosts = [
        Host(f"{tag}h{number}", f"{tag}c{number}", f"{subnet}.{number}", disks / f"host{number}")
        for number in range(1, n_hosts + 1)
    ]
    with contextlib.ExitStack() as stack:
        ip("link", "add", bridge, "type", "bridge")
        stack.callback(ip, "link", "delete", bridge)
        ip("address", "add", f"{subnet}.254/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for host in hosts:
            ip("netns", "add", host.namespace)
            stack.callback(ip, "netns", "delete", host.namespace)
            ip("link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            # By itself the kernel removes a namespace's content some time later, and the name stays taken.
            stack.callback(ip, "link", "delete", host.cable)
            ip("link", "set", host.cable, "master", bridge, "up")
            for link in ("lo", "eth0"):
                ip("-n", host.namespace, "link", "set", link, "up")
            ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
            host.disk.mkdir(parents=True)
        yield hosts


def prefix_of(host: Host) -> list[str]:
    """A command that runs another one on a host, with nothing kept but on that host's own disk."""
    return ["ip", "netns", "exec", host.namespace, "env", f"XDG_CACHE_HOME={host.disk}", f"XDG_STATE_HOME={host.disk}"]


def start(host: Host, *arguments: str | Path) -> Running:
    """Start a long-running command there, which prints JSON; returns at its first event."""
    return Running([*arguments, "--json"], prefix_of(host), is_ready=False)


async def join_lines(up: Running, n_lines: int, key: str = "command") -> dict[str, str]:
    """Return the commands that `up` prints for other hosts, by stage, once there are so many; `short`: those with
    codes."""
    lines: dict[str, str] = {}
    event: dict[str, Any] = up.event
    while True:
        if event["event"] == "remote":
            lines[str(event["name"])] = str(event[key])
        if len(lines) == n_lines:
            return lines
        event = await asyncio.to_thread(up.next_event, "remote")
