"""Revoked credentials: a list signed by the CA for certificates, a list of names for join tokens. Both are in the
directory of the process's own material, and are read again while it runs:

    crl.pem     an X.509 revocation list of the CA, as `relayline certs revoke` makes it; every process reads its own,
                and a coordinator hands its own to every stage
    revoked     one line `stage NAME on HOST` for each time that a stage's token was revoked; only the coordinator
                needs it, since no other process checks stages' tokens

A list that cannot be read changes nothing.
"""

from __future__ import annotations

import collections
import logging
from pathlib import Path

from relayline.wire.common.errors import ProtocolError, UsageError
from relayline.wire.common.texts import plural
from relayline.wire.links.roles import Credential, Identity
from relayline.wire.links.security import LinkSecurity

log = logging.getLogger("relayline.security")

CRL_FILE, REVOKED_FILE = "crl.pem", "revoked"
CRL_BYTES_MAX = 32 * 1024  # PEM; some 600 certificates, and it still fits a unary call
REVOKED_BYTES_MAX = 64 * 1024
LOOK_S = 1.0  # between looks at the files
IS_REVOKED = (
    "is revoked; `relayline invite NAME` on the coordinator's machine (or `relayline certs issue`) makes a new one"
)
"""What is wrong with a stage's credential, and what to do about it."""


class Revocations:
    """The present revocations. Event loop only."""

    def __init__(self, security: LinkSecurity) -> None:
        """Read the lists of a process. Raises UsageError for one that is there and cannot be used."""
        self._ca = security.ca
        self._directory = security.directory
        self._serials: frozenset[int] = frozenset()
        self._generations: collections.Counter[str] = collections.Counter()
        self._stamps: tuple[object, ...] = ()
        self.number = 0
        """Number of the list of certificates; 0: none."""
        self.crl_pem = b""
        """That list; empty: none."""
        self.version = 0
        """Counts changes."""
        stamps = self._now()
        self._read()
        self._stamps = stamps

    def is_revoked(self, shown: Credential) -> bool:
        """Return whether a credential that was shown once is revoked by now."""
        if self._ca is not None:
            return shown.serial in self._serials
        return shown.identity is not None and self.generation(shown.identity) > shown.serial

    def generation(self, stage: Identity) -> int:
        """Return how often the token of this stage was revoked."""
        return self._generations[str(stage)]

    def look(self) -> bool:
        """Read lists that changed on disk; returns whether any did. Unreadable ones are logged."""
        stamps = self._now()
        if stamps == self._stamps:
            return False
        self._stamps, before = stamps, self.version
        try:
            self._read()
        except UsageError as error:
            log.warning("keeping the earlier revocations: %s", error.message)
        return self.version != before

    def offer(self, crl_pem: bytes) -> bool:
        """Take a coordinator's list; returns whether it is newer than the known one.

        Raises ProtocolError for bytes that are no list of this CA.
        """
        try:
            number, serials = read_crl(crl_pem, self._ca, "the list")
        except UsageError as error:
            raise ProtocolError(f"the revocation list that was sent cannot be used: {error.message}") from error
        return self._take(number, serials, crl_pem)

    def _now(self) -> tuple[object, ...]:
        if self._directory is None:
            return ()
        found: list[object] = []
        for name in (CRL_FILE, REVOKED_FILE):
            try:
                status = (self._directory / name).stat()
                found.append((status.st_mtime_ns, status.st_ino, status.st_size))
            except OSError:
                found.append(None)
        return tuple(found)

    def _read(self) -> None:
        if self._directory is None:
            return
        if self._ca is not None and (pem := _bytes_of(self._directory / CRL_FILE, CRL_BYTES_MAX)):
            number, serials = read_crl(pem, self._ca, str(self._directory / CRL_FILE))
            self._take(number, serials, pem)
        text = _bytes_of(self._directory / REVOKED_FILE, REVOKED_BYTES_MAX).decode(errors="replace")
        found = collections.Counter(line.strip() for line in text.splitlines())
        if text and found != self._generations:  # a removed file keeps its revocations in force
            self._generations = found
            self.version += 1

    def _take(self, number: int, serials: frozenset[int], crl_pem: bytes) -> bool:
        if number <= self.number:
            return False
        self.number, self._serials, self.crl_pem = number, serials, crl_pem
        self.version += 1
        n = len(serials)
        log.info("revocation list %d: %d %s revoked", number, n, plural(n, "certificate is", "certificates are"))
        return True


def read_crl(pem: bytes, ca: Path | None, what: str) -> tuple[int, frozenset[int]]:
    """Return number and serials of a revocation list. Raises UsageError if it is not a list of the CA in file `ca`."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm

    from relayline.wire.links.tls_material import read_certificate

    if ca is None:
        raise UsageError(f"{what} is for links with TLS, and there is none")
    if len(pem) > CRL_BYTES_MAX:
        raise UsageError(f"{what} has more than {CRL_BYTES_MAX} bytes")
    authority = read_certificate(ca)
    try:
        crl = x509.load_pem_x509_crl(pem)
        is_ours = crl.is_signature_valid(authority.public_key())  # type: ignore[arg-type]
        number = crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.ExtensionNotFound) as error:
        raise UsageError(f"{what} is not a revocation list of `relayline certs revoke`") from error
    if not is_ours:
        raise UsageError(f"{what} is not signed by the CA in {ca}")
    return number, frozenset(entry.serial_number for entry in crl)


def _bytes_of(path: Path, bytes_max: int) -> bytes:
    """Return a file's content; empty if there is no file. Raises UsageError."""
    try:
        with path.open("rb") as file:
            found = file.read(bytes_max + 1)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(found) > bytes_max:
        raise UsageError(f"{path} has more than {bytes_max} bytes")
    return found
