"""Invitations to enrol, in a file next to the CA, and the CA for the coordinator's enrolment port.

DIRECTORY/invitations.json      for each stage the hash of the token that was made last, until when it is good, and who
                                used it
DIRECTORY/codes.json            for each stage the short code that was made last; while it is open also the token that
                                it stands for, since an exchange needs both in clear. Who can read them can read the
                                CA's key, too. A token that was used, or whose code is void, is taken out at once; one
                                whose code has expired with the next look at the file
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from relayline.coordinator.joining.codes import CodedInvitation
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
from relayline.wire.links.enrolment import Enrolled, digest_of, new_token
from relayline.wire.links.join_code import SLOT_FIRST, SLOT_LAST, JoinCode, new_code, read_code
from relayline.wire.links.revocation import CRL_FILE
from relayline.wire.links.roles import Identity, Role, identity_named
from relayline.wire.links.security import CA_FILE, TOKEN_FILE, credential_host
from relayline.wire.links.tls_material import identity_of, read_certificate

FILE = "invitations.json"
CODES_FILE = "codes.json"
R = TypeVar("R")


class _Row(msgspec.Struct, frozen=True):
    stage: str  # as a URI, see wire.links.roles
    digest: str
    expires: str
    key_digest: str = ""
    used_by: str = ""
    joined_by: str = ""  # who used an earlier one: its certificate still opens the door

    def __post_init__(self) -> None:
        """Raise ValueError where `expires` is no time."""
        _moment(self.expires)


class _CodeRow(msgspec.Struct, frozen=True):
    code: str
    token: str
    expires: str
    is_relayed: bool = False
    n_wrong: int = 0
    is_used: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError where `expires` is no time."""
        _moment(self.expires)


def _moment(text: str) -> datetime.datetime:
    """Return a time with its zone. Raises ValueError."""
    found = datetime.datetime.fromisoformat(text)
    if found.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return found


def can_sign(directory: Path) -> bool:
    """Return whether a CA with its key is in `directory`, so that hosts can enrol."""
    return (directory / CA_KEY_FILE).is_file() and (directory / CA_FILE).is_file()


def invite(
    directory: Path, name: str, host: str, now: datetime.datetime | None = None, *, is_relayed: bool = False
) -> CodedInvitation:
    """Make a token for the stage `name` on `host`, good for a day, and its short code, good for JOIN_CODE_S.

    Those that were made before open nothing any more. `is_relayed`: the join line has --relay. Raises UsageError where
    the CA in `directory` cannot be read, or where all codes are taken, and OSError for a disk that cannot be written.
    """
    now = now or _now()
    ca = read_certificate(directory / CA_FILE)
    token = new_token(name, ca.public_bytes(serialization.Encoding.DER))
    stage = Identity(Role.STAGE, credential_host(host), name)
    expires = now + datetime.timedelta(seconds=bounds.INVITATION_S)
    code_expires = now + datetime.timedelta(seconds=bounds.JOIN_CODE_S)
    with _locked(directory):  # both at once: of two invitations of a stage, the newer token has the newer code
        rows, codes = _rows(directory), _tidied(_codes(directory), now)
        before = codes.pop(name, None)
        code = _free_code(codes)
        if before is not None:  # first, so that a full disk leaves no open code of a token that is dead
            _write(directory / CODES_FILE, codes)
        joined = _joined_by(rows.get(name), stage)
        rows[name] = _Row(stage.uri, digest_of(token.secret), expires.isoformat(), joined_by=joined)
        _write(directory / FILE, rows)
        codes[name] = row = _CodeRow(str(code), str(token), code_expires.isoformat(), is_relayed)
        _write(directory / CODES_FILE, codes)
    return _coded(name, row)


