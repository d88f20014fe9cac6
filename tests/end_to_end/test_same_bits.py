"""Below a tile of attention a row of the demo model has the same bits in any batch (coordinator.schedule.tiles)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from relayline.coordinator.model.split import split_model
from relayline.deploy.testing.engines import engine_config
from relayline.deploy.testing.paths import DEMO_MODEL as MODEL
from relayline.stage.engine import ggml
from relayline.stage.engine.embedding import EmbeddingTable
from relayline.stage.engine.native import NativeEngine
from relayline.wire.common.curve import ATTENTION_TILE_ROWS as TILE
from relayline.wire.common.kv_layout import LAYOUTS

pytestmark = pytest.mark.kernels

N_LANES, N_TOKENS = 4, 90
Logits = npt.NDArray[np.float32]
Place = tuple[int, int]  # lane and position


@pytest.fixture(scope="module", name="paths")
def paths_fixture(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    if not ggml.attends_own_cells(n_rows=1, n_heads=6, n_kv_heads=3):
        pytest.skip("this build's attention is llama.cpp's own: bits depend on the other lanes")
    directory = tmp_path_factory.mktemp("split")
    split_model(MODEL, directory, cuts=(4,))
    return [directory / f"stage-{index}.gguf" for index in range(2)]


class Stages:
    """Two stages of the demo model with half-precision rows between them."""

    def __init__(self, paths: list[Path], kv_layout: str) -> None:
        self.kv_layout = kv_layout
        self.engines = [
            NativeEngine(engine_config(path, N_LANES, 128, 4 * N_TOKENS, kv_layout=kv_layout)) for path in paths
        ]
        self.embedding = EmbeddingTable(self.engines[0].artifact)

    def step(self, rows: list[Place], texts: list[list[int]]) -> dict[Place, Logits]:
        first, last = self.engines
        tokens = np.array([texts[lane][position] for lane, position in rows], np.int32)
        self.embedding.lookup(tokens, first.input_rows[: len(rows)])
        for engine in self.engines:
            engine.seq_ids[: len(rows)] = [lane for lane, _ in rows]
            engine.positions[: len(rows)] = [position for _, position in rows]
            engine.wants[: len(rows)] = 1
            engine.decode(len(rows))
            if engine is first:
                last.input_rows[: len(rows)] = first.output_rows[: len(rows)].astype(np.float16)
        return {place: last.logits(row).copy() for row, place in enumerate(rows)}

    def read(self, steps: list[list[Place]], texts: list[list[int]]) -> dict[Place, Logits]:
        """Forget everything, then run these steps."""
        for engine in self.engines:
            for lane in range(N_LANES):
                engine.clear(lane)
        found: dict[Place, Logits] = {}
        for rows in steps:
            found |= self.step(rows, texts)
        return found


@pytest.fixture(scope="module", name="stages", params=LAYOUTS)
def stages_fixture(request: pytest.FixtureRequest, paths: list[Path]) -> Iterator[Stages]:
    made = Stages(paths, request.param)
    yield made
    for engine in made.engines:
        engine.close()


def some_steps(rng: random.Random, rows_max: int) -> list[list[Place]]:
    """All rows of all lanes in steps of random sizes and mixtures, each lane in order."""
    sent, steps = [0] * N_LANES, []
    while min(sent) < N_TOKENS:
        rows: list[Place] = []
        for lane in rng.sample(range(N_LANES), N_LANES):
            n_rows = rng.choice((0, 1, 1, rng.randint(1, rows_max)))
            n_rows = min(n_rows, N_TOKENS - sent[lane], rows_max - len(rows))
            rows += [(lane, position) for position in range(sent[lane], sent[lane] + n_rows)]
            sent[lane] += n_rows
        if rows:
            steps.append(rows)
    return steps


def test_a_row_has_the_same_bits_in_any_company_below_a_tile(stages: Stages) -> None:
    rng = random.Random(5)
    texts = [[rng.randrange(3, 400) for _ in range(N_TOKENS)] for _ in range(N_LANES)]
    alone = stages.read([[(lane, at)] for lane in range(N_LANES) for at in range(N_TOKENS)], texts)
    for _ in range(4):
        found = stages.read(some_steps(rng, TILE - 1), texts)
        assert all(np.array_equal(found[place], alone[place]) for place in alone)


def test_a_row_has_the_same_bits_whatever_lanes_forget(stages: Stages) -> None:
    """Wrong guesses are forgotten and streams end. In shared cells a lane's rows then lie in another order."""
    if stages.kv_layout == "unified" and not ggml.attends_in_order():
        pytest.skip("this build's sums over shared cells go in the order of the cells")
    rng = random.Random(5)
    texts = [[rng.randrange(3, 400) for _ in range(N_TOKENS)] for _ in range(N_LANES)]
    alone = stages.read([[(lane, at)] for lane in range(N_LANES) for at in range(N_TOKENS)], texts)
    held = [0] * N_LANES
    stages.read([], texts)
    for turn in range(60):
        rows: list[Place] = []
        for lane in rng.sample(range(N_LANES), N_LANES):
            n_rows = min(rng.choice((1, 1, 2, 4, 8)), N_TOKENS - held[lane])
            rows += [(lane, position) for position in range(held[lane], held[lane] + n_rows)]
            held[lane] += n_rows
        found = stages.step(rows, texts)
        assert all(np.array_equal(logits, alone[place]) for place, logits in found.items())
        for lane in range(N_LANES):
            n_left = 0 if turn % 20 == 5 * lane or held[lane] == N_TOKENS else held[lane] - rng.choice((0, 0, 1, 4))
            if max(0, n_left) < held[lane]:
                held[lane] = max(0, n_left)
                for engine in stages.engines:
                    engine.drop_from(lane, held[lane])
