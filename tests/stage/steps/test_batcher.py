from __future__ import annotations

import collections
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayline.stage.queue_types import QueuedFrame, Step
from relayline.stage.steps.batcher import CONTROLS_ONLY, CONTROLS_PER_STEP_MAX, Batcher
from relayline.stage.steps.policy import (
    OTHER_ADAPTER,
    QUEUE_DRAINED,
    Choice,
    DrainPolicy,
    GroupPolicy,
    Policy,
    SinglePolicy,
)
from relayline.wire.common.curve import CostCurve
from relayline.wire.envelopes.frames import Flag
from relayline.wire.envelopes.session_ids import with_adapter
from tests.support.examples import thinned
from tests.support.fakes import ROUTE, FakeEngine, control, new_executor, rows_frame


def new_batcher(max_rows: int = 64, prefill_rows: int = 16) -> Batcher:
    return Batcher(DrainPolicy(max_rows, prefill_rows))


def take_all(batcher: Batcher) -> list[Step]:
    steps: list[Step] = []
    while (step := batcher.take(0)) is not None:
        steps.append(step)
    return steps


def chunk(session_id: int, position: int, n_rows: int) -> QueuedFrame:
    return rows_frame(session_id, position, n_rows, Flag.PREFILL)


def test_an_empty_queue_gives_no_step() -> None:
    assert new_batcher().take(0) is None


def test_open_and_first_rows_run_in_the_same_step() -> None:
    batcher = new_batcher()
    frames = [control(1, Flag.OPEN), chunk(1, 0, 8), chunk(1, 8, 8)]
    for frame in frames:
        batcher.push(frame)
    first, second = take_all(batcher)
    assert first.controls == frames[:1]
    assert first.frames == frames[1:2]
    assert second.frames == frames[2:]
    assert (first.queued_rows_before, first.queued_rows_after) == (16, 8)


def test_a_control_between_rows_waits_for_the_rows_before_it() -> None:
    batcher = new_batcher()
    before, trim, after = rows_frame(1, 0), control(1, Flag.TRIM), rows_frame(1, 0)
    for frame in (before, trim, after):
        batcher.push(frame)
    first, second = take_all(batcher)
    assert (first.controls, first.frames) == ([], [before])
    assert (second.controls, second.frames) == ([trim], [after])


def test_controls_alone_make_a_step_of_no_rows() -> None:
    batcher = new_batcher()
    batcher.push(control(1, Flag.CLOSE))
    step = batcher.take(5)
    assert step is not None
    assert (step.close_reason, step.n_rows, step.taken_ns) == (CONTROLS_ONLY, 0, 5)


def test_many_sessions_make_one_step() -> None:
    batcher = new_batcher()
    for session_id in range(48):
        batcher.push(rows_frame(session_id, 3))
    (step,) = take_all(batcher)
    assert step.n_rows == 48
    assert [frame.session_id for frame in step.frames] == list(range(48))


def test_a_close_drops_its_sessions_waiting_frames() -> None:
    batcher = new_batcher()
    mine, other = [control(1, Flag.OPEN), chunk(1, 0, 8), chunk(1, 8, 8)], chunk(2, 0, 4)
    for frame in (*mine, other):
        assert batcher.push(frame) == []
    close = control(1, Flag.CLOSE)
    assert batcher.push(close) == mine[1:]
    assert (batcher.queued_rows, len(batcher)) == (4, 3)
    (step,) = take_all(batcher)
    assert (step.controls, step.frames) == ([mine[0], close], [other])


def test_a_close_leaves_rows_that_others_copy() -> None:
    """A lane is filled, copied and given up again while a step is computed."""
    batcher = new_batcher()
    frames = [
        control(2, Flag.OPEN), control(2, Flag.COPY_PREFIX, 40, argument=1), control(1, Flag.CLOSE),
        control(3, Flag.OPEN), control(3, Flag.COPY_PREFIX, 40, argument=2), control(2, Flag.CLOSE),
    ]  # fmt: skip
    for frame in frames:
        assert batcher.push(frame) == []
    (step,) = take_all(batcher)
    assert step.controls == frames


