"""Grants: streams that the stages continue without waiting for the coordinator. Pure. One per pipeline.

A decode row may leave with a *grant*: until a position, the last stage sends each sampled token straight to stage 0,
which computes the next row at once. The coordinator gets the same samples as always. It decides as always, too: what it
would send next is compared with what the stages do by themselves. If both are the same, nothing leaves. If not, its own
rows leave. They end the grant at stage 0, lanes go back to the rows' positions, and what was computed too many is
forgotten, as wrong drafts are. So a stop, a cancelled request or a loss needs no rule of its own: nothing counts that
the coordinator has not decided.

Samples may come before the coordinator has decided about their rows, for instance while a row waits for its group. Such
*early* samples are kept until then. Each grant has a number, which its samples carry. Samples of a grant that has ended
are dropped: their rows will be computed again, and may round differently in another batch.

Rows that left together are granted together, because the stages keep their steps together. If the scheduler wants
another group, for instance because a stream joins, all rows of that group leave again. Grants are given and extended
only while no prompt is read. After a grant that was ended in vain no others are given for some envelopes: 2, 4 and up
to SIT_OUT_MAX, and half as many again with each grant of which half was of use.

Not granted: streams with drafts, and streams whose sampler has a state (penalties, grammars, mirostat, adaptive-p),
since no sampler goes back.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from relayline.coordinator.sessions.frame import Frame
from relayline.coordinator.sessions.session import OutFrame, Session
from relayline.wire.envelopes.frames import Flag, grant_argument
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

SIT_OUT_MAX = 64
_NUMBER_MAX = (1 << 32) - 1


@dataclasses.dataclass(slots=True)
class _Grant:
    """One stream's grant."""

    number: int
    group: int
    """The same for all that were given with one envelope."""
    next: int
    """Position of the first row that the coordinator has not decided yet."""
    limit: int
    """Position of the first row that the stages do not compute by themselves."""
    end: int
    """Position of the first row that is never computed: the answer is complete before it."""
    pays_at: int
    """Where the coordinator's next row is once the grant has been of use."""
    early: collections.deque[pb.Sampled] = dataclasses.field(default_factory=collections.deque)


