"""Routes of telemetry: the life of one request, and how much is traced."""

from __future__ import annotations

import time

import msgspec
from aiohttp import web

from relayline.coordinator.engine.telemetry_control import TelemetryControl
from relayline.coordinator.http.edge.body import read_small
from relayline.coordinator.http.edge.errors import plain_body
from relayline.coordinator.http.edge.middleware import json_response
from relayline.coordinator.http.requests.bodies import TelemetryBody, decode_body

LAST = "last"  # means the request that ended last


class TelemetryHandlers:
    """The handlers of one application."""

    def __init__(self, control: TelemetryControl) -> None:
        self._control = control

    async def trace(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/traces/{id}: a request by x-request-id, completion id or choice id, or the last one."""
        wanted = request.match_info["id"]
        found = await self._control.trace(None if wanted == LAST else wanted, time.monotonic_ns())
        if found is not None:
            return json_response(msgspec.json.encode(found))
        text = (
            "no request is remembered: none has come since the start, or the trace level is off"
            if wanted == LAST
            else f"no request {wanted[:200]!r} is remembered; give its x-request-id or its answer's id"
        )
        return json_response(msgspec.json.encode(plain_body(404, text, "trace_not_found")), 404)

    async def settings(self, _request: web.Request) -> web.StreamResponse:
        """GET /v1/telemetry."""
        return json_response(msgspec.json.encode(await self._control.describe()))

    async def change(self, request: web.Request) -> web.StreamResponse:
        """PUT /v1/telemetry: change level or sample ratio, here and at every stage."""
        body = decode_body(await read_small(request), TelemetryBody)
        return json_response(msgspec.json.encode(await self._control.change(body.level, body.sample_ratio)))
