"""The shares of owners in a store that is bounded for all of them, and the choice of entries to drop. Pure.

The owner that keeps most loses first, and of its own the one that was used longest ago. So an API key that keeps much
pushes out nothing of one that keeps less. Something new stays in any case, unless it alone is larger than half of the
bytes and than what the others leave to its owner.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Container, Iterator


@dataclasses.dataclass(slots=True)
class _Share:
    """What one owner keeps."""

    used: OrderedDict[str, int] = dataclasses.field(default_factory=OrderedDict)
    """Id -> the number of its last use; used longest ago first."""
    n_bytes: int = 0


class Shares:
    """The shares of all owners."""

    def __init__(self, n_max: int, bytes_max: int) -> None:
        self._n_max, self._bytes_max = n_max, bytes_max
        self._of: dict[str, _Share] = {}  # by the owner
        self._sizes: dict[str, int] = {}  # by the id
        self._uses = itertools.count()
        self.n_bytes = 0

    def has_room(self, owner: str, n_bytes: int) -> bool:
        """Return whether one of this size may be kept: of all sizes that are larger, none may."""
        if n_bytes <= self._bytes_max // 2:
            return True
        others = (min(share.n_bytes, n_bytes) for name, share in self._of.items() if name != owner)
        return n_bytes + sum(others) <= self._bytes_max

    def put(self, owner: str, id: str, n_bytes: int) -> None:
        """Count one as used now, in place of any of its id."""
        added = n_bytes - self._sizes.get(id, 0)
        self._sizes[id] = n_bytes
        self.n_bytes += added
        self._of.setdefault(owner, _Share()).n_bytes += added
        self.use(owner, id)

    def use(self, owner: str, id: str) -> None:
        """Note that one is used now."""
        used = self._of[owner].used
        used[id] = next(self._uses)
        used.move_to_end(id)

    def drop(self, owner: str, id: str) -> None:
        """Count one no more."""
        n_bytes = self._sizes.pop(id)
        self.n_bytes -= n_bytes
        share = self._of[owner]
        share.n_bytes -= n_bytes
        del share.used[id]
        if not share.used:
            del self._of[owner]

    def too_many(self, new_id: str, held: Container[str] = ()) -> Iterator[str]:
        """Yield what goes for a new one, until the bounds hold. Drop each before the next one is asked for.

        Those that are `held` are the last ones of their owner to go.
        """
        while True:
            is_full = len(self._sizes) > self._n_max
            if not is_full and self.n_bytes <= self._bytes_max:
                return
            share = max(self._losing(new_id), key=lambda share: _weight(share, by_number=is_full))
            others = (id for id in share.used if id != new_id)  # a large one may need the place of hundreds
            first = next(others)
            yield next((id for id in itertools.chain((first,), others) if id not in held), first)

    def _losing(self, new_id: str) -> Iterator[_Share]:
        return (share for share in self._of.values() if len(share.used) > 1 or new_id not in share.used)


def _weight(share: _Share, *, by_number: bool) -> tuple[int, int]:
    """Return what the largest share has most of; of equal ones, that which holds what was used longest ago."""
    return len(share.used) if by_number else share.n_bytes, -next(iter(share.used.values()))
