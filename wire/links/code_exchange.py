"""How two ends prove to each other that they know a join code, and one gives the other the long join line.

The port of enrolment has these calls, besides those of `enrolment`:

    GET  /relayline/v1/codes/SLOT       -> Slot           whether a code of that slot is open here
    POST /relayline/v1/codes            Begin -> Begun    the two messages of a SPAKE2 exchange
    POST /relayline/v1/codes/proof      Proof -> Sealed   the host's proof; then the join line, under the common key

SPAKE2 is a password-authenticated key exchange: whoever listens learns nothing about the code, and whoever takes part
can test one code in each exchange. The host proves its key first, so that a coordinator can count wrong codes. Nothing
here trusts the TLS around it: the certificate of the port is not known yet, and a relay in between gains nothing. The
join line brings the fingerprint of the CA, and from then on all is as if a person had copied it.

The library is `spake2` (pure Python, the one of magic-wormhole), over Ed25519. An object here is good for one exchange.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
from typing import Annotated, Any, Protocol

import msgspec

from relayline.wire.common.errors import ProtocolError, StartError, UnauthenticatedError
from relayline.wire.links.join_code import SLOT_FIRST, SLOT_LAST, JoinCode

PATH = "/relayline/v1/codes"
PROOF_PATH = f"{PATH}/proof"
MESSAGE_BYTES = 33  # of SPAKE2 over Ed25519: the side and a point
_HOST, _COORDINATOR = b"relayline join, host, 1", b"relayline join, coordinator, 1"
_NONCE_BYTES, _KEY_BYTES = 12, 32
_WRONG_VERSION = "run the same relayline version on both ends"


class Slot(msgspec.Struct, frozen=True):
    """A code of the slot that was asked for is open."""

    pipeline: str
    """Name of the pipeline."""


class Begin(msgspec.Struct, frozen=True):
    """A host's first message."""

    slot: Annotated[int, msgspec.Meta(ge=SLOT_FIRST, le=SLOT_LAST)]
    message: str
    """Of SPAKE2, base64."""


class Begun(msgspec.Struct, frozen=True):
    """The coordinator's."""

    exchange: str
    """Names the exchange in the call that follows."""
    message: str


class Proof(msgspec.Struct, frozen=True):
    """A host's second message."""

    exchange: str
    proof: str
    """That it has the common key, base64."""


class Sealed(msgspec.Struct, frozen=True):
    """The coordinator's answer to the right proof."""

    sealed: str
    """An `Invitation`, encrypted and authenticated with the common key, base64."""


class Invitation(msgspec.Struct, frozen=True):
    """What a join line says."""

    pipeline: str
    """Name of the pipeline."""
    address: str
    """host:port where hosts get their certificates."""
    token: str
    """As in `enrolment`."""
    is_relayed: bool = False
    """Whether the line has --relay."""


class HostEnd:
    """A host's side of one exchange."""

    def __init__(self, code: JoinCode) -> None:
        """Raise StartError where the library is missing."""
        self._end = _spake2().SPAKE2_A(code.password, idA=_HOST, idB=_COORDINATOR)
        self._key = b""
        self.message = encoded(self._end.start())
        """For the coordinator."""

    def proof(self, message: str) -> str:
        """Take the coordinator's message; returns the proof to send. Raises ProtocolError for what is no message."""
        self._key = _finish(self._end, message, b"B")
        return encoded(_proof_of(self._key))

    def open(self, sealed: str) -> Invitation:
        """Return the invitation. Raises UnauthenticatedError for one that was not sealed with the common key."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        data = decoded(sealed)
        try:
            plain = ChaCha20Poly1305(_derived(self._key, b"seal")).decrypt(
                data[:_NONCE_BYTES], data[_NONCE_BYTES:], _COORDINATOR
            )
            return msgspec.json.decode(plain, type=Invitation)
        except (InvalidTag, ValueError) as error:
            raise UnauthenticatedError(
                "the machine that answered does not know the code; somebody may be intercepting the connection, so "
                "join with the long line"
            ) from error


class CoordinatorEnd:
    """A coordinator's side of one exchange."""

    def __init__(self, code: JoinCode, message: str) -> None:
        """Take the host's message. Raises ProtocolError for what is none, StartError where the library is missing."""
        end = _spake2().SPAKE2_B(code.password, idA=_HOST, idB=_COORDINATOR)
        self.message = encoded(end.start())
        """For the host."""
        self._key = _finish(end, message, b"A")

    def is_right(self, proof: str) -> bool:
        """Return whether the host has the common key. Ask once: each answer tests a code."""
        return hmac.compare_digest(_proof_of(self._key), decoded(proof))

    def seal(self, invitation: Invitation) -> str:
        """Return an invitation for the host alone."""
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        nonce = os.urandom(_NONCE_BYTES)
        cipher = ChaCha20Poly1305(_derived(self._key, b"seal"))
        return encoded(nonce + cipher.encrypt(nonce, msgspec.json.encode(invitation), _COORDINATOR))


def encoded(data: bytes) -> str:
    """Return bytes as they travel."""
    return base64.b64encode(data).decode()


def decoded(text: str) -> bytes:
    """Return the bytes of a text that came. Raises ProtocolError."""
    try:
        return base64.b64decode(text.encode(), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ProtocolError(f"this is no message of an exchange by code; {_WRONG_VERSION}") from error


class _End(Protocol):
    """A side of SPAKE2, as the library has it."""

    def start(self) -> bytes: ...

    def finish(self, message: bytes) -> bytes: ...


def _spake2() -> Any:
    try:
        import spake2
    except ImportError as error:
        raise StartError("codes need the package spake2: `make setup` installs it; the long line works too") from error
    return spake2


def _finish(end: _End, message: str, side: bytes) -> bytes:
    """Return the common key. The library checks that the point is one of the group, and not its own."""
    from spake2.ed25519_basic import NotOnCurve

    data = decoded(message)
    if len(data) != MESSAGE_BYTES or data[:1] != side:
        raise ProtocolError(f"this is no message of an exchange by code; {_WRONG_VERSION}")
    try:
        return end.finish(data)
    except (ValueError, AssertionError, NotOnCurve, _spake2().SPAKEError) as error:
        raise ProtocolError("the message of an exchange by code is no valid point; somebody altered it") from error


def _proof_of(key: bytes) -> bytes:
    return _derived(key, b"proof of the host")


def _derived(key: bytes, purpose: bytes) -> bytes:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(hashes.SHA256(), _KEY_BYTES, None, b"relayline join code, " + purpose).derive(key)
