"""`relayline service`: a stage that has joined comes back when its host starts again."""

from __future__ import annotations

import dataclasses
import getpass
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from relayline.deploy.cli.join import chosen
from relayline.deploy.cli.options import Line
from relayline.deploy.cli.paths import Directory
from relayline.deploy.machine.service import Unit, launchd_unit, systemd_unit
from relayline.deploy.machine.unit_variables import chosen_variables, kept_variables, private_text, secret_variables
from relayline.wire.common.child_command import module_command
from relayline.wire.common.errors import StartError, UsageError
from relayline.wire.common.files import write_file
from relayline.wire.common.places import expanded, home, joined_dir, joined_dir_of
from relayline.wire.common.texts import named_stage

if TYPE_CHECKING:
    from relayline.stage.joining.enrol import Joined

COMMAND_TIMEOUT_S = 60.0  # of systemctl and launchctl; a stage that is ended may drain for half of it
_READABLE, _PRIVATE = 0o644, 0o600
PRIVATE_FILE = "service.env"  # next to the key: variables that the user has named

name_argument = click.argument("name", type=Line(), required=False, default="")
system_option = click.option("--system", "is_system", is_flag=True, help="For the whole system; needs root.")
state_option = click.option(
    "--state",
    type=Directory(),
    default=None,
    help="Where key and certificate are kept [default: this user's state directory].",
)


@click.group("service", short_help="Start a joined stage again whenever its host restarts.")
def service_command() -> None:
    """Run a joined stage as a service of this system: systemd on Linux, launchd on macOS.

    First join with the line that `relayline up` printed (add --enrol-only if the stage should not start yet), then
    install. NAME is the stage's name; you can leave it out if this host has joined as only one stage.
    """


@service_command.command(
    "install", short_help="Install the service and start it.", context_settings={"ignore_unknown_options": True}
)
@name_argument
@system_option
@state_option
@click.option(
    "--env", "names", type=Line("name"), multiple=True,
    help="A further variable of this shell, for a file that only its owner may read. May be given again.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print the unit and the commands, and change nothing.")
@click.argument("join_flags", nargs=-1, type=click.UNPROCESSED)
def install_command(
    name: str, is_system: bool, state: Path | None, names: tuple[str, ...], dry_run: bool, join_flags: tuple[str, ...]
) -> None:
    """Install the service and start it, now and at every start of the system. Flags of `relayline join` follow after
    `--`.

    The service has those variables of this shell that say where its cache is (XDG_*, HF_*), and which hub, GPUs
    (CUDA_VISIBLE_DEVICES), proxy and collector (OTEL_*) it uses. Everyone may read the unit, so what may be secret is
    left out: tokens, headers, and addresses with a password. Name it with --env.

    For example: relayline service install old -- --threads 4 --advertise old.lan
    """
    if name.startswith("-"):  # NAME was left away
        name, join_flags = "", (name, *join_flags)
    joined = _of(name, state, is_system=is_system)
    shell = _shell(joined, names, is_system=is_system)
    unit = _unit(joined, is_system=is_system, join_flags=join_flags, shell=shell)
    if dry_run:
        click.echo(f"# {unit.path}\n{unit.text}")
        for line in shell.lines(_private_path(joined, unit)):
            click.echo(f"# {line}")
        for command in unit.enable:
            click.echo(f"# then: {' '.join(command)}")
        return
    _check_flags(join_flags)
    is_new = not unit.path.exists()
    if not is_new:  # one that runs would go on with its old flags
        for command in unit.disable:
            _started(command)
    _write_files(joined, unit, shell, "run it with sudo" if is_system else "is the home directory writable?")
    try:
        for command in unit.enable:
            _run(command)
    except StartError:
        if is_new:  # nothing would start it, and `uninstall` would fail as well
            _remove(joined, unit)
        raise
    click.echo(f"installed {unit.path}; {named_stage(joined.file.name)} runs now, and at every start of this system")
    click.echo(f"its log: {unit.logs}")
    for line in shell.lines(_private_path(joined, unit)):
        click.echo(line)
    if unit.advice:
        click.echo(unit.advice)


@service_command.command("uninstall")
@name_argument
@system_option
@state_option
@click.option("--dry-run", is_flag=True, help="Print the commands, and change nothing.")
def uninstall_command(name: str, is_system: bool, state: Path | None, dry_run: bool) -> None:
    """Stop the service and remove it. The host keeps its certificate, so `relayline join` still works by hand."""
    joined = _of(name, state, is_system=is_system)
    unit = _unit(joined, is_system=is_system)
    if dry_run:
        private = _private_path(joined, unit)
        files = [unit.path, *([private] if private != unit.path and private.exists() else [])]
        click.echo("\n".join([*(" ".join(command) for command in unit.disable), *(f"rm {path}" for path in files)]))
        return
    if not unit.path.exists():
        raise UsageError(f"{unit.path} is not there: this service is not installed")
    for command in unit.disable:
        _run(command)
    _remove(joined, unit)
    click.echo(f"removed {unit.path}")


@service_command.command("status", short_help="Show whether the service is installed, and its state.")
@name_argument
@system_option
@state_option
@click.pass_context
def status_command(ctx: click.Context, name: str, is_system: bool, state: Path | None) -> None:
    """Show whether the service is installed and its state; exit code 1 if it does not run."""
    unit = _unit(_of(name, state, is_system=is_system), is_system=is_system)
    if not unit.path.exists():
        click.echo(f"not installed: {unit.path}")
        ctx.exit(1)
    click.echo(f"installed: {unit.path}")
    done = _started(unit.status)
    click.echo((done.stdout or done.stderr).strip())
    ctx.exit(1 if done.returncode else 0)


