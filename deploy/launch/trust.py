"""TLS of a client of the pipelines that run on this machine: each shows the certificate that `up` was given.

Such a client trusts that one certificate and nothing else, so it needs no CA, and the certificate need not name the
address that is called.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from urllib.parse import urlsplit

from relayline.deploy.launch.process_id import is_running
from relayline.deploy.launch.state import LaunchState, find_running
from relayline.wire.links.security import EVERY_INTERFACE, is_loopback

BEGIN = "-----BEGIN CERTIFICATE-----"
END = "-----END CERTIFICATE-----"
PEM_BYTES_MAX = 1 << 20  # of a file of certificates


def trust_of(url: str) -> ssl.SSLContext | None:
    """Return the TLS for a URL if a pipeline of this machine serves it, None for the usual one: the system's CAs."""
    where = _place(url)
    if where is None:
        return None
    return next((context for state in _running() if _place(state.url) == where and (context := pinned(state))), None)


def refused(error: Exception) -> str:
    """Return why a server's certificate is refused, and the remedy, in one line without an end."""
    why = getattr(error, "verify_message", "") or str(error)
    if "expired" in why:
        return "its certificate has expired; renew it"
    return f"its certificate is not trusted here; set SSL_CERT_FILE to the CA's file ({why})"


def pinned(state: LaunchState) -> ssl.SSLContext | None:
    """Return the TLS that trusts the certificate of one pipeline's API alone; None if it has none that can be read."""
    if not state.certificate:
        return None
    try:
        with Path(state.certificate).open(encoding="latin-1") as file:
            _, begin, text = file.read(PEM_BYTES_MAX).partition(BEGIN)
        text, end, _ = text.partition(END)  # its CA's may follow, and would be trusted
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # whoever has this certificate's key is the pipeline
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it need not be a CA's
        context.load_verify_locations(cadata=begin + text + end)
    except (OSError, ValueError, ssl.SSLError):
        return None
    return context


def _running() -> list[LaunchState]:
    return [state for _, state in find_running(None, "") if state.certificate and is_running(state.supervisor)]


def _place(url: str) -> tuple[str, int] | None:
    """Return host and port of an HTTPS URL; every name of this machine itself is the same one."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 443
    except ValueError:
        return None
    if parts.scheme != "https" or not host:
        return None
    return ("", port) if host in EVERY_INTERFACE or is_loopback(host) else (host, port)
