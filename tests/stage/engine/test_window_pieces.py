"""Lanes that keep the cells of sliding windows alone, copied in pieces: the other cells by position, windows apart."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relayline.coordinator.model.cuts import balanced_cuts
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.split import split_model
from relayline.stage.engine import fresh_memory, ggml, lane_rewinds
from relayline.stage.engine.cell_state import CellState, Pieces, is_cells
from relayline.stage.engine.kv_state import cells_of
from relayline.stage.engine.lane_pieces import OwnPieces
from relayline.stage.engine.lane_state import read_lane, read_partial
from relayline.stage.engine.lane_windows import LaneWindows
from relayline.stage.engine.tier import Tier
from relayline.stage.engine.tier_disk import TierDisk
from relayline.stage.engine.window_copies import WindowCopies
from relayline.stage.steps import lane_states
from relayline.stage.steps.lane_states import LaneStates
from relayline.wire.common.errors import NativeError, PositionGapError
from tests.support.lane_texts import CLOSE, MAX_ROWS, N_LANES, Lanes, far
from tests.support.tiny_families import N_HEADS, N_KV_HEADS
from tests.support.tiny_models import RECIPES, make_tiny

pytestmark = pytest.mark.kernels

CTX, WINDOW = 1_024, 8
KEY, OTHER = 7, 8
NAMES = ("gpt-oss", "gemma2", "gemma3:27b", "gemma3:pattern", "gemma4", "cohere2", "olmo2:windows", "mimo2", "step35",
         "exaone-moe")  # fmt: skip
WIDE = "cohere2:wide"  # heads as wide as a block of quantised values
KINDS = (*((name, "f16") for name in NAMES), (WIDE, "f16"), (WIDE, "q8_0"), (WIDE, "q4_0"))
LENGTHS = (5, WINDOW, WINDOW + 1, 300, 600)
# Of mixtures of experts and other heads than our kernels take, see tests/stage/engine/test_window_cells.py.
LOOSE = 1e-2
SAME = 0 if ggml.attends_own_cells(n_rows=1, n_heads=N_HEADS, n_kv_heads=N_KV_HEADS) else LOOSE


class Stage:
    """A slice whose lanes are stored, restored and copied while another lane computes."""

    def __init__(self, name: str, kv_type: str, directory: Path) -> None:
        model = make_tiny(name, directory / "model.gguf")
        split_model(model, directory / "out", cuts=balanced_cuts(inspect_model(model), 2))
        self.lanes = Lanes(directory / "out" / "stage-0.gguf", "per-lane", ctx_tokens=CTX, kv_type=kv_type)
        self.engine = self.lanes.engine
        self.begin()

    def begin(self, tier: Tier | None = None) -> None:
        for lane in range(N_LANES):
            self.engine.clear(lane)
        self.dropped: list[int] = []
        self.states = LaneStates(self.engine, self.engine.saved, tier or Tier(1 << 30), long_bytes=0)
        self.states.on_dropped = self.dropped.append

    @property
    def pieces(self) -> Pieces:
        pieces = self.engine.saved.pieces
        assert isinstance(pieces, OwnPieces)
        return pieces

    def read(self, lane: int, text: int, end: int, first: int = 0, marks: tuple[int, ...] = ()) -> None:
        """Let a lane read a text up to a position, with checkpoints at these ones."""
        edges = sorted({first, end, *range(first, end, MAX_ROWS), *(at for at in marks if first < at <= end)})
        for at, until in itertools.pairwise(edges):
            self.lanes.decode((lane, text, at, until))
            if until in marks:
                self.engine.checkpoint(lane)

    def next_rows(self, lane: int, text: int, first: int, n_rows: int = 20) -> np.ndarray:
        """Rows of a lane that goes on with its text, one by one."""
        return np.concatenate([self.lanes.decode((lane, text, at, at + 1))[0] for at in range(first, first + n_rows)])

    def work(self, lane: int | None = None, text: int = 2) -> int:
        """Let all copies end, piece by piece, while a lane computes; returns how many slices that took."""
        n_slices = 0
        while self.states.copies:
            if lane is not None and n_slices < 50:
                at = self.engine.lane_tokens(lane)
                self.states.copies.before_rows(lane, at + 1)
                self.lanes.decode((lane, text, at, at + 1))
            self.states.copies.work(iter(range(0, 1 << 60, 1 << 40)).__next__)  # a slice is one piece
            n_slices += 1
        return n_slices

    def store(self, lane: int, n_tokens: int) -> np.ndarray:
        self.states.store(KEY, lane, n_tokens, is_alone=False)
        self.work(3)
        return self.stored()

    def stored(self) -> np.ndarray:
        tier = self.states._tier
        assert tier is not None
        found = tier.fetch(KEY)
        assert found is not None
        return found[1]

    def put(self, data: np.ndarray, n_tokens: int) -> None:
        tier = self.states._tier
        assert tier is not None
        tier.store(KEY, n_tokens, data)

    def restore(self, lane: int, n_tokens: int, *, is_alone: bool = False) -> bool:
        ends: list[bool] = []
        self.states.restore(KEY, lane, n_tokens, ends.append, is_alone=is_alone)
        self.work(3)
        return ends == [True]

    def copy(self, source: int, target: int, n_tokens: int) -> bool:
        ends: list[bool] = []
        self.states.copy(source, target, n_tokens, ends.append)
        self.work(3)
        return ends == [True]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], Stage]]:
    found: dict[tuple[str, str], Stage] = {}
    narrow = RECIPES["cohere2"]
    half: dict[str, Any] = {"attention.head_count": N_HEADS // 2, "attention.head_count_kv": N_KV_HEADS // 2}
    RECIPES[WIDE] = dataclasses.replace(narrow, values={**narrow.values, **half})

    def open_it(name: str, kv_type: str) -> Stage:
        if (name, kv_type) not in found:
            found[name, kv_type] = Stage(name, kv_type, tmp_path_factory.mktemp("model"))
        found[name, kv_type].begin()
        return found[name, kv_type]

    yield open_it
    del RECIPES[WIDE]
    for stage in found.values():
        stage.engine.close()


@pytest.fixture(params=KINDS, ids=" ".join)
def stage(request: pytest.FixtureRequest, opened: Callable[[str, str], Stage]) -> Stage:
    return opened(*request.param)


@pytest.fixture(params=["gpt-oss", "gemma3:pattern"])
def one(request: pytest.FixtureRequest, opened: Callable[[str, str], Stage]) -> Stage:
    return opened(request.param, "f16")


# --- the same rows ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(20)
@pytest.mark.parametrize("n_tokens", LENGTHS)
def test_a_lane_goes_on_as_if_it_had_not_been_away(n_tokens: int, stage: Stage) -> None:
    """Stored while others compute, its own lane given away meanwhile, and put into two others."""
    engine, middle = stage.engine, n_tokens // 2
    assert engine.attention.keeps_window
    stage.read(0, 0, n_tokens, marks=(middle,))
    whole = engine.saved.save(0)
    stage.states.store(KEY, 0, n_tokens, is_alone=False)
    stage.states.copies.work(iter(range(0, 1 << 60, 1 << 40)).__next__)
    assert stage.copy(0, 1, n_tokens)
    engine.clear(0)
    stage.work(0)  # another stream has the lane
    assert stage.restore(2, n_tokens)
    assert [engine.lane_tokens(lane) for lane in (1, 2)] == [n_tokens, n_tokens]
    engine.clear(3)
    stage.read(3, 0, n_tokens, marks=(middle,))
    expected, copied, restored = (stage.next_rows(lane, 0, n_tokens) for lane in (3, 1, 2))
    engine.clear(3)
    assert engine.saved.restore(3, whole) == n_tokens
    assert far(restored, stage.next_rows(3, 0, n_tokens)) <= SAME, "as in one go"
    assert far(copied, restored) <= SAME
    assert far(restored, expected) <= SAME
    ends = []
    for lane in (1, 2, 3):
        engine.check_rewind(lane, middle)
        engine.drop_from(lane, middle)
        ends.append(stage.next_rows(lane, 0, middle))
    engine.clear(0)
    stage.read(0, 0, middle)
    assert far(ends[0], ends[2]) <= SAME
    assert far(ends[1], ends[2]) <= SAME
    assert far(ends[1], stage.next_rows(0, 0, middle)) < LOOSE


def test_the_window_of_another_text_shows(one: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault that the test above must see."""
    one.read(0, 0, 600)
    one.read(1, 1, 600)
    expected = one.next_rows(0, 0, 600, 1)
    one.engine.drop_from(0, 600)
    take = WindowCopies.take
    monkeypatch.setattr(WindowCopies, "take", lambda self, lane, n_tokens: take(self, 1, n_tokens))
    assert one.copy(0, 2, 600)
    assert far(one.next_rows(2, 0, 600, 1), expected) > 10 * CLOSE
    one.store(0, 600)
    one.engine.clear(2)
    assert one.restore(2, 600)
    assert far(one.next_rows(2, 0, 600, 1), expected) > 10 * CLOSE


