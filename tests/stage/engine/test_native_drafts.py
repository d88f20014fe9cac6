"""Frames of guesses on the real engine: each row has the logits of a single row, and a lane can be rewound.

Also for models with sliding windows shorter than a frame of guesses, with lanes many times as long as a window and full
to their last cell, with copied lanes, and after failed steps. Each lane is compared with the same rows read again in
another lane, one a step.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from relayline.coordinator.model.split import split_model
from relayline.deploy.testing.engines import engine_config, stage_config
from relayline.deploy.testing.tiny_slices import TinyShape, write_pipeline
from relayline.stage.assembly import load_stage
from relayline.stage.engine.native import NativeEngine
from relayline.wire.common.bounds import DRAFT_TOKENS_MAX, DRAFTED_ROWS_MAX
from relayline.wire.common.curve import PAD_SEARCH_ROWS
from relayline.wire.common.errors import NativeError, PositionGapError
from tests.support.tiny_models import make_tiny

N_LANES, CTX_TOKENS, WINDOW, ALONE = 2, 256, 8, 2  # lanes of 256 cells, which llama.cpp does not round up
OTHER_SHAPE = 3e-2  # as in test_native.py
Part = tuple[int, int, list[int]]  # lane, position, stand-ins for its tokens


@pytest.fixture(scope="module", name="paths")
def paths_fixture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Two stages of each model."""
    directory = tmp_path_factory.mktemp("models")
    found = {"llama": write_pipeline(directory, TinyShape(n_layers=2), [1])}
    for name, cut in (("gemma3:pattern", 3), ("olmo2:windows", 4)):
        split_model(make_tiny(name, directory / f"{name}.gguf"), directory / name, cuts=(cut,))
        found[name] = [directory / name / f"stage-{index}.gguf" for index in range(2)]
    return found


