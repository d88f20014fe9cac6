"""Rows that attend to each other: split equals whole, once equals twice, and attention is causal again behind them.

The whole model is driven by bare llama.cpp, as its own helper for images does it: one batch without causal attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from llama_cpp import llama_cpp as llama

from relayline.coordinator.model.split import split_model
from relayline.deploy.testing.engines import engine_config
from relayline.deploy.testing.reference import ReferenceModel
from relayline.stage.engine.embedding import EmbeddingTable
from relayline.stage.engine.native import NativeEngine
from relayline.wire.common.errors import InternalError
from relayline.wire.common.kv_layout import LAYOUTS
from tests.support.attention import near
from tests.support.tiny_models import make_tiny
from tests.support.tiny_shapes import N_EMBD

CTX, NEAR = 64, near(1e-3, 1e-2)  # logits have a standard deviation over 1
BEFORE, BEHIND = [5, 9, 11], [20, 3, 41, 7]
IMAGE = np.random.default_rng(3).standard_normal((12, N_EMBD)).astype(np.float32)  # wider than the window of 8
END = len(BEFORE) + len(IMAGE)


class Whole(ReferenceModel):
    """The unsplit model, which takes rows of an image as well."""

    def see(self, rows: np.ndarray, position: int, *, is_mutual: bool = True) -> None:
        """Decode rows, which may attend to each other."""
        batch = llama.llama_batch_init(len(rows), N_EMBD, 1)
        batch.n_tokens = len(rows)
        np.ctypeslib.as_array(batch.embd, rows.shape)[:] = rows
        for row in range(len(rows)):
            batch.pos[row], batch.n_seq_id[row], batch.logits[row] = position + row, 1, 0
            batch.seq_id[row][0] = 0
        llama.llama_set_causal_attn(self._context, not is_mutual)
        assert llama.llama_decode(self._context, batch) == 0
        llama.llama_set_causal_attn(self._context, True)
        llama.llama_batch_free(batch)


class Stages:
    """All stages in one process, f32 handed from one to the next."""

    def __init__(self, paths: list[Path], layout: str) -> None:
        self.engines = [NativeEngine(engine_config(path, 2, CTX, 32, kv_layout=layout)) for path in paths]
        self._table = EmbeddingTable(self.engines[0].artifact)

    def read(
        self, given: list[int] | np.ndarray, position: int, lane: int = 0, *, is_mutual: bool = False
    ) -> np.ndarray:
        """Decode tokens or rows of a lane in one step; returns the logits of each."""
        n_rows = len(given)
        for index, engine in enumerate(self.engines):
            rows = engine.input_rows[:n_rows]
            if index:
                rows[:] = self.engines[index - 1].output_rows[:n_rows]
            elif isinstance(given, np.ndarray):
                self._table.take(given, rows)
            else:
                self._table.lookup(np.array(given, np.int32), rows)
            engine.positions[:n_rows] = np.arange(position, position + n_rows)
            engine.seq_ids[:n_rows], engine.wants[:n_rows] = lane, 1
            engine.decode(n_rows, is_mutual=is_mutual)
        return np.stack([self.engines[-1].logits(row) for row in range(n_rows)])

    def drop_from(self, lane: int, position: int) -> None:
        for engine in self.engines:
            engine.drop_from(lane, position)


@pytest.fixture(scope="module", name="paths")
def paths_fixture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    directory = tmp_path_factory.mktemp("gemma3")
    whole = make_tiny("gemma3", directory / "model.gguf")
    file = split_model(whole, directory / "out", cuts=(3,))
    return {"whole": [whole], "stages": [directory / "out" / stage.file for stage in file.stages]}


@pytest.fixture(name="stages", params=LAYOUTS)
def stages_fixture(paths: dict[str, list[Path]], request: pytest.FixtureRequest) -> Iterator[Stages]:
    made = Stages(paths["stages"], request.param)
    yield made
    for engine in made.engines:
        engine.close()


@pytest.fixture(scope="module", name="expected")
def expected_fixture(paths: dict[str, list[Path]]) -> np.ndarray:
    """The logits of the tokens behind an image, by the whole model."""
    with Whole(paths["whole"][0], CTX, 1) as whole:
        whole.read(BEFORE, 0)
        whole.see(IMAGE, len(BEFORE))
        return whole.read(BEHIND, END)


def test_split_equals_whole_and_rows_behind_it_are_causal_again(stages: Stages, expected: np.ndarray) -> None:
    stages.read(BEFORE, 0)
    stages.read(IMAGE, len(BEFORE), is_mutual=True)
    together = stages.read(BEHIND, END)
    assert np.abs(together - expected).max() < NEAR
    assert expected.std() > 1
    stages.drop_from(0, END)
    for at, token in enumerate(BEHIND):
        assert np.abs(stages.read([token], END + at)[0] - expected[at]).max() < NEAR


def test_without_it_the_answer_is_another(stages: Stages, expected: np.ndarray) -> None:
    stages.read(BEFORE, 0)
    stages.read(IMAGE, len(BEFORE))
    assert np.abs(stages.read(BEHIND, END) - expected).max() > 100 * NEAR


def test_a_step_retried_is_a_step_done_once_and_another_lane_sees_nothing(stages: Stages, expected: np.ndarray) -> None:
    other = stages.read(BEHIND, 0, lane=1)
    stages.drop_from(1, 0)
    stages.read(BEHIND[:2], 0, lane=1)
    stages.read(BEFORE, 0)
    for _ in range(2):
        stages.drop_from(0, len(BEFORE))
        stages.read(IMAGE, len(BEFORE), is_mutual=True)
    assert np.abs(stages.read(BEHIND, END) - expected).max() < NEAR
    assert np.abs(stages.read(BEHIND[2:], 2, lane=1) - other[2:]).max() < NEAR


def test_the_rest_of_an_image_whose_first_rows_are_held_sees_them(stages: Stages, expected: np.ndarray) -> None:
    stages.read(BEFORE, 0)
    stages.read(IMAGE, len(BEFORE), is_mutual=True)
    for engine in stages.engines:
        engine.check_rewind(0, END - 2)
    stages.drop_from(0, END - 2)
    stages.read(IMAGE[-2:], END - 2, is_mutual=True)
    assert np.abs(stages.read(BEHIND, END) - expected).max() < NEAR


def test_models_with_a_recurrent_state_refuse_such_rows(tmp_path: Path) -> None:
    whole = make_tiny("mamba2", tmp_path / "model.gguf")
    file = split_model(whole, tmp_path / "out", cuts=())
    engine = NativeEngine(engine_config(tmp_path / "out" / file.stages[0].file, 1, CTX, 32))
    with engine, pytest.raises(InternalError, match="a model that attends alone"):
        engine.decode(2, is_mutual=True)
