"""The port of a stage whose coordinator names none: where manifests count a host's stages, so that a firewall can be
opened beforehand.
"""

from __future__ import annotations

import functools
import socket

from relayline.wire.links.security import is_loopback

STAGE_PORT = 50_051  # of a host's first stage, and inside containers
TRIED_MAX = 64  # as many as a pipeline has stages


@functools.cache
def usual_port(host: str) -> int:
    """Return the first port from STAGE_PORT on that is free at an address of this machine, the same for each call.

    0, for the system to choose, on loopback, where no firewall is in the way, and where none is free.
    """
    if is_loopback(host):
        return 0
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in range(STAGE_PORT, STAGE_PORT + TRIED_MAX):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    return 0
