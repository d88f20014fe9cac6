"""The last native batched decodes of this stage, for viewing without any tracing backend. Pure.

An entry copies the values it shows: a frame itself would keep its whole received message alive.
"""

from __future__ import annotations

import collections
import dataclasses
import operator
from collections.abc import Collection
from typing import NamedTuple

from relayline.stage.steps.step_types import StepResult
from relayline.wire.envelopes import trace_context
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

RING_BATCHES_MAX = 4_096  # a minute and a half of steps of 20 ms
RING_MEMBERS_MAX = 65_536  # over all entries; about 15 MB


class Member(NamedTuple):
    """One frame of a batch."""

    session_id: int
    position: int
    n_rows: int
    is_prefill: bool
    wait_ns: int
    upstream_wait_ns: int
    sent_ns: int


# The kept part of a frame, in one call. A Member of each would cost every step several times as much, and its named
# tuples would stay with the garbage collector, which ignores plain tuples of numbers.
_KEPT = operator.attrgetter(
    "session_id", "position", "n_rows", "is_prefill", "arrived_ns", "upstream_wait_ns", "sent_ns"
)
_SESSION = operator.itemgetter(0)
_Kept = tuple[int, int, int, bool, int, int, int]


@dataclasses.dataclass(slots=True)
class Entry:
    """One native decode; fields as in pb.BatchRecord."""

    step: int
    taken_ns: int  # when its frames were taken from the queue
    start_ns: int
    decode_ns: int
    encode_ns: int
    predicted_ns: int
    n_rows: int
    padded_rows: int
    close_reason: str
    queued_rows_before: int
    queued_rows_after: int
    bytes_out: int
    context: bytes
    kept: tuple[_Kept, ...]  # one per member frame: a Member with its arrival in place of its wait

    @property
    def members(self) -> tuple[Member, ...]:
        """The frames of the batch."""
        return tuple(Member(*each[:4], self.taken_ns - each[4], *each[5:]) for each in self.kept)

    def holds(self, session_ids: frozenset[int]) -> bool:
        """Return whether any of these sessions was in the batch."""
        return not session_ids.isdisjoint(map(_SESSION, self.kept))

    @classmethod
    def of(cls, result: StepResult) -> Entry:
        """Copy the kept facts of a step that decoded rows."""
        step = result.step
        return cls(
            step=result.number,
            taken_ns=step.taken_ns,
            start_ns=result.started_ns,
            decode_ns=result.decode_ns,
            encode_ns=result.encode_ns,
            predicted_ns=result.predicted_ns,
            n_rows=result.n_rows,
            padded_rows=result.padded_rows,
            close_reason=result.close_reason,
            queued_rows_before=step.queued_rows_before,
            queued_rows_after=step.queued_rows_after,
            bytes_out=sum(len(output.message) for output in result.outputs),
            context=result.context,
            kept=tuple(map(_KEPT, result.members)),
        )

    def message(self) -> pb.BatchRecord:
        """Return the entry in wire form."""
        return pb.BatchRecord(
            step=self.step,
            start_ns=self.start_ns,
            decode_ns=self.decode_ns,
            encode_ns=self.encode_ns,
            predicted_ns=self.predicted_ns,
            n_rows=self.n_rows,
            padded_rows=self.padded_rows,
            close_reason=self.close_reason,
            queued_rows_before=self.queued_rows_before,
            queued_rows_after=self.queued_rows_after,
            bytes_out=self.bytes_out,
            context=b"" if self.context == trace_context.NONE else self.context[: trace_context.IDS_BYTES],
            taken_ns=self.taken_ns,
            members=[pb.BatchMember(**member._asdict()) for member in self.members],
        )


class BatchRing:
    """Bounded by entries and by their members; the oldest go first and are counted in `n_forgotten`."""

    def __init__(self, batches_max: int = RING_BATCHES_MAX, members_max: int = RING_MEMBERS_MAX) -> None:
        self.n_forgotten = 0
        self._batches_max, self._members_max = batches_max, members_max
        self._entries: collections.deque[Entry] = collections.deque()
        self._n_members = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Entry) -> None:
        """Keep one batch, forgetting as many old ones as it takes."""
        self._entries.append(entry)
        self._n_members += len(entry.kept)
        while len(self._entries) > self._batches_max or (self._n_members > self._members_max and len(self) > 1):
            self._n_members -= len(self._entries.popleft().kept)
            self.n_forgotten += 1

    def recent(self, session_ids: Collection[int] = (), limit: int = 0, after_step: int = 0) -> list[Entry]:
        """Return the newest `limit` batches (0: all) that hold any of these sessions (none: all), oldest first.

        Only those with a number above `after_step`: a caller that has seen a step asks for later ones.
        """
        wanted = frozenset(session_ids)
        found: list[Entry] = []
        for entry in reversed(self._entries):
            if entry.step <= after_step:
                break
            if not wanted or entry.holds(wanted):
                found.append(entry)
                if len(found) == limit:
                    break
        return found[::-1]
