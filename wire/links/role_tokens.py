"""Join tokens that state a role, and the proofs that their holders show. Pure.

    coordinator/ROOT            the coordinator's: every stage's key follows from it
    stage/NAME/HOST/KEY         a stage's: KEY = HMAC(ROOT, name, host, generation)

A token itself never travels. A stage that joins shows HMAC(KEY, "join"); the coordinator shows a stage HMAC(KEY,
"coordinator") of that stage's key. So a proof shown to one stage opens no other stage, and no stage can make another
one's proof. Revoking a stage's token raises the generation of its name and host, which changes its key.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import hmac
import secrets
from collections.abc import Callable

from relayline.wire.links.roles import Identity, Role

ROOT_BYTES = 32
_SEPARATOR = "/"

Generation = Callable[[Identity], int]


@dataclasses.dataclass(frozen=True, slots=True)
class RoleToken:
    """A parsed token."""

    role: Role
    key: str = dataclasses.field(repr=False)
    """ROOT or KEY."""
    identity: Identity | None = None
    """Of a stage's token; the coordinator's says no host."""


def new_root() -> str:
    """Return a fresh token of a coordinator, 256 bits."""
    return _SEPARATOR.join((Role.COORDINATOR.value, secrets.token_urlsafe(ROOT_BYTES)))


def read(text: str) -> RoleToken | None:
    """Return a token's role and holder, None for one that states no role."""
    role, *parts = text.split(_SEPARATOR)
    if role == Role.COORDINATOR.value and len(parts) == 1 and parts[0]:
        return RoleToken(Role.COORDINATOR, parts[0])
    if role == Role.STAGE.value and len(parts) == 3 and parts[2]:
        identity = Identity(Role.STAGE, parts[1], parts[0])
        return RoleToken(Role.STAGE, parts[2], identity) if identity.is_valid else None
    return None


def token_for(root: str, stage: Identity, generation: int) -> str:
    """Return the token of a stage; `root` is the coordinator's whole token."""
    return _SEPARATOR.join((Role.STAGE.value, stage.name, stage.host, _stage_key(root, stage, generation)))


def join_proof(token: RoleToken) -> str:
    """Return a joining stage's proof."""
    assert token.identity is not None
    return _SEPARATOR.join((Role.STAGE.value, token.identity.name, token.identity.host, _mac(token.key, "join")))


def joined_identity(root: str, shown: str, generation: Generation) -> Identity | None:
    """Return whose proof a stage has shown, None for one that the coordinator with the token `root` did not issue."""
    claim = read(shown)  # a proof has the form of a token
    if claim is None or claim.identity is None:
        return None
    key = _stage_key(root, claim.identity, generation(claim.identity))
    return claim.identity if hmac.compare_digest(claim.key.encode(), _mac(key, "join").encode()) else None


def coordinator_proof(root: str, stage: Identity, generation: int) -> str:
    """Return the proof that the coordinator with the token `root` shows to a stage."""
    return _coordinator_shows(_stage_key(root, stage, generation))


def is_coordinator(token: RoleToken, shown: str) -> bool:
    """Return whether a stage with this token has been shown its coordinator's proof."""
    return hmac.compare_digest(shown.encode(), _coordinator_shows(token.key).encode())


def _coordinator_shows(key: str) -> str:
    return _SEPARATOR.join((Role.COORDINATOR.value, _mac(key, "coordinator")))


def _stage_key(root: str, stage: Identity, generation: int) -> str:
    found = read(root)
    key = found.key if found is not None else root
    return _mac(key, f"{stage.uri} {generation}")


def _mac(key: str, text: str) -> str:
    digest = hmac.new(key.encode(), f"relayline/1 {text}".encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
