"""`relayline join`: this host becomes a stage of a pipeline with one line. `relayline invite` prints that line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relayline.deploy.cli.join_flags import stage_telemetry
from relayline.deploy.cli.options import Address, CoreList, Name, log_options, telemetry_options, threads_option
from relayline.deploy.cli.stage import check_before_load, on_stage_idle, on_stage_ready
from relayline.deploy.cli.supervised import watch_stdin
from relayline.deploy.machine.cores import keep_to
from relayline.wire.common import logs
from relayline.wire.common.errors import StartError, UsageError
from relayline.wire.common.places import joined_dir
from relayline.wire.links.enrolment import read_token
from relayline.wire.links.roles import Role
from relayline.wire.links.security import address_of, host_of, load_security

if TYPE_CHECKING:
    from relayline.stage.joining.config import JoinConfig
    from relayline.stage.joining.enrol import Joined


@click.command("join", short_help="Make this host a stage of a pipeline, with the line that `up` printed.")
@click.argument("address", type=Address(), metavar="[HOST:PORT]", required=False)
@click.argument("token", required=False)
@click.option("--name", default="", help="Without TOKEN: the stage to run, if this host has joined as several.")
@click.option("--listen", type=Address(), help="Where others connect [default: this host's address towards HOST].")
@click.option(
    "--advertise", default="", help="Address that others connect to [default: the one that the coordinator sees]."
)
@click.option(
    "--metrics", type=Address(), help="Where to serve Prometheus metrics [default: the coordinator's choice]."
)
@click.option(
    "--cache", type=click.Path(path_type=Path, file_okay=False), help="Where fetched layers are kept [default: cache]."
)
@click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where key and certificate are kept [default: this user's state directory].",
)
@threads_option
@click.option("--cores", type=CoreList(), default=None, help="Cores to run on, such as 0-3,8 [default: any].")
@click.option(
    "--always-fetch", is_flag=True, help="Fetch layers even if this host can read the coordinator's own file."
)
@click.option("--enrol-only", is_flag=True, help="Get the certificate and end. A later `relayline join` continues.")
@click.option("--json", "as_json", is_flag=True, help="Print the ready line as JSON.")
@telemetry_options
@log_options
@click.option("--exit-with-stdin", is_flag=True, hidden=True)
def join_command(**given: Any) -> None:
    """Get a certificate from the coordinator at HOST:PORT with TOKEN, then fetch layers and compute until SIGINT.

    `relayline up` prints the whole line for each host. The private key is made here. The token works once, for this
    host. After that, run the same line, or just `relayline join`, to join again.
    """
    from relayline.stage.joining.join import run_joined

    logs.setup("stage", as_json=given["log_json"], verbose=given["verbose"])
    check_before_load(given)  # before the token is used up, too
    root = given["state"] or joined_dir()
    try:
        joined = _joined(given, root)
    except OSError as error:
        remedy = "XDG_STATE_HOME=DIRECTORY keeps all state elsewhere, --state that of this command"
        raise StartError(f"{root}: credentials cannot be kept here: {error.strerror}; {remedy}") from error
    if given["enrol_only"]:
        click.echo(f"this host can now join as {joined.file.name}: relayline join {joined.file.enrol}")
        return
    if given["cores"]:
        keep_to(given["cores"])
    if given["exit_with_stdin"]:
        watch_stdin()
    given["name"] = joined.file.name
    run_joined(_config(given, joined), on_stage_ready(given), stage_telemetry(given), on_stage_idle(given))


def _joined(given: dict[str, Any], root: Path) -> Joined:
    """Return the membership to take up: a new one by the token, else one of those that this host has."""
    from relayline.stage.joining.enrol import enrol, renewed

    if given["token"]:
        token = read_token(given["token"])
        if given["name"] not in ("", token.name):
            raise UsageError(f"the token is for stage {token.name}, not for {given['name']}; leave out --name")
        host, port = given["address"]
        return enrol(host, port, token, root, given["advertise"])
    address = address_of(*given["address"]) if given["address"] is not None else ""
    known = chosen(root, given["name"], address)
    return renewed(known, host_of(known.file.enrol), int(known.file.enrol.rpartition(":")[2]), given["advertise"])


def chosen(root: Path, name: str = "", address: str = "") -> Joined:
    """Return the one membership of this host with this name and address (host:port); empty: any. Raises UsageError."""
    from relayline.stage.joining.enrol import memberships

    found = memberships(root)
    fits = [
        one for one in found if name in ("", one.file.name) and address in ("", one.file.enrol, one.file.coordinator)
    ]
    if len(fits) == 1:
        return fits[0]
    known = ", ".join(f"{one.file.name} at {one.file.enrol}" for one in fits or found) or "nothing yet"
    if fits:
        raise UsageError(f"this host has joined as {known}; name one of them")
    raise UsageError(
        f"this host has not joined that pipeline (it has joined {known}); give the whole line that `relayline up` "
        "printed: relayline join HOST:PORT TOKEN"
    )


def _config(given: dict[str, Any], joined: Joined) -> JoinConfig:
    from relayline.deploy.cli.join_flags import join_config

    security = load_security(joined.directory, role=Role.STAGE, name=joined.file.name)
    return join_config(given, joined.file.coordinator, joined.file.name, given["listen"], security)


@click.command("invite", short_help="Print a new join line for a host of a pipeline that runs here.")
@click.argument("stage", type=Name())
@click.option("--pipeline", default=None, help="Name of the pipeline, if several run here.")
@click.option("--host", default="", help="Address of a machine that the manifest does not name.")
@click.option("--spare", "is_spare", is_flag=True, help="With --host: the new stage stands by, without layers.")
@click.option("--state-dir", type=click.Path(path_type=Path, file_okay=False), help="State directory of the pipeline.")
def invite_command(stage: str, pipeline: str | None, host: str, state_dir: Path | None, *, is_spare: bool) -> None:
    """Print a new line with which STAGE joins from its host, if the last one has expired or was used, or the host's
    disk is gone.

    With --host, STAGE may be new: it joins the running pipeline and gets layers, unless --spare lets it stand by. Add
    it to the manifest too, so that the next start knows it. If the manifest fixes `layers`, only a spare can join.

    The line printed before no longer works. A certificate from it stays valid until `relayline certs revoke`.
    """
    from relayline.deploy.cli.drain import is_known, let_join
    from relayline.deploy.launch.control import find
    from relayline.deploy.launch.inviting import check_shares, fresh_line

    if is_spare and not host:
        raise UsageError("--spare is for a new stage; give its address too: --host ADDRESS")
    found = find(pipeline, state_dir)
    if found is None:
        raise UsageError("no pipeline runs here; `relayline up MANIFEST` starts one and prints the line of each host")
    if host and not is_spare and found.is_running and found.state.url and not is_known(found, stage):
        check_shares(found, stage)
    line = fresh_line(found, stage, host)
    if host:
        let_join(found, stage, is_spare=is_spare)
    click.echo(line)
