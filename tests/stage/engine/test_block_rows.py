"""Stages of a model in which the inputs of blocks enter all later layers: kimi-k3, behind placeholders.

tests.families compares every cut with the whole model. Here: rows of several lanes, in pieces and out of order, on
stages in the middle; and that placeholders are not computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from relayline.coordinator.model.split import split_model
from relayline.stage.engine.lane_state import read_partial
from relayline.wire.common.kv_layout import LAYOUTS
from relayline.wire.model_files.gguf_header import read_header
from tests.support.chain import Chain
from tests.support.family_check import tokens, whole_logits
from tests.support.lane_texts import CLOSE, Lanes, far
from tests.support.tiny_hybrids import BLOCK_LAYERS, K3_LAYERS
from tests.support.tiny_models import make_tiny
from tests.support.tiny_shapes import N_EMBD

pytestmark = pytest.mark.kernels

# In the middle of a block, where one begins, over several, and one layer alone.
RANGES = [(4, 8), (6, 8), (4, 9), (5, 6)]
NAN = b"\xff"  # a float of such bytes is none, and the zeros of other types are none of them


@pytest.fixture(params=[(edges, layout) for edges in RANGES for layout in LAYOUTS], name="lanes")
def lanes_fixture(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lanes]:
    (start, end), layout = request.param
    cuts = (start, end) if end < K3_LAYERS else (start,)
    split_model(make_tiny("kimi-k3", tmp_path / "model.gguf"), tmp_path / "out", cuts=cuts)
    lanes = Lanes(tmp_path / "out" / "stage-1.gguf", layout)
    yield lanes
    lanes.engine.close()


@pytest.mark.sampled(4)
def test_mixed_steps_equal_lanes_alone(lanes: Lanes) -> None:
    """Each row leaves with the inputs of its own blocks: those that entered, and those of the stage's own layers."""
    artifact = lanes.engine.artifact
    n_entered = artifact.width_in - N_EMBD
    for lane, first, end, rows, expected in lanes.mixed_steps():
        assert far(rows, expected) < CLOSE
        entered = lanes.texts[lane][first:end]
        assert (rows[:, N_EMBD : N_EMBD + n_entered] == entered[:, N_EMBD:]).all()
        if artifact.layer_start % BLOCK_LAYERS == 0:
            assert (rows[:, N_EMBD + n_entered : 2 * N_EMBD + n_entered] == entered[:, :N_EMBD]).all()


@pytest.mark.sampled(4)
def test_a_lane_goes_on_exactly_from_a_checkpoint_and_from_a_copy(lanes: Lanes) -> None:
    expected = lanes.expected(0, (24, 25))
    lanes.decode((0, 0, 0, 24))
    lanes.engine.checkpoint(0)
    lanes.decode((0, 1, 24, 28))
    lanes.engine.check_rewind(0, 24)
    lanes.engine.drop_from(0, 24)
    lanes.engine.copy_prefix(0, 1, 24)
    assert far(lanes.decode((0, 0, 24, 25))[0], expected) == 0.0
    assert far(lanes.decode((1, 0, 24, 25))[0], expected) < CLOSE


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("start", [5, 6])
def test_wrong_guesses_are_taken_back_behind_placeholders(start: int, layout: str, tmp_path: Path) -> None:
    """While another lane of the step keeps its rows."""
    split_model(make_tiny("kimi-k3", tmp_path / "model.gguf"), tmp_path / "out", cuts=(start, 9))
    lanes = Lanes(tmp_path / "out" / "stage-1.gguf", layout, rewind_rows=3)
    with lanes.engine as engine:
        expected = [lanes.expected(0, (20, 21, 24)), lanes.expected(1, (15, 17, 20))]
        lanes.decode((0, 0, 0, 20), (1, 1, 0, 15))
        wrong = lanes.decode((0, 0, 20, 21), (0, 2, 21, 24), (1, 1, 15, 17))[1]
        assert far(wrong, expected[0]) > 0.1
        engine.check_rewind(0, 21)
        engine.drop_from(0, 21)
        found = lanes.decode((0, 0, 21, 24), (1, 1, 17, 20))
        assert max(far(rows, ours) for rows, ours in zip(found, expected, strict=True)) < CLOSE


@pytest.mark.parametrize("cuts", [(4, 5, 6, 7, 8, 9), (4, 7), (9,)])
def test_placeholders_are_not_computed(cuts: tuple[int, ...], tmp_path: Path) -> None:
    """Their weights are no numbers. A state that was computed with them would be none, and theirs are still zeros."""
    model = make_tiny("kimi-k3", tmp_path / "model.gguf")
    pipeline = split_model(model, tmp_path / "out", cuts=cuts)
    n_spoiled = 0
    for index, start in enumerate((0, *cuts)):
        path = tmp_path / "out" / f"stage-{index}.gguf"
        data = bytearray(path.read_bytes())
        for tensor in read_header(path).tensors:
            if tensor.name.startswith("blk.") and int(tensor.name.split(".")[1]) < start:
                data[tensor.offset : tensor.offset + tensor.size_bytes] = NAN * tensor.size_bytes
                n_spoiled += 1
        path.write_bytes(data)
    assert n_spoiled > 20
    fed, expected = tokens(128), whole_logits(model, 128)
    with Chain(tmp_path / "out", pipeline) as chain:
        steps = [chain.step(fed[:7]), chain.step(fed[7:20]), *(chain.step([token]) for token in fed[20:])]
        states = [read_partial(engine._context, 0) for engine in chain.engines]
    assert far(np.concatenate(steps), expected) < 1e-3
    for state in states:
        assert state is not None
        assert not np.isnan(state[: state.size // 4 * 4].view(np.float32)).any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lanes_in_one_step_are_the_same_in_four_stages_as_in_one(layout: str, tmp_path: Path) -> None:
    """To the bit. The whole model differs from itself by float noise if a step has rows of several lanes."""
    model, fed, found = make_tiny("kimi-k3", tmp_path / "model.gguf"), tokens(128), []
    for cuts in ((), (4, 5, 8)):
        directory = tmp_path / f"{len(cuts)}"
        pipeline = split_model(model, directory, cuts=cuts)
        with Chain(directory, pipeline, lanes=(2, 0, 1), kv_layout=layout) as chain:
            found.append(np.concatenate([chain.step(fed[:20]), *(chain.step([token]) for token in fed[20:])]))
    assert far(found[1], found[0]) == 0.0
