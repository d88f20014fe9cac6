"""Reading and checking certificates and keys: every fault of the material is one line before anything starts."""

from __future__ import annotations

import dataclasses
import datetime
import ipaddress
import logging
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes, PublicKeyTypes

from relayline.wire.common.errors import UsageError
from relayline.wire.common.texts import plural
from relayline.wire.links.refusals import Reason
from relayline.wire.links.roles import Credential, Identity, identity_among

log = logging.getLogger("relayline.security")

RENEW_DAYS = 14  # a certificate with less left than this is warned about at the start
_PEM_BYTES_MAX = 1 << 20  # a chain of many certificates is a few KiB; more is not one
_OTHERS = 0o007
WHERE_FROM = "give the files of your web server's certificate, or of `relayline certs issue`"


@dataclasses.dataclass(frozen=True, slots=True)
class Material:
    """The bytes of one identity, PEM."""

    ca: bytes
    """CA certificates that the other side must come from."""
    cert: bytes
    """Own certificate, followed by intermediates if there are any."""
    key: bytes = dataclasses.field(repr=False)
    """Private key of the certificate."""


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key as its file has it: PEM, PKCS#8, not encrypted."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def read_material(ca: Path, cert: Path, key: Path) -> Material:
    """Return the files' present bytes. Raises UsageError when one is missing or cannot be read."""
    return Material(_read(ca), _read(cert), _read(key))


def check_material(ca: Path, cert: Path, key: Path, now: datetime.datetime | None = None) -> Material:
    """Read the material and raise UsageError, with one line, for the first thing that is wrong with it.

    Checked: every file is there and PEM, the key belongs to the certificate, the certificate comes from the CA, both
    are valid at `now` (default: the clock). A key that other users can read, and a certificate that ends within
    RENEW_DAYS, are logged as warnings.
    """
    material = read_material(ca, cert, key)
    now = now or datetime.datetime.now(datetime.UTC)
    authorities = _certificates(material.ca, ca)
    own, *intermediates = _certificates(material.cert, cert)
    if _public_bytes(_private_key(material.key, key).public_key()) != _public_bytes(own.public_key()):
        raise UsageError(f"{key} does not belong to {cert}; take both from one `relayline certs issue`")
    for authority in authorities:
        check_dates(authority, ca, now, "make a new one with `relayline certs init`")
    check_dates(own, cert, now, "issue a new one with `relayline certs issue`")
    if not any(_is_issued_by(own, issuer) for issuer in (*authorities, *intermediates)):
        raise UsageError(f"{cert} does not come from the CA in {ca}; take both from one `relayline certs issue`")
    if key.stat().st_mode & _OTHERS:
        log.warning("%s can be read by every user of this machine; run: chmod 600 %s", key, key)
    days_left = (own.not_valid_after_utc - now).days
    if days_left < RENEW_DAYS:
        log.warning(
            "%s expires in %d %s; renew it with `relayline certs issue`", cert, days_left, plural(days_left, "day")
        )
    return material


def check_pair(cert: Path, key: Path) -> None:
    """Raise UsageError, with one line, for the first thing that is wrong with the certificate and key of a server that
    anybody may connect to; warn as `check_material` does."""
    now = datetime.datetime.now(datetime.UTC)
    own = _certificates(_read(cert, WHERE_FROM), cert)[0]
    if _public_bytes(_private_key(_read(key, WHERE_FROM), key).public_key()) != _public_bytes(own.public_key()):
        raise UsageError(f"{key} does not belong to {cert}; give the key that the certificate was requested with")
    check_dates(own, cert, now, "renew it where it comes from")
    if key.stat().st_mode & _OTHERS:
        log.warning("%s can be read by every user of this machine; run: chmod 600 %s", key, key)
    days_left = (own.not_valid_after_utc - now).days
    if days_left < RENEW_DAYS:
        log.warning("%s expires in %d %s", cert, days_left, plural(days_left, "day"))


