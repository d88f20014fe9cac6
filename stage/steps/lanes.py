"""Lanes: which session owns which native sequence, and the next position each one expects.

Pure: no clock, no llama.cpp. House rules:
* A position is absolute. At `next_position`: decode. Below: drop positions from there on, then decode (a retry, a trim,
  a rejected draft). Above: a gap, refused, nothing changes.
* Every refusal leaves the table as it was.
* Opening an open session of the same route again, or closing a closed one, changes nothing. So a control repeated by a
  retry takes effect once.
* A session belongs to its route. Two coordinators may choose the same session id; they never meet.
* A kept session, or one whose epoch has ended, loses its lane to any session of any route that would find none.
* Coordinators share: a route that was refused a lane, and soon asks again, gets the next one before any route that has
  more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from relayline.wire.common.errors import InternalError, LaneLimitError, PositionGapError, SessionError
from relayline.wire.common.texts import plural

OWED_NS = 3_000_000_000  # a coordinator that still wants the lane it was refused asks again within this time


@dataclasses.dataclass(slots=True)
class Lane:
    """One native sequence and the session that owns it."""

    index: int  # llama_seq_id
    session_id: int
    route_id: int
    next_position: int = 0  # positions 0..next_position-1 are in the KV cache
    is_kept: bool = False  # no stream waits for the session: see SessionOptions.kept
    kept_key: int = 0  # under which what it holds is stored when the session loses it: see SessionOptions.kept_key
    is_left: bool = False  # its epoch has ended; the next one may continue from its rows

    @property
    def yields(self) -> bool:
        """Whether another session may take the lane."""
        return self.is_kept or self.is_left


# Where a frame's rows go, and from which position on the lane must forget its KV first; None: it forgets nothing.
Placement: TypeAlias = tuple[Lane, int | None]


class LaneUsage(NamedTuple):
    """How many lanes are in use at one moment."""

    n_used: int = 0  # by sessions with a waiting client
    n_kept: int = 0  # by sessions that are only kept, or whose epoch has ended


class LaneTable:
    """All lanes of a stage. One thread owns it: others see `Runner.snapshot`."""

    def __init__(self, n_lanes: int, ctx_tokens: int) -> None:
        self.n_lanes, self.ctx_tokens = n_lanes, ctx_tokens
        self._by_session: dict[tuple[int, int], Lane] = {}  # by (route_id, session_id)
        self._free = list(range(n_lanes - 1, -1, -1))
        self._refused_ns: dict[int, int] = {}  # route id -> when it last was refused a lane

    def __len__(self) -> int:
        return len(self._by_session)

    def __iter__(self) -> Iterator[Lane]:
        """Yield the lanes that sessions have."""
        return iter(self._by_session.values())

    @property
    def usage(self) -> LaneUsage:
        """Return how many lanes are in use."""
        n_kept = sum(lane.yields for lane in self._by_session.values())
        return LaneUsage(len(self) - n_kept, n_kept)

    @property
    def n_kept(self) -> int:
        """Lanes of sessions that are only kept, or whose epoch has ended."""
        return self.usage.n_kept

    @property
    def n_used(self) -> int:
        """Lanes of all others."""
        return self.usage.n_used

    def in_the_way(self, session_id: int, route_id: int) -> Lane | None:
        """Return whose lane has to be taken back before the session can be opened: the one kept for longest.

        Lanes left by an epoch come after all that: clients wait to resume from there.
        """
        if self._free or (route_id, session_id) in self._by_session:
            return None
        yielding = (lane for lane in self._by_session.values() if lane.yields)
        return min(yielding, key=lambda lane: lane.is_left, default=None)

    def open(
        self, session_id: int, route_id: int, wanted: int = -1, *, is_kept: bool = False, now_ns: int | None = None
    ) -> Lane:
        """Give the session a lane, the wanted one if it is free.

        Raises LaneLimitError when none is free, or another route has a better claim to it. `now_ns`, of any monotonic
        clock, dates the requests behind these claims. Without it, and for kept sessions, there are no claims.
        """
        lane = self._by_session.get((route_id, session_id))
        if lane is not None:
            lane.is_left = False
            return lane
        if now_ns is not None and not is_kept:
            self._refused_ns = {key: at_ns for key, at_ns in self._refused_ns.items() if now_ns - at_ns < OWED_NS}
            is_claimed = self._is_claimed(route_id)
            if is_claimed or not self._free:
                self._refused_ns[route_id] = now_ns
            else:
                self._refused_ns.pop(route_id, None)
            if is_claimed:
                raise LaneLimitError("the next lane is for another coordinator, which has fewer of this stage")
        if not self._free:
            lanes = plural(self.n_lanes, "the one lane of this stage is", f"all {self.n_lanes} lanes of this stage are")
            raise LaneLimitError(f"{lanes} taken")
        if wanted in self._free:
            self._free.remove(wanted)
            index = wanted
        else:
            index = self._free.pop()
        lane = Lane(index, session_id, route_id, is_kept=is_kept)
        self._by_session[route_id, session_id] = lane
        return lane

    def _is_claimed(self, route_id: int) -> bool:
        """Return whether routes that have fewer lanes wait for all that are left."""
        claims = [self._n_of(other) for other in self._refused_ns if other != route_id]
        if not claims or len(self._free) + self.n_kept > len(claims):
            return False
        return self._n_of(route_id) > min(claims)

    def _n_of(self, route_id: int) -> int:
        return sum(not lane.yields for lane in self.of_route(route_id))

    def close(self, session_id: int, route_id: int) -> Lane | None:
        """Take the session's lane back; returns it so that the caller clears its KV, None if it was not open."""
        lane = self._by_session.pop((route_id, session_id), None)
        if lane is not None:
            self._free.append(lane.index)
        return lane

    def lane_of(self, key: tuple[int, int]) -> Lane | None:
        """Return the lane of (route id, session id), None where it has none."""
        return self._by_session.get(key)

    def has(self, lane: Lane) -> bool:
        """Return whether a session still has this lane."""
        return self._by_session.get((lane.route_id, lane.session_id)) is lane

    def of_route(self, route_id: int) -> list[Lane]:
        """Return the lanes of one route's sessions."""
        return [lane for lane in self._by_session.values() if lane.route_id == route_id]

    def place(self, session_id: int, route_id: int, position: int, n_rows: int) -> Placement:
        """Decide where rows starting at `position` go. Raises SessionError, PositionGapError, LaneLimitError."""
        lane = self._by_session.get((route_id, session_id))  # as `_owned` does, without its call for every frame
        if lane is None or lane.is_left:
            raise _not_open(session_id)
        if position > lane.next_position:
            raise PositionGapError(
                f"session {session_id:x} continues at position {position}, but this stage holds {lane.next_position}"
            )
        if position + n_rows > self.ctx_tokens:
            raise LaneLimitError(f"position {position + n_rows} is beyond the {self.ctx_tokens} tokens of a lane")
        return lane, position if position < lane.next_position else None

    def trim(self, session_id: int, route_id: int, length: int) -> Placement:
        """Decide how to shorten the session to `length` positions. Raises SessionError, PositionGapError.

        The caller then shortens it and moves the lane's next position.
        """
        lane = self._owned(session_id, route_id)
        if length > lane.next_position:
            raise PositionGapError(
                f"session {session_id:x} cannot be trimmed to {length}, it holds {lane.next_position}"
            )
        return lane, length if length < lane.next_position else None

    def prefix(self, source_id: int, target_id: int, route_id: int, length: int) -> tuple[Lane, Lane]:
        """Return (source, target) for copying `length` positions. The target must be empty. Raises as `trim`.

        The caller then copies and moves the target's next position.
        """
        source, target = self._owned(source_id, route_id), self._owned(target_id, route_id)
        if length > source.next_position:
            raise PositionGapError(
                f"session {source_id:x} holds {source.next_position} positions, {length} were asked for"
            )
        if target.next_position:
            raise SessionError(f"session {target_id:x} already holds {target.next_position} positions")
        return source, target

    def check(self) -> None:
        """Hold the table's own invariants (tests call this after every event)."""
        used = [lane.index for lane in self._by_session.values()]
        if sorted(used + self._free) != list(range(self.n_lanes)):
            raise InternalError("a lane is lost or owned twice")

    def _owned(self, session_id: int, route_id: int) -> Lane:
        lane = self._by_session.get((route_id, session_id))
        if lane is None or lane.is_left:
            raise _not_open(session_id)
        return lane


def _not_open(session_id: int) -> SessionError:
    """A lane left by an epoch is not open either, before the next one opens it."""
    return SessionError(f"session {session_id:x} is not open on this stage")
