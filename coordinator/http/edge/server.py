"""Starting the application on a port."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from aiohttp import web

from relayline.coordinator.http.edge.connection import Server
from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.wire.common.errors import StartError
from relayline.wire.links.families import hosts_of_both
from relayline.wire.links.security import address_of
from relayline.wire.links.tls_door import Door
from relayline.wire.links.tls_server import server_context

LIMITS = web.AppKey("limits", HttpLimits)  # of an application, where it has its own


class _TlsSite(web.BaseSite):
    """A port with TLS, whose connections count while they shake hands too."""

    def __init__(self, runner: _Runner, hosts: Sequence[str], port: int, context: ssl.SSLContext) -> None:
        super().__init__(runner, ssl_context=context)
        self._hosts, self._port, self._context = hosts, port, context

    @property
    def name(self) -> str:
        """Return what aiohttp calls it."""
        return f"https://{address_of(self._hosts[0], self._port)}"

    async def start(self) -> None:
        """Listen. Raises OSError."""
        await super().start()
        server = cast(Server, self._runner.server)
        door = Door(server.shaken, server.shakes, server.crowd.leave, self._context)
        self._server = cast(asyncio.AbstractServer, door)  # of which aiohttp takes `sockets` and `close`
        await door.listen(self._hosts, self._port)


class _Runner(web.AppRunner):
    """aiohttp's runner, with connections of ours."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return Server(server, self.app.get(LIMITS, HttpLimits()), asyncio.get_running_loop())


async def start_http(
    app: web.Application,
    host: str,
    port: int,
    *,
    shutdown_timeout_s: float = 1.0,
    context: ssl.SSLContext | None = None,
    what: str = "HTTP",
    flag: str = "--http",
    for_hosts: bool = False,
) -> tuple[web.AppRunner, int]:
    """Serve `app` on host:port (port 0 takes a free one), over TLS with a `context`; return the runner, and the port
    that it got. `for_hosts`: 0.0.0.0 is every address by IPv6, too, as for the links between hosts; this takes TLS.

    Handlers are cancelled when their client goes away, which is what frees its lanes. Stop with `runner.cleanup()`,
    which waits `shutdown_timeout_s` for running requests; drain before it. Raises StartError when the address cannot
    be listened on; it says `what` the port is for and which `flag` chooses another.
    """
    if not 0 <= port <= 65535:  # checked here because uvloop would listen on the port modulo 65536
        raise StartError(f"{port} is not a port; use 0 to 65535")
    runner = _Runner(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout_s)
    await runner.setup()
    try:
        hosts = hosts_of_both(host) if for_hosts else [host]
        site = web.TCPSite(runner, host, port) if context is None else _TlsSite(runner, hosts, port, context)
        await site.start()
    except OSError as error:
        await runner.cleanup()
        if error.errno == errno.EADDRINUSE:
            raise StartError(f"{what} port {address_of(host, port)} is taken; choose another with {flag}") from error
        raise StartError(f"cannot listen on {address_of(host, port)} for {what}: {error.strerror or error}") from error
    actual_port: int = runner.addresses[0][1]
    return runner, actual_port


def server_tls(files: tuple[Path, Path] | None) -> ssl.SSLContext | None:
    """Return the TLS of a certificate's and a key's file; None without them. Raises UsageError for unusable ones."""
    if files is None:
        return None
    from relayline.wire.links.tls_material import check_pair  # loads cryptography, which plaintext does not need

    cert, key = files
    return server_context(cert, key, check=lambda: check_pair(cert, key))
