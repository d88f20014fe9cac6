from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator

import pytest

from relayline.stage.queue_types import QueuedFrame
from relayline.stage.steps.batcher import Batcher
from relayline.stage.steps.policy import DrainPolicy
from relayline.stage.steps.runner import OUTBOX_STEPS_MAX, Runner, _Bell
from relayline.stage.steps.step import StepExecutor
from relayline.stage.steps.step_types import StepResult
from relayline.wire.common.errors import InternalError
from relayline.wire.envelopes.frames import Flag
from tests.support.fakes import MAX_ROWS, ROUTE, BlockedDecode, FakeEngine, control, new_executor, rows_frame


class Harness:
    """A runner over a fake engine; its results wait in `results`."""

    def __init__(self) -> None:
        self.engine = FakeEngine(n_lanes=64)
        self.executor: StepExecutor = new_executor(self.engine)
        self.results: asyncio.Queue[StepResult] = asyncio.Queue()
        self.crash: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.batcher = Batcher(DrainPolicy(MAX_ROWS, MAX_ROWS))
        self.runner = Runner(self.batcher, self.executor, self.results.put_nowait, self.crash.set_result)

    async def result(self) -> StepResult:
        """The next step's result, taken out of the outbox."""
        async with asyncio.timeout(20):
            result = await self.results.get()
        self.runner.sent()
        return result

    async def open(self, *session_ids: int) -> None:
        self.runner.push([control(session_id, Flag.OPEN) for session_id in session_ids])
        await self.result()

    async def blocked_by(self, *frames: QueuedFrame) -> BlockedDecode:
        """Push frames; returns when their step is in the engine, which waits."""
        blocked = BlockedDecode(self.engine)
        self.runner.push([*frames])
        await reached(blocked.entered)
        return blocked


@contextlib.asynccontextmanager
async def harness() -> AsyncIterator[Harness]:
    made = Harness()
    try:
        yield made
    finally:
        made.engine.on_decode = lambda: None
        await made.runner.stop()


async def reached(event: threading.Event) -> None:
    """Wait for an event of the decode thread without holding the loop."""
    async with asyncio.timeout(20):
        assert await asyncio.to_thread(event.wait, 20)


async def test_frames_pushed_during_a_decode_form_the_next_batch() -> None:
    async with harness() as h:
        await h.open(*range(33))
        blocked = await h.blocked_by(rows_frame(0, 0))
        for session_id in range(1, 33):
            h.runner.push([rows_frame(session_id, 0)])
        assert h.runner.snapshot.queued_rows == 32
        blocked.release()
        assert (await h.result()).n_rows == 1
        assert (await h.result()).n_rows == 32
        assert [len(step) for step in h.engine.steps] == [1, 32]


async def test_only_the_decode_thread_gets_its_large_stack() -> None:
    before_bytes = threading.stack_size()
    async with harness():
        assert threading.stack_size() == before_bytes


async def test_a_look_is_a_value_of_one_moment() -> None:
    """Lanes as of the latest whole step, whatever the decode thread is changing; the queue as of now."""
    async with harness() as h:
        h.engine.on_decode = lambda: None
        await h.open(0, 1)
        before = h.runner.snapshot
        assert (before.lanes_total, before.lanes_used, before.queued_frames, before.running) == (64, 2, 0, None)
        blocked = await h.blocked_by(control(2, Flag.OPEN), rows_frame(0, 0))
        assert len(h.executor.lanes) == 3, "opened by the step that runs"
        h.runner.push([rows_frame(1, 0, 3), rows_frame(1, 3)])
        during = h.runner.snapshot
        assert (during.lanes_used, during.queued_frames, during.queued_rows) == (2, 2, 4)
        assert during.running is not None
        assert [frame.session_id for frame in during.running.frames] == [0]
        blocked.release()
        await h.result()
        await h.result()
        await h.result()
        after = h.runner.snapshot
        assert (after.lanes_used, after.queued_frames, after.queued_rows, after.running) == (3, 0, 0, None)
        assert (before.lanes_used, during.lanes_used, during.queued_rows) == (2, 2, 4), "values do not change"
        await h.runner.call(lambda: h.executor.reset_route(ROUTE, None))
        assert h.runner.snapshot.lanes_used == 0, "a call's effect is published before it is answered"


