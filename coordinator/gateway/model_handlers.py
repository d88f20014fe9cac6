"""Routes about models: their lists, and loading and unloading them as llama-server's router and Ollama do."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Sequence

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from relayline.coordinator.gateway.bounds import STATUS_EVERY_S
from relayline.coordinator.gateway.forward import Forwarder
from relayline.coordinator.gateway.loads import Loads
from relayline.coordinator.gateway.model_lists import (
    RELOADED,
    Status,
    ollama_list,
    openai_list,
    status_of,
    with_status,
)
from relayline.coordinator.gateway.peek import Asked
from relayline.coordinator.gateway.router import Backend, Health, no_replica
from relayline.coordinator.http.edge.body import SMALL_BYTES_MAX, read_small
from relayline.coordinator.http.edge.clients import check_may_use, tenant_of
from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.edge.middleware import json_response, response_of
from relayline.coordinator.http.edge.sse import EventWriter
from relayline.coordinator.http.edge.steering import check_steers
from relayline.coordinator.http.ollama.asking import OllamaShowBody, is_only_loading, unloads
from relayline.coordinator.http.ollama.models import CHAT_PATH, GENERATE_PATH, without_answer
from relayline.coordinator.http.requests.bodies import decode_body
from relayline.wire.common.errors import InvalidRequestError, ModelNotFoundError, NotReadyError
from relayline.wire.common.versions import version_of

_SUCCESS = b'{"success":true}'


class ModelBody(msgspec.Struct):
    """POST /models/load and /models/unload."""

    model: str


class ModelHandlers:
    """The handlers of one gateway."""

    def __init__(self, forwarder: Forwarder, limits: HttpLimits) -> None:
        self._forwarder, self._links, self._limits = forwarder, forwarder.links, limits
        self._router = self._links.router
        self.loads = Loads(forwarder)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get("/v1/models", self.models),
            web.get("/v1/models/{id:.+}", self.model),
            web.post("/models/load", self.load),
            web.post("/models/unload", self.unload),
            web.get("/models/sse", self.events, allow_head=False),
            web.get("/api/tags", self.tags),
            web.get("/api/ps", self.running),
        ]

    # --- lists --------------------------------------------------------------------------------------------------------

    async def models(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models: every model of every pipeline, once, that the client's key may use."""
        return json_response(openai_list(self._cards(request)))

    async def model(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models/{id}; ids may contain slashes."""
        name = request.match_info["id"]
        check_may_use(tenant_of(request), name)
        card = self._cards(request).get(name)
        if card is None:
            self._router.candidates(name)  # says which models there are
            raise ModelNotFoundError(f"model: {name[:200]!r} is not served here", "model")
        return json_response(card)

    async def tags(self, request: web.Request) -> web.StreamResponse:
        """GET /api/tags: the same models, as Ollama's clients read them."""
        return json_response(ollama_list(self._cards(request), loaded_only=False))

    async def running(self, request: web.Request) -> web.StreamResponse:
        """GET /api/ps: of these models, those that a pipeline has in memory."""
        return json_response(ollama_list(self._cards(request), loaded_only=True))

    def _cards(self, request: web.Request) -> dict[str, bytes]:
        """Return the entries of the models that the client's key may use, each with its state."""
        statuses = self._statuses(request)
        found: dict[str, bytes] = {}
        for backend in self._router.staying:
            for model, card in self._links.links[backend].cards.items():
                if model in statuses:
                    found.setdefault(model, with_status(card, statuses[model]))
        return found

    def _statuses(self, request: web.Request) -> dict[str, Status]:
        may_use, replicas = tenant_of(request).models, self._router.models()
        return {model: status_of(each) for model, each in replicas.items() if not may_use or model in may_use}

    # --- as llama-server's router -------------------------------------------------------------------------------------

    async def load(self, request: web.Request) -> web.StreamResponse:
        """POST /models/load: wake a pipeline of a model; the answer comes at once, `status` tells the rest."""
        if self.loads.is_closed:
            raise NotReadyError("the gateway is draining; no new requests")
        name, replicas = await self._named(request)
        backend = next((each for each in _alive(replicas) if each.is_unloading), None)  # it is to stay, then
        if backend is None:
            if status_of(replicas).is_running:
                raise InvalidRequestError("model is already running", "model")
            backend = self._router.choose(Asked(name))
        refusal = await self.loads.load(backend, self._headers(request))
        return json_response(_SUCCESS) if refusal is None else refusal.response()

    async def unload(self, request: web.Request) -> web.StreamResponse:
        """POST /models/unload: put all pipelines of a model to sleep, each as soon as no request runs there."""
        name, replicas = await self._named(request)
        alive = _alive(replicas)
        if not alive:
            raise no_replica(name, replicas)
        if not status_of(replicas).is_running:
            raise InvalidRequestError("model is not running", "model")
        refusal = await self.loads.unload(alive, self._headers(request))
        return json_response(_SUCCESS) if refusal is None else refusal.response()

    async def _named(self, request: web.Request) -> tuple[str, list[Backend]]:
        """Return the model that a client who may steer names, and its pipelines as they are just now."""
        check_steers(request)
        name = decode_body(await read_small(request), ModelBody).model
        check_may_use(tenant_of(request), name)
        replicas = self._router.candidates(name)
        await self.loads.look(replicas)
        return name, replicas

    def _headers(self, request: web.Request) -> CIMultiDict[str]:
        return self._forwarder.outgoing(request, request.raw_path, b"", Asked()).headers

    async def events(self, request: web.Request) -> web.StreamResponse:
        """GET /models/sse: an event for each change of a model's status."""
        writer = EventWriter(request, self._limits.write_timeout_s, self._limits.ping_interval_s)
        before = self._statuses(request)
        await writer.start()
        await writer.ping()  # so that its client knows that it has begun
        while not self.loads.is_closed:
            await asyncio.sleep(STATUS_EVERY_S)
            now = self._statuses(request)
            events = [status.event(model) for model, status in now.items() if before.get(model, status) != status]
            if now.keys() != before.keys():
                events.append(RELOADED)
            before = now
            if events:
                await writer.send(events)
            elif writer.silent_in_s() <= 0:
                await writer.ping()
        await writer.finish([])
        return writer.response

    async def props(self, request: web.Request) -> web.StreamResponse:
        """GET /props without a model: what tells llama-server's clients that this is a router."""
        fields = {
            "role": "router",
            "max_instances": self._router.awake.limit or len(self._router.staying),
            "models_autoload": True,
            "model_alias": "relayline",
            "default_generation_settings": {"params": {}, "n_ctx": 0},
            "build_info": f"relayline-{version_of()}",
        }
        return response_of(fields)

    # --- as Ollama ----------------------------------------------------------------------------------------------------

    async def unloaded(
        self, request: web.Request, path: str, body: bytes, only: Backend | None = None
    ) -> web.StreamResponse | None:
        """Answer a request that asks Ollama to unload a model; None: it is another one.

        It must not be passed on like others: that would wake the pipeline before. `only`: of all pipelines.
        """
        if path not in (CHAT_PATH, GENERATE_PATH) or len(body) > SMALL_BYTES_MAX or not is_only_loading(body):
            return None
        asked = decode_body(body, OllamaShowBody)
        if not unloads(asked.keep_alive):
            return None
        check_steers(request)
        check_may_use(tenant_of(request), asked.model or "")
        replicas = self._router.candidates(asked.model or None) if only is None else [only]
        refusal = await self.loads.unload(_alive(replicas), self._headers(request))
        if refusal is not None:
            return refusal.response()
        name = asked.model or next(iter(replicas[0].models), "")
        return json_response(without_answer(name, path, "unload", datetime.datetime.now(datetime.UTC)))


def _alive(backends: Sequence[Backend]) -> list[Backend]:
    return [each for each in backends if each.health in (Health.READY, Health.PAUSED)]
