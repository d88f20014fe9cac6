"""The routes of the dialects besides OpenAI's older two, and their surroundings."""

from __future__ import annotations

from aiohttp import web

from relayline.coordinator.http.batches.handlers import BatchHandlers
from relayline.coordinator.http.batches.message_handlers import MessageBatchHandlers
from relayline.coordinator.http.batches.room import Room
from relayline.coordinator.http.conversations.handlers import ConversationHandlers
from relayline.coordinator.http.conversations.keeper import Conversations
from relayline.coordinator.http.edge.route_names import RERANK_PATHS, SCORE_PATHS, TRANSCRIPTION_PATHS
from relayline.coordinator.http.embeddings.handlers import EmbeddingHandlers
from relayline.coordinator.http.llama.handlers import LlamaHandlers
from relayline.coordinator.http.messages.handlers import MessageHandlers
from relayline.coordinator.http.ollama.handlers import OllamaHandlers
from relayline.coordinator.http.openapi import add_openapi
from relayline.coordinator.http.replies.service import Service
from relayline.coordinator.http.rerank.handlers import RerankHandlers
from relayline.coordinator.http.responses.background import Background
from relayline.coordinator.http.responses.begin import BACKGROUND, CONVERSATIONS, STORE
from relayline.coordinator.http.responses.handlers import ResponseHandlers
from relayline.coordinator.http.responses.making import MakingHandlers
from relayline.coordinator.http.responses.store import ResponseStore
from relayline.coordinator.http.sleep_handlers import SleepControl
from relayline.coordinator.http.transcriptions.handlers import TranscriptionHandlers


def add_dialects(app: web.Application, service: Service, sleep: SleepControl | None) -> frozenset[str]:
    """Add the routes to an application, and last the description of all that it has.

    Returns the paths that tell nothing about anybody, which need no key.
    """
    store = app[STORE] = ResponseStore()
    conversations = app[CONVERSATIONS] = Conversations()
    background = app[BACKGROUND] = Background(service, store, conversations)
    app.on_shutdown.append(background.close)
    making = MakingHandlers(service, store, background, conversations)
    app.add_routes(_routes(service, making, ResponseHandlers(service, store, background), sleep))
    app.add_routes(ConversationHandlers(service, conversations).routes())
    return add_openapi(app)


def _routes(
    service: Service, making: MakingHandlers, responses: ResponseHandlers, sleep: SleepControl | None
) -> list[web.RouteDef]:
    messages, llama = MessageHandlers(service), LlamaHandlers(service)
    embeddings, rankings = EmbeddingHandlers(service), RerankHandlers(service)
    transcriptions, room = TranscriptionHandlers(service), Room()
    return [
        web.post("/v1/responses", making.create),
        web.post("/v1/responses/input_tokens", making.count),
        web.get("/v1/responses/{id}", responses.retrieve),
        web.delete("/v1/responses/{id}", responses.delete),
        web.get("/v1/responses/{id}/input_items", responses.input_items),
        web.post("/v1/responses/{id}/cancel", responses.cancel),
        web.post("/v1/embeddings", embeddings.create),
        web.post("/embedding", embeddings.create_plain),
        *(web.post(path, rankings.rerank) for path in RERANK_PATHS),
        *(web.post(path, rankings.score) for path in SCORE_PATHS),
        web.post("/completion", llama.completion),
        web.post("/infill", llama.infill),
        web.get("/slots", llama.slots),
        web.get("/lora-adapters", llama.lora_adapters),
        web.post("/v1/messages", messages.create),
        *(web.post(path, transcriptions.create) for path in TRANSCRIPTION_PATHS),
        web.post("/v1/messages/count_tokens", messages.count),
        *BatchHandlers(service.limits, room).routes(),
        *MessageBatchHandlers(service.limits, room).routes(),
        *_ollama_routes(OllamaHandlers(service, sleep)),
    ]


def _ollama_routes(ollama: OllamaHandlers) -> list[web.RouteDef]:
    return [
        web.get("/api/version", ollama.api_version),
        web.get("/api/tags", ollama.tags),
        web.get("/api/ps", ollama.running),
        web.post("/api/show", ollama.show),
        web.post("/api/chat", ollama.chat),
        web.post("/api/generate", ollama.generate),
        web.post("/api/embed", ollama.embed),
        web.post("/api/embeddings", ollama.embedding),
        web.post("/api/pull", ollama.pull),
    ]
