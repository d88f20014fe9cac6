"""The ring of batches and the summaries of sessions: their content after real steps, and that both are bounded."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import weakref
from types import SimpleNamespace

import pytest

from relayline.stage.observe import observer as observer_module
from relayline.stage.observe.observer import StageObserver
from relayline.stage.observe.ring import BatchRing, Entry, Member
from relayline.stage.observe.summaries import Summaries
from relayline.stage.queue_types import QueuedFrame
from relayline.stage.steps.step_types import StepResult
from relayline.wire.common.errors import NativeError
from relayline.wire.envelopes import envelope, trace_context
from relayline.wire.envelopes.frames import Flag
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.telemetry.telemetry import Telemetry
from tests.support.fakes import (
    EPOCH,
    ROUTE,
    FakeEngine,
    control,
    new_executor,
    new_facts,
    new_wiring,
    rows_frame,
    step_of,
)

PREFILL, SAMPLE = Flag.PREFILL, Flag.WANTS_SAMPLE
OTHER = ROUTE + 1


def entry(step: int, *session_ids: int) -> Entry:
    kept = tuple((session_id, 0, 1, False, 5, 6, 0) for session_id in session_ids)
    return Entry(step, 9, 10, 20, 3, 19, len(kept), 1, "row_cap", 7, 4, 99, trace_context.NONE, kept)


def traced(frame: QueuedFrame) -> QueuedFrame:
    frame.trace = trace_context.new_root()
    return frame


def sent(frame: QueuedFrame, at_ns: int) -> QueuedFrame:
    """The frame with a trace, and with its departure on the sender's clock."""
    frame.sent_ns = at_ns
    return traced(frame)


# --- the ring ---------------------------------------------------------------------------------------------------------


def test_the_ring_forgets_the_oldest_and_counts_them() -> None:
    ring = BatchRing(batches_max=3)
    for step in range(1, 6):
        ring.add(entry(step, step))
    assert [each.step for each in ring.recent()] == [3, 4, 5]
    assert ring.n_forgotten == 2


def test_the_ring_is_bounded_by_members_too() -> None:
    ring = BatchRing(batches_max=100, members_max=10)
    for step in range(1, 5):
        ring.add(entry(step, *range(4)))
    assert [each.step for each in ring.recent()] == [3, 4]
    ring.add(entry(5, *range(50)))
    assert [each.step for each in ring.recent()] == [5], "a batch wider than the bound is still shown"
    ring.add(entry(6, 1))
    assert [each.step for each in ring.recent()] == [6]


def test_the_ring_is_asked_by_session_and_by_number() -> None:
    ring = BatchRing()
    for step in range(1, 9):
        ring.add(entry(step, 7, step % 2))
    assert [each.step for each in ring.recent([0])] == [2, 4, 6, 8]
    assert [each.step for each in ring.recent([0], 2)] == [6, 8]
    assert [each.step for each in ring.recent([0, 1], 3)] == [6, 7, 8]
    assert ring.recent([99]) == []
    assert [each.step for each in ring.recent([0], after_step=4)] == [6, 8]
    assert [each.step for each in ring.recent(limit=2, after_step=3)] == [7, 8], "the newest of those"
    assert ring.recent(after_step=8) == []


async def test_a_long_answer_lets_envelopes_go_on_and_tells_its_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = new_facts(0, 2)
    observer = StageObserver(Telemetry(), facts.artifact, facts.config, "i", lambda: 0)
    for step in range(1, 201):
        observer.ring.add(entry(step, *range(16)))
    n_turns, readings = 0, list[int]()

    async def others() -> None:
        nonlocal n_turns
        while True:
            n_turns += 1
            await asyncio.sleep(0)

    def now_ns() -> int:
        """A clock that only turns of the event loop move."""
        readings.append(1_000 * n_turns)
        return readings[-1]

    monkeypatch.setattr(observer_module, "time", SimpleNamespace(monotonic_ns=now_ns))
    other = asyncio.create_task(others())
    answer = await observer.batches(pb.BatchesRequest(), None)
    other.cancel()
    assert [record.step for record in answer.batches] == list(range(1, 201))
    began_ns, ended_ns = readings
    assert began_ns == 0
    assert ended_ns >= 10_000
    assert answer.now_ns == ended_ns // 2


