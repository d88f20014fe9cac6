"""Makes the CA of a pipeline, and for each process its certificate and join token; revokes them. Files only.

DIRECTORY/ca.pem, ca-key.pem the CA DIRECTORY/token the coordinator's join token, from which the stages' follow
DIRECTORY/issued a line for every certificate: serial number, expiry, identity DIRECTORY/crl.pem, revoked what is
revoked, see wire.links.revocation DIRECTORY/NAME/ what one process needs and nothing else
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import ipaddress
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from relayline.deploy.launch.state import state_root
from relayline.wire.common.errors import UsageError
from relayline.wire.common.files import replaced, write_file
from relayline.wire.links import role_tokens
from relayline.wire.links.revocation import CRL_BYTES_MAX, CRL_FILE, REVOKED_FILE, read_crl
from relayline.wire.links.roles import NAME, TAKEN_NAMES, Identity, Role, identity_named
from relayline.wire.links.security import CA_FILE, CERT_FILE, KEY_FILE, TOKEN_FILE, credential_host, read_token
from relayline.wire.links.tls_material import canonical_name, check_dates, key_pem, read_certificate

CA_KEY_FILE, ISSUED_FILE = "ca-key.pem", "issued"
CA_DAYS = 3_652  # ten years: renewing a CA means touching every host
CERT_DAYS_DEFAULT, CERT_DAYS_MAX = 365, 825
BACKDATED = datetime.timedelta(hours=1)  # a host whose clock is a little slow can use a new certificate at once
PRIVATE, _PUBLIC = 0o600, 0o644
_DNS_NAME = re.compile(
    r"(?=.{1,253}$)(\*\.)?([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*"
)
_COMMON_NAME_CHARS_MAX = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Issued:
    """The result of one `issue`."""

    directory: Path
    """Holds ca.pem, cert.pem, key.pem and token: everything that the process needs, and nothing else."""
    identity: Identity
    """What certificate and token state."""
    names: tuple[str, ...]
    """DNS names and IP addresses in the certificate."""
    expires: datetime.datetime


def init_authority(directory: Path, name: str, now: datetime.datetime) -> x509.Certificate:
    """Make ca.pem, ca-key.pem and token in `directory` (made if needed); return the CA's certificate.

    Raises UsageError if one of them exists already, or `name` is not a valid name.
    """
    if not 1 <= len(name) <= _COMMON_NAME_CHARS_MAX - len(" CA"):
        raise UsageError(f"--name has {len(name)} characters; use 1 to {_COMMON_NAME_CHARS_MAX - len(' CA')}")
    for file in (CA_FILE, CA_KEY_FILE, TOKEN_FILE):
        if (directory / file).exists():
            raise UsageError(
                f"{directory / file} exists; a new CA would shut out every host with certificates of this one"
            )
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} CA")])
    cert = (
        _certificate(subject, subject, key.public_key(), now, CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    directory.mkdir(parents=True, exist_ok=True)
    # The certificate comes last: a directory with ca.pem is complete.
    write_file(directory / CA_KEY_FILE, key_pem(key), PRIVATE)
    write_file(directory / TOKEN_FILE, role_tokens.new_root().encode() + b"\n", PRIVATE)
    write_file(directory / CA_FILE, cert.public_bytes(serialization.Encoding.PEM), _PUBLIC)
    return cert


def issue(
    directory: Path,
    host: str,
    names: Sequence[str],
    days: int,
    out: Path,
    now: datetime.datetime,
    *,
    role: Role,
    stage: str = "",
) -> Issued:
    """Make the credential of one process on `host` into `out`: a certificate, signed by the CA in `directory`, and its
    join token, both of which state `role` and the name of the `stage`. A monitor has a certificate alone.

    `names` are further names of the host (DNS or IP). Renews when `out` holds a certificate of this CA already.
    localhost and the loopback addresses 127.0.0.1 and ::1 are always in it, since neighbours may run on the same host.
    Raises UsageError.
    """
    check_stage_name(role, stage)
    if not 1 <= days <= CERT_DAYS_MAX:
        raise UsageError(f"--days {days} is outside 1..{CERT_DAYS_MAX}")
    ours = _load_authority(directory)[0].public_bytes(serialization.Encoding.PEM)
    if (out / CA_FILE).exists() and (out / CA_FILE).read_bytes() != ours:
        raise UsageError(f"{out} holds certificates of another CA; choose another directory with --output")
    identity = Identity(role, credential_host(host), stage)
    token = issued_token(directory, identity) if role is not Role.MONITOR else ""
    key = ec.generate_private_key(ec.SECP256R1())
    cert, hosts = sign_key(directory, key.public_key(), identity, host, names, days, now)
    out.mkdir(parents=True, exist_ok=True, mode=0o700)
    _write_pair(out, key_pem(key), cert.public_bytes(serialization.Encoding.PEM))
    write_file(out / CA_FILE, ours, _PUBLIC)
    if token:
        write_file(out / TOKEN_FILE, token.encode() + b"\n", PRIVATE)
    _copy_lists(directory, out)
    return Issued(out, identity, hosts, cert.not_valid_after_utc)


def is_whole(out: Path) -> bool:
    """Return whether `issue` has written all that belongs to a certificate: it may have been killed before."""
    try:
        key = serialization.load_pem_private_key((out / KEY_FILE).read_bytes(), password=None)
        is_pair = key.public_key() == read_certificate(out / CERT_FILE).public_key()
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm):
        return False
    return is_pair and (out / CA_FILE).exists() and (out / TOKEN_FILE).exists()


def _write_pair(out: Path, key: bytes, cert: bytes) -> None:
    """Write a key and its certificate. Where the disk has no room for both, the earlier pair stays. Raises OSError."""
    with replaced(out / KEY_FILE, PRIVATE) as key_file, replaced(out / CERT_FILE, _PUBLIC) as cert_file:
        for file, data in ((key_file, key), (cert_file, cert)):
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def sign_key(
    directory: Path,
    public: ec.EllipticCurvePublicKey,
    identity: Identity,
    host: str,
    names: Sequence[str],
    days: int,
    now: datetime.datetime,
) -> tuple[x509.Certificate, tuple[str, ...]]:
    """Sign a public key with the CA in `directory` and note it there; returns the certificate and the names in it.

    `host` and `names` are DNS names or IP addresses of its holder; those of loopback are added. Raises UsageError.
    """
    with _locked(directory):
        authority, authority_key = _load_authority(directory)
        check_dates(authority, directory / CA_FILE, now, "make a new one with `relayline certs init`")
        hosts = _alternatives([host, *names, "localhost", "127.0.0.1", "::1"])
        cert = (
            _certificate(_subject(host), authority.subject, public, now, min(days, _days_left(authority, now)))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(
                x509.SubjectAlternativeName([*hosts, x509.UniformResourceIdentifier(identity.uri)]), critical=False
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
            .sign(authority_key, hashes.SHA256())
        )
        _record(directory, cert, identity)
    return cert, tuple(str(name.value) for name in hosts)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keep other processes of this machine from writing the CA's records at the same time."""
    path = directory / CA_KEY_FILE
    if not path.exists():
        yield  # the next check reports that it is missing
        return
    with path.open("rb") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _subject(host: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:_COMMON_NAME_CHARS_MAX])])


