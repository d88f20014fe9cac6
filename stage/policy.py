"""How many of the waiting frames the next step takes. Pure: a view of the queue in, a choice out.

The native step is the collection window: a policy is asked once when the engine is free and something waits. It holds
no timer. The default drains: decode rows first, then as much prefill as fits beside them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final, Protocol

from stage.queue_types import QueuedFrame

QUEUE_DRAINED: Final = "queue_drained"
ROW_CAP: Final = "row_cap"
PREFILL_BUDGET: Final = "prefill_budget"


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The first `n_decode` decode heads and the first `n_prefill` prefill heads run next."""

    n_decode: int
    n_prefill: int
    close_reason: str


class Policy(Protocol):
    """Decides the next step. Both sequences hold at most one frame per session, oldest first."""

    def choose(self, decode: Sequence[QueuedFrame], prefill: Sequence[QueuedFrame], now_ns: int) -> Choice:
        """Return what to take; taking nothing leaves the queue waiting for the next event."""


@dataclasses.dataclass(frozen=True, slots=True)
class DrainPolicy:
    """Take what is queued, up to `max_rows`; while decoders wait too, prefill gets at most `prefill_rows`.

    A prefill frame is never split, so one that alone exceeds `prefill_rows` still runs (one per step): decoders wait
    for at most one chunk. A prefill head that stood in line before every waiting decode row has its place in the step
    before them, so a prompt advances however many decoders there are. A frame wider than `max_rows` goes alone; the
    executor refuses it.
    """

    max_rows: int  # rows of one native step
    prefill_rows: int  # prefill rows beside running decoders

    def choose(self, decode: Sequence[QueuedFrame], prefill: Sequence[QueuedFrame], now_ns: int) -> Choice:
        """See Policy."""
        is_overdue = bool(prefill and decode) and prefill[0].line_order < decode[0].line_order
        reserved = prefill[0].n_rows if is_overdue else 0
        n_decode = n_rows = 0
        for frame in decode:
            if reserved + n_rows + frame.n_rows > self.max_rows and (n_decode or reserved):
                return Choice(n_decode, 1 if reserved else 0, ROW_CAP)
            n_rows += frame.n_rows
            n_decode += 1
        budget = self.max_rows - n_rows if not n_decode else min(self.max_rows - n_rows, self.prefill_rows)
        n_prefill = taken = 0
        for frame in prefill:
            fits = taken + frame.n_rows <= budget
            must = n_prefill == 0 and (n_rows + frame.n_rows <= self.max_rows or not n_decode)
            if not fits and not must:
                return Choice(n_decode, n_prefill, ROW_CAP if not n_decode else PREFILL_BUDGET)
            taken += frame.n_rows
            n_prefill += 1
        return Choice(n_decode, n_prefill, QUEUE_DRAINED)
