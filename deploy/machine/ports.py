"""Ports of this machine."""

from __future__ import annotations

import functools
import itertools
import os
import secrets
import socket
import sys
from collections.abc import Iterator

LOCALHOST = "127.0.0.1"
PORTS = range(20_000, 32_768)
"""Below those that systems give to connections, and to listeners at port 0, unless their settings say otherwise: 32768
and up on Linux, 49152 elsewhere."""
TRIES_MAX = 100
CLAIMS_MAX = 64  # of one process, the latest; each holds a file descriptor


def free_port() -> int:
    """Return a TCP port that is free at LOCALHOST now, and another one each time.

    Where PORTS are below those of connections, none gets it by chance before the caller uses it, or between two uses.
    On Linux no other process is given it either, as long as this one lives and asks for less than CLAIMS_MAX others.
    Raises OSError if all are taken.
    """
    for _ in range(TRIES_MAX):
        port = PORTS[next(_numbers_of(os.getpid())) % len(PORTS)]
        with socket.socket() as probe:
            try:
                probe.bind((LOCALHOST, port))
            except OSError:
                continue
        if _claim(port):
            return port
    raise OSError(f"{TRIES_MAX} TCP ports from {PORTS.start} on are taken at {LOCALHOST}")


@functools.cache
def _numbers_of(_process_id: int) -> Iterator[int]:
    """Each process, a fork too, takes the ports in an order of its own: others choose at the same time.

    So ports in use lie apart. In one row they would stop whoever begins there, after TRIES_MAX of them.
    """
    return itertools.cycle(secrets.SystemRandom().sample(range(len(PORTS)), len(PORTS)))


def _claim(port: int) -> bool:
    """Return whether this process may have the port: no other one was given it and has yet to use it.

    A name in Linux's abstract namespace of sockets says so. It leaves no file, and goes with its process.
    """
    claims = _claims_of(os.getpid())
    if port in claims or sys.platform != "linux":
        return True
    with socket.socket(socket.AF_UNIX) as name:
        try:
            name.bind(f"\0relayline-port-{port}")
        except OSError:
            return False
        claims[port] = name.detach()
    while len(claims) > CLAIMS_MAX:
        os.close(claims.pop(next(iter(claims))))
    return True


@functools.cache
def _claims_of(_process_id: int) -> dict[int, int]:
    """Return the ports that this process was given, oldest first, and the descriptor that holds each one's name."""
    return {}
