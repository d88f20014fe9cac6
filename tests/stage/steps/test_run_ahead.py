"""Goal: with any rows computed ahead, every answer is the one that the coordinator's frames alone would give."""

from __future__ import annotations

import asyncio
import random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from relayline.stage.observe.stats import StageStats
from relayline.stage.queue_types import QueuedFrame
from relayline.stage.steps.batcher import Batcher
from relayline.stage.steps.policy import DrainPolicy
from relayline.stage.steps.run_ahead import SIT_OUT_MAX, RunAhead
from relayline.stage.steps.runner import Runner
from relayline.stage.steps.step import StepExecutor
from relayline.stage.steps.step_types import StepResult
from relayline.wire.common.errors import NativeError
from relayline.wire.envelopes.frames import Flag
from tests.stage.steps.test_picking import KINDS, N_TOKENS
from tests.support.draft_world import GUESSES, KEYS, SAMPLE, DraftWorld, frame_of, played_plainly
from tests.support.fakes import (
    CTX,
    MAX_ROWS,
    ROUTE,
    BlockedDecode,
    FakeEngine,
    control,
    new_executor,
    rows_frame,
    step_of,
)
from tests.support.polling import pause

PLAIN_KINDS = [kind for kind in KINDS if "grammar" not in kind]


def ahead_world(kind: str = "greedy", seed: int = 0) -> DraftWorld:
    return DraftWorld(KINDS[kind], seed=seed, ahead_rows=MAX_ROWS)


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_plain_streams_say_the_same_and_need_no_extra_decode(kind: str) -> None:
    plain, ahead = DraftWorld(KINDS[kind]), ahead_world(kind)
    truth = played_plainly(plain, N_TOKENS)
    n_before = len(ahead.engine.steps)
    assert played_plainly(ahead, N_TOKENS) == truth
    assert ahead.said == plain.said
    # Two streams' first rows were not computed together: one decode brings all into one step.
    assert ahead.ahead.n_used == len(KEYS) * N_TOKENS - 2
    assert len(ahead.engine.steps) == n_before + N_TOKENS + 1
    assert ahead.state == plain.state


@settings(max_examples=40)
@given(st.integers(0, 1 << 30), st.sampled_from(PLAIN_KINDS), st.sampled_from([0.0, 0.1]))
def test_any_guesses_retries_and_faults(seed: int, kind: str, faults: float) -> None:
    plain, ahead = DraftWorld(KINDS[kind], seed=seed), ahead_world(kind, seed)
    truth = played_plainly(plain, N_TOKENS)
    ahead.play(truth, random.Random(seed), faults)
    assert ahead.said == plain.said
    assert ahead.history == truth


def test_a_copy_that_runs_the_engine_voids_the_logits_of_rows_ahead() -> None:
    """Copies of lanes with their own cells claim cells by a step. A stream's end copies its lane, and no row comes."""
    plain, ahead = DraftWorld(KINDS["greedy"]), ahead_world()
    truth = played_plainly(plain, N_TOKENS)
    copy_prefix = ahead.engine.copy_prefix

    def copied_by_a_step(*lanes: int) -> None:
        copy_prefix(*lanes)
        ahead.engine.void_logits()

    ahead.engine.copy_prefix = copied_by_a_step  # type: ignore[method-assign]
    (route_id, source), kept = KEYS[0], 99
    for at in range(N_TOKENS):
        ahead.run([ahead.row(key) for key in KEYS])
        opening = control(kept + at, Flag.OPEN, route_id=route_id)
        copying = control(kept + at, Flag.COPY_PREFIX, 2, argument=source, route_id=route_id)
        ahead.run([opening, copying, control(kept + at, Flag.CLOSE, route_id=route_id)])
    assert ahead.history == truth
    assert ahead.ahead.n_dropped > 0


def test_a_copy_between_two_steps_voids_the_logits_of_rows_ahead() -> None:
    """One slice of time may store a lane and then fill it: what comes first does not tell what voids the logits."""
    plain, ahead = DraftWorld(KINDS["greedy"]), ahead_world()
    truth = played_plainly(plain, N_TOKENS)
    for _ in range(N_TOKENS):
        ahead.run([ahead.row(key) for key in KEYS])
        ahead.engine.void_logits()
    assert ahead.history == truth
    assert ahead.ahead.n_dropped > 0


