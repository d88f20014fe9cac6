"""Finds out by a separate TLS handshake what is wrong with the link to a peer.

Blocking; for a thread. Every connection names itself in the ALPN list, so that the other end's watch
(`wire.links.doorkeeper`) can tell it from a refused client.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import ssl
from collections.abc import Iterator

from relayline.wire.links.refusals import ALPN_PROBE, ALPN_REFUSED_PREFIX, Reason
from relayline.wire.links.security import LinkSecurity, host_of, port_of

CONNECT_TIMEOUT_S = 2.0
HANDSHAKE_TIMEOUT_S = 3.0

# X509_V_ERR_* of OpenSSL.
_VERIFY_REASONS = {
    9: Reason.SERVER_EARLY,
    10: Reason.SERVER_EXPIRED,
    62: Reason.SERVER_NAME,  # host name mismatch
    64: Reason.SERVER_NAME,  # IP address mismatch
}
_ALERT_REASONS = {
    "UNKNOWN_CA": Reason.CLIENT_CA,
    "CERTIFICATE_EXPIRED": Reason.CLIENT_EXPIRED,
    "CERTIFICATE_REQUIRED": Reason.CLIENT_NONE,
    "BAD_CERTIFICATE": Reason.CLIENT_INVALID,
    "CERTIFICATE_UNKNOWN": Reason.CLIENT_INVALID,
    "UNSUPPORTED_CERTIFICATE": Reason.CLIENT_INVALID,
}
_NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """A probe's finding."""

    reason: Reason
    cert_der: bytes = b""
    """The server's certificate where it matters."""


def probe(address: str, security: LinkSecurity) -> Finding | None:
    """Return what keeps `security` from a link to host:port `address`; None when TLS is not the reason.

    Also None if no process listens there, or the peer does not answer in time.
    """
    try:
        return _probe_tls(address, security) if security.is_tls else _probe_plaintext(address)
    except OSError:  # refused, unreachable, too slow: gRPC's own words are right then
        return None


def server_certificate(address: str, security: LinkSecurity) -> bytes:
    """Return the certificate (DER) that host:port `address` shows and that `security` trusts.

    Empty if there is none; gRPC then finds the same and says why.
    """
    try:
        context = _verifying(security)
        with _connected(address) as raw, context.wrap_socket(raw, server_hostname=host_of(address)) as link:
            return link.getpeercert(binary_form=True) or b""
    except OSError:
        return b""


def knock(address: str, reason: Reason) -> None:
    """Tell the other end why there will be no link, in the clear part of one more handshake; errors are ignored."""
    context = _saying(ALPN_REFUSED_PREFIX + reason.value)
    with contextlib.suppress(OSError, ValueError), _connected(address) as raw:
        context.wrap_socket(raw, server_hostname=host_of(address)).close()


def client_message(found: Finding, address: str, security: LinkSecurity) -> str:
    """Return the line for the end that connected: what is wrong, then what to do."""
    cert, ca = security.cert, security.ca
    match found.reason:
        case Reason.SERVER_CA:
            return (
                f"{address} shows a certificate that does not come from the CA in {ca}; "
                "both ends need certificates of one `relayline certs init`"
            )
        case Reason.SERVER_EXPIRED | Reason.SERVER_EARLY:
            what = "has expired" if found.reason is Reason.SERVER_EXPIRED else "is not valid yet; is a clock wrong?"
            return f"the certificate of {address} {what}{_dates(found)}; renew it there with `relayline certs issue`"
        case Reason.SERVER_NAME:
            return (
                f"the certificate of {address} is for {_names(found)}, not for {host_of(address)}; "
                "issue one with that name too (`relayline certs issue --ip` or `--dns`)"
            )
        case Reason.CLIENT_CA:
            return (
                f"{address} refuses our certificate {cert}: it trusts another CA; "
                "both ends need certificates of one `relayline certs init`"
            )
        case Reason.CLIENT_EXPIRED:
            return f"{address} refuses our certificate {cert}: it has expired; renew it with `relayline certs issue`"
        case Reason.CLIENT_NONE | Reason.CLIENT_INVALID:
            return f"{address} refuses our certificate {cert}: it is not valid there; are both clocks right?"
        case Reason.PLAINTEXT_SERVER:
            return f"{address} does not speak TLS; start it with --tls DIR as well"
        case Reason.PLAINTEXT_CLIENT:
            return f"{address} speaks TLS and this process does not; give --tls DIR"
    return f"{address} refuses this connection"


