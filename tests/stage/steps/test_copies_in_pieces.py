"""Copies of lanes in pieces: who goes first, what is copied before rows are written over it, and what ends a copy."""

from __future__ import annotations

import errno
import itertools
from typing import cast

import numpy as np
import pytest

from relayline.stage.engine import fresh_memory, lane_windows
from relayline.stage.engine.cell_state import CellState, Pieces
from relayline.stage.engine.lane_windows import LaneWindows
from relayline.stage.engine.layer_cells import Tensor
from relayline.stage.steps.lane_copies import COPIES_MAX, SLICE_MAX_NS, SLICE_NS, LaneCopies
from relayline.wire.common.errors import NativeError

FORMS = ((Tensor(0, 1, 1),),)
PIECE = 4


class FakePieces:
    """Lanes of bytes. A position keeps its byte until another one is written."""

    piece_tokens, token_ns, copies, forms = PIECE, 0.0, True, FORMS

    def __init__(self) -> None:
        self.memory = {lane: np.zeros(64, np.uint8) for lane in range(4)}
        self.ended: list[int] = []
        self.pieces: list[tuple[str, int, int, int]] = []  # what, lane, first, end
        self.fails_at = -1  # the position whose piece is refused
        self.refuses = False

    def begin(self, lane: int, n_tokens: int) -> int | None:
        return None if self.refuses else lane

    def read(self, source: int, into: CellState, first: int, end: int) -> None:
        self._note("read", source, first, end)
        for begin, until, (part,) in into.spans(first, end):
            part[0, :, 0] = self.memory[source][begin:until]

    def end(self, source: int) -> None:
        self.ended.append(source)

    def write(self, lane: int, state: CellState, first: int, end: int, total: int) -> None:
        self._note("write", lane, first, end)
        for begin, until, (part,) in state.spans(first, end):
            self.memory[lane][begin:until] = part[0, :, 0]

    def copy(self, source: int, target: int, first: int, end: int, total: int) -> None:
        self._note("copy", target, first, end)
        self.memory[target][first:end] = self.memory[source][first:end]

    def _note(self, what: str, lane: int, first: int, end: int) -> None:
        if first <= self.fails_at < end:
            raise NativeError("no more")
        self.pieces.append((what, lane, first, end))


class World:
    def __init__(self) -> None:
        self.copies = LaneCopies()
        self.pieces: FakePieces = FakePieces()
        self.api = cast("Pieces", self.pieces)
        self.stored: dict[int, CellState | None] = {}
        self.filled: dict[int, bool] = {}

    def store(self, key: int, lane: int, n_tokens: int) -> None:
        self.pieces.memory[lane][:n_tokens] = key
        self.copies.store(self.api, key, lane, n_tokens, lambda state: self.stored.__setitem__(key, state))

    def copy(self, source: int, target: int, n_tokens: int) -> None:
        self.copies.copy(self.api, source, target, n_tokens, lambda whole: self.filled.__setitem__(target, whole))

    def fill(self, lane: int, value: int, n_tokens: int) -> None:
        state = CellState.empty(FORMS, n_tokens)[0]
        for _, _, (part,) in state.spans(0, n_tokens):
            part[...] = value
        self.copies.fill(self.api, state, lane, n_tokens, lambda whole: self.filled.__setitem__(lane, whole))

    def piece(self) -> None:
        """Work for as long as one piece takes."""
        self.copies.work(itertools.count(step=SLICE_NS).__next__)

    def values(self, key: int) -> set[int]:
        state = self.stored[key]
        return (
            set()
            if state is None
            else {int(value) for *_, (part,) in state.spans(0, state.n_tokens) for value in part.flat}
        )


@pytest.fixture(name="world")
def world_fixture() -> World:
    return World()


