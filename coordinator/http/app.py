"""The application: routes, middleware and the parts that handlers share, put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from aiohttp import web

from relayline.coordinator.engine.telemetry_control import TelemetryControl
from relayline.coordinator.http.core_routes import core_routes
from relayline.coordinator.http.dialect_routes import add_dialects
from relayline.coordinator.http.edge.api_keys import PAGE_PATHS
from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.edge.middleware import add_request_id, errors_as_json, request_id
from relayline.coordinator.http.edge.record import note_status, observing
from relayline.coordinator.http.edge.server import LIMITS
from relayline.coordinator.http.error_forms import errors_in_form
from relayline.coordinator.http.layer_handlers import LayerControl, layer_routes
from relayline.coordinator.http.live import FACTS as FACTS
from relayline.coordinator.http.live import LiveFeed
from relayline.coordinator.http.page import read_files, routes
from relayline.coordinator.http.replies.service import ServedModel, make_service
from relayline.coordinator.http.sleep_handlers import SleepControl, sleep_routes
from relayline.coordinator.joining.inviting import Inviter
from relayline.coordinator.observe.observer import Observer
from relayline.coordinator.sessions.generation import Generator

TEMPLATE_FAULT = web.AppKey("template_fault", str)  # why the chat template cannot be used, or empty


def make_app(
    generator: Generator,
    model: ServedModel,
    limits: HttpLimits | None = None,
    control: TelemetryControl | None = None,
    layers: LayerControl | None = None,
    inviter: Inviter | None = None,
    sleep: SleepControl | None = None,
) -> web.Application:
    """Return the OpenAI-compatible application of one model.

    Without `control` nothing is traced beyond this process's own ring, without `layers` none can be moved, without
    `inviter` no join lines are made, and without `sleep` nothing sleeps. Serve the application with
    `coordinator.http.edge.server.start_http`: handlers count on being cancelled when their client goes away. Further
    routes (metrics) may be added before it is started.
    """
    limits = limits or HttpLimits()
    control = control or TelemetryControl(Observer(), tuple)
    observer = control.observer
    service = make_service(generator, model, limits, observer)
    middlewares = [errors_in_form, observing(observer, request_id), errors_as_json]
    files = read_files()
    facts: dict[str, object] = {"model_id": model.model_id, "version": service.fingerprint}
    if limits.adapters:
        facts["adapters"] = limits.adapters
    if limits.recommended:
        facts["recommended"] = dict(limits.recommended)
    if service.media is not None:
        facts |= {"media_max": service.media.per_request_max, "takes": service.media.takes._asdict()}
    feed = LiveFeed(generator, control, facts)
    app = web.Application(client_max_size=limits.body_bytes_max, middlewares=middlewares)
    app[LIMITS] = limits
    app[TEMPLATE_FAULT] = service.template_fault
    app[FACTS] = facts

    async def close_pool(_app: web.Application) -> None:
        service.pool.close()
        if service.media is not None:
            await service.media.close()

    async def close_control(_app: web.Application) -> None:
        await control.close()

    app.on_shutdown.append(feed.close)
    app.on_shutdown.append(close_control)
    app.on_cleanup.append(close_pool)
    app.on_response_prepare.append(add_request_id)
    app.on_response_prepare.append(note_status)
    app.add_routes([*core_routes(service, control, feed), *layer_routes(layers, inviter), *routes(files)])
    app.add_routes(sleep_routes(sleep))
    app[PAGE_PATHS] = add_dialects(app, service, sleep) | frozenset(files)
    facts["routes"] = sorted(info["path"] for info in map(_info, app.router.resources()) if "path" in info)
    return app


def _info(resource: web.AbstractResource) -> Mapping[str, str]:
    return cast("Mapping[str, str]", resource.get_info())