def _probe_tls(address: str, security: LinkSecurity) -> Finding | None:
    context = _verifying(security)
    try:
        with _connected(address) as raw, context.wrap_socket(raw, server_hostname=host_of(address)) as link:
            greeting = link.recv(1)  # under TLS 1.3 a client is refused after its side of the handshake
    except ssl.SSLCertVerificationError as error:
        reason = _VERIFY_REASONS.get(error.verify_code, Reason.SERVER_CA)
        return Finding(reason, b"" if reason is Reason.SERVER_CA else _certificate_of(address))
    except ssl.SSLEOFError:
        # Hung up in the middle of the handshake, before anybody can have looked at our certificate: a forwarder whose
        # server is not there does that, and may have one in a minute. Unless a fault of ours is plain to see.
        fault = _own_fault(security)
        return Finding(fault) if fault is not None else None
    except ssl.SSLError as error:
        return _of_ssl_error(error)
    # A gRPC server that refuses a certificate hangs up without a word, so the fault is looked for on this side.
    return None if greeting else Finding(_own_fault(security) or Reason.CLIENT_INVALID)


def _own_fault(security: LinkSecurity) -> Reason | None:
    from relayline.wire.links.tls_material import first_fault

    return first_fault(*security.files[:2])


def _of_ssl_error(error: ssl.SSLError) -> Finding | None:
    text = (error.reason or "").upper()
    if any(word in text for word in _NOT_TLS):
        return Finding(Reason.PLAINTEXT_SERVER)
    return next((Finding(reason) for word, reason in _ALERT_REASONS.items() if word in text), None)


def _probe_plaintext(address: str) -> Finding | None:
    """A peer that answers a TLS greeting in TLS, be it with an alert, speaks TLS."""
    context = _saying(ALPN_PROBE)
    try:
        with _connected(address) as raw, context.wrap_socket(raw):
            return Finding(Reason.PLAINTEXT_CLIENT)
    except ssl.SSLError as error:
        return Finding(Reason.PLAINTEXT_CLIENT) if "ALERT" in (error.reason or "").upper() else None


def _certificate_of(address: str) -> bytes:
    context = _saying(ALPN_PROBE)
    with _connected(address) as raw, context.wrap_socket(raw) as link:
        return link.getpeercert(binary_form=True) or b""


def _verifying(security: LinkSecurity) -> ssl.SSLContext:
    ca, cert, key = security.files
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(ca)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the CA may be an intermediate one: gRPC takes it, too
    context.load_cert_chain(cert, key)
    context.set_alpn_protocols(["h2", ALPN_PROBE])
    return context


def _saying(word: str) -> ssl.SSLContext:
    """Return a context whose greeting has the word. It is made before a connection is: servers wait for greetings."""
    context = unverified_context()
    context.set_alpn_protocols(["h2", word])
    return context


def unverified_context() -> ssl.SSLContext:
    """Return a client's context that takes any certificate, for what is public or is checked in another way."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@contextlib.contextmanager
def _connected(address: str) -> Iterator[socket.socket]:
    try:
        connection = socket.create_connection((host_of(address), port_of(address)), CONNECT_TIMEOUT_S)
    except (ValueError, OverflowError) as error:  # no number, beyond 65535, or no host name: addresses come from peers
        raise OSError(f"{address!r} is not an address") from error
    with connection as raw:
        raw.settimeout(HANDSHAKE_TIMEOUT_S)
        yield raw


def _names(found: Finding) -> str:
    from cryptography import x509

    from relayline.wire.links.tls_material import names_of

    names = names_of(x509.load_der_x509_certificate(found.cert_der)) if found.cert_der else []
    return ", ".join(names) or "another host"


def _dates(found: Finding) -> str:
    from cryptography import x509

    if not found.cert_der:
        return ""
    cert = x509.load_der_x509_certificate(found.cert_der)
    return f" ({cert.not_valid_before_utc:%Y-%m-%d %H:%M} to {cert.not_valid_after_utc:%Y-%m-%d %H:%M} UTC)"
