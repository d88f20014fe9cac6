"""Which rows may travel together so that a row has the same bits whenever it is computed, and in whose company. Pure.

From ATTENTION_TILE_ROWS rows on, attention on processors goes by tiles for many models, and rounds otherwise than for
fewer rows; all else of a step gives a row the same bits in any company. So the logits of an answer that is replayed
after a loss, or that runs with many others, would differ in their last bits from those of the answer alone. The rule:
whole tiles of a long prompt are read in steps of as many rows as suit, all other rows (its rest, short prompts, what
was generated) in steps that are no tile. The exception is what is read of a long prompt in small parts, beside running
streams.

Where lanes have cells of their own, only rows of one lane make a tile; else all rows of a step do.
"""

from __future__ import annotations

import dataclasses

from relayline.coordinator.sessions.session import Session
from relayline.wire.common.bounds import ROWS_PER_ENVELOPE_MAX
from relayline.wire.common.curve import ATTENTION_TILE_ROWS

LONG_PROMPT_ROWS = 512  # attention is a small part of what shorter prompts take
RIDE_ROWS_MIN = 8  # with so many streams that prompts have less room than this, they do not wait for equal bits


@dataclasses.dataclass(slots=True)
class StepRows:
    """The rows of a step that is being put together."""

    n_decode: int = 0
    n_whole: int = 0  # of whole tiles of long prompts
    n_other: int = 0  # of prompts besides

    def add(self, n_rows: int, *, is_whole: bool) -> None:
        """Count rows of a prompt."""
        if is_whole:
            self.n_whole += n_rows
        else:
            self.n_other += n_rows


@dataclasses.dataclass(frozen=True, slots=True)
class TileRule:
    """How many rows of a prompt a step takes. The default is for stages without tiles: as many as there is room for."""

    is_known: bool = False  # whether stages go by tiles
    is_per_lane: bool = False  # whether lanes have cells of their own

    def room(self, session: Session, room_rows: int, step: StepRows) -> int:
        """Return how many of the next rows of a session may join a step that has room for `room_rows`; 0: none."""
        if not self.is_known:
            return room_rows
        n_whole = n_of_whole_tiles(session)
        if not step.n_decode:
            if n_whole:
                is_apart = step.n_other or (self.is_per_lane and step.n_whole)
                n_rows = min(n_whole, room_rows)
                return 0 if is_apart else n_rows // ATTENTION_TILE_ROWS * ATTENTION_TILE_ROWS or n_rows
            if step.n_whole:
                return 0
        if self.is_per_lane:
            return min(room_rows, n_whole or ATTENTION_TILE_ROWS - 1)
        n_before = step.n_decode + step.n_whole + step.n_other
        return max(0, min(room_rows, ATTENTION_TILE_ROWS - 1 - n_before))

    def draft_room(self, n_streams: int) -> int:
        """Return how many guesses go along with one row of so many streams each, or more than a step takes."""
        if not self.is_known or self.is_per_lane or n_streams >= ATTENTION_TILE_ROWS:
            return ROWS_PER_ENVELOPE_MAX
        return ATTENTION_TILE_ROWS - 1 - n_streams

    def beside(self, n_decode: int) -> TileRule:
        """Return the rule for a step with so many decode rows: none where it would leave prompts hardly any room."""
        return self if self.is_per_lane or n_decode + RIDE_ROWS_MIN < ATTENTION_TILE_ROWS else TileRule()


def n_of_whole_tiles(session: Session) -> int:
    """Return how many of the rows that are left to send are of whole tiles of a long prompt."""
    n_prompt = len(session.request.prompt_tokens)
    if n_prompt < LONG_PROMPT_ROWS:
        return 0
    return max(0, n_prompt // ATTENTION_TILE_ROWS * ATTENTION_TILE_ROWS - session.n_sent)
