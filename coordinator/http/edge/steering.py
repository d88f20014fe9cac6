"""Who may change a running pipeline: whoever may use the API, except with a key whose options say `steers=no`."""

from __future__ import annotations

import re

from aiohttp import hdrs, web

from relayline.coordinator.http.edge.clients import KEY
from relayline.coordinator.http.edge.errors import HttpRefusal

LOGS_PATH = "/v1/pipeline/logs"  # is read, and only by those who look after the pipeline
SLEEP_PATHS = ("/sleep", "/wake_up", "/is_sleeping")  # of one pipeline; vLLM's, without /v1
_READS = (hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS)
_STEERING = re.compile(r"(/v1)?/((pipeline|telemetry|requests)(/.*)?|sleep|wake_up)")


def check_steers(request: web.Request) -> None:
    """Raise HttpRefusal if the request's key may not steer. Every handler that changes a pipeline calls it."""
    key = request.get(KEY)
    if key is not None and key.options.steers == "no":
        raise HttpRefusal(403, "this API key may not steer the pipeline (steers=no)", "forbidden")


def is_steering(method: str, path: str) -> bool:
    """Return whether a route of a pipeline, as a gateway passes it on, calls `check_steers` there."""
    plain = plain_path(path)
    return plain == LOGS_PATH or (method not in _READS and _STEERING.fullmatch(plain) is not None)


def plain_path(path: str) -> str:
    """Return a path without doubled slashes, and without one at its end."""
    return "/" + "/".join(part for part in path.split("/") if part)
