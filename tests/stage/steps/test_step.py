"""One step on a fake engine: one native decode for all, envelopes, samples."""

from __future__ import annotations

import numpy as np
import pytest

from relayline.stage.speed.curves import Curves
from relayline.stage.steps.lanes import LaneTable
from relayline.stage.steps.padding import Padding
from relayline.stage.steps.step import StepExecutor
from relayline.wire.common.curve import CostCurve
from relayline.wire.common.errors import NativeError
from relayline.wire.envelopes.dtypes import DTYPE_F16, DTYPE_F32
from relayline.wire.envelopes.frames import Flag
from relayline.wire.envelopes.rows import decode_f16
from tests.support.fakes import (
    CTX,
    EPOCH,
    ROUTE,
    FakeEngine,
    control,
    greedy,
    hidden,
    logits_of,
    new_executor,
    new_wiring,
    rows_frame,
    step_of,
)
from tests.support.steps import PREFILL, SAMPLE, labels, only, opened, parsed, state_of

# --- one native decode for all ----------------------------------------------------------------------------------------


def test_decode_rows_and_prefill_chunks_run_in_one_native_decode() -> None:
    engine = FakeEngine()
    executor = opened(engine, 3)
    executor.execute(step_of(rows_frame(0, 0, 4, PREFILL), rows_frame(1, 0, 2, PREFILL)))
    frames = [rows_frame(0, 4, 1, SAMPLE), rows_frame(1, 2, 3, PREFILL | SAMPLE), rows_frame(2, 0, 5, PREFILL)]
    result = executor.execute(step_of(*frames, taken_ns=9))
    lanes = [executor.lanes.open(session_id, ROUTE).index for session_id in range(3)]
    assert engine.steps[-1] == [
        *[(lanes[0], 4)],
        *[(lanes[1], position) for position in (2, 3, 4)],
        *[(lanes[2], position) for position in range(5)],
    ]
    assert len(engine.steps) == 2
    assert (result.n_rows, result.consumed, result.waits_ns) == (9, frames, [9, 9, 9])


def test_a_step_of_controls_decodes_nothing() -> None:
    engine = FakeEngine()
    result = new_executor(engine).execute(step_of(control(1, Flag.OPEN)))
    assert engine.steps == []
    assert (result.n_rows, result.decode_ns, result.waits_ns) == (0, 0, [])


def test_a_sessions_output_does_not_depend_on_its_batch_mates() -> None:
    alone, together = FakeEngine(), FakeEngine()
    first, second = opened(alone, 1), opened(together, 3)
    for position in range(4):
        frame = rows_frame(0, position)
        mates = [rows_frame(1, position), rows_frame(2, 2 * position, 2)]
        one = parsed(only(first.execute(step_of(frame)))).payload
        all_of_them = parsed(only(second.execute(step_of(mates[0], frame, mates[1])))).payload
        assert one.tolist() == all_of_them[1:2].tolist()


STAIRS = CostCurve([(1, 10), (2, 30), (3, 40), (4, 20), (5, 50), (6, 60), (7, 70), (8, 40)])


def padded(engine: FakeEngine, **changes: object) -> StepExecutor:
    """An executor whose spare lane is the engine's last, with three open sessions."""
    padding = Padding(**({"curves": Curves(STAIRS), "spare_lane": 3, "wanted_max": 8} | changes))  # type: ignore[arg-type]
    executor = StepExecutor(engine, LaneTable(3, CTX), 1, None, padding=padding)
    executor.reset_route(ROUTE, new_wiring(engine))
    executor.execute(step_of(*(control(session_id, Flag.OPEN) for session_id in range(3))))
    return executor


