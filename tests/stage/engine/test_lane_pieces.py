"""Lanes that are copied in pieces: the same cells as llama.cpp's own copy, in both layouts, and the same next rows."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relayline.coordinator.model.split import split_model
from relayline.deploy.testing.engines import engine_config
from relayline.deploy.testing.tiny_slices import TinyShape, write_stage
from relayline.stage.engine.cell_state import CellState, Pieces, bytes_of, is_cells
from relayline.stage.engine.kv_state import cells_of
from relayline.stage.engine.lane_pieces import OwnPieces, SharedPieces
from relayline.stage.engine.lane_state import read_lane
from relayline.stage.engine.native import NativeEngine
from relayline.stage.engine.piece_price import PiecePrice
from relayline.wire.common.errors import NativeError
from tests.support.attention import near
from tests.support.tiny_models import make_tiny

CTX_TOKENS, N_LANES, N_HELD, N_MORE = 96, 3, 40, 6
ORDER_OF_CELLS = near(1e-3, 3e-2)  # logits differ by so little where attention adds the same cells in another order
OWN = ("per-lane f16", "per-lane f32", "per-lane q8_0", "gemma3:pattern per-lane f16", "deepseek2 per-lane f16",
       "gpt-oss per-lane f16", "qwen2 per-lane f16", "qwen2vl per-lane f16")  # fmt: skip
SHARED = ("unified f16", "unified q8_0", "deepseek2 unified f16")


def engine_of(kind: str, directory: Path, **changes: Any) -> NativeEngine:
    *family, kv_layout, kv_type = kind.split()
    path = directory / "only.gguf"
    if family:
        split_model(make_tiny(family[0], directory / "model.gguf"), directory / "out", cuts=())
        path = directory / "out" / "stage-0.gguf"
    else:
        write_stage(path, TinyShape(n_heads=2), 0, [])
    more = {"spare_lanes": 1, "held_lanes": 1} if kv_layout == "unified" else {}
    config = engine_config(path, N_LANES, CTX_TOKENS, CTX_TOKENS, kv_layout=kv_layout, kv_type=kv_type)
    return NativeEngine(dataclasses.replace(config, **more | changes))


@pytest.fixture(scope="module", name="loaded", params=OWN + SHARED)
def loaded_fixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeEngine]:
    with engine_of(request.param, tmp_path_factory.mktemp("stage")) as engine:
        yield engine


@pytest.fixture(name="engine")
def engine_fixture(loaded: NativeEngine) -> NativeEngine:
    for lane in range(N_LANES):
        loaded.clear(lane)
    return loaded


def feed(engine: NativeEngine, lane: int, first: int, end: int, *, history: int = 5) -> np.ndarray:
    """Decode rows [first:end) of a history; returns the last one's logits."""
    rows = np.random.default_rng(history).standard_normal((CTX_TOKENS, engine.n_embd), np.float32)
    n_rows = end - first
    engine.input_rows[:n_rows] = rows[first:end]
    engine.seq_ids[:n_rows], engine.positions[:n_rows] = lane, range(first, end)
    engine.wants[:n_rows] = 1
    engine.decode(n_rows)
    return engine.logits(n_rows - 1).copy()


def pieces_of(engine: NativeEngine) -> Pieces:
    assert engine.saved.pieces is not None
    return engine.saved.pieces


def taken(engine: NativeEngine, lane: int, n_tokens: int, piece: int = 7) -> CellState:
    pieces = pieces_of(engine)
    source = pieces.begin(lane, n_tokens)
    assert source is not None
    state = CellState.empty(pieces.forms, n_tokens)[0]
    for first in range(0, n_tokens, piece):
        pieces.read(source, state, first, min(first + piece, n_tokens))
    pieces.end(source)
    return state


def put(engine: NativeEngine, lane: int, state: CellState, n_tokens: int, piece: int = 9) -> None:
    for first in range(0, n_tokens, piece):
        pieces_of(engine).write(lane, state, first, min(first + piece, n_tokens), n_tokens)


