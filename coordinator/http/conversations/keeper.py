"""Keeps the conversations of an application in a directory, and lets their clients wait for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from relayline.coordinator.http.conversations.store import Conversation, ConversationStore, Turn
from relayline.coordinator.http.edge.errors import using_disk
from relayline.coordinator.http.responses.items import KeptItem
from relayline.coordinator.http.responses.keeper import ResponseKeeper
from relayline.wire.common.errors import InvalidRequestError

log = logging.getLogger("relayline.http")

WRITE_WAIT_S = 10.0  # for the disk, before a client sees what is written; after that it is in memory only, for now


class ConversationKeeper:
    """The mirror of a store in the directory of the responses, by the same thread: each change in its turn."""

    def __init__(self, keeper: ResponseKeeper) -> None:
        self._keeper, self._files = keeper, keeper.directory.conversations

    def put(self, conversation: Conversation) -> None:
        """Write a conversation soon."""
        self._keeper.write(self._files.put, conversation, n_bytes=conversation.n_bytes)

    def drop(self, id: str) -> None:
        """Forget a conversation soon."""
        self._keeper.remove(self._files.drop, id)

    async def certainly(self, conversation: Conversation) -> None:
        """Write a conversation. Raises HttpRefusal where the disk cannot be used."""
        with using_disk("the disk with the conversations"):
            await self._keeper.call(self._files.put, conversation, n_bytes=conversation.n_bytes)

    async def forget(self, id: str) -> None:
        """Forget a conversation for certain. Raises HttpRefusal where the disk cannot be used."""
        with using_disk("the disk with the conversations"):
            await self._keeper.call(self._files.drop, id)

    async def settled(self) -> None:
        """Wait until all changes so far are on the disk, or cannot be, or a bound is over."""
        try:
            async with asyncio.timeout(WRITE_WAIT_S):
                await self._keeper.settled()
        except TimeoutError:
            log.warning("the disk with the conversations is slow: a client is answered before its items are there")


class Conversations:
    """The conversations of one application, with what keeps them."""

    def __init__(self) -> None:
        self.store = ConversationStore()
        self.keeper: ConversationKeeper | None = None
        """Keeps them over the end of this process; None: they end with it."""
        self._deleting = asyncio.Lock()  # one item after the other: each takes a turn

    def keep(self, keeper: ConversationKeeper, found: Sequence[Conversation]) -> None:
        """Keep conversations over the end of this process, beginning with those that the one before has left."""
        for conversation in found:
            self.store.put(conversation)
        self.keeper = self.store.mirror = keeper

    def turn_again(self, id: str | None, owner: str) -> Turn | None:
        """Return the turn of a response that the process before has not ended; None where it has no conversation, or
        that one is gone.
        """
        if id is None:
            return None
        try:
            return self.store.begin(id, owner, resumes=True)
        except InvalidRequestError:
            return None

    async def delete(self, conversation: Conversation) -> None:
        """Forget a conversation. Raises HttpRefusal where it would be back after a restart, and
        ConversationNotFoundError where it has gone meanwhile.
        """
        if self.keeper is not None:
            await self.keeper.forget(conversation.id)
        self.store.delete(conversation.id, conversation.owner)

    async def delete_item(self, id: str, owner: str, item_id: str) -> Conversation:
        """Forget an item of a conversation; return the rest. Raises HttpRefusal where the item would be back after a
        restart, ConversationLockedError, and ConversationNotFoundError.
        """
        store = self.store
        async with self._deleting:
            found = store.unlocked(id, owner).without_item(item_id)
            with store.begin(id, owner, resumes=True):
                if self.keeper is not None:
                    await self.keeper.certainly(found)
                rest = store.get(id, owner).without_item(item_id)  # its metadata may be others by now
                store.put(rest)
        await self.settled()  # what was written meanwhile may have had the item
        return rest

    async def add(self, turn: Turn, items: Sequence[KeptItem]) -> None:
        """Add a whole answer and its input within a response's turn, before its client sees that it has ended."""
        if not turn.add(items):
            log.warning("a response adds nothing to %s: it is gone, or would leave others too little", turn.id)
        await self.settled()

    async def settled(self) -> None:
        """Wait until all changes so far are kept."""
        if self.keeper is not None:
            await self.keeper.settled()
