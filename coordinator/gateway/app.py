"""The application of a gateway: its own routes, and all others passed on."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from urllib.parse import quote

import msgspec
from aiohttp import hdrs, web
from prometheus_client.exposition import choose_encoder

from relayline.coordinator.gateway.bounds import ID_CHARS_MAX, PARSED_INLINE_BYTES
from relayline.coordinator.gateway.forward import (
    CONVERSATIONS_PATH,
    PIPELINE_HEADER,
    RESPONSES_PATH,
    Forwarder,
    Outgoing,
)
from relayline.coordinator.gateway.links import Links
from relayline.coordinator.gateway.metrics import PIPELINE, gateway_metrics
from relayline.coordinator.gateway.model_handlers import ModelHandlers
from relayline.coordinator.gateway.page import OPEN, PREFIX, gateway_page
from relayline.coordinator.gateway.peek import Asked, peek
from relayline.coordinator.gateway.router import Backend, Health, maybe_at
from relayline.coordinator.http.edge.api_keys import OPEN_PATTERN, PAGE_PATHS
from relayline.coordinator.http.edge.clients import check_may_use, tenant_of
from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.edge.middleware import add_request_id, errors_as_json, json_response, response_of
from relayline.coordinator.http.edge.server import LIMITS
from relayline.coordinator.http.edge.steering import SLEEP_PATHS, check_steers, is_steering
from relayline.coordinator.http.error_forms import errors_in_form
from relayline.coordinator.http.page import HEADERS, read_files, routes, wants_page
from relayline.coordinator.observe.targets import target
from relayline.wire.common.errors import InternalError, InvalidRequestError, NotReadyError
from relayline.wire.common.phase import Phase
from relayline.wire.common.versions import version_of

_PLAIN = (
    b"relayline serves an OpenAI-compatible API at /v1 (try GET /v1/models); GET /v1/pipeline lists its pipelines, and "
    b"browsers get a page at /.\n"
)
_HINT = f"name a pipeline: {PREFIX}/NAME{{path}}; GET /v1/pipeline lists them"


class Gateway:
    """The handlers."""

    def __init__(self, links: Links, forwarder: Forwarder, models: ModelHandlers) -> None:
        self._links, self._router, self.forwarder = links, links.router, forwarder
        self._models, self._metrics = models, gateway_metrics(links.router)
        self.is_draining = False
        self._parsing: ProcessPoolExecutor | None = None

    async def drain(self) -> None:
        """Take no new requests, load nothing more, and end the streams of those who only watch."""
        self.is_draining = True
        await self._models.loads.close()

    async def close(self, _app: web.Application) -> None:
        """End the process that parses large bodies, and all loads."""
        await self._models.loads.close()
        if self._parsing is not None:
            self._parsing.shutdown(wait=False, cancel_futures=True)

    # --- about the gateway ---

    async def root(self, request: web.Request) -> web.StreamResponse:
        """GET /: where the API is; for browsers a page with a link to each pipeline's."""
        if not wants_page(request):
            return web.Response(body=_PLAIN, content_type="text/plain", charset="utf-8", headers={hdrs.VARY: "Accept"})
        body = gateway_page(self._router.backends)
        headers = {**HEADERS, hdrs.VARY: "Accept"}
        return web.Response(body=body, content_type="text/html", charset="utf-8", headers=headers)

    async def to_slash(self, request: web.Request) -> web.StreamResponse:
        """GET /pipelines/NAME of a browser: the page's own links start from the slash behind."""
        if wants_page(request):
            return web.Response(status=308, headers={hdrs.LOCATION: f"{request.rel_url.raw_path}/"})
        return await self.named(request)

    async def live(self, _request: web.Request) -> web.StreamResponse:
        """GET /live: 200 while the process answers at all."""
        return json_response(b'{"status":"ok"}')

    async def version(self, _request: web.Request) -> web.StreamResponse:
        """GET /version."""
        return response_of({"version": version_of()})

    async def health(self, _request: web.Request) -> web.StreamResponse:
        """GET /health: 200 while some pipeline takes requests; with the state of each."""
        is_ready = any(backend.health is Health.READY for backend in self._router.backends)
        status = "draining" if self.is_draining else "ok" if is_ready else "unreachable"
        body = {"status": status, "pipelines": {each.name: each.state for each in self._router.backends}}
        if status == "ok":
            return response_of(body)
        return response_of(body, 503, {hdrs.RETRY_AFTER: "1"})

    async def pipelines(self, _request: web.Request) -> web.StreamResponse:
        """GET /v1/pipeline: every pipeline, how it is and how much it has to do."""
        listed = [
            {
                "name": backend.name,
                "url": link.config.url,
                "phase": backend.state,
                "problem": backend.problem,
                "models": list(backend.models),
                "lanes": backend.n_lanes,
                "running": backend.n_outstanding,
                "others": backend.n_others,
                "waiting": self._router.awake.counts(backend).n_waiting,
                "work_tokens": round(backend.work()),
                "sent": backend.n_sent,
            }
            for backend in self._router.backends
            for link in (self._links.links[backend],)
        ]
        ready = any(backend.health is Health.READY for backend in self._router.backends)
        phase = Phase.DRAINING if self.is_draining else Phase.READY if ready else Phase.UNREACHABLE
        n_running = sum(backend.n_outstanding + backend.n_others for backend in self._router.backends)
        whole: dict[str, object] = {
            "kind": "gateway",
            "phase": phase.value,
            "running": n_running,
            "waiting": sum(self._router.awake.counts(backend).n_waiting for backend in self._router.backends),
            "awake_max": self._router.awake.limit,
            "stages": [],
        }
        return response_of(whole | {"pipelines": listed})

    async def targets(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/pipeline/targets: this gateway and its pipelines, for Prometheus' HTTP service discovery.

        The stages of one are at the same route below /pipelines/NAME.
        """
        found = [target(request.host, request.scheme, {"role": "gateway"})]
        for backend in self._router.backends:
            labels = {"role": "coordinator", PIPELINE: backend.name}
            path = f"{PREFIX}/{backend.name}/metrics"
            found.append(target(request.host, request.scheme, labels, path))
        return response_of(found)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """GET /metrics, for Prometheus."""
        encode, content_type = choose_encoder(request.headers.get(hdrs.ACCEPT, ""))
        return web.Response(body=encode(self._metrics), headers={hdrs.CONTENT_TYPE: content_type})

    # --- passed on ---

    async def named(self, request: web.Request) -> web.StreamResponse:
        """Any route below /pipelines/NAME: of that pipeline."""
        name = request.match_info["name"]
        self._find(name)
        path = request.raw_path.removeprefix(f"{PREFIX}/{name}") or "/"
        route = f"/{request.match_info.get('path', '')}"
        if is_steering(request.method, route):
            check_steers(request)  # the pipeline may not know whose request this is
        self._check_taken(request)
        body = await request.read()
        if body and tenant_of(request).models:
            _check_asked(request, await self._asked(body))
        backend = self._find(name)  # another one may have taken its place in the meantime
        if (unloaded := await self._models.unloaded(request, route, body, backend)) is not None:
            return unloaded
        outgoing = self.forwarder.outgoing(request, path, body, Asked(backend.models[0] if backend.models else None))
        return await self.forwarder.to_one(request, self._links.links[backend], outgoing)

    def _find(self, name: str) -> Backend:
        backend = self._router.named(name)
        if backend is None:
            known = ", ".join(each.name for each in self._router.staying)
            raise web.HTTPNotFound(reason=f"no pipeline {name[:63]}; there are {known}")
        return backend

    async def props(self, request: web.Request) -> web.StreamResponse:
        """GET /props: of the pipeline that serves a `model`, else of this gateway."""
        return await (self.passed_on if request.query.get("model") else self._models.props)(request)

    async def needs_name(self, request: web.Request) -> web.StreamResponse:
        """Refuse a route that is about one pipeline."""
        raise InvalidRequestError(_HINT.format(path=request.path))

    async def stored(self, request: web.Request) -> web.StreamResponse:
        """Any route below /v1/responses/{id} or /v1/conversations/{id}: of the pipeline that has it."""
        outgoing = self.forwarder.outgoing(request, request.raw_path, await request.read(), Asked())
        id = request.match_info["id"]
        holder = self._router.holder(id)
        if holder is not None:
            return await self.forwarder.to_one(request, self._links.links[holder], outgoing)
        answer = await self.forwarder.to_holder(request, outgoing, is_kept=True)
        holder = self._router.named(answer.headers.get(PIPELINE_HEADER, ""))
        if holder is not None and answer.status == 200 and len(id) <= ID_CHARS_MAX:
            self._router.learn(id, holder)
        return answer

    async def looked_for(self, request: web.Request) -> web.StreamResponse:
        """A route to a resource of one pipeline, which must be found first."""
        if is_steering(request.method, request.path):
            check_steers(request)
        return await self.forwarder.to_holder(request, self.forwarder.outgoing(request, request.raw_path, b"", Asked()))

    async def passed_on(self, request: web.Request) -> web.StreamResponse:
        """Every other route: of the replica that suits best."""
        if is_steering(request.method, request.path):
            check_steers(request)
        self._check_taken(request)
        body = await request.read()
        if (unloaded := await self._models.unloaded(request, request.path, body)) is not None:
            return unloaded
        asked = _meant(request, await self._asked(body) if body else Asked(), self._router.models())
        if body or asked.model:
            _check_asked(request, asked)
        outgoing = self.forwarder.outgoing(request, request.raw_path, body, asked)
        del body
        if self._is_lost(asked.previous_id):
            await self._find_holder(outgoing, RESPONSES_PATH, asked.previous_id, self._router.candidates(asked.model))
        if self._is_lost(asked.conversation_id):
            await self._find_holder(outgoing, CONVERSATIONS_PATH, asked.conversation_id, self._router.staying)
        return await self.forwarder.to_best(request, outgoing)

    def _is_lost(self, id: str) -> bool:
        """Return whether the pipeline that has a response or a conversation has to be found."""
        return 0 < len(id) <= ID_CHARS_MAX and self._router.holder(id) is None

    async def _find_holder(self, outgoing: Outgoing, path: str, id: str, backends: Sequence[Backend]) -> None:
        """Ask pipelines for what one of them has: a gateway that was started again has forgotten which.

        Raises NotReadyError if none has it, but one of them does not answer.
        """
        silent = []
        for backend in backends:
            link, has_it = self._links.links.get(backend), None
            if link is not None and backend.answers:
                has_it = await self.forwarder.knows(link, f"{path}/{quote(id, safe='')}", outgoing.headers)
            if has_it:
                self._router.learn(id, backend)
                return
            if has_it is None and link is not None:
                silent.append(backend)
        if silent:
            raise maybe_at(silent)

    async def _asked(self, body: bytes) -> Asked:
        if len(body) <= PARSED_INLINE_BYTES:
            return peek(body)
        if self._parsing is None:  # spawned: nothing of this process is wanted there
            self._parsing = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        try:
            return await asyncio.get_running_loop().run_in_executor(self._parsing, peek, body)
        except BrokenProcessPool:
            self._parsing = None
            raise InternalError("the process that parses large bodies has died; send the request again") from None

    def _check_taken(self, request: web.Request) -> None:
        if self.is_draining and request.method == hdrs.METH_POST:
            raise NotReadyError("the gateway is draining; no new requests")


def _meant(request: web.Request, asked: Asked, served: Iterable[str]) -> Asked:
    """Return what a body asks for, with what its route and its query say about it."""
    if not request.path.startswith(RESPONSES_PATH):
        asked = msgspec.structs.replace(asked, conversation_id="")  # of other routes it means nothing
    model = asked.model
    if model is None:
        model = request.query.get("model") or None
    if model is None and request.path == CONVERSATIONS_PATH:  # OpenAI's clients name none there
        may_use = tenant_of(request).models
        model = next((name for name in served if name in may_use), None)
    return msgspec.structs.replace(asked, model=model)


def _check_asked(request: web.Request, asked: Asked) -> None:
    """Raise ModelNotFoundError, or InvalidRequestError, unless the client's key may use all that a request names."""
    tenant = tenant_of(request)
    check_may_use(tenant, asked.model or "")
    if tenant.models and asked.has_lora:
        text = "a gateway cannot tell whether this API key may use these adapters; name one as the `model`"
        raise InvalidRequestError.of_field("lora", text)


def make_gateway(links: Links, limits: HttpLimits | None = None) -> tuple[web.Application, Gateway]:
    """Return the application of a gateway, and its handlers. Serve it with `http.edge.server.start_http`."""
    limits = limits or HttpLimits()
    forwarder = Forwarder(links, limits.write_timeout_s)
    models = ModelHandlers(forwarder, limits)
    gateway = Gateway(links, forwarder, models)
    app = web.Application(client_max_size=limits.body_bytes_max, middlewares=[errors_in_form, errors_as_json])
    app[LIMITS] = limits
    files = {path: file for path, file in read_files().items() if path != "/"}
    app[PAGE_PATHS], app[OPEN_PATTERN] = frozenset({"/", *files}), OPEN
    app.on_response_prepare.append(add_request_id)
    app.on_cleanup.append(gateway.close)
    app.add_routes([*routes(files), *models.routes(), *_routes(gateway)])
    return app, gateway


def _routes(gateway: Gateway) -> list[web.RouteDef]:
    every = functools.partial(web.route, hdrs.METH_ANY)
    return [
        web.get("/", gateway.root),
        web.get("/live", gateway.live),
        web.get("/health", gateway.health),
        web.get("/v1/health", gateway.health),
        web.get("/version", gateway.version),
        web.get("/metrics", gateway.metrics),
        web.get("/props", gateway.props),
        web.get("/v1/pipeline", gateway.pipelines),
        web.get("/v1/pipeline/targets", gateway.targets),
        web.get(f"{PREFIX}/{{name}}", gateway.to_slash),
        every(f"{PREFIX}/{{name}}", gateway.named),
        every(f"{PREFIX}/{{name}}/{{path:.*}}", gateway.named),
        every("/v1/pipeline/{path:.+}", gateway.needs_name),
        every("/v1/telemetry", gateway.needs_name),
        *(every(path, gateway.needs_name) for path in SLEEP_PATHS),
        every("/v1/files", gateway.needs_name),
        every("/v1/files/{path:.+}", gateway.needs_name),
        every("/v1/batches", gateway.needs_name),
        every("/v1/batches/{path:.+}", gateway.needs_name),
        every("/v1/messages/batches", gateway.needs_name),
        every("/v1/messages/batches/{path:.+}", gateway.needs_name),
        web.get("/v1/traces/{id}", gateway.looked_for),
        web.post("/v1/requests/{id}/cancel", gateway.looked_for),
        web.post(f"{RESPONSES_PATH}/input_tokens", gateway.passed_on),
        *(every(f"{path}/{{id}}", gateway.stored) for path in (RESPONSES_PATH, CONVERSATIONS_PATH)),
        *(every(f"{path}/{{id}}/{{path:.+}}", gateway.stored) for path in (RESPONSES_PATH, CONVERSATIONS_PATH)),
        every("/{path:.*}", gateway.passed_on),
    ]
