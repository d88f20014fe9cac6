"""`relayline drain` and `relayline uncordon`: a host is freed of its layers for maintenance, and offered them again."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from relayline.deploy.cli.console_http import Coordinator, key_option, url_option
from relayline.deploy.cli.move import PATH, followed, moved_text
from relayline.wire.common.errors import StartError

if TYPE_CHECKING:
    from relayline.deploy.launch.control import Launched

STAGES_PATH = "/v1/pipeline/stages"
WANTED = ("cuts", "layers", "stages", "move", "hosts")


@click.command("drain", short_help="Free a host of its layers for maintenance, while requests go on.")
@click.argument("host")
@click.option("--json", "as_json", is_flag=True, help="Print the layers and the change as JSON at the end.")
@url_option
@key_option
def drain_command(host: str, as_json: bool, url: str, api_key: str, **_: Any) -> None:
    """Free HOST, a stage by its name, of its layers.

    A spare takes them over, or else the other stages share them. Requests pause for the switch and go on with the same
    tokens. The stage's engine ends and gives its memory back; its process waits, and may be ended for as long as you
    like. HOST gets no layers until `relayline uncordon HOST`, also over a restart.

    Where nobody has room for its layers that is said, and nothing changes.
    """
    found = asyncio.run(_put(url, api_key, host, is_drained=True, tell=not as_json))
    move = found["move"]
    if host in found["stages"]:
        problem = move["problem"] if move is not None else "another change came between"
        raise StartError(f"{host} is not drained, and nothing has changed: {problem}")
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif move is not None and move["state"] == "done" and host not in move["stages"]:
        holders = found["stages"]
        verb = "holds" if len(holders) == 1 else "hold"
        click.echo(f"{host} is drained; {', '.join(holders)} {verb} {moved_text(found)}")
    else:
        click.echo(f"{host} is drained; it held no layers")


@click.command("uncordon", short_help="Offer a host layers again that was drained.")
@click.argument("host")
@click.option("--json", "as_json", is_flag=True, help="Print what is known of the stages as JSON.")
@url_option
@key_option
def uncordon_command(host: str, as_json: bool, url: str, api_key: str, **_: Any) -> None:
    """Offer HOST, a stage by its name, layers again after `relayline drain`.

    It gets some within seconds if it is there and the others had shared its layers. Where another stage took its place
    it stands by as a spare.
    """
    found = asyncio.run(_put(url, api_key, host, is_drained=False, tell=False))
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif host in found["stages"]:
        click.echo(f"{host} is not drained; it holds layers")
    elif found["hosts"][host]["here"]:
        click.echo(f"{host} is offered layers again")
    else:
        click.echo(f"{host} is offered layers again as soon as it is there")


async def _put(url: str, api_key: str, host: str, *, is_drained: bool, tell: bool) -> dict[str, Any]:
    async with Coordinator(url, api_key) as coordinator:
        found = await coordinator.put(f"{STAGES_PATH}/{quote(host, safe='')}", {"drained": is_drained}, WANTED)
        if not is_drained or host not in found["stages"]:
            return found
        return await followed(coordinator, found, WANTED, tell=tell)


async def added(url: str, api_key: str, name: str) -> None:
    """Let one more stage join a pipeline that serves, if it is none of its stages yet. Raises StartError."""
    async with Coordinator(url, api_key) as coordinator:
        found = await coordinator.get(PATH, WANTED)
        if name not in found["hosts"]:
            await coordinator.post(STAGES_PATH, {"name": name}, WANTED)


def let_join(launched: Launched, name: str) -> None:
    """Do the same for a pipeline that runs on this machine. Raises StartError."""
    from relayline.deploy.launch.control import key_of

    asyncio.run(added(launched.state.url, key_of(launched), name))