def test_other_cells_of_another_text_show(one: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    one.read(0, 0, 600)
    one.read(1, 1, 600)
    expected = one.next_rows(0, 0, 600, 1)
    one.engine.drop_from(0, 600)
    copy = OwnPieces.copy

    def wrong(self: OwnPieces, source: int, target: int, first: int, end: int, total: int) -> None:
        copy(self, 1 if first else source, target, first, end, total)

    monkeypatch.setattr(OwnPieces, "copy", wrong)
    one.pieces.piece_tokens, usual = 100, one.pieces.piece_tokens
    try:
        assert one.copy(0, 2, 600)
    finally:
        one.pieces.piece_tokens = usual
    assert far(one.next_rows(2, 0, 600, 1), expected) > 10 * CLOSE


def test_its_pieces_are_the_cells_that_llama_cpp_has(one: Stage) -> None:
    """After any sequence of operations a cell's place is its position, in the layers without a window."""
    choose, engine, held = random.Random(5), one.engine, [0] * N_LANES
    for _ in range(250):
        lane, other = choose.sample(range(N_LANES), 2)
        match choose.randrange(6):
            case 0 | 1 | 2 if held[lane] < CTX - MAX_ROWS:
                n_rows = choose.randint(1, MAX_ROWS)
                one.lanes.decode((lane, lane, held[lane], held[lane] + n_rows))
                held[lane] += n_rows
                if choose.random() < 0.5:
                    engine.checkpoint(lane)
            case 3:
                possible = [at for at in range(held[lane] + 1) if engine.rewinds.can_rewind(lane, at, held[lane])]
                held[lane] = choose.choice(possible[-8:])
                engine.drop_from(lane, held[lane])
            case 4 if held[lane]:
                held[other] = held[lane]
                engine.copy_prefix(lane, other, held[other])
                engine.saved.settle(other)
            case 5 if held[lane]:
                engine.clear(other)
                held[other] = held[lane]
                assert one.copy(lane, other, held[other]) if 3 not in (lane, other) else True
                held[3] = engine.lane_tokens(3)
                held[other] = engine.lane_tokens(other)
            case _:
                continue
        for index in range(N_LANES):
            assert engine.lane_tokens(index) == held[index]
            if held[index]:
                assert cells_by_position(one, index, held[index]) == cells_of_llama_cpp(one, index)


def cells_by_position(stage: Stage, lane: int, n_tokens: int) -> list[bytes]:
    state = CellState.empty(stage.pieces.forms, n_tokens)[0]
    stage.pieces.read(lane, state, 0, n_tokens)
    spans = [parts for *_, parts in state.spans(0, n_tokens)]
    return sorted(np.concatenate(tensor, axis=1).tobytes() for tensor in zip(*spans, strict=True))


def cells_of_llama_cpp(stage: Stage, lane: int) -> list[bytes]:
    """Of the layers without a window."""
    state, window = read_lane(stage.engine._context, lane), read_partial(stage.engine._context, lane)
    assert state is not None
    assert window is not None
    both, last = cells_of(state.tobytes()), cells_of(window.tobytes())
    assert both is not None
    assert last is not None
    return sorted(both[0][: len(both[0]) - len(last[0])])


# --- how far ----------------------------------------------------------------------------------------------------------


def test_a_stored_lane_comes_back_at_its_end_at_its_checkpoints_and_one_token_less(one: Stage) -> None:
    one.read(0, 0, 600, marks=(200, 400))
    one.store(0, 600)
    for n_tokens in (600, 599, 400, 200):
        one.engine.clear(1)
        assert one.restore(1, n_tokens)
        assert one.engine.lane_tokens(1) == n_tokens
        assert one.engine.rewinds._checkpoints.positions(1) == [at for at in (200, 400) if at <= n_tokens]
        one.engine.clear(2)
        one.read(2, 0, n_tokens)
        assert far(one.next_rows(1, 0, n_tokens, 2), one.next_rows(2, 0, n_tokens, 2)) < CLOSE
    one.engine.clear(1)
    with pytest.raises(PositionGapError, match="its window at 598 was not kept"):
        one.restore(1, 598)
    assert one.engine.lane_tokens(1) == 0


def test_of_a_lane_within_its_window_any_beginning_comes_back(one: Stage) -> None:
    one.read(0, 0, WINDOW)
    one.store(0, WINDOW)
    for n_tokens in range(1, WINDOW + 1):
        one.engine.clear(1)
        assert one.restore(1, n_tokens)
        one.engine.clear(2)
        one.read(2, 0, n_tokens)
        assert far(one.next_rows(1, 0, n_tokens, 2), one.next_rows(2, 0, n_tokens, 2)) < CLOSE


def test_what_a_checkpoint_or_the_end_does_not_reach_is_copied_by_llama_cpp(one: Stage) -> None:
    one.read(0, 0, 590, marks=(590,))
    one.read(0, 0, 600, first=590)
    for n_tokens, in_pieces in ((600, True), (599, True), (595, False), (590, True)):
        one.engine.clear(1)
        one.engine.check_rewind(0, n_tokens)
        one.states.copy(0, 1, n_tokens, lambda is_whole: None)
        assert bool(one.states.copies) == in_pieces
        one.work()
        one.engine.clear(2)
        one.read(2, 0, n_tokens)
        assert far(one.next_rows(1, 0, n_tokens, 2), one.next_rows(2, 0, n_tokens, 2)) < CLOSE


def test_a_source_that_goes_on_meanwhile_changes_nothing(one: Stage) -> None:
    """Its windows move on, and its lane may be given away."""
    one.read(0, 0, 600, marks=(300,))
    for after in (700, 0):
        ends: list[bool] = []
        one.states.copy(0, 1, 600, ends.append)
        one.states.store(KEY, 0, 600, is_alone=False)
        if after:
            one.read(0, 1, after, first=600)
        else:
            one.engine.clear(0)
            one.states.copies.before_rows(0, 600)
            one.read(0, 1, 600)
        one.work()
        assert ends == [True]
        assert one.restore(2, 600)
        one.engine.clear(3)
        one.read(3, 0, 600)
        expected = one.next_rows(3, 0, 600, 2)
        for lane in (1, 2):
            assert far(one.next_rows(lane, 0, 600, 2), expected) < CLOSE
            one.engine.clear(lane)
        if after:
            one.engine.clear(0)
            one.read(0, 0, 600)


def test_windows_that_are_still_read_keep_their_memory_and_others_use_it_again(one: Stage) -> None:
    one.read(0, 0, 300)
    one.read(1, 1, 300)
    first, second = one.pieces.windows(0, 300), one.pieces.windows(1, 300)
    assert first is not None
    assert second is not None
    expected = read_partial(one.engine._context, 0)
    assert expected is not None
    assert np.array_equal(first.end[1], expected)
    assert not np.array_equal(second.end[1], expected)
    at = first.end[1].ctypes.data
    moves = CellState.empty(one.pieces.forms, 300, first)[1]
    del first
    third = one.pieces.windows(1, 300)
    assert third is not None
    assert third.end[1].ctypes.data != at, "the moves of a store still read it"
    del moves, third
    again = one.pieces.windows(1, 300)
    assert again is not None
    assert again.end[1].ctypes.data == at


# --- refused whole ----------------------------------------------------------------------------------------------------


def broken(data: np.ndarray, windows_at: int) -> Iterator[tuple[str, np.ndarray]]:
    yield "cut", data[:-1]
    yield "cut before the windows", data[:windows_at]
    yield "longer", np.concatenate([data, data[:8]])
    for name, place, number in (
        ("without windows", 0, 3), ("of an unknown form", 0, 5), ("shorter", 8, 599), ("of no tokens", 8, 0),
        ("of other layers", 16, 1), ("with fewer bytes of windows", 24, 8), ("of another end", windows_at + 8, 599),
        ("with too many checkpoints", windows_at, 9), ("with less than no checkpoints", windows_at, -1),
        ("a checkpoint behind the end", windows_at + 24, 601), ("an empty checkpoint", windows_at + 32, 0),
        ("no window at its end", windows_at + 16, 0), ("a window of less than no bytes", windows_at + 16, -8),
    ):  # fmt: skip
        changed = data.copy()
        changed[place : place + 8].view(np.int64)[0] = number
        yield name, changed


def windows_at(data: np.ndarray) -> int:
    return int(data.nbytes - data[24:32].view(np.int64)[0])


def test_what_is_not_whole_or_foreign_is_refused_whole(one: Stage) -> None:
    one.read(0, 0, 600, marks=(300,))
    data = one.store(0, 600)
    assert is_cells(data)
    for name, changed in broken(data, windows_at(data)):
        one.put(np.ascontiguousarray(changed), 600)
        with pytest.raises(PositionGapError):
            one.restore(1, 600)
        assert one.engine.lane_tokens(1) == 0, name
        assert one.states._tier is not None
        assert one.states._tier.fetch(KEY) is None, f"{name}: it would be refused again"
    one.put(data, 600)
    assert one.restore(1, 600)


def test_a_stored_lane_of_another_model_is_refused(opened: Callable[[str, str], Stage]) -> None:
    first = opened("gpt-oss", "f16")
    first.read(0, 0, 300)
    data = first.store(0, 300)
    for name, kv_type in (("gemma3:27b", "f16"), (WIDE, "q8_0")):
        second = opened(name, kv_type)
        second.put(data, 300)
        with pytest.raises(PositionGapError):
            second.restore(1, 300)
        assert second.engine.lane_tokens(1) == 0


def test_a_window_that_is_not_the_lane_s_is_refused(one: Stage) -> None:
    """Of another position, of another model, or cut: as llama.cpp, or the lane behind it, sees."""
    one.read(0, 0, 300, marks=(200,))
    found = one.pieces.windows(0, 300)
    assert found is not None
    at_200, at_300 = found.checkpoints[0][1], found.end[1]
    changed = at_300.copy()
    changed[-1_000:] = 255
    for window in (at_200, at_300[:-4], at_300[:40], np.zeros(100, np.uint8), changed[: changed.nbytes // 2]):
        data = CellState.empty(one.pieces.forms, 300, LaneWindows((), (300, window)))
        for number in range(len(data[1])):
            data[1].make(number)
        one.pieces.read(0, data[0], 0, 300)
        one.put(data[0].data, 300)
        assert not one.restore(1, 300)
        one.engine.clear(1)  # as a stage does with a lane that did not come
    one.read(1, 1, 300)
    one.read(2, 1, 300)
    assert far(one.next_rows(1, 1, 300, 2), one.next_rows(2, 1, 300, 2)) < CLOSE


def test_a_lane_that_an_older_build_stored_whole_comes_back(one: Stage) -> None:
    one.read(0, 0, 600, marks=(300,))
    expected = one.next_rows(0, 0, 600, 2)
    one.engine.drop_from(0, 600)
    one.put(one.engine.saved.save(0), 600)
    assert one.restore(1, 600)
    assert far(one.next_rows(1, 0, 600, 2), expected) < CLOSE


def test_a_lane_whose_window_llama_cpp_refuses_is_empty(one: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    one.read(0, 0, 600)
    one.store(0, 600)
    with monkeypatch.context() as patch:
        patch.setattr(lane_rewinds, "write_partial", lambda *_: False)
        assert not one.restore(1, 600)
        assert one.engine.lane_tokens(1) == 0
        assert not one.copy(0, 2, 600)
        assert one.engine.lane_tokens(2) == 0
    assert one.restore(1, 600)


# --- interrupted ------------------------------------------------------------------------------------------------------


def test_a_stage_that_stops_in_the_middle_has_all_on_its_disk(one: Stage, tmp_path: Path) -> None:
    one.begin(Tier(0, TierDisk(tmp_path, "this", 1 << 30)))
    one.read(0, 0, 600, marks=(300,))
    one.pieces.piece_tokens, usual = 50, one.pieces.piece_tokens
    try:
        one.states.store(KEY, 0, 600, is_alone=False)
        one.states.copies.work(iter(range(0, 1 << 60, 1 << 40)).__next__)
        assert one.states.copies, "it was in the middle"
    finally:
        one.pieces.piece_tokens = usual
    one.states.close()
    one.begin(Tier(0, TierDisk(tmp_path, "this", 1 << 30)))
    for n_tokens in (600, 300):
        reading = one.states.begin(KEY)
        assert reading is not None
        reading.result(10)
        one.engine.clear(1)
        assert one.restore(1, n_tokens)
        one.engine.clear(2)
        one.read(2, 0, n_tokens)
        assert far(one.next_rows(1, 0, n_tokens, 2), one.next_rows(2, 0, n_tokens, 2)) < CLOSE
    one.states.close()


@pytest.mark.parametrize("n_slices", [0, 3, 11])
def test_a_copy_that_is_given_up_leaves_a_lane_for_others(n_slices: int, one: Stage) -> None:
    one.read(0, 0, 600, marks=(300,))
    one.store(0, 600)
    one.pieces.piece_tokens, usual = 60, one.pieces.piece_tokens
    try:
        ends: list[bool] = []
        one.states.restore(KEY, 1, 600, ends.append)
        for _ in range(n_slices):
            one.states.copies.work(iter(range(0, 1 << 60, 1 << 40)).__next__)
        assert one.states.copies
        one.states.copies.cancel(1)
    finally:
        one.pieces.piece_tokens = usual
    assert ends == [False]
    one.engine.clear(1)
    one.read(1, 1, 500)
    one.read(2, 1, 500)
    assert far(one.next_rows(1, 1, 500, 2), one.next_rows(2, 1, 500, 2)) < CLOSE
    one.engine.clear(1)
    assert one.restore(1, 600)


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_windows_of_many_bytes_are_not_copied_beside_others(one: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    one.read(0, 0, 600)
    window_bytes = one.pieces.window_bytes(600)
    found = one.pieces.windows(0, 600)
    assert found is not None
    assert abs(window_bytes - found.end[1].nbytes) < window_bytes / 2
    assert one.pieces.window_bytes(WINDOW) == window_bytes > one.pieces.window_bytes(WINDOW - 1)
    monkeypatch.setattr(lane_states, "WHOLE_BYTES_MAX", 2 * window_bytes)
    assert one.store(0, 600).nbytes > 3 * window_bytes, "other cells do not count"
    monkeypatch.setattr(lane_states, "WHOLE_BYTES_MAX", window_bytes // 2)
    one.states.store(OTHER, 0, 600, is_alone=False)
    assert one.dropped == [OTHER]
    with pytest.raises(PositionGapError, match="would hold up other streams"):
        one.restore(1, 600)
    one.states.store(KEY, 0, 600, is_alone=True)
    one.work()
    assert one.restore(1, 600, is_alone=True)


def test_a_stage_whose_layers_all_have_windows_copies_them_whole(tmp_path: Path) -> None:
    stage = Stage("gemma3", "f16", tmp_path)
    try:
        assert stage.engine.attention.keeps_window
        assert stage.engine.saved.pieces is None
    finally:
        stage.engine.close()


def test_a_way_that_does_not_prove_itself_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relayline.stage.engine.own_cells.cells_of", lambda state: ([b"others"], False))
    stage = Stage("gpt-oss", "f16", tmp_path)
    try:
        assert stage.engine.saved.pieces is None
        stage.read(0, 0, 300)
        stage.states.store(KEY, 0, 300)
        assert stage.restore(1, 300)
    finally:
        stage.engine.close()


def test_windows_are_not_read_where_llama_cpp_gives_none(one: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    one.read(0, 0, 300)
    monkeypatch.setattr("relayline.stage.engine.window_copies.read_partial", lambda *_: None)
    one.states.store(KEY, 0, 300)
    assert one.dropped == [KEY]
    with pytest.raises(NativeError, match="does not give the windows of lane 0"):
        one.copy(0, 1, 300)


def test_a_host_without_memory_for_a_window_keeps_none(one: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError

    one.read(0, 0, 300)
    with monkeypatch.context() as patch:
        patch.setattr(fresh_memory.mmap, "mmap", refused)
        with pytest.raises(NativeError, match="does not give the state of lane 0"):
            one.engine.checkpoint(0)
        one.states.store(KEY, 0, 300)
    assert one.dropped == [KEY]
    assert one.engine.lane_tokens(0) == 300


def test_a_whole_state_takes_a_lane_only_when_nothing_reads_it_any_more(one: Stage) -> None:
    """An older build wrote it, or its lane had images: its cells are written at once, where others are being stored."""
    one.read(0, 0, 600)
    one.read(1, 1, 600)
    expected = one.store(0, 600).copy()
    one.states.forget(KEY)
    whole = one.engine.saved.save(1)
    tier = one.states._tier
    assert tier is not None
    tier.store(OTHER, 600, whole)
    one.states.store(KEY, 0, 600, is_alone=False)
    assert one.states.copies, "it has only begun"
    ends: list[bool] = []
    one.states.restore(OTHER, 0, 600, ends.append)
    one.work(3)
    assert ends == [True]
    np.testing.assert_array_equal(one.stored(), expected)
