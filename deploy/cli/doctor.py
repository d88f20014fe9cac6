"""`relayline doctor`: each thing that a pipeline needs, ok or not, and what to do."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.text import Text

from relayline.deploy.cli.options import FloatRange
from relayline.deploy.cli.paths import FileToRead
from relayline.wire.common.texts import counted

if TYPE_CHECKING:
    from relayline.deploy.doctor.report import Finding

COLORS = {"ok": "green", "warning": "yellow", "failure": "bold red"}


@click.command("doctor", short_help="Check this machine or a manifest, and name what is missing.")
@click.argument("manifest", type=FileToRead(), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list instead of lines.")
@click.option(
    "--timeout", type=FloatRange(0.1, 3_600), default=30.0, show_default=True, help="Most seconds for each check."
)
@click.option("--deep", is_flag=True, help="Read all split and fetched files, also those that look unchanged.")
@click.pass_context
def doctor_command(ctx: click.Context, /, manifest: Path | None, as_json: bool, timeout: float, deep: bool) -> None:
    """Check this machine and, with MANIFEST, everything that the manifest names. Each line is ok, a warning or a
    failure.

    Exit code 1 if there is any failure. This changes nothing, and contacts only what the manifest names. For the
    MANIFEST of a gateway it checks each pipeline behind it, and adds up the needs of all on this machine.
    """
    from relayline.deploy.doctor.examine import examine_machine, examine_manifest
    from relayline.deploy.doctor.gateway import examine_gateway
    from relayline.deploy.launch.context import with_usual_context
    from relayline.deploy.launch.control import by_name
    from relayline.deploy.launch.gateway.beside import with_contexts
    from relayline.deploy.launch.gateway.pipelines import pipelines_behind
    from relayline.deploy.launch.here import at_home
    from relayline.deploy.launch.lanes import with_usual_lanes
    from relayline.deploy.manifest import load_manifest
    from relayline.deploy.manifest.gateway import is_gateway, load_gateway
    from relayline.deploy.manifest.settings import open_context

    if manifest is None:
        findings = asyncio.run(examine_machine(timeout, deep=deep))
    elif is_gateway(manifest):
        gateway = load_gateway(manifest)
        prepared = [each.prepared(lambda one: at_home(with_usual_lanes(one))) for each in pipelines_behind(gateway)]
        pipelines = tuple(with_contexts(gateway, prepared))
        findings = asyncio.run(examine_gateway(gateway, pipelines, by_name(manifest), timeout, deep=deep))
    else:
        loaded = at_home(with_usual_lanes(load_manifest(manifest)))
        loaded = with_usual_context(loaded, open_context(loaded.spec))
        findings = asyncio.run(examine_manifest(loaded, by_name(manifest).get(loaded.name), timeout, deep=deep))
    if as_json:
        click.echo(
            json.dumps([dataclasses.asdict(found) | {"outcome": found.outcome.value} for found in findings], indent=2)
        )
    else:
        _print(findings)
    if any(found.outcome.value == "failure" for found in findings):
        ctx.exit(1)


def _print(findings: list[Finding]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    width = max(len(found.check) for found in findings)
    for found in findings:
        outcome = found.outcome.value
        console.print(Text.assemble((f"{outcome:<8}", COLORS[outcome]), f" {found.check:<{width}}  {found.found}"))
        if found.remedy:
            console.print(Text(f"{'':<8} {'':<{width}}  -> {found.remedy}"))
    counts = {name: sum(found.outcome.value == name for found in findings) for name in COLORS}
    wrong = ", ".join(counted(counts[name], name) for name in ("warning", "failure"))
    console.print(f"{counts['ok']} ok, {wrong}")