def test_a_storm_of_controls_takes_several_steps_in_the_order_in_which_they_came() -> None:
    """An envelope to the next stage has room for this number of frames."""
    batcher = new_batcher()
    frames = [control(session, flag) for session in range(3_000) for flag in (Flag.OPEN, Flag.CLOSE)]
    for frame in frames:
        batcher.push(frame)
    steps = take_all(batcher)
    assert [frame for step in steps for frame in step.controls] == frames
    assert max(len(step.controls) for step in steps) == CONTROLS_PER_STEP_MAX


def test_a_session_may_open_again_behind_its_close() -> None:
    batcher = new_batcher()
    frames = [control(1, Flag.CLOSE), control(1, Flag.OPEN), rows_frame(1, 0)]
    for frame in frames:
        batcher.push(frame)
    (step,) = take_all(batcher)
    assert step.controls == frames[:2]
    assert step.frames == frames[2:]


def test_controls_of_several_sessions_keep_the_order_in_which_they_came() -> None:
    """The lane that a close gives back is the one that the next open takes."""
    batcher = new_batcher()
    frames = [control(1, Flag.OPEN), control(1, Flag.TRIM), control(2, Flag.CLOSE), control(3, Flag.OPEN)]
    for frame in frames:
        batcher.push(frame)
    (step,) = take_all(batcher)
    assert step.controls == frames


def test_a_prefix_is_copied_after_the_rows_that_came_before_it() -> None:
    batcher = new_batcher()
    source = [control(1, Flag.OPEN), chunk(1, 0, 8), chunk(1, 8, 8)]
    target = [control(2, Flag.OPEN), control(2, Flag.COPY_PREFIX, 16, argument=1), chunk(2, 16, 4)]
    late = rows_frame(1, 16)
    for frame in (*source, *target, late):
        batcher.push(frame)
    first, second, third = take_all(batcher)
    assert first.controls == [source[0], target[0]]
    assert [first.frames, second.frames] == [[source[1]], [source[2]]]
    assert third.controls == [target[1]]
    assert third.frames == [late, target[2]]


def test_a_close_leaves_rows_that_others_copy_and_a_later_open_waits() -> None:
    """A session has read a beginning for others and leaves. The next open takes its lane."""
    batcher = new_batcher()
    source = [control(1, Flag.OPEN), chunk(1, 0, 8), chunk(1, 8, 8)]
    target = [control(2, Flag.OPEN), control(2, Flag.COPY_PREFIX, 16, argument=1), chunk(2, 16, 4)]
    late, close = chunk(1, 16, 8), control(1, Flag.CLOSE)
    following = [control(3, Flag.OPEN), chunk(3, 0, 4)]
    for frame in (*source, *target, late):
        batcher.push(frame)
    assert batcher.push(close) == [late], "no session copies that"
    assert batcher.queued_rows == 8 + 8 + 4
    for frame in following:
        batcher.push(frame)
    first, second, third = take_all(batcher)
    assert (first.controls, first.frames) == ([source[0], target[0]], [source[1]])
    assert (second.controls, second.frames) == ([], [source[2]])
    assert third.controls == [target[1], close, following[0]]
    assert third.frames == [target[2], following[1]]


def test_rows_that_others_copy_keep_their_place_in_line() -> None:
    batcher = new_batcher(max_rows=8, prefill_rows=8)
    first, other = chunk(1, 0, 8), chunk(3, 0, 8)
    for frame in (first, control(2, Flag.COPY_PREFIX, 8, argument=1), other, control(1, Flag.CLOSE)):
        batcher.push(frame)
    assert [step.frames for step in take_all(batcher)] == [[first], [other]]


