"""`relayline sleep` and `relayline wake`: a pipeline that nobody uses frees its memory, and loads again."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import click

from relayline.deploy.cli.console_http import Coordinator, key_option, name_argument, url_option

WANTED = ("is_sleeping", "state", "requests")
WAKE_TIMEOUT_S = 3_600.0  # the coordinator waits for stages as long as they get on with their loads


@click.command("sleep", short_help="Free the memory of a pipeline until the next request.")
@name_argument
@click.option("--json", "as_json", is_flag=True, help="Print the state as JSON.")
@url_option
@key_option
def sleep_command(as_json: bool, url: str, api_key: str, **_: Any) -> None:
    """Let all stages free their weights and caches.

    The processes stay, and so do their memberships. The next request loads the layers again and is answered then. If
    requests run, they are answered first, and new ones are too: it sleeps as soon as none runs or waits.
    """
    found = asyncio.run(_post(url, api_key, "/sleep"))
    click.echo(json.dumps(found, indent=2) if as_json else sleep_line(found))


def sleep_line(found: dict[str, Any]) -> str:
    """Return what a pipeline does that was told to sleep, by the answer to POST /sleep."""
    if found["is_sleeping"]:
        return "sleeps: the memory is free, and the next request wakes it"
    if found["state"] == "waking":
        return "it wakes: it sleeps again once its stages have loaded and no request runs or waits"
    if not found["requests"]:
        return "no request runs: it sleeps in a moment, or once layers have moved"
    noun = "request runs" if found["requests"] == 1 else "requests run"
    return f"{found['requests']} {noun} or wait: it sleeps as soon as there is none"


@click.command("wake", short_help="Load the layers of a pipeline that sleeps.")
@name_argument
@click.option("--json", "as_json", is_flag=True, help="Print the state as JSON.")
@url_option
@key_option
def wake_command(as_json: bool, url: str, api_key: str, **_: Any) -> None:
    """Let all stages load their layers now, so that the next request need not wait for that."""
    found = asyncio.run(_post(url, api_key, "/wake_up"))
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif found.get("woke_in_s") is None:
        click.echo("awake")
    else:
        click.echo(f"awake; the last wake took {found['woke_in_s']:.1f} s")


async def _post(url: str, api_key: str, path: str) -> dict[str, Any]:
    async with Coordinator(url, api_key, timeout_s=WAKE_TIMEOUT_S) as coordinator:
        return await coordinator.post(path, {}, WANTED)
