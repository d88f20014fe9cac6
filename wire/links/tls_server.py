"""TLS of HTTP ports: a context that takes up renewed files with the next connection."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relayline.wire.common.errors import UsageError
from relayline.wire.links.roles import Credential, identity_among

log = logging.getLogger("relayline.security")


def server_context(
    cert: Path, key: Path, ca: Path | None = None, check: Callable[[], object] = lambda: None
) -> ssl.SSLContext:
    """Return a context that shows `cert` and, with `ca`, demands a certificate of that CA from every client.

    `check()` raises UsageError for files that do not belong together; it is asked before renewed ones are taken up.
    Raises UsageError.
    """
    files = tuple(path for path in (cert, key, ca) if path is not None)
    check()
    first = _plain_context(cert, key, ca)
    known: dict[str, Any] = {"stamp": stamp_of(files), "context": first}

    def renew(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        stamp = stamp_of(files)
        if stamp != known["stamp"]:
            known["stamp"] = stamp
            try:
                check()
                known["context"] = _plain_context(cert, key, ca)
                log.info("took up the renewed certificate %s", cert)
            except UsageError as error:
                log.warning("keeping the old certificate: %s", error.message)
        if known["context"] is not context:
            connection.context = known["context"]

    first.sni_callback = renew  # called in every handshake, with or without a name
    return first


def credential_of_peer(peercert: dict[str, Any] | None) -> Credential:
    """Return the identity in a client's certificate, given as SSLObject.getpeercert() returns it."""
    if not peercert:
        return Credential(None, 0)
    uris = [value for kind, value in peercert.get("subjectAltName", ()) if kind == "URI"]
    return Credential(identity_among(uris), int(peercert.get("serialNumber", "0"), 16))


def stamp_of(files: tuple[Path, ...]) -> tuple[Any, ...]:
    """Return what changes when one of the files is replaced."""
    found: list[tuple[int, int] | None] = []
    for path in files:
        try:
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_ino))
        except OSError:
            found.append(None)
    return tuple(found)


def _plain_context(cert: Path, key: Path, ca: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key, password=_no_passphrase)
        if ca is not None:
            context.load_verify_locations(ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"{cert} and {key} cannot be used: {error.strerror}") from error
    return context


def _no_passphrase() -> str:
    return ""  # otherwise OpenSSL would ask on the terminal
