"""Invitations to enrol, in a file next to the CA, and the CA for the coordinator's enrolment port.

DIRECTORY/invitations.json      for each stage the hash of the token that was made last, until when it is good, and who
                                used it; the token itself is printed once and kept nowhere here
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
from collections.abc import Iterator
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from relayline.coordinator.joining.invitations import Invitation
from relayline.deploy.launch.certificates import (
    CA_KEY_FILE,
    CERT_DAYS_DEFAULT,
    PRIVATE,
    issued_token,
    revoked_serials,
    sign_key,
)
from relayline.wire.common import bounds
from relayline.wire.common.errors import UnauthenticatedError, UsageError
from relayline.wire.common.files import write_file
from relayline.wire.links.enrolment import Enrolled, JoinToken, digest_of, new_token
from relayline.wire.links.revocation import CRL_FILE
from relayline.wire.links.roles import Identity, Role, identity_named
from relayline.wire.links.security import CA_FILE, TOKEN_FILE, credential_host
from relayline.wire.links.tls_material import identity_of, read_certificate

FILE = "invitations.json"


class _Row(msgspec.Struct, frozen=True):
    stage: str  # as a URI, see wire.links.roles
    digest: str
    expires: str
    key_digest: str = ""
    used_by: str = ""
    joined_by: str = ""  # who used an earlier one: its certificate still opens the door


def can_sign(directory: Path) -> bool:
    """Return whether a CA with its key is in `directory`, so that hosts can enrol."""
    return (directory / CA_KEY_FILE).is_file() and (directory / CA_FILE).is_file()


def invite(directory: Path, name: str, host: str, now: datetime.datetime | None = None) -> JoinToken:
    """Make a token for the stage `name` on `host`, good for a day; one that was made before opens nothing any more.

    Raises UsageError where the CA in `directory` cannot be read.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    ca = read_certificate(directory / CA_FILE)
    token = new_token(name, ca.public_bytes(serialization.Encoding.DER))
    stage = Identity(Role.STAGE, credential_host(host), name)
    expires = now + datetime.timedelta(seconds=bounds.INVITATION_S)
    with _locked(directory) as rows:
        joined = _joined_by(rows.get(name), stage)
        rows[name] = _Row(stage.uri, digest_of(token.secret), expires.isoformat(), joined_by=joined)
    return token


def has_joined(directory: Path, name: str, host: str) -> bool:
    """Return whether the stage `name` has joined from `host` before, so that it may come back without a new token."""
    stage = Identity(Role.STAGE, credential_host(host), name)
    return bool(_joined_by(_rows(directory).get(name), stage))


def invited_host(directory: Path, name: str) -> str:
    """Return the host that the stage `name` was last invited from; "" if it never was."""
    row = _rows(directory).get(name)
    stage = identity_named(row.stage) if row is not None else None
    return stage.host if stage is not None else ""


def _joined_by(row: _Row | None, stage: Identity) -> str:
    return "" if row is None or row.stage != stage.uri else row.used_by or row.joined_by


class SigningAuthority:
    """The CA of a directory, for `coordinator.joining.enrol`."""

    def __init__(self, directory: Path) -> None:
        """Raise UsageError if there is no CA with its key."""
        if not can_sign(directory):
            raise UsageError(f"--authority {directory} holds no {CA_FILE} and {CA_KEY_FILE} of `relayline certs init`")
        self._directory = directory

    def ca_pem(self) -> str:
        """Return the CA's certificate."""
        return (self._directory / CA_FILE).read_text()

    def invitation(self, name: str) -> Invitation | None:
        """Return the invitation of a stage."""
        row = _rows(self._directory).get(name)
        stage = identity_named(row.stage) if row is not None else None
        if row is None or stage is None:
            return None
        expires = datetime.datetime.fromisoformat(row.expires)
        return Invitation(stage, row.digest, expires, row.key_digest, row.used_by)

    def bind(self, name: str, key_digest: str, address: str) -> None:
        """Note that the invitation of a stage is used."""
        with _locked(self._directory) as rows:
            rows[name] = msgspec.structs.replace(rows[name], key_digest=key_digest, used_by=address)

    def key_of(self, csr_pem: str) -> bytes:
        """Return the public key (DER) of a certificate request that its key has signed. Raises UsageError."""
        return _der(_requested_key(csr_pem))

    def holder(self, certificate_pem: str, now: datetime.datetime) -> tuple[Identity, bytes]:
        """Return whom a certificate of this CA names and its public key. Raises UnauthenticatedError."""
        authority = read_certificate(self._directory / CA_FILE)
        try:
            cert = x509.load_pem_x509_certificate(certificate_pem.encode())
            cert.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as error:
            raise UnauthenticatedError("the certificate of this renewal does not belong to this pipeline") from error
        identity = identity_of(cert)
        if identity is None or cert.serial_number in revoked_serials(self._directory):
            raise UnauthenticatedError(f"the certificate of {identity or 'nobody'} is revoked and cannot be renewed")
        if not cert.not_valid_before_utc <= now <= cert.not_valid_after_utc:
            raise UnauthenticatedError(
                f"the certificate of {identity} expired at {cert.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; "
                f"`relayline invite {identity.name}` on the coordinator's machine prints a new line"
            )
        return identity, _der(cert.public_key())

    def sign(self, csr_pem: str, stage: Identity, names: tuple[str, ...], now: datetime.datetime) -> Enrolled:
        """Return the credentials of a stage. Raises UsageError."""
        directory, key = self._directory, _requested_key(csr_pem)
        cert, _ = sign_key(directory, key, stage, stage.host, names, CERT_DAYS_DEFAULT, now)
        token = issued_token(directory, stage) if (directory / TOKEN_FILE).exists() else ""
        crl = (directory / CRL_FILE).read_text() if (directory / CRL_FILE).exists() else ""
        return Enrolled(cert.public_bytes(serialization.Encoding.PEM).decode(), token, crl)


def _requested_key(csr_pem: str) -> ec.EllipticCurvePublicKey:
    try:
        csr = x509.load_pem_x509_csr(csr_pem.encode())
        is_signed = csr.is_signature_valid
        key = csr.public_key()
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as error:
        raise UsageError("the certificate request cannot be read") from error
    if not is_signed or not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != ec.SECP256R1.name:
        raise UsageError("the certificate request is not signed by its own P-256 key")
    return key


def _der(key: object) -> bytes:
    assert hasattr(key, "public_bytes")
    found: bytes = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return found


def _rows(directory: Path) -> dict[str, _Row]:
    path = directory / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, _Row])
    except FileNotFoundError:
        return {}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read ({error}); remove it and start `relayline up` again") from error


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[dict[str, _Row]]:
    """Yield the rows for a change that no other process of this machine makes at the same time."""
    with (directory / CA_KEY_FILE).open("rb") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        rows = _rows(directory)
        yield rows
        write_file(directory / FILE, msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n", PRIVATE)
