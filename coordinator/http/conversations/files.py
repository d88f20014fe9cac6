"""Conversations as files of a directory: each is written whole at each change. Everything here blocks."""

from __future__ import annotations

from pathlib import Path

import msgspec

from relayline.coordinator.http.conversations.store import Conversation
from relayline.coordinator.http.responses.items import KeptItem
from relayline.coordinator.http.responses.kept_files import VERSION, in_pieces, load, write
from relayline.wire.common.bounds import CONVERSATIONS_BYTES_MAX, CONVERSATIONS_MAX


class _ConversationFile(msgspec.Struct, kw_only=True):
    """`Conversation` as a file."""

    version: int = VERSION
    id: str
    owner: str
    created: int
    metadata: bytes
    items: list[KeptItem]


class ConversationFiles:
    """Those of one directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> list[Conversation]:
        """Return all, the one that was changed longest ago first. Older ones than may be in memory go. Raises
        OSError.
        """
        bounds = (CONVERSATIONS_MAX, CONVERSATIONS_BYTES_MAX)
        return load(self.path, _ConversationFile, _conversation_of, bounds, self.drop, "conversation")

    def put(self, conversation: Conversation) -> None:
        """Write a conversation as it is now. Raises OSError."""
        file = _ConversationFile(
            id=conversation.id,
            owner=conversation.owner,
            created=conversation.created,
            metadata=conversation.metadata,
            items=[*conversation.items.items()],
        )
        write(self.path / conversation.id, in_pieces(file))

    def drop(self, id: str) -> None:
        """Forget a conversation. Raises OSError."""
        (self.path / id).unlink(missing_ok=True)


def _conversation_of(file: _ConversationFile) -> Conversation:
    return Conversation.of(file.id, file.owner, file.created, file.metadata, file.items)