@settings(max_examples=40)
@given(st.integers(0, 1 << 30), st.sampled_from(PLAIN_KINDS))
def test_streams_in_any_company(seed: int, kind: str) -> None:
    """Steps of some streams while rows of others wait; streams that start again, and their prompts among others."""
    rng = random.Random(seed)
    plain, ahead = DraftWorld(KINDS[kind], seed=seed), ahead_world(kind, seed)
    truth = played_plainly(plain, N_TOKENS)
    while any(len(ahead.history[key]) < len(truth[key]) for key in KEYS):
        chosen = [key for key in KEYS if rng.random() < 0.6 and len(ahead.history[key]) < len(truth[key])]
        frames: list[QueuedFrame] = []
        for key in chosen:
            frames.append(ahead.row(key))
        if chosen and rng.random() < 0.15:
            ahead.begin(chosen[0], ahead.history[chosen[0]], len(ahead.said[chosen[0]]))
        elif frames:
            ahead.run(frames)
        if rng.random() < 0.1:
            ahead.ahead.settle()
    assert ahead.history == truth
    assert [sampled.token for key in KEYS for sampled in ahead.said[key]] == [
        sampled.token for key in KEYS for sampled in plain.said[key]
    ]


def test_another_token_than_the_sampled_one_is_computed_again() -> None:
    world = ahead_world()
    for _ in range(3):
        world.run([world.row(KEYS[0])])
    assert world.ahead.lanes
    history = world.history[KEYS[0]]
    other = (history[-1] + 1) % 7
    frame = frame_of(KEYS[0], len(history) - 1, [other], SAMPLE)
    assert world.ahead.parts(step := step_of(frame)) == [step]


# --- one by one -------------------------------------------------------------------------------------------------------


def test_a_row_ahead_that_nobody_asks_for_leaves_nothing() -> None:
    world = ahead_world()
    for _ in range(3):
        world.run([world.row(key) for key in KEYS])
    before, n_dropped = [list(lane) for lane in world.engine.lanes], world.ahead.n_dropped
    world.ahead.settle()
    lanes = world.executor.lanes._by_session.values()
    assert [len(world.engine.lanes[lane.index]) for lane in lanes] == [lane.next_position for lane in lanes]
    assert before != world.engine.lanes
    assert world.ahead.n_dropped == n_dropped + len(KEYS)
    assert not world.ahead.lanes
    stats = StageStats()
    stats.step_done(world.run([world.row(key) for key in KEYS]))
    assert stats.n_rows_dropped == len(KEYS)


def test_a_close_takes_the_row_ahead_of_its_session_alone() -> None:
    world = ahead_world()
    for _ in range(3):
        world.run([world.row(key) for key in KEYS])
    n_steps, lanes = len(world.engine.steps), world.ahead.lanes
    world.ahead.execute(step_of(control(KEYS[0][1], Flag.CLOSE, route_id=KEYS[0][0])))
    assert len(world.ahead.lanes) == len(lanes) - 1
    world.run([world.row(key) for key in KEYS[1:]])
    # Only the next rows ahead were a decode.
    assert [len(step) for step in world.engine.steps[n_steps:]] == [2]


def test_answered_streams_ride_with_a_prompt() -> None:
    """One decode for the prompt and the next rows of the others: no stream waits longer for it than before."""
    world = ahead_world()
    for _ in range(3):
        world.run([world.row(key) for key in KEYS])
    n_steps = len(world.engine.steps)
    prompt = frame_of(KEYS[2], len(world.history[KEYS[2]]) - 1, [5, 6, 7], Flag.PREFILL | SAMPLE)
    world.run([*(world.row(key) for key in KEYS[:2]), prompt])
    assert [len(step) for step in world.engine.steps[n_steps:]] == [5]
    assert len(world.ahead.lanes) == 2
    world.run([world.row(key) for key in KEYS[:2]])
    assert [len(step) for step in world.engine.steps[n_steps:]] == [5, 2]


def test_streams_that_an_earlier_step_answered_do_not_ride_with_a_prompt() -> None:
    world = ahead_world()
    for _ in range(3):
        world.run([world.row(key) for key in KEYS])
    world.run([world.row(key) for key in KEYS[:2]])
    world.ahead.settle()
    n_steps = len(world.engine.steps)
    prompt = frame_of(KEYS[2], len(world.history[KEYS[2]]) - 1, [5, 6, 7], Flag.PREFILL | SAMPLE)
    world.run([prompt])
    assert len(world.engine.steps[n_steps]) == 3


