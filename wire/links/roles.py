"""Permissions of calls: roles, the identity that a credential states, and one table of calls. Pure.

A certificate states its identity as a URI among its subject alternative names, a join token in its own text
(`wire.links.role_tokens`). Every check of a caller, on links, at the join port and at the metrics, is derived from
`CALLS`.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Sequence

SCHEME = "relayline"
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")  # of a stage: a DNS label
_HOST = re.compile(r"[A-Za-z0-9*_.:%-]{1,253}")
COORDINATOR_DIR, MONITOR_DIR = "coordinator", "monitor"  # names of directories, hence of no stage
TAKEN_NAMES = frozenset({COORDINATOR_DIR, MONITOR_DIR})


class Role(enum.Enum):
    """The purpose of a credential."""

    COORDINATOR = "coordinator"
    STAGE = "stage"
    MONITOR = "monitor"
    """Reads metrics, and nothing else."""


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """The holder that a credential states. A renewed credential states the same."""

    role: Role
    host: str
    """Host that it was issued for."""
    name: str = ""
    """Name of the stage; empty for the other roles."""

    def __str__(self) -> str:
        return f"{self.role.value} {self.name} on {self.host}" if self.name else f"{self.role.value} on {self.host}"

    @property
    def uri(self) -> str:
        """The form in which a certificate states it."""
        return ":".join((SCHEME, self.role.value, *([self.name] if self.name else []), self.host))

    @property
    def is_valid(self) -> bool:
        """Whether name and host can be those of its role."""
        named = NAME.fullmatch(self.name) is not None if self.role is Role.STAGE else not self.name
        return named and _HOST.fullmatch(self.host) is not None


@dataclasses.dataclass(frozen=True, slots=True)
class Credential:
    """One credential that a caller has shown."""

    identity: Identity | None
    """None for a certificate that states nothing; it may be shown where anybody is let in."""
    serial: int
    """Serial number of the certificate; of a token, how often tokens of the same name and host were revoked before."""


def identity_named(uri: str) -> Identity | None:
    """Return the identity that a URI states, None where it states none."""
    scheme, _, rest = uri.partition(":")
    word, _, rest = rest.partition(":")
    role = next((role for role in Role if role.value == word), None)
    if scheme != SCHEME or role is None:
        return None
    name, _, host = rest.partition(":") if role is Role.STAGE else ("", "", rest)
    found = Identity(role, host, name)
    return found if found.is_valid else None


def identity_among(uris: Sequence[str]) -> Identity | None:
    """Return the one identity among a certificate's URIs; None for no such name, or several."""
    found = {identity for uri in uris if (identity := identity_named(uri)) is not None}
    return found.pop() if len(found) == 1 else None


# --- the table --------------------------------------------------------------------------------------------------------


class Proof(enum.Enum):
    """A caller's proof on a plaintext link between ends that have join tokens."""

    NONE = "none"
    COORDINATOR = "coordinator"
    """Made from the stage's own key, which besides it only the coordinator can derive."""
    STAGE = "stage"
    """Made from the caller's key, which the coordinator derives."""
    PASS = "pass"
    """The pass of this epoch, which the coordinator gave to both neighbours."""
    PORT = "port"
    """The one that most calls of the port ask for: COORDINATOR at a stage, STAGE at the coordinator."""


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """The permitted callers of one call."""

    roles: frozenset[Role]
    """Roles that a certificate may state."""
    proof: Proof
    """The proof where there are no certificates."""
    further: str = ""
    """Further checks by the handler."""


_COORDINATOR = frozenset({Role.COORDINATOR})
_STAGE = frozenset({Role.STAGE})
ANYBODY = frozenset(Role)

_STAGE_SERVICE, _PIPELINE_SERVICE = "/relayline.v1.StageService/", "/relayline.v1.PipelineService/"
_TUNNEL_SERVICE = "/relayline.v1.TunnelService/"
METRICS = "GET /metrics"
HEALTH_PREFIX = "/grpc.health.v1.Health/"
REFLECTION_SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
REFLECTION_METHOD = "ServerReflectionInfo"

CALLS: dict[str, Call] = {
    _STAGE_SERVICE + "Describe": Call(_COORDINATOR, Proof.COORDINATOR),
    _STAGE_SERVICE + "Configure": Call(_COORDINATOR, Proof.COORDINATOR, "a route stays with the peer that began it"),
    _STAGE_SERVICE + "Status": Call(_COORDINATOR, Proof.COORDINATOR),
    _STAGE_SERVICE + "Batches": Call(_COORDINATOR, Proof.COORDINATOR),
    _STAGE_SERVICE + "SetTelemetry": Call(_COORDINATOR, Proof.COORDINATOR),
    _STAGE_SERVICE + "Logs": Call(_COORDINATOR, Proof.COORDINATOR),
    _STAGE_SERVICE + "Notes": Call(_COORDINATOR, Proof.COORDINATOR),
    _STAGE_SERVICE + "Revoke": Call(_COORDINATOR, Proof.COORDINATOR, "the list is signed by the CA"),
    _STAGE_SERVICE + "Return": Call(_COORDINATOR, Proof.COORDINATOR, "a route stays with the peer that began it"),
    _STAGE_SERVICE + "Relay": Call(
        _COORDINATOR | _STAGE, Proof.PASS, "the route's own coordinator or the stage that it named, with the pass"
    ),
    _STAGE_SERVICE + "Beat": Call(_COORDINATOR, Proof.COORDINATOR),
    _STAGE_SERVICE + "Watch": Call(
        _COORDINATOR | _STAGE, Proof.PASS, "the route's own coordinator or the stage before this one, with the pass"
    ),
    _STAGE_SERVICE + "HandOver": Call(
        _STAGE, Proof.PASS, "the stage that the coordinator named for this change, with the pass that it gave"
    ),
    _PIPELINE_SERVICE + "Join": Call(_STAGE, Proof.STAGE, "the name is the credential's, and bound to its holder"),
    _PIPELINE_SERVICE + "Fetch": Call(_STAGE, Proof.STAGE, "the ticket is the caller's own"),
    _TUNNEL_SERVICE + "Open": Call(_STAGE, Proof.STAGE, "the name is the credential's"),
    _TUNNEL_SERVICE + "Carry": Call(_STAGE, Proof.STAGE, "the ticket is of a connection to the caller itself"),
    METRICS: Call(frozenset({Role.MONITOR, Role.COORDINATOR}), Proof.NONE),
    **{
        f"/{service}/{REFLECTION_METHOD}": Call(_COORDINATOR | _STAGE, Proof.PORT, "served with --reflection alone")
        for service in REFLECTION_SERVICES
    },
}
_HEALTH = Call(ANYBODY, Proof.NONE)


def call_named(method: str) -> Call | None:
    """Return the roles that may call a method, or None if none may."""
    return _HEALTH if method.startswith(HEALTH_PREFIX) else CALLS.get(method)