async def test_the_event_loop_runs_while_the_engine_is_busy() -> None:
    async with harness() as h:
        await h.open(0)
        blocked = await h.blocked_by(rows_frame(0, 0))
        turned: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(turned.set_result, None)
        await turned  # the loop turns although decode has not returned
        assert h.results.empty()
        blocked.release()
        await h.result()


async def test_results_come_in_the_order_of_their_steps() -> None:
    async with harness() as h:
        await h.open(0)
        for position in range(50):
            h.runner.push([rows_frame(0, position)])
        positions = [(await h.result()).consumed[0].position for _ in range(50)]
        assert positions == list(range(50))


async def test_unsent_results_stop_the_stepping() -> None:
    async with harness() as h:
        await h.open(0)
        h.runner.push([rows_frame(0, position) for position in range(10)])
        async with asyncio.timeout(20):
            for _ in range(OUTBOX_STEPS_MAX):
                await h.results.get()
        # `call` runs between two steps, so when it returns the thread has looked at the queue again and taken nothing.
        await h.runner.call(lambda: None)
        await h.runner.call(lambda: None)
        assert len(h.engine.steps) == OUTBOX_STEPS_MAX
        assert h.runner.snapshot.queued_rows == 10 - OUTBOX_STEPS_MAX
        h.runner.sent()
        async with asyncio.timeout(20):
            await h.results.get()
        await h.runner.call(lambda: None)
        assert len(h.engine.steps) == OUTBOX_STEPS_MAX + 1


async def test_a_close_drops_waiting_rows_and_marks_the_session_at_once() -> None:
    async with harness() as h:
        await h.open(0, 1)
        blocked = await h.blocked_by(rows_frame(0, 0), rows_frame(1, 0))
        waiting = [rows_frame(1, 1, 2), rows_frame(1, 3)]
        h.runner.push(waiting)
        assert h.runner.push([control(1, Flag.CLOSE)]) == waiting
        assert h.executor.sessions.cancelled == {(ROUTE, 1)}
        blocked.release()
        await h.result()
        await h.result()
        assert (h.executor.sessions.cancelled, len(h.executor.lanes)) == (set(), 1)


async def test_dropping_a_route_returns_its_waiting_frames() -> None:
    async with harness() as h:
        await h.open(0)
        blocked = await h.blocked_by(rows_frame(0, 0))
        waiting = [rows_frame(0, 1)]
        h.runner.push(waiting)
        assert h.runner.drop_route(ROUTE) == waiting
        blocked.release()
        await h.result()
        assert h.runner.snapshot.queued_rows == 0


