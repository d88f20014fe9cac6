"""Lanes with a recurrent state: to where they can be rewound, what can be copied, and the state after a failed step.

Each model is hot (see tiny_hybrids): a wrong state moves the output by deviations, as the first test shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relayline.coordinator.model.cuts import balanced_cuts
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.split import split_model
from relayline.deploy.testing.engines import engine_config, stage_config
from relayline.stage.assembly import load_stage
from relayline.stage.engine.lane_state import read_partial, write_partial
from relayline.stage.engine.native import NativeEngine
from relayline.stage.speed.calibrate import fresh_curves
from relayline.wire.common.errors import NativeError, PositionGapError, UsageError
from relayline.wire.common.kv_layout import LAYOUTS, layout_refusal
from tests.support.lane_texts import CLOSE, N_LANES, Lanes, far
from tests.support.tiny_hybrids import HYBRIDS
from tests.support.tiny_models import make_tiny
from tests.support.tiny_wide import WIDE_STATES

pytestmark = pytest.mark.kernels

CASES = [
    (name, kv_layout)
    for name in HYBRIDS | WIDE_STATES
    if ":" not in name or name == "deepseek4:hash"
    for kv_layout in LAYOUTS
    if layout_refusal(kv_layout, (HYBRIDS | WIDE_STATES)[name].architecture) is None
]
# One of each kind of memory: delta net, three kinds of layers, convolution, both in one layer, nothing that attends.
FEW = [case for case in CASES if case[0] in ("qwen35", "nemotron_h", "lfm2", "falcon-h1", "mamba2", "deepseek4")]


@contextlib.contextmanager
def loading_once(directories: pytest.TempPathFactory, rewind_rows: int = 0) -> Iterator[Callable[[str, str], Lanes]]:
    """Loads each model once, for the length of a with block; its lanes are empty whenever it is asked for."""
    found: dict[tuple[str, str], Lanes] = {}

    def open_it(name: str, kv_layout: str) -> Lanes:
        if (name, kv_layout) not in found:
            found[name, kv_layout] = load(name, kv_layout, directories.mktemp("model"), rewind_rows)
        lanes = found[name, kv_layout]
        for lane in range(N_LANES):
            lanes.engine.clear(lane)
        return lanes

    yield open_it
    for lanes in found.values():
        lanes.engine.close()


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], Lanes]]:
    with loading_once(tmp_path_factory) as open_it:
        yield open_it


@pytest.fixture(params=CASES, ids="-".join)
def lanes(request: pytest.FixtureRequest, opened: Callable[[str, str], Lanes]) -> Lanes:
    return opened(*request.param)


@pytest.fixture(params=FEW, ids="-".join)
def few(request: pytest.FixtureRequest, opened: Callable[[str, str], Lanes]) -> Lanes:
    return opened(*request.param)


def load(name: str, kv_layout: str, directory: Path, rewind_rows: int = 0) -> Lanes:
    model = make_tiny(name, directory / "model.gguf")
    split_model(model, directory / "out", cuts=balanced_cuts(inspect_model(model), 2))
    return Lanes(directory / "out" / "stage-0.gguf", kv_layout, rewind_rows)


@pytest.mark.sampled(14)
def test_a_lane_goes_on_exactly_from_a_checkpoint_and_a_wrong_state_shows(lanes: Lanes) -> None:
    """At a multiple of 8, because a checkpoint of deepseek4 puts its window of 8 rows into other cells.

    llama.cpp's own sums go over all cells, eight or more at once. Any other shift moves the last bits.
    """
    expected = lanes.expected(0, (24, 25))
    lanes.decode((0, 0, 0, 24))
    lanes.engine.checkpoint(0)
    lanes.decode((0, 1, 24, 28))
    lanes.engine.check_rewind(0, 24)
    lanes.engine.drop_from(0, 24)
    assert lanes.engine.lane_tokens(0) == 24
    assert far(lanes.decode((0, 0, 24, 25))[0], expected) == 0.0
    # The planted fault: the state of another text at the same position.
    context = lanes.engine._context
    lanes.decode((1, 1, 0, 24))
    wrong = read_partial(context, 1)
    assert wrong is not None
    lanes.engine.drop_from(0, 24)
    assert write_partial(context, 0, wrong)
    assert far(lanes.decode((0, 0, 24, 25))[0], expected) > 0.05


def test_a_lane_cannot_be_taken_back_to_where_it_has_no_checkpoint(few: Lanes) -> None:
    few.decode((0, 0, 0, 20))
    few.engine.checkpoint(0)
    few.decode((0, 0, 20, 30))
    with pytest.raises(PositionGapError, match=r"from position 30 to 25: .* its checkpoints are at 20"):
        few.engine.check_rewind(0, 25)
    with pytest.raises(NativeError, match="lane 0 has no checkpoint at 25"):
        few.engine.drop_from(0, 25)
    for position in (0, 20, 30, 31):
        few.engine.check_rewind(0, position)
    assert few.engine.lane_tokens(0) == 30, "nothing has changed"
    few.engine.drop_from(0, 20)
    few.engine.clear(0)
    few.decode((0, 0, 0, 30))
    with pytest.raises(PositionGapError, match="its checkpoints are at none"):
        few.engine.check_rewind(0, 20)


def test_copies_are_exact_whole_and_from_a_checkpoint(lanes: Lanes) -> None:
    """Also if the source continues before the copy does, and from a copy of a copy."""
    whole, beginning = lanes.expected(0, (20, 30, 31)), lanes.expected(0, (20, 21))
    lanes.decode((0, 0, 0, 20))
    lanes.engine.checkpoint(0)
    lanes.decode((0, 0, 20, 30))
    lanes.engine.check_rewind(0, 30)
    lanes.engine.copy_prefix(0, 1, 30)
    lanes.engine.check_rewind(1, 20)
    lanes.engine.copy_prefix(1, 2, 20)
    assert [lanes.engine.lane_tokens(lane) for lane in range(3)] == [30, 30, 20]
    other = lanes.decode((0, 1, 30, 31))[0]
    assert far(lanes.decode((1, 0, 30, 31))[0], whole) < CLOSE
    assert far(lanes.decode((2, 0, 20, 21))[0], beginning) < CLOSE
    assert far(other, whole) > 0.05
    with pytest.raises(PositionGapError):
        lanes.engine.check_rewind(2, 10)


def test_mixed_steps_equal_lanes_alone(lanes: Lanes) -> None:
    assert all(far(step.found, step.expected) < CLOSE for step in lanes.mixed_steps())


def test_a_step_that_failed_leaves_its_lanes_empty_and_others_as_they_were(
    few: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The native step has moved the states before the fault comes; at a checkpoint they are taken back instead."""
    expected = few.expected(2, (20, 21))
    few.decode((0, 0, 0, 20), (1, 1, 0, 20), (2, 2, 0, 20))
    few.engine.checkpoint(1)

    def fail(*_: object) -> None:
        raise NativeError("planted")

    assert few.engine._capture is not None
    with monkeypatch.context() as patch:
        patch.setattr(few.engine._capture, "check", fail)
        with pytest.raises(NativeError, match="planted"):
            few.decode((0, 0, 20, 24), (1, 1, 20, 24))
    assert [few.engine.lane_tokens(lane) for lane in range(3)] == [0, 20, 20]
    assert far(few.decode((2, 2, 20, 21))[0], expected) < CLOSE
    again = few.decode((1, 1, 20, 24))[0]
    assert far(again, few.expected(1, (20, 24))) < CLOSE


