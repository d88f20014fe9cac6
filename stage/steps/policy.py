"""Chooses how many of the waiting frames the next step takes. Pure: a view of the queue in, a choice out.

The native step is the collection window: a policy is asked when the engine is free and frames wait. It has no timer.
The default drains: decode rows first, then as much prefill as fits into the step.

To add one, write its class here and its entry in `POLICIES`, and name it in `wire.settings.table.POLICIES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, NamedTuple, Protocol

from relayline.stage.queue_types import QueuedFrame
from relayline.wire.common.bounds import ROWS_PER_ENVELOPE_MAX
from relayline.wire.common.curve import ATTENTION_TILE_ROWS, CostCurve
from relayline.wire.envelopes.frames import Flag

GROUP: Final = "group_policy"
PAD_TARGET: Final = "pad_target"
QUEUE_DRAINED: Final = "queue_drained"
ROW_CAP: Final = "row_cap"
PREFILL_BUDGET: Final = "prefill_budget"
MUTUAL_ROWS: Final = "mutual_rows"
OTHER_ADAPTER: Final = "other_adapter"


class Choice(NamedTuple):
    """The first `n_decode` decode heads and the first `n_prefill` prefill heads run next."""

    n_decode: int
    n_prefill: int
    close_reason: str


class Policy(Protocol):
    """Decides the next step. Both sequences hold at most one frame per session, oldest first.

    `is_prefill_first` says whether a prefill frame has been in line for longest; one of the two is not empty.
    `others_decode`: decode rows of other adapters wait too.
    """

    takes_turns: ClassVar[bool]
    """Whether decode rows do not wait for all prompts that are before them in line.

    They wait for one step with prompt rows for each adapter whose decode rows are before them.
    """

    def choose(
        self,
        decode: Sequence[QueuedFrame],
        prefill: Sequence[QueuedFrame],
        *,
        is_prefill_first: bool,
        others_decode: bool = False,
    ) -> Choice:
        """Return what to take; taking nothing leaves the queue waiting for the next event."""


@dataclasses.dataclass(frozen=True, slots=True)
class DrainPolicy:
    """Take queued rows, up to `max_rows`; while decoders wait too, prefill gets at most `prefill_rows`.

    A prefill frame is never split, so one that alone exceeds `prefill_rows` still runs (one per step): decoders wait
    for at most one chunk. A prefill head that was in line before every waiting decode row is served before them in the
    step, so a prompt advances with any number of decoders. With rows of several adapters, of which a step has one, all
    this holds for decode rows of the others. A frame wider than `max_rows` goes alone; the executor
    refuses it.
    """

    takes_turns: ClassVar[bool] = True
    max_rows: int  # rows of one native step
    prefill_rows: int  # prefill rows in a step with running decoders
    wanted_rows: int = ROWS_PER_ENVELOPE_MAX  # rows of one step that want logits, as all of decode frames do

    def choose(
        self,
        decode: Sequence[QueuedFrame],
        prefill: Sequence[QueuedFrame],
        *,
        is_prefill_first: bool,
        others_decode: bool = False,
    ) -> Choice:
        """See Policy."""
        is_overdue = bool(decode) and is_prefill_first
        reserved, wanted = (prefill[0].n_rows, _wants(prefill[0])) if is_overdue else (0, 0)
        n_decode = n_rows = 0
        decode_max = min(self.max_rows - reserved, self.wanted_rows - wanted)
        for frame in decode:
            if n_rows + frame.n_rows > decode_max and (n_decode or reserved):
                return Choice(n_decode, 1 if reserved else 0, ROW_CAP)
            n_rows += frame.n_rows
            n_decode += 1
        budget = self.max_rows - n_rows
        if n_decode or others_decode:
            budget = min(budget, self.prefill_rows)
        n_prefill = taken = 0
        wanted = n_rows
        for frame in prefill:
            wanted += _wants(frame)
            fits = taken + frame.n_rows <= budget
            must = n_prefill == 0 and (n_rows + frame.n_rows <= self.max_rows or not n_decode)
            if not (fits or must) or (wanted > self.wanted_rows and (n_decode or n_prefill)):
                return Choice(n_decode, n_prefill, ROW_CAP if not n_decode else PREFILL_BUDGET)
            taken += frame.n_rows
            n_prefill += 1
        return Choice(n_decode, n_prefill, QUEUE_DRAINED)


def _wants(prefill: QueuedFrame) -> int:
    if prefill.flags & Flag.DRAFTED:  # every row is scored
        return prefill.n_rows
    return int(prefill.flags & Flag.WANTS_SAMPLE != 0)


@dataclasses.dataclass(frozen=True, slots=True)
class SinglePolicy:
    """One frame a step, oldest first: batching switched off, to compare with."""

    takes_turns: ClassVar[bool] = False
    max_rows: int  # rows of one native step

    def choose(
        self,
        decode: Sequence[QueuedFrame],
        prefill: Sequence[QueuedFrame],
        *,
        is_prefill_first: bool,
        others_decode: bool = False,
    ) -> Choice:
        """See Policy."""
        return Choice(0, 1, ROW_CAP) if is_prefill_first else Choice(1, 0, ROW_CAP)


@dataclasses.dataclass(frozen=True, slots=True)
class GroupPolicy:
    """Keep frames together that the coordinator sent together: the oldest envelope runs, with riding prompt rows, one a
    step.

    Merging two groups that meet in a queue would join them for good. Then one stage works while the others wait, and
    the coordinator sized the groups so that this does not pay. The step takes a few more frames only if the curve says
    that their rows are free, and if that empties the queue. That room would be padding otherwise.
    """

    takes_turns: ClassVar[bool] = False
    max_rows: int  # rows of one native step
    curve: CostCurve  # of decode rows
    wanted_rows: int = ROWS_PER_ENVELOPE_MAX  # rows of one step that want logits, as all of decode frames do

    def choose(
        self,
        decode: Sequence[QueuedFrame],
        prefill: Sequence[QueuedFrame],
        *,
        is_prefill_first: bool,
        others_decode: bool = False,
    ) -> Choice:
        """See Policy."""
        envelope = (prefill if is_prefill_first else decode)[0].envelope
        n_decode, rows = _of_envelope(decode, envelope, 0, min(self.max_rows, self.wanted_rows))
        if not prefill and n_decode == len(decode):  # nearly always
            return Choice(n_decode, 0, GROUP)
        n_prefill, _ = _of_envelope(prefill, envelope, rows, self.max_rows)
        while n_decode + n_prefill > 1 and rows + sum(map(_wants, prefill[:n_prefill])) > self.wanted_rows:
            n_prefill -= 1
        if n_decode == len(decode) and n_prefill == len(prefill):
            return Choice(n_decode, n_prefill, GROUP)
        if not n_prefill:
            rest = sum(frame.n_rows for frame in decode[n_decode:])
            # The curve knows no context, and as a tile of attention rows of many lanes would pay for each other's.
            rows_max = min(self.max_rows, self.wanted_rows)
            if rows < ATTENTION_TILE_ROWS:
                rows_max = min(rows_max, ATTENTION_TILE_ROWS - 1)
            if 0 < rest <= self.curve.padded_rows(rows, rows_max) - rows:
                return Choice(len(decode), 0, PAD_TARGET)
        is_cut = any(frame.envelope == envelope for frame in (*decode[n_decode:][:1], *prefill[n_prefill:][:1]))
        return Choice(n_decode, n_prefill, ROW_CAP if is_cut else GROUP)


def _of_envelope(frames: Sequence[QueuedFrame], envelope: int, taken: int, max_rows: int) -> tuple[int, int]:
    """Return (frames, rows): how many leading frames came in this envelope and fit a step that has `taken` rows.

    A frame wider than a step is taken alone: the executor refuses it, and it does not block the others.
    """
    n_frames = n_rows = 0
    for frame in frames:
        is_alone = not taken and not n_frames
        if frame.envelope != envelope or (taken + n_rows + frame.n_rows > max_rows and not is_alone):
            break
        n_rows += frame.n_rows
        n_frames += 1
    return n_frames, n_rows


@dataclasses.dataclass(frozen=True, slots=True)
class StepLimits:
    """The stage's facts that policies use."""

    max_rows: int
    """Rows of one native step."""
    prefill_rows: int
    """Prefill rows in a step with running decoders."""
    curve: CostCurve
    """The cost of decode rows."""
    wanted_rows: int = ROWS_PER_ENVELOPE_MAX
    """Rows of one step that want logits."""


POLICIES: dict[str, Callable[[StepLimits], Policy]] = {
    "auto": lambda limits: GroupPolicy(limits.max_rows, limits.curve, limits.wanted_rows),
    "drain": lambda limits: DrainPolicy(limits.max_rows, limits.prefill_rows, limits.wanted_rows),
    "single": lambda limits: SinglePolicy(limits.max_rows),
}
"""How each policy is made, by its name in the table of settings."""