def own_copy(engine: NativeEngine, lane: int) -> list[bytes]:
    """A lane's cells as llama.cpp writes them, in the order of their positions. Sorted: it orders tensors by cache."""
    if isinstance(pieces_of(engine), SharedPieces):
        return sorted(tensor.tobytes() for layer in engine.saved.cells(lane) for tensor in layer.tensors)
    state = read_lane(engine._context, lane)
    assert state is not None
    known = cells_of(state.tobytes())
    assert known is not None
    return sorted(known[0])


def test_a_lane_goes_on_in_another_as_if_it_had_not_been_away(engine: NativeEngine) -> None:
    feed(engine, 1, 0, N_HELD)
    state = taken(engine, 1, N_HELD)
    expected = feed(engine, 1, N_HELD, N_HELD + N_MORE)
    engine.clear(1)
    feed(engine, 1, 0, 3, history=6)  # another stream has the lane now
    beside = feed(engine, 0, 0, 5, history=7)
    put(engine, 2, state, N_HELD)
    assert engine.lane_tokens(2) == N_HELD
    got = feed(engine, 2, N_HELD, N_HELD + N_MORE)
    assert np.abs(got - expected).max() < ORDER_OF_CELLS
    engine.clear(0)
    assert np.abs(feed(engine, 0, 0, 5, history=7) - beside).max() < ORDER_OF_CELLS, "no other lane has changed"
    assert pieces_of(engine).token_ns > 0


def test_a_copy_that_voids_the_logits_counts_as_a_run(engine: NativeEngine) -> None:
    """`stage.steps.run_ahead` keeps logits from step to step, as long as nothing else has run."""
    feed(engine, 1, 0, N_HELD)
    state = taken(engine, 1, N_HELD)
    logits, n_runs = feed(engine, 0, 0, 2), engine.n_runs
    put(engine, 2, state, N_HELD)
    if engine.n_runs == n_runs:
        assert np.array_equal(engine.logits(1), logits)


def test_any_beginning_of_a_state_can_be_put_back(engine: NativeEngine) -> None:
    feed(engine, 0, 0, N_HELD)
    state = taken(engine, 0, N_HELD)
    put(engine, 1, state, 17)
    assert engine.lane_tokens(1) == 17
    got = feed(engine, 1, 17, N_HELD)
    assert np.abs(got - feed(engine, 2, 0, N_HELD)).max() < ORDER_OF_CELLS


def test_pieces_are_the_cells_that_llama_cpp_has(engine: NativeEngine) -> None:
    """After any sequence of operations: rows, rewinds, copies, and lanes that change hands."""
    if engine.attention.window:
        pytest.skip("llama.cpp's own copy leaves out cells before the window")
    choose, held = random.Random(3), [0] * N_LANES
    for _ in range(60):
        lane, other = choose.sample(range(N_LANES), 2)
        match choose.randrange(5):
            case 0 | 1 if held[lane] < CTX_TOKENS - 8:
                n_rows = choose.randint(1, 8)
                feed(engine, lane, held[lane], held[lane] + n_rows, history=lane)
                held[lane] += n_rows
            case 2:
                held[lane] = choose.randint(0, held[lane])
                engine.drop_from(lane, held[lane])
            case 3 if held[lane]:
                held[other] = choose.randint(1, held[lane])
                engine.copy_prefix(lane, other, held[other])
            case 4 if held[lane]:
                engine.saved.settle(lane)
                state = taken(engine, lane, held[lane], choose.randint(1, 9))
                engine.clear(other)
                held[other] = choose.randint(1, held[lane])
                put(engine, other, state, held[other], choose.randint(1, 9))
            case _:
                continue
        for index in range(N_LANES):
            assert engine.lane_tokens(index) == held[index]
            if held[index]:
                engine.saved.settle(index)
                state = taken(engine, index, held[index])
                spans = [parts for *_, parts in state.spans(0, held[index])]
                parts = sorted(np.concatenate(tensor, axis=1).tobytes() for tensor in zip(*spans, strict=True))
                assert parts == own_copy(engine, index)


