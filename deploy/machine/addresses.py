"""The addresses of hosts, and which of them are this machine's. Blocks where a name is looked up."""

from __future__ import annotations

import socket


def addresses_of(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """Return the addresses of a host, none for a name that is not known."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return []
    return [(family, str(address[0])) for family, _, _, _, address in found]


def is_this_machine(host: str) -> bool:
    """Return whether a host is at an address of this machine."""
    for family, address in addresses_of(host):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((address, 0))  # the kernel binds no socket to an address of another machine
            except OSError:
                continue
        return True
    return False
