"""`relayline up` of a pipeline that runs already: the difference is shown, and applied where only layers changed."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import click

from relayline.deploy.cli.console_http import fetch
from relayline.deploy.cli.drain import added
from relayline.deploy.cli.move import PATH, moved_layers, moved_text
from relayline.deploy.launch.control import Launched, key_of
from relayline.deploy.launch.difference import Difference, difference
from relayline.deploy.launch.inviting import for_a_while, fresh_line
from relayline.deploy.launch.prepare import find_model, override
from relayline.deploy.launch.run import Launch
from relayline.deploy.launch.state import StateDir
from relayline.deploy.launch.take_on import start_more
from relayline.deploy.manifest import Manifest, load_manifest
from relayline.wire.common.errors import StartError


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A serving pipeline, and how its manifest differs from the running one."""

    launched: Launched
    running: Manifest
    differs: Difference

    @property
    def restart_fields(self) -> str:
        """The fields that take a new start, empty for none."""
        return ", ".join(change.field for change in self.differs.others)


def found_difference(to_start: Launch, directory: StateDir) -> Found | None:
    """Compare a manifest with the pipeline that serves in `directory`; None where none does."""
    state = directory.load()
    launched = Launched(directory, state) if state is not None else None
    if launched is None or not launched.is_running:
        return None
    url = launched.state.url
    if not url or not launched.phase.is_up:
        return None  # it starts or ends: the lock says so
    found = fetch(url, PATH, key_of(launched), ("cuts", "layers", "stages", "hosts"))
    wanted = override(to_start.manifest, {"model": {"path": str(find_model(to_start.manifest).absolute())}})
    running = load_manifest(directory.manifest)
    n_layers = found["layers"][-1][1]
    differs = difference(running, wanted, tuple(found["cuts"]), n_layers, holders=found["stages"], known=found["hosts"])
    return Found(launched, running, differs)


def applied(to_start: Launch, directory: StateDir, *, is_dry: bool, as_json: bool, restarts: str = "") -> bool:
    """Bring a serving pipeline to the state of its manifest.

    Returns False where none serves in `directory`. With `is_dry` only show the changes, even where none runs.
    `restarts` as in `show_difference`. Raises StartError for changes that need a restart.
    """
    state = directory.load()
    if is_dry and (state is None or not Launched(directory, state).is_running):
        _show_plan(to_start, as_json=as_json)
        return True
    found = found_difference(to_start, directory)
    if found is None:
        return False
    launched, differs = found.launched, found.differs
    name, url, key = launched.state.name, launched.state.url, key_of(launched)
    show_difference(name, differs, is_dry=is_dry, as_json=as_json, restarts=restarts)
    if is_dry:
        return True
    if differs.others:
        why = differs.refusal or f"{found.restart_fields} cannot change while it serves"
        or_so = ", or" if differs.refusal else ";"
        raise StartError(
            f"{name} runs, and nothing was changed: {why}{or_so} `relayline restart {name}` starts it again with its "
            f"manifest (for other flags: `relayline down {name}`, then `up`), or start another one with --name"
        )
    if differs.added:
        _take_on(launched, found.running, differs, url, key, as_json=as_json)
    if differs.layers:
        after = asyncio.run(moved_layers(url, key, differs.cuts, tell=not as_json))
        click.echo(json.dumps({"event": "moved", **after}) if as_json else moved_text(after))
        if after["move"]["state"] == "failed":
            raise StartError(f"layers were not moved, and nothing has changed: {after['move']['problem']}")
    return True


def _take_on(launched: Launched, running: Manifest, differs: Difference, url: str, key: str, *, as_json: bool) -> None:
    """Let more stages join a running pipeline: start those of this machine, and print the line for other hosts."""
    stages = differs.added
    for stage in stages:
        asyncio.run(added(url, key, stage.name, is_spare=stage.name in differs.spares))
    if here := [stage for stage in stages if stage.is_local]:
        start_more(launched, running, here)
    for stage in stages:
        line, short = ("", "") if stage.is_local else fresh_line(launched, stage.name, stage.host)
        if as_json:
            event = {"event": "added", "name": stage.name, "host": stage.host, "command": line, "short": short}
            click.echo(json.dumps(event))
        elif line:
            click.echo(f"on {stage.host}, run:\n  {line}\n  {for_a_while(short)}")


def show_difference(name: str, differs: Difference, *, is_dry: bool, as_json: bool, restarts: str) -> None:
    """Print what differs; `restarts`: of a pipeline behind a gateway, what changes that need a restart do."""
    if as_json:
        changes = {"layers": differs.layers, "others": differs.others}
        differences = {key: [dataclasses.asdict(change) for change in found] for key, found in changes.items()}
        rest = {"added": [stage.name for stage in differs.added], "cuts": differs.cuts, "dry_run": is_dry}
        rest["unlisted"] = differs.unlisted
        click.echo(json.dumps({"event": "difference", "name": name, **differences, **rest}))
        return
    if not differs.layers and not differs.others and not differs.added:
        click.echo(f"{name} already runs with these settings; nothing to change")
    for stays in differs.unlisted:
        click.echo(
            f"stages[{stays}]: was added while it served, and is not in the manifest: the next start leaves it out"
        )
    for stage in differs.added:
        part, then = ("spares", "stands by") if stage.name in differs.spares else ("stages", "gets layers")
        click.echo(f"{part}[{stage.name}] on {stage.host}: joins while the pipeline serves, and {then}")
    for change in differs.layers:
        click.echo(f"{change}: moves while it serves")
    for change in differs.others:
        click.echo(f"{name}: {change}: {restarts}" if restarts else f"{change}: needs a new start")


def _show_plan(to_start: Launch, *, as_json: bool) -> None:
    from relayline.deploy.cli.plan import make_plan
    from relayline.deploy.launch.stage_checks import check_stage_devices
    from relayline.deploy.planning import report

    check_stage_devices(to_start.manifest)
    plan = make_plan(to_start.manifest, quiet=as_json)
    if as_json:
        click.echo(json.dumps({"event": "plan", **report.as_json(plan)}))
    else:
        click.echo(f"{to_start.manifest.name} does not run; it would start like this:")
        report.show(plan)
