"""Errors in the form of a dialect, for its own clients, wherever the errors were found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from relayline.coordinator.http.edge.errors import ErrorBody, ErrorDetail


class ErrorForm(NamedTuple):
    """How a dialect writes errors."""

    is_theirs: Callable[[web.Request], bool]
    """Whether a request came from its clients."""
    write: Callable[[web.Request, int, ErrorDetail], bytes]
    """Returns the body of the answer with this status."""


def errors_in(forms: Sequence[ErrorForm]) -> Middleware:
    """Return the middleware that writes the errors of each dialect in its form. Answers that were begun stay."""

    @web.middleware
    async def rewrite(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        if not isinstance(response, web.Response) or response.status < 400 or response.prepared:
            return response
        form = next((form for form in forms if form.is_theirs(request)), None)
        if form is not None and isinstance(response.body, bytes):
            try:
                detail = msgspec.json.decode(response.body, type=ErrorBody).error
            except msgspec.DecodeError:
                return response
            response.body = form.write(request, response.status, detail)
        return response

    return rewrite