def test_a_step_without_room_changes_nothing(few: Lanes) -> None:
    few.decode((0, 0, 0, 20))
    few.engine.positions[0], few.engine.seq_ids[0] = 7, 0  # which the lane holds already
    with pytest.raises(NativeError, match="code -1"):
        few.engine.decode(1)
    assert few.engine.lane_tokens(0) == 0, "whose state may have moved: it is read again"


def test_kimi_linear_runs_with_shared_cells_alone(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="kimi-linear runs with shared KV cells only; use --kv-layout unified"):
        load("kimi-linear", "per-lane", tmp_path)


@pytest.mark.parametrize(("name", "n_held"), [("qwen35", 0), ("llama", 2)])
def test_no_lane_with_a_state_is_held_and_a_first_start_can_measure(name: str, n_held: int, tmp_path: Path) -> None:
    """Measuring clears the last lane; one beyond those that llama.cpp has states for ended the stage."""
    model = make_tiny(name, tmp_path / "model.gguf")
    split_model(model, tmp_path / "out", cuts=balanced_cuts(inspect_model(model), 2))
    config = engine_config(tmp_path / "out" / "stage-0.gguf", 2, 64, max_rows=8, spare_lanes=1, held_lanes=2)
    with NativeEngine(config) as engine:
        assert engine.config.held_lanes == n_held
        assert engine.config.n_sequences == 3 + n_held
        for lane in range(engine.config.n_sequences):
            engine.clear(lane)
        assert fresh_curves(engine).decode.points


@pytest.mark.parametrize("name", ["qwen35", "llama"])
def test_a_stage_reports_its_state_and_pads_no_step_with_one(name: str, tmp_path: Path) -> None:
    """Drafts need no logits; scratch rows would be computed separately, and cost more than they save."""
    model = make_tiny(name, tmp_path / "model.gguf")
    split_model(model, tmp_path / "out", cuts=balanced_cuts(inspect_model(model), 2))
    facts, executor = load_stage(
        stage_config(tmp_path / "out" / "stage-0.gguf", n_lanes=2, ctx_tokens=64, calibrate=False)
    )
    try:
        described = facts.describe()
        assert (described.keeps_state, described.rewinds) == ((True, False) if name == "qwen35" else (False, True))
        assert executor._padding is not None
        assert executor._padding.enabled == (name == "llama")
    finally:
        executor.close()