def _free_code(codes: dict[str, _CodeRow]) -> JoinCode:
    """Return a new code. Where every slot has a row, one of a code that has ended makes room. Raises UsageError."""
    holders = {read_code(row.code).slot: name for name, row in codes.items()}
    is_full = len(holders) > SLOT_LAST - SLOT_FIRST
    code = new_code({slot for slot, name in holders.items() if codes[name].token} if is_full else holders)
    codes.pop(holders.get(code.slot, ""), None)
    return code


def _tidied(codes: dict[str, _CodeRow], now: datetime.datetime) -> dict[str, _CodeRow]:
    """Return codes without the tokens of those that have ended, which after a while are not spoken of either."""
    found = {}
    for name, row in codes.items():
        coded = _coded(name, row)
        if now - coded.expires < datetime.timedelta(seconds=bounds.INVITATION_S):
            found[name] = msgspec.structs.replace(row, token="") if coded.problem(now) else row
    return found


def open_invitation(directory: Path, name: str, now: datetime.datetime) -> CodedInvitation | None:
    """Return the invitation of a stage whose code is open at `now`. Raises UsageError if the file cannot be read."""
    row = _codes(directory).get(name)
    found = _coded(name, row) if row is not None else None
    return found if found is not None and not found.problem(now) else None


def _coded(name: str, row: _CodeRow) -> CodedInvitation:
    expires = _moment(row.expires)
    return CodedInvitation(read_code(row.code), name, row.token, expires, row.is_relayed, row.n_wrong, row.is_used)


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
        expires = _moment(row.expires)
        return Invitation(stage, row.digest, expires, row.key_digest, row.used_by)

    def invite(self, name: str, host: str) -> CodedInvitation:
        """Make the invitation of a stage on a host, with its code. Raises UsageError."""
        return invite(self._directory, name, host)

    def bind(self, name: str, key_digest: str, address: str) -> None:
        """Note that the invitation of a stage is used."""
        with _locked(self._directory):
            rows, codes = _rows(self._directory), _tidied(_codes(self._directory), _now())
            rows[name] = msgspec.structs.replace(rows[name], key_digest=key_digest, used_by=address)
            _write(self._directory / FILE, rows)
            if name in codes:
                codes[name] = msgspec.structs.replace(codes[name], is_used=True, token="")
                _write(self._directory / CODES_FILE, codes)

    def coded(self, slot: int) -> CodedInvitation | None:
        """Return the invitation whose code begins with `slot`, whether or not it is open. Raises UsageError."""
        codes, now = _codes(self._directory), _now()
        if _tidied(codes, now) != codes:
            with contextlib.suppress(OSError), _locked(self._directory):  # a full disk: with the next look
                _write(self._directory / CODES_FILE, _tidied(_codes(self._directory), now))
        found = (_coded(name, row) for name, row in codes.items())
        return next((each for each in found if each.code.slot == slot), None)

    def note_wrong(self, code: JoinCode, n_wrong: int) -> None:
        """Write down that a code had so many wrong tries, or more. Raises UsageError, OSError."""
        with _locked(self._directory):
            codes = _codes(self._directory)
            for name, row in codes.items():
                if row.code == str(code):
                    codes[name] = msgspec.structs.replace(row, n_wrong=max(row.n_wrong, n_wrong))
                    _write(self._directory / CODES_FILE, _tidied(codes, _now()))
                    return

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


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _rows(directory: Path) -> dict[str, _Row]:
    return _read(directory / FILE, dict[str, _Row])


def _codes(directory: Path) -> dict[str, _CodeRow]:
    return _read(directory / CODES_FILE, dict[str, _CodeRow])


def _read(path: Path, kind: type[dict[str, R]]) -> dict[str, R]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return {}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read ({error}); remove it and start `relayline up` again") from error


def _write(path: Path, rows: Mapping[str, msgspec.Struct]) -> None:
    write_file(path, msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n", PRIVATE)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold off other processes of this machine that would change these files at the same time."""
    with (directory / CA_KEY_FILE).open("rb") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
