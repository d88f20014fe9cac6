"""`relayline join`: this host becomes a stage of a pipeline with a code or one line."""

from __future__ import annotations

import dataclasses
import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relayline.deploy.cli.interrupts import SUPERVISED
from relayline.deploy.cli.join_flags import relay_option, stage_telemetry
from relayline.deploy.cli.options import (
    Address,
    CoreList,
    Line,
    log_options,
    telemetry_options,
    threads_option,
)
from relayline.deploy.cli.paths import Directory
from relayline.deploy.cli.stage import check_before_load, on_stage_idle, on_stage_ready
from relayline.deploy.machine.cores import keep_to
from relayline.wire.common import logs
from relayline.wire.common.errors import StartError, UsageError
from relayline.wire.common.places import joined_dir
from relayline.wire.common.process import end_with_stdin
from relayline.wire.links import enrolment
from relayline.wire.links.announcement import NONE_NEARBY
from relayline.wire.links.enrolment import read_token
from relayline.wire.links.join_code import JoinCode, is_code_like, read_code
from relayline.wire.links.roles import Role
from relayline.wire.links.security import address_of, host_of, load_security, port_of

if TYPE_CHECKING:
    from relayline.stage.joining.config import JoinConfig
    from relayline.stage.joining.enrol import Joined, JoinedFile, PendingFile
    from relayline.wire.links.announcement import Announcement

log = logging.getLogger("relayline.stage")

NAME_ONE = (
    "name one of them: relayline join HOST:PORT --name NAME, or forget those of the past: relayline join --forget NAME"
)


