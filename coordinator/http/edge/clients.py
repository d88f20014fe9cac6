"""The sender of a request, by key or address, so that clients get fair turns."""

from __future__ import annotations

import functools
import ipaddress

from aiohttp import web

CLIENT = web.RequestKey("client", str)  # by the key that it has shown


def client_of(request: web.Request) -> str:
    """Return who sent a request: the key that it has shown, or its address; of IPv6 the network."""
    return request[CLIENT] if CLIENT in request else _client_at(request.remote or "")


@functools.lru_cache(maxsize=1_024)
def _client_at(remote: str) -> str:
    try:
        address = ipaddress.ip_address(remote)
    except ValueError:  # of a Unix socket
        return remote
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))  # a holder of one address has all of these
    return str(address)
