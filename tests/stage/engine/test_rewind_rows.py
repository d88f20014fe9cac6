"""Rows of a step that are rewound in lanes with a recurrent state, as after a wrong draft.

llama.cpp returns true and is wrong if it is asked for more than it has. So a rewound lane is compared with a fresh one,
and where the engine must refuse, the wrong answer is shown too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from llama_cpp import llama_cpp as llama

from relayline.coordinator.model.cuts import balanced_cuts
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.split import split_model
from relayline.deploy.testing.engines import engine_config
from relayline.stage.engine.micro_batches import cut
from relayline.stage.engine.native import NativeEngine
from relayline.wire.common.checkpoints import REWINDING_ARCHITECTURES
from relayline.wire.common.errors import PositionGapError, UsageError
from relayline.wire.common.kv_layout import LAYOUTS, asked_layout, layout_refusal
from tests.stage.engine.test_recurrent import loading_once
from tests.support.lane_texts import CLOSE, CTX, Lanes, far
from tests.support.tiny_hybrids import HYBRIDS
from tests.support.tiny_models import make_tiny
from tests.support.tiny_wide import WIDE_STATES

N_BACK = 4
ALL = HYBRIDS | WIDE_STATES
NAMES = [name for name in ALL if ":" not in name and ALL[name].architecture in REWINDING_ARCHITECTURES]
CASES = [(name, layout) for name in NAMES for layout in LAYOUTS if layout_refusal(layout, name) is None]
FEW = [case for case in CASES if case[0] in ("qwen35", "lfm2", "nemotron_h", "deepseek4")]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], Lanes]]:
    with loading_once(tmp_path_factory, N_BACK) as open_it:
        yield open_it


@pytest.fixture(params=CASES, ids="-".join)
def lanes(request: pytest.FixtureRequest, opened: Callable[[str, str], Lanes]) -> Lanes:
    return opened(*request.param)


@pytest.fixture(params=FEW, ids="-".join)
def few(request: pytest.FixtureRequest, opened: Callable[[str, str], Lanes]) -> Lanes:
    return opened(*request.param)


@pytest.mark.sampled(7)
def test_guessed_rows_are_taken_back_exactly(lanes: Lanes) -> None:
    for n_right in range(N_BACK + 1):
        lanes.engine.clear(0)
        lanes.decode((0, 0, 0, 20))
        lanes.decode((0, 0, 20, 21 + n_right), *([(0, 1, 21 + n_right, 21 + N_BACK)] if n_right < N_BACK else []))
        lanes.engine.check_rewind(0, 21 + n_right)
        lanes.engine.drop_from(0, 21 + n_right)
        assert lanes.engine.lane_tokens(0) == 21 + n_right
        found = lanes.decode((0, 0, 21 + n_right, 22 + n_right))[0]
        assert far(found, lanes.expected(0, (20, 21 + n_right, 22 + n_right))) < CLOSE


def test_no_more_is_taken_back_than_there_is(few: Lanes) -> None:
    few.decode((0, 0, 0, 20))
    few.decode((0, 0, 20, 23))
    for position in (20, 19, 5):  # the first row of a step can never be taken back
        with pytest.raises(PositionGapError, match="cannot be taken back"):
            few.engine.check_rewind(0, position)
    few.engine.drop_from(0, 22)
    with pytest.raises(PositionGapError):
        few.engine.check_rewind(0, 21)  # nor twice
    few.decode((0, 0, 22, 23))
    with pytest.raises(PositionGapError):
        few.engine.check_rewind(0, 22)


@pytest.mark.parametrize("case", [("qwen35", "unified"), ("lfm2", "unified")], ids="-".join)
def test_a_step_of_several_other_lanes_limits_a_lanes_rewind(
    case: tuple[str, str], opened: Callable[[str, str], Lanes]
) -> None:
    lanes = opened(*case)
    lanes.decode((0, 0, 0, 20), (1, 1, 0, 20), (2, 2, 0, 20))
    lanes.decode((1, 1, 20, 21), (1, 0, 21, 24))
    lanes.decode((2, 2, 20, 21))  # of one lane: nothing moves
    lanes.engine.check_rewind(1, 21)
    lanes.decode((0, 0, 20, 21), (2, 2, 21, 22))
    with pytest.raises(PositionGapError):
        lanes.engine.check_rewind(1, 21)
    # The planted fault: llama.cpp does it, and the result is another lane's.
    assert llama.llama_memory_seq_rm(lanes.engine._memory, 1, 21, -1)
    assert far(lanes.decode((1, 1, 21, 22))[0], lanes.expected(1, (20, 21, 22))) > 0.05


def test_a_lane_that_was_taken_back_can_be_copied_and_others_only_whole(few: Lanes) -> None:
    few.decode((0, 0, 0, 20))
    few.decode((0, 0, 20, 21), (0, 1, 21, 24))
    few.decode((1, 2, 0, 5))
    with pytest.raises(PositionGapError):
        few.engine.copy_prefix(0, 1, 21)
    assert few.engine.lane_tokens(1) == 5, "nothing has changed"
    few.engine.drop_from(0, 21)
    few.engine.copy_prefix(0, 1, 21)
    expected = few.expected(0, (20, 21, 22))
    for lane in (1, 0):
        assert far(few.decode((lane, 0, 21, 22))[0], expected) < CLOSE


def test_a_checkpoint_of_a_lane_that_was_taken_back_is_that_of_its_end(few: Lanes) -> None:
    few.decode((0, 0, 0, 20))
    few.decode((0, 0, 20, 21), (0, 1, 21, 24))
    few.engine.drop_from(0, 21)
    few.engine.checkpoint(0)
    few.decode((0, 1, 21, 30))
    few.engine.drop_from(0, 21)
    assert far(few.decode((0, 0, 21, 22))[0], few.expected(0, (20, 21, 22))) < CLOSE


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(2))
def test_lanes_in_mixed_steps_answer_as_alone(seed: int, few: Lanes) -> None:
    """Guesses of random length, some wrong; lanes that cannot be rewound start again."""
    rng, engine = random.Random(seed), few.engine
    n_right = [0, 0, 0]  # tokens of each lane, whose text is its number
    n_taken_back = n_refused = 0
    for _ in range(30):
        parts: list[tuple[int, int, int, int]] = []
        wrong: dict[int, int] = {}
        for lane in rng.sample(range(3), rng.choice((1, 1, 2, 3))):
            end = engine.lane_tokens(lane)
            if end > n_right[lane]:
                try:
                    engine.check_rewind(lane, n_right[lane])
                    engine.drop_from(lane, n_right[lane])
                    n_taken_back += 1
                except PositionGapError:
                    n_refused += 1
                    engine.clear(lane)
                    n_right[lane] = 0
            if n_right[lane] > CTX - 16:
                engine.clear(lane)
                n_right[lane] = 0
            first, n_rows = n_right[lane], rng.choice((1, 1, 2, 5, 9))
            parts.append((lane, lane, first, first + n_rows))
            if rng.random() < 0.6:
                wrong[lane] = rng.randint(1, N_BACK)
                parts.append((lane, (lane + 1) % 3, first + n_rows, first + n_rows + wrong[lane]))
            n_right[lane] = first + n_rows
        found = few.decode(*parts)
        for (lane, text, _, end), rows in zip(parts, found, strict=True):
            if text == lane:
                assert far(rows[-1:], few.expected(lane, (end,))[-1:]) < CLOSE
    assert n_taken_back > 3


def test_the_families_are_those_of_llama_cpp(tmp_path: Path) -> None:
    for name in ALL:
        if ":" in name or name not in ("qwen3next", "granitehybrid", "mamba2", *NAMES):
            continue
        model = make_tiny(name, tmp_path / f"{name}.gguf")
        split_model(model, tmp_path / name, cuts=balanced_cuts(inspect_model(model), 2))
        config = engine_config(
            tmp_path / name / "stage-0.gguf", 2, 64, max_rows=16, rewind_rows=3, kv_layout=asked_layout("auto", name)
        )
        with NativeEngine(config) as engine:
            assert engine.rewind_rows == (3 if name in REWINDING_ARCHITECTURES else 0)


def test_a_step_has_room_for_rows_that_can_be_rewound(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs --max-rows 10"):
        NativeEngine(engine_config(tmp_path / "none.gguf", 2, 64, max_rows=9, rewind_rows=8))


def test_the_last_rows_of_a_lane_stay_together() -> None:
    def sizes(lanes: list[int]) -> tuple[int, ...]:
        return cut(np.array(lanes, np.int32), sequential=False, n_tail=3).sizes

    assert sizes([0, 1]) == (2,)
    assert sizes([0, 0, 0, 1]) == (3, 1), "one of each would part the last three"
    assert sizes([0] * 4 + [1]) == (2, 3)
