"""Routes of single requests and of telemetry: the life of one and its end, and how much is traced."""

from __future__ import annotations

import logging
import time

from aiohttp import web

from relayline.coordinator.engine.telemetry_control import TelemetryControl
from relayline.coordinator.http.edge.body import read_small
from relayline.coordinator.http.edge.errors import plain_body
from relayline.coordinator.http.edge.middleware import response_of
from relayline.coordinator.http.edge.steering import check_steers
from relayline.coordinator.http.requests.bodies import TelemetryBody, decode_body
from relayline.wire.common.errors import InvalidRequestError, NotReadyError, RequestCancelledError
from relayline.wire.common.logs import LogLine, recent_lines
from relayline.wire.common.texts import whole_number

log = logging.getLogger("relayline.http")

LINES = 100  # of a log
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
            return response_of(found)
        if wanted != LAST:
            return _not_found(wanted)
        text = "no request is remembered: none has come since the start, or the trace level is off"
        return response_of(plain_body(404, text, "trace_not_found"), 404)

    async def settings(self, _request: web.Request) -> web.StreamResponse:
        """GET /v1/telemetry."""
        return response_of(await self._control.describe())

    async def change(self, request: web.Request) -> web.StreamResponse:
        """PUT /v1/telemetry: change level or sample ratio, here and at every stage."""
        check_steers(request)
        body = decode_body(await read_small(request), TelemetryBody)
        changed = await self._control.change(body.level, body.sample_ratio, body.for_s)
        return response_of(changed)

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/requests/{id}/cancel: end a request that runs or waits; its client gets `request_cancelled`."""
        check_steers(request)
        wanted = request.match_info["id"]
        record = self._control.observer.log.find(wanted)
        if record is None:
            return _not_found(wanted)
        n_choices = record.stop(RequestCancelledError("the request was cancelled by those who run this server"))
        if not n_choices:
            state = "has ended" if record.ended_ns else "is not admitted yet"
            text = f"request {wanted[:200]!r} {state}, so there is nothing to cancel"
            return response_of(plain_body(409, text, "request_not_running"), 409)
        log.info("request cancelled", extra={"fields": {"request": record.request_id, "from": request.remote or ""}})
        found = {"id": record.completion_id or record.request_id, "cancelled_choices": n_choices}
        return response_of(found)

    async def logs(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/pipeline/logs: the latest log lines of this process, or with `?stage=N` of a stage, oldest first."""
        check_steers(request)
        text = request.query.get("stage")
        if text is None:
            lines: list[LogLine] | None = recent_lines(LINES)
        else:
            stages = self._control.stages()
            index = whole_number(text, 3)
            if index is None:
                raise InvalidRequestError.of_field("stage", "must be a stage's number, in layer order from 0")
            if index >= len(stages):
                raise NotReadyError(f"stage {index} is not connected now; the coordinator's own log may say why")
            lines = await stages[index].logs(LINES)
        if lines is None:
            raise NotReadyError(f"stage {text} does not answer, or is of a version that does not tell its log")
        found = {"lines": [line._asdict() for line in lines]}
        return response_of(found, headers={"Cache-Control": "no-store"})


def _not_found(wanted: str) -> web.Response:
    text = f"no request {wanted[:200]!r} is remembered; give its x-request-id or its answer's id"
    return response_of(plain_body(404, text, "trace_not_found"), 404)
