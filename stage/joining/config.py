"""The configuration of a joining stage: its name, where the coordinator is, and where it may keep its artifact."""

from __future__ import annotations

import dataclasses
import ipaddress
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relayline.wire.common.errors import StageLostError, UsageError
from relayline.wire.links.security import PLAINTEXT, LinkSecurity, host_of, is_loopback


@dataclasses.dataclass(frozen=True, slots=True)
class JoinConfig:
    """One stage that joins."""

    coordinator: str
    """host:port that stages join at."""
    name: str
    """Which of the pipeline's places this stage takes."""
    cache: Path
    """Directory of fetched artifacts, kept by content; made if it is missing."""
    host: str = ""
    """Address to listen on; empty chooses the one that faces the coordinator."""
    port: int = 0
    """Port to listen on; 0 lets the system choose."""
    advertise: str = ""
    """Host that neighbours shall connect to; empty for `host`, or where the coordinator sees this stage."""
    own_settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of the engine, by name, in which this process does not do as the coordinator says."""
    always_fetch: bool = False
    """Fetch the artifact even where the coordinator's own copy can be seen."""
    security: LinkSecurity = PLAINTEXT
    """How links are protected."""

    def __post_init__(self) -> None:
        """Raise UsageError for a name or an address that cannot be one."""
        if not self.name:
            raise UsageError("--join needs --name, one of the coordinator's stage names")
        if not 0 <= self.port <= 65_535:
            raise UsageError(f"--listen: port {self.port} is outside 0..65535")
        if ":" in self.advertise and not _is_ip(self.advertise):
            raise UsageError(f"--advertise {self.advertise} is not a host; the port comes from --listen")

    def listen_host(self) -> str:
        """Return the address to listen on. Raises StageLostError when the coordinator's name cannot be resolved."""
        return self.host or facing(self.coordinator)

    def reported_host(self) -> str:
        """Return the host to report; empty leaves it to the coordinator, who sees where this stage calls from."""
        if self.advertise:
            return self.advertise
        is_wildcard = self.host in ("", "0.0.0.0", "::", "[::]")
        return "" if is_wildcard else self.host.strip("[]")


def facing(address: str) -> str:
    """Return this machine's own address on the route to host:port: the source address of a connection there.

    Raises StageLostError where no route leads there.
    """
    host, port = host_of(address), int(address.rpartition(":")[2])
    if is_loopback(host) and not _is_ip(host):
        return "127.0.0.1"
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # of a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StageLostError(f"the coordinator at {address} cannot be found: {error.strerror or error}") from error


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return False
    return True
