"""The door of HTTP ports with TLS: a connection is known, and can be ended, from its first byte on.

asyncio tells a protocol of a connection once its handshake is done. Connections that never finish one would belong to
nobody: no bound counts them, and they use up the open files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Sequence

from aiohttp import web

from relayline.wire.common.tasks import end_task
from relayline.wire.links.security import address_of

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
    """The listening sockets of one address. Event loop only; make it with `open_door`."""

    def __init__(
        self,
        make: Callable[[Shaking], asyncio.Protocol],
        came: Callable[[Shaking], bool],
        left: Callable[[Shaking], None],
        context: ssl.SSLContext,
    ) -> None:
        self.sockets: Sequence[socket.socket] = ()
        self._make, self._came, self._left, self._context = make, came, left, context
        self._accepting: list[asyncio.Task[None]] = []
        self._shaking: set[asyncio.Task[None]] = set()

    def listen(self, sockets: Sequence[socket.socket]) -> None:
        """Take connections from now on."""
        self.sockets = sockets
        self._accepting = [asyncio.create_task(self._accept(each)) for each in sockets]

    def close(self) -> None:
        """Take no more connections, and end the handshakes that are under way."""
        for task in (*self._accepting, *self._shaking):
            task.cancel()
        for each in self.sockets:
            each.close()

    async def wait_closed(self) -> None:
        """Return once nothing of it runs."""
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
            shaking._task = task = asyncio.create_task(self._shake(shaking, sock))
            self._shaking.add(task)
            task.add_done_callback(self._shaking.discard)

    async def _shake(self, shaking: Shaking, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            with contextlib.suppress(OSError):  # ssl.SSLError is one, and so is a handshake that takes too long
                await loop.connect_accepted_socket(
                    lambda: self._make(shaking), sock, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
                )
        finally:
            self._left(shaking)


async def open_door(
    make: Callable[[Shaking], asyncio.Protocol],
    host: str,
    port: int,
    context: ssl.SSLContext,
    *,
    came: Callable[[Shaking], bool],
    left: Callable[[Shaking], None],
) -> Door:
    """Listen on host:port, port 0 for a free one. Raises OSError.

    `came` says whether a new connection may stay. `make` gives the protocol of one; its `connection_made` follows once
    the handshake is done. `left` is called when a handshake has ended, however it did; `Shaking.end` ends one.
    """
    door = Door(make, came, left, context)
    door.listen(await _listening(host, port))
    return door


class TlsSite(web.BaseSite):
    """A port with TLS of an aiohttp server."""

    def __init__(
        self,
        runner: web.ServerRunner | web.AppRunner,
        host: str,
        port: int,
        context: ssl.SSLContext,
        *,
        make: Callable[[Shaking], asyncio.Protocol],
        came: Callable[[Shaking], bool],
        left: Callable[[Shaking], None],
    ) -> None:
        """See `open_door`."""
        super().__init__(runner, ssl_context=context)
        self._open = lambda: open_door(make, host, port, context, came=came, left=left)
        self._name = f"https://{address_of(host, port)}"

    @property
    def name(self) -> str:
        """Return what aiohttp calls it."""
        return self._name

    async def start(self) -> None:
        """Listen. Raises OSError."""
        await super().start()
        self._server = await self._open()


async def _listening(host: str, port: int) -> list[socket.socket]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
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
