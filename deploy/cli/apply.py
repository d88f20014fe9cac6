"""`relayline up` of a pipeline that runs already: the difference is shown, and applied where only layers changed."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import click

from relayline.deploy.cli.console_http import fetch
from relayline.deploy.cli.move import PATH, moved_layers, moved_text
from relayline.deploy.launch.control import Launched, key_of
from relayline.deploy.launch.difference import Difference, difference
from relayline.deploy.launch.prepare import find_model, override
from relayline.deploy.launch.run import Launch
from relayline.deploy.launch.state import StateDir
from relayline.deploy.manifest import load_manifest
from relayline.wire.common.errors import StartError
from relayline.wire.common.phase import Phase


def applied(what: Launch, directory: StateDir, *, is_dry: bool, as_json: bool) -> bool:
    """Bring a serving pipeline to the state of its manifest.

    Returns False where none serves in `directory`. With `is_dry` only show the changes, even where none runs. Raises
    StartError for changes that need a restart.
    """
    state = directory.load()
    launched = Launched(directory, state) if state is not None else None
    if launched is None or not launched.is_running:
        if is_dry:
            _show_plan(what, as_json=as_json)
        return is_dry
    url, key = launched.state.url, key_of(launched)
    if not url or launched.phase not in (Phase.READY, Phase.RECOVERING):
        return False  # it starts or ends: the lock says so
    found = fetch(url, PATH, key, ("cuts", "layers"))
    wanted = override(what.manifest, {"model": {"path": str(find_model(what.manifest).absolute())}})
    differs = difference(load_manifest(directory.manifest), wanted, tuple(found["cuts"]), found["layers"][-1][1])
    name = launched.state.name
    _show(name, differs, is_dry=is_dry, as_json=as_json)
    if is_dry:
        return True
    if differs.others:
        fields = ", ".join(change.field for change in differs.others)
        raise StartError(
            f"{name} runs, and nothing was changed: {fields} cannot change while it serves; `relayline down {name}`, "
            "then `up` again, or start another one with --name"
        )
    if differs.layers:
        after = asyncio.run(moved_layers(url, key, differs.cuts, tell=not as_json))
        click.echo(json.dumps({"event": "moved", **after}) if as_json else moved_text(after))
        if after["move"]["state"] == "failed":
            raise StartError(f"layers were not moved, and nothing has changed: {after['move']['problem']}")
    return True


def _show(name: str, differs: Difference, *, is_dry: bool, as_json: bool) -> None:
    if as_json:
        changes = {"layers": differs.layers, "others": differs.others}
        said = {key: [dataclasses.asdict(change) for change in found] for key, found in changes.items()}
        click.echo(json.dumps({"event": "difference", "name": name, **said, "cuts": differs.cuts, "dry_run": is_dry}))
        return
    if not differs.layers and not differs.others:
        click.echo(f"{name} already runs as the manifest says; nothing to change")
    for change in differs.layers:
        click.echo(f"{change}: moves while it serves")
    for change in differs.others:
        click.echo(f"{change}: takes a new start")


def _show_plan(what: Launch, *, as_json: bool) -> None:
    from rich.console import Console

    from relayline.deploy.cli.plan import make_plan
    from relayline.deploy.planning import report

    plan = make_plan(what.manifest, quiet=as_json)
    if as_json:
        click.echo(json.dumps({"event": "plan", **report.as_json(plan)}))
    else:
        click.echo(f"{what.manifest.name} does not run; it would be started so:")
        report.show(plan, Console())
