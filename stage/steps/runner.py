"""The decode thread: takes steps from the batcher, runs them, hands results to the event loop.

Theory of operation. One thread owns the native engine for its whole life. It shares the batcher with the event loop
under one lock. The loop pushes frames, and wakes the thread if it sleeps. The thread takes the next step the moment the
last one is done, without a round trip through the loop. So frames that arrive during a native step form the next batch,
and the event loop never waits for a decode.

The thread sleeps on a pipe (`_Bell`). Its writers do not hold the lock, and release the GIL while the system call wakes
the sleeper. A thread woken while the waker holds the lock and the GIL goes back to sleep for each of them. On a shared
core, as stages of one machine have it, that is three switches back and forth before it starts to work.

Other threads see the engine and the queue by `Runner.snapshot` alone. It is one value, made under the lock before and
after each step, after each call, and whenever frames are queued or dropped.

`OUTBOX_STEPS_MAX` bounds the results that the loop has not yet carried away. When the downstream link has no credit,
the thread stops taking steps and the queue holds its frames. Upstream then runs out of credit in turn.
"""

from __future__ import annotations

import asyncio
import collections
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from relayline.stage.queue_types import QueuedFrame, Step
from relayline.stage.sampling.grammars import STACK_BYTES
from relayline.stage.steps.batcher import Batcher
from relayline.stage.steps.run_ahead import RunAhead
from relayline.stage.steps.step import StepExecutor
from relayline.stage.steps.step_types import Snapshot, StepResult
from relayline.wire.common.errors import InternalError
from relayline.wire.envelopes.frames import Flag

OUTBOX_STEPS_MAX = 4  # steps computed but not yet sent; enough to hide the send behind the next decode