class Grants:
    """The grants of one epoch at a time."""

    def __init__(self, n_steps: int) -> None:
        """`n_steps`: how many steps a grant allows; 0: none is given."""
        self._n_steps = n_steps
        self._epoch = self._fed_back = 0
        self._by_session: dict[int, _Grant] = {}  # at most one for each running session
        self._numbers = itertools.cycle(range(1, _NUMBER_MAX))
        self._due: list[pb.Sampled] = []
        self._penalty, self._sits_out = 1, 0
        self.n_granted = self.n_vain = 0
        """Rows that did not have to be sent, and rows that stages computed in vain."""
        self.n_given = self.n_extended = self.n_repeated = 0
        """Envelopes that gave grants, that extended some, and that ended some by sending rows again."""

    def connected(self, epoch: int, *, takes_back: bool) -> None:
        """An epoch begins. `takes_back`: its stages can drop any rows that were computed too many."""
        self._epoch = epoch if takes_back and self._n_steps else 0

    def feeds_back(self, epoch: int) -> None:
        """In this epoch the last stage can send tokens to stage 0: grants may be given. Known before or after its
        beginning.
        """
        self._fed_back = epoch

    def lost(self) -> None:
        """The epoch is over, and so are its grants."""
        self._epoch = 0
        for session_id in list(self._by_session):
            self.forget(session_id)
        self._due.clear()

    def forget(self, session_id: int) -> None:
        """A session has ended, or begins again: what leaves for it next ends its grant at the stages."""
        grant = self._by_session.pop(session_id, None)
        if grant is not None:
            self.n_vain += len(grant.early)

    def figures(self) -> dict[str, int]:
        """Return the counts for GET /v1/pipeline. `steps`: how many a grant allows, 0 if none is given."""
        return {
            "steps": self._n_steps,
            "given": self.n_given,
            "extended": self.n_extended,
            "repeated": self.n_repeated,
            "rows": self.n_granted,
            "vain_rows": self.n_vain,
        }

    # --- rows out -----------------------------------------------------------------------------------------------------

    def leave(self, envelope: Sequence[OutFrame], *, is_calm: bool) -> tuple[Frame, ...]:
        """Return what leaves of an envelope that the scheduler has decided; nothing if the stages do it by themselves.

        is_calm: whether grants may be given and extended.
        """
        if not self._epoch or self._epoch != self._fed_back:
            return tuple([frame.leave() for frame in envelope])
        rows = [frame for frame in envelope if frame.tokens]
        others = [frame for frame in envelope if not frame.tokens] if len(rows) < len(envelope) else []
        for frame in others:
            self.forget(frame.session.session_id)
        if rows and self._is_done(rows):
            self._decided(rows)
            return (*[frame.leave() for frame in others], *(self._extensions(rows) if is_calm else ()))
        self._end(rows)
        if self._sits_out:
            self._sits_out -= bool(rows)
        elif is_calm and rows and all(map(_may_run, rows)):
            return (*[frame.leave() for frame in others], *self._granted(rows))
        return tuple([frame.leave() for frame in envelope])

    def _is_done(self, rows: Sequence[OutFrame]) -> bool:
        """Return whether the stages compute just these rows together by themselves."""
        group = 0
        for frame in rows:
            grant = self._by_session.get(frame.session.session_id)
            if grant is None or frame.flags != Flag.WANTS_SAMPLE or frame.position != grant.next:
                return False
            if frame.position >= grant.limit or grant.group != (group or grant.group):
                return False
            group = grant.group
        return True

    def _decided(self, rows: Sequence[OutFrame]) -> None:
        self.n_granted += len(rows)
        has_paid = False
        for frame in rows:
            grant = self._by_session[frame.session.session_id]
            grant.next += 1
            has_paid |= grant.next == grant.pays_at
            if grant.early and grant.early[0].position == grant.next:
                self._due.append(grant.early.popleft())
        if has_paid:
            self._penalty = max(1, self._penalty // 2)

    def _extensions(self, rows: Sequence[OutFrame]) -> list[Frame]:
        """Return controls that move the ends of grants that have come half way."""
        found: list[Frame] = []
        for frame in rows:
            session_id = frame.session.session_id
            grant = self._by_session[session_id]
            limit = min(grant.next + self._n_steps, grant.end)
            if grant.limit - grant.next <= self._n_steps // 2 and limit > grant.limit:
                grant.limit, grant.pays_at = limit, _half_way(grant.next, limit)
                found.append(Frame(session_id, 0, (), Flag.EXTEND, grant_argument(grant.number, limit)))
        self.n_extended += bool(found)
        return found

    def _end(self, rows: Sequence[OutFrame]) -> None:
        """End the grants of rows that leave after all."""
        is_repeated = False
        for frame in rows:
            grant = self._by_session.get(frame.session.session_id)
            self.forget(frame.session.session_id)
            is_repeated |= grant is not None and frame.position < grant.limit
        if is_repeated:
            self.n_repeated += 1
            self._penalty = min(SIT_OUT_MAX, 2 * self._penalty)
            self._sits_out = self._penalty

    def _granted(self, rows: Sequence[OutFrame]) -> Iterator[Frame]:
        """Give each row that leaves a grant; a row that completes its answer gets none."""
        group, is_given = next(self._numbers), False
        for frame in rows:
            session, following = frame.session, frame.position + 1
            end = _end_of(session)
            limit = min(following + self._n_steps, end)
            if limit <= following:
                yield frame.leave()
                continue
            number = next(self._numbers)
            pays_at = _half_way(following, limit)
            self._by_session[session.session_id] = _Grant(number, group, following, limit, end, pays_at)
            is_given = True
            yield frame.leave()._replace(argument=grant_argument(number, limit))
        self.n_given += is_given

    # --- samples in ---------------------------------------------------------------------------------------------------

    def takes(self, sample: pb.Sampled) -> bool:
        """Return whether a sample counts now. One that is early is kept for `due`, others are dropped."""
        if not sample.grant:
            return True
        grant = self._by_session.get(sample.session_id)
        if grant is None or grant.number != sample.grant:
            self.n_vain += 1
            return False
        if sample.position <= grant.next:
            return True
        expected = grant.early[-1].position + 1 if grant.early else grant.next + 1
        if sample.position == expected and sample.position <= grant.end:  # others are repeated, or a peer's mistake
            grant.early.append(sample)
        return False

    def due(self) -> list[pb.Sampled]:
        """Return early samples whose rows were decided in the meantime, each once."""
        due, self._due = self._due, []
        return due


def _half_way(following: int, limit: int) -> int:
    """Return where the next row is once half of the rows from `following` on, which end before `limit`, are decided."""
    return following + max(1, (limit - following) // 2)


def _end_of(session: Session) -> int:
    """Return the position of a session's last token: its row is never computed."""
    request = session.request
    return len(request.prompt_tokens) + request.max_tokens - 1


def _may_run(frame: OutFrame) -> bool:
    """Return whether a frame is one row of a stream whose next rows follow from its samples alone."""
    request, session = frame.session.request, frame.session
    return (
        frame.flags == Flag.WANTS_SAMPLE
        and len(frame.tokens) == 1
        and session.acceptance is None
        and not request.prediction
        and not request.sampling.looks_back
    )
