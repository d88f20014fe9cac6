"""`relayline restart`: a pipeline starts again in place; a gateway's start again one after the other, while their
replicas answer.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from relayline.deploy.cli.console_http import names_here
from relayline.deploy.cli.control import state_dir_option
from relayline.deploy.cli.options import Name
from relayline.wire.common.errors import StartError, UsageError
from relayline.wire.common.files import write_again
from relayline.wire.common.phase import HostState, Phase

if TYPE_CHECKING:
    from relayline.deploy.launch.control import Launched
    from relayline.deploy.launch.state import LaunchState

LOOK_EVERY_S = 0.2


@click.command("restart", short_help="Start a pipeline again in place, or those of a gateway in turn.")
@click.argument("name", type=Name(), required=False, shell_complete=names_here)
@click.argument("pipelines", type=Name(), nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
@state_dir_option
def restart_command(name: str | None, pipelines: tuple[str, ...], as_json: bool, state_dir: Path | None) -> None:
    """Start a pipeline again with its manifest of now, the flags that `up` was given, and the relayline that is
    installed now. NAME is the pipeline's name or its manifest; the default is the only one that runs.

    First the manifest is checked and a model of the hub is downloaded, while the pipeline serves. If that finds a
    mistake, nothing changes. Else running requests end, new ones are refused until it serves again, and hosts that have
    joined stay. If the new start fails, for example because of too little memory, the pipeline starts as it was before.
    `relayline up MANIFEST --dry-run` shows beforehand what differs.

    NAME may be a gateway. Then the PIPELINES behind it that `up` started, or all, start again one after the other. Each
    gets no new requests, ends its running ones, and starts again. When it serves, the next one follows. So replicas
    answer throughout. The clients of a pipeline without a replica get 503 until it serves again. If one cannot start,
    it starts as it was before, and the next ones are left as they are.
    """
    from relayline.deploy.launch.control import find
    from relayline.deploy.manifest.gateway import is_gateway

    launched = find(name, state_dir)
    if launched is None:
        raise UsageError("nothing runs here; `relayline up` starts a pipeline")
    if not launched.is_running:
        raise UsageError(f"{launched.state.name} does not run here; `relayline up` starts it")
    if is_gateway(launched.directory.manifest):
        _restart_members(launched, pipelines, as_json=as_json)
    elif pipelines:
        raise UsageError(f"{launched.state.name} is one pipeline, with no others behind it; name it alone")
    else:
        _restart(launched, as_json=as_json)


def _restart(launched: Launched, *, as_json: bool) -> None:
    """Have one pipeline start again, and wait until it serves. Raises UsageError, StartError."""
    from relayline.deploy.launch.control import gateway_over
    from relayline.deploy.launch.process_id import send_signal
    from relayline.deploy.launch.state import MORE_SIGNAL

    name, directory = launched.state.name, launched.directory
    if (gateway := gateway_over(launched)) is not None:
        raise UsageError(f"{name} runs for the gateway {gateway}; run `relayline restart {gateway} {name}`")
    by_hand = f"run `relayline down {name}`, then `relayline up` again"
    if not launched.state.starts_again:
        raise UsageError(f"{name} was started by an older relayline, or not by `up`; {by_hand}")
    if not launched.phase.is_up:
        raise UsageError(f"{name} is {launched.phase.value}; wait until it is ready, or {by_hand}")
    write_again(directory.restart, b"{}")  # whole or not at all: the next signal would have half an order taken up
    if not send_signal(launched.state.supervisor, MORE_SIGNAL):
        directory.restart.unlink(missing_ok=True)
        raise StartError(f"the supervisor of {name} has ended; `relayline up` starts it again")
    try:
        after = asyncio.run(_until_ready(launched, as_json=as_json))
    except KeyboardInterrupt:
        click.echo(f"{name} starts again without this command; `relayline status {name}` shows how far it is", err=True)
        raise
    if as_json:
        click.echo(json.dumps({"event": "restarted", "name": name, "url": after.url}))
    else:
        click.echo(f"{name} serves: {after.url}/v1")


async def _until_ready(launched: Launched, *, as_json: bool) -> LaunchState:
    """Wait for the supervisor, which removes the file with its order, and until the pipeline serves. Returns its state.

    Prints the lines for hosts that had not joined before; the others come back by themselves. Raises StartError.
    """
    from relayline.deploy.launch.again import refusal
    from relayline.deploy.launch.tell import lines_for_hosts

    name, directory = launched.state.name, launched.directory
    known = {(record.name, record.host) for record in launched.state.processes}
    shown: set[str] = set()
    said = ""
    while True:
        is_running = launched.is_running  # before its last words are read
        reason, is_ordered, state = refusal(directory.restart), directory.restart.exists(), directory.load()
        assert state is not None, "it was there before"
        if not is_running:
            why = (
                reason or state.reason or f"it was told to end meanwhile, or was killed; its log: {directory.log('up')}"
            )
            raise StartError(f"{name} has ended and did not start again: {why}")
        if reason and state.phase.is_up:
            raise StartError(f"{name} serves as before, because it could not start again: {reason}")
        if not is_ordered and state.phase is Phase.READY:
            return state
        now = ""
        if reason and directory.before.exists():  # else it is about to end, as `down` has told it to
            now = "the new start failed; it starts as it was before"
        elif is_ordered and state.phase is Phase.DRAINING:
            now = "running requests end first"
        elif not is_ordered and state.phase is Phase.STARTING:
            new = [record for record in state.processes if (record.name, record.host) not in known]
            for line in lines_for_hosts(new, shown, as_json=as_json):
                click.echo(line)
            away = [record.name for record in state.processes if record.command and record.state is HostState.WAITING]
            now = f"waiting for {', '.join(away)}; `relayline status {name}` says more" if away else ""
        if now not in ("", said) and not as_json:
            click.echo(said := now, err=True)
        await asyncio.sleep(LOOK_EVERY_S)


def _restart_members(launched: Launched, pipelines: tuple[str, ...], *, as_json: bool) -> None:
    """Have pipelines behind a gateway start again, and wait until they serve. Raises UsageError, StartError."""
    from relayline.deploy.cli.apply_gateway import change
    from relayline.deploy.launch.board import unlike_manifest
    from relayline.deploy.launch.gateway.change import difference
    from relayline.deploy.launch.gateway.plan import plan_gateway
    from relayline.deploy.manifest.gateway import load_gateway

    directory, own = launched.directory, launched.state.name
    manifest = load_gateway(directory.manifest)
    here = [member.name for member in manifest.members() if member.manifest is not None]
    asked = [each.removeprefix(f"{own}-") if each not in here else each for each in pipelines] or here
    if strange := [each for each in asked if each not in here]:
        raise UsageError(f"{own} has started no pipeline {strange[0]!r}; it has {', '.join(here) or 'none'}")
    plan = plan_gateway(manifest, Path(launched.state.manifest), own, directory.path)
    change(plan, launched, difference(manifest, manifest, unlike_manifest(launched.state)), asked, as_json=as_json)
