"""`relayline drain` and `relayline uncordon`: a host is freed of its layers for maintenance, and offered them again."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from relayline.deploy.cli.console_http import Coordinator, fetch, key_option, url_option
from relayline.deploy.cli.move import PATH, followed, moved_text
from relayline.deploy.cli.options import Name
from relayline.wire.common.errors import StartError

if TYPE_CHECKING:
    from relayline.deploy.launch.control import Launched

STAGES_PATH = "/v1/pipeline/stages"
WANTED = ("cuts", "layers", "stages", "move", "hosts")


@click.command("drain", short_help="Take a stage's layers away for maintenance, while serving.")
@click.argument("host", metavar="STAGE", type=Name())
@click.option("--json", "as_json", is_flag=True, help="Print the layers and the change as JSON at the end.")
@url_option
@key_option
def drain_command(host: str, as_json: bool, url: str, api_key: str, **_: Any) -> None:
    """Take away the layers of STAGE: its name, as `relayline status` shows it.

    A spare takes them over; without one, the other stages share them. Requests pause for the switch and go on with the
    same tokens. The stage's engine ends and frees its memory. Its process waits; you may end it for as long as you
    like. STAGE gets no layers until `relayline uncordon STAGE`, not even after a restart.

    If no other stage has room for the layers, this says so and changes nothing.
    """
    found = asyncio.run(_put(url, api_key, host, is_drained=True, tell=not as_json))
    move, is_moved = found["move"], found.pop("is_moved")
    if host in found["stages"]:
        problem = move["problem"] if move is not None else "another change came first"
        raise StartError(f"{host} is not drained, and nothing has changed: {problem}")
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif is_moved and move["state"] == "done" and host not in move["stages"]:
        holders = found["stages"]
        verb = "holds" if len(holders) == 1 else "hold"
        click.echo(f"{host} is drained; {', '.join(holders)} {verb} {moved_text(found)}")
    else:
        click.echo(f"{host} is drained; it held no layers")


@click.command("uncordon", short_help="Let a drained stage hold layers again.")
@click.argument("host", metavar="STAGE", type=Name())
@click.option("--json", "as_json", is_flag=True, help="Print the state of the stages as JSON.")
@url_option
@key_option
def uncordon_command(host: str, as_json: bool, url: str, api_key: str, **_: Any) -> None:
    """Let STAGE, by its name, hold layers again after `relayline drain`.

    If the other stages had shared its layers, it gets some within seconds. If a spare took its place, it becomes the
    spare.
    """
    found = asyncio.run(_put(url, api_key, host, is_drained=False, tell=False))
    del found["is_moved"]
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif host in found["stages"]:
        click.echo(f"{host} is not drained; it holds layers")
    elif found["hosts"][host]["here"]:
        click.echo(f"{host} may hold layers again")
    else:
        click.echo(f"{host} may hold layers again as soon as it is back")


async def _put(url: str, api_key: str, host: str, *, is_drained: bool, tell: bool) -> dict[str, Any]:
    """Return how it ended. `is_moved`: whether this has moved layers; `move` may be one that somebody made long ago."""
    async with Coordinator(url, api_key) as coordinator:
        found = await coordinator.put(f"{STAGES_PATH}/{quote(host, safe='')}", {"drained": is_drained}, WANTED)
        if not is_drained or host not in found["stages"]:
            return found | {"is_moved": False}
        return await followed(coordinator, found, WANTED, tell=tell) | {"is_moved": True}


async def added(url: str, api_key: str, name: str, *, is_spare: bool = False) -> None:
    """Let one more stage join a pipeline that serves, if it is none of its stages yet. Raises StartError."""
    async with Coordinator(url, api_key) as coordinator:
        found = await coordinator.get(PATH, WANTED)
        if name not in found["hosts"]:
            await coordinator.post(STAGES_PATH, {"name": name, "spare": is_spare}, WANTED)


def let_join(launched: Launched, name: str, *, is_spare: bool = False) -> None:
    """Do the same for a pipeline that runs on this machine. Raises StartError."""
    from relayline.deploy.launch.control import key_of

    asyncio.run(added(launched.state.url, key_of(launched), name, is_spare=is_spare))


def is_known(launched: Launched, name: str) -> bool:
    """Return whether a stage has its place in a pipeline that runs on this machine. Raises StartError."""
    from relayline.deploy.launch.control import key_of

    return name in fetch(launched.state.url, PATH, key_of(launched), WANTED)["hosts"]
