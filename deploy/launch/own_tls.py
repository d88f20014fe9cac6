"""Credentials that the launcher makes itself, for a manifest that needs them and names none.

* STATE/tls/: the CA of this pipeline, see deploy.launch.certificates.
* STATE/tls/coordinator/: the coordinator's key and certificate.
* STATE/tls/NAME/: those of the stage of that name, if it runs here.
* STATE/join/token: the coordinator's join token, where links are plaintext.
* STATE/join/NAME.token: a stage's join token, also where the manifest names the coordinator's.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509

from relayline.deploy.launch.certificates import (
    CA_KEY_FILE,
    PRIVATE,
    init_authority,
    is_whole,
    issue,
    issued_token,
    revoked_serials,
)
from relayline.deploy.manifest import Manifest, Stage
from relayline.wire.common.files import write_file
from relayline.wire.links import role_tokens
from relayline.wire.links.roles import COORDINATOR_DIR, Identity, Role
from relayline.wire.links.security import (
    CA_FILE,
    CERT_FILE,
    TOKEN_FILE,
    TOKEN_VARIABLE,
    credential_host,
    read_token,
)
from relayline.wire.links.tls_material import RENEW_DAYS, canonical_name, identity_of, names_of, read_certificate

JOIN_DIR = "join"  # in the state directory
DAYS_VALID = 365
NAME_CHARS_MAX = 60  # of a CA's name


def host_of_stage(manifest: Manifest, stage: Stage) -> str:
    """Return the host under which others know a stage: the coordinator's for those of this machine."""
    return manifest.spec.coordinator.host if stage.is_local else stage.host


def needs_own_tls(manifest: Manifest) -> bool:
    """Return whether links run over TLS without given material."""
    return manifest.uses_tls and manifest.spec.wire.tls.directory is None


def make_own_tls(manifest: Manifest, root: Path, now: datetime.datetime | None = None) -> Path:
    """Make a CA below `root` and a directory for every process of this machine, unless valid ones exist.

    Returns the coordinator's directory. Raises UsageError and OSError.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    if not (root / CA_FILE).exists():
        for file in (CA_KEY_FILE, TOKEN_FILE):  # of an attempt that was cut short, from which nothing can be issued
            (root / file).unlink(missing_ok=True)
        init_authority(root, manifest.name[:NAME_CHARS_MAX], now)
    wanted = {COORDINATOR_DIR: Identity(Role.COORDINATOR, manifest.spec.coordinator.host)}
    wanted |= {
        stage.name: Identity(Role.STAGE, host_of_stage(manifest, stage), stage.name)
        for stage in manifest.members
        if stage.is_local  # the others make their own keys, and enrol
    }
    revoked = revoked_serials(root)
    for name, identity in wanted.items():
        out = root / name
        if not _is_good(out, identity, revoked, now):
            issue(root, identity.host, (), DAYS_VALID, out, now, role=identity.role, stage=identity.name)
    return root / COORDINATOR_DIR


def renew_own_tls(root: Path, names: Iterable[str], now: datetime.datetime | None = None) -> tuple[str, ...]:
    """Renew those certificates below `root` that end soon, of the processes of these names; returns whose they were.

    Running processes take them up with their next connection. Raises UsageError and OSError.
    """
    now, renewed = now or datetime.datetime.now(datetime.UTC), []
    revoked = revoked_serials(root)
    for name in names:
        path = root / name / CERT_FILE
        if not path.exists():
            continue
        certificate = read_certificate(path)
        identity = identity_of(certificate)
        if identity is None or certificate.serial_number in revoked or not _ends_soon(certificate, now):
            continue
        hosts = names_of(certificate)
        issue(root, identity.host, hosts, DAYS_VALID, path.parent, now, role=identity.role, stage=identity.name)
        renewed.append(name)
    return tuple(renewed)


def needs_own_token(manifest: Manifest) -> bool:
    """Return whether links are plaintext without a given token.

    On loopback too: without one every user of this machine could talk to the stages.
    """
    return not manifest.uses_tls and manifest.spec.wire.token_file is None


def given_root() -> str:
    """Return the coordinator's join token that RELAYLINE_TOKEN holds, for callers that ask the stages; else nothing."""
    text = os.environ.get(TOKEN_VARIABLE, "")
    token = role_tokens.read(text)
    return text if token is not None and token.role is Role.COORDINATOR else ""


def make_own_token(path: Path) -> Path:
    """Put a coordinator's join token at `path`: the caller's own, or a new one unless there is one.

    Returns `path`. Raises UsageError, OSError.
    """
    given = given_root()
    if given or not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_file(path, (given or role_tokens.new_root()).encode() + b"\n", PRIVATE)
    return path


def makes_stage_tokens(manifest: Manifest) -> bool:
    """Return whether stages get token files derived from the manifest's, rather than those next to their certificates,
    or none.
    """
    return manifest.spec.wire.token_file is not None


def make_stage_tokens(manifest: Manifest, directory: Path) -> None:
    """Put every stage's join token into `directory`, made from the coordinator's. Raises UsageError, OSError."""
    given = manifest.spec.wire.token_file
    assert given is not None
    source = manifest.resolve(given)
    read_token(source)
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    for stage in manifest.members:
        identity = Identity(Role.STAGE, credential_host(host_of_stage(manifest, stage)), stage.name)
        token = issued_token(source.parent, identity, source.name)
        write_file(stage_token(directory, stage), token.encode() + b"\n", PRIVATE)


def stage_token(directory: Path, stage: Stage) -> Path:
    """Return the path of a stage's own token file."""
    return directory / f"{stage.name}.token"


def _is_good(directory: Path, wanted: Identity, revoked: frozenset[int], now: datetime.datetime) -> bool:
    if not (directory / CERT_FILE).exists() or not is_whole(directory):
        return False
    certificate = read_certificate(directory / CERT_FILE)
    stated = Identity(wanted.role, credential_host(wanted.host), wanted.name)
    return (
        identity_of(certificate) == stated
        and canonical_name(wanted.host) in names_of(certificate)
        and certificate.serial_number not in revoked
        and not _ends_soon(certificate, now)
    )


def _ends_soon(certificate: x509.Certificate, now: datetime.datetime) -> bool:
    return (certificate.not_valid_after_utc - now).days < RENEW_DAYS
