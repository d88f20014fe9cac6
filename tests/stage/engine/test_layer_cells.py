"""Cells of layers are taken from one split's lanes and put into another's: bit for bit, or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from relayline.coordinator.model.split import split_model
from relayline.deploy.testing.engines import engine_config
from relayline.stage.engine.layer_cells import LayerCells, Shape, Tensor, cut, shape_of, written
from relayline.stage.engine.native import NativeEngine
from relayline.wire.common.errors import NativeError
from tests.support.attention import near
from tests.support.tiny_models import make_tiny

CTX_TOKENS, N_LANES, N_HELD, N_LAYERS = 96, 3, 40, 4
ORDER_OF_CELLS = near(1e-3, 3e-2)  # logits differ by so little where attention adds the same cells in another order
KINDS = (
    "llama unified f16", "qwen2 unified q8_0", "llama per-lane f32", "qwen2 per-lane q8_0", "deepseek2 unified f16"
)  # fmt: skip


class Split:
    """A model cut in two, and engines for its stages."""

    def __init__(self, model: Path, directory: Path, cut_at: int, kv_layout: str, kv_type: str) -> None:
        pipeline = split_model(model, directory, cuts=(cut_at,))
        self.engines = [
            NativeEngine(
                engine_config(
                    directory / stage.file, N_LANES, CTX_TOKENS, CTX_TOKENS, kv_layout=kv_layout, kv_type=kv_type
                )
            )
            for stage in pipeline.stages
        ]

    def feed(self, lane: int, first: int, end: int) -> np.ndarray:
        """Compute rows [first:end) of the one history; returns the last one's logits."""
        rows = np.random.default_rng(5).standard_normal((CTX_TOKENS, self.engines[0].n_embd), np.float32)[first:end]
        for engine in self.engines:
            n_rows = len(rows)
            engine.input_rows[:n_rows, : rows.shape[1]] = rows
            engine.seq_ids[:n_rows], engine.positions[:n_rows] = lane, range(first, end)
            engine.wants[:n_rows] = 1
            engine.decode(n_rows)
            rows = engine.output_rows[:n_rows].copy()
        return self.engines[-1].logits(end - first - 1).copy()

    def cells(self, lane: int) -> list[LayerCells]:
        return [cells for engine in self.engines for cells in engine.saved.cells(lane)]


@pytest.fixture(scope="module", name="splits", params=KINDS)
def splits_fixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Split]]:
    family, kv_layout, kv_type = request.param.split()
    directory = tmp_path_factory.mktemp("splits")
    few = {"attention.head_count": 2, "attention.head_count_kv": 1, "rope.dimension_count": 32}  # as wide as a block
    more = few if kv_type == "q8_0" else None
    model = make_tiny(family, directory / "model.gguf", n_layers=N_LAYERS, extra_values=more)
    splits = [Split(model, directory / str(at), at, kv_layout, kv_type) for at in (1, 3)]
    with contextlib.ExitStack() as stack:
        for split in splits:
            for engine in split.engines:
                stack.enter_context(engine)
        yield splits


def test_cells_come_over_bit_for_bit_in_any_order(splits: list[Split]) -> None:
    before, after = splits
    before.feed(0, 0, 7)
    before.feed(2, 0, N_HELD)
    for engine in before.engines:
        engine.clear(0)
        engine.drop_from(2, N_HELD - 12)
    before.feed(2, N_HELD - 12, N_HELD)  # some take the free cells at the beginning: no longer in order
    cells = before.cells(2)
    assert [each.n_tokens for each in cells] == [N_HELD] * N_LAYERS
    n_before = len(before.engines[0].saved.shape.forms)
    assert n_before != len(after.engines[0].saved.shape.forms)
    at = 0
    for engine in after.engines:
        end = at + len(engine.saved.shape.forms)
        assert engine.saved.put_cells(1, cells[at:end]) == N_HELD == engine.lane_tokens(1)
        at = end
    for left, right in zip(cells, after.cells(1), strict=True):
        assert all(map(np.array_equal, left.tensors, right.tensors))
    gap = np.abs(after.feed(1, N_HELD, N_HELD + 1) - before.feed(2, N_HELD, N_HELD + 1)).max()
    assert gap < ORDER_OF_CELLS


def test_a_stream_goes_on_with_the_same_logits_also_from_fewer_tokens(splits: list[Split]) -> None:
    before, after = splits
    for split in splits:
        for engine in split.engines:
            for lane in range(N_LANES):
                engine.clear(lane)
    before.feed(0, 0, N_HELD)
    cells = [each.shortened(N_HELD - 3) for each in before.cells(0)]
    n_first = len(after.engines[0].saved.shape.forms)
    for engine, own in zip(after.engines, (cells[:n_first], cells[n_first:]), strict=True):
        assert engine.saved.put_cells(0, own) == N_HELD - 3
    gap = np.abs(after.feed(0, N_HELD - 3, N_HELD - 2) - again(before, 0, N_HELD - 3)).max()
    assert gap < ORDER_OF_CELLS


