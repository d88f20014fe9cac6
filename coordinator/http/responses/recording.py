"""The events of a response that goes on without a connection, kept for clients that read them later. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from relayline.wire.common.bounds import RECORDED_EVENTS_BYTES_MAX, UNREAD_EVENTS_BYTES_MAX

EVENT_BYTES = 64  # what Python itself needs for one, about
_END = b"\n\n"  # of an event's lines, whose JSON has no line break


class Reader:
    """One client that reads a recording now."""

    def __init__(self, number: int, wake: Callable[[], None]) -> None:
        """`number`: of the event that it reads next. `wake` is called whenever there is more to read."""
        self.number, self.wake = number, wake


class Recording:
    """Events as their lines, by sequence number: the latest ones.

    `read_bytes_max` bounds those that somebody has read, or that nobody reads now. What the foremost reader has not
    read yet stays up to `bytes_max`, so that a reader that keeps up loses nothing. The latest events stay in any case.
    The last ones repeat the whole answer, several times: while somebody reads, they push out nothing.
    """

    def __init__(
        self, read_bytes_max: int = RECORDED_EVENTS_BYTES_MAX, bytes_max: int = UNREAD_EVENTS_BYTES_MAX
    ) -> None:
        self.n_bytes = 0
        self.n_dropped = 0  # events that are no longer kept
        self.is_over = False  # no event follows
        self._read_bytes_max, self._bytes_max = read_bytes_max, bytes_max
        self._is_closing = False  # the last events come
        self._events: deque[bytes] = deque()
        self._readers: set[Reader] = set()

    @property
    def n_events(self) -> int:
        """Events so far, with those that are no longer kept."""
        return self.n_dropped + len(self._events)

    def add(self, frames: bytes) -> None:
        """Take the lines of any number of events."""
        n_before = self.n_events
        for event in frames.split(_END):
            if event:
                self._events.append(event + _END)
                self.n_bytes += len(event) + EVENT_BYTES
        self._drop(n_before)
        self._tell()

    def closing(self) -> None:
        """Only the last events follow."""
        self._is_closing = True

    def end(self) -> None:
        """No event follows."""
        self.is_over = True
        self._tell()

    def since(self, number: int, n_max: int) -> list[bytes] | None:
        """Return at most `n_max` events from this sequence number on; None if that one is no longer kept."""
        at = number - self.n_dropped
        if at < 0:
            return None
        return [self._events[index] for index in range(at, min(at + n_max, len(self._events)))]

    def kept(self) -> Recording:
        """Return what stays of it once it is over: the latest events, whoever has read them."""
        kept = Recording(self._read_bytes_max, self._bytes_max)
        kept._events, kept.n_bytes, kept.n_dropped = deque(self._events), self.n_bytes, self.n_dropped
        kept._drop(self.n_events - 1)
        kept.is_over = True
        return kept

    def contents(self) -> tuple[int, list[bytes]]:
        """Return how many events are no longer kept, and those that are."""
        return self.n_dropped, [*self._events]

    @classmethod
    def of(cls, n_dropped: int, events: list[bytes]) -> Recording:
        """Return one that is over, from its contents."""
        found = cls()
        found._events, found.n_dropped = deque(events), n_dropped
        found.n_bytes = sum(len(event) - len(_END) + EVENT_BYTES for event in events)
        found.is_over = True
        return found

    def follow(self, reader: Reader) -> None:
        """Wake a reader whenever there is more to read."""
        self._readers.add(reader)

    def leave(self, reader: Reader) -> None:
        """A reader has gone."""
        self._readers.discard(reader)

    def _drop(self, n_before: int) -> None:
        """Keep the bounds without any of the events that follow the first `n_before`."""
        if self._is_closing and self._readers:
            return
        n_read = max((reader.number for reader in self._readers), default=n_before)
        while self.n_bytes > self._read_bytes_max and self.n_dropped < n_before:
            if self.n_dropped >= n_read and self.n_bytes <= self._bytes_max:
                return
            self.n_bytes -= len(self._events.popleft()) - len(_END) + EVENT_BYTES
            self.n_dropped += 1

    def _tell(self) -> None:
        for reader in self._readers:
            reader.wake()
