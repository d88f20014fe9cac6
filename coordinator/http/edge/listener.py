"""The address of an HTTP API and the rules for its clients: the same for a coordinator and for a gateway."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from relayline.wire.links.security import address_of


@dataclasses.dataclass(frozen=True, slots=True)
class HttpListener:
    """One address of an HTTP API, with the rules for its clients."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8080
    """Port to listen on; 0 lets the system choose."""
    tls: tuple[Path, Path] | None = None
    """Certificate (with intermediates) and private key, PEM; None serves in the clear."""
    api_keys_file: Path | None = None
    """File with the keys that are demanded, see coordinator.http.edge.api_keys; None demands none."""
    protect_metrics: bool = False
    """Whether /metrics needs a key too."""
    allow_hosts: tuple[str, ...] = ()
    """Host names under which web pages may reach it, besides loopback, see coordinator.http.edge.web_pages."""
    cors: tuple[str, ...] = ()
    """Origins whose web pages may read it, see coordinator.http.edge.cors."""

    def url_at(self, port: int) -> str:
        """Return the API's URL at the port that it got."""
        return f"{'http' if self.tls is None else 'https'}://{address_of(self.host, port)}"
