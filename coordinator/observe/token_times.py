"""The time of a request by what it was spent on, token by token: every moment until its last token has a name. Pure.

A token's time is that from the token before it, as the coordinator took them. The first one's begins when its session
got a lane. In between, its row goes from the coordinator through all stages and back. Each step of this way ends at a
known moment: in the stages' rings of batches, which are moved to this process's clock, and in the records of
requests. The time between two such moments belongs to one of PARTS. So the parts of a token are its time, and those
of all tokens are the request's. If a moment is unknown, because a stage has forgotten its batches, the time is
`rest`.

Moments that two clocks put in the wrong order count as one: an error of a clock moves time from one hop to the next,
and adds none. Rows that were on their way before the token before them was taken, as drafts are, count from that
token on. A row that the last stage sent back under a grant did not wait for the coordinator. Then its token's time
begins, and the time of the token before ends, when that one was sampled.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from relayline.coordinator.sessions.request_log import SessionRecord
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.telemetry import names

SLACK_NS = 5_000_000  # by which clocks may put a batch behind one that followed from it

PAUSED = "paused"  # from a loss until the session went on, or was read again
EARLIER = "earlier"  # of the first token: until the prompt's last chunk left, behind earlier chunks and other prompts
GROUP = "group"  # waiting for the other streams of its group
DECIDING = "deciding"  # the coordinator, from the last token that its envelope waited for until that left
HOP = "hop"  # of each stage: from the one before, or the coordinator, to this one
QUEUE = "queue"  # of each stage: waiting for its batch
COMPUTE = "compute"  # of each stage: the native decode
HANDLE = "handle"  # of each stage: placing rows, and encoding them for the next stage; at the last one, sampling
BACK = "back"  # from the last stage to the coordinator
TAKING = "taking"  # the coordinator, from the answer's arrival until its tokens are told
REST = "rest"  # not known
OF_STAGES = (HOP, QUEUE, COMPUTE, HANDLE)
PARTS = (PAUSED, EARLIER, GROUP, DECIDING, *OF_STAGES, BACK, TAKING, REST)

Mark = tuple[str, int, int]
"""A part, the stage that it is of (0 where it is of none), and the moment at which it ends."""


class Passed(NamedTuple):
    """One batch of a session at one stage. Times are this process's clock, but for `sent_ns`."""

    batch: pb.BatchRecord
    member: pb.BatchMember
    arrived_ns: int
    taken_ns: int
    started_ns: int
    computed_ns: int
    ended_ns: int
    sent_ns: int
    """On the sender's clock. 0: not known, or the last stage sent it back under a grant."""
    is_granted: bool

    @classmethod
    def of(cls, batch: pb.BatchRecord, member: pb.BatchMember) -> Passed:
        """Read what a stage remembers. One of an older version does not say when it took the batch."""
        taken_ns = batch.taken_ns or batch.start_ns
        computed_ns = max(taken_ns, batch.start_ns + batch.decode_ns)
        arrived_ns, ended_ns = taken_ns - member.wait_ns, computed_ns + batch.encode_ns
        is_granted = bool(batch.taken_ns) and not member.sent_ns and not member.is_prefill
        sent_ns = member.sent_ns
        return cls(batch, member, arrived_ns, taken_ns, batch.start_ns, computed_ns, ended_ns, sent_ns, is_granted)


@dataclasses.dataclass(slots=True)
class Parts:
    """A time and its parts, in nanoseconds."""

    n_stages: int
    took_ns: int = 0
    whole_ns: dict[str, int] = dataclasses.field(default_factory=dict)
    """By part, those that are of no stage."""
    stage_ns: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    """By part, of each stage."""

    def spend(self, part: str, stage: int, ns: int) -> None:
        """Add a time to a part."""
        self.took_ns += ns
        if part in OF_STAGES:
            self.stage_ns.setdefault(part, [0] * self.n_stages)[stage] += ns
        else:
            self.whole_ns[part] = self.whole_ns.get(part, 0) + ns

    def add(self, other: Parts) -> None:
        """Add another time with its parts."""
        for part, ns in other.whole_ns.items():
            self.spend(part, 0, ns)
        for part, of_stages in other.stage_ns.items():
            for stage, ns in enumerate(of_stages):
                self.spend(part, stage, ns)


