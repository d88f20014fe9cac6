"""Rows that stage 0 computes without a word from the coordinator: see coordinator.schedule.grants. Pure.

A decode row of the coordinator may carry a grant: a number, and the position that it ends before. The last stage sends
the tokens that it samples under a grant back to stage 0. A token that continues its session's grant becomes the next
row. A token at the grant's end is *parked*: an extension may come for it. All others are dropped, since anything that
the coordinator sends for a session ends its grant. Stage 0 decides alone, so all stages see one order of rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from relayline.stage.queue_types import QueuedFrame
from relayline.wire.common import bounds
from relayline.wire.envelopes import trace_context
from relayline.wire.envelopes.frames import Flag, Head, grant_of
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb


@dataclasses.dataclass(slots=True)
class _Grant:
    number: int
    next: int
    """Position of the next row."""
    limit: int
    parked: QueuedFrame | None = None


class Grants:
    """The grants of one route of stage 0, at most SESSIONS_PER_LINK_MAX; further rows wait for the coordinator."""

    def __init__(self) -> None:
        self._by_session: dict[int, _Grant] = {}
        self.trace = trace_context.NONE
        """25 bytes, the context of the coordinator's latest pass with a grant: steps under grants belong to it."""
        self.n_rows = 0  # that were computed without a word from the coordinator

    def came(self, frames: list[QueuedFrame]) -> list[QueuedFrame]:
        """Take an envelope of the coordinator; returns what is to be computed because of it, in order."""
        if not self._by_session and not any(frame.argument for frame in frames):
            return frames
        due: list[QueuedFrame] = []
        for frame in frames:
            if frame.flags & Flag.EXTEND:
                due += self._extended(frame)
                continue
            self._by_session.pop(frame.session_id, None)
            due.append(frame)
            if frame.flags == Flag.WANTS_SAMPLE and frame.argument:
                number, limit = grant_of(frame.argument)
                if len(self._by_session) < bounds.SESSIONS_PER_LINK_MAX:
                    self._by_session[frame.session_id] = _Grant(number, frame.position + frame.n_rows, limit)
                    self.trace = frame.upstream_trace
        return due

    def _extended(self, frame: QueuedFrame) -> list[QueuedFrame]:
        grant, (number, limit) = self._by_session.get(frame.session_id), grant_of(frame.argument)
        if grant is None or grant.number != number:
            return []
        self.trace = frame.upstream_trace
        grant.limit = max(grant.limit, limit)
        parked, grant.parked = grant.parked, None
        return self._continued(grant, parked) if parked is not None else []

    def fed_back(self, frames: Sequence[QueuedFrame]) -> list[QueuedFrame]:
        """Take tokens of the last stage; returns the rows that are to be computed. The others are dropped."""
        due: list[QueuedFrame] = []
        for frame in frames:
            grant = self._by_session.get(frame.session_id)
            if grant is None or grant.number != frame.argument >> 32 or grant.next != frame.position:
                continue
            if frame.flags == Flag.WANTS_SAMPLE and frame.n_rows == 1:
                due += self._continued(grant, frame)
        return due

    def _continued(self, grant: _Grant, frame: QueuedFrame) -> list[QueuedFrame]:
        if frame.position >= grant.limit:
            grant.parked = frame
            return []
        grant.next = frame.position + 1
        self.n_rows += 1
        return [frame]


def mark_granted(sample: pb.Sampled, argument: int) -> int:
    """Note in a sample the grant of its row, whose argument this is; returns its token."""
    sample.grant, _ = grant_of(argument)
    return sample.token


def returning(granted: Sequence[tuple[QueuedFrame, int]], now_ns: int) -> list[Head]:
    """Return the headers of the rows that follow frames under grants; their payload is the tokens."""
    return [
        (f.session_id, f.epoch, f.position + 1, 1, Flag.WANTS_SAMPLE, f.argument, 0, now_ns, f.trace)
        for f, _ in granted
    ]
