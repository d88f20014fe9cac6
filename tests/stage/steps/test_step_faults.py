"""One step on a fake engine: failed sessions, retried steps, epochs, and that nothing is left over."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayline.stage.sampling.sampler import SessionSampler
from relayline.stage.steps.step import StepExecutor
from relayline.wire.common.errors import LaneLimitError, NativeError
from relayline.wire.envelopes.frames import Flag
from tests.support.fakes import (
    CTX,
    EPOCH,
    MAX_ROWS,
    ROUTE,
    FakeEngine,
    control,
    greedy,
    hidden,
    new_executor,
    new_wiring,
    rows_frame,
    step_of,
)
from tests.support.steps import PREFILL, SAMPLE, labels, only, opened, parsed, state_of

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


def test_frames_behind_a_fault_are_dropped_silently_until_a_new_start() -> None:
    """A lost chunk is followed by the rest of its train: this must cause one fault, not one for each."""
    engine = FakeEngine()
    executor = opened(engine, 1)
    engine.fail_next = LaneLimitError("no cells")
    assert labels(executor.execute(step_of(rows_frame(0, 0, 4, PREFILL)))) == [(0, "no_lane")]
    for position in (4, 8, 12):
        result = executor.execute(step_of(rows_frame(0, position, 4, PREFILL)))
        assert (result.outputs, len(result.consumed)) == ([], 1)
    replay = [control(0, Flag.OPEN), rows_frame(0, 0, 4, PREFILL)]
    assert labels(executor.execute(step_of(*replay))) == []
    assert labels(executor.execute(step_of(rows_frame(0, 9)))) == [(0, "position_gap")], "a new fault is reported again"


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


def test_kept_prefixes_yield_to_a_stream_of_any_route() -> None:
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


def test_a_lane_that_a_failed_step_emptied_takes_no_next_row() -> None:
    """With a recurrent state: llama.cpp would let the empty lane begin at any position, and be silently wrong."""
    engine = FakeEngine()
    executor = opened(engine, 2)
    executor.execute(step_of(rows_frame(0, 0, 3), rows_frame(1, 0, 3)))
    engine.fail_next, engine.failure_empties = NativeError("boom"), True
    assert labels(executor.execute(step_of(rows_frame(0, 3)))) == [(0, "native")]
    assert [executor.lanes.open(session_id, ROUTE).next_position for session_id in range(2)] == [0, 3]
    assert labels(executor.execute(step_of(rows_frame(0, 3), rows_frame(1, 3)))) == []
    assert [len(lane) for lane in engine.lanes[:2]] == [0, 4], "dropped in silence, behind a fault"
    assert labels(executor.execute(step_of(rows_frame(0, 0, 4)))) == []


def test_a_marked_frame_leaves_a_checkpoint_behind_its_last_row_and_travels_on() -> None:
    engine = FakeEngine()
    executor = opened(engine, 2)
    step = step_of(rows_frame(0, 0, 3, PREFILL | Flag.CHECKPOINT), rows_frame(1, 0, 2, PREFILL))
    output = only(executor.execute(step))
    assert engine.checkpoints == [(0, 3)]
    assert parsed(output).frames["flags"].tolist() == [PREFILL | Flag.CHECKPOINT, PREFILL]


# --- a step retried is a step done once -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_last", [False, True])
def test_the_same_frame_twice_has_the_effect_of_once(is_last: bool) -> None:
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


def test_a_frame_below_the_next_position_drops_the_rows_above() -> None:
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
    monkeypatch.setattr("relayline.wire.common.bounds.SESSIONS_PER_LINK_MAX", 5)
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


@settings(max_examples=150)
@given(EVENTS, st.booleans())
def test_any_order_of_events_keeps_table_and_cache_in_step(events: list[tuple[object, ...]], is_last: bool) -> None:
    """For any input the table's positions are the cache's content, and nonsense causes nothing but faults."""
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


def test_an_epoch_leaves_the_rows_of_its_running_sessions() -> None:
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
    assert executor.lanes.n_used == 1, "a session has come back for it"
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


def test_a_left_lane_takes_no_rows_before_it_is_opened() -> None:
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


def test_a_left_lane_takes_no_rows_after_a_refused_open() -> None:
    """They follow it in one envelope."""
    executor, epoch = left(), EPOCH + 1
    refused = control(0, Flag.OPEN, epoch=epoch, options=greedy(top_p=7.0))
    behind = control(0, Flag.TRIM, 2, epoch=epoch), rows_frame(0, 2, 1, SAMPLE, epoch=epoch)
    result = executor.execute(step_of(refused, *behind))
    assert [fault.label for output in result.outputs for fault in output.faults] == ["protocol"]
    executor.execute(step_of(control(0, Flag.CLOSE, epoch=epoch)))
    assert len(executor.lanes) == 0