def _days_left(authority: x509.Certificate, now: datetime.datetime) -> int:
    return (authority.not_valid_after_utc - now).days


def check_stage_name(role: Role, stage: str) -> None:
    """Raise UsageError unless a stage's credential names a stage, and no other one does."""
    if (role is Role.STAGE) != bool(stage):
        raise UsageError("only a stage's credential states its name")
    if stage and not NAME.fullmatch(stage):
        raise UsageError(f"stage name {stage!r} is not a DNS label; use lower-case letters, digits and hyphens")
    if stage in TAKEN_NAMES:
        raise UsageError(f"no stage can be named {stage!r}: that is another role; choose another name")


def issued_token(directory: Path, identity: Identity, file: str = TOKEN_FILE) -> str:
    """Return the join token of a process, made from the coordinator's in `directory`. Raises UsageError."""
    root = read_token(directory / file)
    found = role_tokens.read(root)
    if found is None or found.role is not Role.COORDINATOR:
        raise UsageError(
            f"{directory / file} is no coordinator's join token, or one of an older version; make a new directory with "
            "`relayline certs init`"
        )
    if identity.role is Role.COORDINATOR:
        return root
    return role_tokens.token_for(root, identity, _revoked_names(directory).count(str(identity)))


# --- revoking ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Revoked:
    """The result of one `revoke`."""

    identities: tuple[str, ...]
    """Each once, as `stage NAME on HOST`."""
    written: tuple[Path, ...]
    """Directories that have the lists now."""