@pytest.mark.parametrize("is_last", [False, True])
def test_scratch_rows_make_a_step_cheaper_and_leave_no_trace(is_last: bool) -> None:
    engine = FakeEngine(is_last=is_last)
    executor = padded(engine)
    for position in range(3):
        result = executor.execute(step_of(*(rows_frame(session_id, position, 1, SAMPLE) for session_id in range(3))))
        assert (result.n_rows, result.padded_rows, len(engine.steps[-1])) == (3, 1, 4)
        assert engine.lanes[3] == []
        output = only(result)
        if is_last:
            assert [sample.session_id for sample in output.samples] == [0, 1, 2]
        else:
            assert parsed(output).payload.tolist() == [
                [v + position + 1 for v in lane[-1]] for lane in engine.lanes[:3]
            ]


def test_scratch_rows_are_forgotten_after_a_failed_decode_too() -> None:
    engine = FakeEngine()
    executor = padded(engine)
    engine.fail_next = NativeError("boom")
    executor.execute(step_of(*(rows_frame(session_id, 0) for session_id in range(3))))
    assert engine.lanes == [[], [], [], []]


@pytest.mark.parametrize(
    ("changes", "flags"),
    [({"enabled": False}, SAMPLE), ({"wanted_max": 3}, SAMPLE), ({"curves": Curves()}, SAMPLE), ({}, PREFILL)],
    ids=["switched off", "too many logits", "nothing known", "prefill only"],
)
def test_no_scratch_rows_where_they_do_not_belong(changes: dict[str, object], flags: int) -> None:
    engine = FakeEngine()
    result = padded(engine, **changes).execute(step_of(*(rows_frame(index, 0, 1, flags) for index in range(3))))
    assert (result.padded_rows, len(engine.steps[-1])) == (0, 3)


@pytest.mark.parametrize(
    ("n_decode", "prompt_rows", "n_heads"),
    [(1, 2, 1), (3, 4, 4), (2, 5, 2)],
    ids=["one row of the head", "a tile of it too", "no room for a tile of it"],
)
def test_scratch_rows_with_a_prompt_begin_no_tile_of_the_head(n_decode: int, prompt_rows: int, n_heads: int) -> None:
    """A prompt's rows want no head: three rows fill up a tile of the layers, and the one that decodes stays one."""
    engine = FakeEngine(n_lanes=5, is_last=True)
    padding = Padding(Curves(STAIRS), spare_lane=4, wanted_max=4)
    executor = StepExecutor(engine, LaneTable(4, CTX), 1, None, padding=padding)
    executor.reset_route(ROUTE, new_wiring(engine))
    executor.execute(step_of(*(control(session_id, Flag.OPEN) for session_id in range(4))))
    decode = [rows_frame(session_id, 0, 1, SAMPLE) for session_id in range(n_decode)]
    result = executor.execute(step_of(*decode, rows_frame(3, 0, prompt_rows, PREFILL)))
    assert (result.n_rows, result.padded_rows) == (n_decode + prompt_rows, 1), "only rows of the head are limited"
    assert np.count_nonzero(engine.wants[: result.n_rows + 1]) == n_heads
    assert len(only(result).samples) == n_decode


def test_the_curve_is_refined_by_real_steps() -> None:
    curves = Curves()
    engine = FakeEngine()
    executor = padded(engine, curves=curves)
    first = executor.execute(step_of(rows_frame(0, 0, 4, PREFILL)))
    assert curves.prefill.points() == [], "the outgoing envelope does not wait for that"
    executor.learn(first)
    assert [rows for rows, _ in curves.prefill.points()] == [4]
    assert first.predicted_ns == 0
    executor.learn(executor.execute(step_of(rows_frame(0, 4), rows_frame(1, 0))))
    both = executor.execute(step_of(rows_frame(0, 5), rows_frame(1, 1, 4, PREFILL)))
    executor.learn(both)
    assert both.predicted_ns > 0
    engine.fail_next = NativeError("boom")
    executor.learn(executor.execute(step_of(rows_frame(0, 6, 3))))
    assert ([rows for rows, _ in curves.decode.points()], len(curves.prefill.points())) == ([2], 1)


