"""Ports of this machine."""

from __future__ import annotations

import functools
import itertools
import os
import secrets
import socket

LOCALHOST = "127.0.0.1"
PORTS = range(20_000, 32_768)
"""Below those that systems give to connections, and to listeners at port 0, unless their settings say otherwise: 32768
and up on Linux, 49152 elsewhere."""
TRIES_MAX = 100


def free_port() -> int:
    """Return a TCP port that is free at LOCALHOST now, and another one each time.

    Where PORTS are below those of connections, none gets it by chance before the caller uses it, or between two uses.
    Raises OSError if all are taken.
    """
    for _ in range(TRIES_MAX):
        port = PORTS[next(_numbers_of(os.getpid())) % len(PORTS)]
        with socket.socket() as probe:
            try:
                probe.bind((LOCALHOST, port))
            except OSError:
                continue
        return port
    raise OSError(f"{TRIES_MAX} TCP ports from {PORTS.start} on are taken at {LOCALHOST}")


@functools.cache
def _numbers_of(_process_id: int) -> itertools.count[int]:
    """Each process begins anywhere, and a fork elsewhere: others choose at the same time."""
    return itertools.count(secrets.randbelow(len(PORTS)))
