"""Tenants: those who share a pipeline, each known by its API key's name, with what the key's options give it. Pure."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from typing import Literal

ServiceTier = Literal["default", "flex", "priority"]  # OpenAI's names of what a request was served as

SHARE_MAX = 1_000  # of one tenant
TURN_MAX = (1 << 31) - 1  # of a request's `priority`, in either direction
_TIERS: dict[str, int] = {"priority": -1, "default": 0, "flex": 1}


class Level(enum.IntEnum):
    """Classes of tenants: those of a smaller one go first. `fair_lanes` says which lanes are left for the others."""

    HIGH = 0
    NORMAL = 1
    LOW = 2
    BATCH = 3
    """Of batches: nobody waits for their answers, so they have only what nobody else wants."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tenant:
    """Who sends a request. Two are the same if their names are: options may have been read again in between."""

    name: str
    share: int = dataclasses.field(default=1, compare=False)  # of the lanes, relative to the other tenants' shares
    streams_max: int | None = dataclasses.field(default=None, compare=False)  # that run at once; more of them wait
    waiting_max: int | None = dataclasses.field(default=None, compare=False)  # of its requests; more are refused
    level: Level = dataclasses.field(default=Level.NORMAL, compare=False)
    models: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)  # that it may use; empty: all
    circle: str = dataclasses.field(default="", compare=False)
    """Whose prefixes serve each other: its own alone, which this names; empty: all of those that say nothing."""


ANYONE = Tenant("")
"""The one tenant where no API keys are set."""


def circle_of(tenant: Tenant, salt: str) -> str:
    """Return the circle of a request: only requests of one circle serve each other by the prefix cache.

    `salt` is vLLM's `cache_salt`, which makes circles within a tenant's own. Those of the empty circle are everybody's.
    """
    if not (tenant.circle or salt):
        return ""
    return hashlib.sha256(f"{len(tenant.circle)} {tenant.circle}{salt}".encode(errors="surrogatepass")).hexdigest()


def turn_of(priority: int, tier: ServiceTier | None) -> int:
    """Return where a request stands among those of its own tenant: smaller ones go first, equal ones as they came.

    `priority` is vLLM's, at most TURN_MAX in either direction. OpenAI's `service_tier` counts before it.
    """
    return _TIERS[tier or "default"] * 2 * (TURN_MAX + 1) + min(max(priority, -TURN_MAX), TURN_MAX)


def tier_of(asked: str | None) -> ServiceTier | None:
    """Return what a request's `service_tier` is served as; None if it asked for none. Names of others are `default`."""
    match asked:
        case None | "flex" | "priority":
            return asked
    return "default"
