"""The conversations of an application: in memory, bounded by count and by bytes. Pure. What keeps them over a restart
is told of each change.

A response that goes on with a conversation takes a turn in it. Until that turn ends, the items stay as they are: two
responses at once would each answer a conversation without the other, and their items would mix.

The owner that keeps most loses first: the conversation that it changed or went on with longest ago, and those with a
turn last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, Self

from relayline.coordinator.http.responses.items import KeptItem
from relayline.coordinator.http.responses.shares import Shares
from relayline.coordinator.http.responses.store import ITEM_BYTES
from relayline.wire.common.bounds import (
    CONVERSATION_BYTES_MAX,
    CONVERSATION_ITEMS_MAX,
    CONVERSATIONS_BYTES_MAX,
    CONVERSATIONS_MAX,
)
from relayline.wire.common.errors import (
    ContextLengthError,
    ConversationLockedError,
    ConversationNotFoundError,
    InvalidRequestError,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation, as it is at one time."""

    id: str
    owner: str  # by the key that the client has shown; "" where none is demanded
    created: int  # unix seconds
    metadata: bytes  # JSON
    items: Mapping[str, bytes]  # id -> JSON, the first one first
    items_bytes: int
    lineage: object = dataclasses.field(default_factory=object, repr=False, compare=False)
    """Of one lineage, each has the items of those with fewer, and in front."""

    @classmethod
    def of(cls, id: str, owner: str, created: int, metadata: bytes, items: Iterable[KeptItem]) -> Self:
        """Return one with these items."""
        found = dict(items)
        return cls(id, owner, created, metadata, found, sum(map(_n_bytes, found.values())))

    @property
    def n_bytes(self) -> int:
        """Its contents."""
        return self.items_bytes + len(self.metadata)

    def with_items(self, items: Sequence[KeptItem]) -> Conversation:
        """Return it with these at the end, without those that it has: a response may end again after a crash."""
        new = [(id, item) for id, item in items if id not in self.items]
        n_bytes = sum(_n_bytes(item) for _, item in new)
        return dataclasses.replace(self, items={**self.items, **dict(new)}, items_bytes=self.items_bytes + n_bytes)

    def item(self, item_id: str) -> bytes:
        """Return an item as JSON. Raises ConversationNotFoundError."""
        if item_id not in self.items:
            raise ConversationNotFoundError(f"no item {item_id[:100]!r} is in the conversation {self.id}")
        return self.items[item_id]

    def without_item(self, item_id: str) -> Conversation:
        """Return it without an item. Raises ConversationNotFoundError."""
        n_bytes = self.items_bytes - _n_bytes(self.item(item_id))
        items = {id: item for id, item in self.items.items() if id != item_id}
        return dataclasses.replace(self, items=items, items_bytes=n_bytes, lineage=object())


class Mirror(Protocol):
    """Keeps the conversations of a store elsewhere, too."""

    def put(self, conversation: Conversation) -> None:
        """Keep a conversation, in place of any of its id."""

    def drop(self, id: str) -> None:
        """Forget a conversation."""


class Turn:
    """One response's turn in a conversation. As a context it ends with it, unless it is detached."""

    def __init__(self, store: ConversationStore, id: str) -> None:
        self._store, self.id = store, id
        self._is_detached = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_detached:
            self.leave()

    def detach(self) -> None:
        """The response goes on without its request."""
        self._is_detached = True

    def add(self, items: Sequence[KeptItem]) -> bool:
        """Add the items of a whole answer and of what it answers. Return whether they are there."""
        return self._store.answered(self, items)

    def leave(self) -> None:
        """End the turn. One that has ended stays so."""
        self._store.left(self)