async def test_call_runs_in_the_decode_thread_and_passes_errors_on() -> None:
    async with harness() as h:
        assert await h.runner.call(lambda: threading.current_thread().name) == "decode"
        with pytest.raises(ZeroDivisionError):
            await h.runner.call(lambda: 1 // 0)
        assert await h.runner.call(lambda: "still there") == "still there"


async def test_a_caller_that_gave_up_disturbs_nobody() -> None:
    async with harness() as h:
        await h.open(0)
        blocked = await h.blocked_by(rows_frame(0, 0))
        call = asyncio.create_task(h.runner.call(lambda: "late"))
        await asyncio.sleep(0)
        call.cancel()
        blocked.release()
        await h.result()
        assert await h.runner.call(lambda: "next") == "next"


async def test_stop_ends_a_thread_that_has_work_waiting() -> None:
    async with harness() as h:
        await h.open(0)
        blocked = await h.blocked_by(*(rows_frame(0, position) for position in range(8)))
        call = asyncio.create_task(h.runner.call(lambda: None))
        await asyncio.sleep(0)
        stop = asyncio.create_task(h.runner.stop())
        await asyncio.sleep(0)
        blocked.release()
        async with asyncio.timeout(20):
            await stop
            with pytest.raises(InternalError, match="stopped"):
                await call
        assert len(h.engine.steps) == 1
        with pytest.raises(InternalError, match="stopped"):
            await h.runner.call(lambda: None)


async def test_a_stopped_runner_closes_its_pipe_and_whoever_rings_then_disturbs_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[int] = []
    close = os.close
    monkeypatch.setattr("relayline.stage.steps.runner.os.close", lambda end: (closed.append(end), close(end)))
    async with harness() as h:
        await h.open(0)
        ends = {h.runner._bell._reads, h.runner._bell._writes}
        await h.runner.stop()
        assert ends <= set(closed)
        h.runner.push([rows_frame(0, 0)])
        h.runner.sent()
        await h.runner.stop()


def test_every_ring_wakes_the_sleeper_and_none_is_left_over() -> None:
    bell, n_rounds = _Bell(), 500
    waiting, seen = threading.Semaphore(0), []
    value = 0

    def sleeper() -> None:
        with bell.lock:
            for _ in range(n_rounds):
                before = value
                waiting.release()
                while value == before:
                    bell.wait()
                seen.append(value)

    thread = threading.Thread(target=sleeper, daemon=True)
    thread.start()
    for _ in range(n_rounds):
        assert waiting.acquire(timeout=20)
        with bell:
            value += 1
        bell.ring()  # once more than needed: a sleeper may wake for nothing, but never misses its event
    thread.join(20)
    assert not thread.is_alive()
    assert seen == list(range(1, n_rounds + 1))
    bell.close()


async def test_stop_ends_a_thread_whose_outbox_is_full() -> None:
    async with harness() as h:
        await h.open(0)
        h.runner.push([rows_frame(0, position) for position in range(OUTBOX_STEPS_MAX + 1)])
        async with asyncio.timeout(20):
            for _ in range(OUTBOX_STEPS_MAX):
                await h.results.get()
            await h.runner.stop()
        assert h.runner.snapshot.queued_rows == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # this should end the thread
async def test_a_bug_in_a_step_is_a_crash_that_somebody_hears_of() -> None:
    async with harness() as h:
        await h.open(0)
        blocked = await h.blocked_by(rows_frame(0, 0))
        call = asyncio.create_task(h.runner.call(lambda: None))
        await asyncio.sleep(0)
        h.engine.fail_next = ZeroDivisionError("a bug")
        blocked.release()
        async with asyncio.timeout(20):
            assert isinstance(await h.crash, ZeroDivisionError)
            with pytest.raises(InternalError, match="stopped"):
                await call
        with pytest.raises(InternalError, match="stopped"):
            await h.runner.call(lambda: None)


async def test_a_step_is_accounted_for_after_the_work_that_its_delivery_starts() -> None:
    async with harness() as h:
        loop, order = asyncio.get_running_loop(), list[str]()
        accounted = asyncio.Event()

        def deliver(result: StepResult) -> None:
            order.append("delivered")
            loop.call_soon(order.append, "sent")

        def account(result: StepResult) -> None:
            order.append("accounted")
            accounted.set()

        h.runner._deliver, h.runner._account = deliver, account
        h.executor.learn = lambda result: order.append("learned")  # type: ignore[method-assign]
        h.runner.push([control(0, Flag.OPEN)])
        async with asyncio.timeout(20):
            await accounted.wait()
        assert order == ["delivered", "sent", "learned", "accounted"], "predictions are part of the account"


async def test_a_thread_that_went_to_sleep_is_woken_by_every_kind_of_work() -> None:
    async with harness() as h:
        for session_id in range(100):  # each finds the thread asleep, about to sleep or awake, as it happens
            await h.open(session_id % 60)
            assert await h.runner.call(lambda: 7) == 7
            assert await h.runner.call(lambda: 8) == 8


@pytest.mark.parametrize("part", ["_deliver", "_account"])
async def test_a_bug_in_carrying_results_away_is_one_too(part: str) -> None:
    async with harness() as h:
        await h.open(0)
        setattr(h.runner, part, lambda result: 1 // 0)
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # it is to be reported, not shown
        h.runner.push([rows_frame(0, 0)])
        async with asyncio.timeout(20):
            assert isinstance(await h.crash, ZeroDivisionError)
