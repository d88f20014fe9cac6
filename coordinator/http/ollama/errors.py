"""Errors in Ollama's form, for all that stands below /api."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from relayline.coordinator.http.edge.errors import ErrorBody

PREFIX = "/api/"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def ollama_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Write errors of its routes in the form that their clients read, wherever they were found."""
    response = await handler(request)
    is_error = isinstance(response, web.Response) and response.status >= 400
    if not (is_error and request.path.startswith(PREFIX)) or response.prepared:
        return response
    assert isinstance(response, web.Response)
    if isinstance(response.body, bytes):
        try:
            detail = msgspec.json.decode(response.body, type=ErrorBody).error
        except msgspec.DecodeError:
            return response
        response.body = msgspec.json.encode({"error": detail.message})
    return response
