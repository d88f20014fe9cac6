"""The join lines of a launch: which hosts get one, and with which CA."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from relayline.deploy.launch.certificates import is_shut_out
from relayline.deploy.launch.invitations import can_sign, invite, invited_host, open_invitation
from relayline.deploy.launch.state import still_starting
from relayline.deploy.launch.target import MANIFEST_SUFFIXES
from relayline.deploy.manifest import Manifest, load_manifest
from relayline.deploy.manifest.gateway import is_gateway
from relayline.wire.common import bounds
from relayline.wire.common.errors import RelaylineError, StartError, UsageError
from relayline.wire.links.join_code import code_line

if TYPE_CHECKING:
    from relayline.deploy.launch.control import Launched


def authority_of(manifest: Manifest) -> Path | None:
    """Return the directory of the CA that signs for hosts that join, None where none can.

    None also where no host has to: then nothing listens for them.
    """
    directory = manifest.spec.wire.tls.directory
    if directory is None or not manifest.uses_tls or all(stage.is_local for stage in manifest.members):
        return None
    authority = manifest.resolve(directory).parent
    return authority if can_sign(authority) else None


def added_host(launched: Launched, name: str) -> str:
    """Return the host that a stage was invited from which was added while the pipeline serves; "" if none is known."""
    try:
        authority = authority_of(load_manifest(launched.directory.manifest))
    except RelaylineError:
        return ""
    return invited_host(authority, name) if authority is not None else ""


def has_lost_credentials(launched: Launched, name: str) -> bool:
    """Return whether a stage's credentials are revoked, so that its host needs a new line."""
    try:
        authority = authority_of(load_manifest(launched.directory.manifest))
        return authority is not None and is_shut_out(authority, name, datetime.datetime.now(datetime.UTC))
    except RelaylineError:
        return False


def join_line(address: str, token: str, *, is_relayed: bool = False) -> str:
    """Return what to run on a host; `address` (host:port) is where it enrols."""
    return f"relayline join {address} {token}" + (" --relay" if is_relayed else "")


def check_is_pipeline(launched: Launched) -> None:
    """Raise UsageError unless it is a pipeline that runs here: a gateway has no stages of its own."""
    name = launched.state.name
    if not launched.is_running:
        raise UsageError(f"{name} does not run; `relayline up` starts it and prints the line of each host")
    if is_gateway(launched.directory.manifest):
        names = ", ".join(record.name for record in launched.state.processes if record.role == "pipeline") or "none"
        raise UsageError(f"{name} is a gateway; name the pipeline with --pipeline NAME (it runs here: {names})")


@dataclasses.dataclass(frozen=True, slots=True)
class OpenLine:
    """A join line whose code is open."""

    line: str
    short: str
    """Its short form."""
    expires_unix_s: int
    """Of the code."""


def for_a_while(short: str, expires_unix_s: int | None = None) -> str:
    """Return what to print below a join line: its short form, and until when that is good; None: it was just made."""
    if expires_unix_s is None:
        return f"or, within {bounds.JOIN_CODE_S // 60} minutes: {short}"
    return f"or, until {datetime.datetime.fromtimestamp(expires_unix_s):%H:%M}: {short}"


def fresh_line(launched: Launched, name: str, host: str = "") -> tuple[str, str]:
    """Return a new line for a stage of a pipeline that runs here, and its short form.

    Raises UsageError if there is no line to give.

    `host`: of a stage that the manifest does not name; it can be left out once the stage was invited.
    """
    pipeline, address = launched.state.name, launched.state.enrol
    check_is_pipeline(launched)
    manifest = load_manifest(launched.directory.manifest)
    stage = next((stage for stage in manifest.members if stage.name == name), None)
    authority = authority_of(manifest)
    if stage is None and not host and authority is not None:
        host = invited_host(authority, name)
    if stage is not None and not stage.is_local:
        host = stage.host
    elif stage is not None or not host:
        remote = ", ".join(stage.name for stage in manifest.members if not stage.is_local) or "none"
        more = "" if stage is not None else "; for a new stage give its address too: --host ADDRESS"
        raise UsageError(f"{pipeline} has no stage {name!r} on another host; its stages there: {remote}{more}")
    if authority is None or not address:
        raise UsageError(
            f"hosts of {pipeline} get their credentials by hand: its links are plaintext, or its CA's key is elsewhere"
        )
    is_relayed = stage is not None and stage.relay
    coded = invite(authority, name, host, is_relayed=is_relayed)
    short = code_line(coded.code, address, is_announced=manifest.serving.announce)
    return join_line(address, coded.token, is_relayed=is_relayed), short


def open_line(launched: Launched, name: str, now: datetime.datetime) -> OpenLine | None:
    """Return the newest line of a stage while its code is open at `now`, None otherwise."""
    address = launched.state.enrol
    try:
        manifest = load_manifest(launched.directory.manifest)
        authority = authority_of(manifest)
        found = open_invitation(authority, name, now) if authority is not None and address else None
    except RelaylineError:
        return None
    if found is None:
        return None
    line = join_line(address, found.token, is_relayed=found.is_relayed)
    short = code_line(found.code, address, is_announced=manifest.serving.announce)
    return OpenLine(line, short, int(found.expires.timestamp()))


def check_host(launched: Launched, name: str, host: str) -> bool:
    """Return whether a stage that is invited from `host` is none of the manifest's.

    Raises UsageError for a stage that the manifest has on another host: it would get a line for that one. Raises
    StartError for a new stage of a pipeline that has no API yet, which lets it join.
    """
    manifest = load_manifest(launched.directory.manifest)
    stage = next((stage for stage in manifest.members if stage.name == name), None)
    if stage is not None and not stage.is_local and stage.host != host:
        raise UsageError(
            f"the manifest has {name} on {stage.host}; leave out --host, or change the manifest and run "
            f"`relayline restart {launched.state.name}`"
        )
    if stage is None and not launched.state.url:
        raise StartError(still_starting(launched.state.name))
    return stage is None


def check_shares(launched: Launched, name: str) -> None:
    """Raise UsageError if a new stage would share layers that the user's manifest fixes, as `up` refuses it too.

    The manifest is read again: a user may have taken the layers out meanwhile. Raises ManifestError (a UsageError).
    """
    path = Path(launched.state.manifest)
    if path.suffix.lower() not in MANIFEST_SUFFIXES or not path.exists():
        return  # of a model without a manifest, which fixes nothing
    manifest = load_manifest(path)
    running = {stage.name for stage in load_manifest(launched.directory.manifest).members}
    fixed = [stage.name for stage in manifest.stages if stage.layer_range is not None and stage.name in running]
    if fixed:
        raise UsageError(
            f"{name} would share all layers with the others, and {path.name} fixes `layers` of {', '.join(fixed)}; "
            f"leave these out of it until {name} has joined, or give --spare: {name} then stands by"
        )
