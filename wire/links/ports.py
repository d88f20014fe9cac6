"""Checks that ports can be listened on, before what takes long."""

from __future__ import annotations

import errno
import socket

from relayline.wire.common.errors import StartError
from relayline.wire.links.security import address_of


def port_problem(host: str, port: int) -> str | None:
    """Return why the port cannot be used now, and what to do; None if it is free."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        return f"{host}: {error.strerror or error}; give a name or an address of this machine"
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"{address_of(host, port)} is taken by another process; end it, or take another port"
            if error.errno == errno.EADDRNOTAVAIL:
                return f"{host} is no address of this machine; 127.0.0.1 is this machine alone, 0.0.0.0 all addresses"
            if error.errno == errno.EACCES:
                return f"{address_of(host, port)}: {error.strerror}; take a port from 1024 on"
            return f"{address_of(host, port)}: {error.strerror}"
    return None


def check_free(*wanted: tuple[str, tuple[str, int] | None]) -> None:
    """Raise StartError with every port that is wanted and not free. `wanted`: what for, and host and port if any.

    Port 0 lets the system choose, and is always free.
    """
    problems = [
        f"{what}: {problem}"
        for what, address in wanted
        if address is not None and address[1] and (problem := port_problem(*address)) is not None
    ]
    if problems:
        raise StartError("; ".join(problems))
