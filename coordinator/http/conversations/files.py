"""Conversations as files of a directory: new items are appended to them. Everything here blocks.

A file is written whole, or not at all, where items have gone from it, and where it has become longer than it need be.
It is a row of records, each with its length and checksum: `_Head`, then `_Added` for all its items and for what came
later. The last record may be torn; then it was never there, since its client has not been answered.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from relayline.coordinator.http.conversations.store import Conversation
from relayline.coordinator.http.responses.items import KeptItem
from relayline.coordinator.http.responses.kept_files import (
    ENTRIES_AT_ONCE,
    FILE_BYTES_MAX,
    VERSION,
    BadFileError,
    append,
    checked,
    contents,
    in_pieces,
    load,
    write,
)
from relayline.wire.common.bounds import CONVERSATIONS_BYTES_MAX, CONVERSATIONS_MAX

_LEAD_BYTES = 8  # before each record: its length, then its checksum
SLACK_SHARE, SLACK_BYTES = 8, 16 * 1024  # a file may be longer than its contents by this part of them, and by these


class _ConversationFile(msgspec.Struct, kw_only=True):
    """`Conversation` as a file of before, which was one such object."""

    version: int = VERSION
    id: str
    owner: str
    created: int
    metadata: bytes
    items: list[KeptItem]


class _Head(msgspec.Struct, kw_only=True):
    """The first record of a file."""

    version: int = VERSION
    id: str
    owner: str
    created: int
    n_items: int
    """That follow it at least: the others have been appended."""


class _Added(msgspec.Struct):
    """Further items, and the metadata from then on where they are others."""

    items: list[KeptItem]
    metadata: bytes | None = None


@dataclasses.dataclass(slots=True)
class _Written:
    """What a file has."""

    lineage: object
    n_items: int
    metadata: bytes
    n_bytes: int


class ConversationFiles:
    """Those of one directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: dict[str, _Written] = {}  # by id, where this process has written a file and nothing went wrong

    def load(self) -> list[Conversation]:
        """Return all, the one that was changed longest ago first. Older ones than may be in memory go. Raises
        OSError.
        """
        bounds = (CONVERSATIONS_MAX, CONVERSATIONS_BYTES_MAX)
        return load(self.path, _ConversationFile, _conversation_of, bounds, self.drop, "conversation", _read)

    def put(self, conversation: Conversation) -> None:
        """Write a conversation as it is now. Raises OSError."""
        written = self._written.pop(conversation.id, None)
        path = self.path / conversation.id
        n_bytes = None if written is None else _append_new(path, conversation, written)
        if n_bytes is None:
            n_bytes = _write_whole(path, conversation)
        n_items, metadata = len(conversation.items), conversation.metadata
        self._written[conversation.id] = _Written(conversation.lineage, n_items, metadata, n_bytes)

    def drop(self, id: str) -> None:
        """Forget a conversation. Raises OSError."""
        self._written.pop(id, None)
        (self.path / id).unlink(missing_ok=True)


def _append_new(path: Path, conversation: Conversation, written: _Written) -> int | None:
    """Append what a file does not have yet, and return its size; None where it is to be written whole. Raises OSError,
    and then the file is as before.
    """
    if written.lineage is not conversation.lineage or not _has_size(path, written.n_bytes):
        return None
    items = [*itertools.islice(conversation.items.items(), written.n_items, None)]
    metadata = conversation.metadata if conversation.metadata != written.metadata else None
    if not items and metadata is None:
        return written.n_bytes
    data = b"".join(_record(_Added(items, metadata)))
    n_bytes_max = conversation.n_bytes + conversation.n_bytes // SLACK_SHARE + SLACK_BYTES
    if written.n_bytes + len(data) > min(n_bytes_max, FILE_BYTES_MAX):
        return None
    try:
        return append(path, data, waits=True)
    except OSError:
        with contextlib.suppress(OSError):  # what is torn is left out
            os.truncate(path, written.n_bytes)
        raise


def _has_size(path: Path, n_bytes: int) -> bool:
    try:
        return path.stat().st_size == n_bytes
    except FileNotFoundError:  # somebody has removed it
        return False


def _write_whole(path: Path, conversation: Conversation) -> int:
    """Return the size of the file."""
    n_bytes = 0

    def pieces() -> Iterator[bytes]:
        nonlocal n_bytes
        for piece in _whole(conversation):
            n_bytes += len(piece)
            yield piece

    write(path, pieces())
    return n_bytes


def _whole(conversation: Conversation) -> Iterator[bytes]:
    head = _Head(
        id=conversation.id,
        owner=conversation.owner,
        created=conversation.created,
        n_items=len(conversation.items),
    )
    yield from _record(head)
    yield from _record(_Added([], conversation.metadata))
    items = iter(conversation.items.items())
    while some := [*itertools.islice(items, ENTRIES_AT_ONCE)]:
        yield from _record(_Added(some))


def _record(found: _Head | _Added) -> Iterator[bytes]:
    pieces, check = [*in_pieces(found)], 0
    for piece in pieces:
        check = zlib.crc32(piece, check)
    yield _n_bytes(pieces).to_bytes(4) + check.to_bytes(4)
    yield from pieces


def _n_bytes(pieces: list[bytes]) -> int:
    return sum(map(len, pieces))


def _read(path: Path, kind: type[_ConversationFile]) -> _ConversationFile:
    """Return what is in a file. Raises OSError, and others for one that cannot be read."""
    data = contents(path)
    if data[:1] != b"\x00":  # the first byte of a short record's length
        return checked(path, data, kind)
    records = _records(data)
    head = checked(path, next(records, b""), _Head)
    metadata, items = b"{}", []
    for record in records:
        added = msgspec.msgpack.decode(record, type=_Added)
        items += added.items
        metadata = metadata if added.metadata is None else added.metadata
    if len(items) < head.n_items:
        raise BadFileError(f"it has {len(items)} items of {head.n_items}")
    return kind(id=head.id, owner=head.owner, created=head.created, metadata=metadata, items=items)


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the contents of each record, up to the first that is not whole."""
    at = 0
    while at + _LEAD_BYTES <= len(data):
        end = at + _LEAD_BYTES + int.from_bytes(data[at : at + 4])
        record = data[at + _LEAD_BYTES : end]
        if end > len(data) or zlib.crc32(record) != int.from_bytes(data[at + 4 : at + _LEAD_BYTES]):
            return
        yield record
        at = end


def _conversation_of(file: _ConversationFile) -> Conversation:
    return Conversation.of(file.id, file.owner, file.created, file.metadata, file.items)
