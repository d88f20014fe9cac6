"""`relayline certs`: the CA of a pipeline, its per-host certificates and its join token."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

import click

from relayline.wire.common.errors import UsageError

DIRECTORY = click.Path(path_type=Path)


@click.group("certs", short_help="Make and show the certificates of a pipeline.")
def certs_command() -> None:
    """Make the certificates that keep a pipeline's links private, and show what is in them.

    `init` once, on a machine that you trust; `issue` there for every host; copy each host its own directory and start
    its processes with --tls DIRECTORY. The CA's key (ca-key.pem) never leaves the machine where it was made.
    """


@certs_command.command("init")
@click.argument("directory", type=DIRECTORY)
@click.option("--name", default="relayline", show_default=True, help="Name of the pipeline, shown in the certificate.")
def init_command(directory: Path, name: str) -> None:
    """Make a CA (ten years) and a join token in DIRECTORY. Refuses to overwrite."""
    from relayline.deploy.launch.certificates import CA_KEY_FILE, init_authority

    authority = init_authority(directory, name, _now())
    click.echo(f"made the CA of {name} in {directory}, valid until {_day(authority.not_valid_after_utc)}")
    click.echo(f"keep {directory / CA_KEY_FILE} secret: whoever has it can join the pipeline")
    click.echo(f"next, for every host: relayline certs issue {directory} HOST")


def _addresses(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    for text in given:
        try:
            ipaddress.ip_address(text.strip("[]"))
        except ValueError:
            raise click.BadParameter(f"{text!r} is no IP address; a name is given with --dns") from None
    return given


@certs_command.command("issue")
@click.argument("directory", type=DIRECTORY)
@click.argument("host")
@click.option("--ip", "ips", multiple=True, callback=_addresses, help="Further IP address; may be repeated.")
@click.option("--dns", multiple=True, help="Further DNS name, e.g. of a Kubernetes service; may be repeated.")
@click.option("--days", type=int, default=365, show_default=True, help="How long it is valid.")
@click.option("--out", type=DIRECTORY, default=None, help="Where to put it [default: DIRECTORY/HOST].")
def issue_command(
    directory: Path, host: str, ips: tuple[str, ...], dns: tuple[str, ...], days: int, out: Path | None
) -> None:
    """Make HOST (a name or an IP address) its own directory: ca.pem, cert.pem, key.pem and the join token.

    Called again it renews; running processes take up the new certificate with their next connection.
    """
    from relayline.deploy.launch.certificates import issue

    out = out or directory / host.strip("[]").replace(":", "-").replace("*", "any")
    made = issue(directory, host, (*ips, *dns), days, out, _now())
    click.echo(f"made {made.directory} for {', '.join(made.names)}, valid until {_day(made.expires)}")
    click.echo(f"copy it to {host} and start its processes with: --tls {made.directory.name}")


@certs_command.command("show")
@click.argument("directory", type=DIRECTORY)
@click.pass_context
def show_command(ctx: click.Context, directory: Path) -> None:
    """Show whose certificates are in DIRECTORY and until when; exit code 1 if one has expired or they do not fit."""
    from relayline.wire.links.security import CA_FILE, CERT_FILE, KEY_FILE
    from relayline.wire.links.tls_material import check_material, names_of, read_certificate

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