def test_after_its_copies_a_close_drops_its_sessions_waiting_frames() -> None:
    batcher = new_batcher()
    batcher.push(chunk(1, 0, 8))
    batcher.push(control(2, Flag.COPY_PREFIX, 8, argument=1))
    assert len(take_all(batcher)) == 2
    late = chunk(1, 8, 8)
    batcher.push(late)
    assert batcher.push(control(1, Flag.CLOSE)) == [late]


def test_frames_of_an_ended_epoch_keep_no_others_waiting() -> None:
    batcher = new_batcher()
    for frame in (chunk(1, 0, 8), control(2, Flag.COPY_PREFIX, 8, argument=1), control(1, Flag.CLOSE)):
        batcher.push(frame)
    assert len(batcher.drop_route(ROUTE)) == 3
    rows, opening = chunk(1, 0, 8), control(3, Flag.OPEN)
    for frame in (rows, opening):
        batcher.push(frame)
    assert batcher.push(control(1, Flag.CLOSE)) == [rows]
    (step,) = take_all(batcher)
    assert len(step.controls) == 2


def test_routes_are_kept_apart() -> None:
    batcher = new_batcher()
    mine, theirs = rows_frame(1, 0, route_id=1), rows_frame(1, 0, route_id=2)
    batcher.push(mine)
    batcher.push(theirs)
    assert batcher.push(control(1, Flag.CLOSE, route_id=2)) == [theirs]
    assert batcher.drop_route(2) != []
    assert batcher.drop_route(2) == []
    (step,) = take_all(batcher)
    assert (step.controls, step.frames) == ([], [mine])


def test_dropping_a_route_forgets_all_of_it() -> None:
    batcher = new_batcher()
    frames = [control(1, Flag.OPEN), chunk(1, 0, 8), rows_frame(2, 5)]
    for frame in frames:
        batcher.push(frame)
    assert batcher.drop_route(frames[0].route_id) == frames
    assert (len(batcher), batcher.queued_rows, batcher.take(0)) == (0, 0, None)


class HoldBack:
    """A policy that takes nothing until it is allowed to."""

    def __init__(self) -> None:
        self.holds = True

    def choose(self, decode: Sequence[QueuedFrame], prefill: Sequence[QueuedFrame], **_: bool) -> Choice:
        return Choice(0, 0, "held") if self.holds else Choice(len(decode), len(prefill), "let_go")


def test_a_policy_may_hold_everything_back() -> None:
    policy = HoldBack()
    batcher = Batcher(policy)
    frame = rows_frame(1, 0)
    batcher.push(frame)
    assert batcher.take(0) is None
    policy.holds = False
    step = batcher.take(0)
    assert step is not None
    assert (step.frames, step.close_reason) == ([frame], "let_go")


