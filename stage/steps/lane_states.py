"""Lanes to the tier and back, and from lane to lane. Decode thread, but where a method says otherwise.

Where the engine copies in pieces, a copy is only begun here, and goes on between steps (`stage.steps.lane_copies`).
Other lanes are copied at once: those with recurrent states or images, and on some engines all. So are the windows of
lanes that keep these alone. Copies that would hold up other streams for long are not made (WHOLE_BYTES_MAX).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from relayline.stage.engine.cell_state import CellState, Pieces, bytes_of, is_cells
from relayline.stage.engine.tier import State, Tier, TierFigures
from relayline.stage.queue_types import QueuedFrame
from relayline.stage.steps.lane_copies import LaneCopies
from relayline.stage.steps.step_types import Engine, Saver
from relayline.wire.common.bounds import CTX_TOKENS_MAX
from relayline.wire.common.errors import PositionGapError, RelaylineError
from relayline.wire.envelopes.frames import Flag
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

WHOLE_BYTES_MAX = 256 << 20  # of a lane that is copied in one go beside other streams: about 100 ms
LONG_BYTES = 8 << 20  # of a copy whose session's rows wait for it; shorter ones are finished when the rows come

_Key = tuple[int, int]  # QueuedFrame.session_key


class LaneStates:
    """One stage's store of lanes that others took, and its copies of lanes."""

    def __init__(self, engine: Engine, saver: Saver | None, tier: Tier | None, *, long_bytes: int = LONG_BYTES) -> None:
        """Without a tier nothing is kept."""
        self._engine, self._saver, self._tier, self._long_bytes = engine, saver, tier, long_bytes
        self.copies = LaneCopies()
        self.on_dropped: Callable[[int], None] = lambda key: None
        """Called with the key of each state that is lost, or was not kept; in any thread."""
        if tier is not None:
            tier.on_dropped = lambda key: self.on_dropped(key)
        self._lock = threading.Lock()
        self._awaited: dict[_Key, Future[None]] = {}  # sessions whose rows wait until their lane is filled
        self._stored: dict[int, tuple[Future[None], int]] = {}  # by key, states on their way into the tier: tokens

    @property
    def saver(self) -> Saver | None:
        """The part of an engine that copies lanes' states out and back."""
        return self._saver

    def _pieces(self, lane: int) -> Pieces | None:
        return self._saver.pieces_of(lane) if self._saver is not None else None

    # --- into the tier ------------------------------------------------------------------------------------------------

    def store(self, key: int, lane: int, n_tokens: int, *, is_alone: bool = True) -> None:
        """Store the state of a lane with this many tokens, where there is room for it.

        is_alone: no other stream would have to wait.
        """
        try:
            self._store(key, lane, n_tokens, is_alone=is_alone)
        except RelaylineError:  # the engine cannot save it
            self.on_dropped(key)

    def _store(self, key: int, lane: int, n_tokens: int, *, is_alone: bool) -> None:
        tier, saver = self._tier, self._saver
        if tier is None or saver is None or self.copies.stores(key) or tier.has(key):
            return
        pieces = self._pieces(lane)
        n_bytes = _bytes(pieces, n_tokens) if pieces is not None else saver.size(lane)
        whole_bytes = pieces.window_bytes(n_tokens) if pieces is not None else n_bytes
        if not tier.has_room(n_bytes) or (whole_bytes > WHOLE_BYTES_MAX and not is_alone):
            self.on_dropped(key)
            return
        if pieces is None:
            tier.store(key, n_tokens, saver.save(lane))
            return
        saver.settle(lane)
        windows = pieces.windows(lane, n_tokens)
        with self._lock:
            self._stored[key] = Future(), n_tokens

        def ended(state: CellState | None) -> None:
            if state is not None:
                tier.store(key, n_tokens, state.data)
            else:
                self.on_dropped(key)
            with self._lock:
                waited = self._stored.pop(key, None)
            if waited is not None:
                waited[0].set_result(None)

        self.copies.store(pieces, key, lane, n_tokens, ended, windows)

    def store_all(self, lanes: Sequence[tuple[int, int, int]]) -> None:
        """Store lanes that are all given away now: key, lane and tokens of each, the most useful first.

        Of those that are copied whole, and of windows, only so many that others wait no longer than for one.
        """
        whole_bytes = 0
        for key, lane, n_tokens in lanes:
            if self._saver is not None:
                pieces = self._pieces(lane)
                whole_bytes += self._saver.size(lane) if pieces is None else pieces.window_bytes(n_tokens)
            if whole_bytes <= WHOLE_BYTES_MAX:
                self.store(key, lane, n_tokens, is_alone=False)

    # --- out of it ----------------------------------------------------------------------------------------------------

    def restore(
        self, key: int, lane: int, n_tokens: int, done: Callable[[bool], None], *, is_alone: bool = True
    ) -> None:
        """Restore the first n_tokens of a key's state into an empty lane; `done` gets whether the lane has them, at
        once or later.

        Raises PositionGapError, and leaves the lane empty, where the state is missing, shorter, or cannot be rewound.
        """
        self.copies.finish(key)
        found = self._tier.fetch(key) if self._tier is not None else None
        if found is None or self._saver is None:
            raise PositionGapError(
                f"this stage no longer has the prefix {key:x}, of which {n_tokens} tokens are wanted"
            )
        n_stored, state = found
        if n_tokens > n_stored:
            raise PositionGapError(f"the prefix {key:x} has {n_stored} tokens, {n_tokens} are wanted")
        try:
            pieces = self._pieces(lane) if is_cells(state) else None
            if pieces is not None:
                self._fill(pieces, state, lane, n_tokens, done, is_alone=is_alone)
                return
            self._restore_whole(key, lane, n_tokens, found, is_alone=is_alone)
        except RelaylineError as error:
            self._engine.clear(lane)
            self.forget(key)  # it would be refused again
            raise PositionGapError(f"the prefix {key:x} cannot be brought back: {error.message}") from error
        done(True)

    def _fill(
        self, pieces: Pieces, data: State, lane: int, n_tokens: int, done: Callable[[bool], None], *, is_alone: bool
    ) -> None:
        state = CellState.read(data, pieces.forms, has_windows=pieces.window_positions > 0)
        if state.windows is not None:
            window = state.windows.at(n_tokens, pieces.window_positions)
            if window is None:
                raise PositionGapError(f"its window at {n_tokens} was not kept")
            _check_size(window.nbytes, is_alone=is_alone)
        self.copies.fill(pieces, state, lane, n_tokens, done)

    def _restore_whole(self, key: int, lane: int, n_tokens: int, found: tuple[int, State], *, is_alone: bool) -> None:
        n_stored, state = found
        assert self._saver is not None
        _check_size(state.nbytes, is_alone=is_alone)
        self.copies.before_rows(lane, CTX_TOKENS_MAX)  # they are all written at once, and not each at its place
        if self._saver.restore(lane, state) != n_stored:
            raise PositionGapError(f"the prefix {key:x} has other content than was stored")
        if n_tokens < n_stored:
            self._engine.check_rewind(lane, n_tokens)
            self._engine.drop_from(lane, n_tokens)

    # --- from lane to lane --------------------------------------------------------------------------------------------

    def copy(self, source: int, target: int, n_tokens: int, done: Callable[[bool], None]) -> None:
        """Let an empty lane hold the first n_tokens of another one; `done` as of `restore`. Raises as
        `Engine.copy_prefix`.
        """
        pieces, windows = self._pieces(source), None
        if pieces is not None and pieces.copies and n_tokens:
            assert self._saver is not None
            self._saver.settle(source)
            try:
                windows = pieces.windows(source, n_tokens)
            except PositionGapError:  # llama.cpp's own copy has more of it
                pieces = None
        if pieces is None or not pieces.copies or not n_tokens:
            self.copies.before_rows(target, self._engine.lane_tokens(source))  # they are all written at once
            self._engine.copy_prefix(source, target, n_tokens)
            done(True)
            return
        self._engine.clear(target)
        self.copies.copy(pieces, source, target, n_tokens, done, windows)
        if _bytes(pieces, n_tokens) <= self._long_bytes:
            self.copies.settle(target)

    # --- who waits ----------------------------------------------------------------------------------------------------

    def hold(self, frame: QueuedFrame) -> Future[None] | None:
        """Return what the rest of a session waits for behind this control; None: for nothing. Any thread.

        The decode thread says so by `filled`.
        """
        pieces = self._saver.pieces if self._saver is not None else None
        if pieces is None or _bytes(pieces, frame.position) <= self._long_bytes:
            return None
        if not frame.flags & Flag.RESTORE and not pieces.copies:
            return None
        with self._lock:
            return self._awaited.setdefault(frame.session_key, Future())

    def filled(self, key: _Key) -> None:
        """The lane of a session is filled, or will not be."""
        with self._lock:
            waited = self._awaited.pop(key, None)
        if waited is not None:
            waited.set_result(None)

    def forget_route(self, route_id: int) -> None:
        """No session of the route waits any more."""
        with self._lock:
            self._awaited = {key: future for key, future in self._awaited.items() if key[0] != route_id}

    def begin(self, key: int) -> Future[None] | None:
        """Begin to read a state that is on the disk alone; None where there is nothing to wait for. Any thread."""
        with self._lock:
            if (stored := self._stored.get(key)) is not None:
                return stored[0]
        return self._tier.begin(key) if self._tier is not None else None

    # --- the rest -----------------------------------------------------------------------------------------------------

    def forget(self, key: int) -> None:
        """Give a state's place to others."""
        if self._tier is not None:
            self._tier.forget(key)

    def give_back(self) -> None:
        """Free the memory of an automatic tier. Any thread."""
        if self._tier is not None:
            self._tier.give_back()

    def tell(self, message: pb.DescribeResponse) -> None:
        """Describe the stored states, and the speed of restoring them, in a handshake. Any thread."""
        if self._tier is None or self._saver is None:
            return
        message.stores, message.keeps_notes, message.stores_on_disk = True, True, self._tier.is_on_disk
        message.restore_token_ns, message.store_from_ns = self._saver.token_ns, self._tier.store_from_ns
        message.stored.extend(self.stored())

    def stored(self) -> list[pb.StoredState]:
        """Return the stored states, and those on their way into the tier. Any thread."""
        if self._tier is None or self._saver is None:
            return []
        stored = self._tier.stored()
        with self._lock:
            stored |= {key: n_tokens for key, (_, n_tokens) in self._stored.items()}
        return [pb.StoredState(key=key, n_tokens=n_tokens) for key, n_tokens in stored.items()]

    def notes(self, request: pb.NotesRequest) -> pb.NotesResponse:
        """Keep a coordinator's notes on stored states, and tell the known ones if they are wanted. Any thread."""
        tier = self._tier
        if tier is None:
            return pb.NotesResponse()
        for each in request.notes:
            tier.note(each.key, each.note)
        with self._lock:
            coming = tuple(self._stored)
        known = tier.notes(coming) if request.wants_known else {}
        return pb.NotesResponse(notes=[pb.StoredNote(key=key, note=note) for key, note in known.items()])

    def count(self, message: pb.StatusResponse) -> None:
        """Add the tier's contents and counters to a stage's counters. Any thread."""
        figures = self.figures()
        message.tier_memory_bytes, message.tier_disk_bytes = figures.memory_bytes, figures.disk_bytes
        message.tier_states, message.tier_hits, message.tier_misses = figures.n_states, figures.n_hits, figures.n_misses

    def figures(self) -> TierFigures:
        """Return the tier's contents and counters. Any thread."""
        return self._tier.figures() if self._tier is not None else TierFigures()

    def close(self) -> None:
        """Free everything except the disk's files; what was on its way there is finished."""
        if self._tier is not None and self._tier.is_on_disk:
            self.copies.finish_stores()
        self.copies.drop_all()
        if self._tier is not None:
            self._tier.close()


def _bytes(pieces: Pieces, n_tokens: int) -> int:
    """Return about how many bytes are copied of a lane with so many tokens. Any thread."""
    return n_tokens * bytes_of(pieces.forms) + pieces.window_bytes(n_tokens)


def _check_size(n_bytes: int, *, is_alone: bool) -> None:
    if n_bytes > WHOLE_BYTES_MAX and not is_alone:
        raise PositionGapError(f"its {n_bytes} bytes would hold up other streams")
