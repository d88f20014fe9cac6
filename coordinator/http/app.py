"""The application: routes, middleware and the parts that handlers share, put together."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import cast

from aiohttp import web

from relayline.coordinator.answers.template import Conversation
from relayline.coordinator.engine.telemetry_control import TelemetryControl
from relayline.coordinator.http.body_pool import BodyPool, find_style
from relayline.coordinator.http.choice import Speller
from relayline.coordinator.http.dialect_routes import OUTER_MIDDLEWARE, add_dialects
from relayline.coordinator.http.handlers import Handlers
from relayline.coordinator.http.images import Images
from relayline.coordinator.http.layer_handlers import LayerControl, layer_routes
from relayline.coordinator.http.limits import HttpLimits
from relayline.coordinator.http.live import FACTS as FACTS
from relayline.coordinator.http.live import LiveFeed
from relayline.coordinator.http.middleware import add_request_id, errors_as_json, request_id
from relayline.coordinator.http.observe import note_status, observing
from relayline.coordinator.http.page import PATHS, read_files, routes
from relayline.coordinator.http.preparing import setting_of
from relayline.coordinator.http.server import LIMITS
from relayline.coordinator.http.service import Service
from relayline.coordinator.http.telemetry_handlers import TelemetryHandlers
from relayline.coordinator.images.encoder import Encoder
from relayline.coordinator.observe.observer import Observer
from relayline.coordinator.sessions.generation import Generator
from relayline.coordinator.text.chat import ChatTemplate
from relayline.coordinator.text.tokenizer import Tokenizer

TEMPLATE_FAULT = web.AppKey("template_fault", str)  # why the chat template cannot be used, or empty


def make_app(
    generator: Generator,
    tokenizer: Tokenizer,
    chat: ChatTemplate,
    model_id: str,
    created: int,
    limits: HttpLimits | None = None,
    control: TelemetryControl | None = None,
    layers: LayerControl | None = None,
    encoder: Encoder | None = None,
) -> web.Application:
    """Return the OpenAI-compatible application.

    `model_id` is the one model name that is served, `created` when it came up (unix seconds); without `control`
    nothing is traced beyond this process's own ring, without `layers` none can be moved, without a started `encoder`
    chats are text alone. Serve the application
    with `coordinator.http.server.start_http`: handlers count on being cancelled when their client goes away. Further
    routes (metrics) may be added before it is started.
    """
    limits = limits or HttpLimits()
    control = control or TelemetryControl(Observer(), tuple)
    observer = control.observer
    setting = setting_of(model_id, limits, chat, has_images=encoder is not None)
    images = Images(encoder) if encoder is not None else None
    style = setting.style = find_style(setting, tokenizer.path)
    conversation = Conversation(chat, tokenizer, style.tool_style())
    pool = BodyPool(setting, tokenizer)
    service = Service(
        generator,
        tokenizer,
        Speller(tokenizer),
        conversation,
        model_id,
        created,
        _fingerprint(),
        limits,
        observer,
        pool,
        images,
    )
    middlewares = [OUTER_MIDDLEWARE, observing(observer, request_id), errors_as_json]
    files = read_files()
    facts: dict[str, object] = {"model_id": model_id, "version": service.fingerprint}
    if images is not None:
        facts["images_max"] = images.per_request_max
    feed = LiveFeed(generator, control, facts)
    app = web.Application(client_max_size=limits.body_bytes_max, middlewares=middlewares)
    app[LIMITS] = limits
    app[TEMPLATE_FAULT] = style.fault
    app[FACTS] = facts

    async def close_pool(_app: web.Application) -> None:
        pool.close()
        if images is not None:
            await images.close()

    app.on_shutdown.append(feed.close)
    app.on_cleanup.append(close_pool)
    app.on_response_prepare.append(add_request_id)
    app.on_response_prepare.append(note_status)
    app.add_routes(
        [*_routes(Handlers(service), TelemetryHandlers(control), feed), *layer_routes(layers), *routes(files)]
    )
    app[PATHS] = add_dialects(app, service) | frozenset(files)
    facts["routes"] = sorted(info["path"] for info in map(_info, app.router.resources()) if "path" in info)
    return app


def _routes(handlers: Handlers, telemetry: TelemetryHandlers, feed: LiveFeed) -> list[web.RouteDef]:
    return [
        web.get("/health", handlers.health),
        web.get("/v1/health", handlers.health),
        web.get("/live", handlers.live),
        web.get("/version", handlers.version),
        web.get("/v1/models", handlers.models),
        web.get("/v1/models/{id:.+}", handlers.model),
        web.get("/v1/pipeline", handlers.pipeline),
        web.get("/v1/pipeline/targets", handlers.targets),
        web.get("/v1/pipeline/live", feed.live),
        web.get("/v1/pipeline/plan", feed.plan),
        web.get("/metrics", handlers.metrics),
        web.get("/v1/traces/{id}", telemetry.trace),
        web.get("/v1/telemetry", telemetry.settings),
        web.put("/v1/telemetry", telemetry.change),
        web.post("/v1/completions", handlers.completions),
        web.post("/v1/chat/completions", handlers.chat_completions),
        web.post("/tokenize", handlers.tokenize),
        web.post("/detokenize", handlers.detokenize),
        web.get("/tokenizer_info", handlers.tokenizer_info),
        web.post("/apply-template", handlers.apply_template),
        web.get("/props", handlers.props),
    ]


def _info(resource: web.AbstractResource) -> Mapping[str, str]:
    return cast("Mapping[str, str]", resource.get_info())


def _fingerprint() -> str:
    """Return `system_fingerprint`: what computed the answer, as far as its arithmetic goes."""
    try:
        return f"relayline-{metadata.version('relayline')}"
    except metadata.PackageNotFoundError:  # run from a checkout that was never installed
        return "relayline-dev"