@pytest.mark.parametrize(("n_decoders", "chunk_rows"), [(4, 16), (15, 16), (16, 4), (40, 16)])
def test_neither_decoders_nor_prompts_starve(n_decoders: int, chunk_rows: int) -> None:
    """Decoders come back the moment they ran, four prompts have a hundred chunks each; everybody keeps advancing."""
    max_rows = 16
    batcher = new_batcher(max_rows, prefill_rows=4)
    for session_id in range(n_decoders):
        batcher.push(rows_frame(session_id, 0))
    for prompt in range(4):
        for index in range(100):
            batcher.push(chunk(1_000 + prompt, index * chunk_rows, chunk_rows))
    waited = collections.Counter(range(n_decoders)) + collections.Counter(range(1_000, 1_004))
    rounds = -(-n_decoders // (max_rows if chunk_rows == max_rows else max_rows - chunk_rows)) + 1
    bound = 4 * (
        rounds + 1
    )  # every other head of the prefill line goes first, each after at most one round of decoders
    for _ in range(200):
        step = batcher.take(0)
        assert step is not None
        assert step.n_rows <= max_rows
        for session_id in waited:
            waited[session_id] += 1
        for frame in step.frames:
            waited[frame.session_id] = 0
            if not frame.is_prefill:
                batcher.push(rows_frame(frame.session_id, frame.position + 1))
        assert max(waited.values()) <= bound, waited.most_common(3)


@pytest.mark.parametrize("policy", [GroupPolicy(16, CostCurve()), SinglePolicy(16)], ids=["group", "single"])
def test_first_come_first_served_starves_nobody(policy: Policy) -> None:
    """Prompts that arrived whole, long before every decoder's row, do not run to their end first."""
    batcher = Batcher(policy)
    for prompt in range(4):
        for index in range(50):
            batcher.push(chunk(1_000 + prompt, 16 * index, 16))
    waited = collections.Counter(range(8)) + collections.Counter(range(1_000, 1_004))
    for session_id in range(8):
        batcher.push(rows_frame(session_id, 0))
    for turn in range(150):
        step = batcher.take(turn)
        assert step is not None
        for session_id in waited:
            waited[session_id] += 1
        for frame in step.frames:
            waited[frame.session_id] = 0
            if not frame.is_prefill:
                again = rows_frame(frame.session_id, frame.position + 1, arrived_ns=turn)
                again.envelope = turn
                batcher.push(again)
        assert max(waited.values()) <= 13, waited.most_common(3)


def push_envelopes(batcher: Batcher, sent: Sequence[Sequence[QueuedFrame]]) -> None:
    for number, frames in enumerate(sent):
        for frame in frames:
            frame.envelope = number
            batcher.push(frame)


@pytest.mark.parametrize(
    "sent",
    [
        [[chunk(1, 0, 12), chunk(2, 0, 4)], [chunk(2, 4, 8), chunk(3, 0, 8)], [chunk(3, 8, 4), chunk(4, 0, 12)]],
        [[rows_frame(1, 0), chunk(8, 0, 4)], [rows_frame(2, 0), chunk(8, 4, 4)], [rows_frame(3, 0), chunk(9, 0, 4)]],
        [[control(9, Flag.OPEN), chunk(8, 0, 4), chunk(9, 0, 8)], [chunk(7, 0, 12)]],
        [[control(9, Flag.OPEN), rows_frame(1, 0), chunk(9, 0, 4)], [rows_frame(3, 0), chunk(8, 0, 4)]],
    ],
    ids=["rest", "rest_riding", "open", "open_riding"],
)
def test_frames_sent_together_run_in_one_step(sent: list[list[QueuedFrame]]) -> None:
    """Also a frame that becomes its session's head only then: behind a prompt's first part, or behind an open."""
    sent = [*sent, [rows_frame(99, 0)]]
    batcher = Batcher(GroupPolicy(16, CostCurve()))
    push_envelopes(batcher, sent)
    ran = [{(frame.session_id, frame.position) for frame in step.frames} for step in take_all(batcher)]
    assert ran == [{(frame.session_id, frame.position) for frame in frames if frame.n_rows} for frames in sent]


def test_an_envelope_of_many_chunks_does_not_keep_others_off() -> None:
    batcher = Batcher(GroupPolicy(16, CostCurve()))
    long = [chunk(session_id, 16 * index, 16) for index in range(50) for session_id in (1, 2)]
    push_envelopes(batcher, [long, [rows_frame(3, 0)]])
    ran = [[frame.session_id for frame in step.frames] for step in take_all(batcher)]
    assert ran.index([3]) == 2


def test_a_frame_wider_than_the_step_does_not_block_the_others() -> None:
    batcher = new_batcher(max_rows=8, prefill_rows=4)
    for frame in (chunk(1, 0, 9), chunk(2, 0, 4), rows_frame(3, 0, 9), rows_frame(4, 0)):
        batcher.push(frame)
    ran = [frame.session_id for step in take_all(batcher) for frame in step.frames]
    assert sorted(ran) == [1, 2, 3, 4]


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("rows"), st.integers(0, 5), st.integers(1, 8), st.booleans()),
        st.tuples(st.just("open"), st.integers(0, 5)),
        st.tuples(st.just("trim"), st.integers(0, 5)),
        st.tuples(st.just("copy"), st.integers(0, 5), st.integers(0, 5)),
        st.tuples(st.just("close"), st.integers(0, 5)),
        st.tuples(st.just("drop_route"), st.integers(0, 1)),
        st.tuples(st.just("take")),
    ),
    max_size=80,
)


