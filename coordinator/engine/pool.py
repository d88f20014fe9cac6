"""Decides which places are to hold layers, as stages come, go, are drained and are lost for long. Pure.

A place holds layers or stands by, see coordinator.engine.moves. `wanted` says who is to hold layers now:

* A holder that was drained, or that has been away for longer than `takeover_ns`, gives its layers up. One that stands
  by takes its place in the line of layers, a spare first; without one the others share the layers.
* A stage that is here and stands by is offered layers once it has been here for STEADY_S, while fewer hold layers than
  there are stages that are no spares and are not drained. So a fifth host gets layers. One that comes back gets its
  part again if the others shared it, and stands by if another took its place.

A failed change is tried again after a delay that doubles each time, or as soon as a stage comes, goes or is drained.
`coordinator.planner.share_out` decides which layers each place gets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

STEADY_S = 5.0  # for which a stage must be here before it is offered layers: each offer makes requests pause
RETRY_FIRST_S, RETRY_MAX_S = 30.0, 3_600.0  # after a change that could not be made


@dataclasses.dataclass(slots=True)
class _Host:
    name: str
    is_spare: bool
    is_drained: bool = False
    is_here: bool = False
    was_here: bool = False
    since_ns: int = 0  # of is_here


class Pool:
    """The places of one pipeline. Times are monotonic nanoseconds of the caller."""

    def __init__(
        self, names: Sequence[str], spares: Iterable[int], takeover_ns: int, *, drained: Iterable[int] = ()
    ) -> None:
        """`spares` and `drained`: indices of places. `takeover_ns`: 0 for never."""
        spares, drained = set(spares), set(drained)
        self._hosts = [_Host(name, at in spares, at in drained) for at, name in enumerate(names)]
        self._takeover_ns = takeover_ns
        self._n_failed, self._tries_ns = 0, 0  # changes that failed in a row; when the next may be tried

    # --- events -------------------------------------------------------------------------------------------------------

    def add(self, name: str, *, is_spare: bool = False) -> None:
        """A further place."""
        self._hosts.append(_Host(name, is_spare))

    def came(self, index: int, now_ns: int) -> None:
        """A stage is at its place."""
        host = self._hosts[index]
        host.is_here = host.was_here = True
        host.since_ns = now_ns
        self._retry_at_once()

    def left(self, index: int, now_ns: int) -> None:
        """It no longer exists."""
        self._hosts[index].is_here, self._hosts[index].since_ns = False, now_ns
        self._retry_at_once()

    def drain(self, index: int, *, is_drained: bool = True) -> None:
        """A place is to hold no layers; or may again."""
        self._hosts[index].is_drained = is_drained
        self._retry_at_once()

    def failed(self, now_ns: int) -> None:
        """The change that `wanted` returned could not be made."""
        self._tries_ns = now_ns + round(min(RETRY_FIRST_S * 2**self._n_failed, RETRY_MAX_S) * 1e9)
        self._n_failed += 1

    def moved(self) -> None:
        """Layers have moved."""
        self._retry_at_once()

    def _retry_at_once(self) -> None:
        self._n_failed = self._tries_ns = 0

    # --- decisions ----------------------------------------------------------------------------------------------------

    def is_drained(self, index: int) -> bool:
        """Whether a place is to hold no layers."""
        return self._hosts[index].is_drained

    def is_spare(self, index: int) -> bool:
        """Whether it holds layers only in the place of another one."""
        return self._hosts[index].is_spare

    def is_here(self, index: int) -> bool:
        """Whether a stage is at its place."""
        return self._hosts[index].is_here

    def takeover_in_ns(self, index: int, now_ns: int) -> int | None:
        """Return how long a stage that is away has before its layers are given to others; None for no bound."""
        host = self._hosts[index]
        if host.is_here or not host.was_here or not self._takeover_ns:
            return None
        return max(0, host.since_ns + self._takeover_ns - now_ns)

    def freed(self, holders: Iterable[int], now_ns: int) -> list[int]:
        """Return the holders that are to give their layers up."""
        return [at for at in holders if self._hosts[at].is_drained or self.takeover_in_ns(at, now_ns) == 0]

    def wanted(self, holders: tuple[int, ...], n_layers: int, now_ns: int) -> tuple[int, ...]:
        """Return the places that should hold layers, in layer order; () if no change is due or possible now."""
        if now_ns < self._tries_ns:
            return ()
        freed = self.freed(holders, now_ns)
        free = [at for at in range(len(self._hosts)) if at not in holders and self._stands_ready(at)]
        free.sort(key=lambda at: not self._hosts[at].is_spare)
        new: list[int] = []
        for at in holders:
            if at not in freed:
                new.append(at)
            elif free:
                new.append(free.pop(0))
        offered = [at for at in reversed(free) if now_ns - self._hosts[at].since_ns >= STEADY_S * 1e9]
        while offered:
            kept_free = self._n_coming(new) if self._hosts[offered[0]].is_spare else 0
            if len(new) >= min(self._n_wanted() - kept_free, n_layers):
                break
            _insert(new, offered.pop(0))
        is_possible = new and all(self._hosts[at].is_here for at in new)
        return tuple(new) if is_possible and tuple(new) != holders else ()

    def _stands_ready(self, index: int) -> bool:
        host = self._hosts[index]
        return host.is_here and not host.is_drained

    def _n_wanted(self) -> int:
        """Return how many places hold layers when all are here."""
        return sum(not host.is_spare and not host.is_drained for host in self._hosts)

    def _n_coming(self, holders: Sequence[int]) -> int:
        """Return how many others may still come for layers, or have just come: no spare takes their part."""
        others = [host for at, host in enumerate(self._hosts) if at not in holders]
        return sum(not host.is_spare and not host.is_drained and (host.is_here or not host.was_here) for host in others)


def _insert(holders: list[int], index: int) -> None:
    """Put a place where it belongs by the order in which places are named."""
    at = next((at for at, other in enumerate(holders) if other > index), len(holders))
    holders.insert(at, index)
