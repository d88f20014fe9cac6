"""`relayline cancel` and `relayline trace-level`: ends one request, and changes how much is traced, while serving."""

from __future__ import annotations

import asyncio
import json
import urllib.parse
from typing import Any

import click

from relayline.deploy.cli.console_http import Coordinator, key_option, url_option
from relayline.deploy.cli.options import FloatRange, Name
from relayline.wire.common.errors import UsageError
from relayline.wire.telemetry.config import LEVEL_NAMES

TELEMETRY_PATH = "/v1/telemetry"


@click.command("cancel", short_help="End one request that runs or waits.")
@click.argument("request_id", type=Name())
@url_option
@key_option
def cancel_command(request_id: str, url: str, api_key: str, **_: Any) -> None:
    """End a request that runs or waits for a lane. REQUEST_ID is the answer's id, or its x-request-id header; the page
    and `relayline trace` show both.

    Its client gets the error `request_cancelled`, and its lane is free at once. Other requests go on.
    """
    wanted = urllib.parse.quote(request_id.encode(errors="surrogateescape"), safe="")

    async def post() -> dict[str, Any]:
        async with Coordinator(url, api_key) as coordinator:
            return await coordinator.post(f"/v1/requests/{wanted}/cancel", {}, ("id", "cancelled_choices"))

    found = asyncio.run(post())
    click.echo(f"{found['id']} is cancelled")


@click.command("trace-level", short_help="Show or change how much is traced.")
@click.argument("level", type=click.Choice(LEVEL_NAMES), required=False)
@click.option("--for", "for_s", type=FloatRange(1, 86_400), help="Seconds; then the level before it comes back.")
@click.option("--sample", type=FloatRange(0, 1), help="Share of requests that are traced.")
@click.option("--json", "as_json", is_flag=True, help="Print the settings as JSON.")
@url_option
@key_option
def trace_level_command(
    level: str | None, for_s: float | None, sample: float | None, as_json: bool, url: str, api_key: str, **_: Any
) -> None:
    """Change how much a running pipeline traces, at the coordinator and at all stages. Without LEVEL, show it.

    off: nothing. summary: one trace per request. batches: also each native step. frames: also each frame. Requests go
    on. After a restart the level is the one of the manifest or the flags again.
    """
    if for_s is not None and level is None:
        raise UsageError("--for says for how long LEVEL holds; give a LEVEL")
    wanted = {"level": level, "for_s": for_s, "sample_ratio": sample}
    body = {name: value for name, value in wanted.items() if value is not None}

    async def ask() -> dict[str, Any]:
        async with Coordinator(url, api_key) as coordinator:
            keys = ("level", "sample_ratio", "stages")
            return await (
                coordinator.put(TELEMETRY_PATH, body, keys) if body else coordinator.get(TELEMETRY_PATH, keys)
            )

    found = asyncio.run(ask())
    click.echo(json.dumps(found) if as_json else level_text(found))


def level_text(found: dict[str, Any]) -> str:
    """Return the line about the settings that GET /v1/telemetry gives."""
    parts = [f"level {found['level']}"]
    if found.get("back_to"):
        parts[0] += f" for {found['back_in_s']:.0f} s more, then {found['back_to']}"
    parts.append(f"{found['sample_ratio']:.0%} of requests")
    others = [
        f"stage {at}: {level or 'no answer'}" for at, level in enumerate(found["stages"]) if level != found["level"]
    ]
    return "; ".join([*parts, *others])
