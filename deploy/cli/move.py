"""`relayline move`: gives the stages of a running pipeline other layers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from typing import Any

import click

from relayline.deploy.cli.console_http import ARGUMENT, Coordinator, key_option, name_argument, url_option
from relayline.deploy.cli.options import Line, parse_cuts
from relayline.deploy.launch.waiting import waits_text
from relayline.wire.common.errors import StartError, UsageError
from relayline.wire.common.texts import counted, layer_ranges

PATH = "/v1/pipeline/layers"
LOOK_EVERY_S = 0.2
STATE_LINES = {
    "cutting": "splitting the model again",
    "preparing": "stages load their new layers while they serve with the old ones",
    "settling": "requests pause",
    "switching": "stages take up their new layers",
}


def _read_cuts(ctx: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """As `parse_cuts`. Raises UsageError for a list in two words, of which the second would be a pipeline's name."""
    cuts, name = parse_cuts(ctx, parameter, text), ctx.params.get(ARGUMENT) or ""
    if text is not None and name.replace(",", "").isdigit():
        from relayline.deploy.launch.control import launched

        if all(one.state.name != name for one in launched(None, name)):
            raise UsageError(
                f"no pipeline {name!r} was launched here; a list has commas and no blanks: --cuts {text},{name}"
            )
    return cuts


@click.command("move", short_help="Give the stages other layers while serving.")
@name_argument
@click.option("--cuts", type=Line("layers"), callback=_read_cuts, help="First layer of each later stage, e.g. 8,16.")
@click.option("--json", "as_json", is_flag=True, help="Print the layers and the change as JSON at the end.")
@url_option
@key_option
def move_command(cuts: tuple[int, ...] | None, as_json: bool, url: str, api_key: str, **_: Any) -> None:
    """Give the stages of a running pipeline other layers. Without --cuts, show the present ones. The coordinator splits
    the model again, and each stage loads its new layers while it serves with the old ones. Then running requests pause,
    the stages switch, and the requests continue with the same tokens. No request is refused. A stage whose layers stay
    loads nothing. A failure before the switch changes nothing.

    The stages must have joined, and the coordinator must know the model. After `up` with a manifest, both are true.
    """
    found = asyncio.run(moved_layers(url, api_key, cuts, tell=not as_json))
    move = found["move"]
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif cuts is None or move is None:
        click.echo(_layers(found))
    elif move["state"] == "done":
        click.echo(moved_text(found))
    if cuts is not None and move is not None and move["state"] == "failed":
        raise StartError(f"layers were not moved, and nothing has changed: {move['problem']}")


def moved_text(found: dict[str, Any]) -> str:
    """Return the line about a finished change, otherwise the present layers."""
    move = found["move"]
    if move["state"] != "done":
        return _layers(found)
    kept = f"; {', '.join(move['keep'])} kept its layers" if move["keep"] else ""
    times = f"in {move['took_s']:.1f} s, of which requests paused {move['paused_s']:.2f} s"
    n_kept, n_again = move.get("kept_tokens", 0), move.get("replayed_tokens", 0)
    tokens = (
        f"; running requests kept {counted(n_kept, 'token')} and recomputed {n_again:,}" if n_kept or n_again else ""
    )
    return f"{_layers(found)}: moved {times}{kept}{tokens}"


def _layers(found: dict[str, Any]) -> str:
    return f"layers {layer_ranges(found['layers'])}"


async def moved_layers(url: str, api_key: str, cuts: tuple[int, ...] | None, *, tell: bool) -> dict[str, Any]:
    """Begin a change, if there are cuts, and return how it ended. Raises StartError, UsageError."""
    wanted = ("cuts", "layers", "move")
    async with Coordinator(url, api_key) as coordinator:
        if cuts is None:
            return await coordinator.get(PATH, wanted)
        found = await coordinator.put(PATH, {"cuts": cuts}, wanted)
        return await followed(coordinator, found, wanted, tell=tell)


async def followed(
    coordinator: Coordinator, found: dict[str, Any], wanted: Collection[str], *, tell: bool
) -> dict[str, Any]:
    """Follow a change that has begun, and return how it ended. Raises StartError, UsageError."""
    number, shown, told = found["move"]["number"], "", set()
    try:
        while (move := found["move"])["number"] == number and move["state"] in STATE_LINES:
            if tell and move["state"] != shown:
                shown = move["state"]
                click.echo(STATE_LINES[shown], err=True)
            for name, fetch in move.get("fetches", {}).items() if tell else ():
                if fetch["trouble"] and (name, fetch["trouble"]) not in told:
                    told.add((name, fetch["trouble"]))
                    click.echo(f"{name}: {waits_text(fetch['trouble'])}", err=True)
            await asyncio.sleep(LOOK_EVERY_S)
            found = await coordinator.get(PATH, wanted)
    except asyncio.CancelledError:  # Ctrl-C
        click.echo("the change goes on without this command; `relayline move` shows the layers", err=True)
        raise
    if move["number"] != number:
        raise UsageError("meanwhile another change of layers has begun; see `relayline move`")
    return found
