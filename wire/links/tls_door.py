"""The door of HTTP ports with TLS: a connection is known, and can be ended, from its first byte on.

asyncio tells a protocol of a connection once its handshake is done. Connections that never finish one would be counted
by no bound, and would use up the open files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Sequence

from relayline.wire.common.tasks import end_task, start_among

log = logging.getLogger("relayline.security")

HANDSHAKE_TIMEOUT_S = 10.0  # as on the links (wire/links/listening.py)
_BACKLOG = 128
_FULL_PAUSE_S = 0.5  # without a file for a connection, until others are closed


class Shaking:
    """One connection amid its handshake."""

    def __init__(self, host: str) -> None:
        self.host = host  # the client's address
        self._task: asyncio.Task[None] | None = None

    def end(self) -> None:
        """End the connection now."""
        if self._task is not None:
            self._task.cancel()


class Door:
    """The listening sockets of one address, and the connections that shake hands. Event loop only."""

    def __init__(
        self,
        make: Callable[[Shaking], asyncio.Protocol],
        came: Callable[[Shaking], bool],
        left: Callable[[Shaking], None],
        context: ssl.SSLContext,
    ) -> None:
        """`came` says whether a new connection may stay.

        `make` gives the protocol of one; its `connection_made` follows once the handshake is done. `left` is called
        when a handshake has ended, however it did; `Shaking.end` ends one.
        """
        self.sockets: Sequence[socket.socket] = ()
        self._make, self._came, self._left, self._context = make, came, left, context
        self._accepting: list[asyncio.Task[None]] = []
        self._shaking: set[asyncio.Task[None]] = set()

    async def listen(self, hosts: Sequence[str], port: int) -> None:
        """Take connections from now on, at one port of all hosts; 0 takes a free one. Raises OSError."""
        self.sockets = await _listening(hosts, port)
        self._accepting = [asyncio.create_task(self._accept(each)) for each in self.sockets]

    def close(self) -> None:
        """Take no more connections, and end the handshakes that are under way."""
        for task in (*self._accepting, *self._shaking):
            task.cancel()
        for each in self.sockets:
            each.close()

    async def wait_closed(self) -> None:
        """Return once none of its tasks runs."""
        for task in (*self._accepting, *self._shaking):
            await end_task(task)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(listening)
            except ConnectionError:  # gone again
                continue
            except OSError as error:
                log.warning("no connection can be taken: %s", error.strerror or error)
                await asyncio.sleep(_FULL_PAUSE_S)
                continue
            shaking = Shaking(peer[0])
            if not self._came(shaking):
                sock.close()
                continue
            shaking._task = start_among(self._shaking, self._shake(shaking, sock))

    async def _shake(self, shaking: Shaking, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            with contextlib.suppress(OSError):  # ssl.SSLError is one, and so is a handshake that takes too long
                await loop.connect_accepted_socket(
                    lambda: self._make(shaking), sock, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
                )
        finally:
            self._left(shaking)


async def _listening(hosts: Sequence[str], port: int) -> list[socket.socket]:
    loop = asyncio.get_running_loop()
    sockets: list[socket.socket] = []
    try:
        for host in hosts:
            taken = sockets[0].getsockname()[1] if sockets else port
            found = await loop.getaddrinfo(host, taken, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _, address in dict.fromkeys(found):
                sock = socket.socket(family, kind, protocol)
                sockets.append(sock)
                sock.setblocking(False)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind(address)
                sock.listen(_BACKLOG)
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets
