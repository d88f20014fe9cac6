"""`stage.engine.micro_batches` predicts how llama.cpp cuts a step: compared on paper here, with the engine below."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from relayline.deploy.testing.engines import engine_config
from relayline.deploy.testing.reference import ReferenceModel
from relayline.deploy.testing.tiny_slices import write_pipeline, write_whole
from relayline.stage.engine.micro_batches import cut
from relayline.stage.engine.native import NativeEngine
from tests.stage.engine.test_native import OTHER_SHAPE, SHAPE, Chain, Rows, reference_logits, tokens_of

N_LANES = 8
WITHOUT_FLASH = 2 * OTHER_SHAPE  # scores are then summed in another precision


@pytest.mark.parametrize(
    ("lanes", "sizes"),
    [
        ([0], (1,)),
        ([2, 0, 1], (3,)),
        ([0, 1, 3, 4, 6], (2, 2, 1)),
        ([5] * 7, (7,)),
        ([0, 1, 2, 2, 2], (3, 2)),  # the prompt's rows apart from the others: nothing follows its lane
        ([1, 2, 2, 2, 3], (3, 2)),  # neighbours on both sides: one row of each, then the rest of the prompt
        ([0, 0, 1, 1], (4,)),
    ],
)
def test_neighbouring_lanes_are_one_micro_batch(lanes: list[int], sizes: tuple[int, ...]) -> None:
    assert cut(np.array(lanes, np.int32)).sizes == sizes


def test_every_row_is_given_and_computed_once_and_a_lane_keeps_its_order() -> None:
    rng = random.Random(3)
    for _ in range(300):
        lanes = np.array([rng.randrange(6) for _ in range(rng.randrange(1, 20))], np.int32)
        step = cut(lanes)
        assert sum(step.sizes) == len(lanes)
        as_they_stand = list(range(len(lanes)))
        assert step.is_in_order == (step.given.tolist() == as_they_stand == step.computed.tolist())
        for order in (step.given, step.computed):
            assert sorted(order.tolist()) == list(range(len(lanes)))
            for lane in set(lanes.tolist()):
                own = [row for row in order.tolist() if lanes[row] == lane]
                assert own == sorted(own)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReferenceModel]:
    path = write_whole(tmp_path_factory.mktemp("whole") / "whole.gguf", SHAPE)
    with ReferenceModel(path, n_ctx=2048, n_seq_max=N_LANES) as model:
        yield model


@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_mixed_steps_of_any_lanes_give_the_same_as_alone(
    flash_attn: str, whole: ReferenceModel, tmp_path: Path
) -> None:
    rng = random.Random(7)
    chain = Chain(write_pipeline(tmp_path, SHAPE, [2]), n_lanes=N_LANES, kv_layout="per-lane", flash_attn=flash_attn)
    tolerance = OTHER_SHAPE if flash_attn == "on" else WITHOUT_FLASH
    held: dict[int, list[int]] = {lane: [] for lane in range(N_LANES)}
    n_cut = 0
    for seed in range(24):
        lanes = rng.sample(range(N_LANES), rng.randrange(1, N_LANES))
        parts = [Rows(lane, len(held[lane]), tokens_of(100 * seed + lane, rng.choice((1, 1, 1, 4)))) for lane in lanes]
        got = chain.decode(*parts)
        n_cut += len(chain.engines[0].micro_batches) > 1
        for part, logits in zip(parts, got, strict=True):
            held[part.lane] += part.tokens
            expected = reference_logits(whole, held[part.lane])[part.position :]
            assert np.abs(logits - expected).max() < tolerance, (seed, part.lane)
    assert n_cut > 10, "steps of scattered lanes were to be seen"
    chain.close()


def test_a_decode_step_of_neighbours_is_one_micro_batch(tmp_path: Path) -> None:
    path = write_pipeline(tmp_path, SHAPE, [2])[0]
    with NativeEngine(engine_config(path, n_lanes=4, ctx_tokens=256, max_rows=8, kv_layout="per-lane")) as engine:
        engine.seq_ids[:3], engine.positions[:3] = [3, 1, 2], 0
        engine.decode(3)
        assert engine.micro_batches == (3,)


def test_a_step_like_the_one_before_is_not_worked_out_again() -> None:
    lanes = np.array([3, 0, 1], np.int32)
    first = cut(lanes)
    assert cut(lanes.copy()) is first
    assert cut(lanes, sequential=False) is not first
    with pytest.raises(ValueError, match="read-only"):
        first.given[0] = 1
    lanes[:] = (0, 1, 2)  # the caller's array is filled again for each step
    assert cut(lanes).computed.tolist() == [0, 1, 2]
    assert first.computed.tolist() == [1, 2, 0]
