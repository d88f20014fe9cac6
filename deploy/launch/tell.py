"""The lines that `relayline up` prints for its supervisor's events, as text or as JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator
from typing import Any

from relayline.deploy.launch.inviting import for_a_while
from relayline.deploy.launch.state import ProcessRecord, url_to_show
from relayline.wire.common.phase import HostState
from relayline.wire.common.texts import named_layers
from relayline.wire.links.security import host_of, is_loopback

QUESTION = "What does shutil.copytree do?"  # the bundled model knows nothing but Python's documentation
DOCUMENTS = ("It copies a directory with all that is in it.", "It removes a file.")
BEGINNING = "def factorial(n):\n"
ENDING = "Ctrl-C ends it; with --detach it runs in the background"


def line_of(event: dict[str, Any], *, as_json: bool, is_here: bool = False) -> str:
    """Return the lines for one event; `is_here`: the pipeline ends with this command."""
    if as_json:
        return json.dumps(event)
    match event["event"]:
        case "process":
            return _process_line(event)
        case "remote":
            first = f" (copy {event['bring']} there first)" if event["bring"] else ""
            # A host that has joined before comes back by itself, as long as its process or its service runs.
            where = f"on {event['host']}, unless it still runs there" if event.get("again") else f"on {event['host']}"
            short = f"\n  {for_a_while(event['short'])}" if event.get("short") else ""
            return f"{where}, run{first}:\n  {event['command']}{short}"
        case "ready":
            return _ready_line(event) + (f"\n{ENDING}" if is_here else "")
        case _:
            return str(event.get("message", event))


def lines_for_hosts(records: Iterable[ProcessRecord], shown: set[str], *, as_json: bool) -> Iterator[str]:
    """Yield the lines for hosts that a starting pipeline waits for. `shown`: the commands that had theirs before."""
    for record in records:
        if record.command and record.state is HostState.WAITING and record.command not in shown:
            shown.add(record.command)
            told = {"event": "remote", "name": record.name, "host": record.host, "command": record.command}
            yield line_of({**told, "bring": "", "again": record.has_joined}, as_json=as_json)


def _ready_line(event: dict[str, Any]) -> str:
    """Return where clients connect and what to try; with stages on other hosts also whether they can from there."""
    reached, note = event.get("clients"), ""
    if reached is not None and not reached:
        listens, port = host_of(event["url"].partition("//")[2]), event["url"].rpartition(":")[2]
        every = "[::]" if listens == "0.0.0.0" else "0.0.0.0"  # of the other kind, if it is one already
        note = f" (only for this machine; `--http {every}:{port}` lets other hosts in)"
    address = _address(event)
    if reached is None and address != event["url"]:
        note = " (also at the other addresses of this machine)"
    lines = [f"ready: {address}/v1{note}", f"page:  {address}/", "try it:"]
    if event.get("chat", True) and not event.get("ranks"):
        lines.append("  relayline chat")
    if asleep := event.get("asleep"):
        lines.insert(0, f"asleep, because {event['awake_max']} may be awake at once: {', '.join(asleep)}")
    return "\n".join([*lines, f"  {curl_of(event)}"])


def _address(event: dict[str, Any]) -> str:
    return url_to_show(event["url"], event.get("clients") or "")


def curl_of(event: dict[str, Any]) -> str:
    """Return a command that asks a pipeline which is ready something that most models can answer."""
    address = _address(event)
    unchecked = "k" if address.startswith("https:") and is_loopback(host_of(address.partition("//")[2])) else ""
    route = "rerank" if event.get("ranks") else "chat/completions" if event.get("chat", True) else "completions"
    words = ["curl", f"-s{unchecked}", f"{address}/v1/{route}"]
    if event.get("needs_key"):
        words += ["-H", "Authorization: Bearer KEY"]
    body: dict[str, Any] = {"model": event["model"], "temperature": 0}
    if event.get("ranks"):
        body = {"model": event["model"], "query": QUESTION, "documents": list(DOCUMENTS)}
    elif event.get("chat", True):
        body["messages"] = [{"role": "user", "content": QUESTION}]
    else:
        body |= {"prompt": BEGINNING, "max_tokens": 48}
    return shlex.join([*words, "-H", "Content-Type: application/json", "-d", json.dumps(body)])


def _process_line(event: dict[str, Any]) -> str:
    layers = event.get("layers")
    held = f"{named_layers(*layers)} " if layers else ""
    who = f"pid {event['pid']}" if event["pid"] else "on its own host"
    again = f", restart {event['restarts']}" if event["restarts"] else ""
    return f"{event['name']:<12} ready  {held}{event['address']}  ({who}{again})"