def test_a_lane_is_copied_to_another_in_pieces(engine: NativeEngine) -> None:
    pieces = pieces_of(engine)
    if not pieces.copies:
        with pytest.raises(NativeError):
            pieces.copy(0, 1, 0, 1, 1)
        return
    feed(engine, 0, 0, N_HELD)
    for first in range(0, N_HELD, 11):
        pieces.copy(0, 1, first, min(first + 11, N_HELD), N_HELD)
    got, expected = (feed(engine, lane, N_HELD, N_HELD + N_MORE) for lane in (1, 0))
    assert np.abs(got - expected).max() < ORDER_OF_CELLS


def test_what_the_lane_gets_meanwhile_changes_no_piece(engine: NativeEngine) -> None:
    """Shared cells are kept for the copy; a lane's own are overwritten only as far as they were copied."""
    feed(engine, 1, 0, N_HELD)
    expected = taken(engine, 1, N_HELD).data.copy()
    pieces = pieces_of(engine)
    source, state = pieces.begin(1, N_HELD), CellState.empty(pieces.forms, N_HELD)[0]
    assert source is not None
    engine.clear(1)
    pieces.read(source, state, 0, 10)
    feed(engine, 1, 0, 10, history=6)
    feed(engine, 0, 0, 30, history=7)
    pieces.read(source, state, 10, N_HELD)
    pieces.end(source)
    assert np.array_equal(state.data, expected)


def test_shared_cells_are_kept_for_so_many_copies(engine: NativeEngine) -> None:
    pieces = pieces_of(engine)
    if not isinstance(pieces, SharedPieces):
        return
    feed(engine, 0, 0, 8)
    source = pieces.begin(0, 8)
    assert source is not None
    assert pieces.begin(0, 8) is None
    pieces.end(source)
    again = pieces.begin(0, 8)
    assert again is not None
    pieces.end(again)


def test_cells_of_another_engine_are_refused(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        engines = []
        for number, kind in enumerate(("per-lane f16", "per-lane f32")):
            (tmp_path / str(number)).mkdir()
            engines.append(stack.enter_context(engine_of(kind, tmp_path / str(number))))
        feed(engines[0], 0, 0, 8)
        state = taken(engines[0], 0, 8)
        forms, others = (pieces_of(engine).forms for engine in engines)
        assert is_cells(state.data)
        assert not is_cells(engines[0].saved.save(0))
        assert state.data.nbytes == 32 + 8 * bytes_of(forms)
        assert np.array_equal(CellState.read(state.data, forms).data, state.data)
        for data, wanted in ((state.data, others), (state.data[:-1], forms), (state.data[:8], forms)):
            with pytest.raises(NativeError):
                CellState.read(data, wanted)
        changed = state.data.copy()
        changed[8:16].view(np.int64)[0] = -1
        with pytest.raises(NativeError):
            CellState.read(changed, forms)


@pytest.mark.parametrize("kind", ["lfm2 per-lane f16", "lfm2 unified f16", "gemma3:pattern unified f16"])
def test_other_lanes_are_copied_whole(kind: str, tmp_path: Path) -> None:
    """With a recurrent state, or where lanes share cells of windows."""
    with engine_of(kind, tmp_path) as engine:
        assert engine.saved.pieces is None


def test_a_way_that_does_not_prove_itself_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of("per-lane f16", tmp_path) as engine:
        assert isinstance(engine.saved.pieces, OwnPieces)
    monkeypatch.setattr("relayline.stage.engine.own_cells.cells_of", lambda state: ([b"others"], False))
    with engine_of("per-lane f16", tmp_path) as engine:
        assert engine.saved.pieces is None


def test_pieces_price_restores(engine: NativeEngine) -> None:
    """Of one engine, whatever its pieces take; see test_piece_price.py for what follows from that."""
    feed(engine, 0, 0, N_HELD)
    state = taken(engine, 0, N_HELD)
    price: Any = pieces_of(engine)
    price._price = PiecePrice()
    put(engine, 1, state, N_HELD)
    assert 0 < pieces_of(engine).token_ns == statistics.median_low(price._price._back_ns)
    taken(engine, 0, N_HELD)
    assert len(price._price._out_ns) == -(-N_HELD // 7)
