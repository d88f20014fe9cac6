"""Responses of a coordinator as a directory: they outlive the process.

* `stored/ID`: a response that has ended.
* `conversations/ID`: a conversation.
* `unfinished/`: background responses that have not; see `orders`.
* `lock`: held by the coordinator that uses the directory.

Everything here blocks: call it in a thread, one call at a time but for `orders.add` and `orders.read`, which are of one
response each.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from relayline.coordinator.http.conversations.files import ConversationFiles
from relayline.coordinator.http.conversations.store import Conversation
from relayline.coordinator.http.responses.items import KeptItem
from relayline.coordinator.http.responses.kept_files import VERSION, in_pieces, load, write
from relayline.coordinator.http.responses.orders import OrderFiles, Unfinished
from relayline.coordinator.http.responses.recording import Recording
from relayline.coordinator.http.responses.store import Stored
from relayline.wire.common.bounds import STORED_RESPONSES_BYTES_MAX, STORED_RESPONSES_MAX
from relayline.wire.common.files import clearing_up
from relayline.wire.common.own_directory import OwnDirectory

STORED, UNFINISHED, CONVERSATIONS = "stored", "unfinished", "conversations"


class _StoredFile(msgspec.Struct, kw_only=True):
    """`Stored` as a file."""

    version: int = VERSION
    id: str
    owner: str
    body: bytes
    input_items: list[KeptItem]
    output_items: list[KeptItem]
    previous_id: str | None
    is_background: bool
    events: list[bytes] | None
    """Of a recording: those that are kept; None: it has none."""
    n_dropped: int = 0


class ResponseDirectory:
    """One directory. Raises UsageError where it is another coordinator's or cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._own = OwnDirectory(path, (STORED, UNFINISHED, CONVERSATIONS), "responses")
        self.orders = OrderFiles(path / UNFINISHED)
        self.conversations = ConversationFiles(path / CONVERSATIONS)

    def close(self) -> None:
        """Let another coordinator have the directory."""
        self._own.close()

    def load(self) -> tuple[list[Stored], list[Unfinished]]:
        """Return the stored responses, the one that was used longest ago first, and those that have not ended. Older
        ones than may be in memory go. Raises UsageError.
        """
        with self._own.loading():
            bounds = (STORED_RESPONSES_MAX, STORED_RESPONSES_BYTES_MAX)
            stored = load(self.path / STORED, _StoredFile, _stored_of, bounds, self.drop)
            unfinished = self.orders.load()
            for each in unfinished:
                if self._is_stored(each.order.id):
                    with clearing_up():
                        self.orders.finished(each.order.id)  # the process ended between the two
            return stored, [each for each in unfinished if not self._is_stored(each.order.id)]

    def load_conversations(self) -> list[Conversation]:
        """Return the conversations, as `ConversationFiles.load` does. Raises UsageError."""
        with self._own.loading():
            return self.conversations.load()

    def put(self, stored: Stored) -> None:
        """Write a response that has ended. Raises OSError."""
        recording = stored.recording
        n_dropped, events = (0, None) if recording is None else recording.contents()
        file = _StoredFile(
            id=stored.id,
            owner=stored.owner,
            body=stored.body,
            input_items=[*stored.input_items],
            output_items=[*stored.output_items],
            previous_id=stored.previous_id,
            is_background=stored.is_background,
            events=events,
            n_dropped=n_dropped,
        )
        write(self.path / STORED / stored.id, in_pieces(file))
        if stored.is_background:
            self.orders.finished(stored.id)

    def drop(self, id: str) -> None:
        """Forget a response. Raises OSError."""
        (self.path / STORED / id).unlink(missing_ok=True)
        self.orders.finished(id)

    def used(self, ids: Iterable[str]) -> None:
        """Note that these were used now, in this order. Raises OSError."""
        for at, id in enumerate(ids):
            path = self.path / STORED / id
            if path.exists():
                os.utime(path)
                used_ns = path.stat().st_mtime_ns + at  # the system's clock of files stands still for milliseconds
                os.utime(path, ns=(used_ns, used_ns))

    def _is_stored(self, id: str) -> bool:
        return (self.path / STORED / id).exists()


def _stored_of(file: _StoredFile) -> Stored:
    recording = None if file.events is None else Recording.of(file.n_dropped, file.events)
    return Stored(
        file.id,
        file.owner,
        file.body,
        file.input_items,
        file.output_items,
        file.previous_id,
        file.is_background,
        recording,
    )
