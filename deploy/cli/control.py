"""`relayline status`, `down` and `logs`: pipelines that `relayline up` launched on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relayline.deploy.cli.batches import batches_line
from relayline.deploy.cli.console_http import names_here
from relayline.deploy.cli.options import FloatRange, IntRange, Name
from relayline.deploy.cli.paths import Directory
from relayline.deploy.cli.unequal import gateway_lines, unequal_line
from relayline.wire.common.errors import UsageError
from relayline.wire.common.phase import HostState, Phase
from relayline.wire.common.places import joined_dir
from relayline.wire.common.texts import counted, duration_text, layer_range
from relayline.wire.common.units import bytes_text

if TYPE_CHECKING:
    from relayline.deploy.launch.control import Launched

_PID, _UP, _RESTARTS, _HEARD, _DETAIL = 3, 4, 5, 6, 8  # columns of `status`
INDENT = "  "  # of what belongs to a pipeline
DOWN_TIMEOUT_S = 60.0  # a drain, and the stages' end after it

state_dir_option = click.option(
    "--state-dir",
    type=Directory(),
    default=None,
    help="State directory of the pipeline [default: $XDG_STATE_HOME/relayline/NAME].",
)


@click.command("status", short_help="Show pipelines that run on this machine.")
@click.argument("name", type=Name(), required=False, shell_complete=names_here)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list instead of a table.")
@state_dir_option
@click.pass_context
def status_command(ctx: click.Context, name: str | None, as_json: bool, state_dir: Path | None) -> None:
    """Show what clients get from the pipelines that `relayline up` started here, and their processes: uptime, restarts,
    last heartbeat.

    NAME is a pipeline's name or its manifest; the default is all that run. Exit code 1 if that pipeline does not run.
    """
    from relayline.deploy.launch.control import describe, find, launched

    if name is None and state_dir is None:
        found: list[Launched] = [pipeline for pipeline in launched(None) if pipeline.is_running]
    else:
        one = find(name, state_dir)
        found = [one] if one is not None else []
    described = [describe(pipeline) for pipeline in found]
    if as_json:
        click.echo(json.dumps(described, indent=2))
    else:
        width = shutil.get_terminal_size().columns - len(INDENT) if sys.stdout.isatty() else None
        click.echo("\n\n".join(_status_text(facts, width) for facts in described) or _nothing_here())
    if (name is not None or state_dir is not None) and not any(pipeline.is_running for pipeline in found):
        ctx.exit(1)


def _nothing_here() -> str:
    """Return what `status` says where nothing runs that `up` has started: also what ended without being ended, as when
    the machine starts anew, and of which pipelines this host is a stage.
    """
    from relayline.deploy.launch.control import ended_unexpectedly
    from relayline.stage.joining.enrol import memberships

    dead = [
        f"{each.state.name} ended unexpectedly; `relayline up` starts it again (it was {each.state.manifest})"
        for each in ended_unexpectedly()
    ]
    joined = dict.fromkeys(
        f"this host has joined the pipeline at {one.file.enrol} as {one.file.name}; its state: `relayline status` there"
        for one in memberships(joined_dir())
    )
    head = "nothing runs here that `relayline up` started" if joined else "nothing runs here"
    return "\n".join([head, *dead, *joined])


def _prefixes_line(facts: dict[str, int]) -> str:
    held = " and ".join(
        f"{bytes_text(facts[key])} {place}"
        for key, place in (("memory_bytes", "in memory"), ("disk_bytes", "on disk"))
        if facts[key]
    )
    known = f"{facts['prefixes']} stored with {counted(facts['tokens'], 'token')}" + (f", {held}" if held else "")
    return f"prefixes: {known}; {facts['restored']} restored so far"


def _status_text(facts: dict[str, Any], width: int | None = None) -> str:
    """Return a pipeline's or gateway's facts as lines: its state, its work, its plan, its processes.

    `width`: of the terminal, None for no bound.
    """
    lines = [_head_line(facts)]
    lines += [f"{INDENT}{line}" for line in (*_work_lines(facts), *_plan_lines(facts))]
    if facts["pipelines"]:
        lines += [f"{INDENT}{line}" for line in gateway_lines(facts["pipelines"])]
    lines += [f"{INDENT}{line}" for line in _process_table(facts["processes"], width)]
    for entry in facts["processes"]:
        if entry["state"] in (HostState.WAITING, HostState.LOST) and entry["host"] != "localhost":
            lines += [f"{INDENT}{line}" for line in _joining_lines(facts["name"], entry)]
    return "\n".join(lines)


def _joining_lines(pipeline: str, entry: dict[str, Any]) -> list[str]:
    """Return what to run so that a stage of another host joins. The line of one that was added later is not kept."""
    words = entry["command"].split()
    has_joined = entry["state"] == HostState.LOST and not entry["revoked"]
    if has_joined and words[:2] == ["relayline", "join"]:  # its host has its certificate
        again = f"relayline join {words[2]} --name {entry['name']}"
        return [f"on {entry['host']}, unless it still runs there, run:", f"  {again}"]
    if words:
        from relayline.deploy.launch.inviting import for_a_while

        short = [f"  {for_a_while(entry['short'], entry['short_until_unix_s'])}"] if entry["short"] else []
        return [f"on {entry['host']}, run:", f"  {entry['command']}", *short]
    fresh = f"relayline invite {entry['name']} --pipeline {pipeline}"
    if entry["revoked"]:
        return [f"on {entry['host']}, run the line that this prints:", f"  {fresh}"]
    return [f"on {entry['host']}, run the line that `up` printed for {entry['name']}; a new one:", f"  {fresh}"]


def _head_line(facts: dict[str, Any]) -> str:
    from relayline.deploy.launch.state import url_to_show

    head = f"{facts['name']}: {facts['phase']}"
    if facts["phase"] == Phase.DEAD:
        head += " (its supervisor ended unexpectedly; `relayline up` starts it again)"
    if facts["phase_s"] is not None:
        head += f" for {duration_text(facts['phase_s'])}"
    if facts["uptime_s"] is not None:
        head += f", up {duration_text(facts['uptime_s'])}, pid {facts['pid']}"
    if facts["url"]:
        reached = {entry["name"]: entry["address"] for entry in facts["processes"]}.get("coordinator", "")
        head += f", {url_to_show(facts['url'], reached)}/v1"
    return head


def _work_lines(facts: dict[str, Any]) -> list[str]:
    """Return why it is in its state, and what it serves: requests, and stored prefixes."""
    lines: list[str] = []
    if facts["reason"]:
        lines.append(facts["reason"])
    if facts["requests"] is not None:
        lines.append(f"requests: {facts['requests']['running']} running, {facts['requests']['waiting']} waiting")
    elif facts["problem"]:
        lines.append(f"requests: {facts['problem']}")
    if facts.get("batches") and (line := batches_line(facts["batches"])):
        lines.append(line)
    prefixes = facts["prefixes"]
    if prefixes and (prefixes["stored"] or prefixes["prefixes"]):
        lines.append(_prefixes_line(prefixes))
    return lines


def _plan_lines(facts: dict[str, Any]) -> list[str]:
    """Return how evenly the stages share the work, and the plan if it was made from what hosts have reported."""
    lines: list[str] = []
    if facts["stages"] and (unequal := unequal_line({"imbalance": facts["imbalance"], "stages": facts["stages"]})):
        lines.append(unequal)
    if facts["planned"] is not None and _is_of_hosts(facts["planned"]):
        from relayline.deploy.planning.plan_description import lines_of

        lines += lines_of(facts["planned"])
    return lines


def _is_of_hosts(planned: dict[str, Any]) -> bool:
    """Return whether a plan was made from measurements, be it that a host was too busy for one that is kept."""
    return planned.get("from") == "measured" or any(stage.get("is_doubtful") for stage in planned["stages"])


def _process_table(processes: list[dict[str, Any]], width: int | None = None) -> list[str]:
    """Return a heading, and a line for each process, in columns of equal width.

    `width`: of the terminal in characters, None for no bound. Columns that say least are left out until lines fit it,
    but for the details at their end.
    """
    is_spread = any(entry["host"] != "localhost" for entry in processes)
    where = "pid or host" if is_spread else "pid"
    rows = [("process", "state", "layers", where, "up", "restarts", "heard", "address", "")]
    for entry in processes:
        layers = layer_range(*entry["layers"]) if entry["layers"] else ""
        pid = str(entry["pid"] or ("-" if entry["host"] == "localhost" else entry["host"]))
        up = "" if entry["uptime_s"] is None else duration_text(entry["uptime_s"])
        restarts = str(entry["n_restarts"])
        heard = "" if entry["last_heard_s"] is None else f"{duration_text(entry['last_heard_s'])} ago"
        rows.append(
            (entry["name"], entry["state"], layers, pid, up, restarts, heard, entry["address"], entry["detail"])
        )
    has_restarted = any(entry["n_restarts"] for entry in processes)
    dispensable = [*(() if has_restarted else (_RESTARTS,)), _HEARD, *(() if is_spread else (_PID,)), _UP]
    columns = dict(enumerate(zip(*rows, strict=True)))
    widths = {at: max(map(len, cells)) for at, cells in columns.items()}
    while dispensable and width is not None and sum(widths.values()) - widths[_DETAIL] + 2 * (len(widths) - 1) > width:
        del widths[dispensable.pop(0)]
    return ["  ".join(row[at].ljust(cells) for at, cells in widths.items()).rstrip() for row in rows]


@click.command("down", short_help="End a pipeline that runs on this machine.")
@click.argument("name", type=Name(), required=False, shell_complete=names_here)
@click.option(
    "--timeout", type=FloatRange(0), default=DOWN_TIMEOUT_S, show_default=True, help="Seconds to wait for the end."
)
@click.option("--force", is_flag=True, help="Kill the processes that still run then.")
@state_dir_option
def down_command(name: str | None, timeout: float, force: bool, state_dir: Path | None) -> None:
    """End a pipeline in order: the coordinator lets running requests finish, then the stages end.

    NAME is a pipeline's name or its manifest; the default is the only one that runs. Exit code 0 also if none runs.
    One behind a gateway ends with the gateway, or once it is taken out of the gateway's manifest.
    """
    from relayline.deploy.launch.control import end, find, gateway_over

    pipeline = find(name, state_dir)
    if pipeline is None:
        click.echo("nothing runs here")
        return
    was_running = pipeline.is_running
    if was_running and (gateway := gateway_over(pipeline)) is not None:
        raise UsageError(
            f"{pipeline.state.name} runs for the gateway {gateway}, which would start it again; take it out of the "
            f"gateway's manifest and run `relayline up`, or end all of them with `relayline down {gateway}`"
        )
    end(pipeline, timeout, force=force)
    click.echo(f"{pipeline.state.name} {'has ended' if was_running else 'was not running'}")


@click.command("logs", short_help="Show the logs of a pipeline's processes.")
@click.argument("name", type=Name(), required=False, shell_complete=names_here)
@click.argument("process", type=Name(), required=False)
@click.option(
    "--lines",
    "n_lines",
    type=IntRange(0, 100_000),
    default=50,
    show_default=True,
    help="How many of the last lines.",
)
@click.option("--follow", is_flag=True, help="Show new lines too, until Ctrl-C or until nobody reads them.")
@state_dir_option
def logs_command(name: str | None, process: str | None, n_lines: int, follow: bool, state_dir: Path | None) -> None:
    """Show the last lines that each process of a pipeline logged, running or not.

    PROCESS is coordinator, a stage's name, or up for the supervisor. Without it all processes are shown by time, each
    line with its process.
    """
    from relayline.deploy.launch.control import find

    pipeline = find(name, state_dir)
    if pipeline is None:
        raise UsageError("nothing runs here; name a pipeline to see its logs")
    local = [record.name for record in pipeline.state.processes if record.host == "localhost"]
    names = ["up", *local]
    if process is not None:
        if process not in names:
            raise UsageError(f"{pipeline.state.name} has no process {process!r} here; it has {', '.join(names)}")
        names = [process]
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_show(pipeline, names, n_lines, follow=follow))


async def _show(pipeline: Launched, names: list[str], n_lines: int, *, follow: bool) -> None:
    from relayline.deploy.launch.log_files import LogReader, merged

    def show(name: str, line: str) -> None:
        print(f"[{name}] {line}" if len(names) > 1 else line, flush=True)  # also where stdout is closed

    async def go_on(name: str, reader: LogReader) -> None:
        async for line in reader.follow():
            show(name, line)

    readers = {name: LogReader(pipeline.directory.log(name)) for name in names}
    try:
        last = [(name, reader.last_lines(n_lines), reader.changed_s()) for name, reader in readers.items()]
        for name, line in merged(last):
            show(name, line)
        if follow:
            await asyncio.gather(_end_unread(), *(go_on(name, reader) for name, reader in readers.items()))
    finally:
        for reader in readers.values():
            reader.close()


async def _end_unread() -> None:
    """Raise BrokenPipeError once nobody can read what this process prints, as behind `| head`. It may print no more."""
    from relayline.deploy.launch.log_files import FOLLOW_INTERVAL_S

    if sys.stdout is None:  # closed by whoever started the command
        return
    unread = select.poll()
    unread.register(sys.stdout, select.POLLOUT)
    while not any(state & (select.POLLERR | select.POLLHUP) for _, state in unread.poll(0)):  # noqa: ASYNC110 - no event tells it everywhere
        await asyncio.sleep(FOLLOW_INTERVAL_S)
    raise BrokenPipeError