def test_an_entry_costs_the_garbage_collector_nothing() -> None:
    executor = new_executor(FakeEngine())
    executor.execute(step_of(control(5, Flag.OPEN)))
    kept = Entry.of(executor.execute(step_of(rows_frame(5, 0)))).kept
    gc.collect()
    assert kept
    assert not any(gc.is_tracked(each) for each in kept), "65,536 objects would be visited in every full collection"


def test_an_entry_describes_its_step_and_keeps_no_frame() -> None:
    executor = new_executor(FakeEngine())
    executor.execute(step_of(control(5, Flag.OPEN), control(6, Flag.OPEN)))
    context = trace_context.new_root()
    executor.mark = lambda members: context
    frames = [rows_frame(5, 0, 3, PREFILL, arrived_ns=100), rows_frame(6, 0, 1, arrived_ns=160)]
    frames[1].upstream_wait_ns, frames[1].sent_ns = 44, 77
    step = dataclasses.replace(step_of(*frames, taken_ns=200), queued_rows_before=9, queued_rows_after=5)
    result = executor.execute(step)
    kept = Entry.of(result)
    assert kept.members == (Member(5, 0, 3, True, 100, 0, 0), Member(6, 0, 1, False, 40, 44, 77))
    record = kept.message()
    assert (record.step, record.n_rows, record.padded_rows, record.close_reason) == (1, 4, 0, "queue_drained")
    assert (record.taken_ns, [member.sent_ns for member in record.members]) == (200, [0, 77])
    assert (record.start_ns, record.decode_ns, record.encode_ns) == (
        result.started_ns,
        result.decode_ns,
        result.encode_ns,
    )
    assert record.decode_ns > 0
    assert (record.queued_rows_before, record.queued_rows_after) == (9, 5)
    assert record.bytes_out == len(result.outputs[0].message)
    assert record.context == context[:24]
    assert [(member.session_id, member.wait_ns) for member in record.members] == [(5, 100), (6, 40)]
    assert frames[0].payload is not None
    rows = weakref.ref(frames[0].payload)
    del result, step, frames
    assert rows() is None, "the entry keeps a received message alive"


def test_steps_are_numbered_as_native_decodes() -> None:
    engine = FakeEngine()
    executor = new_executor(engine)
    opened = executor.execute(step_of(control(5, Flag.OPEN)))
    unplaced = executor.execute(step_of(rows_frame(99, 0)))
    first = executor.execute(step_of(rows_frame(5, 0), rows_frame(5, 7)))
    engine.fail_next = NativeError("no")
    failed = executor.execute(step_of(rows_frame(5, 1)))
    assert [result.number for result in (opened, unplaced, first, failed)] == [0, 0, 1, 2]
    assert [len(result.members) for result in (opened, unplaced, first, failed)] == [0, 0, 1, 1]
    assert (first.error, failed.error) == ("", "native")


def test_the_envelope_carries_the_batch_that_was_promised() -> None:
    executor = new_executor(FakeEngine())
    context = trace_context.new_root()
    asked: list[list[int]] = []

    def mark(members: list[QueuedFrame]) -> bytes:
        asked.append([frame.session_id for frame in members])
        return context

    executor.mark = mark
    opens = executor.execute(step_of(control(5, Flag.OPEN), control(6, Flag.OPEN)))
    assert envelope.parse(opens.outputs[0].message).batch_trace == trace_context.NONE
    both = executor.execute(step_of(rows_frame(5, 0), rows_frame(6, 0), rows_frame(9, 0)))
    assert asked == [[5, 6]]
    assert both.context == context
    assert envelope.parse(both.outputs[0].message).batch_trace == context


# --- summaries --------------------------------------------------------------------------------------------------------


