from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage.curves import Curves
from stage.lanes import LaneTable
from stage.padding import Padding
from stage.sampler import SessionSampler
from stage.step import StepExecutor
from stage.step_types import RouteOutput, StepResult
from tests.fakes import (
    CTX,
    EPOCH,
    MAX_ROWS,
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
from wire import envelope
from wire.curve import CostCurve
from wire.envelope import DTYPE_F16, DTYPE_F32, EnvelopeView
from wire.errors import LaneLimitError, NativeError
from wire.frames import Flag
from wire.rows import decode_f16

SAMPLE, PREFILL = Flag.WANTS_SAMPLE, Flag.PREFILL


def only(result: StepResult) -> RouteOutput:
    (output,) = result.outputs
    return output


def parsed(output: RouteOutput) -> EnvelopeView:
    return envelope.parse(output.message)


def labels(result: StepResult) -> list[tuple[int, str]]:
    return [(fault.session_id, fault.label) for output in result.outputs for fault in output.faults]


def opened(engine: FakeEngine, n_sessions: int, **options: object) -> StepExecutor:
    executor = new_executor(engine)
    executor.execute(
        step_of(*(control(session_id, Flag.OPEN, options=greedy(**options)) for session_id in range(n_sessions)))
    )
    return executor


def state_of(executor: StepExecutor, engine: FakeEngine) -> object:
    table = {key: (lane.index, lane.next_position) for key, lane in executor.lanes._by_session.items()}
    return table, copy.deepcopy(engine.lanes), sorted(executor.sessions.samplers), sorted(executor.sessions.cancelled)


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
def test_scratch_rows_beside_a_prompt_begin_no_tile_of_the_head(n_decode: int, prompt_rows: int, n_heads: int) -> None:
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
    assert curves.prefill.points() == [], "what leaves the stage does not wait for that"
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
def test_the_envelope_says_what_was_decoded(dtype: int) -> None:
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


def test_what_the_engine_cannot_go_back_to_is_refused_and_nothing_changes() -> None:
    """Layers with a sliding window may have lost what a shorter lane needs; from its start any lane can go on."""
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


# --- one failed session does not hurt the others ----------------------------------------------------------------------

BAD_FRAMES = {
    "gap": (lambda: rows_frame(1, 3), "position_gap"),
    "unknown session": (lambda: rows_frame(99, 0), "bad_session"),
    "beyond the context": (lambda: rows_frame(1, 0, CTX + 1), "no_lane"),
    "wider than a step": (lambda: rows_frame(1, 0, MAX_ROWS + 1), "protocol"),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_a_bad_frame_is_a_fault_of_its_session_only(name: str) -> None:
    engine = FakeEngine()
    executor = opened(engine, 2)
    make, label = BAD_FRAMES[name]
    bad = make()
    before = state_of(executor, engine)
    faulted = executor.execute(step_of(bad))
    assert labels(faulted) == [(bad.session_id, label)]
    assert state_of(executor, engine) == before
    assert engine.steps == []
    fault = only(faulted).faults[0]
    assert (fault.stage_index, fault.position) == (1, bad.position)
    result = executor.execute(step_of(make(), rows_frame(0, 0)))
    assert parsed(only(result)).frames["session_id"].tolist() == [0]


def test_what_follows_a_fault_is_dropped_in_silence_until_the_session_begins_again() -> None:
    """A lost chunk is followed by the rest of its train: one fault must come of it, not one for each."""
    engine = FakeEngine()
    executor = opened(engine, 1)
    engine.fail_next = LaneLimitError("no cells")
    assert labels(executor.execute(step_of(rows_frame(0, 0, 4, PREFILL)))) == [(0, "no_lane")]
    for position in (4, 8, 12):
        result = executor.execute(step_of(rows_frame(0, position, 4, PREFILL)))
        assert (result.outputs, len(result.consumed)) == ([], 1)
    replay = [control(0, Flag.OPEN), rows_frame(0, 0, 4, PREFILL)]
    assert labels(executor.execute(step_of(*replay))) == []
    assert labels(executor.execute(step_of(rows_frame(0, 9)))) == [(0, "position_gap")], "a new fault is told again"


def test_an_open_without_a_lane_faults_once_and_can_be_tried_again() -> None:
    engine = FakeEngine(n_lanes=1)
    executor = opened(engine, 1)
    result = executor.execute(step_of(control(1, Flag.OPEN), rows_frame(1, 0, 2, PREFILL), rows_frame(0, 0)))
    assert labels(result) == [(1, "no_lane")]
    assert only(result).faults[0].retryable
    assert parsed(only(result)).frames["session_id"].tolist() == [0]
    result = executor.execute(step_of(control(0, Flag.CLOSE), control(1, Flag.OPEN), rows_frame(1, 0, 2)))
    assert labels(result) == []
    assert len(engine.lanes[0]) == 2


def test_what_is_only_kept_goes_where_a_stream_of_any_route_would_find_no_lane() -> None:
    engine = FakeEngine(n_lanes=2)
    executor, other = opened(engine, 1), ROUTE + 1
    executor.reset_route(other, new_wiring(engine, epoch=9))
    kept = control(5, Flag.OPEN, options=greedy(kept=True))
    executor.execute(step_of(kept, rows_frame(0, 0, 4), rows_frame(5, 0, 3)))
    result = executor.execute(step_of(control(1, Flag.OPEN, route_id=other, epoch=9)))
    assert labels(result) == []
    assert sorted(map(len, engine.lanes)) == [0, 4]
    stale = executor.execute(
        step_of(control(0, Flag.CLOSE), control(2, Flag.OPEN), control(2, Flag.COPY_PREFIX, 3, argument=5))
    )
    assert labels(stale) == [(2, "bad_session")], "so that it reads all itself"
    executor.lanes.check()


def test_options_out_of_range_are_a_fault_and_take_no_lane() -> None:
    engine = FakeEngine(is_last=True)
    executor = new_executor(engine)
    bad = control(1, Flag.OPEN, options=greedy(top_p=7.0))
    result = executor.execute(step_of(bad, rows_frame(1, 0, 2, PREFILL | SAMPLE)))
    assert labels(result) == [(1, "protocol")]
    assert (len(executor.lanes), engine.steps) == (0, [])


@pytest.mark.parametrize("is_last", [False, True])
def test_nan_ends_its_session_and_the_others_go_on(is_last: bool) -> None:
    engine = FakeEngine(is_last=is_last)
    executor = opened(engine, 3)
    engine.nan_lanes = {executor.lanes.open(1, ROUTE).index}
    result = executor.execute(step_of(*(rows_frame(session_id, 0, 2, SAMPLE) for session_id in range(3))))
    assert labels(result) == [(1, "not_finite")]
    if is_last:
        assert [sample.session_id for sample in only(result).samples] == [0, 2]
    else:
        view = parsed(only(result))
        assert view.frames["session_id"].tolist() == [0, 2]
        assert np.isfinite(view.payload).all()
        assert view.payload.tolist() == engine.output_rows[[0, 1, 4, 5]].tolist()


def test_nothing_is_sent_when_nothing_is_left_to_send() -> None:
    engine = FakeEngine()
    executor = opened(engine, 1)
    engine.nan_lanes = {0, 1, 2, 3}
    output = only(executor.execute(step_of(rows_frame(0, 0))))
    assert (output.buffer, output.message) == (None, b"")


def test_a_failed_decode_faults_its_sessions_and_moves_nobody() -> None:
    engine = FakeEngine()
    executor = opened(engine, 3)
    executor.execute(step_of(*(rows_frame(session_id, 0, 2) for session_id in range(3))))
    engine.fail_next = NativeError("boom")
    result = executor.execute(step_of(rows_frame(0, 2), rows_frame(1, 2), control(2, Flag.TRIM, 1)))
    assert labels(result) == [(0, "native"), (1, "native")]
    assert parsed(only(result)).frames["flags"].tolist() == [Flag.TRIM], "controls of the step still go on"
    assert [executor.lanes.open(session_id, ROUTE).next_position for session_id in range(3)] == [2, 2, 1]
    assert labels(executor.execute(step_of(rows_frame(0, 2), rows_frame(1, 2), rows_frame(2, 1)))) == []


# --- a step retried is a step done once -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_last", [False, True])
def test_the_same_frame_twice_leaves_what_once_leaves(is_last: bool) -> None:
    engine = FakeEngine(is_last=is_last)
    executor = opened(engine, 2)
    executor.execute(step_of(rows_frame(0, 0, 5, PREFILL), rows_frame(1, 0, 3, PREFILL)))
    once = executor.execute(step_of(rows_frame(0, 5, 2, SAMPLE)))
    after_once = state_of(executor, engine)
    twice = executor.execute(step_of(rows_frame(0, 5, 2, SAMPLE)))
    assert state_of(executor, engine) == after_once
    if is_last:
        assert only(once).samples == only(twice).samples
    else:
        first, second = parsed(only(once)), parsed(only(twice))
        assert first.payload.tolist() == second.payload.tolist()
        assert first.frames["position"].tolist() == second.frames["position"].tolist()


def test_a_frame_below_the_next_position_forgets_what_stood_above() -> None:
    engine = FakeEngine()
    executor = opened(engine, 1)
    executor.execute(step_of(rows_frame(0, 0, 8)))
    rejected = rows_frame(0, 3, hidden(2, 500.0))
    executor.execute(step_of(rejected))
    assert executor.lanes.open(0, ROUTE).next_position == 5
    assert [row[0] for row in engine.lanes[0]] == [0.0, 4.0, 8.0, 500.0, 504.0]


def test_repeated_controls_change_nothing() -> None:
    engine = FakeEngine(is_last=True)
    executor = opened(engine, 2)
    executor.execute(step_of(rows_frame(0, 0, 4), rows_frame(1, 0, 4)))
    for make in (lambda: control(0, Flag.OPEN), lambda: control(0, Flag.TRIM, 3), lambda: control(1, Flag.CLOSE)):
        executor.execute(step_of(make()))
        once = state_of(executor, engine)
        result = executor.execute(step_of(make()))
        assert labels(result) == []
        assert state_of(executor, engine) == once


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


# --- nothing is kept (invariant 5), old epochs change nothing (invariant 4) -------------------------------------------


@pytest.fixture
def counted_samplers(monkeypatch: pytest.MonkeyPatch) -> set[SessionSampler]:
    """The samplers that are open now."""
    alive: set[SessionSampler] = set()
    make, close = SessionSampler.__init__, SessionSampler.close

    def counted_init(self: SessionSampler, *args: object) -> None:
        make(self, *args)  # type: ignore[arg-type]
        alive.add(self)

    def counted_close(self: SessionSampler) -> None:
        close(self)
        alive.discard(self)

    monkeypatch.setattr(SessionSampler, "__init__", counted_init)
    monkeypatch.setattr(SessionSampler, "close", counted_close)
    return alive


@pytest.mark.parametrize("how", ["close", "reset", "new epoch", "shutdown", "opened twice, then closed"])
def test_no_lane_row_or_sampler_outlives_its_session(how: str, counted_samplers: set[SessionSampler]) -> None:
    engine = FakeEngine(is_last=True)
    executor = opened(engine, 3, temperature=1.0, top_k=4, wants_logits=True)
    executor.execute(step_of(*(rows_frame(session_id, 0, 4, SAMPLE) for session_id in range(3))))
    assert len(counted_samplers) == 3
    executor.sessions.cancelled.update((ROUTE, session_id) for session_id in range(3))
    executor.execute(step_of(rows_frame(99, 0)))
    if how == "opened twice, then closed":
        executor.execute(step_of(*(control(session_id, Flag.OPEN) for session_id in range(3))))
        assert len(counted_samplers) == 3
    if how in ("close", "opened twice, then closed"):
        executor.execute(step_of(*(control(session_id, Flag.CLOSE) for session_id in (0, 1, 2, 99))))
    elif how == "shutdown":
        executor.close()
        assert engine.n_closed == 1
    else:
        executor.reset_route(ROUTE, new_wiring(engine, epoch=2) if how == "new epoch" else None)
    assert (len(executor.lanes), counted_samplers, executor.sessions.cancelled) == (0, set(), set())
    assert (executor.sessions.samplers, executor.sessions.wants_logits, executor.sessions.broken) == ({}, set(), set())
    assert engine.lanes == [[], [], [], []]
    executor.lanes.check()


def test_frames_and_controls_of_an_old_epoch_change_nothing() -> None:
    engine = FakeEngine(is_last=True)
    executor = opened(engine, 2)
    executor.reset_route(ROUTE, new_wiring(engine, epoch=EPOCH + 1))
    executor.execute(step_of(control(0, Flag.OPEN, epoch=EPOCH + 1), rows_frame(0, 0, 3, epoch=EPOCH + 1)))
    before = state_of(executor, engine)
    stale = [control(0, Flag.TRIM, 1), control(0, Flag.CLOSE), control(5, Flag.OPEN), rows_frame(0, 3, 1, SAMPLE)]
    result = executor.execute(step_of(*stale))
    assert state_of(executor, engine) == before
    assert (result.outputs, result.n_rows) == ([], 0)
    assert result.consumed == stale[3:], "their bytes are credit again"


def test_a_route_that_ends_leaves_the_other_routes_sessions_alone() -> None:
    engine = FakeEngine(is_last=True)
    executor = opened(engine, 1)
    other = ROUTE + 1
    executor.reset_route(other, new_wiring(engine))
    executor.execute(
        step_of(control(0, Flag.OPEN, route_id=other), rows_frame(0, 0, 2, route_id=other), rows_frame(0, 0))
    )
    executor.execute(step_of(control(0, Flag.CLOSE)))
    executor.reset_route(ROUTE, None)
    (sample,) = only(executor.execute(step_of(rows_frame(0, 2, 1, SAMPLE, route_id=other)))).samples
    assert sample.position == 3


def test_the_table_of_broken_sessions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wire.bounds.SESSIONS_PER_LINK_MAX", 5)
    executor = opened(FakeEngine(), 0)
    for session_id in range(20):
        executor.execute(step_of(rows_frame(session_id, 0)))
    assert len(executor.sessions.broken) == 5


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(0, 5)),
        st.tuples(st.just("close"), st.integers(0, 5)),
        st.tuples(st.just("rows"), st.integers(0, 5), st.integers(0, 6), st.integers(1, 3)),
        st.tuples(st.just("trim"), st.integers(0, 5), st.integers(0, 6)),
        st.tuples(st.just("copy"), st.integers(0, 5), st.integers(0, 6), st.integers(0, 5)),
        st.tuples(st.just("fail")),
        st.tuples(st.just("nan"), st.integers(0, 3)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(EVENTS, st.booleans())
def test_any_order_of_events_keeps_table_and_cache_in_step(events: list[tuple[object, ...]], is_last: bool) -> None:
    """Whatever comes, the table's positions are what the cache holds, and nothing but faults comes of nonsense."""
    engine = FakeEngine(is_last=is_last)
    executor = new_executor(engine)
    for event in events:
        match event:
            case ("open", int(session)):
                frame = control(session, Flag.OPEN)
            case ("close", int(session)):
                frame = control(session, Flag.CLOSE)
            case ("trim", int(session), int(length)):
                frame = control(session, Flag.TRIM, length)
            case ("copy", int(session), int(length), int(source)):
                frame = control(session, Flag.COPY_PREFIX, length, argument=source)
            case ("rows", int(session), int(position), int(n_rows)):
                frame = rows_frame(session, position, n_rows, SAMPLE)
            case ("nan", int(lane)):
                engine.nan_lanes = {lane}
                continue
            case _:
                engine.fail_next = NativeError("told to")
                continue
        executor.execute(step_of(frame))
        executor.lanes.check()
        held = {lane.index: lane.next_position for lane in executor.lanes._by_session.values()}
        assert [len(lane) for lane in engine.lanes] == [held.get(index, 0) for index in range(4)]
        assert set(executor.sessions.samplers) == (set(executor.lanes._by_session) if is_last else set())
    executor.close()
    assert engine.lanes == [[], [], [], []]


def test_an_epoch_leaves_what_its_running_sessions_hold() -> None:
    engine = FakeEngine(is_last=True)
    executor = opened(engine, 3, temperature=1.0)
    kept = control(3, Flag.OPEN, options=greedy(kept=True))
    executor.execute(step_of(kept, *(rows_frame(session_id, 0, 4) for session_id in range(4))))
    executor.execute(step_of(rows_frame(2, 9)))  # a gap
    executor.sessions.cancelled.add((ROUTE, 1))
    engine.lanes[0].append(tuple(engine.lanes[0][0]))  # as of a step that failed
    assert executor.leave_route(ROUTE) == 1
    assert list(map(len, engine.lanes)) == [4, 0, 0, 0]
    assert (executor.lanes.n_used, executor.lanes.n_kept) == (0, 1)
    assert (executor.sessions.samplers, executor.sessions.broken, executor.sessions.cancelled) == ({}, set(), set())
    assert executor.execute(step_of(rows_frame(0, 4))).outputs == [], "its epoch is over"
    assert executor.begin_route(ROUTE, new_wiring(engine, epoch=EPOCH + 1)) == {0: 4}
    executor.execute(step_of(control(0, Flag.OPEN, epoch=EPOCH + 1), rows_frame(0, 4, 1, epoch=EPOCH + 1)))
    assert (executor.lanes.n_used, len(engine.lanes[0])) == (1, 5)
    executor.sessions.forget_left(ROUTE)
    assert executor.lanes.n_used == 1, "somebody has come back for it"
    executor.leave_route(ROUTE)
    executor.sessions.forget_left(ROUTE)
    assert (len(executor.lanes), engine.lanes) == (0, [[], [], [], []])
    executor.lanes.check()


def left() -> StepExecutor:
    """One session has left three positions, and the next epoch has begun."""
    engine = FakeEngine(is_last=True)
    executor = opened(engine, 1)
    executor.execute(step_of(rows_frame(0, 0, 3)))
    executor.leave_route(ROUTE)
    executor.begin_route(ROUTE, new_wiring(engine, epoch=EPOCH + 1))
    return executor


def test_what_is_left_takes_no_rows_before_it_is_opened() -> None:
    executor, epoch = left(), EPOCH + 1
    for frame in (rows_frame(0, 3, 1, SAMPLE, epoch=epoch), control(0, Flag.TRIM, 2, epoch=epoch)):
        executor.sessions.broken.clear()
        result = executor.execute(step_of(frame))
        assert [fault.label for output in result.outputs for fault in output.faults] == ["bad_session"]
    result = executor.execute(
        step_of(control(5, Flag.OPEN, epoch=epoch), control(5, Flag.COPY_PREFIX, 2, argument=0, epoch=epoch))
    )
    assert [fault.label for output in result.outputs for fault in output.faults] == ["bad_session"]
    executor.execute(step_of(control(0, Flag.OPEN, epoch=epoch), rows_frame(0, 3, 1, SAMPLE, epoch=epoch)))
    assert executor.lanes.n_used == 2


def test_what_is_left_takes_no_rows_where_its_open_was_refused() -> None:
    """They stand behind it in one envelope."""
    executor, epoch = left(), EPOCH + 1
    refused = control(0, Flag.OPEN, epoch=epoch, options=greedy(top_p=7.0))
    behind = control(0, Flag.TRIM, 2, epoch=epoch), rows_frame(0, 2, 1, SAMPLE, epoch=epoch)
    result = executor.execute(step_of(refused, *behind))
    assert [fault.label for output in result.outputs for fault in output.faults] == ["protocol"]
    executor.execute(step_of(control(0, Flag.CLOSE, epoch=epoch)))
    assert len(executor.lanes) == 0
