"""Errors as HTTP: status, headers and the body that OpenAI clients unwrap. Nothing else in the HTTP side makes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import msgspec

from relayline.wire.common.errors import (
    Fault,
    InvalidRequestError,
    LaneLimitError,
    ModelNotFoundError,
    NotReadyError,
    OverloadedError,
    RateLimitError,
    RelaylineError,
    http_status,
)
from relayline.wire.common.texts import printable

MESSAGE_CHARS_MAX = 2_000  # of an error: it may quote the request, which the client has already
RETRY_AFTER_S = 1  # for retryable errors without a time: a lane or a recovery takes about that long
_RETRY_AFTER_LOADING_S = 2

# OpenAI's own codes where it has one for the case; elsewhere the label of the error is the code.
_CODES = {
    OverloadedError.label: "rate_limit_exceeded",
    RateLimitError.label: "rate_limit_exceeded",
    LaneLimitError.label: "rate_limit_exceeded",
    ModelNotFoundError.label: "model_not_found",
}
_TYPES = {429: "rate_limit_error", 503: "service_unavailable_error"}


class HttpRefusal(Exception):
    """A request that the web server itself refuses, whatever its route: it was sent wrongly, or is too large."""

    def __init__(self, status: int, message: str, code: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        self.body = plain_body(status, message, code)


@contextlib.contextmanager
def using_disk(which: str) -> Iterator[None]:
    """Let an error of the disk within be one line for the client. Raises HttpRefusal."""
    try:
        yield
    except ConnectionError:  # of the client's
        raise
    except OSError as error:
        raise HttpRefusal(507, f"{which} cannot be used now: {error.strerror or error}", "disk_error") from error


class ErrorDetail(msgspec.Struct):
    """The inside of an error body."""

    message: str
    type: str
    param: str | None
    code: str | None
    retry_after_s: int | msgspec.UnsetType = msgspec.UNSET  # as in the header, for clients that see no headers


class ErrorBody(msgspec.Struct):
    """`{"error": {...}}`, as a reply body and as the last event of a broken stream."""

    error: ErrorDetail


def error_body(error: RelaylineError) -> ErrorBody:
    """Return the body that carries `error`."""
    status = http_status(error)
    param = error.param if isinstance(error, InvalidRequestError) else None
    kind = _TYPES.get(status, "invalid_request_error" if error.fault is Fault.CLIENT else "server_error")
    after_s = retry_after_s(error)
    again = msgspec.UNSET if after_s is None else after_s
    return ErrorBody(ErrorDetail(_line(error.message), kind, param, _CODES.get(error.label, error.label), again))


def plain_body(status: int, message: str, code: str) -> ErrorBody:
    """Return the body of an error that the web server itself found (no such route, body too large)."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return ErrorBody(ErrorDetail(_line(message), kind, None, code))


def _line(message: str) -> str:
    return printable(message, MESSAGE_CHARS_MAX)


def retry_after_s(error: RelaylineError) -> int | None:
    """Return after how many seconds a retry makes sense, or None if it does not or that is unknown."""
    status = http_status(error)
    if not error.retryable or status not in (429, 503):
        return None
    if error.retry_after_s is not None:
        return max(1, error.retry_after_s)
    return _RETRY_AFTER_LOADING_S if isinstance(error, NotReadyError) else RETRY_AFTER_S


def retry_headers(error: RelaylineError) -> dict[str, str]:
    """Return the headers that tell a client whether and when to try again.

    OpenAI's clients retry every 5xx unless `x-should-retry` says that it would not help.
    """
    after_s = retry_after_s(error)
    if after_s is not None:
        return {"Retry-After": str(after_s)}
    return {"x-should-retry": "false"} if http_status(error) >= 500 and not error.retryable else {}