def _frame(event: tuple[object, ...], position: int) -> QueuedFrame:
    session = int(str(event[1]))
    route = session % 2
    match event:
        case ("rows", _, int(n_rows), bool(is_prefill)):
            return rows_frame(session, position, n_rows, Flag.PREFILL if is_prefill else 0, route_id=route)
        case ("copy", _, int(source)):
            return control(session, Flag.COPY_PREFIX, argument=source, route_id=route)
    return control(session, {"open": Flag.OPEN, "trim": Flag.TRIM, "close": Flag.CLOSE}[str(event[0])], route_id=route)


@settings(max_examples=thinned(300))
@given(EVENTS)
def test_nothing_is_lost_doubled_or_reordered(events: list[tuple[object, ...]]) -> None:
    """Every frame leaves exactly once, in a step or as dropped, and a session's frames leave in their order."""
    batcher = new_batcher(max_rows=8, prefill_rows=4)
    pushed: list[QueuedFrame] = []
    dropped: list[QueuedFrame] = []
    ran: list[QueuedFrame] = []

    def take() -> bool:
        step = batcher.take(0)
        if step is None:
            return False
        assert step.controls or step.frames
        assert step.n_rows <= 8
        sessions = [frame.session_key for frame in step.frames]
        assert len(set(sessions)) == len(sessions)
        ran.extend([*step.controls, *step.frames])
        return True

    for event in events:
        if event[0] == "take":
            take()
        elif event[0] == "drop_route":
            gone = batcher.drop_route(int(str(event[1])))
            assert {frame.route_id for frame in gone} <= {event[1]}
            dropped += gone
        else:
            pushed.append(_frame(event, len(pushed)))
            gone = batcher.push(pushed[-1])
            assert not gone or (event[0] == "close" and {f.session_key for f in gone} == {pushed[-1].session_key})
            dropped += gone
        waiting = len(pushed) - len(dropped) - len(ran)
        assert len(batcher) == waiting
    while take():
        pass
    assert (len(batcher), batcher.queued_rows) == (0, 0)
    assert sorted(map(id, pushed)) == sorted(map(id, dropped + ran))
    for key in {frame.session_key for frame in ran}:
        orders = [pushed.index(frame) for frame in ran if frame.session_key == key]
        assert orders == sorted(orders)


def copying(session_id: int, source_id: int, position: int) -> list[QueuedFrame]:
    """The frames that keep a session's content under another id."""
    return [control(session_id, Flag.OPEN), control(session_id, Flag.COPY_PREFIX, position, argument=source_id)]


@pytest.mark.parametrize("policy", [DrainPolicy(64, 16), SinglePolicy(64)])
def test_nothing_is_closed_before_its_copies_are_made(policy: Policy) -> None:
    """A stream ends and is kept while another close waits for rows: its open waits for that, and its copy with it."""
    batcher, executor = Batcher(policy), new_executor(FakeEngine(n_lanes=8, is_last=True))

    def run(*frames: QueuedFrame) -> list[str]:
        for frame in frames:
            batcher.push(frame)
        faults = []
        while step := batcher.take(0):
            faults += [fault.message for output in executor.execute(step).outputs for fault in output.faults]
        return faults

    assert run(control(1, Flag.OPEN), rows_frame(1, 0, 4), control(2, Flag.OPEN), rows_frame(2, 0, 4)) == []
    more = rows_frame(1, 4, 3, Flag.PREFILL)
    assert run(more, *copying(3, 1, 7), control(1, Flag.CLOSE), *copying(4, 2, 4), control(2, Flag.CLOSE)) == []
    assert {lane.session_id: lane.next_position for lane in executor.lanes.of_route(ROUTE)} == {3: 7, 4: 4}
    assert len(batcher) == 0
    assert (batcher._copies, batcher._closes) == ({}, {})


