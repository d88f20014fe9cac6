"""Anthropic's lines of the results of a message batch, from the lines that its work wrote. Pure.

A message batch is worked on like any other: its answers, and the errors of its requests, are OpenAI's lines. They
become Anthropic's when they are asked for.
"""

from __future__ import annotations

from typing import Any

import msgspec

URL = "/v1/messages"  # that every request of such a batch asks
EXPIRED, CANCELLED, FAILED = "batch_expired", "batch_cancelled", "batch_failed"  # codes of requests that were not asked
_UNASKED = {EXPIRED: {"type": "expired"}, CANCELLED: {"type": "canceled"}}


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Error(msgspec.Struct):
    code: str = ""
    message: str = ""


class _Line(msgspec.Struct):
    custom_id: str
    response: _Response | None = None
    error: _Error | None = None


class _Kind(msgspec.Struct):
    type: Any = None


def result_line(raw: bytes) -> bytes:
    """Return the line of a result, with its line end. Raises msgspec.MsgspecError for what is no line of ours."""
    line = msgspec.json.decode(raw, type=_Line)
    return msgspec.json.encode({"custom_id": line.custom_id, "result": _result(line)}) + b"\n"


def is_unasked(raw: bytes) -> bool:
    """Return whether a line says that its request was cancelled, or expired."""
    error = msgspec.json.decode(raw, type=_Line).error
    return error is not None and error.code in _UNASKED


def _result(line: _Line) -> dict[str, Any]:
    response, error = line.response, line.error or _Error()
    if response is None:
        return _UNASKED.get(error.code) or _errored(error.message)
    if 200 <= response.status_code < 300:
        return {"type": "succeeded", "message": response.body}
    try:
        is_theirs = msgspec.json.decode(response.body, type=_Kind).type == "error"
    except msgspec.MsgspecError:
        is_theirs = False
    return {"type": "errored", "error": response.body} if is_theirs else _errored(f"status {response.status_code}")


def _errored(message: str) -> dict[str, Any]:
    error = {"type": "api_error", "message": message}
    return {"type": "errored", "error": {"type": "error", "error": error, "request_id": None}}
