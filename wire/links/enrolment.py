"""Enrolment: how a host gets its certificate with the one line that `relayline up` prints. Tokens and messages. Pure.

    relayline join HOST:PORT TOKEN          TOKEN = NAME.(version, secret, fingerprint)

The port speaks HTTP over TLS and asks for no certificate of the client. It offers these two calls and nothing else:

    GET  /relayline/v1/enrol    -> Welcome    the CA's certificate, which the token's fingerprint proves
    POST /relayline/v1/enrol    Request -> Enrolled, or Refusal

The host connects twice. On its first connection it trusts no one, and takes only the CA. The second time it trusts that
CA, checks that a coordinator answers, and only then sends the secret and its certificate request.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import hmac
import secrets

import msgspec

from relayline.wire.common.errors import UsageError
from relayline.wire.links.roles import NAME

PORT = 50_049  # of the coordinator, unless it is told another
PATH = "/relayline/v1/enrol"
VERSION = 1  # of the token and of the calls
SECRET_BYTES, FINGERPRINT_BYTES = 16, 19  # 128 bits cannot be guessed; 152 bits of a hash cannot be met by another CA
_CODE_BYTES = 1 + SECRET_BYTES + FINGERPRINT_BYTES
_CODE_CHARS = -(-_CODE_BYTES * 4 // 3)
_COPY = "copy the whole line that `relayline up` or `relayline invite` printed"


@dataclasses.dataclass(frozen=True, slots=True)
class JoinToken:
    """The content of a join line's token."""

    name: str
    """Name of the stage that the holder may become."""
    secret: bytes = dataclasses.field(repr=False)
    """SECRET_BYTES, known to the coordinator by their hash alone."""
    fingerprint: bytes
    """FINGERPRINT_BYTES of the CA's certificate, see `fingerprint_of`."""

    def __str__(self) -> str:
        code = bytes((VERSION,)) + self.secret + self.fingerprint
        return f"{self.name}.{base64.urlsafe_b64encode(code).decode()}"


def new_token(name: str, ca_der: bytes) -> JoinToken:
    """Return a fresh token for the stage of this name and the CA of this certificate (DER)."""
    return JoinToken(name, secrets.token_bytes(SECRET_BYTES), fingerprint_of(ca_der))


def read_token(text: str) -> JoinToken:
    """Return a token's content. Raises UsageError for an invalid one."""
    name, dot, code = text.strip().partition(".")
    if not dot or not NAME.fullmatch(name):
        raise UsageError(f"the token is not one of a join line; {_COPY}")
    if len(code) != _CODE_CHARS:
        raise UsageError(f"the token for {name} has {len(code)} characters behind the dot, not {_CODE_CHARS}; {_COPY}")
    try:
        raw = base64.b64decode(code.encode(), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise UsageError(f"the token for {name} holds characters that no token has; {_COPY}") from None
    if raw[0] != VERSION:
        raise UsageError(f"the token for {name} is of another version; run the same relayline version on both ends")
    return JoinToken(name, raw[1 : 1 + SECRET_BYTES], raw[1 + SECRET_BYTES :])


def fingerprint_of(ca_der: bytes) -> bytes:
    """Return the first FINGERPRINT_BYTES of the SHA-256 of a CA's certificate (DER)."""
    return hashlib.sha256(ca_der).digest()[:FINGERPRINT_BYTES]


def is_ca(token: JoinToken, ca_der: bytes) -> bool:
    """Return whether a token is of the CA of this certificate (DER)."""
    return hmac.compare_digest(token.fingerprint, fingerprint_of(ca_der))


def digest_of(secret: bytes) -> str:
    """Return the form in which the coordinator keeps a secret: its SHA-256, in hex."""
    return hashlib.sha256(secret).hexdigest()


class Welcome(msgspec.Struct, frozen=True):
    """The public answer."""

    ca: str
    """The CA's certificate, PEM."""
    now: str
    """The coordinator's time, ISO 8601 with its zone."""
    join_host: str
    """Host by which the coordinator's certificate knows it."""
    join_port: int
    """Port where stages join."""
    software_version: str
    """Of the coordinator."""


class Request(msgspec.Struct, frozen=True):
    """A host's request."""

    name: str
    """Of the stage."""
    csr: str
    """Certificate request, PEM; its key was made on the host and stays there."""
    secret: str = ""
    """The token's secret, URL-safe base64. Empty in a renewal."""
    certificate: str = ""
    """In a renewal: the certificate (PEM) that is to be replaced. Its key is the request's."""
    advertise: str = ""
    """Host at which the stage wants to be found, where that is not the address that it calls from."""
    is_relayed: bool = False
    """Whether the stage is found at the coordinator's host, through its relay."""


class Enrolled(msgspec.Struct, frozen=True):
    """A host's answer."""

    certificate: str
    """PEM."""
    token: str
    """The stage's own join token, see wire.links.role_tokens; empty where the coordinator asks for none."""
    crl: str = ""
    """The list of revoked certificates, PEM; empty where there is none."""


class Refusal(msgspec.Struct, frozen=True):
    """Why a host gets nothing."""

    error: str
    """Label of the error, see wire.common.errors."""
    message: str
    """The error in one line: what is wrong and what to do."""
