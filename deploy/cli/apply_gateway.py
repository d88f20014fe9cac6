"""`relayline up` of a gateway that runs already: pipelines are added, replaced and taken away while it serves."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING, Any

import click
from yarl import URL

from relayline.deploy.cli.apply import applied
from relayline.deploy.launch.control import Launched
from relayline.deploy.launch.gateway_change import GatewayDifference, difference
from relayline.deploy.launch.gateway_plan import stages_of
from relayline.deploy.launch.here import at_home
from relayline.deploy.launch.lanes import with_usual_lanes
from relayline.deploy.launch.ports import LOCALHOST
from relayline.deploy.launch.prepare import named, override
from relayline.deploy.launch.process_id import send_signal
from relayline.deploy.launch.run import Launch
from relayline.deploy.launch.state import MORE_SIGNAL
from relayline.deploy.launch.tell import line_of
from relayline.deploy.manifest import load_manifest
from relayline.deploy.manifest.gateway import load_gateway, write_gateway
from relayline.wire.common.errors import StartError
from relayline.wire.common.phase import HostState, Phase

if TYPE_CHECKING:
    from relayline.deploy.launch.gateway_plan import GatewayPlan
    from relayline.deploy.launch.state import StateDir
    from relayline.deploy.manifest.gateway import Member

LOOK_EVERY_S = 0.3


def applied_gateway(plan: GatewayPlan, directory: StateDir, *, is_dry: bool, as_json: bool) -> bool:
    """Bring a serving gateway to the state of its manifest, and then each pipeline that stays to that of its own.

    Returns False where none serves in `directory`. With `is_dry` only show the changes, even where none runs. Raises
    StartError for changes that need a restart, and where a pipeline that was added does not come up.
    """
    state = directory.load()
    launched = Launched(directory, state) if state is not None else None
    if launched is None or not launched.is_running:
        if is_dry:
            _show_start(plan, as_json=as_json)
        return is_dry
    if not launched.state.url or launched.phase not in (Phase.READY, Phase.RECOVERING):
        return False  # it starts or ends: the lock says so
    failed = {record.name for record in launched.state.processes if record.state is HostState.FAILED}
    differs = difference(load_gateway(directory.manifest), plan.manifest, failed)
    _show(plan.name, differs, is_dry=is_dry, as_json=as_json)
    inner = [(member, *_inner(plan, member)) for member in differs.staying if member.manifest is not None]
    if is_dry:
        for _, what, place in inner:
            applied(what, place, is_dry=True, as_json=as_json)
        return True
    if differs.others:
        raise StartError(
            f"{plan.name} runs, and nothing was changed: {', '.join(differs.others)} cannot change while it serves; "
            f"`relayline down {plan.name}`, then `up` again"
        )
    if differs.changes_members:
        _change(plan, launched, differs, as_json=as_json)
    for _, what, place in inner:
        applied(what, place, is_dry=False, as_json=as_json)
    return True


def _inner(plan: GatewayPlan, member: Member) -> tuple[Launch, StateDir]:
    """Return a pipeline that runs for the gateway as its manifest wants it now, and its state."""
    assert member.manifest is not None
    directory = plan.started.state_of(member.name)
    state, wanted = directory.load(), load_manifest(member.manifest)
    changes: dict[str, Any] = {"coordinator.http.tls": None, "coordinator.http.host": LOCALHOST}
    if state is not None and state.url:
        changes["coordinator.http.port"] = URL(state.url).port
    if member.stages is not None:
        changes["stages"] = stages_of(member)
    if directory.manifest.exists():
        ports, own = load_manifest(directory.manifest).spec.coordinator, wanted.spec.coordinator
        changes["coordinator.joinPort"] = own.join_port or ports.join_port
        changes["coordinator.enrolPort"] = own.enrol_port or ports.enrol_port
    manifest = named(at_home(with_usual_lanes(override(wanted, changes))), f"{plan.name}-{member.name}")
    return Launch(manifest, member.manifest.absolute(), plan.started.log_flags), directory


def _change(plan: GatewayPlan, launched: Launched, differs: GatewayDifference, *, as_json: bool) -> None:
    """Have the supervisor change what is behind the gateway, and wait until it has. Raises StartError."""
    directory = launched.directory
    if directory.more.exists():
        raise StartError(f"{plan.name} is being changed already; wait for that `relayline up`")
    write_gateway(plan.manifest, directory.more)
    if not send_signal(launched.state.supervisor, MORE_SIGNAL):
        directory.more.unlink(missing_ok=True)
        raise StartError(f"the supervisor of {plan.name} has ended; `relayline up` starts it again")
    asyncio.run(_until_changed(plan, launched, differs, as_json=as_json))
    new = {f"{plan.name}-{member.name}" for member in (*differs.added, *differs.changed)}
    after = directory.load()
    records = after.processes if after is not None else ()
    why = [record.detail for record in records if record.name in new and record.state is HostState.FAILED]
    if why:
        raise StartError(f"{'; '.join(why)}. The other pipelines serve; mend it and run `up` again")
    here = {record.name for record in records}
    if missing := [each.name for each in differs.added if each.manifest and f"{plan.name}-{each.name}" not in here]:
        raise StartError(f"{', '.join(missing)} did not come; the log of {plan.name} says why: {directory.log('up')}")
    click.echo(json.dumps({"event": "changed", "name": plan.name}) if as_json else f"{plan.name}: {differs.words}")


async def _until_changed(plan: GatewayPlan, launched: Launched, differs: GatewayDifference, *, as_json: bool) -> None:
    """Wait for the supervisor, which removes what was left for it; print what has to be run on other hosts."""
    told: set[str] = set()
    while launched.directory.more.exists():
        if not launched.is_running:
            log = launched.directory.log("up")
            raise StartError(f"the supervisor of {plan.name} has ended; its log is {log}")
        for member in (*differs.added, *differs.changed):
            _tell_lines(plan, member, told, as_json=as_json)
        await asyncio.sleep(LOOK_EVERY_S)


def _tell_lines(plan: GatewayPlan, member: Member, told: set[str], *, as_json: bool) -> None:
    """Print, once, what is to be run on other hosts for a pipeline that starts."""
    state = plan.started.state_of(member.name).load() if member.manifest is not None else None
    for record in state.processes if state is not None and not state.phase.has_ended else ():
        if record.command and record.state is HostState.WAITING and record.command not in told:
            told.add(record.command)
            event = {
                "event": "remote",
                "name": record.name,
                "host": record.host,
                "command": record.command,
                "bring": "",
            }
            click.echo(line_of(event, as_json=as_json))


def _show(name: str, differs: GatewayDifference, *, is_dry: bool, as_json: bool) -> None:
    changes = {"added": differs.added, "removed": differs.removed, "changed": differs.changed}
    if as_json:
        said = {word: [member.name for member in members] for word, members in changes.items()}
        told = {"others": differs.others, "reordered": differs.is_reordered, "dry_run": is_dry}
        click.echo(json.dumps({"event": "difference", "name": name, **said, **told}))
        return
    if not differs.changes_members and not differs.others:
        click.echo(f"{name}: behind it is what the manifest says")
    for member in differs.added:
        click.echo(f"pipelines[{member.name}]: is added, {_source(member)}")
    for member in differs.removed:
        click.echo(f"pipelines[{member.name}]: gets no more requests, and ends when those that run there have")
    for member in differs.changed:
        click.echo(f"pipelines[{member.name}]: is replaced, {_source(member)}; meanwhile its replicas answer")
    if differs.is_reordered:
        click.echo("the order of the pipelines changes")
    for field in differs.others:
        click.echo(f"{field}: takes a new start")


def _show_start(plan: GatewayPlan, *, as_json: bool) -> None:
    members = plan.manifest.members()
    if as_json:
        listed = [{"name": each.name, "url": each.place.url, "manifest": _path(each)} for each in members]
        click.echo(json.dumps({"event": "plan", "name": plan.name, "pipelines": listed}))
        return
    click.echo(f"{plan.name} does not run; it would be started so:")
    width = max(len(member.name) for member in members)
    for member in members:
        click.echo(f"  {member.name:<{width}}  {_source(member)}")


def _path(member: Member) -> str | None:
    return None if member.manifest is None else str(member.manifest)


def _source(member: Member) -> str:
    if member.manifest is None:
        return str(member.place.url)
    shown = os.path.relpath(member.manifest)
    stages = f" on {', '.join(stage.host for stage in member.stages)}" if member.stages is not None else ""
    return f"from {shown if not shown.startswith('../..') else member.manifest}{stages}"
