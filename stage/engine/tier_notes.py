"""What coordinators note about stored states: some bytes for each key, which mean nothing here. Any thread.

A coordinator that comes later reads them, and knows more of a state than the hash of all its tokens.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Collection

from relayline.wire.common.bounds import NOTE_BYTES_MAX, NOTES_BYTES_MAX, STORED_STATES_MAX


class TierNotes:
    """The notes of one tier, the latest at the end. A note may come before the state that it is about."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._notes: collections.OrderedDict[int, bytes] = collections.OrderedDict()
        self._n_bytes = 0

    def put(self, key: int, note: bytes, stored: Collection[int] = ()) -> bool:
        """Keep a note in place of an earlier one, and let the oldest go where there are too many: first those on states
        that are not `stored`. Returns False, and changes nothing, where it is too long.
        """
        if len(note) > NOTE_BYTES_MAX:
            return False
        with self._lock:
            self._drop(key)
            self._notes[key] = note
            self._n_bytes += len(note)
            while self._n_bytes > NOTES_BYTES_MAX or len(self._notes) > STORED_STATES_MAX:
                spare = (each for each in self._notes if each not in stored and each != key)
                self._drop(next(spare, next(iter(self._notes))))
        return True

    def get(self, key: int) -> bytes | None:
        """Return the note on a key."""
        with self._lock:
            return self._notes.get(key)

    def drop(self, key: int) -> None:
        """The state is gone."""
        with self._lock:
            self._drop(key)

    def _drop(self, key: int) -> None:
        self._n_bytes -= len(self._notes.pop(key, b""))

    def on(self, keys: Collection[int]) -> dict[int, bytes]:
        """Return the notes on these keys."""
        with self._lock:
            return {key: note for key, note in self._notes.items() if key in keys}
