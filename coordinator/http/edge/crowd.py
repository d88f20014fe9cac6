"""The connections that are open, by address, and which of them makes room for a new one. Pure.

A connection either waits (for its next request, or for the rest of one) or is busy with an answer. At a bound, the
connection that has been idle longest is closed, so that idle connections keep no one out. If all are busy, the new one
is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclasses.dataclass(frozen=True, slots=True)
class Full:
    """No room for a new connection: everyone who might have made some is busy."""

    n_busy: int
    of_address: bool  # the bound is one address's own, not that of all


@dataclasses.dataclass(slots=True)
class _Group(Generic[Key]):
    """The connections of one address."""

    n_open: int = 0
    waiting: dict[Key, None] = dataclasses.field(default_factory=dict)  # the longest wait comes first


class Crowd(Generic[Key]):
    """The connected clients."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group[Key]] = {}
        self._address_of: dict[Key, str] = {}

    def __len__(self) -> int:
        return len(self._address_of)

    def enter(self, key: Key, address: str, n_max: int, n_address_max: int) -> Key | Full | None:
        """Add a new connection, which waits. Return the connection that must end for it (and is removed), or Full, or
        None.

        `n_max` bounds all connections, `n_address_max` those of one address; 0 sets no bound for an address.
        """
        group = self._groups.get(address, _Group[Key]())
        leaver: Key | None = None
        if n_address_max and group.n_open >= n_address_max:
            leaver = next(iter(group.waiting), None)
            if leaver is None:
                return Full(group.n_open, of_address=True)
        elif len(self) >= n_max:
            largest = max(self._groups.values(), key=lambda each: len(each.waiting), default=group)
            leaver = next(iter(largest.waiting), None)
            if leaver is None:
                return Full(len(self), of_address=False)
        if leaver is not None:
            self.leave(leaver)
        group = self._groups.setdefault(address, group)
        group.n_open += 1
        group.waiting[key] = None
        self._address_of[key] = address
        return leaver

    def wait(self, key: Key) -> None:
        """A connection waits from now on. One that has been taken out stays out."""
        if key in self._address_of:
            waiting = self._groups[self._address_of[key]].waiting
            waiting.pop(key, None)
            waiting[key] = None

    def work(self, key: Key) -> None:
        """A connection is busy from now on."""
        if key in self._address_of:
            self._groups[self._address_of[key]].waiting.pop(key, None)

    def leave(self, key: Key) -> None:
        """A connection has ended. Idempotent."""
        address = self._address_of.pop(key, None)
        if address is None:
            return
        group = self._groups[address]
        group.waiting.pop(key, None)
        group.n_open -= 1
        if not group.n_open:
            del self._groups[address]