# --- envelopes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [DTYPE_F16, DTYPE_F32])
def test_the_envelope_lists_the_decoded_frames(dtype: int) -> None:
    engine = FakeEngine()
    executor = new_executor(engine, dtype=dtype)
    opens = [control(5, Flag.OPEN, options=greedy(seed=11)), control(6, Flag.OPEN, options=greedy(seed=12, top_k=3))]
    trace = bytes(range(25))
    frames = [rows_frame(5, 0, 3, PREFILL, arrived_ns=77), rows_frame(6, 0, hidden(1, 4e5), PREFILL | SAMPLE)]
    frames[0].trace = trace
    output = only(executor.execute(step_of(*opens, *frames)))
    view = parsed(output)
    assert (view.epoch, view.sequence, view.dtype, view.width, view.sent_ns) == (EPOCH, 1, dtype, 4, output.sent_ns)
    assert view.frames["session_id"].tolist() == [5, 6, 5, 6]
    assert view.frames["n_rows"].tolist() == [0, 0, 3, 1]
    assert view.frames["flags"].tolist() == [Flag.OPEN, Flag.OPEN, PREFILL, PREFILL | SAMPLE]
    assert view.frames["enqueued_ns"].tolist() == [0, 0, 77, 0]
    assert bytes(view.frames["trace"][2]) == trace
    assert [options.seed for options in view.options] == [11, 12]
    assert view.options[1].top_k == 3
    rows = np.empty((4, 4), np.float32)
    if dtype == DTYPE_F16:
        decode_f16(view.payload, view.exponents, rows)
    else:
        rows = view.payload
    expected = np.concatenate([engine.output_rows[:3], engine.output_rows[3:4]])
    np.testing.assert_allclose(rows, expected, rtol=1e-3)
    assert expected[3, 0] > 65_504, "the case must hold a row that f16 cannot"


def test_controls_are_forwarded_in_order_and_before_rows() -> None:
    executor = opened(FakeEngine(), 3)
    executor.execute(step_of(rows_frame(0, 0, 4), rows_frame(1, 0, 4)))
    controls = [
        control(1, Flag.CLOSE),
        control(9, Flag.OPEN),
        control(0, Flag.TRIM, 2),
        control(9, Flag.COPY_PREFIX, 2, argument=0),
        control(77, Flag.CLOSE),
    ]
    view = parsed(only(executor.execute(step_of(*controls, rows_frame(9, 2), rows_frame(0, 2)))))
    assert view.frames["session_id"].tolist() == [1, 9, 0, 9, 77, 9, 0]
    assert view.frames["flags"].tolist()[:5] == [frame.flags for frame in controls]
    assert view.frames["position"].tolist() == [0, 0, 2, 2, 0, 2, 2]
    assert view.frames["argument"].tolist()[3] == 0
    assert (view.sequence, len(view.options)) == (3, 1)


def test_an_impossible_rewind_is_refused_and_changes_nothing() -> None:
    """Layers with a sliding window may lack rows that a shorter lane needs; from its start any lane can continue."""
    engine = FakeEngine()
    executor = opened(engine, 3)
    executor.execute(step_of(rows_frame(0, 0, 6), rows_frame(1, 0, 2)))
    engine.reused_until[executor.lanes.open(0, ROUTE).index] = 4
    before = state_of(executor, engine)
    for frames in (
        (control(0, Flag.TRIM, 4),),
        (control(2, Flag.COPY_PREFIX, 3, argument=0),),
        (rows_frame(0, 2, 2),),
    ):
        assert labels(executor.execute(step_of(*frames))) == [(frames[0].session_id, "position_gap")]
        assert state_of(executor, engine) == before
        executor.sessions.broken.clear()
    result = executor.execute(step_of(rows_frame(0, 1), rows_frame(1, 2)))
    assert labels(result) == [(0, "position_gap")]
    assert [len(lane) for lane in engine.lanes].count(3) == 1, "others of the step go on"
    assert labels(executor.execute(step_of(control(0, Flag.TRIM, 5), rows_frame(0, 5)))) == []
    assert labels(executor.execute(step_of(control(0, Flag.TRIM, 0), rows_frame(0, 0, 2)))) == []


