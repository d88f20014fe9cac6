"""`/openapi.json` and `/docs`: the served API, from the router's routes and from the types that read bodies.

No field is described here: its type and its bounds are those that `bodies` checks.
"""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from aiohttp import hdrs, web

from relayline.coordinator.http.batches.bodies import BatchBody, FileForm, MessageBatchBody
from relayline.coordinator.http.conversations.asking import (
    ConversationBody,
    ConversationItemsBody,
    ConversationUpdateBody,
)
from relayline.coordinator.http.edge.errors import ErrorBody
from relayline.coordinator.http.edge.route_names import RERANK_PATHS, SCORE_PATHS, TRANSCRIPTION_PATHS
from relayline.coordinator.http.embeddings.asking import EmbeddingsBody
from relayline.coordinator.http.llama.asking import InfillBody, LlamaBody
from relayline.coordinator.http.messages.asking import MessagesBody
from relayline.coordinator.http.ollama.asking import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaGenerateBody,
    OllamaPullBody,
    OllamaShowBody,
)
from relayline.coordinator.http.page import HEADERS
from relayline.coordinator.http.replies import shapes
from relayline.coordinator.http.requests import bodies
from relayline.coordinator.http.rerank.asking import RerankBody, ScoreBody
from relayline.coordinator.http.responses.bodies import ResponsesBody
from relayline.coordinator.http.transcriptions.asking import TranscriptionForm
from relayline.wire.common.versions import version_of

OPENAPI_PATH, DOCS_PATH = "/openapi.json", "/docs"

# (method, path) -> the type of the body.
_BODIES: dict[tuple[str, str], type[msgspec.Struct]] = {
    ("POST", "/v1/completions"): bodies.CompletionBody,
    ("POST", "/v1/chat/completions"): bodies.ChatBody,
    ("POST", "/v1/responses"): ResponsesBody,
    ("POST", "/v1/responses/input_tokens"): ResponsesBody,
    ("POST", "/v1/conversations"): ConversationBody,
    ("POST", "/v1/conversations/{id}"): ConversationUpdateBody,
    ("POST", "/v1/conversations/{id}/items"): ConversationItemsBody,
    ("POST", "/v1/messages"): MessagesBody,
    ("POST", "/v1/messages/count_tokens"): MessagesBody,
    ("POST", "/tokenize"): bodies.TokenizeBody,
    ("POST", "/detokenize"): bodies.DetokenizeBody,
    ("POST", "/apply-template"): bodies.ChatBody,
    ("POST", "/completion"): LlamaBody,
    ("POST", "/infill"): InfillBody,
    ("POST", "/v1/embeddings"): EmbeddingsBody,
    ("POST", "/embedding"): EmbeddingsBody,
    **{("POST", path): RerankBody for path in RERANK_PATHS},
    **{("POST", path): ScoreBody for path in SCORE_PATHS},
    **{("POST", path): TranscriptionForm for path in TRANSCRIPTION_PATHS},
    ("POST", "/api/chat"): OllamaChatBody,
    ("POST", "/api/generate"): OllamaGenerateBody,
    ("POST", "/api/show"): OllamaShowBody,
    ("POST", "/api/pull"): OllamaPullBody,
    ("POST", "/api/embed"): OllamaEmbedBody,
    ("POST", "/api/embeddings"): OllamaEmbedBody,
    ("POST", "/v1/files"): FileForm,
    ("POST", "/v1/batches"): BatchBody,
    ("POST", "/v1/messages/batches"): MessageBatchBody,
    ("PUT", "/v1/telemetry"): bodies.TelemetryBody,
}
# The same -> the type of what status 200 brings, where it has one.
_REPLIES: dict[tuple[str, str], type[msgspec.Struct]] = {
    ("POST", "/v1/completions"): shapes.Completion,
    ("POST", "/v1/chat/completions"): shapes.ChatCompletion,
    ("POST", "/v1/embeddings"): shapes.Embeddings,
    **{("POST", path): shapes.Scores for path in SCORE_PATHS},
    ("GET", "/v1/models"): shapes.ModelList,
    ("GET", "/v1/models/{id}"): shapes.Model,
}
_STREAMING = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/completion", "/infill",
              *TRANSCRIPTION_PATHS}  # fmt: skip
_STREAMING_LINES = {"/api/chat", "/api/generate", "/api/pull"}  # of JSON
_PLAIN = {"/metrics"}  # text, not JSON
_FILES = {"/v1/files/{id}/content", "/v1/messages/batches/{id}/results"}  # the bytes of a file
_FORMS = {*TRANSCRIPTION_PATHS, "/v1/files"}  # multipart/form-data
_REF = "#/components/schemas/{name}"
_ERRORS = {
    "/v1/messages": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            },
        },
    }
}


