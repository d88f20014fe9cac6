"""A native step that never ends is noticed, and the stage can end without it."""

from __future__ import annotations

import asyncio

import pytest

from relayline.stage.queue_types import Step
from relayline.stage.speed.curves import StepShape
from relayline.stage.steps.batcher import Batcher
from relayline.stage.steps.policy import DrainPolicy
from relayline.stage.steps.runner import Runner
from relayline.stage.steps.watchdog import LOOK_EVERY_S, STUCK_AFTER_S, STUCK_AFTER_UNKNOWN_S, StepWatch, watch_steps
from relayline.wire.common.errors import NativeError
from relayline.wire.envelopes.frames import Flag
from tests.support.fakes import MAX_ROWS, BlockedDecode, FakeEngine, control, new_executor, rows_frame


def step(n_rows: int = 1) -> Step:
    return Step([], [rows_frame(1, 0, n_rows)], "queue_drained", 0, n_rows, 0)


def seconds_until_given_up(watch: StepWatch, running: Step) -> float:
    looks = 0
    while watch.look(running) is None:
        looks += 1
        assert looks < 10_000
    return looks * LOOK_EVERY_S


@pytest.mark.parametrize(
    ("predicted_s", "given_up_s"), [(0.2, STUCK_AFTER_S), (30.0, 600.0), (0.0, STUCK_AFTER_UNKNOWN_S)]
)
def test_a_step_is_given_up_after_many_times_its_expected_time(predicted_s: float, given_up_s: float) -> None:
    asked: list[StepShape] = []

    def predict_ns(shape: StepShape) -> float:
        asked.append(shape)
        return predicted_s * 1e9

    watch = StepWatch(predict_ns)
    assert seconds_until_given_up(watch, step(3)) == given_up_s
    assert [shape.n_rows for shape in asked] == [3]


def test_steps_that_end_are_never_given_up() -> None:
    watch = StepWatch(lambda _: 1.0)
    long = step()
    for _ in range(int(STUCK_AFTER_S / LOOK_EVERY_S)):
        assert watch.look(long) is None
    assert watch.look(None) is None
    for _ in range(1_000):
        assert watch.look(step()) is None
    error = [watch.look(long) for _ in range(int(STUCK_AFTER_S / LOOK_EVERY_S) + 1)][-1]
    assert isinstance(error, NativeError)
    assert "has run for 120 s (rows: 1)" in error.message


async def test_an_engine_that_hangs_ends_the_stage_and_does_not_hold_its_end_up() -> None:
    engine, stuck = FakeEngine(n_lanes=4), asyncio.get_running_loop().create_future()
    runner = Runner(Batcher(DrainPolicy(MAX_ROWS, MAX_ROWS)), new_executor(engine), lambda _: None, stuck.set_exception)
    blocked = BlockedDecode(engine)
    try:
        runner.push([control(1, Flag.OPEN), rows_frame(1, 0)])
        async with asyncio.timeout(20):
            await watch_steps(
                lambda: runner.snapshot.running, StepWatch(lambda _: 1.0), stuck.set_result, look_every_s=0
            )
            assert "hangs" in (await stuck).message
            await runner.stop(timeout_s=0)
        assert runner.snapshot.running is not None, "it was left behind"
    finally:
        blocked.release()
        await runner.stop()
    assert runner.snapshot.running is None
