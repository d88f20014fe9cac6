"""The join lines of a launch: which hosts get one, and with which CA."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from relayline.deploy.launch.invitations import can_sign, invite, invited_host
from relayline.deploy.launch.target import MANIFEST_SUFFIXES
from relayline.deploy.manifest import Manifest, load_manifest
from relayline.deploy.manifest.gateway import is_gateway
from relayline.wire.common.errors import RelaylineError, UsageError
from relayline.wire.links.enrolment import JoinToken

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


def join_line(address: str, token: JoinToken) -> str:
    """Return what to run on a host; `address` (host:port) is where it enrols."""
    return f"relayline join {address} {token}"


def fresh_line(launched: Launched, name: str, host: str = "") -> str:
    """Return a new line for a stage of a pipeline that runs here. Raises UsageError if there is no line to give.

    `host`: of a stage that the manifest does not name; it can be left out once the stage was invited.
    """
    pipeline, address = launched.state.name, launched.state.enrol
    if not launched.is_running:
        raise UsageError(f"{pipeline} does not run; `relayline up` starts it and prints the line of each host")
    if is_gateway(launched.directory.manifest):
        names = ", ".join(record.name for record in launched.state.processes if record.role == "pipeline") or "none"
        raise UsageError(f"{pipeline} is a gateway; name the pipeline with --pipeline NAME (it runs here: {names})")
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
    return join_line(address, invite(authority, name, host))


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
