"""The flights under way: their rows, the sessions that wait for them, and their predicted work. Pure.

A *flight* is one envelope on its way through the stages. It has landed when each of its frames was answered (by a
sample or a progress note) or dropped. A stage may leave a decode flight's prompt rows behind. Once the streams of that
flight have their tokens, it counts as a flight of prompt rows, because no decoding stream waits for the rest.

A session's frames are answered in the order in which they left. Two frames may end at one position, such as a frame
with a wrong guess and the right one after it. The first answer then belongs to the earlier frame.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from relayline.coordinator.sessions.session import OutFrame


class Kind(enum.IntEnum):
    """The kind of a flight."""

    DECODE = 0  # next rows of streams, prompt rows perhaps riding
    PREFILL = 1  # prompt rows alone
    GUESS = 2  # guesses alone, that depend on rows of another flight under way


# What is asked for with every flight: in Python 3.11 an enum's attribute takes several times as long as a name.
DECODE, PREFILL, GUESS = Kind.DECODE, Kind.PREFILL, Kind.GUESS


@dataclasses.dataclass(slots=True, eq=False)
class Flight:
    """One envelope under way."""

    kind: Kind
    n_streams: int  # that decode in it
    waiting_for: set[tuple[int, int]]  # (session id, position after its rows) not answered yet
    decoding: set[tuple[int, int]]  # and of these its streams' own, without prompt rows
    has_chunks: bool  # whether prompt rows are in it
    sent_ns: int
    step_ns: float  # predicted work of the busiest stage on it
    way_ns: float  # predicted native steps of its decode rows on their way through idle stages; 0.0 not known
    ahead_ns: float = 0.0  # predicted work of the busiest stage on the flights under way, this one included
    n_chunks_before: int = -1  # flights with prompt rows launched until then; -1 while one is under way
    is_whole: bool = True  # until one of its sessions ends while it is under way
    is_behind: bool = False  # whether its streams have their tokens, but stages are not done with its prompt rows

    @property
    def is_ridden(self) -> bool:
        """Whether prompt rows left with decode rows."""
        return self.has_chunks and self.n_streams > 0


class Flights:
    """All of one epoch."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[int, int], list[Flight]] = {}  # of one key those answered first stand first
        self._positions: dict[int, list[int]] = {}  # session id -> its keys' positions
        self._n = [0] * len(Kind)
        self._work_ns = 0.0  # predicted work of the busiest stage on all flights under way
        self._queue_ns, self._queue_at_ns = 0.0, 0  # predicted work before the busiest stage, and when that was
        self.n_with_chunks = 0  # flights with prompt rows under way
        self.n_ridden = 0  # and of these such as left with decode rows
        self.n_chunks = 0  # and launched so far
        self._n_chunks_before = 0  # and launched before the first of those that have followed without a pause

    def count(self, kind: Kind) -> int:
        """Return how many of a kind are under way."""
        return self._n[kind]

    def under_way(self) -> dict[int, tuple[int, int]]:
        """Return for each session with rows under way its first frame's last position, and its number of frames."""
        return {session_id: (positions[0], len(positions)) for session_id, positions in self._positions.items()}

    @property
    def n_chunks_running(self) -> int:
        """The number of flights with prompt rows that followed each other without a pause until now."""
        return self.n_chunks - self._n_chunks_before if self.n_with_chunks else 0

    def launch(
        self,
        kind: Kind,
        decode: Sequence[OutFrame],
        chunks: Sequence[OutFrame],
        now_ns: int,
        *,
        step_ns: float,
        way_ns: float,
    ) -> None:
        """Note decode rows (guesses for Kind.GUESS) and prompt rows that leave as one envelope."""
        decoding = _keys(decode)
        keys = decoding | _keys(chunks) if chunks else set(decoding)
        flight = Flight(kind, len(decode), keys, decoding, bool(chunks), now_ns, step_ns, way_ns)
        self._work_ns += step_ns
        flight.ahead_ns = self._work_ns
        self._queue_ns, self._queue_at_ns = self.queued_ns(now_ns) + step_ns, now_ns
        if not chunks and not self.n_with_chunks:
            flight.n_chunks_before = self.n_chunks
        for session_id, position in keys:
            self._by_key.setdefault((session_id, position), []).append(flight)
            self._positions.setdefault(session_id, []).append(position)
        if chunks:
            if not self.n_with_chunks:
                self._n_chunks_before = self.n_chunks
            self.n_with_chunks += 1
            self.n_chunks += 1
            self.n_ridden += flight.is_ridden
        self._n[kind] += 1

    def is_time_for(self, step_ns: float, way_ns: float, overhead_ns: float) -> bool:
        """Return whether the stages have time for a flight of such a step and way before the first one comes back.

        Half of the flight need not fit, since stages are never quite equal.
        """
        ways_ns = (flight.way_ns for flights in self._by_key.values() for flight in flights)
        return bool(self._by_key) and self._work_ns + step_ns / 2 <= min(way_ns, *ways_ns) + overhead_ns

    def queued_ns(self, now_ns: int) -> float:
        """Predict how long a flight that leaves now waits at the busiest stage for the flights ahead of it."""
        return max(0.0, self._queue_ns - (now_ns - self._queue_at_ns))

    def answered(self, session_id: int, position: int) -> Flight | None:
        """Note the answer for a session's rows up to `position`. Returns the flight that landed with it, if any.

        A flight that leaves prompt rows behind is returned when its streams have their tokens, and not again. A
        repeated answer changes nothing.
        """
        flights = self._by_key.get((session_id, position))
        if flights is None:
            return None
        flight = flights.pop(0)
        if not flights:
            del self._by_key[session_id, position]
        positions = self._positions[session_id]
        positions.remove(position)
        if not positions:
            del self._positions[session_id]
        flight.waiting_for.discard((session_id, position))
        flight.decoding.discard((session_id, position))
        if flight.waiting_for:
            return self._left_behind(flight)
        self._work_ns = max(0.0, self._work_ns - flight.step_ns)
        if flight.has_chunks:
            self.n_with_chunks -= 1
            self.n_ridden -= flight.is_ridden
        self._n[PREFILL if flight.is_behind else flight.kind] -= 1
        return None if flight.is_behind else flight

    def _left_behind(self, flight: Flight) -> Flight | None:
        """Count a decode flight with only prompt rows left as a flight of prompt rows, and return it, once."""
        if flight.decoding or flight.is_behind or flight.kind is not DECODE:
            return None
        flight.is_behind = True
        self._n[DECODE] -= 1
        self._n[PREFILL] += 1
        return flight

    def forget(self, session_id: int) -> list[Flight]:
        """Drop a session's rows. Returns the flights that landed with them, as `answered` does."""
        landed: list[Flight] = []
        for position in list(self._positions.get(session_id, ())):
            self._by_key[session_id, position][0].is_whole = False
            flight = self.answered(session_id, position)
            if flight is not None:
                landed.append(flight)
        return landed


def _keys(frames: Sequence[OutFrame]) -> set[tuple[int, int]]:
    return {(frame.session.session_id, frame.position + len(frame.tokens)) for frame in frames}


def rows_of(frames: Sequence[OutFrame]) -> int:
    """Return the rows of these frames."""
    return sum([len(frame.tokens) for frame in frames]) if frames else 0


def mean_context(frames: Sequence[OutFrame]) -> float:
    """Return the context of an average row: tokens before its frame."""
    n_rows = n_tokens = 0
    for frame in frames:
        own_rows = len(frame.tokens)
        n_rows += own_rows
        n_tokens += own_rows * frame.position
    return n_tokens / n_rows if n_rows else 0.0
