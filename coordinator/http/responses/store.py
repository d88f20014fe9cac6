"""The responses that clients may continue: in memory, bounded by count and by bytes. Pure. What keeps them over a
restart is told of each change.

A response holds its own input and output only; those before it are found by its `previous_id`. The owner that keeps
most loses its least recently used one first; using a response uses everything before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol

from relayline.coordinator.http.responses.items import KeptItem
from relayline.coordinator.http.responses.recording import Recording
from relayline.coordinator.http.responses.shares import Shares
from relayline.wire.common.bounds import STORED_RESPONSES_BYTES_MAX, STORED_RESPONSES_MAX

ITEM_BYTES = 200  # what Python itself needs for one, about


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """One response; a finished one, unless it is shown while it runs."""

    id: str
    owner: str  # by the key that the client has shown; "" where none is demanded
    body: bytes  # JSON
    input_items: Sequence[KeptItem]
    output_items: Sequence[KeptItem]
    previous_id: str | None
    is_background: bool = False
    recording: Recording | None = None  # of a background response that was asked for as a stream

    @property
    def n_bytes(self) -> int:
        """Its contents."""
        n_events = 0 if self.recording is None else self.recording.n_bytes
        return n_events + len(self.body) + self.items_bytes

    @property
    def items_bytes(self) -> int:
        """Of these, what a response that continues it is made of."""
        return sum(len(item) + ITEM_BYTES for _, item in (*self.input_items, *self.output_items))


class Mirror(Protocol):
    """Keeps the responses of a store elsewhere, too."""

    def put(self, stored: Stored) -> None:
        """Keep a response, in place of any of its id."""

    def drop(self, id: str) -> None:
        """Forget a response."""

    def used(self, ids: Sequence[str]) -> None:
        """These were used now, in this order."""


class ResponseStore:
    """All stored responses of one application."""

    def __init__(self, n_max: int = STORED_RESPONSES_MAX, bytes_max: int = STORED_RESPONSES_BYTES_MAX) -> None:
        self._shares = Shares(n_max, bytes_max)
        self._by_id: dict[str, Stored] = {}
        self._holder_of: dict[str, str] = {}  # item id -> response id
        self.mirror: Mirror | None = None

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def n_bytes(self) -> int:
        """The contents of all."""
        return self._shares.n_bytes

    def put(self, stored: Stored) -> bool:
        """Store a response, unless it alone is too large; older ones may be dropped for it."""
        if not self._shares.has_room(stored.owner, stored.n_bytes):
            return False
        self._by_id[stored.id] = stored
        self._holder_of.update({item_id: stored.id for item_id, _ in stored.output_items})
        self._shares.put(stored.owner, stored.id, stored.n_bytes)
        if self.mirror is not None:
            self.mirror.put(stored)
        for id in self._shares.too_many(stored.id):
            self._drop(id)
        return True

    def get(self, id: str, owner: str) -> Stored | None:
        """Return a response of this owner's."""
        found = self._by_id.get(id)
        return found if found is not None and found.owner == owner else None

    def delete(self, id: str, owner: str) -> bool:
        """Forget a response of this owner's; say whether there was one."""
        found = self.get(id, owner)
        if found is not None:
            self._drop(id)
        return found is not None

    def chain(self, id: str, owner: str) -> list[Stored] | str:
        """Return a response with all before it, the first one first; or the id of one that is not here."""
        found: list[Stored] = []
        at: str | None = id
        while at is not None:
            stored = self.get(at, owner)
            if stored is None:
                return at
            found.append(stored)
            at = stored.previous_id
        for stored in found:  # the first one is used last: it is the last to go
            self._shares.use(owner, stored.id)
        if self.mirror is not None:
            self.mirror.used([stored.id for stored in found])
        return found[::-1]

    def items(self, item_ids: Iterable[str], owner: str) -> dict[str, bytes]:
        """Return what responses of this owner's put out under these ids, where it is known."""
        wanted = {each: self._holder_of[each] for each in item_ids if each in self._holder_of}
        found: dict[str, bytes] = {}
        for holder in dict.fromkeys(wanted.values()):
            stored = self.get(holder, owner)
            if stored is not None:
                found.update({item_id: item for item_id, item in stored.output_items if item_id in wanted})
        return found

    def _drop(self, id: str) -> None:
        stored = self._by_id.pop(id)
        self._shares.drop(stored.owner, id)
        for item_id, _ in stored.output_items:
            self._holder_of.pop(item_id, None)
        if self.mirror is not None:
            self.mirror.drop(id)