def test_streams_that_were_answered_wait_for_the_rest_of_their_group() -> None:
    """Otherwise one half of a group would be a step ahead of the other for ever, and the coordinator waits for both."""
    world = ahead_world()
    for _ in range(3):
        world.run([world.row(key) for key in KEYS])
    world.ahead._streams[KEYS[2]].missed()
    n_steps = len(world.engine.steps)
    for _ in range(4):
        world.run([world.row(key) for key in KEYS])
    # The last stream sits out once, and has a separate decode; then all are together.
    assert [len(step) for step in world.engine.steps[n_steps:]] == [2, 1, 3, 3, 3]


def test_as_many_rows_run_ahead_as_the_coordinator_sends_together() -> None:
    """Where larger steps round differently, the coordinator's own steps are the measure."""
    world = DraftWorld({}, ahead_rows=2)
    for _ in range(4):
        world.run([world.row(key) for key in KEYS])
    assert len(world.engine.steps[-1]) == len(KEYS)


def test_a_row_that_is_not_asked_for_does_not_ride_for_ever() -> None:
    world = ahead_world()
    for _ in range(12):
        world.run([world.row(key) for key in KEYS[:2]])
    assert len(world.engine.steps[-1]) == 2
    assert world.ahead._streams[KEYS[2]].sits_out


def test_streams_with_drafts_sit_out() -> None:
    """Each miss doubles the frames that a stream sits out, so that guesses hardly ever wait for a row in vain."""
    world = ahead_world()
    truth = played_plainly(DraftWorld({}), 60)
    key = KEYS[0]
    while len(world.history[key]) < len(truth[key]) - 3:
        at = len(world.history[key]) - 1
        world.run([frame_of(key, at, truth[key][at : at + 2], GUESSES)])
    n_frames = len(world.said[key]) // 2
    assert n_frames > 20
    assert 8 <= world.ahead._streams[key].penalty <= SIT_OUT_MAX


def test_a_failed_step_ahead_is_no_fault_of_anybody() -> None:
    world = ahead_world()
    for _ in range(2):
        world.run([world.row(key) for key in KEYS])
    world.ahead.settle()
    for _ in range(3):
        world.run([world.row(key) for key in KEYS])
    world.ahead.settle()
    for stream in world.ahead._streams.values():
        stream.is_due, stream.sits_out = True, 0
    step = world.ahead.next_step(0)
    assert step is not None
    world.engine.fail_next = NativeError("told to")
    world.ahead.compute(step)
    assert not world.ahead.lanes
    truth = played_plainly(DraftWorld({}), 8)
    world.run([world.row(key) for key in KEYS])
    assert all(world.history[key] == truth[key][: len(world.history[key])] for key in KEYS)


def test_streams_of_an_epoch_that_is_over_are_not_due() -> None:
    """The decode thread asks again at once as long as something is due."""
    world = ahead_world()
    for _ in range(3):
        world.run([world.row(key) for key in KEYS])
    world.ahead.settle()
    for route_id in {key[0] for key in KEYS}:
        world.executor.leave_route(route_id)
    assert world.ahead.is_due
    assert world.ahead.next_step(0) is None
    assert not world.ahead.is_due


def test_a_stream_at_the_end_of_its_lane_is_not_due() -> None:
    world = ahead_world()
    key = KEYS[0]
    for other in KEYS[1:]:
        world.run([control(other[1], Flag.CLOSE, route_id=other[0])])
    while len(world.history[key]) <= CTX:
        world.run([world.row(key)])
    assert not world.ahead.lanes
    assert not world.ahead.is_due


def test_a_stage_of_several_computes_nothing_ahead() -> None:
    world = DraftWorld({})
    for _ in range(4):
        world.run([world.row(key) for key in KEYS])
        assert not world.ahead.is_due
    assert not world.ahead._streams


# --- its reports ------------------------------------------------------------------------------------------------------