class ConversationStore:
    """All conversations of one application."""

    def __init__(self, n_max: int = CONVERSATIONS_MAX, bytes_max: int = CONVERSATIONS_BYTES_MAX) -> None:
        self._shares = Shares(n_max, bytes_max)
        self._by_id: dict[str, Conversation] = {}
        self._turns: dict[str, Turn] = {}  # by the conversation's id
        self.mirror: Mirror | None = None

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def n_bytes(self) -> int:
        """The contents of all."""
        return self._shares.n_bytes

    def get(self, id: str, owner: str, param: str | None = None) -> Conversation:
        """Return a conversation of this owner's. Raises ConversationNotFoundError, about `param` of the request."""
        found = self._by_id.get(id)
        if found is None or found.owner != owner:
            where = f"{param}: " if param else ""
            text = f"no conversation {id[:100]!r} is here (any more); begin another one"
            raise ConversationNotFoundError(where + text, param)
        return found

    def put(self, conversation: Conversation) -> bool:
        """Have a conversation as it is now, unless it alone is too large; others may be dropped for it."""
        if not self._shares.has_room(conversation.owner, conversation.n_bytes):
            return False
        self._by_id[conversation.id] = conversation
        self._shares.put(conversation.owner, conversation.id, conversation.n_bytes)
        if self.mirror is not None:
            self.mirror.put(conversation)
        for id in self._shares.too_many(conversation.id, self._turns):
            self._drop(id)
        return True

    def add(self, id: str, owner: str, items: Sequence[KeptItem]) -> Conversation:
        """Add items. Raises ConversationNotFoundError, ConversationLockedError, InvalidRequestError."""
        grown = self.unlocked(id, owner).with_items(items)
        if len(grown.items) > CONVERSATION_ITEMS_MAX or grown.n_bytes > CONVERSATION_BYTES_MAX:
            text = f"the conversation would have {len(grown.items)} items and {grown.n_bytes} bytes"
            bounds = f"{CONVERSATION_ITEMS_MAX} items and {CONVERSATION_BYTES_MAX} bytes are the most"
            raise InvalidRequestError.of_field("items", f"{text}, and {bounds}; begin another one")
        self.put(grown)
        return grown

    def unlocked(self, id: str, owner: str) -> Conversation:
        """Return a conversation whose items may change. Raises ConversationNotFoundError, ConversationLockedError."""
        found = self.get(id, owner)
        if id in self._turns:
            text = "a response goes on with this conversation, or an item is being deleted; wait for the end"
            raise ConversationLockedError(text)
        return found

    def update(self, id: str, owner: str, metadata: bytes) -> Conversation:
        """Set the metadata. Raises ConversationNotFoundError."""
        updated = dataclasses.replace(self.get(id, owner), metadata=metadata)
        self.put(updated)
        return updated

    def delete(self, id: str, owner: str) -> None:
        """Forget a conversation. A response that goes on with it adds to nothing. Raises ConversationNotFoundError."""
        self._drop(self.get(id, owner).id)

    def begin(self, id: str, owner: str, *, resumes: bool = False) -> Turn:
        """Begin a response's turn. `resumes`: it has begun before, with the items as they are, however many.

        Raises ConversationNotFoundError, ConversationLockedError, ContextLengthError.
        """
        found = self.get(id, owner, "conversation")
        if id in self._turns:
            text = "another response goes on with it; send this one when that one has ended"
            raise ConversationLockedError(f"conversation: {text}", "conversation")
        if not resumes and (len(found.items) >= CONVERSATION_ITEMS_MAX or found.n_bytes > CONVERSATION_BYTES_MAX):
            text = "the conversation is too long to go on with; begin another one with the items that matter"
            raise ContextLengthError(f"conversation: {text}", "conversation")
        self._shares.use(owner, id)
        turn = self._turns[id] = Turn(self, id)
        return turn

    def answered(self, turn: Turn, items: Sequence[KeptItem]) -> bool:
        """Add the items of a turn; return whether they are there. See `Turn.add`."""
        if self._turns.get(turn.id) is not turn:
            return False  # the conversation is gone
        return self.put(self._by_id[turn.id].with_items(items))

    def left(self, turn: Turn) -> None:
        """End a turn. See `Turn.leave`."""
        if self._turns.get(turn.id) is turn:
            del self._turns[turn.id]

    def _drop(self, id: str) -> None:
        self._shares.drop(self._by_id.pop(id).owner, id)
        self._turns.pop(id, None)
        if self.mirror is not None:
            self.mirror.drop(id)


def _n_bytes(item: bytes) -> int:
    return len(item) + ITEM_BYTES
