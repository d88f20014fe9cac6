"""What `relayline up MANIFEST` prints of its supervisor's events: one line each, as text or as JSON."""

from __future__ import annotations

import json
from typing import Any


def line_of(event: dict[str, Any], *, as_json: bool) -> str:
    """Return the line for one event."""
    if as_json:
        return json.dumps(event)
    match event["event"]:
        case "process":
            return _process_line(event)
        case "remote":
            first = f" (copy {event['bring']} there first)" if event["bring"] else ""
            return f"on {event['host']}, run{first}:\n  {event['command']}"
        case "ready":
            return _ready_line(event)
        case _:
            return str(event.get("message", event))


def _ready_line(event: dict[str, Any]) -> str:
    """Return where clients connect; with stages on other hosts also whether they can from there."""
    reached = event.get("clients")
    if reached is None or reached:
        return f"ready: {reached or event['url']}/v1"
    port = event["url"].rpartition(":")[2]
    return f"ready: {event['url']}/v1 (for this machine alone; `--http 0.0.0.0:{port}` lets other hosts in)"


def _process_line(event: dict[str, Any]) -> str:
    layers = event.get("layers")
    held = f"layers {layers[0]}-{layers[1] - 1} " if layers else ""
    who = f"pid {event['pid']}" if event["pid"] else "on its own host"
    again = f", restart {event['restarts']}" if event["restarts"] else ""
    return f"{event['name']:<12} ready  {held}{event['address']}  ({who}{again})"
