"""Web pages of other hosts that may read the API, as named by `--cors`: the browser's questions and their answers.

A preflight comes without a key, since browsers never send one with it. It is answered first, and reveals only that the
page may continue.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import hdrs, web

from relayline.coordinator.http.edge.token_rate import HEADERS
from relayline.wire.common.errors import UsageError

ANY = "*"
_METHODS = "GET, HEAD, POST, PUT, DELETE, OPTIONS"
_EXPOSED = ", ".join(("x-request-id", "retry-after", "x-should-retry", *HEADERS))
_MAX_AGE_S = 600  # that a browser may remember a preflight

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def read_origins(text: str) -> tuple[str, ...]:
    """Return the origins of a setting, separated by commas, in lower case.

    Raises UsageError for anything but `*` or an origin.
    """
    origins = tuple(dict.fromkeys(part.strip().lower() for part in text.split(",") if part.strip()))
    for origin in origins:
        if origin != ANY and not _is_origin(origin):
            raise UsageError(f"--cors {origin!r} is not an origin like https://chat.example or http://localhost:3000")
    return origins


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        has_host = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False
    return has_host and text == f"{parts.scheme}://{parts.netloc}" and "@" not in parts.netloc


def allow_pages(app: web.Application, origins: tuple[str, ...]) -> None:
    """Let pages of these origins read answers. Call it behind all other middleware, before the app is started."""
    if not origins:
        return

    def allowed(request: web.Request) -> str | None:
        sent = request.headers.get(hdrs.ORIGIN)
        return sent if sent is not None and (ANY in origins or sent.strip().lower() in origins) else None

    @web.middleware
    async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_preflight = request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        if not is_preflight or allowed(request) is None:
            return await handler(request)
        wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: _METHODS,
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: wanted or "authorization, content-type",
            hdrs.ACCESS_CONTROL_MAX_AGE: str(_MAX_AGE_S),
        }
        return web.Response(status=204, headers=headers)

    async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if (origin := allowed(request)) is not None:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED

    app.middlewares.insert(0, answer_preflight)
    app.on_response_prepare.append(add_headers)
