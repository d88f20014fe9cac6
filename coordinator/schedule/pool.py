"""The streams that decode: where each of them is, and the rows of those that wait for a flight. Pure.

Rows whose stream's token has come back wait here, oldest first. A row is *held* from the time when a flight could have
taken it and did not.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

from relayline.coordinator.schedule.lane_groups import PASSES_MAX, next_group
from relayline.coordinator.sessions.session import OutFrame
from relayline.wire.envelopes.session_ids import adapter_of


class Pool:
    """The decoding streams of one epoch."""

    def __init__(self) -> None:
        self.streams: dict[int, tuple[int, int]] = {}  # session id -> (lane, latest position); waiting or under way
        self._n_tokens = 0  # sum of these positions
        self._rows: collections.deque[OutFrame] = collections.deque()
        # Waiting rows, by session id and position -> the time when they first stayed behind.
        self._held_since_ns: dict[tuple[int, int], int] = {}
        self._n_passes = 0  # decode flights that left before the oldest row

    def __len__(self) -> int:
        """Count the rows that wait."""
        return len(self._rows)

    def __iter__(self) -> Iterator[OutFrame]:
        """Iterate over the rows that wait, oldest first."""
        return iter(self._rows)

    def add(self, frame: OutFrame) -> None:
        """Let a stream's next row wait."""
        self.moved(frame)
        self._rows.append(frame)

    def moved(self, frame: OutFrame) -> None:
        """Note how far a stream has come."""
        session_id = frame.session.session_id
        self._n_tokens += frame.position - self.streams.get(session_id, (0, 0))[1]
        self.streams[session_id] = (frame.session.lane, frame.position)

    def forget(self, session_id: int) -> None:
        """Drop a stream that has ended, and its row."""
        if session_id in self.streams:
            self._n_tokens -= self.streams.pop(session_id)[1]
            self._rows = collections.deque(f for f in self._rows if f.session.session_id != session_id)
            self._held_since_ns = {key: since for key, since in self._held_since_ns.items() if key[0] != session_id}

    def context_tokens(self, *, is_longest: bool) -> float:
        """Return the context of the streams, in tokens: of the longest one, or of the average. 0.0 without streams."""
        if not self.streams:
            return 0.0
        if is_longest:
            return max(position for _, position in self.streams.values())
        return self._n_tokens / len(self.streams)

    # --- rows that wait -----------------------------------------------------------------------------------------------

    def take_all(self) -> list[OutFrame]:
        """Take every row. Only for the drain mode, which never holds rows."""
        frames = list(self._rows)
        self._rows.clear()
        return frames

    def take_group(self, rows_max: int, *, is_per_lane: bool, must_take_oldest: bool) -> list[OutFrame]:
        """Take the rows of one flight, as far as can be of one adapter. With `is_per_lane` they are of neighbouring
        lanes, see `lane_groups`.
        """
        frames = self._next_rows(rows_max, is_per_lane, PASSES_MAX if must_take_oldest else self._n_passes)
        if self._held_since_ns:
            for frame in frames:
                self._held_since_ns.pop(_key(frame), None)
        return frames

    def _next_rows(self, rows_max: int, is_per_lane: bool, n_passes: int) -> list[OutFrame]:
        is_by_lane, has_adapters = is_per_lane and len(self._rows) > 1, adapter_of(max(self.streams)) > 0
        if not is_by_lane and not has_adapters:  # nearly always, of lanes that share cells
            return [self._rows.popleft() for _ in range(min(len(self._rows), rows_max))]
        oldest = self._rows[0]
        if is_by_lane:
            frames = next_group(self._rows, self._lanes(by_adapter=has_adapters), rows_max, n_passes)
        else:  # a step has rows of one adapter: others only fill up what would be left of the flight
            frames = sorted(self._rows, key=lambda frame: _adapter(frame) != _adapter(oldest))[:rows_max]
        self._n_passes = 0 if oldest in frames else self._n_passes + 1
        chosen = set(map(id, frames))
        self._rows = collections.deque(frame for frame in self._rows if id(frame) not in chosen)
        return frames

    def _lanes(self, *, by_adapter: bool) -> list[int]:
        """Return the lanes of all streams, ascending, with those of one adapter together if wanted."""
        if not by_adapter:
            return sorted([lane for lane, _ in self.streams.values()])
        found = sorted((adapter_of(session_id), lane) for session_id, (lane, _) in self.streams.items())
        return [lane for _, lane in found]

    def note_held(self, now_ns: int) -> None:
        """Note which rows, the latest ones, did not leave with the first flights after they came."""
        if not self._rows:
            return
        for key in map(_key, reversed(self._rows)):
            if key in self._held_since_ns:
                break
            self._held_since_ns[key] = now_ns

    def held_ns(self, now_ns: int) -> int:
        """Return for how long the oldest row has been held."""
        return now_ns - self._held_since_ns.get(_key(self._rows[0]), now_ns)


def _adapter(frame: OutFrame) -> int:
    return frame.session.request.adapter


def _key(frame: OutFrame) -> tuple[int, int]:
    return frame.session.session_id, frame.position