def test_a_session_closed_and_opened_again_waits_for_each_copy_in_its_place() -> None:
    batcher = new_batcher()
    frames = [
        *(control(1, Flag.OPEN), *copying(2, 1, 4), control(1, Flag.CLOSE)),
        *(control(1, Flag.OPEN), *copying(3, 1, 4), control(1, Flag.CLOSE)),
    ]
    for frame in frames:
        batcher.push(frame)
    assert batcher._copies == {(ROUTE, 1): [2, 6]}
    (step,) = take_all(batcher)
    assert step.controls == frames
    assert (batcher._copies, batcher._closes) == ({}, {})


def test_a_control_takes_no_credit_and_rows_take_their_bytes() -> None:
    given: list[int] = []
    for frame in (control(1, Flag.OPEN), rows_frame(1, 0, 3)):
        frame.on_consumed = given.append
        frame.give_credit()
        assert frame.rows_bytes == (frame.payload.nbytes if frame.payload is not None else 0)
    assert len(given) == 1


def rows_with(adapter: int, number: int, position: int = 5, n_rows: int = 1, flags: int = 0) -> QueuedFrame:
    """Rows of one envelope."""
    frame = rows_frame(with_adapter(number, adapter), position, n_rows, flags)
    frame.envelope = 1
    return frame


@pytest.mark.parametrize("policy", [DrainPolicy(64, 16), GroupPolicy(64, CostCurve())])
def test_a_step_has_rows_of_one_adapter_alone_and_the_oldest_goes_first(policy: Policy) -> None:
    batcher = Batcher(policy)
    frames = [rows_with(number % 2, number) for number in (1, 2, 3, 4)]
    ids = [frame.session_id for frame in frames]
    assert batcher.push_together(frames) == []
    batcher.push_together([late := rows_with(1, 9, 0, 4, Flag.PREFILL)])
    steps = take_all(batcher)
    assert [{frame.adapter for frame in step.frames} for step in steps] == [{1}, {0}] + [{1}] * (len(steps) - 2)
    assert [frame.session_id for frame in steps[1].frames] == [ids[1], ids[3]]
    assert sorted(frame.session_id for step in steps for frame in step.frames) == sorted([*ids, late.session_id])


@pytest.mark.parametrize("n_adapters", [1, 3])
def test_streams_wait_for_one_step_of_another_adapters_prompts(n_adapters: int) -> None:
    """Prompts of adapter 1 that came before fill step after step otherwise, and each is as wide as a step."""
    batcher = Batcher(DrainPolicy(64, 16))
    for number in range(8):
        batcher.push_together([rows_with(1, 100 + number, 0, 12, Flag.PREFILL)])
    for number in range(n_adapters):
        batcher.push_together([rows_with(2 + number, number)])
    steps = take_all(batcher)
    kinds = [(step.frames[0].adapter, step.n_rows) for step in steps]
    assert kinds[: 2 * n_adapters] == [pair for number in range(n_adapters) for pair in ((1, 12), (2 + number, 1))]
    assert {adapter for adapter, _ in kinds[2 * n_adapters :]} == {1}
    assert sum(step.n_rows for step in steps) == 8 * 12 + n_adapters


def test_a_step_says_that_others_wait_for_their_adapters() -> None:
    batcher = new_batcher()
    batcher.push_together([rows_with(0, 1), rows_with(1, 2)])
    assert [step.close_reason for step in take_all(batcher)] == [OTHER_ADAPTER, QUEUE_DRAINED]


def test_a_whole_envelope_of_one_adapter_is_one_step() -> None:
    batcher = Batcher(GroupPolicy(64, CostCurve()))
    batcher.push_together([rows_with(3, number) for number in (1, 2, 3)])
    assert [step.n_rows for step in take_all(batcher)] == [3]
