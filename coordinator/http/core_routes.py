"""Routes that every coordinator serves: OpenAI's, health, the pipeline and its telemetry."""

from __future__ import annotations

from aiohttp import web

from relayline.coordinator.engine.telemetry_control import TelemetryControl
from relayline.coordinator.http.handlers import Handlers
from relayline.coordinator.http.live import LiveFeed
from relayline.coordinator.http.replies.service import Service
from relayline.coordinator.http.telemetry_handlers import TelemetryHandlers


def core_routes(service: Service, control: TelemetryControl, feed: LiveFeed) -> list[web.RouteDef]:
    """Return the routes of the model, the pipeline and its telemetry."""
    handlers, telemetry = Handlers(service), TelemetryHandlers(control)
    return [
        web.get("/health", handlers.health),
        web.get("/v1/health", handlers.health),
        web.get("/live", handlers.live),
        web.get("/version", handlers.version),
        web.get("/v1/models", handlers.models),
        web.get("/v1/models/{id:.+}", handlers.model),
        web.get("/v1/usage", handlers.usage),
        web.get("/v1/pipeline", handlers.pipeline),
        web.get("/v1/pipeline/targets", handlers.targets),
        web.get("/v1/pipeline/live", feed.live),
        web.get("/v1/pipeline/plan", feed.plan),
        web.get("/metrics", handlers.metrics),
        web.get("/v1/traces/{id}", telemetry.trace),
        web.get("/v1/pipeline/logs", telemetry.logs),
        web.post("/v1/requests/{id}/cancel", telemetry.cancel),
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