def test_two_routes_in_one_step_give_two_envelopes() -> None:
    engine = FakeEngine()
    executor = opened(engine, 2)
    other = ROUTE + 1
    executor.reset_route(other, new_wiring(engine, epoch=9))
    executor.execute(step_of(control(0, Flag.OPEN, route_id=other, epoch=9)))
    frames = [rows_frame(0, 0, 2), rows_frame(0, 0, 3, route_id=other, epoch=9), rows_frame(1, 0, 1)]
    outputs = {output.route_id: parsed(output) for output in executor.execute(step_of(*frames)).outputs}
    assert len(engine.steps) == 1
    assert (outputs[ROUTE].epoch, outputs[other].epoch) == (EPOCH, 9)
    assert outputs[ROUTE].frames["session_id"].tolist() == [0, 1]
    assert outputs[ROUTE].frames["n_rows"].tolist() == [2, 1]
    assert outputs[other].frames["n_rows"].tolist() == [3]
    assert outputs[other].payload.tolist() == [
        [v + i + 1 for v in row] for i, row in enumerate(frames[1].payload.tolist())
    ]


def test_steady_decode_creates_no_buffer() -> None:
    engine = FakeEngine()
    executor = opened(engine, 2)
    pool = executor.routes[ROUTE].pool
    assert pool is not None
    created = []
    for position in range(6):
        output = only(executor.execute(step_of(rows_frame(0, position), rows_frame(1, position))))
        assert output.buffer is not None
        pool.give_back(output.buffer)
        created.append(pool.n_created)
    assert created[1:] == created[:1] * 5


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_samples_name_the_position_their_token_will_have() -> None:
    engine = FakeEngine(is_last=True)
    executor = opened(engine, 2)
    result = executor.execute(step_of(rows_frame(0, 0, 3, PREFILL | SAMPLE), rows_frame(1, 0, 2, PREFILL)))
    (sample,) = only(result).samples
    assert (sample.session_id, sample.position) == (0, 3)
    assert sample.token == int(logits_of(engine.lanes[0]).argmax())
    assert (sample.logprob, sample.logits) == (0.0, b"")
    assert only(result).buffer is None


def test_rows_that_want_no_sample_are_answered_by_progress() -> None:
    engine = FakeEngine(is_last=True)
    executor = opened(engine, 2)
    result = executor.execute(step_of(rows_frame(0, 0, 3, PREFILL), rows_frame(1, 0, 2, PREFILL | SAMPLE)))
    assert [(passed.session_id, passed.position) for passed in only(result).progress] == [(0, 3)]
    assert [sample.session_id for sample in only(result).samples] == [1]


def test_whole_rows_of_logits_come_only_when_asked_for() -> None:
    engine = FakeEngine(is_last=True)
    executor = opened(engine, 1, wants_logits=True, n_logprobs=2)
    (sample,) = only(executor.execute(step_of(rows_frame(0, 0, 3, SAMPLE)))).samples
    assert np.frombuffer(sample.logits, np.float32).tolist() == logits_of(engine.lanes[0]).tolist()
    assert sample.top[0].token == sample.token
    assert len(sample.top) == 2
    executor.execute(step_of(control(0, Flag.OPEN)))
    (sample,) = only(executor.execute(step_of(rows_frame(0, 3, 1, SAMPLE)))).samples
    assert sample.logits == b"", "a session opened again has the options of its last open"


def test_a_cancelled_session_is_dropped_before_sampling() -> None:
    engine = FakeEngine(is_last=True)
    executor = opened(engine, 2)
    executor.sessions.cancelled.add((ROUTE, 0))
    result = executor.execute(step_of(rows_frame(0, 0, 1, SAMPLE), rows_frame(1, 0, 1, SAMPLE)))
    assert [sample.session_id for sample in only(result).samples] == [1]
    executor.execute(step_of(control(0, Flag.CLOSE)))
    assert executor.sessions.cancelled == set()