def test_a_summary_adds_up_the_sessions_steps() -> None:
    executor, summaries = new_executor(FakeEngine()), Summaries(3)
    context = trace_context.new_root()
    executor.mark = lambda members: context

    def run(*frames: QueuedFrame, taken_ns: int = 0) -> StepResult:
        result = executor.execute(step_of(*frames, taken_ns=taken_ns))
        assert summaries.step_done(result) == []
        return result

    run(control(5, Flag.OPEN), control(6, Flag.OPEN))
    steps = [
        run(traced(rows_frame(5, 0, 3, PREFILL, arrived_ns=10)), taken_ns=30),
        run(sent(rows_frame(5, 3, arrived_ns=50), 30), rows_frame(6, 0, 2, PREFILL, arrived_ns=60), taken_ns=100),
        run(sent(rows_frame(5, 4, arrived_ns=110), 200), taken_ns=115),
        run(rows_frame(5, 5, arrived_ns=120), taken_ns=121),
    ]
    (five,) = summaries.step_done(executor.execute(step_of(control(5, Flag.CLOSE))))
    close, summary = five
    assert (close.session_id, summary.session_id, summary.stage_index) == (5, 5, 3)
    assert (summary.n_prefill_steps, summary.n_decode_steps) == (1, 3)
    assert (summary.prefill_wait_ns, summary.decode_wait_ns, summary.wait_max_ns) == (20, 50 + 5 + 1, 50)
    assert (summary.batch_rows_sum, summary.batch_rows_max) == (3 + 1 + 1, 3)
    assert summary.decode_ns == sum(step.decode_ns for step in steps)
    assert summary.prefill_decode_ns == steps[0].decode_ns
    assert summary.handle_ns == sum(step.handle_ns for step in steps[1:])
    assert (summary.hop_ns, summary.n_hops) == (50 - 30 + 110 - 200, 2), "the clock of the sender may be any"
    assert len(summaries) == 1
    ((_, six),) = summaries.step_done(executor.execute(step_of(control(6, Flag.CLOSE))))
    assert (six.n_prefill_steps, six.prefill_wait_ns) == (1, 40)
    assert len(summaries) == 0


def test_a_session_that_never_decoded_has_a_summary_of_nothing() -> None:
    executor, summaries = new_executor(FakeEngine()), Summaries(0)
    summaries.step_done(executor.execute(step_of(control(5, Flag.OPEN))))
    ((_, summary),) = summaries.step_done(executor.execute(step_of(control(5, Flag.CLOSE))))
    assert (summary.session_id, summary.n_prefill_steps, summary.decode_ns) == (5, 0, 0)


def test_a_session_closed_and_opened_in_one_step_begins_again() -> None:
    executor, summaries = new_executor(FakeEngine()), Summaries(0)
    summaries.step_done(executor.execute(step_of(control(5, Flag.OPEN), rows_frame(5, 0, 2, PREFILL))))
    again = step_of(control(5, Flag.CLOSE), control(5, Flag.OPEN), rows_frame(5, 0, 1, PREFILL))
    ((_, first),) = summaries.step_done(executor.execute(again))
    ((_, second),) = summaries.step_done(executor.execute(step_of(control(5, Flag.CLOSE))))
    assert (first.n_prefill_steps, second.n_prefill_steps) == (1, 1)


def test_the_close_of_an_ended_epoch_says_nothing() -> None:
    executor, summaries = new_executor(FakeEngine()), Summaries(0)
    assert summaries.step_done(executor.execute(step_of(control(5, Flag.CLOSE, epoch=EPOCH - 1)))) == []


def test_an_ended_route_takes_its_totals_with_it() -> None:
    engine = FakeEngine()
    executor, summaries = new_executor(engine), Summaries(0)
    executor.reset_route(OTHER, new_wiring(engine))
    frames = [rows_frame(5, 0), rows_frame(5, 0, route_id=OTHER)]
    opens = [control(5, Flag.OPEN), control(5, Flag.OPEN, route_id=OTHER)]
    summaries.step_done(executor.execute(step_of(*opens, *frames)))
    assert len(summaries) == 2
    summaries.forget(ROUTE)
    ((close, summary),) = summaries.step_done(executor.execute(step_of(control(5, Flag.CLOSE, route_id=OTHER))))
    assert (close.route_id, summary.n_decode_steps, len(summaries)) == (OTHER, 1, 0)
    summaries.forget()
    assert len(summaries) == 0