class Stages:
    """Two engines, one behind the other, and what their lanes should hold."""

    def __init__(self, paths: list[Path], kv_layout: str, seed: int) -> None:
        config = {"n_lanes": N_LANES + 1, "ctx_tokens": CTX_TOKENS, "max_rows": CTX_TOKENS, "kv_layout": kv_layout}
        self.engines = [NativeEngine(engine_config(path, **config)) for path in paths]  # type: ignore[arg-type]
        self.rng = random.Random(seed)
        self.rows = np.random.default_rng(seed).standard_normal((32, self.engines[0].n_embd), np.float32)
        self.held: list[list[int]] = [[] for _ in range(N_LANES)]
        self.n_refused = self.n_full = self.n_failed = 0

    def step(self, parts: list[Part]) -> np.ndarray:
        """One step, all of whose rows want logits: f32 [rows, n_vocab]."""
        at = 0
        first, last = self.engines
        for lane, position, tokens in parts:
            rows = slice(at, at + len(tokens))
            first.input_rows[rows] = self.rows[tokens]
            for engine in self.engines:
                engine.seq_ids[rows] = lane
                engine.positions[rows] = range(position, position + len(tokens))
                engine.wants[rows] = 1
            at += len(tokens)
        first.decode(at)
        last.input_rows[:at] = first.output_rows[:at]
        last.decode(at)
        return np.stack([last.logits(row) for row in range(at)])

    def read_anew(self, tokens: list[int], n_last: int) -> np.ndarray:
        """The last rows' logits if each is a separate step."""
        for engine in self.engines:
            engine.clear(ALONE)
        n_before = len(tokens) - n_last
        for start in range(0, n_before, 32):
            self.step([(ALONE, start, tokens[start : min(start + 32, n_before)])])
        return np.concatenate([self.step([(ALONE, at, [tokens[at]])]) for at in range(n_before, len(tokens))])

    def take_back(self, lane: int, position: int) -> int:
        """Let the lane end there, or at its start where it cannot be."""
        try:
            for engine in self.engines:
                engine.check_rewind(lane, position)
        except PositionGapError:
            self.n_refused += 1
            position = 0
        for engine in self.engines:
            engine.drop_from(lane, position)
        return position

    def copy(self) -> None:
        source, target = self.rng.sample(range(N_LANES), 2)
        n_tokens = self.rng.choice((len(self.held[source]), self.rng.randint(0, len(self.held[source]))))
        try:
            for engine in self.engines:
                engine.check_rewind(source, n_tokens)
        except PositionGapError:
            self.n_refused += 1
            return
        for engine in self.engines:
            engine.copy_prefix(source, target, n_tokens)
        self.held[target] = self.held[source][:n_tokens]

    def fail(self) -> None:
        """A step that one lane fails: others are as they were, and it too."""
        first = self.engines[0]
        if not all(self.held):
            return
        lengths = [len(held) for held in self.held]
        first.seq_ids[:3], first.positions[:3] = [0, 0, 1], [lengths[0], lengths[0] + 1, lengths[1] + 3]
        with pytest.raises(NativeError):
            first.decode(3)
        self.n_failed += 1

    def part(self, lane: int) -> Part | None:
        """Guesses behind the lane's content, or behind a part of it."""
        held = self.held[lane]
        position = len(held)
        if position and self.rng.random() < 0.6:
            back = self.rng.choice((1, 3, WINDOW - 1, WINDOW, WINDOW + 1, 20, DRAFT_TOKENS_MAX + 1, 100))
            position = self.take_back(lane, max(0, position - back))
        n_rows = min(self.rng.choice((1, 2, 5, DRAFT_TOKENS_MAX + 1)), CTX_TOKENS - position)
        self.n_full += position + n_rows == CTX_TOKENS
        held[position:] = [self.rng.randrange(len(self.rows)) for _ in range(n_rows)]
        return (lane, position, held[position:]) if n_rows else None

    def live(self, n_steps: int) -> None:
        for _ in range(n_steps):
            chance = self.rng.random()
            if chance < 0.15:
                self.copy()
            elif chance < 0.25:
                self.fail()
            elif chance < 0.35:  # a long prompt
                lane = self.rng.randrange(N_LANES)
                n_rows = min(CTX_TOKENS - len(self.held[lane]), 100)
                tokens = [self.rng.randrange(len(self.rows)) for _ in range(n_rows)]
                for start in range(0, n_rows, 32):
                    self.step([(lane, len(self.held[lane]) + start, tokens[start : start + 32])])
                self.held[lane] += tokens
            lanes = self.rng.sample(range(N_LANES), self.rng.randint(1, N_LANES))
            parts = [part for lane in lanes if (part := self.part(lane)) is not None]
            if not parts:
                continue
            found = np.split(self.step(parts), np.cumsum([len(tokens) for _, _, tokens in parts])[:-1])
            for (lane, position, tokens), got in zip(parts, found, strict=True):
                expected = self.read_anew(self.held[lane], len(tokens))
                assert np.abs(got - expected).max() < OTHER_SHAPE * expected.std(), f"lane {lane} from {position} on"
        for engine in self.engines:
            assert [engine.lane_tokens(lane) for lane in range(N_LANES)] == [len(held) for held in self.held]

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


@pytest.fixture(name="kv_layout", params=["unified", "per-lane"])
def kv_layout_fixture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["llama", "gemma3:pattern", "olmo2:windows"])
def test_rows_of_guesses_give_the_logits_of_single_rows(
    name: str, kv_layout: str, paths: dict[str, list[Path]]
) -> None:
    """And no rewind is refused where a stage says that it rewinds; otherwise only rewinds are refused."""
    n_refused = n_full = n_failed = 0
    for seed in range(2):
        stages = Stages(paths[name], kv_layout, seed)
        stages.live(30)
        stages.close()
        n_refused, n_full, n_failed = n_refused + stages.n_refused, n_full + stages.n_full, n_failed + stages.n_failed
    has_windows = name != "llama"
    assert [engine.attention.window for engine in stages.engines] == [WINDOW * has_windows] * 2
    assert (n_refused > 0) == (has_windows and kv_layout == "unified")
    assert n_failed > 0
    if not n_refused:
        assert n_full > 0


@pytest.mark.parametrize("name", ["llama", "gemma3:pattern"])
def test_a_stage_says_whether_it_rewinds_and_has_room_for_drafts(
    name: str, kv_layout: str, paths: dict[str, list[Path]]
) -> None:
    config = stage_config(paths[name][1], n_lanes=3, ctx_tokens=64, max_rows=64, kv_layout=kv_layout, calibrate=False)
    facts, executor = load_stage(config)
    try:
        assert facts.rewinds == facts.describe().rewinds == (name == "llama" or kv_layout == "per-lane")
        assert executor.engine.max_wanted == 3 + DRAFTED_ROWS_MAX + PAD_SEARCH_ROWS
    finally:
        executor.close()
