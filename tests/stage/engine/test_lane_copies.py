"""Copies of lanes, chains of copies, and lanes released before a copy was made, in both layouts, with quantised cells
too.

Also for a model with sliding windows, whose cells llama.cpp frees once no next row would read them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from relayline.coordinator.model.split import split_model
from relayline.deploy.testing.engines import engine_config
from relayline.deploy.testing.tiny_slices import TinyShape, write_stage
from relayline.stage.engine.native import NativeEngine
from relayline.wire.common.errors import PositionGapError
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.kernels

SHAPE = TinyShape(n_heads=2)  # a head is as wide as a block of q8_0
N_LANES, CTX_TOKENS, ALONE = 4, 64, 4
OTHER_SHAPE = 3e-2  # as in test_native.py


@pytest.fixture(scope="module", name="path")
def path_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stage(tmp_path_factory.mktemp("stage") / "only.gguf", SHAPE, 0, [])


@pytest.fixture(name="engine", params=["unified", "unified q8_0", "per-lane", "per-lane q8_0"])
def engine_fixture(request: pytest.FixtureRequest, path: Path) -> Iterator[NativeEngine]:
    kv_layout, _, kv_type = request.param.partition(" ")
    config = engine_config(path, N_LANES + 1, CTX_TOKENS, CTX_TOKENS, kv_layout=kv_layout, kv_type=kv_type or "f16")
    with NativeEngine(config) as engine:
        yield engine


@pytest.fixture(scope="module", name="windows")
def windows_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("windows")
    split_model(make_tiny("gemma3:pattern", directory / "model.gguf"), directory / "out", cuts=())
    return directory / "out" / "stage-0.gguf"


class World:
    """The content of lanes, and hidden rows in place of tokens."""

    def __init__(self, engine: NativeEngine, seed: int) -> None:
        self.engine, self.rng = engine, random.Random(seed)
        self.rows = np.random.default_rng(seed).standard_normal((32, engine.n_embd), np.float32)
        self.held: list[list[int]] = [[] for _ in range(N_LANES)]
        self.n_refused = 0

    def decode(self, lane: int, tokens: list[int], position: int) -> np.ndarray:
        n_rows, engine = len(tokens), self.engine
        engine.input_rows[:n_rows] = self.rows[tokens]
        engine.seq_ids[:n_rows], engine.positions[:n_rows] = lane, range(position, position + n_rows)
        engine.wants[:n_rows] = 1
        engine.decode(n_rows)
        return engine.logits(n_rows - 1).copy()

    def go_on(self, lane: int) -> None:
        """Decode more rows of a lane, and compare them with its expected content, computed again."""
        held = self.held[lane]
        more = [self.rng.randrange(len(self.rows)) for _ in range(self.rng.choice((1, 3, 12)))]
        if len(held) + len(more) > CTX_TOKENS:
            more, held[40:] = more[:1], []
            if not self.may_rewind(lane, len(held)):
                held.clear()
            self.engine.drop_from(lane, len(held))
        got = self.decode(lane, more, len(held))
        held += more
        expected = self.decode(ALONE, held, 0)
        self.engine.clear(ALONE)
        assert np.abs(got - expected).max() < OTHER_SHAPE, f"lane {lane} does not hold {held}"

    def may_rewind(self, lane: int, position: int) -> bool:
        try:
            self.engine.check_rewind(lane, position)
        except PositionGapError:
            self.n_refused += 1
            return False
        return True

    def copy(self) -> None:
        source, target = self.rng.sample(range(N_LANES), 2)
        n_tokens = self.rng.randint(0, len(self.held[source]))
        if not self.may_rewind(source, n_tokens):
            return
        self.engine.copy_prefix(source, target, n_tokens)
        self.held[target] = self.held[source][:n_tokens]

    def clear(self) -> None:
        lane = self.rng.randrange(N_LANES)
        self.engine.clear(lane)
        self.held[lane] = []


def live(engine: NativeEngine, seed: int) -> World:
    world = World(engine, seed)
    for _ in range(30):
        for _ in range(world.rng.randint(0, 3)):  # several of them before the next step
            world.rng.choice((world.copy, world.copy, world.clear))()
        world.go_on(world.rng.randrange(N_LANES))
        assert [engine.lane_tokens(lane) for lane in range(N_LANES)] == [len(held) for held in world.held]
    return world


@pytest.mark.sampled(20)
@pytest.mark.parametrize("seed", range(12))
def test_lanes_hold_their_copies(engine: NativeEngine, seed: int) -> None:
    assert live(engine, seed).n_refused == 0


@pytest.mark.parametrize("kv_layout", ["unified", "per-lane"])
def test_lanes_with_windows_hold_their_copies_or_refuse(kv_layout: str, windows: Path) -> None:
    """With separate cells a lane never loses one; with shared ones it may: then it says so, and is never wrong."""
    config = engine_config(windows, N_LANES + 1, CTX_TOKENS, CTX_TOKENS, kv_layout=kv_layout)
    n_refused = 0
    for seed in range(12):
        with NativeEngine(config) as engine:
            n_refused += live(engine, seed).n_refused
    assert (n_refused > 0) == (kv_layout == "unified")
