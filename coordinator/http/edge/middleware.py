"""The parts of every reply: a request id, and OpenAI's error body for errors."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import hdrs, web

from relayline.coordinator.http.edge.body import Request
from relayline.coordinator.http.edge.errors import ErrorBody, HttpRefusal, error_body, plain_body, retry_headers
from relayline.coordinator.http.edge.record import note_failure
from relayline.coordinator.http.edge.sse import ClientGoneError
from relayline.coordinator.observe.tracing import CLIENT_GONE
from relayline.wire.common.errors import InternalError, RelaylineError, http_status
from relayline.wire.common.logs import AT_WILL

log = logging.getLogger("relayline.http")

REQUEST_ID = "x-request-id"
OUTERMOST = 1  # where middleware goes that is added later: first, but inside what writes errors in other forms
_STARTED_KEY = web.RequestKey("started", bool)
_ID_KEY = web.RequestKey("request_id", str)
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_PLAIN_CODES = {404: "route_not_found", 405: "method_not_allowed", 413: "body_too_large"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def json_response(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Return a JSON reply from bytes that are JSON already."""
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def response_of(found: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Return a JSON reply that says this."""
    return json_response(msgspec.json.encode(found), status, headers)


def request_id(request: web.Request) -> str:
    """Return the id of this request: the client's own if it sent a sane one."""
    found = request.get(_ID_KEY)
    if found is None:
        sent = request.headers.get(REQUEST_ID, "")
        found = sent if _SANE_ID.fullmatch(sent) else secrets.token_hex(16)
        request[_ID_KEY] = found
    return found


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Put the request id on any response, streams included (an on_response_prepare signal)."""
    request[_STARTED_KEY] = True
    response.headers[REQUEST_ID] = request_id(request)


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every failure before the first byte into a status and an error body."""
    try:
        if isinstance(request, Request):
            request.check_expected()
        return await handler(request)
    except HttpRefusal as refusal:
        if refusal.status == 400:
            log.warning("%s's request cannot be read: %s", request.remote, refusal, extra=AT_WILL)
        return refused(refusal)
    except RelaylineError as error:
        if http_status(error) >= 500:
            log.warning("%s %s: %s: %s [%s]", request.method, request.path, error.label, error, request_id(request))
        note_failure(request, error.label, error.message)
        return _cut_off(request) if _STARTED_KEY in request else _failure(error)
    except web.HTTPException as error:
        return _plain_failure(request, error)
    except web.RequestPayloadError:
        return refused(HttpRefusal(400, "the request body does not match its headers", "bad_body"))
    except ClientGoneError as gone:
        log.info("%s %s: %s [%s]", request.method, request.path, gone, request_id(request))
        note_failure(request, CLIENT_GONE)
        return _cut_off(request)
    except Exception:
        log.exception("%s %s failed [%s]", request.method, request.path, request_id(request))
        note_failure(request, InternalError.label)
        if _STARTED_KEY in request:
            return _cut_off(request)
        return _failure(InternalError(f"internal error; the server's log has the details under {request_id(request)}"))


def refused(refusal: HttpRefusal) -> web.Response:
    """Return the reply to a request that the web server refuses; the connection ends with it."""
    reply = _respond(refusal.body, refusal.status, refusal.headers)
    reply.force_close()
    return reply


def _cut_off(request: web.Request) -> web.Response:
    """End the connection: a second answer would land inside the first, which clients now see as broken."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=499)  # never sent


def _failure(error: RelaylineError) -> web.Response:
    return _respond(error_body(error), http_status(error), retry_headers(error))


def _plain_failure(request: web.Request, error: web.HTTPException) -> web.Response:
    messages = {
        404: _no_route(request.path),
        405: f"{request.method} is not allowed on {request.path}",
        413: f"the body is larger than {request.client_max_size} bytes",
    }
    text = messages.get(error.status, error.reason)
    body = plain_body(error.status, text, _PLAIN_CODES.get(error.status, "http_error"))
    allow = {"Allow": f"{error.headers['Allow']},{hdrs.METH_OPTIONS}"} if "Allow" in error.headers else {}
    if allow and request.method == hdrs.METH_OPTIONS:  # a question about the route, not a wrong use of it
        return web.Response(status=204, headers=allow)
    return _respond(body, error.status, allow)


def _no_route(path: str) -> str:
    """Return what to say where nothing is served, with the way for those who come from elsewhere."""
    if path == "/api" or path.startswith("/api/"):
        return (
            f"no route {path}: of Ollama's API, chat, generate, embed, tags, show, ps and version are served; "
            "`relayline up` decides which models there are"
        )
    if path in ("/models/load", "/models/unload"):
        return f"no route {path}: a gateway has it; a pipeline by itself has /wake_up and /sleep"
    if path.rstrip("/") == "/v1":
        return f"no route {path}: it is where OpenAI's API begins, as in /v1/models or /v1/chat/completions"
    return f"no route {path}"


def _respond(body: ErrorBody, status: int, headers: dict[str, str]) -> web.Response:
    return response_of(body, status, headers)
