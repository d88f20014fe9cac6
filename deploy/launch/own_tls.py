"""TLS material or a join token that the launcher makes itself, for a manifest that needs some and names none.

STATE/tls/            the CA of this pipeline: ca.pem, ca-key.pem, token
STATE/tls/HOST/       what one host needs; the one of this machine is named after coordinator.host
"""

from __future__ import annotations

import datetime
import secrets
from pathlib import Path

from relayline.deploy.launch.certificates import CA_KEY_FILE, TOKEN_BYTES, init_authority, issue, write_file
from relayline.deploy.manifest import Manifest
from relayline.wire.links.security import CA_FILE, CERT_FILE, TOKEN_FILE
from relayline.wire.links.tls_material import RENEW_DAYS, canonical_name, names_of, read_certificate

DAYS_VALID = 365
NAME_CHARS_MAX = 60  # of a CA's name


def directory_name(host: str) -> str:
    """Return the name of a host's directory, the same that `relayline certs issue` chooses."""
    return host.strip("[]").replace(":", "-").replace("*", "any")


def needs_own_tls(manifest: Manifest) -> bool:
    """Return whether links run over TLS and nobody says with which material."""
    return manifest.uses_tls and manifest.spec.wire.tls.directory is None


def make_own_tls(manifest: Manifest, root: Path, now: datetime.datetime | None = None) -> Path:
    """Make a CA below `root` and a directory for every host, as far as they are not there and valid.

    Returns the directory of this machine. Raises UsageError and OSError.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    if not (root / CA_FILE).exists():
        for file in (CA_KEY_FILE, TOKEN_FILE):  # of an attempt that was cut short, from which nothing can be issued
            (root / file).unlink(missing_ok=True)
        init_authority(root, manifest.name[:NAME_CHARS_MAX], now)
    here = manifest.spec.coordinator.host
    hosts = dict.fromkeys([here, *(stage.host for stage in manifest.stages if not stage.is_local)])
    for host in hosts:
        out = root / directory_name(host)
        if not _is_good(out / CERT_FILE, host, now):
            issue(root, host, (), DAYS_VALID, out, now)
    return root / directory_name(here)


def needs_own_token(manifest: Manifest) -> bool:
    """Return whether stages join from other hosts in the clear, and nobody says with which token."""
    return not (manifest.uses_tls or manifest.all_local) and manifest.spec.wire.token_file is None


def make_own_token(path: Path) -> Path:
    """Put a join token at `path` unless there is one: without TLS nothing else tells a stage of this pipeline from
    another. Returns `path`. Raises OSError."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, secrets.token_urlsafe(TOKEN_BYTES).encode() + b"\n", 0o600)
    return path


def _is_good(path: Path, host: str, now: datetime.datetime) -> bool:
    if not path.exists():
        return False
    certificate = read_certificate(path)
    return canonical_name(host) in names_of(certificate) and (certificate.not_valid_after_utc - now).days >= RENEW_DAYS
