"""`relayline certs`: the CA of a pipeline, the certificates and join tokens of its processes, and their revocation."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

import click

from relayline.deploy.cli.options import OUTPUT, IntRange, Line, Name
from relayline.deploy.cli.paths import Directory
from relayline.wire.common.errors import UsageError
from relayline.wire.common.texts import named_stage
from relayline.wire.links.roles import NAME, Identity, Role
from relayline.wire.links.security import TOKEN_FILE, credential_host

DIRECTORY = Directory()


@click.group("certs", short_help="Make and show the certificates of a pipeline.")
def certs_command() -> None:
    """Make, show and revoke the credentials that keep a pipeline's links private.

    `relayline up` makes those of its pipelines itself, in $XDG_STATE_HOME/relayline/NAME/tls: name that directory to
    show or revoke them.

    For others run `init` once, on a machine that you trust. There, run `issue` for every process with its role:
    coordinator, one named stage, or monitor (reads metrics). Copy to each process its own directory and start it with
    --tls DIRECTORY (or, for plaintext links, with --token-file DIRECTORY/token). The CA's key (ca-key.pem) never leaves
    the machine where it was made.
    """


@certs_command.command("init", short_help="Make a CA and a join token.")
@click.argument("directory", type=DIRECTORY)
@click.option(
    "--name",
    type=Line("name"),
    default="relayline",
    show_default=True,
    help="Name of the pipeline, shown in the certificate.",
)
def init_command(directory: Path, name: str) -> None:
    """Make a CA (valid for ten years) and a join token in DIRECTORY. Never overwrites one."""
    from relayline.deploy.launch.certificates import CA_KEY_FILE, init_authority

    authority = init_authority(directory, name, _now())
    click.echo(f"made the CA of {name} in {directory}, valid until {_day(authority.not_valid_after_utc)}")
    click.echo(f"keep {directory / CA_KEY_FILE} secret: anyone who has it can join the pipeline")
    click.echo(f"next: relayline certs issue {directory} HOST --coordinator")
    click.echo(f"and for every stage: relayline certs issue {directory} HOST --stage NAME")


def _addresses(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    for text in given:
        try:
            ipaddress.ip_address(text.strip("[]"))
        except ValueError:
            raise click.BadParameter(f"{text!r} is not an IP address; give a name with --dns") from None
    return given


def _one_role(coordinator: bool, stage: str, monitor: bool) -> tuple[Role, str]:
    """Return role and stage name of flags. Raises UsageError unless one is given."""
    if sum((coordinator, bool(stage), monitor)) != 1:
        raise UsageError("give the role: one of --coordinator, --stage NAME or --monitor")
    return (Role.COORDINATOR if coordinator else Role.MONITOR if monitor else Role.STAGE), stage


@certs_command.command("issue", short_help="Make or renew the credentials of one process.")
@click.argument("directory", type=DIRECTORY)
@click.argument("host", type=Name())
@click.option("--coordinator", is_flag=True, help="For the coordinator on HOST.")
@click.option("--stage", type=Line("name"), default="", help="For the stage NAME on HOST.")
@click.option("--monitor", is_flag=True, help="For a Prometheus on HOST: it may only read the metrics of stages.")
@click.option(
    "--ip", "ips", type=Line("address"), multiple=True, callback=_addresses, help="Further IP address; may be repeated."
)
@click.option(
    "--dns", type=Line("name"), multiple=True, help="Further DNS name, e.g. of a Kubernetes service; may be repeated."
)
@click.option("--days", type=IntRange(), default=365, show_default=True, help="Days until it expires.")
@click.option(*OUTPUT, "out", type=DIRECTORY, default=None, help="Where to put it [default: DIRECTORY/NAME].")
def issue_command(
    directory: Path,
    host: str,
    coordinator: bool,
    stage: str,
    monitor: bool,
    ips: tuple[str, ...],
    dns: tuple[str, ...],
    days: int,
    out: Path | None,
) -> None:
    """Make the credential directory of a process on HOST, a name or an IP address: ca.pem, cert.pem, key.pem and a join
    token.

    Run it again to renew; running processes use the new certificate from their next connection on.
    """
    from relayline.deploy.launch.certificates import issue

    role, name = _one_role(coordinator, stage, monitor)
    out = out or directory / (name or role.value)
    made = issue(directory, host, (*ips, *dns), days, out, _now(), role=role, stage=name)
    click.echo(
        f"made {made.directory} of {made.identity}, for {', '.join(made.names)}, valid until {_day(made.expires)}"
    )
    click.echo(f"copy it to {host} and start its process with: --tls {made.directory.name}")


@certs_command.command("invite", short_help="Print a token with which a host gets its certificate.")
@click.argument("directory", type=DIRECTORY)
@click.argument("host", type=Name())
@click.option("--stage", type=Name("name"), required=True, help="The stage that HOST may become.")
def invite_command(directory: Path, host: str, stage: str) -> None:
    """Print a token with which HOST gets its certificate from a coordinator: relayline join HOST:PORT TOKEN.

    The token works once, within a day; earlier tokens of this stage no longer work. The coordinator must use the CA in
    DIRECTORY (`serve --enrol-listen`, a rendered deployment). `relayline up` makes its own tokens.
    """
    from relayline.deploy.launch.certificates import CA_KEY_FILE
    from relayline.deploy.launch.invitations import can_sign, invite

    if not NAME.fullmatch(stage):
        raise UsageError(f"--stage {stage!r} is not a stage's name: use lower-case letters, digits and dashes")
    if not can_sign(directory):
        raise UsageError(f"{directory} has no CA with its key ({CA_KEY_FILE}); `relayline certs init` makes one")
    click.echo(invite(directory, stage, host).token)


@certs_command.command("revoke", short_help="Shut out credentials; all others stay valid.")
@click.argument("directory", type=DIRECTORY)
@click.option("--coordinator", is_flag=True, help="Credentials of coordinators.")
@click.option("--stage", type=Line("name"), default="", help="Credentials of the stage of this name.")
@click.option("--monitor", is_flag=True, help="Credentials for reading metrics.")
@click.option("--host", type=Line("host"), default="", help="Credentials of this host [default: of any host].")
def revoke_command(directory: Path, coordinator: bool, stage: str, monitor: bool, host: str) -> None:
    """Revoke credentials that the CA in DIRECTORY has issued; all others stay valid.

    This writes crl.pem (certificates) and `revoked` (join tokens) into DIRECTORY and into the directories of processes
    in it. Running processes look for both files every second, in their --tls directory or next to their token file. It
    is enough to copy both to the coordinator: it refuses revoked credentials and passes crl.pem, which the CA has
    signed, on to every stage. To let a process in again, issue it a new credential.
    """
    from relayline.deploy.launch.certificates import CA_KEY_FILE, revoke, revoke_token

    if not (coordinator or stage or monitor or host):
        raise UsageError("name the owner: --coordinator, --stage NAME, --monitor or --host HOST")
    role, name = _one_role(coordinator, stage, monitor) if coordinator or stage or monitor else (None, "")
    where = credential_host(host) if host else ""
    if not (directory / CA_KEY_FILE).exists() and (directory / TOKEN_FILE).exists():
        if role is not Role.STAGE or not where:
            raise UsageError(f"{directory} has no CA, only join tokens of stages; give --stage NAME and --host HOST")
        revoke_token(directory, Identity(Role.STAGE, where, name))
        click.echo(f"revoked the join token of {named_stage(name)} on {where}")
        return

    def wanted(identity: Identity) -> bool:
        return role in (None, identity.role) and name in ("", identity.name) and where in ("", identity.host)

    done = revoke(directory, wanted, _now())
    click.echo(f"revoked: {', '.join(done.identities)}")
    click.echo(f"crl.pem and revoked are now in {', '.join(map(str, done.written))}")
    click.echo("copy both to the coordinator's --tls directory if that is elsewhere; no process needs a restart")
    if role in (None, Role.COORDINATOR) and any(text.startswith(Role.COORDINATOR.value) for text in done.identities):
        click.echo("a coordinator's join token cannot be revoked: for links without TLS make a new directory with init")


@certs_command.command("show", short_help="Show whose certificates a directory has, and until when.")
@click.argument("directory", type=DIRECTORY)
@click.pass_context
def show_command(ctx: click.Context, directory: Path) -> None:
    """Show whose certificates are in DIRECTORY and until when; exit code 1 if one has expired or they do not fit."""
    from relayline.wire.links.security import CA_FILE, CERT_FILE, KEY_FILE
    from relayline.wire.links.tls_material import check_material, identity_of, names_of, read_certificate

    if not (directory / CA_FILE).exists():
        raise UsageError(f"{directory / CA_FILE} is missing; `relayline certs init` or `issue` makes it")
    now, is_good = _now(), True
    for file in (CA_FILE, CERT_FILE):
        if not (directory / file).exists():
            continue  # where the CA lives there is no host certificate
        cert = read_certificate(directory / file)
        days = (cert.not_valid_after_utc - now).days
        state = f"expires in {days} days" if now <= cert.not_valid_after_utc else "EXPIRED"
        is_good = is_good and now <= cert.not_valid_after_utc
        click.echo(f"{file}: {cert.subject.rfc4514_string()}, from {cert.issuer.rfc4514_string()}")
        click.echo(f"  valid until {_day(cert.not_valid_after_utc)}: {state}")
        if file == CERT_FILE:
            click.echo(f"  of {identity_of(cert) or 'no role: it is refused; issue it again'}")
            click.echo(f"  for {', '.join(names_of(cert)) or 'no name: nobody can connect to it'}")
    if is_good and (directory / CERT_FILE).exists():
        try:
            check_material(directory / CA_FILE, directory / CERT_FILE, directory / KEY_FILE, now)
        except UsageError as error:
            click.echo(f"problem: {error.message}")
            is_good = False
    ctx.exit(0 if is_good else 1)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _day(when: datetime.datetime) -> str:
    return f"{when:%Y-%m-%d}"
