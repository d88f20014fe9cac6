"""Ports that are named before something listens there."""

from __future__ import annotations

import socket
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