def revoke(directory: Path, wanted: Callable[[Identity], bool], now: datetime.datetime) -> Revoked:
    """Revoke certificate and join token of everybody in `directory`'s records that is `wanted`.

    The lists are put into `directory` and every directory of this CA below it, where running processes see them within
    seconds. Raises UsageError if no credential matches, or the list would grow beyond what processes read.
    """
    authority, authority_key = _load_authority(directory)
    records = [record for record in _records(directory, authority.not_valid_after_utc) if record.ends > now]
    chosen = [record for record in records if wanted(record.identity)]
    if not chosen:
        known = ", ".join(sorted({str(record.identity) for record in records}))
        raise UsageError(f"{directory} has issued no such credential that is still valid; valid are: {known or 'none'}")
    before = revoked_serials(directory)
    fresh = [record for record in chosen if record.serial not in before]
    identities = tuple(dict.fromkeys(str(record.identity) for record in fresh))
    if not fresh:
        raise UsageError(f"already revoked: {', '.join(dict.fromkeys(str(record.identity) for record in chosen))}")
    serials = [record.serial for record in records if record.serial in before or record in fresh]
    pem = _signed_list(authority, authority_key, serials, _crl_number(directory) + 1, now)
    if len(pem) > CRL_BYTES_MAX:
        raise UsageError(f"the list of revoked certificates would be larger than {CRL_BYTES_MAX} bytes; make a new CA")
    write_file(directory / CRL_FILE, pem, _PUBLIC)
    _add_names(directory, [name for name in identities if name.startswith(Role.STAGE.value)])
    ours = authority.public_bytes(serialization.Encoding.PEM)
    places = sorted(path.parent for path in directory.glob(f"*/{CA_FILE}") if path.read_bytes() == ours)
    for place in places:
        _copy_lists(directory, place)
    return Revoked(identities, (directory, *places))


def revoke_token(directory: Path, stage: Identity) -> None:
    """Revoke a stage's join token in a directory with a coordinator's token and no CA."""
    _add_names(directory, [str(stage)])


def revoked_serials(directory: Path) -> frozenset[int]:
    """Return the serial numbers of the certificates that the CA in `directory` has revoked. Raises UsageError."""
    path = directory / CRL_FILE
    return read_crl(path.read_bytes(), directory / CA_FILE, str(path))[1] if path.exists() else frozenset()


def is_shut_out(directory: Path, stage: str, now: datetime.datetime) -> bool:
    """Return whether a stage has had credentials of the CA in `directory`, and all that last are revoked.

    Raises UsageError.
    """
    authority_ends = read_certificate(directory / CA_FILE).not_valid_after_utc
    records = [one for one in _records(directory, authority_ends) if one.ends > now and one.identity.name == stage]
    return bool(records) and revoked_serials(directory).issuperset(record.serial for record in records)


