"""Rows that attend to each other form a separate step, soon, with every policy."""

from __future__ import annotations

import dataclasses

import pytest

from relayline.stage.engine.lane_places import Grid
from relayline.stage.queue_types import QueuedFrame
from relayline.stage.steps.batcher import Batcher
from relayline.stage.steps.policy import MUTUAL_ROWS, POLICIES, StepLimits
from relayline.wire.common.curve import CostCurve
from relayline.wire.envelopes.frames import Flag, grid_argument
from tests.support.fakes import FakeEngine, control, new_executor, rows_frame, step_of

IMAGE = Flag.PREFILL | Flag.MUTUAL


@pytest.fixture(name="batcher", params=POLICIES)
def batcher_fixture(request: pytest.FixtureRequest) -> Batcher:
    return Batcher(POLICIES[request.param](StepLimits(64, 16, CostCurve([(1, 1e6), (64, 2e6)]))))


def together(*frames: QueuedFrame, envelope: int = 5) -> list[QueuedFrame]:
    return [dataclasses.replace(frame, envelope=envelope) for frame in frames]


def test_no_other_frame_is_in_its_step(batcher: Batcher) -> None:
    frames = together(
        rows_frame(1, 9),
        rows_frame(2, 0, 4, Flag.PREFILL),
        rows_frame(3, 0, 12, IMAGE),
        rows_frame(4, 0, 12, IMAGE),
        rows_frame(5, 0, 4, Flag.PREFILL),
        rows_frame(6, 2),
    )
    batcher.push_together(frames)
    steps = []
    while (step := batcher.take(0)) is not None:
        steps.append(step)
    assert sorted(frame.session_id for step in steps for frame in step.frames) == [1, 2, 3, 4, 5, 6]
    alone = [step for step in steps if any(frame.is_mutual for frame in step.frames)]
    assert [len(step.frames) for step in alone] == [1, 1]
    assert len(batcher) == 0


def test_running_streams_do_not_keep_it_off(batcher: Batcher) -> None:
    batcher.push_together(together(rows_frame(1, 0), rows_frame(2, 0)))
    batcher.push(rows_frame(3, 0, 12, IMAGE))
    for turn in range(1, 5):
        step = batcher.take(0)
        assert step is not None
        if step.frames[0].is_mutual:
            assert (len(step.frames), turn <= 3) == (1, True)
            return
        for frame in step.frames:  # whose next rows come at once
            batcher.push(rows_frame(frame.session_id, turn))
    pytest.fail("the image has not had its turn")


def test_the_step_says_why_it_took_no_more(batcher: Batcher) -> None:
    batcher.push_together(together(rows_frame(3, 0, 12, IMAGE), rows_frame(2, 0, 4, Flag.PREFILL)))
    first = batcher.take(0)
    assert first is not None
    assert (first.close_reason, first.n_rows) == (MUTUAL_ROWS, 12)


def test_the_engine_gets_the_flag_and_it_is_passed_on() -> None:
    engine = FakeEngine()
    executor = new_executor(engine)
    executor.execute(step_of(control(1, Flag.OPEN)))
    result = executor.execute(step_of(rows_frame(1, 0, 6, IMAGE)))
    assert engine.n_mutual == 1
    assert [frame.flags for frame in result.members] == [IMAGE]
    assert result.outputs[0].buffer is not None
    assert result.outputs[0].buffer.frames["flags"].tolist() == [IMAGE]
    executor.execute(step_of(rows_frame(1, 6, 2, Flag.PREFILL)))
    assert (engine.n_mutual, len(engine.steps)) == (1, 2)


def test_the_engine_gets_grid_positions_and_they_are_passed_on() -> None:
    engine = FakeEngine()
    executor = new_executor(engine)
    executor.execute(step_of(control(1, Flag.OPEN), control(2, Flag.OPEN)))
    executor.execute(step_of(rows_frame(1, 0, 4, Flag.PREFILL), rows_frame(2, 0, 3, Flag.PREFILL)))
    part = dataclasses.replace(rows_frame(1, 4, 5, Flag.PREFILL | Flag.GRID), argument=grid_argument(2, 3, 4))
    result = executor.execute(step_of(rows_frame(2, 3, 2), part))  # as the batcher orders them
    lane = next(lane for lane, position in engine.steps[-1] if position == 4 + 4)
    assert engine.grids == [Grid(row=2, n_rows=5, lane=lane, start=2, n_before=2, width=3, height=4)]
    assert result.outputs[0].buffer is not None
    assert result.outputs[0].buffer.frames["argument"].tolist() == [0, grid_argument(2, 3, 4)]
