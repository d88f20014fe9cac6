"""What `relayline up` prints of its supervisor's events: one line each, as text or as JSON."""

from __future__ import annotations

import json
import shlex
from typing import Any

QUESTION = "What does shutil.copytree do?"  # the bundled model knows nothing but Python's documentation
BEGINNING = "def factorial(n):\n"


def line_of(event: dict[str, Any], *, as_json: bool) -> str:
    """Return the line for one event."""
    if as_json:
        return json.dumps(event)
    match event["event"]:
        case "process":
            return _process_line(event)
        case "remote":
            first = f" (copy {event['bring']} there first)" if event["bring"] else ""
            # A host that has joined before comes back by itself, as long as its process or its service runs.
            where = f"on {event['host']}, unless it still runs there" if event.get("again") else f"on {event['host']}"
            return f"{where}, run{first}:\n  {event['command']}"
        case "ready":
            return _ready_line(event)
        case _:
            return str(event.get("message", event))


def _ready_line(event: dict[str, Any]) -> str:
    """Return where clients connect; with stages on other hosts also whether they can from there."""
    try_it = f"try it:\n  {curl_of(event)}"
    reached = event.get("clients")
    if reached is None or reached:
        return f"ready: {reached or event['url']}/v1\n{try_it}"
    port = event["url"].rpartition(":")[2]
    return f"ready: {event['url']}/v1 (only for this machine; `--http 0.0.0.0:{port}` lets other hosts in)\n{try_it}"


def curl_of(event: dict[str, Any]) -> str:
    """Return a command that asks a pipeline which is ready something that most models can answer."""
    url = event.get("clients") or event["url"].replace(
        "//0.0.0.0:", "//127.0.0.1:"
    )  # that is not an address to connect to
    words = ["curl", "-s", f"{url}/v1/{'chat/' if event.get('chat', True) else ''}completions"]
    if event.get("needs_key"):
        words += ["-H", "Authorization: Bearer KEY"]
    body: dict[str, Any] = {"model": event["model"], "temperature": 0}
    if event.get("chat", True):
        body["messages"] = [{"role": "user", "content": QUESTION}]
    else:
        body |= {"prompt": BEGINNING, "max_tokens": 48}
    return shlex.join([*words, "-H", "Content-Type: application/json", "-d", json.dumps(body)])


def _process_line(event: dict[str, Any]) -> str:
    layers = event.get("layers")
    held = f"layers {layers[0]}-{layers[1] - 1} " if layers else ""
    who = f"pid {event['pid']}" if event["pid"] else "on its own host"
    again = f", restart {event['restarts']}" if event["restarts"] else ""
    return f"{event['name']:<12} ready  {held}{event['address']}  ({who}{again})"
