"""`relayline restart`: the pipelines of a gateway start again, one after the other, while their replicas answer."""

from __future__ import annotations

from pathlib import Path

import click

from relayline.deploy.cli.console_http import names_here
from relayline.deploy.cli.control import state_dir_option
from relayline.deploy.cli.options import Name
from relayline.wire.common.errors import UsageError


@click.command("restart", short_help="Start a gateway's pipelines again, one after the other.")
@click.argument("name", type=Name(), shell_complete=names_here)
@click.argument("pipelines", type=Name(), nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
@state_dir_option
def restart_command(name: str, pipelines: tuple[str, ...], as_json: bool, state_dir: Path | None) -> None:
    """Start the PIPELINES behind the gateway NAME again, without names all that `up` started for it.

    They go one after the other. Each gets no new requests, ends its running ones, and starts again, with its manifest
    of now and the relayline that is installed now. When it serves, the next one follows. So replicas answer throughout.
    The clients of a pipeline without a replica get 503 until it serves again. If one does not come up, those behind it
    are left as they are.
    """
    from relayline.deploy.cli.apply_gateway import change
    from relayline.deploy.launch.board import unlike_manifest
    from relayline.deploy.launch.control import find
    from relayline.deploy.launch.gateway.change import difference
    from relayline.deploy.launch.gateway.plan import plan_gateway
    from relayline.deploy.manifest.gateway import is_gateway, load_gateway

    launched = find(name, state_dir)
    if launched is None or not launched.is_running:
        raise UsageError(f"{name} does not run here")
    directory, own = launched.directory, launched.state.name
    if not is_gateway(directory.manifest):
        raise UsageError(
            f"{own} is one pipeline, and its clients would wait; run `relayline down {own}`, then `relayline up` again"
        )
    manifest = load_gateway(directory.manifest)
    here = [member.name for member in manifest.members() if member.manifest is not None]
    asked = [each.removeprefix(f"{own}-") if each not in here else each for each in pipelines] or here
    if strange := [each for each in asked if each not in here]:
        raise UsageError(f"{own} has started no pipeline {strange[0]!r}; it has {', '.join(here) or 'none'}")
    plan = plan_gateway(manifest, Path(launched.state.manifest), own, directory.path)
    change(plan, launched, difference(manifest, manifest, unlike_manifest(launched.state)), asked, as_json=as_json)
