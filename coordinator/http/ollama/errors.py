"""Errors in Ollama's form, for all that stands below /api."""

from __future__ import annotations

import msgspec
from aiohttp import web

from relayline.coordinator.http.edge.error_form import ErrorForm
from relayline.coordinator.http.edge.errors import ErrorDetail

PREFIX = "/api/"


def _is_below(request: web.Request) -> bool:
    return request.path.startswith(PREFIX)


def _written(_request: web.Request, _status: int, detail: ErrorDetail) -> bytes:
    return msgspec.json.encode({"error": detail.message})


OLLAMA_FORM = ErrorForm(_is_below, _written)
