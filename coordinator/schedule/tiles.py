"""Decides which rows may share a step, so that a row always gets the same bits. Pure.

On CPUs, steps of ATTENTION_TILE_ROWS rows and more compute attention in tiles for many models. A tile rounds
differently from a step with fewer rows. Every other part of a step gives a row the same bits in any company. Without a
rule, an answer that is replayed after a loss, or that shares batches with many others, would differ in its last bits
from the same answer alone.

The rule has two parts. Whole tiles of a long prompt are read in steps with as many rows as fit. All other rows (the
prompt's rest, short prompts, generated tokens) travel in steps too small for a tile.

During decode a whole tile waits until decode flights have left room for all of its rows, or for TILE_FLIGHTS_MAX
flights (TilePace). There is one exception. If a step of one tile takes longer than TILE_STEP_MAX_NS, running streams
would stand still for too long. Then long prompts are computed in small parts together with the streams, and their bits
differ.

If each lane has its own KV cells, only rows of one lane form a tile. Otherwise all rows of a step do.

Some builds have attention of our own for shared cells (deploy/kernels/attend_own_cells.cpp). It takes lanes apart: a
step most of whose rows are decode rows goes by no tiles, however many rows it has. There no prompt is read in tiles,
and few prompt rows ride with many decode rows. For each of its rows a tile looks at the cells of all lanes. That takes
up to ten times as long as our attention once other lanes hold something. It gains a fifth at most while they are empty.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from relayline.coordinator.schedule.cycles import CHUNK_LADDER
from relayline.coordinator.sessions.session import Session
from relayline.wire.common.bounds import ROWS_PER_ENVELOPE_MAX
from relayline.wire.common.curve import ATTENTION_TILE_ROWS, TILE_ROWS, CostCurve, rows_apart

LONG_PROMPT_ROWS = 512  # attention is a small part of what shorter prompts take
TILE_STEP_MAX_NS = 500_000_000  # running streams stand still so long at most while a stage reads a tile
TILE_FLIGHTS_MAX = 16  # decode flights for which a tile waits at most, however little room they leave
RIDE_ROWS_MIN = 8  # if streams leave prompts less room than this, prompts do not wait for equal bits


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
    """How many rows of a prompt a step takes. The default is for stages without tiles: as many as fit."""

    is_known: bool = False  # whether stages go by tiles
    is_per_lane: bool = False  # whether lanes have separate cells
    is_apart: bool = False  # whether whole tiles have separate steps while streams run, too
    is_avoided: bool = False  # whether no step goes by tiles; of shared cells, where attention takes lanes apart

    def within(self, rows_max: int) -> TileRule:
        """Return the rule for flights of at most this many prompt rows; chunks smaller than a tile never travel
        apart."""
        is_apart = self.is_apart and rows_max >= ATTENTION_TILE_ROWS
        return self if is_apart == self.is_apart else dataclasses.replace(self, is_apart=is_apart)

    def waits_for_tile(self, session: Session) -> bool:
        """Return whether the next rows of a session go in whole tiles only, by themselves."""
        return self.is_known and self.is_apart and n_of_whole_tiles(session) > 0

    def room(self, session: Session, room_rows: int, step: StepRows) -> int:
        """Return how many of a session's next rows may join a step with room for `room_rows`; 0 for none."""
        if step.n_decode and self.is_apart and n_of_whole_tiles(session):
            return 0
        if not self.is_known:
            return room_rows
        if self.is_avoided:
            n_before = step.n_decode + step.n_whole + step.n_other
            return max(0, min(room_rows, rows_apart(step.n_decode) - n_before))
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

    def prompt_rows_max(self, n_decode: int) -> int:
        """Return how many prompt rows a step with n_decode other rows may have, as far as that is known of all."""
        return rows_apart(n_decode) - n_decode if self.is_avoided else ROWS_PER_ENVELOPE_MAX

    def steps_tried(self, rows_max: int) -> list[int]:
        """Return the numbers of rows that plans try for steps of at most rows_max, ascending."""
        found = {rows for rows in CHUNK_LADDER if rows <= rows_max}
        largest = rows_max // TILE_ROWS * TILE_ROWS  # the ladder has a step of a tile next, which would be too large
        return sorted(found | {largest} if self.is_avoided and largest else found)

    def draft_room(self, n_streams: int) -> int:
        """Return how many draft tokens n_streams may add to their rows together; may exceed the room of a step."""
        if not self.is_known or self.is_per_lane or (n_streams >= ATTENTION_TILE_ROWS and not self.is_avoided):
            return ROWS_PER_ENVELOPE_MAX
        return max(0, ATTENTION_TILE_ROWS - 1 - n_streams)  # neighbouring rows of one stream are alike

    def for_step(self, n_decode: int) -> TileRule:
        """Return the rule for a step with n_decode rows.

        Where rows below a tile would leave prompts hardly any room, only whole tiles stay by themselves.
        """
        has_room = self.is_per_lane or self.is_avoided
        is_narrow = not has_room and n_decode + RIDE_ROWS_MIN >= ATTENTION_TILE_ROWS
        return dataclasses.replace(self, is_known=False) if is_narrow else self


@dataclasses.dataclass(frozen=True, slots=True)
class FlightRoom:
    """The plan's room for flights of prompt rows."""

    chunk_rows: int  # of one flight
    flights_max: int
    n_flights: int  # under way

    @property
    def rows(self) -> int:
        """The rows of the next flight; 0 without room for one."""
        return self.chunk_rows if self.n_flights < self.flights_max else 0


class TilePace:
    """Decides when a tile may leave while streams run: after decode flights left room for its rows."""

    def __init__(self) -> None:
        self._saved_rows, self._n_flights = 0.0, 0

    def save(self, n_rows: float) -> None:
        """Count a decode flight, and the prompt rows that could have left with it or next to it, and did not."""
        self._saved_rows += n_rows
        self._n_flights += 1

    def flight_rows(self, room: FlightRoom, *, is_decoding: bool) -> int:
        """Return how many rows of whole tiles may leave in a separate flight now; 0 for none.

        While streams run, the plan's flights may be smaller than a tile. One tile then leaves after it has waited.
        """
        if not is_decoding or (room.flights_max and room.chunk_rows >= ATTENTION_TILE_ROWS):
            return max(room.chunk_rows, ATTENTION_TILE_ROWS) if room.n_flights < room.flights_max else 0
        has_waited = self._saved_rows >= ATTENTION_TILE_ROWS or self._n_flights >= TILE_FLIGHTS_MAX
        if room.n_flights or not has_waited:
            return 0
        self._saved_rows, self._n_flights = 0.0, 0
        return ATTENTION_TILE_ROWS


def has_time_for_tiles(curves: Iterable[CostCurve], rows_max: int) -> bool:
    """Return whether running streams may wait for a step of one tile, by the prefill curves that are known."""
    known = [curve for curve in curves if curve.is_known]
    fits = rows_max >= ATTENTION_TILE_ROWS
    return fits and all(curve.cost_ns(ATTENTION_TILE_ROWS) <= TILE_STEP_MAX_NS for curve in known)


def n_of_whole_tiles(session: Session) -> int:
    """Return how many of the unsent rows belong to whole tiles of a long prompt."""
    n_prompt = len(session.request.prompt_tokens)
    if n_prompt < LONG_PROMPT_ROWS:
        return 0
    return max(0, n_prompt // ATTENTION_TILE_ROWS * ATTENTION_TILE_ROWS - session.n_sent)
