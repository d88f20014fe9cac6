"""The routes of the dialects besides OpenAI's older two, and their surroundings."""

from __future__ import annotations

from aiohttp import web

from relayline.coordinator.http.embeddings.handlers import EmbeddingHandlers
from relayline.coordinator.http.llama.handlers import LlamaHandlers
from relayline.coordinator.http.messages.errors import messages_errors
from relayline.coordinator.http.messages.handlers import MessageHandlers
from relayline.coordinator.http.openapi import add_openapi
from relayline.coordinator.http.replies.service import Service
from relayline.coordinator.http.responses.handlers import ResponseHandlers
from relayline.coordinator.http.responses.store import ResponseStore

OUTER_MIDDLEWARE = messages_errors  # around everything: it writes what went wrong anywhere


def add_dialects(app: web.Application, service: Service) -> frozenset[str]:
    """Add the routes to an application, and last the description of all that it has.

    Returns the paths that tell nothing about anybody, which need no key.
    """
    app.add_routes(_routes(service))
    return add_openapi(app)


def _routes(service: Service) -> list[web.RouteDef]:
    responses, messages = ResponseHandlers(service, ResponseStore()), MessageHandlers(service)
    llama, embeddings = LlamaHandlers(service), EmbeddingHandlers(service)
    return [
        web.post("/v1/responses", responses.create),
        web.post("/v1/responses/input_tokens", responses.count),
        web.get("/v1/responses/{id}", responses.retrieve),
        web.delete("/v1/responses/{id}", responses.delete),
        web.get("/v1/responses/{id}/input_items", responses.input_items),
        web.post("/v1/responses/{id}/cancel", responses.cancel),
        web.post("/v1/embeddings", embeddings.create),
        web.post("/embedding", embeddings.create_plain),
        web.post("/completion", llama.completion),
        web.post("/infill", llama.infill),
        web.get("/slots", llama.slots),
        web.post("/v1/messages", messages.create),
        web.post("/v1/messages/count_tokens", messages.count),
    ]
