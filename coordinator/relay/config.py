"""Where the relay listens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class RelayConfig:
    """The relay of one pipeline. It runs once a stage asks for it."""

    host: str = "127.0.0.1"
    """Address to listen on: for the stages' tunnels, and in their place."""
    port: int = 0
    """Port where tunnels end; 0 lets the system choose."""
    advertise: str = ""
    """Host at which others find relayed stages; empty: the one by which each of them called the coordinator.

    With TLS it is always the host in the coordinator's certificate, which those of relayed stages carry, too.
    """
    ports: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Where each stage is reached, by its name, and no other stage is.

    0 or none: the first free port from 50051 on, or any where the relay listens on loopback.
    """
