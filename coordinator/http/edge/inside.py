"""Requests of a coordinator to itself: over a Unix socket that nobody else may open, and with a secret.

So what it has promised to somebody is asked for like any other request, and counted for the same key.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from relayline.coordinator.http.edge.middleware import OUTERMOST
from relayline.wire.common.errors import StartError

INSIDE = "x-relayline-inside"
_PREFIX, _NAME = "relayline-api-", "api"  # of directory and socket
_SOCKET_BYTES_MAX = 103  # of a socket's name: macOS's bound; Linux has 107
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
        with _own_directory() as directory:
            socket = directory / _NAME
            await web.UnixSite(runner, socket).start()
            yield socket


@contextlib.contextmanager
def _own_directory() -> Iterator[Path]:
    """Gives a directory for a socket, locked for as long as this process lives."""
    _clear_left()
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as directory:
        lock = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield _short(Path(directory), lock)
        finally:
            os.close(lock)


def _short(directory: Path, opened: int) -> Path:
    """Return a name of an open directory for this user's processes that is short enough for a socket in it.

    TMPDIR may be long, that of a job on a cluster for instance. Raises StartError where there is no shorter name.
    """
    if len(os.fsencode(directory / _NAME)) <= _SOCKET_BYTES_MAX:
        return directory
    if not sys.platform.startswith("linux"):
        raise StartError(f"{directory.parent}: its name is too long for a socket; set TMPDIR to a shorter one")
    return Path(f"/proc/{os.getpid()}/fd/{opened}")


def _clear_left() -> None:
    """Remove the sockets of coordinators that were killed: nobody locks their directories."""
    for socket in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_NAME}"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            lock = os.open(socket.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_uid == os.geteuid():
                os.unlink(_NAME, dir_fd=lock)
                socket.parent.rmdir()
