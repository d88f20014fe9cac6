"""Makes the CA, the per-host certificates and the join token of a pipeline. Files only; nothing is sent anywhere."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import ipaddress
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from relayline.wire.common.errors import UsageError
from relayline.wire.links.security import CA_FILE, CERT_FILE, KEY_FILE, TOKEN_FILE, read_token
from relayline.wire.links.tls_material import canonical_name, check_dates, read_certificate

CA_KEY_FILE = "ca-key.pem"
CA_DAYS = 3_652  # ten years: renewing a CA means touching every host
CERT_DAYS_DEFAULT, CERT_DAYS_MAX = 365, 825
BACKDATED = datetime.timedelta(hours=1)  # a host whose clock is a little slow can use a new certificate at once
TOKEN_BYTES = 32
_PRIVATE, _PUBLIC = 0o600, 0o644
_DNS_NAME = re.compile(
    r"(?=.{1,253}$)(\*\.)?([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*"
)
_COMMON_NAME_CHARS_MAX = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Issued:
    """What one `issue` made."""

    directory: Path
    """Holds ca.pem, cert.pem, key.pem and token: everything that the host needs, and nothing else."""
    names: tuple[str, ...]
    """DNS names and IP addresses in the certificate."""
    expires: datetime.datetime


def init_authority(directory: Path, name: str, now: datetime.datetime) -> x509.Certificate:
    """Make ca.pem, ca-key.pem and token in `directory` (made if needed); return the CA's certificate.

    Raises UsageError when one of them is there already, or `name` is no name.
    """
    if not 1 <= len(name) <= _COMMON_NAME_CHARS_MAX - len(" CA"):
        raise UsageError(f"--name has {len(name)} characters; use 1 to {_COMMON_NAME_CHARS_MAX - len(' CA')}")
    for file in (CA_FILE, CA_KEY_FILE, TOKEN_FILE):
        if (directory / file).exists():
            raise UsageError(
                f"{directory / file} exists; a new CA would cut off every host that has certificates of it"
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
    write_file(directory / CA_KEY_FILE, _key_pem(key), _PRIVATE)
    write_file(directory / TOKEN_FILE, secrets.token_urlsafe(TOKEN_BYTES).encode() + b"\n", _PRIVATE)
    write_file(directory / CA_FILE, cert.public_bytes(serialization.Encoding.PEM), _PUBLIC)
    return cert


def issue(directory: Path, host: str, names: Sequence[str], days: int, out: Path, now: datetime.datetime) -> Issued:
    """Make a certificate for `host` and further names (DNS or IP) into `out`, signed by the CA in `directory`.

    Renews when `out` holds a certificate of this CA already. localhost and the loopback addresses 127.0.0.1 and ::1
    are always in it, so that a host's own processes can use the same files. Raises UsageError.
    """
    if not 1 <= days <= CERT_DAYS_MAX:
        raise UsageError(f"--days {days} is outside 1..{CERT_DAYS_MAX}")
    authority, authority_key = _load_authority(directory)
    check_dates(authority, directory / CA_FILE, now, "make a new one with `relayline certs init`")
    ours = authority.public_bytes(serialization.Encoding.PEM)
    if (out / CA_FILE).exists() and (out / CA_FILE).read_bytes() != ours:
        raise UsageError(f"{out} holds certificates of another CA; choose another directory with --out")
    alternatives = _alternatives([host, *names, "localhost", "127.0.0.1", "::1"])
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:_COMMON_NAME_CHARS_MAX])])
    days = min(days, (authority.not_valid_after_utc - now).days)
    cert = (
        _certificate(subject, authority.subject, key.public_key(), now, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    token = read_token(directory / TOKEN_FILE)
    out.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_file(out / KEY_FILE, _key_pem(key), _PRIVATE)
    write_file(out / CERT_FILE, cert.public_bytes(serialization.Encoding.PEM), _PUBLIC)
    write_file(out / CA_FILE, ours, _PUBLIC)
    write_file(out / TOKEN_FILE, token.encode() + b"\n", _PRIVATE)
    return Issued(out, tuple(str(name.value) for name in alternatives), cert.not_valid_after_utc)


def write_file(path: Path, data: bytes, mode: int) -> None:
    """Put `data` at `path` with `mode`, whole or not at all, replacing what was there."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), mode)  # whatever the umask is
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _load_authority(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    path = directory / CA_KEY_FILE
    if not path.exists():
        raise UsageError(
            f"{path} is missing: this is not where the CA lives; `relayline certs init {directory}` makes one"
        )
    cert = read_certificate(directory / CA_FILE)
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
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


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