@dataclasses.dataclass(frozen=True, slots=True)
class TokenTime:
    """One token's time."""

    index: int
    """Of the answer, from 0."""
    position: int
    """Of its row: the token is behind it."""
    start_ns: int
    parts: Parts
    chain: tuple[Passed | None, ...]
    """Its batch at each stage; None where it is not known."""


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """The coordinator's own records."""

    sessions: Mapping[int, SessionRecord] = dataclasses.field(default_factory=dict)
    """The mates' records, by session id."""
    arrivals_ns: Sequence[int] = ()
    """When the latest answers of stages came, ascending."""


def token_times(
    session: SessionRecord, responses: Sequence[pb.BatchesResponse | None], known: Known
) -> list[TokenTime]:
    """Return the times of a session's tokens, in order: of the latest, if it has more than are remembered.

    responses: the stages' batches in layer order (None: no answer), start times on this process's clock.
    """
    told = _told(session)
    if not told:
        return []
    told_of = _ToldOf(known.sessions)
    indexes = [_index(response, session.session_id) for response in responses]
    chains = [_chain(indexes, session.n_prompt + index - 1, at_ns) for index, at_ns in told.items()]
    # Where the row behind a token came back under a grant, nothing waited for the token to be taken here.
    ends_ns = list(told.values())
    for at, following in enumerate(chains[1:]):
        sampled = chains[at][-1] if chains[at] else None
        if sampled is not None and _is_granted(following):
            ends_ns[at] = min(ends_ns[at], sampled.ended_ns)
    first = next(iter(told))
    start_ns = session.started_ns if not first else ends_ns[0]
    found: list[TokenTime] = []
    for index, end_ns, chain, told_ns in zip(told, ends_ns, chains, told.values(), strict=True):
        if not index or index > first:  # of the first that is remembered, the beginning is not
            position = session.n_prompt + index - 1
            marks = _marks(session, index, chain, start_ns, told_ns, told_of, known)
            parts = cut(start_ns, end_ns, marks, len(responses))
            found.append(TokenTime(index, position, start_ns, parts, chain))
            start_ns = max(start_ns, end_ns)
    return found


def summed(times: Iterable[TokenTime], took_ns: int, n_stages: int) -> Parts:
    """Return the sums of some tokens' parts; what `took_ns` has more than they is rest."""
    found = Parts(n_stages)
    for each in times:
        found.add(each.parts)
    if took_ns > found.took_ns:
        found.spend(REST, 0, took_ns - found.took_ns)
    return found


def cut(start_ns: int, end_ns: int, marks: Iterable[Mark], n_stages: int) -> Parts:
    """Share out a time among parts that follow one another; marks outside of it, or out of order, get nothing."""
    found, at_ns = Parts(n_stages), start_ns
    for part, stage, until_ns in marks:
        until_ns = min(until_ns, end_ns)
        if until_ns > at_ns:
            found.spend(part, stage, until_ns - at_ns)
            at_ns = until_ns
    if end_ns > at_ns:
        found.spend(REST, 0, end_ns - at_ns)
    return found


def _marks(
    session: SessionRecord,
    index: int,
    chain: Sequence[Passed | None],
    start_ns: int,
    told_ns: int,
    told_of: _ToldOf,
    known: Known,
) -> list[Mark]:
    """Return the moments of a token's way, in order."""
    marks: list[Mark] = []
    part_before = HOP
    if chain and chain[0] is not None and not chain[0].is_granted and chain[0].sent_ns:
        sent_ns = chain[0].sent_ns
        if _is_paused(session, start_ns, sent_ns):
            marks.append((PAUSED, 0, sent_ns))
        elif not index:
            marks.append((EARLIER, 0, sent_ns))
        else:
            marks += [(GROUP, 0, told_of.mates_ns(chain[0], sent_ns)), (DECIDING, 0, sent_ns)]
    elif not _is_granted(chain):
        part_before = REST  # when it left here is not known
    for stage, passed in enumerate(chain):
        if passed is None:
            part_before = REST
            continue
        marks += [
            (part_before, stage, passed.arrived_ns),
            (QUEUE, stage, passed.taken_ns),
            (HANDLE, stage, passed.started_ns),
            (COMPUTE, stage, passed.computed_ns),
            (HANDLE, stage, passed.ended_ns),
        ]
        part_before = HOP
    if chain and chain[-1] is not None:
        marks += [(BACK, 0, _arrived(known.arrivals_ns, told_ns)), (TAKING, 0, told_ns)]
    return marks


