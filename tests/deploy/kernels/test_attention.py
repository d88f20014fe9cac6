"""Attention of rows over a cache that many lanes share (deploy/kernels/attend_own_cells.cpp), called through ggml."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from relayline.deploy.testing.engines import engine_config
from relayline.deploy.testing.tiny_slices import TinyShape, write_pipeline
from relayline.stage.engine import ggml
from relayline.stage.engine.native import NativeEngine
from relayline.wire.common.curve import PAD_SEARCH_ROWS, goes_by_tiles, rows_apart
from tests.support.ggml_calls import FLOAT, INT, LONG, POINTER, function, new_context

F32, F16 = 0, 1
HIDDEN = float("-inf")


@dataclasses.dataclass(frozen=True)
class Model:
    n_heads: int
    n_kv_heads: int
    width: int = 64
    softcap: float = 0.0
    has_sinks: bool = False


@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of cells, (cells, kv heads, width) f16, and the lane of each cell."""

    keys: npt.NDArray[np.float16]
    values: npt.NDArray[np.float16]
    lanes: npt.NDArray[np.int64]

    def of(self, lane: int) -> Cache:
        mine = self.lanes == lane
        return Cache(self.keys[mine], self.values[mine], self.lanes[mine])


def cache_of(model: Model, lanes: npt.NDArray[np.int64]) -> Cache:
    generator, shape = np.random.default_rng(3), (len(lanes), model.n_kv_heads, model.width)
    keys, values = (generator.standard_normal(shape).astype(np.float16) for _ in range(2))
    return Cache(keys, values, lanes)


def queries_of(model: Model, n_rows: int) -> npt.NDArray[np.float32]:
    """(rows, heads, width)"""
    return np.random.default_rng(4).standard_normal((n_rows, model.n_heads, model.width)).astype(np.float32)


def sinks_of(model: Model) -> npt.NDArray[np.float32]:
    return np.random.default_rng(5).standard_normal(model.n_heads).astype(np.float32)


def attend(
    model: Model,
    queries: npt.NDArray[np.float32],
    cache: Cache,
    row_lanes: npt.NDArray[np.int64],
    *,
    n_threads: int = 1,
) -> npt.NDArray[np.float32]:
    """Return (rows, heads, width): each row over the cells of its lane, as ggml computes it."""
    n_rows = len(queries)
    context = new_context()
    make = function("ggml_new_tensor_4d", POINTER, POINTER, INT, LONG, LONG, LONG, LONG)
    turn = function("ggml_permute", POINTER, POINTER, POINTER, INT, INT, INT, INT)

    def tensor(values: npt.NDArray[Any], type_id: int) -> Any:
        shape = (*reversed(values.shape), *(1,) * (4 - values.ndim))
        made = make(context, type_id, *shape)
        ctypes.memmove(function("ggml_get_data", POINTER, POINTER)(made), values.ctypes.data, values.nbytes)
        return made

    try:
        hidden = np.where(row_lanes[:, None] == cache.lanes[None, :], 0.0, HIDDEN).astype(np.float16)
        places = [tensor(queries, F32), tensor(cache.keys, F16), tensor(cache.values, F16)]
        turned = [turn(context, place, 0, 2, 1, 3) for place in places]
        flash = function("ggml_flash_attn_ext", POINTER, *(POINTER,) * 5, FLOAT, FLOAT, FLOAT)
        out = flash(context, *turned, tensor(hidden, F16), model.width**-0.5, 0.0, model.softcap)
        if model.has_sinks:
            function("ggml_flash_attn_ext_add_sinks", None, POINTER, POINTER)(out, tensor(sinks_of(model), F32))
        graph = function("ggml_new_graph", POINTER, POINTER)(context)
        function("ggml_build_forward_expand", None, POINTER, POINTER)(graph, out)
        assert function("ggml_graph_compute_with_ctx", INT, POINTER, POINTER, INT)(context, graph, n_threads) == 0
        result = np.empty((n_rows, model.n_heads, model.width), np.float32)
        ctypes.memmove(result.ctypes.data, function("ggml_get_data", POINTER, POINTER)(out), result.nbytes)
        return result
    finally:
        function("ggml_free", None, POINTER)(context)