def again(split: Split, lane: int, position: int) -> np.ndarray:
    for engine in split.engines:
        engine.drop_from(lane, position)
    return split.feed(lane, position, position + 1)


@pytest.mark.parametrize("family", ["gemma3:pattern", "lfm2"])
def test_windows_and_recurrent_states_are_not_taken_apart(family: str, tmp_path: Path) -> None:
    split_model(make_tiny(family, tmp_path / "model.gguf"), tmp_path / "out", cuts=())
    with NativeEngine(engine_config(tmp_path / "out" / "stage-0.gguf", N_LANES, CTX_TOKENS, CTX_TOKENS)) as engine:
        engine.input_rows[:2], engine.seq_ids[:2], engine.positions[:2] = 0.1, 0, range(2)
        engine.decode(2)
        assert engine.saved.shape is None
        with pytest.raises(NativeError, match="cannot be taken apart"):
            engine.saved.cells(0)
        with pytest.raises(NativeError, match="cannot be put together"):
            engine.saved.put_cells(1, [])


# --- the format, without an engine ------------------------------------------------------------------------------------

FORM = (Tensor(1, 1, 6), Tensor(1, 5, 2))
SHAPE = Shape(b"magi\3\0\0\0", 4, True, (FORM, FORM))


def lane(n_tokens: int, form: tuple[Tensor, ...] = FORM) -> LayerCells:
    """Cells whose every byte encodes the position."""
    marks = np.arange(n_tokens, dtype=np.uint8)[None, :, None]
    return LayerCells(form, tuple(np.tile(marks, (each.n_groups, 1, each.n_bytes)) for each in form))


def state_of(n_tokens: int) -> np.ndarray:
    return written(SHAPE, [lane(n_tokens), lane(n_tokens)])


def test_cells_in_any_order_come_out_by_position() -> None:
    state = state_of(3)
    assert shape_of(state, 2) == SHAPE
    data = state.tobytes()
    first, last = struct.pack("<iIi", 0, 1, 3), struct.pack("<iIi", 2, 1, 3)
    assert data.count(first) == data.count(last) == 1
    swapped = data.replace(first, b"first-------").replace(last, first).replace(b"first-------", last)
    found = cut(SHAPE, np.frombuffer(swapped, np.uint8))
    assert [each.tensors[0][0, :, 0].tolist() for each in found] == [[2, 1, 0]] * 2
    assert [each.tensors[1][4, :, 1].tolist() for each in found] == [[2, 1, 0]] * 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"magi", b"magj"),
        (struct.pack("<iIi", 1, 1, 3), struct.pack("<iIi", 1, 2, 3)),
        (struct.pack("<iIi", 1, 1, 3), struct.pack("<iIi", 7, 1, 3)),
        (struct.pack("<iIi", 1, 1, 3), struct.pack("<iIi", 0, 1, 3)),
        (struct.pack("<II", 1, 2), struct.pack("<II", 1, 3)),
        (struct.pack("<II", 1, 2), struct.pack("<II", 0, 2)),
        (struct.pack("<iQ", 1, 6), struct.pack("<iQ", 2, 6)),
        (struct.pack("<iQ", 1, 6), struct.pack("<iQ", 1, 5)),
        (struct.pack("<iQ", 1, 6), struct.pack("<iQ", 1, 1 << 60)),
        (struct.pack("<I", 4), struct.pack("<I", 5)),
        (struct.pack("<II", 4, 3), struct.pack("<II", 4, 1 << 31)),
    ],
    ids=["magic", "two owners", "a hole", "twice", "layers", "not transposed", "type", "width", "huge", "streams",
         "cells"],
)  # fmt: skip
def test_a_state_of_another_form_is_refused(old: bytes, new: bytes) -> None:
    data = state_of(3).tobytes()
    assert old in data
    with pytest.raises(NativeError):
        cut(SHAPE, np.frombuffer(data.replace(old, new, 1), np.uint8))


@pytest.mark.parametrize("cut_off", [1, 4, 20])
def test_a_state_that_ends_early_or_late_is_refused(cut_off: int) -> None:
    state = state_of(3)
    with pytest.raises(NativeError):
        cut(SHAPE, state[:-cut_off])
    with pytest.raises(NativeError):
        cut(SHAPE, np.append(state, np.zeros(cut_off, np.uint8)))
    assert shape_of(state[:-cut_off], 2) is None
    assert shape_of(state, 3) is None


def test_cells_of_other_layers_are_not_written() -> None:
    wide = dataclasses.replace(FORM[0], n_bytes=8)
    for cells in ([lane(3)], [lane(3), lane(3), lane(3)], [lane(3), lane(3, (wide, FORM[1]))], [lane(3), lane(2)],
                  [lane(0), lane(0)]):  # fmt: skip
        with pytest.raises(NativeError):
            written(SHAPE, cells)
