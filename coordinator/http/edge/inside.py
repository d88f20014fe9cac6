"""Requests of a coordinator to itself: over a Unix socket that nobody else may open, and with a secret.

So what it has promised to somebody is asked for like any other request, and counted for the same key.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from relayline.coordinator.http.edge.middleware import OUTERMOST

INSIDE = "x-relayline-inside"
LetIn = Callable[[web.Request, str], None]


class Inside:
    """The inner door of one application."""

    def __init__(self, app: web.Application) -> None:
        """Call it before the application is started, and after its keys are set."""
        self._app, self._secret = app, secrets.token_urlsafe(32)
        self._let_in: dict[str, LetIn] = {}

    def add(self, header: str, let_in: LetIn) -> None:
        """Let `let_in` mark requests that have this header, whose value it gets, with whom they are for."""
        if not self._let_in:
            self._app.middlewares.insert(OUTERMOST, self._middleware())
        self._let_in[header] = let_in

    def _middleware(self) -> Middleware:
        @web.middleware
        async def let_in(request: web.Request, handler: Handler) -> web.StreamResponse:
            sent = request.headers.get(INSIDE)
            if sent is not None and hmac.compare_digest(sent.encode(errors="replace"), self._secret.encode()):
                for header, mark in self._let_in.items():
                    if header in request.headers:
                        mark(request, request.headers[header])
            return await handler(request)

        return let_in

    def headers(self, header: str, value: str) -> dict[str, str]:
        """Return the headers of such a request."""
        return {INSIDE: self._secret, header: value}

    @contextlib.asynccontextmanager
    async def listening(self, runner: web.AppRunner) -> AsyncIterator[Path]:
        """Take such requests within; gives the socket."""
        with tempfile.TemporaryDirectory(prefix="relayline-") as directory:  # short: sockets have names of 107 bytes
            socket = Path(directory) / "api"
            await web.UnixSite(runner, socket).start()
            yield socket