def exact(
    model: Model, queries: npt.NDArray[np.float32], cache: Cache, row_lanes: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """The same in double precision, by the definition."""
    out = np.zeros((len(queries), model.n_heads, model.width))
    sharing = model.n_heads // model.n_kv_heads
    for row, lane in enumerate(row_lanes):
        mine = cache.of(lane)
        for head in range(model.n_heads):
            keys, values = (part[:, head // sharing].astype(np.float64) for part in (mine.keys, mine.values))
            scores = keys @ queries[row, head].astype(np.float64) * model.width**-0.5
            if model.softcap:
                scores = model.softcap * np.tanh(scores / model.softcap)
            weights = np.exp(scores)
            total = weights.sum() + (np.exp(float(sinks_of(model)[head])) if model.has_sinks else 0.0)
            out[row, head] = weights @ values / total if len(keys) else 0.0
    return out


def need_own_cells() -> None:
    if not ggml.attends_own_cells(n_rows=1, n_heads=4, n_kv_heads=1):
        pytest.skip("this build has llama.cpp's attention")


MODELS = [
    Model(4, 4),
    Model(8, 4, width=128),
    Model(6, 2, width=80),  # three heads a key
    Model(14, 2),  # seven: four and three
    Model(16, 1, width=192),
    Model(8, 2, softcap=30.0),
    Model(8, 2, has_sinks=True),
]


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("n_threads", [1, 3])
def test_rows_of_many_lanes_read_their_own_cells(model: Model, n_threads: int) -> None:
    need_own_cells()
    lanes = np.concatenate([np.full(37, 2), np.arange(400) % 5, np.full(70, 4)])  # a prompt, steps of five, a prompt
    cache, row_lanes = cache_of(model, lanes), np.array([0, 4, 2, 2, 1, 3, 9])  # no lane has cells in the last one
    queries = queries_of(model, len(row_lanes))
    found = attend(model, queries, cache, row_lanes, n_threads=n_threads)
    wanted = exact(model, queries, cache, row_lanes)
    assert np.abs(found - wanted).max() < 1e-5  # where values are added as halves it is 1e-3


def test_a_row_has_the_same_bits_alone_as_among_others() -> None:
    need_own_cells()
    model, lanes = Model(8, 2), np.arange(1, 641) * 7 % 11  # the cells of a lane never lie together
    cache, row_lanes = cache_of(model, lanes), np.arange(11)
    queries = queries_of(model, len(row_lanes))
    together = attend(model, queries, cache, row_lanes)
    for row, lane in enumerate(row_lanes):
        alone = attend(model, queries[row : row + 1], cache.of(lane), row_lanes[row : row + 1])
        assert np.array_equal(together[row], alone[0])
    assert np.array_equal(together, attend(model, queries, cache, row_lanes, n_threads=2))


N_ROWS = 70  # enough for a tile
EACH_IN_ITS_OWN = np.arange(N_ROWS) % 6  # neighbours are of different lanes
OF_PROMPTS = np.arange(N_ROWS) // 12


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize(
    ("n_kv_heads", "row_lanes", "is_tiled"),
    [
        (2, EACH_IN_ITS_OWN, "never"),  # many heads share a key
        (2, OF_PROMPTS, "never"),
        (4, EACH_IN_ITS_OWN, "by older kernels"),
        (4, OF_PROMPTS, "always"),
        (4, np.full(N_ROWS, 3), "always"),
        (4, np.where(np.arange(N_ROWS) < 50, EACH_IN_ITS_OWN, 3), "by older kernels"),
        (4, np.where(np.arange(N_ROWS) < 20, EACH_IN_ITS_OWN, 3), "always"),
    ],
)
def test_many_rows_are_computed_as_few_are_unless_they_see_the_same_cells(
    n_kv_heads: int, row_lanes: npt.NDArray[np.int64], is_tiled: str, n_threads: int
) -> None:
    need_own_cells()
    model = Model(8, n_kv_heads)
    is_same = is_tiled == "never" or (is_tiled == "by older kernels" and ggml.attends_lanes_apart())
    assert ggml.attends_own_cells(n_rows=N_ROWS, n_heads=8, n_kv_heads=n_kv_heads) == (is_tiled == "never")
    cache, queries = cache_of(model, np.arange(600) % 6), queries_of(model, N_ROWS)
    together = attend(model, queries, cache, row_lanes, n_threads=n_threads)
    parts = [slice(at, at + 7) for at in range(0, N_ROWS, 7)]
    few = np.concatenate([attend(model, queries[part], cache, row_lanes[part]) for part in parts])
    assert np.array_equal(together, few) == is_same
    assert np.abs(together - few).max() < 1e-5


@pytest.mark.parametrize("n_decode", [46, 64, 90])
def test_the_rows_of_a_prompt_that_may_ride_with_decode_rows_are_computed_as_few_are(n_decode: int) -> None:
    need_own_cells()
    if not ggml.attends_lanes_apart():
        pytest.skip("these kernels leave many rows to llama.cpp")
    model, most = Model(4, 4, width=16), rows_apart(n_decode) + PAD_SEARCH_ROWS  # the stage may pad such a step
    cache = cache_of(model, np.arange(6 * n_decode) % (n_decode + 1))
    for n_rows, is_apart in ((most, True), (most + 4, False)):
        row_lanes = np.minimum(np.arange(n_rows), n_decode)
        n_other = n_rows - n_decode
        assert goes_by_tiles(n_decode, n_other, takes_lanes_apart=True) != is_apart
        queries = queries_of(model, n_rows)
        together = attend(model, queries, cache, row_lanes)
        parts = [slice(at, at + 7) for at in range(0, n_rows, 7)]
        few = np.concatenate([attend(model, queries[part], cache, row_lanes[part]) for part in parts])
        assert np.array_equal(together, few) == is_apart


def test_a_prompt_goes_by_tiles_whatever_other_lanes_hold() -> None:
    need_own_cells()
    model, row_lanes = Model(8, 4), np.full(N_ROWS, 3)
    queries, crowded = queries_of(model, N_ROWS), cache_of(model, np.arange(6_000) % 60)
    together = attend(model, queries, crowded, row_lanes)
    few = np.concatenate([attend(model, queries[at : at + 7], crowded, row_lanes[:7]) for at in range(0, N_ROWS, 7)])
    assert not np.array_equal(together, few)
    assert np.abs(together - few).max() < 1e-5


@pytest.mark.parametrize(
    ("n_kv_heads", "kv_type", "goes_by_tiles"),
    [(1, "f16", False), (2, "f16", True), (4, "f16", True), (1, "f32", True), (4, "q8_0", False)],
)
def test_a_stage_knows_whether_many_rows_go_by_tiles(
    n_kv_heads: int, kv_type: str, goes_by_tiles: bool, tmp_path: Path
) -> None:
    need_own_cells()
    artifact, _ = write_pipeline(tmp_path, TinyShape(n_embd=128, n_heads=4, n_kv_heads=n_kv_heads), [2])
    with NativeEngine(engine_config(artifact, n_lanes=2, ctx_tokens=32, max_rows=8, kv_type=kv_type)) as engine:
        assert engine.attention.goes_by_tiles == goes_by_tiles
