"""Errors in Anthropic's form: for all that stands below /v1/messages, and for its clients' questions about models."""

from __future__ import annotations

import msgspec
from aiohttp import web

from relayline.coordinator.http.edge.error_form import ErrorForm
from relayline.coordinator.http.edge.errors import ErrorDetail, error_body
from relayline.coordinator.http.edge.middleware import request_id
from relayline.wire.common.errors import ContextLengthError, RelaylineError, http_status

PATH, MODELS = "/v1/messages", "/v1/models"
VERSION = "anthropic-version"  # a header that Anthropic's clients send
_TOO_LONG = "prompt is too long"  # Anthropic's words, which its clients look for
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def messages_error(error: RelaylineError, request_id: str) -> bytes:
    """Return the JSON of an error, as a reply or as an event."""
    return _written(http_status(error), error_body(error).error, request_id)


def _is_of_their_clients(request: web.Request) -> bool:
    path = request.path.rstrip("/")
    is_about_models = path == MODELS or path.startswith(f"{MODELS}/")
    return path == PATH or path.startswith(f"{PATH}/") or (is_about_models and VERSION in request.headers)


def _written(status: int, detail: ErrorDetail, request_id: str) -> bytes:
    message = detail.message
    if detail.code == ContextLengthError.label:
        message = f"{_TOO_LONG}: {message}"
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error = {"type": kind, "message": message}
    return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})


def _reply(request: web.Request, status: int, detail: ErrorDetail) -> bytes:
    return _written(status, detail, request_id(request))


MESSAGES_FORM = ErrorForm(_is_of_their_clients, _reply)