def _of(name: str, state: Path | None, *, is_system: bool) -> Joined:
    """Return the membership that is meant. Raises UsageError.

    Under sudo it may be that of the user who called sudo: a service of the system needs root, joining does not.
    """
    from relayline.stage.joining.enrol import memberships

    root, caller = state or joined_dir(), os.environ.get("SUDO_USER", "")
    if state is None and is_system and caller and not memberships(root):
        root = joined_dir_of(caller)
    return chosen(root, name)


@dataclasses.dataclass(frozen=True, slots=True)
class _Shell:
    """The variables of the shell that installs a service."""

    kept: Mapping[str, str] = dataclasses.field(default_factory=dict)
    chosen: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Those that the user has named; they may be secret."""
    left_out: Sequence[str] = ()

    def lines(self, private: Path) -> list[str]:
        """Return what the user is told of them. `private`: the file that has the chosen ones."""
        told = [f"its variables: {', '.join(self.kept)}"] if self.kept else []
        if self.chosen:
            told.append(f"its variables in {private}, which only its owner may read: {', '.join(self.chosen)}")
        if self.left_out:
            flags = " ".join(f"--env {name}" for name in self.left_out)
            told.append(
                f"left out, since everyone may read the unit: {', '.join(self.left_out)}; to keep them: {flags}"
            )
        return told


def _shell(joined: Joined, names: tuple[str, ...], *, is_system: bool) -> _Shell:
    """Return the variables of this shell that a service is to have. Raises UsageError for a name that is none of it."""
    chosen = chosen_variables(os.environ, names)
    if _user(joined, is_system=is_system) not in (getpass.getuser(), os.environ.get("SUDO_USER", "")):
        return _Shell(chosen=chosen)  # the others say nothing of that user's files
    kept = {name: value for name, value in kept_variables(os.environ).items() if name not in chosen}
    return _Shell(kept, chosen, [name for name in secret_variables(os.environ) if name not in chosen])


def _private_path(joined: Joined, unit: Unit) -> Path:
    """Return the file that holds what only its owner may read: launchd knows none besides the unit itself."""
    return unit.path if sys.platform == "darwin" else joined.directory.absolute() / PRIVATE_FILE


def _write_files(joined: Joined, unit: Unit, shell: _Shell, remedy: str) -> None:
    """Write the unit, and before it what is private. Raises StartError."""
    private = _private_path(joined, unit)
    is_apart = private != unit.path
    if shell.chosen and is_apart:
        _write(private, private_text(shell.chosen), _PRIVATE, remedy)
    _write(unit.path, unit.text, _PRIVATE if shell.chosen and not is_apart else _READABLE, remedy)
    if not shell.chosen and is_apart:
        private.unlink(missing_ok=True)  # of an earlier install


def _write(path: Path, text: str, mode: int, remedy: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text.encode(), mode)
    except OSError as error:
        raise StartError(f"{path} cannot be written: {error.strerror}; {remedy}") from error


def _remove(joined: Joined, unit: Unit) -> None:
    unit.path.unlink(missing_ok=True)
    _private_path(joined, unit).unlink(missing_ok=True)


def _unit(joined: Joined, *, is_system: bool, join_flags: tuple[str, ...] = (), shell: _Shell = _Shell()) -> Unit:
    """Return the service of a membership. Raises UsageError on a system that has neither systemd nor launchd."""
    command = [
        *module_command("relayline.deploy.cli", "join", joined.file.enrol, "--name", joined.file.name),
        "--state", str(joined.directory.parent.absolute()), *join_flags,
    ]  # fmt: skip
    user = _user(joined, is_system=is_system)
    if sys.platform == "darwin":
        own = expanded(f"~{user}") if is_system else home()
        return launchd_unit(
            joined.file.name, command, own, is_system=is_system, user=user, user_id=os.getuid(),
            variables={**shell.kept, **shell.chosen},
        )  # fmt: skip
    if shutil.which("systemctl") is None:
        raise UsageError(
            "this system has no systemctl; let your service manager run `relayline join`, with the command "
            f"{' '.join(command)}"
        )
    text = f"relayline {named_stage(joined.file.name)} of the pipeline at {joined.file.coordinator}"
    private = joined.directory.absolute() / PRIVATE_FILE if shell.chosen else None
    return systemd_unit(
        joined.file.name, command, text, home(), is_system=is_system, user=user, variables=shell.kept, private=private
    )


def _user(joined: Joined, *, is_system: bool) -> str:
    """Return whom a service runs as."""
    return _owner(joined.directory) if is_system else getpass.getuser()


def _owner(path: Path) -> str:
    """Return the user whose key this is: only that user's service can read it."""
    try:
        return path.owner()
    except KeyError:  # an id without a name
        return getpass.getuser()


def _check_flags(join_flags: tuple[str, ...]) -> None:
    """Raise click's usage error for flags that `relayline join` does not have, before a service fails with them."""
    from relayline.deploy.cli.join import join_command

    join_command.make_context("join", ["localhost:1", *join_flags])


def _started(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartError(f"`{' '.join(command)}` did not run: {getattr(error, 'strerror', None) or error}") from error


def _run(command: tuple[str, ...]) -> None:
    done = _started(command)
    if done.returncode:
        why = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        remedy = ""
        if "connect to bus" in why:
            remedy = "; no service manager of this user runs here: log in as the user, not by su, or use --system"
        raise StartError(f"`{' '.join(command)}` failed: {why}{remedy}")
