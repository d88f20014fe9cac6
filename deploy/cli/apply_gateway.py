"""`relayline up` of a gateway that runs already: pipelines are added, replaced and taken away while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import click

from relayline.deploy.cli.apply import applied, found_difference, show_difference
from relayline.deploy.cli.console_http import fetch
from relayline.deploy.cli.wanted_behind import wanted_behind
from relayline.deploy.launch.board import unlike_manifest
from relayline.deploy.launch.control import Launched, key_of
from relayline.deploy.launch.gateway.change import AS_BEFORE, OTHERS_SERVE, GatewayDifference, difference
from relayline.deploy.launch.process_id import send_signal
from relayline.deploy.launch.run import Launch
from relayline.deploy.launch.state import MORE_SIGNAL
from relayline.deploy.launch.tell import lines_for_hosts
from relayline.deploy.manifest.gateway import load_gateway, write_gateway
from relayline.wire.common.errors import StartError
from relayline.wire.common.files import write_again
from relayline.wire.common.phase import HostState, Phase
from relayline.wire.common.use import Use, is_file_used

if TYPE_CHECKING:
    from relayline.deploy.launch.gateway.plan import GatewayPlan
    from relayline.deploy.launch.state import ProcessRecord, StateDir
    from relayline.deploy.manifest.gateway import Member

LOOK_EVERY_S = 0.3
_ANSWERING = tuple(phase for phase in Phase if phase.takes_requests)
ALONE = "needs a new start, and no replica would answer meanwhile; `up` leaves it as it is"
RESTARTS = "starts it again, after its running requests; its replicas answer meanwhile"


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
    if not launched.state.url or not launched.phase.is_up:
        return False  # it starts or ends: the lock says so
    differs = difference(load_gateway(directory.manifest), plan.manifest, unlike_manifest(launched.state))
    _show(plan.name, differs, is_dry=is_dry, as_json=as_json)
    inner = [(member, *wanted_behind(plan, member)) for member in differs.staying if member.manifest is not None]
    if is_dry:
        replicas = replicas_of(launched, differs)
        for member, to_start, place in inner:
            restarts = RESTARTS if replicas.get(member.name) else ALONE
            applied(to_start, place, is_dry=True, as_json=as_json, restarts=restarts)
        return True
    if differs.others:
        raise StartError(
            f"{plan.name} runs, and nothing was changed: {', '.join(differs.others)} cannot change while it serves; "
            f"`relayline down {plan.name}`, then `up` again"
        )
    again = _restarting(plan, launched, differs, inner, as_json=as_json)
    if differs.changes_members or again:
        change(plan, launched, differs, again, as_json=as_json)
    for member, to_start, place in inner:
        if member.name not in again:
            applied(to_start, place, is_dry=False, as_json=as_json)
    return True


def _restarting(
    plan: GatewayPlan,
    launched: Launched,
    differs: GatewayDifference,
    inner: Sequence[tuple[Member, Launch, StateDir]],
    *,
    as_json: bool,
) -> list[str]:
    """Return the pipelines whose own manifests have changes that take a new start, and show these.

    Raises StartError, before anything is changed, for one that has no replica to answer meanwhile.
    """
    changed = {member.name: found for member, to_start, place in inner if (found := found_difference(to_start, place))}
    again = [name for name, found in changed.items() if found.differs.others]
    if not again:
        return []
    replicas = replicas_of(launched, differs)
    if (alone := next((name for name in again if not replicas.get(name)), None)) is not None:
        fields = changed[alone].restart_fields
        raise StartError(
            f"{plan.name} runs, and nothing was changed: {fields} of {alone} cannot change while it serves, and no "
            f"replica answers for it; `relayline restart {plan.name} {alone}` interrupts it"
        )
    for name in again:
        found = changed[name]
        show_difference(found.launched.state.name, found.differs, is_dry=False, as_json=as_json, restarts=RESTARTS)
    return again


def replicas_of(launched: Launched, differs: GatewayDifference | None) -> dict[str, list[str]]:
    """Return the pipelines that answer for each other, by name. `differs`: with those that come before."""
    listed = fetch(launched.state.url, "/v1/pipeline", key_of(launched), ("pipelines",))["pipelines"]
    models = {each["name"]: set(each["models"]) for each in listed if each["phase"] in _ANSWERING}
    found = {
        each["name"]: [name for name, theirs in models.items() if name != each["name"] and theirs & {*each["models"]}]
        for each in listed
    }
    if differs is not None:
        for member in (*differs.added, *differs.retried):
            for other in differs.staying:
                if member.manifest is not None and member.manifest == other.manifest:
                    found.setdefault(other.name, []).append(member.name)
    return found


def change(
    plan: GatewayPlan, launched: Launched, differs: GatewayDifference, again: Sequence[str] = (), *, as_json: bool
) -> None:
    """Have the supervisor change the pipelines behind the gateway, and wait until it has.

    `again`: those that restart. Raises StartError if a pipeline does not come up.
    """
    directory = launched.directory
    if is_file_used(directory.more):  # else the one that wrote it was killed, and this order takes its place
        raise StartError(f"{plan.name} is being changed already; wait for that `relayline up`")
    try:
        write_again(directory.restart, json.dumps(list(again)).encode())
        write_gateway(plan.manifest, directory.more)
    except OSError:
        directory.restart.unlink(missing_ok=True)
        raise
    new = [member.name for member in differs.beginning] + list(again)
    with contextlib.closing(Use([directory.more])):
        if not send_signal(launched.state.supervisor, MORE_SIGNAL):
            directory.more.unlink(missing_ok=True)
            directory.restart.unlink(missing_ok=True)
            raise StartError(f"the supervisor of {plan.name} has ended; `relayline up` starts it again")
        asyncio.run(_until_changed(plan, launched, new, as_json=as_json))
    after = directory.load()
    records = {record.name: record for record in (after.processes if after is not None else ())}
    found = {name: record for name in new if (record := records.get(f"{plan.name}-{name}")) is not None}
    why = [each.detail for each in found.values() if each.state is HostState.FAILED]
    why += [f"{each.name} {each.detail}" for each in found.values() if _is_as_before(each)]
    behind = [name for name, each in found.items() if each.is_behind and not _is_as_before(each)]
    if why or behind:
        left = f"; {', '.join(behind)}: not changed, because another one did not come up" if behind else ""
        raise StartError(f"{'; '.join(why)}{left}. {OTHERS_SERVE}".lstrip("; "))
    local = [each.name for each in differs.added if each.manifest is not None]
    if missing := [name for name in local if f"{plan.name}-{name}" not in records]:
        raise StartError(f"{', '.join(missing)} did not come; the log of {plan.name} says why: {directory.log('up')}")
    if as_json:
        click.echo(json.dumps({"event": "changed", "name": plan.name, "restarted": list(again)}))
    elif differs.changes_members:
        click.echo(f"{plan.name}: {differs.words}")


def _is_as_before(record: ProcessRecord) -> bool:
    return record.is_behind and record.detail.startswith(AS_BEFORE)


async def _until_changed(plan: GatewayPlan, launched: Launched, new: Sequence[str], *, as_json: bool) -> None:
    """Wait for the supervisor, which removes the file with its orders; print the commands for other hosts."""
    shown: set[str] = set()
    before = {record.name: record.pid for record in launched.state.processes}
    while launched.directory.more.exists():
        if not launched.is_running:
            log = launched.directory.log("up")
            raise StartError(f"the supervisor of {plan.name} has ended; its log is {log}")
        for name in new:
            _tell_lines(plan, name, shown, as_json=as_json)
        if not as_json:
            _tell_serving(launched.directory, [f"{plan.name}-{name}" for name in new], before)
        await asyncio.sleep(LOOK_EVERY_S)
    if not as_json:
        _tell_serving(launched.directory, [f"{plan.name}-{name}" for name in new], before)


def _tell_serving(directory: StateDir, names: Collection[str], pids: dict[str, int]) -> None:
    """Print, once, each pipeline that serves in a new process. `pids`: of the processes so far, which is changed."""
    state = directory.load()
    for record in state.processes if state is not None else ():
        is_new = record.name in names and record.pid != pids.get(record.name)
        if is_new and record.state is HostState.READY and not _is_as_before(record):
            pids[record.name] = record.pid
            click.echo(f"{record.name} serves")


def _tell_lines(plan: GatewayPlan, name: str, shown: set[str], *, as_json: bool) -> None:
    """Print, once, the commands for other hosts of a pipeline that starts; nothing for one elsewhere."""
    state = plan.started.state_of(name).load()
    if state is not None and not state.phase.has_ended:
        for line in lines_for_hosts(state.processes, shown, as_json=as_json):
            click.echo(line)


def _show(name: str, differs: GatewayDifference, *, is_dry: bool, as_json: bool) -> None:
    if as_json:
        changes = {key: getattr(differs, key) for key in ("added", "removed", "changed", "retried")}
        members_by_change = {word: [member.name for member in members] for word, members in changes.items()}
        rest = {"others": differs.others, "reordered": differs.is_reordered, "dry_run": is_dry}
        click.echo(json.dumps({"event": "difference", "name": name, **members_by_change, **rest}))
        return
    if not differs.changes_members and not differs.others:
        click.echo(f"{name}: no pipeline comes, goes or is replaced")
    for member in differs.added:
        click.echo(f"pipelines[{member.name}]: is added, {_source(member)}")
    for member in differs.removed:
        click.echo(f"pipelines[{member.name}]: gets no more requests, and ends when those that run there have")
    for member in differs.changed:
        click.echo(f"pipelines[{member.name}]: is replaced, {_source(member)}; meanwhile its replicas answer")
    for member in differs.retried:
        click.echo(
            f"pipelines[{member.name}]: does not serve as the manifest says, and is tried again, {_source(member)}"
        )
    if differs.is_reordered:
        click.echo("the order of the pipelines changes")
    for field in differs.others:
        click.echo(f"{field}: needs a new start")


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
