"""Ports that are named before something listens there."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from relayline.deploy.machine import ports

GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.mark.skipif(
    GIVEN.exists() and int(GIVEN.read_text().split()[0]) < ports.PORTS.stop,
    reason="this system gives connections ports from a lower one on",
)
def test_a_free_port_is_none_that_connections_get() -> None:
    with socket.socket() as given:
        given.bind((ports.LOCALHOST, 0))
        assert given.getsockname()[1] not in ports.PORTS


def test_a_free_port_is_another_one_each_time() -> None:
    found = [ports.free_port() for _ in range(20)]
    assert len({*found}) == len(found)
    assert {*found} <= {*ports.PORTS}


def test_a_port_where_something_listens_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    port = ports.free_port()
    monkeypatch.setattr(ports, "PORTS", range(port, port + 1))
    with socket.socket() as taken:
        taken.bind((ports.LOCALHOST, port))
        with pytest.raises(OSError, match="are taken"):
            ports.free_port()
    assert ports.free_port() == port


def test_many_ports_in_a_row_may_be_in_use() -> None:
    first = ports.free_port()
    with contextlib.ExitStack() as stack:
        for port in range(first + 1, first + 1 + 2 * ports.TRIES_MAX):
            taken = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):  # somebody has it already
                taken.bind((ports.LOCALHOST, port))
        for _ in range(20):
            ports.free_port()


ONE_PORT = """
import sys
from relayline.deploy.machine import ports
ports.PORTS = range(int(sys.argv[1]), int(sys.argv[1]) + 1)
print(ports.free_port())
"""


def of_another_process(port: int) -> subprocess.CompletedProcess[str]:
    """Ask for a free port where only `port` may be one."""
    return subprocess.run([sys.executable, "-c", ONE_PORT, str(port)], capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has names of sockets without files")
def test_no_other_process_is_given_a_port_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    port = ports.free_port()
    assert "are taken" in of_another_process(port).stderr
    monkeypatch.setattr(ports, "CLAIMS_MAX", 1)
    ports.free_port()
    assert of_another_process(port).stdout == f"{port}\n", "many ports later it may be another process's"


def test_ports_that_were_given_hold_few_descriptors() -> None:
    claims = ports._claims_of(os.getpid())
    for _ in range(2 * ports.CLAIMS_MAX):
        ports.free_port()
    assert len(claims) <= ports.CLAIMS_MAX