def describe(routes: Iterable[web.AbstractRoute]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of these routes. The files of the page are none of the API."""
    types = [*dict.fromkeys([*_BODIES.values(), *_REPLIES.values(), ErrorBody])]
    references, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = dict(zip(types, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = route.resource.canonical if route.resource is not None else ""
        if route.method == hdrs.METH_HEAD or path == "/" or path.startswith("/page/"):
            continue
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "relayline", "version": version_of()},
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }


def add_openapi(app: web.Application) -> frozenset[str]:
    """Serve the description of all routes that an application has; return the paths where it does."""
    written: list[bytes] = []  # JSON, HTML

    async def wanted(index: int) -> bytes:
        """Write both at the first request, off the loop: no start should wait for the 50 ms that it takes."""
        if not written:
            written[:] = await asyncio.to_thread(_write, list(app.router.routes()))
        return written[index]

    async def openapi(_request: web.Request) -> web.StreamResponse:
        """GET /openapi.json: this description."""
        return web.Response(body=await wanted(0), content_type="application/json")

    async def docs(_request: web.Request) -> web.StreamResponse:
        """GET /docs: the same for people."""
        return web.Response(body=await wanted(1), content_type="text/html", charset="utf-8", headers=HEADERS)

    app.add_routes([web.get(OPENAPI_PATH, openapi), web.get(DOCS_PATH, docs)])
    return frozenset({OPENAPI_PATH, DOCS_PATH})


def _write(routes: Iterable[web.AbstractRoute]) -> tuple[bytes, bytes]:
    described = describe(routes)
    return msgspec.json.encode(described), _page(described).encode()


def _operation(route: web.AbstractRoute, path: str, schema_of: Mapping[Any, Any]) -> dict[str, Any]:
    key = (route.method, path)
    error = _ERRORS.get("/v1/messages" if path.startswith("/v1/messages") else "", schema_of[ErrorBody])
    content: dict[str, Any] = {"application/json": {"schema": schema_of.get(_REPLIES.get(key, object), {})}}
    if path in _PLAIN or path == DOCS_PATH:
        content = {"text/plain" if path in _PLAIN else "text/html": {}}
    if path in _FILES:
        content = {"application/octet-stream": {}}
    if path in _STREAMING:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    if path in _STREAMING_LINES:
        content["application/x-ndjson"] = {"schema": {"type": "string"}}
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}{re.sub(r'[^A-Za-z0-9]+', '_', path).rstrip('_')}",
        "summary": _summary(route),
        "responses": {
            "200": {"description": "what was asked for", "content": content},
            "default": {"description": "an error", "content": {"application/json": {"schema": error}}},
        },
    }
    names = re.findall(r"\{(\w+)\}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if key in _BODIES:
        kind = "multipart/form-data" if path in _FORMS else "application/json"
        operation["requestBody"] = {"required": True, "content": {kind: {"schema": schema_of[_BODIES[key]]}}}
    return operation


def _summary(route: web.AbstractRoute) -> str:
    """Return a handler's own description, without its route."""
    text = (route.handler.__doc__ or "").strip().partition("\n")[0]
    route_text, colon, rest = text.partition(": ")
    return (rest if colon else route_text).rstrip(".")


def _page(described: Mapping[str, Any]) -> str:
    schemas = described["components"]["schemas"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>relayline: HTTP API</title>",
        '<meta name=viewport content="width=device-width"><meta name=color-scheme content="light dark">',
        f'<h1>relayline: HTTP API</h1><p>The same for programs: <a href="{OPENAPI_PATH}">{OPENAPI_PATH}</a>.</p>',
    ]
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>")
            parts.append(f"<p>{html.escape(operation['summary'])}</p>")
            body = operation.get("requestBody")
            if body:
                (content,) = body["content"].values()
                name = content["schema"]["$ref"].rpartition("/")[2]
                parts.append(_fields(schemas[name]))
    return "".join([*parts, "</html>"])


def _fields(schema: Mapping[str, Any]) -> str:
    rows = []
    for name, field in schema["properties"].items():
        needed = "required" if name in schema.get("required", ()) else ""
        rows.append(f"<tr><td><code>{html.escape(name)}</code><td>{html.escape(_kind(field))}<td>{needed}")
    return f"<table><tr><th>field<th>type<th>{''.join(rows)}</table>"


def _kind(field: Mapping[str, Any]) -> str:
    """Return a field's type in words."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_kind(each) for each in field["anyOf"] if each.get("type") != "null"))
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "enum" in field:
        return ", ".join(str(each) for each in field["enum"] if each is not None)
    kind = str(field.get("type", "any"))
    low, high = field.get("minimum"), field.get("maximum")
    if low is not None and high is not None:
        return f"{kind}, {low} to {high}"
    return kind if low is None else f"{kind}, at least {low}"