def test_one_result_has_the_time_of_a_decode() -> None:
    """Two envelopes ask for the rows of one decode: the first has its time, the second names the step."""
    world = ahead_world()
    for _ in range(3):
        world.run([world.row(key) for key in KEYS])
    results: list[StepResult] = []
    for keys in (KEYS[:1], KEYS[1:]):
        step = step_of(*(world.row(key) for key in keys), taken_ns=1 << 60)
        results += [world.ahead.execute(part) for part in world.ahead.parts(step)]
    first, second = results
    assert first.decode_ns > 0
    assert (first.is_ahead, first.computed_in, len(first.computed)) == (True, 0, len(KEYS))
    assert (second.decode_ns, second.is_ahead, second.computed_in) == (0, True, first.number)
    assert first.number < second.number
    assert second.started_ns == first.started_ns + first.decode_ns
    assert first.held_until_ns == first.step.taken_ns
    assert first.ended_ns == first.step.taken_ns + first.encode_ns


# --- the decode thread ------------------------------------------------------------------------------------------------


async def test_the_thread_computes_ahead_while_nothing_waits() -> None:
    engine = FakeEngine(n_lanes=4, is_last=True)
    executor: StepExecutor = new_executor(engine, stage_index=0)
    results: asyncio.Queue[StepResult] = asyncio.Queue()
    crash: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    batcher = Batcher(DrainPolicy(MAX_ROWS, MAX_ROWS))
    runner = Runner(batcher, executor, results.put_nowait, crash.set_result, ahead_rows=MAX_ROWS)

    async def sampled() -> tuple[int, int]:
        async with asyncio.timeout(20):
            result = await results.get()
        runner.sent()
        sample = result.outputs[0].samples[-1]
        return sample.position, sample.token

    try:
        tokens = np.array([[1], [2]], np.int32)
        runner.push([control(1, Flag.OPEN), rows_frame(1, 0, tokens, Flag.PREFILL | SAMPLE)])
        position, token = await sampled()
        for n_steps in range(2, 12):
            async with asyncio.timeout(20):
                while len(engine.steps) < n_steps:
                    await pause()
            runner.push([rows_frame(1, position, np.array([[token]], np.int32), SAMPLE)])
            position, token = await sampled()
        # A call between two steps sees the lane as the coordinator knows it.
        length, expected = await runner.call(lambda: (engine.lane_tokens(0), executor.lanes.of_route(ROUTE)))
        assert length == expected[0].next_position == position
        assert runner._ahead.n_used == 10
    finally:
        await runner.stop()
    assert not crash.done()


async def test_a_step_that_is_sent_in_parts_is_known_until_its_last_part_has_left() -> None:
    engine = FakeEngine(n_lanes=4, is_last=True)
    results: asyncio.Queue[StepResult] = asyncio.Queue()
    crash: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    batcher = Batcher(DrainPolicy(MAX_ROWS, MAX_ROWS))
    executor: StepExecutor = new_executor(engine, stage_index=0)
    runner = Runner(batcher, executor, results.put_nowait, crash.set_result, ahead_rows=MAX_ROWS)

    async def result() -> StepResult:
        async with asyncio.timeout(20):
            return await results.get()

    def following(result: StepResult) -> QueuedFrame:
        sample = result.outputs[0].samples[-1]
        return rows_frame(1, sample.position, np.array([[sample.token]], np.int32), SAMPLE)

    try:
        tokens = np.array([[1], [2]], np.int32)
        runner.push([control(1, Flag.OPEN), rows_frame(1, 0, tokens, Flag.PREFILL | SAMPLE)])
        frame = following(await result())
        runner.sent()
        runner.push([frame])  # as expected: from now on rows are computed ahead
        frame = following(await result())
        runner.sent()
        async with asyncio.timeout(20):
            while len(engine.steps) < 3:
                await pause()
        blocked = BlockedDecode(engine)
        runner.push([frame, control(2, Flag.OPEN), rows_frame(2, 0, tokens, Flag.PREFILL | SAMPLE)])
        await result()  # the row that was computed ahead; the other part is in the engine
        assert await asyncio.to_thread(blocked.entered.wait, 20)
        runner.sent()
        assert runner.session_ids(ROUTE) == {1, 2}
        blocked.release()
        await result()
        assert runner.session_ids(ROUTE) == {1, 2}
        engine.on_decode = lambda: None
        runner.sent()
        assert runner.session_ids(ROUTE) == set()
    finally:
        engine.on_decode = lambda: None
        await runner.stop()
    assert not crash.done()


def test_nothing_is_due_before_a_frame_was_as_expected() -> None:
    ahead = RunAhead(new_executor(FakeEngine(is_last=True), stage_index=0), MAX_ROWS)
    assert not ahead.is_due
    assert ahead.next_step(0) is None
