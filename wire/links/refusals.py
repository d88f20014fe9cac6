"""Why a peer was refused, in words for both ends, and how often that is logged. Pure: time is an argument."""

from __future__ import annotations

import enum
import ipaddress
import urllib.parse

from relayline.wire.common.log_repeats import Repeats

# A refused relayline client reports the reason of its refusal, because TLS keeps it from the gRPC server that refused.
# The reason travels where both ends can read it without agreed keys: in the ALPN list of one more ClientHello, or as a
# method name in the clear. Anyone may send it, so it only chooses among the texts below.
ALPN_PROBE = "relayline-probe"
ALPN_REFUSED_PREFIX = "relayline-refused-"
NOTE_PREFIX = "/relayline.v1.Refused/"


class Reason(enum.Enum):
    """The reason that kept two ends apart. "Server" is the end that listens, "client" the one that connected."""

    SERVER_CA = "server-ca"
    SERVER_EXPIRED = "server-expired"
    SERVER_EARLY = "server-early"
    SERVER_NAME = "server-name"
    CLIENT_CA = "client-ca"
    CLIENT_EXPIRED = "client-expired"
    CLIENT_INVALID = "client-invalid"
    CLIENT_NONE = "client-none"
    PLAINTEXT_SERVER = "plaintext-server"
    PLAINTEXT_CLIENT = "plaintext-client"
    TOKEN_MISSING = "token-missing"
    TOKEN_WRONG = "token-wrong"
    MALFORMED = "malformed"
    ROLE_NONE = "role-none"
    ROLE_WRONG = "role-wrong"
    REVOKED = "revoked"
    UNKNOWN = "unknown"


# The listening end's log line about the client.
CLIENT_REASONS: dict[Reason, str] = {
    Reason.SERVER_CA: "it does not trust the CA of this end's certificate",
    Reason.SERVER_EXPIRED: "this end's own certificate has expired; renew it with `relayline certs issue`",
    Reason.SERVER_EARLY: "this end's own certificate is not valid yet by that host's clock",
    Reason.SERVER_NAME: "this end's certificate does not have the name under which it was called",
    Reason.CLIENT_CA: "its certificate comes from another CA",
    Reason.CLIENT_EXPIRED: "its certificate has expired",
    Reason.CLIENT_INVALID: "its certificate is not valid here",
    Reason.CLIENT_NONE: "it showed no certificate",
    Reason.PLAINTEXT_SERVER: "it speaks TLS and this end does not; give --tls DIR on both or on neither",
    Reason.PLAINTEXT_CLIENT: "it speaks plaintext and this end TLS; give it --tls DIR",
    Reason.TOKEN_MISSING: "it sent no join token",
    Reason.TOKEN_WRONG: "it sent a wrong join token",
    Reason.MALFORMED: "it sent a call that cannot be read; something else may be talking to this port",
    Reason.ROLE_NONE: "its certificate states no role; issue it again with `relayline certs issue`",
    Reason.ROLE_WRONG: "its credential does not allow this call",
    Reason.REVOKED: "its credential is revoked",
    Reason.UNKNOWN: "it gave up, or one of the certificates is not accepted by the other end",
}


class RefusalLog:
    """Which refusals get a line: the first of its kind per host, then one a minute with the number left out."""

    def __init__(self) -> None:
        self._repeats = Repeats()

    def line(self, now_ns: int, who: str, host: str, reason: Reason, detail: str = "") -> str | None:
        """Return the line for a refusal at `now_ns` (monotonic) by `who`, None if the same line was logged just now.

        `detail` is appended; the refused host must not be able to choose its text freely.
        """
        again = self._repeats.again((host, reason), now_ns)
        if again is None:
            return None
        what = "got no call from" if reason is Reason.UNKNOWN else "refused"
        in_brackets = f" ({detail})" if detail else ""
        return f"{who} {what} {host}: {CLIENT_REASONS[reason]}{in_brackets}{again}"


def reason_named(name: str) -> Reason | None:
    """Return the reason with that name, or None."""
    return next((reason for reason in Reason if reason.value == name), None)


def peer_of(text: str) -> tuple[str, int]:
    """Return (host, port) of gRPC's name for a peer: "ipv4:127.0.0.1:80", "ipv6:[::1]:80", "unix:" (port 0)."""
    scheme, _, rest = urllib.parse.unquote(text).partition(":")
    host, _, port = rest.rpartition(":")
    if scheme not in ("ipv4", "ipv6") or not port.isdigit():
        return scheme or text, 0
    return plain_host(host.strip("[]")), int(port)


def plain_host(host: str) -> str:
    """Return an address in its usual form: an IPv4 address mapped into IPv6 is IPv4, scopes are dropped."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return str(getattr(address, "ipv4_mapped", None) or address)