def _is_granted(chain: Sequence[Passed | None]) -> bool:
    return bool(chain) and chain[0] is not None and chain[0].is_granted


def _is_paused(session: SessionRecord, from_ns: int, to_ns: int) -> bool:
    kinds = (names.EVENT_PAUSED, names.EVENT_REPLAYED)
    return any(event.name in kinds and from_ns <= event.at_ns <= to_ns for event in session.events)


def _arrived(arrivals_ns: Sequence[int], told_ns: int) -> int:
    """Return when the answer with a token came; `told_ns` if that is forgotten."""
    at = bisect.bisect_right(arrivals_ns, told_ns)
    return arrivals_ns[at - 1] if at else told_ns


def _told(session: SessionRecord) -> dict[int, int]:
    """Return when each token was taken, by its number in the answer, in order: of the latest that are remembered."""
    if not session.first_token_ns:
        return {}
    gaps_ns = list(session.gaps.latest_ns if session.ended_ns else session.gaps_ns)
    first, first_ns = max(0, session.gaps.n - len(gaps_ns)), session.first_token_ns
    if first:
        first_ns = session.last_token_ns - sum(gaps_ns)
    return dict(enumerate(itertools.accumulate(gaps_ns, initial=first_ns), start=first))


class _ToldOf:
    """When tokens of batch mates were taken."""

    def __init__(self, sessions: Mapping[int, SessionRecord]) -> None:
        self._sessions = sessions
        self._told: dict[int, dict[int, int]] = {}

    def mates_ns(self, passed: Passed, sent_ns: int) -> int:
        """Return when the last token came that the envelope of this row waited for; 0 if that is not known."""
        latest_ns = 0
        for mate in passed.batch.members:
            if mate.sent_ns == sent_ns and not mate.is_prefill:
                at_ns = self._at_ns(mate.session_id, mate.position)
                if latest_ns < at_ns <= sent_ns:
                    latest_ns = at_ns
        return latest_ns

    def _at_ns(self, session_id: int, position: int) -> int:
        session = self._sessions.get(session_id)
        if session is None:
            return 0
        if session_id not in self._told:
            self._told[session_id] = _told(session)
        return self._told[session_id].get(position - session.n_prompt, 0)


def _index(response: pb.BatchesResponse | None, session_id: int) -> dict[int, list[Passed]]:
    """Return a session's batches at one stage by row, oldest first; of a prompt's chunk only by its last row."""
    found: dict[int, list[Passed]] = {}
    for batch in response.batches if response is not None else ():
        for member in batch.members:
            if member.session_id == session_id and member.n_rows:
                end = member.position + member.n_rows
                passed = Passed.of(batch, member)
                for row in range(end - 1 if member.is_prefill else member.position, end):
                    found.setdefault(row, []).append(passed)
    return found


def _chain(indexes: Sequence[Mapping[int, Sequence[Passed]]], row: int, told_ns: int) -> tuple[Passed | None, ...]:
    """Return the batch of each stage in which a row was computed for a token that was taken at told_ns.

    A row may have been computed in vain before: at each stage the latest counts that was there in time.
    """
    chain: list[Passed | None] = []
    until_ns = told_ns + SLACK_NS
    for index in reversed(indexes):
        passed = next((each for each in reversed(index.get(row, ())) if each.ended_ns <= until_ns), None)
        chain.append(passed)
        if passed is not None:
            until_ns = passed.arrived_ns + SLACK_NS
    return tuple(reversed(chain))
