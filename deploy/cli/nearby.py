"""`relayline nearby`: the pipelines that announce themselves on the local network."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import click

from relayline.deploy.cli.options import FloatRange

if TYPE_CHECKING:
    from relayline.wire.links.announcement import Announcement

WAIT_S = 2.5
WAIT_MAX_S = 60.0


@click.command("nearby", short_help="List pipelines on the local network that hosts may join.")
@click.option("--wait", type=FloatRange(0.1, WAIT_MAX_S), default=WAIT_S, show_default=True, help="Seconds to listen.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list instead of a table.")
@click.pass_context
def nearby_command(ctx: click.Context, wait: float, as_json: bool) -> None:
    """List the pipelines that announce themselves on the local network: name, model, address, and whether stages are
    awaited. `relayline join CODE` joins one; the code is what `relayline up` prints on its machine.

    Anybody on the network can announce anything; what `join` trusts is the code alone. Exit code 1 if none was found.
    """
    from relayline.stage.joining.nearby import pipelines_nearby
    from relayline.wire.links.announcement import NONE_NEARBY

    found = pipelines_nearby(wait)
    if as_json:
        click.echo(json.dumps([_facts(each) for each in found], indent=2))
    else:
        click.echo("\n".join(table(found)) if found else NONE_NEARBY)
    if not found:
        ctx.exit(1)


def _facts(found: Announcement) -> dict[str, object]:
    return dataclasses.asdict(found) | {"state": found.state}


def table(found: list[Announcement]) -> list[str]:
    """Return a heading, and a line for each pipeline."""
    from relayline.wire.links.security import address_of

    rows = [("pipeline", "model", "address", "state")]
    for each in found:
        address = " ".join(address_of(host, each.port) for host in each.addresses)
        rows.append((each.pipeline, each.model or "-", address, each.state))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
