"""To which trace of passes an envelope belongs, when a second is over, and its totals. Time is an argument."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from relayline.coordinator.observe.pass_traces import PassTraces, busy_attributes
from relayline.coordinator.observe.passes import (
    ANSWER_WAIT_NS,
    WINDOW_NS,
    WINDOW_SPANS_MAX,
    WINDOWS_MAX,
    Passes,
    Window,
)
from relayline.coordinator.sessions.frame import Frame
from relayline.coordinator.sessions.request_log import SessionRecord
from relayline.wire.envelopes import trace_context
from relayline.wire.envelopes.frames import Flag
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.telemetry import names

MS = 1_000_000


class World:
    """Windows of a pipeline of three stages; `sampled`: the decision for each new one."""

    def __init__(self, *, sampled: bool = True) -> None:
        self.done: list[Window] = []
        self.passes = Passes(lambda root: sampled, self.done.append)
        self.passes.n_stages = 3
        self.records: dict[int, SessionRecord] = {}

    def record_of(self, session_id: int) -> SessionRecord:
        return self.records.setdefault(session_id, SessionRecord())

    def trace(self, session_id: int) -> None:
        self.record_of(session_id).trace.context = trace_context.new_root()

    def leave(self, now_ns: int, *session_ids: int, position: int = 3) -> bytes:
        frames = [Frame(i, position, (7,), Flag.WANTS_SAMPLE) for i in session_ids]
        return self.passes.leaves(frames, now_ns, self.record_of)

    def back(self, context: bytes, now_ns: int, *session_ids: int, position: int = 4) -> None:
        self.passes.returned(context, [(i, position) for i in session_ids], len(session_ids), now_ns)


@pytest.mark.parametrize("up_ns", [0, 86_400 * WINDOW_NS])
def test_passes_of_one_second_share_a_trace_and_the_next_has_its_own(up_ns: int) -> None:
    world = World()
    first = world.leave(up_ns, 1, 2)
    assert world.leave(up_ns + WINDOW_NS - 1, 3) == first
    next_ns = up_ns + WINDOW_NS
    second = world.leave(next_ns, 4)
    assert second[:16] != first[:16]
    assert world.done == [], "its passes have not come back"
    world.back(trace_context.new_below(first), next_ns + 5, 1, 2)
    assert world.done == []
    world.back(trace_context.new_below(first), next_ns + 9, 3)
    (window,) = world.done
    assert (window.root, window.n_passes, window.n_rows, window.n_tokens) == (first, 2, 3, 3)
    assert (window.streams, window.streams_max, window.last_ns) == ({1, 2, 3}, 2, next_ns + 9)
    world.passes.look(next_ns + WINDOW_NS - 1)
    assert world.leave(next_ns + WINDOW_NS - 1, 5) == second, "its second is not over"
    world.passes.look(next_ns + WINDOW_NS)
    world.back(second, next_ns + WINDOW_NS + 1, 4)
    world.back(second, next_ns + WINDOW_NS + 1, 5)
    assert world.done[1].root == second


def test_passes_that_stages_make_by_themselves_are_counted() -> None:
    """Rows under a grant: the first leaves, the others are known by their answers; an extension opens a window."""
    world = World()
    rows = [Frame(i, 3, (7,), Flag.WANTS_SAMPLE, 5 << 32) for i in (1, 2)]
    first = world.passes.leaves(rows, 0, world.record_of)
    below = trace_context.new_below(first)
    for position in (4, 5, 6):
        keys = [(session_id, position) for session_id in (1, 2)]
        world.passes.returned(below, keys, 2, position, keys)
    extension = Frame(1, 0, (), Flag.EXTEND, 5 << 32)
    assert world.passes.leaves([extension], 9, world.record_of) == first
    second = world.passes.leaves([extension], WINDOW_NS, world.record_of)
    assert second[:16] != first[:16]
    world.passes.returned(second, [(1, 7)], 1, WINDOW_NS + 1, [(1, 7)])
    late = [(2, 7)]
    world.passes.returned(below, late, 1, WINDOW_NS + 2, late)
    assert world.done == [], "more passes of it may come"
    world.passes.look(2 * WINDOW_NS)
    world.passes.look(3 * WINDOW_NS)
    assert [(window.n_passes, window.n_rows, window.n_tokens) for window in world.done] == [(4, 7, 7), (1, 1, 1)]
    assert world.passes.leaves([Frame(1, 0, (), Flag.CLOSE)], 9, world.record_of) == trace_context.NONE


def test_passes_under_a_long_grant_are_of_its_second_as_long_as_they_come() -> None:
    world = World()
    first = world.passes.leaves([Frame(1, 3, (7,), Flag.WANTS_SAMPLE, 5 << 32)], 0, world.record_of)
    step_ns, n_steps = WINDOW_NS * 3 // 4, 9
    for number in range(n_steps):
        world.passes.look(number * step_ns)
        key = (1, 4 + number)
        world.passes.returned(trace_context.new_below(first), [key], 1, (number + 1) * step_ns, [key])
    assert world.done == []
    world.passes.look(n_steps * step_ns + WINDOW_NS)
    (window,) = world.done
    assert (window.n_passes, window.n_tokens, window.last_ns) == (n_steps, n_steps, n_steps * step_ns)


def test_a_trace_is_no_longer_than_a_viewer_draws() -> None:
    world = World()
    roots = [world.leave(at, 1, position=at) for at in range(1_000)]
    per_trace = [roots.count(root) for root in dict.fromkeys(roots)]
    assert per_trace == [WINDOW_SPANS_MAX // 5] * (5_000 // WINDOW_SPANS_MAX)


def test_nothing_is_opened_while_nothing_runs() -> None:
    world = World()
    opening = Frame(1, 0, (), Flag.OPEN)
    assert world.passes.leaves([opening], 0, world.record_of) == trace_context.NONE
    assert not world.passes.is_busy
    world.passes.look(10 * WINDOW_NS)
    world.passes.end(10 * WINDOW_NS)
    assert world.done == []


def test_an_idle_pipeline_closes_its_second_by_itself() -> None:
    world = World()
    context = world.leave(0, 1)
    world.back(context, MS, 1)
    world.passes.look(WINDOW_NS - 1)
    assert world.done == []
    world.passes.look(WINDOW_NS)
    assert [window.last_ns for window in world.done] == [MS], "it ends with its last seen state"
    assert not world.passes.is_busy


def test_of_an_unsampled_second_only_the_passes_of_sampled_requests_are_there() -> None:
    world = World(sampled=False)
    world.trace(2)
    assert world.leave(0, 1) == trace_context.NONE
    context = world.leave(1, 1, 2)
    assert trace_context.is_sampled(context)
    assert world.records[2].trace.passes.roots == [context]
    assert world.records[1].trace.passes.roots == []
    assert world.leave(2, 1, position=4) == trace_context.NONE
    world.passes.close(3)
    world.back(context, 4, 1, 2)
    (window,) = world.done
    assert (window.n_passes, window.n_rows, window.streams_max) == (1, 2, 2)


def test_a_second_without_a_recorded_pass_has_no_root() -> None:
    world = World(sampled=False)
    world.leave(0, 1)
    world.passes.end(1)
    assert world.done == []


def test_a_session_that_ended_is_not_waited_for() -> None:
    world = World()
    context = world.leave(0, 1, 2)
    world.passes.close(1)
    world.back(context, 2, 1)
    world.passes.forget(2)
    world.passes.look(3)
    assert [window.n_tokens for window in world.done] == [1]


def test_the_answer_that_ends_a_session_is_counted() -> None:
    """It is handled first, so the session ends before its last token is noted; its second may be over by then."""
    world = World()
    context = world.leave(0, 1)
    world.passes.close(WINDOW_NS)
    world.passes.forget(1)
    world.back(context, WINDOW_NS + 1, 1)
    assert [(window.n_tokens, window.last_ns) for window in world.done] == [(1, WINDOW_NS + 1)]


def test_an_answer_that_makes_room_for_the_first_pass_of_the_next_second_is_counted() -> None:
    """Frames that follow from an answer leave before it is counted."""
    world = World()
    context = world.leave(0, 1)
    world.passes.forget(1)
    following = world.leave(WINDOW_NS, 2)
    assert world.done == []
    world.back(context, WINDOW_NS + MS, 1)
    assert [(window.root, window.n_tokens) for window in world.done] == [(context, 1)]
    assert world.passes.window_of(following) is not None


def test_any_answer_ends_seconds_that_wait_for_nobody() -> None:
    world = World()
    world.leave(0, 1)
    context = world.leave(WINDOW_NS, 2)
    world.passes.forget(1)
    assert world.done == []
    world.back(context, WINDOW_NS + 1, 2)
    assert [window.streams for window in world.done] == [{1}]


def test_missing_answers_are_counted() -> None:
    world = World()
    world.leave(0, 1)
    world.passes.close(1)
    world.passes.look(ANSWER_WAIT_NS)
    assert world.done == []
    world.passes.look(ANSWER_WAIT_NS + 1)
    assert [len(window.waiting) for window in world.done] == [1]


def test_windows_under_way_are_bounded() -> None:
    world = World()
    for second in range(WINDOWS_MAX + 3):
        world.leave(second * WINDOW_NS, 1, position=second)
    assert len(world.done) == 3


def test_a_loss_ends_every_second_and_says_why() -> None:
    world = World()
    world.leave(0, 1)
    world.leave(WINDOW_NS, 2)
    world.passes.lost("stage 1 is gone", WINDOW_NS + MS)
    assert [(window.lost, window.last_ns) for window in world.done] == [("stage 1 is gone", WINDOW_NS + MS)] * 2
    assert not world.passes.is_busy


def test_an_answer_without_a_context_counts_for_whichever_second_waits() -> None:
    """A stage whose level is lower says nothing of its batch."""
    world = World()
    world.leave(0, 1)
    world.passes.close(1)
    world.back(b"", 2, 1)
    assert len(world.done) == 1


def status(*steps: tuple[int, int], n_steps: int = 0) -> pb.StatusResponse:
    return pb.StatusResponse(
        step_start_ns=[start for start, _ in steps],
        step_end_ns=[end for _, end in steps],
        n_steps=n_steps or len(steps),
        uptime_ns=10 * MS,
    )


def test_busy_shares_are_of_the_second_alone() -> None:
    found = busy_attributes([status((0, 20), (50, 100)), status((90, 120), (140, 400))], 0, 200)
    assert found[names.ATTR_PASSES_BUSY] == [0.35, 0.45]
    assert found[names.ATTR_PASSES_OVERLAP] == pytest.approx(10 / 150, abs=1e-4)


def test_busy_shares_leave_out_forgotten_times() -> None:
    found = busy_attributes([status((100, 150), n_steps=9), status((0, 200))], 0, 200)
    assert found[names.ATTR_PASSES_BUSY] == [0.5, 1.0]


@pytest.mark.parametrize("statuses", [None, [], [None, status((0, 5))]])
def test_no_overlap_is_reported_without_an_answer_of_every_stage(
    statuses: list[pb.StatusResponse | None] | None,
) -> None:
    assert busy_attributes(statuses, 0, 10) == {}


def test_an_envelope_that_only_extends_grants_is_no_pass() -> None:
    emitted: list[Any] = []
    telemetry: Any = SimpleNamespace(wall_offset_ns=lambda: 0, emit=emitted.append)
    traces, context = PassTraces(telemetry, None, lambda: 1.0), trace_context.new_root()
    traces.sent(context, [Frame(1, 0, (), Flag.EXTEND, 5 << 32)], 1, 2)
    assert emitted == []
    traces.sent(context, [Frame(1, 0, (), Flag.EXTEND, 5 << 32), Frame(2, 3, (7,), Flag.WANTS_SAMPLE)], 1, 2)
    assert [(span.name, span.attributes[names.ATTR_PASS_ROWS]) for span in emitted] == [(names.SPAN_SEND, 1)]