def first_fault(ca: Path, cert: Path) -> Reason | None:
    """Return the fault for which a client with this material is refused, None if none shows here."""
    try:
        authorities, own = _certificates(_read(ca), ca), read_certificate(cert)
    except UsageError:
        return Reason.CLIENT_INVALID
    if datetime.datetime.now(datetime.UTC) > own.not_valid_after_utc:
        return Reason.CLIENT_EXPIRED
    return None if any(_is_issued_by(own, issuer) for issuer in authorities) else Reason.CLIENT_CA


def check_dates(cert: x509.Certificate, path: Path, now: datetime.datetime, remedy: str) -> None:
    """Raise UsageError unless the certificate is valid at `now`."""
    if now > cert.not_valid_after_utc:
        raise UsageError(f"{path} expired on {_day(cert.not_valid_after_utc)}; {remedy}")
    if now < cert.not_valid_before_utc:
        raise UsageError(f"{path} is not valid before {_day(cert.not_valid_before_utc)}; is the clock right?")


def read_certificate(path: Path) -> x509.Certificate:
    """Return the first certificate of a PEM file. Raises UsageError."""
    return _certificates(_read(path), path)[0]


def canonical_name(host: str) -> str:
    """Return a host as `names_of` says it: lower case, without brackets or a last dot, an IPv6 address compressed."""
    name = host.strip().strip("[]").lower().rstrip(".")
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name


def names_of(cert: x509.Certificate) -> list[str]:
    """Return the DNS names and IP addresses of a certificate, without its role."""
    names = _alternative_names(cert)
    if names is None:
        return []
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]


def identity_of(cert: x509.Certificate) -> Identity | None:
    """Return the role, name and host that a certificate states, None where it states none."""
    names = _alternative_names(cert)
    return identity_among(names.get_values_for_type(x509.UniformResourceIdentifier)) if names is not None else None


def _alternative_names(cert: x509.Certificate) -> x509.SubjectAlternativeName | None:
    """Return the names in a certificate, None where it has none or they cannot be read."""
    try:
        return cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError):
        return None


def credential_of(pem: bytes) -> Credential:
    """Return the identity in a caller's certificate, none for one that cannot be read."""
    try:
        cert = x509.load_pem_x509_certificate(pem)
        return Credential(identity_of(cert), cert.serial_number)
    except ValueError:
        return Credential(None, 0)


def credential_of_der(der: bytes) -> Credential:
    """Return the same of a certificate in DER."""
    try:
        cert = x509.load_der_x509_certificate(der)
        return Credential(identity_of(cert), cert.serial_number)
    except ValueError:
        return Credential(None, 0)


def own_identity(path: Path) -> Identity:
    """Return the identity in this process's certificate. Raises UsageError where it states none."""
    found = identity_of(read_certificate(path))
    if found is None:
        raise UsageError(
            f"{path} states no role; older versions made such tokens. Make a new one with "
            "`relayline certs issue CA-DIR HOST --coordinator` or `--stage NAME`"
        )
    return found


def _read(path: Path, remedy: str = "`relayline certs issue` makes it") -> bytes:
    try:
        with path.open("rb") as file:
            found = file.read(_PEM_BYTES_MAX)
    except FileNotFoundError as error:
        raise UsageError(f"{path} is missing; {remedy}") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    if not found.strip():
        raise UsageError(f"{path} is empty; {remedy}")
    return found


def _certificates(pem: bytes, path: Path) -> list[x509.Certificate]:
    """Return the certificates of a file; the key and names of the first one can be read. Raises UsageError."""
    try:
        found = x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise UsageError(f"{path} is not a PEM certificate") from error
    try:
        found[0].public_key(), found[0].subject, found[0].issuer  # cryptography parses each when it is asked for
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{path}: its certificate cannot be used ({error}); make another one") from error
    return found


def _private_key(pem: bytes, path: Path) -> PrivateKeyTypes:
    try:
        return serialization.load_pem_private_key(pem, password=None)
    except TypeError as error:
        raise UsageError(f"{path} is protected by a passphrase; a service needs it without one") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{path} is not a PEM private key") from error


def _public_bytes(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _is_issued_by(cert: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        cert.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def _day(when: datetime.datetime) -> str:
    return when.strftime("%Y-%m-%d %H:%M UTC")