def test_a_lane_is_stored_piece_by_piece_and_only_whole(world: World) -> None:
    world.store(7, lane=1, n_tokens=10)
    for _ in range(2):
        world.piece()
        assert world.stored == {}
    world.piece()
    assert world.values(7) == {7}
    assert world.pieces.pieces == [("read", 1, 0, 4), ("read", 1, 4, 8), ("read", 1, 8, 10)]
    assert world.pieces.ended == [1]
    assert not world.copies


def test_work_ends_with_its_slice_of_time(world: World) -> None:
    world.store(7, lane=1, n_tokens=40)
    world.copies.work(itertools.count(step=SLICE_NS // 3).__next__)
    assert world.pieces.pieces == [("read", 1, first, first + 4) for first in (0, 4, 8)]


def test_a_slice_grows_with_the_steps_and_has_a_bound(world: World) -> None:
    world.store(7, lane=1, n_tokens=64)
    n_pieces = []
    for step_ns in (SLICE_NS, 20 * SLICE_NS, 1_000 * SLICE_NS):
        before = len(world.pieces.pieces)
        world.copies.work(itertools.count(step=SLICE_NS).__next__, step_ns)
        n_pieces.append(len(world.pieces.pieces) - before)
    assert n_pieces == [1, 2, -(-SLICE_MAX_NS // SLICE_NS)]


def test_a_new_stream_pays_for_no_more_than_it_writes(world: World) -> None:
    world.store(7, lane=1, n_tokens=40)
    world.copies.before_rows(1, 3)
    world.pieces.memory[1][:3] = 99
    assert world.pieces.pieces[-1][3] <= PIECE
    world.copies.before_rows(2, 40)
    assert len(world.pieces.pieces) == 1, "another lane's rows write over nothing"
    world.copies.before_rows(1, 9)
    world.pieces.memory[1][3:9] = 99
    while world.copies:
        world.piece()
    assert world.values(7) == {7}


def test_a_lane_that_is_filled_waits_for_its_former_rows_alone(world: World) -> None:
    world.store(5, lane=0, n_tokens=8)
    world.store(7, lane=1, n_tokens=8)
    world.fill(1, 9, 8)
    assert not world.copies.fills_next
    for _ in range(4):
        world.piece()
    assert [piece[:2] for piece in world.pieces.pieces] == [("read", 1)] * 2 + [("write", 1)] * 2
    assert world.values(7) == {7}
    assert world.filled == {1: True}
    assert world.stored.get(5) is None, "nobody waits for this one, so it comes last"


def test_a_chain_of_copies_makes_way_link_by_link(world: World) -> None:
    """A kept lane goes to the tier, another lane is copied there, and that one gets new rows: all at the same time."""
    world.store(7, lane=3, n_tokens=16)
    world.pieces.memory[0][:16] = 8
    world.copy(0, 3, 16)
    world.copies.before_rows(0, 5)
    world.pieces.memory[0][:5] = 99
    assert world.pieces.pieces == [("read", 3, 0, 4), ("copy", 3, 0, 4), ("read", 3, 4, 5), ("copy", 3, 4, 5)]
    while world.copies:
        world.piece()
    assert world.values(7) == {7}
    assert set(world.pieces.memory[3][:16].tolist()) == {8}


def test_a_lane_that_is_needed_now_is_filled_now(world: World) -> None:
    world.store(7, lane=1, n_tokens=8)
    world.fill(1, 9, 8)
    world.copies.settle(1)
    assert world.filled == {1: True}
    assert world.values(7) == {7}
    assert set(world.pieces.memory[1][:8].tolist()) == {9}


def test_the_end_of_a_session_ends_its_copy_and_no_other(world: World) -> None:
    world.store(7, lane=1, n_tokens=8)
    world.fill(1, 9, 8)
    world.piece()
    world.copies.cancel(1)
    assert world.filled == {1: False}
    assert not world.copies.is_filling(1)
    world.piece()
    assert world.values(7) == {7}


def test_a_piece_that_fails_ends_its_copy_alone(world: World) -> None:
    world.store(7, lane=1, n_tokens=12)
    world.store(8, lane=2, n_tokens=12)
    world.pieces.fails_at = 5
    while world.copies:
        world.piece()
    assert world.stored == {7: None, 8: None}
    assert world.pieces.ended == [1, 2]
    world.pieces.fails_at = 0
    world.fill(1, 9, 8)
    world.copies.settle(1)
    assert world.filled == {1: False}


def test_only_so_many_lanes_are_stored_at_once(world: World) -> None:
    for key in range(1, COPIES_MAX + 2):
        world.store(key, lane=key % 4, n_tokens=8)
    assert world.stored == {COPIES_MAX + 1: None}
    assert world.copies.n_stores == COPIES_MAX
    world.copies.drop_all()
    assert set(world.stored.values()) == {None}
    world.pieces.refuses = True
    world.store(50, lane=1, n_tokens=8)
    assert world.stored[50] is None
    assert not world.copies


def test_a_state_that_is_wanted_before_it_is_stored_is_finished(world: World) -> None:
    world.store(7, lane=1, n_tokens=12)
    assert world.copies.stores(7)
    world.copies.finish(7)
    assert world.values(7) == {7}
    world.store(8, lane=2, n_tokens=12)
    assert world.copies.finish_stores()
    assert not world.copies.finish_stores()
    assert world.values(8) == {8}


def test_a_host_without_memory_for_a_copy_stores_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(fileno: int, length: int, **_: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(fresh_memory.mmap, "mmap", refused)
    world.pieces.begin = lambda lane, n_tokens: pytest.fail("a sequence is held for nothing")  # type: ignore[method-assign]
    world.store(7, lane=1, n_tokens=8)
    assert world.stored == {7: None}
    assert not world.copies


# --- windows beside the cells -----------------------------------------------------------------------------------------

LONG_WINDOW = np.full(2 * lane_windows.MOVE_BYTES + 1, 3, np.uint8)  # three moves
SHORT_WINDOW = np.full(5, 4, np.uint8)
WINDOWS = LaneWindows(((3, LONG_WINDOW), (6, SHORT_WINDOW)), (8, np.full(9, 5, np.uint8)))


class WindowPieces(FakePieces):
    """Whose lanes have windows, too."""

    window_positions = 2

    def __init__(self) -> None:
        super().__init__()
        self.put: dict[int, LaneWindows] = {}

    def put_windows(self, lane: int, windows: LaneWindows, n_tokens: int) -> None:
        self._note("windows", lane, n_tokens, n_tokens)
        if self.fails_at == n_tokens:
            raise NativeError("no such window")
        self.put[lane] = windows


@pytest.fixture(name="windowed")
def windowed_fixture(world: World) -> World:
    world.pieces = WindowPieces()
    world.api = cast("Pieces", world.pieces)
    return world


def with_windows(world: World, key: int = 7) -> CellState:
    """Store a lane of 8 tokens with its windows; returns the state as it is read again."""
    world.pieces.memory[1][:8] = key
    world.copies.store(world.api, key, 1, 8, lambda state: world.stored.__setitem__(key, state), WINDOWS)
    while world.copies:
        world.piece()
    state = world.stored[key]
    assert state is not None
    return CellState.read(state.data, FORMS, has_windows=True)


def values_of(windows: LaneWindows) -> list[tuple[int, int, int]]:
    """Of each: its position, its size and what it is filled with."""
    assert all(len(np.unique(window)) == 1 for _, window in (*windows.checkpoints, windows.end))
    return [(at, window.nbytes, int(window[0])) for at, window in (*windows.checkpoints, windows.end)]


def test_windows_are_stored_behind_the_cells_in_moves(windowed: World) -> None:
    windowed.pieces.memory[1][:8] = 7
    ends: list[CellState | None] = []
    windowed.copies.store(windowed.api, 7, 1, 8, ends.append, WINDOWS)
    n_pieces = 0
    while windowed.copies:
        assert ends == []
        windowed.piece()
        n_pieces += 1
    assert n_pieces == 2 + 3 + 1 + 1
    (state,) = ends
    assert state is not None
    again = CellState.read(state.data, FORMS, has_windows=True)
    assert again.windows is not None
    assert values_of(again.windows) == values_of(WINDOWS)
    with pytest.raises(NativeError):
        CellState.read(state.data, FORMS)


def test_a_lane_gets_its_windows_last_and_its_checkpoints_outlive_the_state(windowed: World) -> None:
    state = with_windows(windowed)
    for n_tokens, n_kept in ((8, 2), (6, 2), (3, 1)):
        windowed.pieces.pieces.clear()
        windowed.copies.fill(windowed.api, state, 2, n_tokens, lambda whole: windowed.filled.__setitem__(2, whole))
        while windowed.copies:
            windowed.piece()
        assert [piece[0] for piece in windowed.pieces.pieces] == ["write"] * (1 + (n_tokens > PIECE)) + ["windows"]
        pieces = cast("WindowPieces", windowed.pieces)
        assert values_of(pieces.put[2]) == [*values_of(WINDOWS)[:n_kept], (8, 9, 5)]
        assert not any(np.shares_memory(window, state.data) for _, window in pieces.put[2].checkpoints)
    assert windowed.filled == {2: True}


def test_a_lane_whose_cells_are_copied_cannot_go_on_before_its_windows_are_there(windowed: World) -> None:
    windowed.copies.copy(windowed.api, 1, 2, 8, lambda whole: windowed.filled.__setitem__(2, whole), WINDOWS)
    windowed.piece()
    windowed.copies.before_rows(1, 60)
    assert windowed.filled == {}
    assert windowed.copies.is_filling(2)
    windowed.copies.settle(2)
    assert windowed.filled == {2: True}
    assert cast("WindowPieces", windowed.pieces).put == {2: WINDOWS}


def test_rows_written_over_stored_cells_wait_for_no_windows(windowed: World) -> None:
    windowed.pieces.memory[1][:8] = 7
    windowed.copies.store(windowed.api, 7, 1, 8, lambda state: windowed.stored.__setitem__(7, state), WINDOWS)
    windowed.copies.before_rows(1, 60)
    windowed.pieces.memory[1][:] = 99
    assert windowed.stored == {}
    windowed.copies.before_rows(1, 61)
    windowed.copies.finish(7)
    assert windowed.values(7) == {7}


def test_a_window_that_is_refused_ends_its_copy(windowed: World) -> None:
    state = with_windows(windowed)
    windowed.pieces.fails_at = 8
    windowed.copies.fill(windowed.api, state, 2, 8, lambda whole: windowed.filled.__setitem__(2, whole))
    windowed.copies.settle(2)
    assert windowed.filled == {2: False}
    assert not windowed.copies


def test_a_host_without_memory_for_checkpoints_fills_no_lane(windowed: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(fileno: int, length: int, **_: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    state = with_windows(windowed)
    monkeypatch.setattr(fresh_memory.mmap, "mmap", refused)
    windowed.copies.fill(windowed.api, state, 2, 8, lambda whole: windowed.filled.__setitem__(2, whole))
    assert windowed.filled == {2: False}
    assert not windowed.copies


def test_which_windows_reach_which_tokens() -> None:
    assert WINDOWS.at(3, 2) is LONG_WINDOW
    assert WINDOWS.at(8, 2) is WINDOWS.at(7, 2) is WINDOWS.end[1]
    assert WINDOWS.at(6, 2) is SHORT_WINDOW
    assert WINDOWS.at(5, 2) is WINDOWS.at(9, 2) is WINDOWS.at(9, 8) is None
    assert WINDOWS.at(1, 8) is WINDOWS.end[1], "the lane is no longer than a window"
    assert WINDOWS.at(1, 7) is None
