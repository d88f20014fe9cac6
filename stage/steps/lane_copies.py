"""Copies of lanes that are under way, in pieces between steps: into the tier, out of it, and from lane to lane. Pure.

The engine says how a piece is copied (`stage.engine.lane_pieces`); this says which comes next. House rules:

* A copy's source may be given away as soon as it is begun. Before rows are written over positions that are still to be
  copied, those are copied (`before_rows`). So nobody waits for a copy to end, and a step pays for no more positions
  than it writes itself.
* A lane that is being filled belongs to a session whose rows wait (`stage.steps.restores`). If they do not, the copy is
  finished at once (`settle`). If the session ends, it is dropped (`cancel`).
* Lanes that are being filled come first: clients wait for them. But one that is still to be read is read before.
* Only a whole copy is handed to whoever asked for it.
* Windows whose cells alone are kept (`stage.engine.lane_windows`) are taken when a copy begins. They are moved after
  the cells, and a lane that is being filled gets them at the end: before that it cannot go on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from relayline.stage.engine.cell_state import CellState, Pieces
from relayline.stage.engine.lane_windows import LaneWindows, Moves
from relayline.wire.common.errors import RelaylineError

SLICE_NS, SLICE_MAX_NS = 3_000_000, 10_000_000  # of copying between two steps; a piece that is begun is finished
SLICE_SHARE = 0.1  # of the step before: long steps are followed by longer slices, or a lane would take minutes
COPIES_MAX = 8  # into the tier; each has memory for a whole lane


@dataclasses.dataclass(slots=True, eq=False)
class _Copy:
    """One copy. Its source or its target is a lane, or both."""

    pieces: Pieces
    n_tokens: int
    done: Callable[[bool], None]
    state: CellState | None = None  # what is filled from a lane, or what a lane is filled from
    key: int = 0  # of the state that is being stored
    read_by: int | None = None  # what the engine reads the source by
    source: int | None = None  # the lane that is read
    target: int | None = None  # the lane that is filled
    windows: LaneWindows | None = None
    moves: Moves = dataclasses.field(default_factory=Moves)  # of windows, from one array to another
    at: int = 0  # positions before it have been copied; behind them each move counts as one, and so does `put_windows`

    @property
    def fills(self) -> bool:
        """Whether a session waits for it."""
        return self.target is not None

    @property
    def n_all(self) -> int:
        """Where it ends."""
        return self.n_tokens + len(self.moves) + (self.fills and self.windows is not None)

    @property
    def next_end(self) -> int:
        """Where the next piece ends."""
        return min(self.at + self.pieces.piece_tokens, self.n_tokens) if self.at < self.n_tokens else self.at + 1

    def advance(self, end: int) -> None:
        """Copy up to `end`, which is at most `next_end`. Raises RelaylineError."""
        first, self.at = self.at, end
        number = first - self.n_tokens
        if 0 <= number < len(self.moves):
            self.moves.make(number)
        elif number >= 0 and self.target is not None and self.windows is not None:
            self.pieces.put_windows(self.target, self.windows, self.n_tokens)
        elif self.state is not None and self.read_by is not None:
            self.pieces.read(self.read_by, self.state, first, end)
        elif self.state is not None and self.target is not None:
            self.pieces.write(self.target, self.state, first, end, self.n_tokens)
        elif self.source is not None and self.target is not None:
            self.pieces.copy(self.source, self.target, first, end, self.n_tokens)


class LaneCopies:
    """All copies under way in one engine. Decode thread only."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []  # in the order in which they were asked for

    def __bool__(self) -> bool:
        return bool(self._copies)

    @property
    def n_stores(self) -> int:
        """Copies into the tier."""
        return sum(not copy.fills for copy in self._copies)

    @property
    def fills_next(self) -> bool:
        """Whether the next piece goes into a lane, which voids the logits of the last step."""
        return bool(self._copies) and self._next().fills

    def stores(self, key: int) -> bool:
        """Return whether a state of this key is on its way into the tier."""
        return any(copy.key == key and not copy.fills for copy in self._copies)

    def is_filling(self, lane: int) -> bool:
        """Return whether a lane is being filled."""
        return any(copy.target == lane for copy in self._copies)

    # --- beginnings ---------------------------------------------------------------------------------------------------

    def store(
        self,
        pieces: Pieces,
        key: int,
        lane: int,
        n_tokens: int,
        done: Callable[[CellState | None], None],
        windows: LaneWindows | None = None,
    ) -> None:
        """Copy the first n_tokens of a lane; `done` gets the state, or None: it was given up, or never begun.

        windows: the lane's, where it has some.
        """
        if self.n_stores >= COPIES_MAX:
            done(None)
            return
        try:
            state, moves = CellState.empty(pieces.forms, n_tokens, windows)
        except OSError:  # the system has no memory for it
            done(None)
            return
        read_by = pieces.begin(lane, n_tokens)
        if read_by is None:
            done(None)
            return

        def ended(is_whole: bool) -> None:
            pieces.end(read_by)
            done(state if is_whole else None)

        self._copies.append(_Copy(pieces, n_tokens, ended, state, key, read_by, source=lane, moves=moves))

    def fill(self, pieces: Pieces, state: CellState, lane: int, n_tokens: int, done: Callable[[bool], None]) -> None:
        """Fill an empty lane with the first n_tokens of a state; `done` gets whether it has them."""
        windows, moves = state.windows, Moves()
        if windows is not None:
            try:
                windows, moves = windows.taken_out(n_tokens)
            except OSError:  # the system has no memory for it
                done(False)
                return
        self._copies.append(_Copy(pieces, n_tokens, done, state, target=lane, windows=windows, moves=moves))

    def copy(
        self,
        pieces: Pieces,
        source: int,
        target: int,
        n_tokens: int,
        done: Callable[[bool], None],
        windows: LaneWindows | None = None,
    ) -> None:
        """Fill an empty lane with the first n_tokens of another one. windows: that one's, where it has some."""
        self._copies.append(_Copy(pieces, n_tokens, done, source=source, target=target, windows=windows))

    # --- progress -----------------------------------------------------------------------------------------------------

    def work(self, clock: Callable[[], int], step_ns: int = 0) -> None:
        """Copy pieces for a slice of time by this clock, at least one. step_ns: what the step before took."""
        until_ns = clock() + min(SLICE_MAX_NS, max(SLICE_NS, round(SLICE_SHARE * step_ns)))
        while self._copies:
            copy = self._next()
            self._advance(copy, copy.next_end)
            if clock() >= until_ns:
                return

    def before_rows(self, lane: int, end: int) -> None:
        """Positions of a lane up to `end` are about to be written: copies that still read them do so now."""
        for copy in list(self._copies):
            if copy.source == lane and copy.at < end:
                self._advance(copy, min(end, copy.n_tokens))

    def settle(self, lane: int) -> None:
        """A lane that is being filled is needed now."""
        for copy in [copy for copy in self._copies if copy.target == lane]:
            self._advance(copy, copy.n_all)

    def finish(self, key: int) -> None:
        """The state of this key is needed in the tier now."""
        for copy in [copy for copy in self._copies if copy.key == key and not copy.fills]:
            self._advance(copy, copy.n_all)

    def finish_stores(self) -> bool:
        """Let the stores be done now; returns whether there were any."""
        stores = [copy for copy in self._copies if not copy.fills]
        for copy in stores:
            self._advance(copy, copy.n_all)
        return bool(stores)

    def cancel(self, lane: int) -> None:
        """Nobody needs the lane that is being filled any more."""
        for copy in [copy for copy in self._copies if copy.target == lane]:
            self._end(copy, is_whole=False)

    def drop_all(self) -> None:
        """The engine is about to be freed."""
        for copy in list(self._copies):
            self._end(copy, is_whole=False)

    def _next(self) -> _Copy:
        """Return the copy whose turn it is."""
        for at, copy in enumerate(self._copies):
            if not copy.fills:
                continue
            return next((other for other in self._copies[:at] if other.source == copy.target), copy)
        return self._copies[0]

    def _advance(self, copy: _Copy, end: int) -> None:
        try:
            while copy.at < end and copy in self._copies:
                part = min(end, copy.next_end)
                if copy.target is not None:
                    self.before_rows(copy.target, min(part, copy.n_tokens))
                copy.advance(part)
        except RelaylineError:
            self._end(copy, is_whole=False)
            return
        if copy.at >= copy.n_all:
            self._end(copy, is_whole=True)

    def _end(self, copy: _Copy, *, is_whole: bool) -> None:
        if copy in self._copies:
            self._copies.remove(copy)
            copy.done(is_whole)
