"""Both families of addresses: who listens on every interface for other hosts is reached by IPv6 too."""

from __future__ import annotations

import socket

_EVERY_V4, _EVERY_V6 = "0.0.0.0", "::"


def hosts_of_both(host: str) -> list[str]:
    """Return where to listen in place of `host`: for 0.0.0.0 also on all IPv6 addresses, as gRPC does by itself.

    Two listeners and not one for both, which would see IPv4 callers under other names.
    """
    return [host, _EVERY_V6] if host == _EVERY_V4 and _has_v6() else [host]


def _has_v6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind((_EVERY_V6, 0))
    except OSError:
        return False
    return True