class Runner:
    """Owns the decode thread.

    `deliver` is called on the event loop with each step's result, in order. `account` is called with the same results,
    each after its `deliver` and the work that this starts. It is for work that the next stage need not wait for.
    """

    def __init__(
        self,
        batcher: Batcher,
        executor: StepExecutor,
        deliver: Callable[[StepResult], None],
        on_crash: Callable[[BaseException], None],
        account: Callable[[StepResult], None] = lambda result: None,
        ahead_rows: int = 0,
    ) -> None:
        """`ahead_rows`: rows of a step with rows that are computed ahead; 0: none are."""
        self._batcher, self._executor = batcher, executor
        self._ahead = RunAhead(executor, ahead_rows)
        self._copies = executor.sessions.states.copies
        self._deliver, self._account, self._on_crash = deliver, account, on_crash
        self._loop = asyncio.get_running_loop()
        self._bell = _Bell()
        self._calls: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        self._outbox_steps = 0
        # Steps of which a result may not have been sent yet.
        self._latest: collections.deque[Step] = collections.deque(maxlen=OUTBOX_STEPS_MAX)
        self._stopping = False
        self.snapshot = Snapshot(executor.lanes.n_lanes)  # written under the lock, read by anyone
        before_bytes = threading.stack_size(STACK_BYTES)
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()
        threading.stack_size(before_bytes)

    def push(self, frames: list[QueuedFrame]) -> list[QueuedFrame]:
        """Queue frames in order and wake the thread. Returns waiting frames that a close made pointless."""
        with self._bell:
            for frame in frames:
                if frame.flags & Flag.CLOSE:
                    self._executor.sessions.cancelled.add(frame.session_key)
            dropped = self._batcher.push_together(frames)
            self._publish_queue()
            return dropped

    def drop_route(self, route_id: int) -> list[QueuedFrame]:
        """Forget the waiting frames of a route."""
        with self._bell.lock:
            dropped = self._batcher.drop_route(route_id)
            self._publish_queue()
            return dropped

    def session_ids(self, route_id: int) -> set[int]:
        """Return the sessions of a route of which anything waits, runs, or may not have left the process yet."""
        with self._bell.lock:
            found = self._batcher.session_ids(route_id)
            steps = list(self._latest)
        taken = [frame.session_key for step in steps for frame in (*step.controls, *step.frames)]
        return found | {session_id for route, session_id in taken if route == route_id}

    def sent(self) -> None:
        """Say that one step's result has left the process (or never will)."""
        with self._bell.lock:
            self._outbox_steps -= 1
            if not self._outbox_steps:
                self._latest.clear()  # here, and not on the way of the next step, which also finds the memory in caches
            matters = self._outbox_steps == OUTBOX_STEPS_MAX - 1  # the thread waits for nothing else that this changes
        if matters:
            self._bell.ring()

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run a function in the decode thread between two steps and return its result."""
        future: asyncio.Future[Any] = self._loop.create_future()
        with self._bell:
            if self._stopping:
                raise InternalError("the decode thread has stopped")
            self._calls.append((function, future))
        return await future

    async def stop(self, timeout_s: float | None = None) -> None:
        """Let the current step end, then end the thread. After `timeout_s` a step that hangs is left behind."""
        with self._bell:
            self._stopping = True
        await asyncio.to_thread(self._thread.join, timeout_s)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # a bug of ours: the process must not linger without its engine
            self._loop.call_soon_threadsafe(self._on_crash, error)
            raise
        finally:
            self._refuse_calls()
            self._bell.close()

    def _refuse_calls(self) -> None:
        """Answer every waiting `call`; none may wait for a thread that has ended."""
        with self._bell.lock:
            self._stopping = True
            calls, self._calls = self._calls, []
        for _, future in calls:
            self._loop.call_soon_threadsafe(_settle, future, None, InternalError("the decode thread has stopped"))

    def _turn(self) -> bool:
        """Wait for work and do one piece of it; False once stopping."""
        step = None
        with self._bell.lock:
            while True:
                if self._stopping:
                    return False
                calls, self._calls = self._calls, []
                if calls:
                    break
                if self._outbox_steps < OUTBOX_STEPS_MAX:
                    step = self._batcher.take(time.monotonic_ns())
                    if step is not None:
                        self._outbox_steps += 1
                        self._latest.append(step)
                        self._publish(step)
                        break
                    if self._ahead.is_due or self._copies:
                        break
                elif self._copies:
                    break
                self._bell.wait()
        if calls:
            self._ahead.settle()
            for function, future in calls:
                self._answer(function, future)
        elif step is not None:
            began_ns = time.monotonic_ns()
            self._work(step)
            if self._copies:
                self._copy_lanes(time.monotonic_ns() - began_ns)
        elif self._ahead.is_due:
            self._work_ahead()
        else:
            self._copy_lanes()
        return True

    def _copy_lanes(self, step_ns: int = 0) -> None:
        """Copy lanes for a moment, between two steps. step_ns: what the one before took."""
        if self._copies.fills_next:
            self._ahead.settle()
        self._copies.work(time.monotonic_ns, step_ns)

    def _work(self, step: Step) -> None:
        """Carry out a step, and hand each of its parts over as soon as it is done."""
        parts = self._ahead.parts(step)
        with self._bell.lock:
            self._outbox_steps += len(parts) - 1  # before any is sent: what still runs may not be forgotten
        for part in parts:
            result = self._ahead.execute(part)
            with self._bell.lock:
                self._publish(None if part is parts[-1] else parts[-1])
            self._loop.call_soon_threadsafe(self._hand_over, result)
            self._executor.sessions.predicting.catch_up()

    def _work_ahead(self) -> None:
        """Compute rows that were not asked for yet, while nothing waits."""
        step = self._ahead.next_step(time.monotonic_ns())
        if step is None:
            return
        with self._bell.lock:
            self._publish(step)
        self._ahead.compute(step)
        with self._bell.lock:
            self._publish(None)

    def _publish(self, running: Step | None) -> None:
        """Publish the state of the engine and the queue. In the decode thread, under the lock."""
        usage, batcher = self._executor.usage, self._batcher
        self.snapshot = Snapshot(
            self._executor.lanes.n_lanes, usage.n_used, usage.n_kept, len(batcher), batcher.queued_rows, running
        )

    def _publish_queue(self) -> None:
        """Publish the queue's state, with the engine's last published one. In any thread, under the lock."""
        last, batcher = self.snapshot, self._batcher
        self.snapshot = Snapshot(
            last.lanes_total, last.lanes_used, last.lanes_kept, len(batcher), batcher.queued_rows, last.running
        )

    def _hand_over(self, result: StepResult) -> None:
        self._guarded(self._deliver, result)
        self._loop.call_soon(self._guarded, self._settle, result)

    def _settle(self, result: StepResult) -> None:
        self._executor.learn(result)
        self._account(result)

    def _guarded(self, carry: Callable[[StepResult], None], result: StepResult) -> None:
        try:
            carry(result)
        except Exception as error:  # a bug of ours too: steps with uncollected results would stop the thread
            self._on_crash(error)
            raise

    def _answer(self, function: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        result, failed = None, None
        try:
            result = function()
        except Exception as error:
            failed = error
        with self._bell.lock:
            self._publish(None)
        self._loop.call_soon_threadsafe(_settle, future, result, failed)


class _Bell:
    """Lets one thread sleep and others wake it.

    `with bell:` changes the sleeper's condition under the lock, and rings once the lock is free again.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._asleep = False  # under the lock; a thread that resets it owes the sleeper one byte
        self._reads, self._writes = os.pipe()

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        wakes, self._asleep = self._asleep, False
        self.lock.release()
        if wakes:
            os.write(self._writes, b"\0")

    def ring(self) -> None:
        """Wake the sleeper, if it sleeps; the caller does not hold the lock."""
        with self:
            pass

    def wait(self) -> None:
        """Give the lock up until the bell is rung, then hold it again. Every ring after `wait` began wakes."""
        self._asleep = True
        self.lock.release()
        try:
            os.read(self._reads, 1)
        finally:
            self.lock.acquire()

    def close(self) -> None:
        """Give the pipe back; for the thread that slept on it, at its end: only a sleeper gets rings."""
        os.close(self._reads)
        os.close(self._writes)


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
