"""The configuration of a joining stage: its name, where the coordinator is, and where it may keep its artifact."""

from __future__ import annotations

import dataclasses
import ipaddress
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from relayline.stage.config import StageConfig
from relayline.stage.joining.usual_port import usual_port
from relayline.wire.common.errors import StageLostError, UsageError
from relayline.wire.links.roles import identity_named
from relayline.wire.links.security import PLAINTEXT, LinkSecurity, host_of, is_loopback, port_of
from relayline.wire.model_files.adapters import Adapter
from relayline.wire.model_files.eagle3 import InnerRows
from relayline.wire.pb.relayline.v1 import join_pb2 as pb
from relayline.wire.settings.setting import read_message
from relayline.wire.settings.table import EngineSettings


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
    is_relayed: bool = False
    """Reached through the coordinator's relay, because nobody can dial this host; it then listens on loopback."""
    renew: Callable[[], None] = lambda: None
    """Has this host's certificate renewed where it ends soon, or this host has another address now. Blocks."""

    def __post_init__(self) -> None:
        """Raise UsageError for a name or an address that cannot be one."""
        if not self.name:
            raise UsageError("--join needs --name, one of the coordinator's stage names")
        if not 0 <= self.port <= 65_535:
            raise UsageError(f"--listen: port {self.port} is outside 0..65535")
        if ":" in self.advertise and not _is_ip(self.advertise):
            raise UsageError(f"--advertise {self.advertise} is not a host; the port comes from --listen")
        if self.is_relayed:
            check_relayed(bool(self.host), self.advertise)

    def listen_host(self) -> str:
        """Return the address to listen on. Raises StageLostError when the coordinator's name cannot be resolved."""
        return "127.0.0.1" if self.is_relayed else self.host or facing(self.coordinator)

    @property
    def chooses_port(self) -> bool:
        """Whether the system chooses the port: an address was given without one, or nobody else dials it."""
        return bool(self.host) or self.is_relayed

    def ordered(
        self,
        order: pb.JoinResponse,
        artifact: Path,
        adapters: tuple[Adapter, ...],
        host: str,
        *,
        drafter: Path | None = None,
        is_here: bool = True,
    ) -> StageConfig:
        """Return the stage that an order makes of this process, with its files, at `host` of this machine.

        The port is the first that is given: by this configuration, by the order, or as hosts usually have it. The last
        is looked for once the files are here (`is_here`): another stage of the host may be quicker.
        """
        port = self.port or (0 if self.chooses_port else order.listen_port)
        if not port and not self.chooses_port and is_here:
            port = usual_port(host)
        return StageConfig(
            name=self.name,
            artifact=artifact,
            host=host,
            port=port,
            engine=dataclasses.replace(read_message(EngineSettings, order.engine), **self.own_settings),
            security=self.security,
            coordinator=identity_named(order.coordinator),
            adapters=adapters,
            inner=InnerRows(tuple(order.drafter.layers), drafter) if order.drafter.layers else None,
        )

    def reported_host(self) -> str:
        """Return the host to report; empty leaves it to the coordinator, who sees where this stage calls from."""
        if self.advertise:
            return self.advertise
        is_wildcard = self.host in ("", "0.0.0.0", "::", "[::]")
        return "" if is_wildcard else self.host.strip("[]")


def check_relayed(listens: bool, advertise: str) -> None:
    """Raise UsageError for a relayed stage that says itself where others connect."""
    if listens or advertise:
        flag = "--listen" if listens else "--advertise"
        raise UsageError(f"--relay and {flag} contradict each other: the coordinator's relay says where others connect")


def facing(address: str) -> str:
    """Return this machine's own address on the route to host:port: the source address of a connection there.

    Raises StageLostError where no route leads there.
    """
    host, port = host_of(address), port_of(address)
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