class AddressOrCode(Address):
    """HOST:PORT, HOST for the port where hosts get their certificates, or a join code. Converts to (host, port) or to a
    JoinCode.
    """

    name = "host or code"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Split and check one of them. Raises UsageError for a code with too few digits."""
        text = value if isinstance(value, str) else ""
        if is_code_like(text):
            return read_code(text)
        is_bare = text and (":" not in text or text.endswith("]"))
        return super().convert(f"{text}:{enrolment.PORT}" if is_bare else value, param, ctx)


@click.command("join", short_help="Make this host a stage of a pipeline, with the code or the line that `up` printed.")
@click.argument("address", type=AddressOrCode(), metavar="[HOST[:PORT]]", required=False)
@click.argument("token", type=Line(), metavar="[CODE|TOKEN]", required=False)
@click.option(
    "--name",
    type=Line("name"),
    default="",
    help="Without CODE or TOKEN: the stage to run, if this host has joined as several.",
)
@click.option("--listen", type=Address(), help="Where others connect [default: this host's address towards HOST].")
@click.option(
    "--advertise",
    type=Line("host"),
    default="",
    help="Address that others connect to [default: the one that the coordinator sees].",
)
@relay_option
@click.option(
    "--metrics", type=Address(), help="Where to serve Prometheus metrics [default: the coordinator's choice]."
)
@click.option("--cache", type=Directory(), help="Where fetched layers are kept [default: cache].")
@click.option(
    "--state",
    type=Directory(),
    help="Where key and certificate are kept [default: this user's state directory].",
)
@threads_option
@click.option("--cores", type=CoreList(), default=None, help="Cores to run on, such as 0-3,8 [default: any].")
@click.option(
    "--always-fetch", is_flag=True, help="Fetch layers even if this host can read the coordinator's own file."
)
@click.option("--enrol-only", is_flag=True, help="Get the certificate and end. A later `relayline join` continues.")
@click.option(
    "--forget",
    type=Line("name"),
    default="",
    help="Delete this host's credentials for a stage of the past and end; with HOST:PORT, only those for there.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the ready line as JSON.")
@telemetry_options
@log_options
@click.option(SUPERVISED, is_flag=True, hidden=True)
def join_command(**given: Any) -> None:
    """Get a certificate from a coordinator, then fetch layers and compute until SIGINT or SIGTERM.

    `relayline up` prints two lines for each host. `relayline join CODE`, such as 482-177-309, finds the pipeline on the
    local network; the code is good for 30 minutes. `relayline join HOST CODE` works from other networks too, and where
    multicast is blocked. `relayline join HOST:PORT TOKEN` is good for a day.

    The private key is made here. Code and token work once, for this host. After that, just `relayline join` joins
    again, also if the first run was interrupted. `relayline join --forget NAME` drops a stage that this host was.
    """
    from relayline.stage.joining.config import check_relayed
    from relayline.stage.joining.join import run_joined

    logs.setup("stage", as_json=given["log_json"], verbose=given["verbose"])
    check_before_load(given)  # before the token is used up, too
    if given["is_relayed"]:
        check_relayed(given["listen"] is not None, given["advertise"])
    root = given["state"] or joined_dir()
    if given["forget"]:
        _forget(given, root)
        return
    if (code := _code(given)) is not None:
        _put_line(given, code)
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
        end_with_stdin()
    given["name"] = joined.file.name
    if given["is_relayed"] is None:
        given["is_relayed"] = joined.file.is_relayed
    run_joined(_config(given, joined), on_stage_ready(given), stage_telemetry(given), on_stage_idle(given))


def _forget(given: dict[str, Any], root: Path) -> None:
    from relayline.stage.joining.enrol import forget

    name, address = given["forget"], given["address"]
    if given["token"] or given["name"] or isinstance(address, JoinCode):
        raise UsageError("--forget deletes a membership and joins none; give no code, token or --name with it")
    there = address_of(*address) if address is not None else ""
    try:
        gone = forget(root, lambda file: _fits(file, name, there))
    except OSError as error:
        raise StartError(f"{root}: credentials cannot be deleted here: {error.strerror}") from error
    if not gone:
        raise UsageError(f"this host has not joined as {name}{f' at {there}' if there else ''}; nothing is forgotten")
    for file in gone:
        click.echo(f"forgot {file.name} at {file.enrol}; joining as it again needs a new code")


def _code(given: dict[str, Any]) -> JoinCode | None:
    """Return the code among the arguments. Raises UsageError for one in a wrong place, or with too few digits."""
    if isinstance(given["address"], JoinCode):
        if given["token"]:
            raise UsageError("give the host before the code: relayline join HOST CODE")
        return given["address"]
    return read_code(given["token"]) if is_code_like(given["token"] or "") else None


def _put_line(given: dict[str, Any], code: JoinCode) -> None:
    """Put what the long line says in the place of a code. Raises as `holder_of` and `invited`."""
    from relayline.stage.joining.by_code import Coordinator, holder_of, invited
    from relayline.stage.joining.config import check_relayed

    is_given = not isinstance(given["address"], JoinCode)
    if is_given:
        at = Coordinator(*given["address"])
    else:
        found = _nearby()
        at = holder_of(
            code, [(each.pipeline, [Coordinator(host, each.port) for host in each.addresses]) for each in found]
        )
    invitation = invited(code, at)
    token = read_token(invitation.token)
    log.info("invited to pipeline %s as %s", invitation.pipeline, token.name)
    if not is_given:
        given["address"] = Address().convert(invitation.address, None, None)
    given["token"] = invitation.token
    if given["is_relayed"] is None and invitation.is_relayed:
        check_relayed(given["listen"] is not None, given["advertise"])
        given["is_relayed"] = True


def _nearby() -> list[Announcement]:
    """Return the pipelines on the local network. Raises StartError where there is none."""
    from relayline.stage.joining.nearby import pipelines_nearby

    found = pipelines_nearby()
    if not found:
        raise StartError(f"{NONE_NEARBY}; give its address: relayline join HOST CODE")
    return found


def _joined(given: dict[str, Any], root: Path) -> Joined:
    """Return the membership to take up: a new one by the token, else one that this host has begun with and was
    interrupted, else one of those that it has.
    """
    from relayline.stage.joining.enrol import await_clock, enrol, renewed

    if given["token"]:
        token = read_token(given["token"])
        if given["name"] not in ("", token.name):
            raise UsageError(f"the token is for {token.name}, not for {given['name']}; leave out --name")
        host, port = given["address"]
        return enrol(host, port, token, root, given["advertise"], is_relayed=bool(given["is_relayed"]))
    address = address_of(*given["address"]) if given["address"] is not None else ""
    if (line := _begun(root, given["name"], address)) is not None:
        log.info("going on to join %s as %s, which was interrupted", line.enrol, line.name)
        is_relayed = line.is_relayed if given["is_relayed"] is None else given["is_relayed"]
        host, port = host_of(line.enrol), port_of(line.enrol)
        advertise = given["advertise"] or line.advertise
        return enrol(host, port, read_token(line.token), root, advertise, is_relayed=is_relayed)
    known = chosen(root, given["name"], address)
    is_relayed = known.file.is_relayed if given["is_relayed"] is None else given["is_relayed"]
    host, port = host_of(known.file.enrol), port_of(known.file.enrol)
    await_clock(known.directory)
    return renewed(known, host, port, given["advertise"], is_relayed=is_relayed)


def _begun(root: Path, name: str, address: str) -> PendingFile | None:
    """Return the one join line that this host has begun with, if there is one. Raises UsageError for several."""
    from relayline.stage.joining.enrol import unfinished

    found = [line for line in unfinished(root) if _fits(line, name, address)]
    if len(found) > 1:
        known = ", ".join(f"{line.name} at {line.enrol}" for line in found)
        raise UsageError(f"this host has begun to join as {known}; {NAME_ONE}")
    return found[0] if found else None


def _fits(file: JoinedFile | PendingFile, name: str, address: str) -> bool:
    return name in ("", file.name) and address in ("", file.enrol, getattr(file, "coordinator", ""))


def chosen(root: Path, name: str = "", address: str = "") -> Joined:
    """Return the one membership of this host with this name and address (host:port); empty: any. Raises UsageError.

    Of several with the same name and address it is the newest: only one pipeline has that address at a time.
    """
    from relayline.stage.joining.enrol import memberships

    found = memberships(root)
    latest = {(one.file.name, one.file.enrol): one for one in found if _fits(one.file, name, address)}
    fits = list(latest.values())
    if len(fits) == 1:
        return fits[0]
    known = ", ".join(f"{one.file.name} at {one.file.enrol}" for one in fits or found)
    if fits:
        raise UsageError(f"this host has joined as {known}; {NAME_ONE}")
    problem = f"has not joined that pipeline, only {known}" if known else "has not joined a pipeline yet"
    raise UsageError(
        f"this host {problem}; give the code or the whole line that `relayline up` printed: relayline join CODE, or "
        "relayline join HOST:PORT TOKEN"
    )


def _config(given: dict[str, Any], joined: Joined) -> JoinConfig:
    from relayline.deploy.cli.join_flags import join_config
    from relayline.stage.joining.enrol import keep_current, own_address

    security = load_security(joined.directory, role=Role.STAGE, name=joined.file.name)
    config = join_config(given, joined.file.coordinator, joined.file.name, given["listen"], security)
    host, port = host_of(joined.file.enrol), port_of(joined.file.enrol)
    renew = functools.partial(
        keep_current, joined, host, port, given["advertise"],
        is_relayed=bool(given["is_relayed"]), at_first=own_address(host, port),
    )  # fmt: skip
    return dataclasses.replace(config, renew=renew)