@dataclasses.dataclass(frozen=True, slots=True)
class _Record:
    serial: int
    ends: datetime.datetime
    identity: Identity


def _record(directory: Path, cert: x509.Certificate, identity: Identity) -> None:
    path = directory / ISSUED_FILE
    before = path.read_bytes() if path.exists() else b""
    line = f"{cert.serial_number:x} {cert.not_valid_after_utc.isoformat()} {identity.uri}\n"
    write_file(path, before + line.encode(), PRIVATE)


def _records(directory: Path, authority_ends: datetime.datetime) -> list[_Record]:
    """Return the credentials that the CA has issued, oldest first. Raises UsageError for an unreadable line.

    None outlives the CA. One whose time cannot be read lives as long, so that it can be revoked.
    """
    path = directory / ISSUED_FILE
    found = []
    for number, line in enumerate(_lines(path), 1):
        try:
            serial, ends_text, uri = line.split()
            if (identity := identity_named(uri)) is None:
                raise ValueError(line)
            ends = min(_time_of(ends_text) or authority_ends, authority_ends)
            found.append(_Record(int(serial, 16), ends, identity))
        except ValueError as error:
            raise UsageError(
                f"{path}:{number}: not a line that `relayline certs issue` wrote; restore the file from a copy, or "
                "remove the line: its credential cannot be revoked then"
            ) from error
    return found


def _time_of(text: str) -> datetime.datetime | None:
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo is not None else None


def _signed_list(
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    serials: Sequence[int],
    number: int,
    now: datetime.datetime,
) -> bytes:
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.subject)
        .last_update(now - BACKDATED)
        .next_update(authority.not_valid_after_utc)
        .add_extension(x509.CRLNumber(number), critical=False)
    )
    for serial in serials:
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now - BACKDATED).build()
        builder = builder.add_revoked_certificate(entry)
    return builder.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _crl_number(directory: Path) -> int:
    path = directory / CRL_FILE
    return read_crl(path.read_bytes(), directory / CA_FILE, str(path))[0] if path.exists() else 0


def _revoked_names(directory: Path) -> list[str]:
    return _lines(directory / REVOKED_FILE)


def _lines(path: Path) -> list[str]:
    """Return the lines of a record, none where there is no file. Raises UsageError."""
    try:
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is damaged: it is no text; restore it from a copy") from error


def _add_names(directory: Path, names: Sequence[str]) -> None:
    text = "".join(f"{line}\n" for line in (*_revoked_names(directory), *names))
    write_file(directory / REVOKED_FILE, text.encode(), _PUBLIC)


def _copy_lists(directory: Path, out: Path) -> None:
    for name in (CRL_FILE, REVOKED_FILE):
        if (directory / name).exists():
            write_file(out / name, (directory / name).read_bytes(), _PUBLIC)


def _load_authority(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    path = directory / CA_KEY_FILE
    if not path.exists():
        raise UsageError(
            f"{path} is missing, so the CA is not here; that of `relayline up` is in {state_root() / 'NAME' / 'tls'}, "
            f"and `relayline certs init {directory}` makes another one"
        )
    cert = read_certificate(directory / CA_FILE)
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{path} is not a PEM private key") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
        raise UsageError(f"{path} does not belong to {directory / CA_FILE}")
    return cert, key


def _certificate(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, now: datetime.datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternatives(names: Sequence[str]) -> list[x509.DNSName | x509.IPAddress]:
    found: dict[str, x509.DNSName | x509.IPAddress] = {}
    for given in names:
        name = canonical_name(given)
        try:
            found[name] = x509.IPAddress(ipaddress.ip_address(name))
        except ValueError:
            if not _DNS_NAME.fullmatch(name):
                raise UsageError(f"{given!r} is neither an IP address nor a host name") from None
            found[name] = x509.DNSName(name)
    return list(found.values())
