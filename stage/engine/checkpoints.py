"""Checkpoints of lanes with a recurrent state: copies of the state at chosen positions. Pure.

A state describes one position, its lane's end, and cannot be rewound. A caller that may want to return to a position
asks for a checkpoint while the lane ends there. Bounds: CHECKPOINTS_PER_LANE_MAX for each lane, and
CHECKPOINT_BYTES_MAX for a stage; beyond that the oldest of all goes first, and its tokens are read again when needed.

Lanes that copied from one another share their states' bytes, which count once.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import numpy.typing as npt

from relayline.wire.common.checkpoints import CHECKPOINT_BYTES_MAX, kept_positions

State = npt.NDArray[np.uint8]


@dataclasses.dataclass(slots=True)
class _Entry:
    state: State
    age: int  # counts up with each checkpoint that is taken or handed on


class Checkpoints:
    """All checkpoints of one stage, by lane and position."""

    def __init__(self, bytes_max: int = CHECKPOINT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._of_lane: dict[int, dict[int, _Entry]] = {}  # lane -> position -> entry
        self._ages = itertools.count()

    @property
    def size_bytes(self) -> int:
        """Bytes of all states."""
        return sum({id(entry.state): entry.state.nbytes for entry in self._entries()}.values())

    def _entries(self) -> list[_Entry]:
        return [entry for entries in self._of_lane.values() for entry in entries.values()]

    def positions(self, lane: int) -> list[int]:
        """Return where the lane has checkpoints, ascending."""
        return sorted(self._of_lane.get(lane, ()))

    def state(self, lane: int, position: int) -> State | None:
        """Return the lane's state at a position, None without a checkpoint there."""
        entry = self._of_lane.get(lane, {}).get(position)
        return None if entry is None else entry.state

    def add(self, lane: int, position: int, state: State) -> None:
        """Keep a state of the lane at its end, and as many earlier ones as the bounds allow."""
        self._put(lane, position, state)
        while self._of_lane and self.size_bytes > self._bytes_max:
            self._drop_oldest()

    def _put(self, lane: int, position: int, state: State) -> None:
        entries = self._of_lane.setdefault(lane, {})
        entries[position] = _Entry(state, next(self._ages))
        kept = kept_positions(entries)
        self._of_lane[lane] = {at: entry for at, entry in entries.items() if at in kept}

    def _drop_oldest(self) -> None:
        oldest = min(entry.age for entry in self._entries())
        for lane, entries in list(self._of_lane.items()):
            left = {at: entry for at, entry in entries.items() if entry.age != oldest}
            if left:
                self._of_lane[lane] = left
            else:
                del self._of_lane[lane]

    def hand_on(self, source_lane: int, target_lane: int, n_tokens: int) -> None:
        """Let the target lane, which has none, have those of the source up to a position."""
        for position, entry in sorted(self._of_lane.get(source_lane, {}).items()):
            if position <= n_tokens:
                self._put(target_lane, position, entry.state)

    def drop_beyond(self, lane: int, position: int) -> None:
        """Forget the lane's checkpoints beyond a position; with 0 all of them."""
        entries = self._of_lane.pop(lane, None)
        left = {at: entry for at, entry in (entries or {}).items() if at <= position}
        if left:
            self._of_lane[lane] = left
