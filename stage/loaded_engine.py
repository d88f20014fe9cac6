"""One loaded engine with all that serves it: its calls, its decode thread, and what watches its steps."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from relayline.stage.config import StageConfig
from relayline.stage.engine.artifact import StageArtifact
from relayline.stage.engine.loading import Load
from relayline.stage.facts import StageFacts
from relayline.stage.hand_over import Engine
from relayline.stage.observe.stats import StageStats
from relayline.stage.service import StageService
from relayline.stage.speed.curves import Curves
from relayline.stage.steps.batcher import Batcher
from relayline.stage.steps.policy import Policy
from relayline.stage.steps.runner import Runner
from relayline.stage.steps.step import StepExecutor
from relayline.stage.steps.watchdog import StepWatch, watch_steps
from relayline.wire.common.process import first_of
from relayline.wire.links.guard import Guard
from relayline.wire.telemetry.telemetry import Telemetry

SHUTDOWN_GRACE_S = 2.0  # calls still running when an engine ends

LoadStage = Callable[[StageConfig, Load, "Curves | None"], "tuple[StageFacts, StepExecutor]"]
"""Loads a stage, with the curves that it is to have or, with None, measured ones; blocks."""


async def load_engine(
    load_stage: LoadStage, config: StageConfig, load: Load, curves: Curves | None
) -> tuple[StageFacts, StepExecutor]:
    """Load a stage in a thread, so that others, such as a membership's heartbeats, go on meanwhile.

    Raises the errors of loading. A load that is cancelled is stopped, and what it loaded all the same is closed, in a
    thread too: freeing gigabytes takes a while.
    """
    made: list[tuple[StageFacts, StepExecutor]] = []
    failed: list[BaseException] = []
    unwanted = threading.Event()

    def work() -> None:  # asyncio's thread would hold what it returns or raises for a moment longer than the caller
        try:
            made.append(load_stage(config, load, curves))
        except BaseException as error:
            failed.append(error)
        if unwanted.is_set():
            _close_all(made)

    loading = asyncio.create_task(asyncio.to_thread(work))
    try:
        await asyncio.shield(loading)
    except asyncio.CancelledError:
        load.stop()
        unwanted.set()
        if made:  # it had just ended, so `work` may have seen no need to close it
            asyncio.get_running_loop().run_in_executor(None, _close_all, made)
        raise
    if failed:
        raise failed.pop()
    return made.pop()


async def close_unused(facts: StageFacts, executor: StepExecutor) -> None:
    """Close a loaded stage that nothing has used, in a thread."""
    await asyncio.to_thread(_close_all, [(facts, executor)])


def _close_all(made: list[tuple[StageFacts, StepExecutor]]) -> None:
    """Take stages from a list and close them. Threads that call it together close each one once."""
    while True:
        try:
            _, executor = made.pop()
        except IndexError:
            return
        executor.close()


class LoadedEngine:
    """An engine that serves, or is to serve next. Event loop only."""

    def __init__(
        self,
        facts: StageFacts,
        executor: StepExecutor,
        policy: Policy,
        stats: StageStats,
        telemetry: Telemetry,
        crash: Callable[[BaseException], None],
    ) -> None:
        self.facts, self._executor, self._crash = facts, executor, crash
        self.service = StageService(facts, executor, stats, telemetry)
        outbound = self.service.outbound
        batcher, ahead_rows = Batcher(policy), facts.ahead_rows
        self._runner = Runner(batcher, executor, outbound.deliver, crash, outbound.account, ahead_rows)
        self._tasks: list[asyncio.Task[None]] = []  # what sends, then what watches

    @property
    def engine(self) -> Engine:
        """The engine, as far as it gives or takes lanes."""
        return Engine(self._runner.call, self._executor.sessions.handing, self.facts.artifact.layer_start)

    def give_memory_back(self) -> None:
        """Free the memory of an automatic prefix cache."""
        self._executor.sessions.states.give_back()

    def begin(self, guard: Guard) -> None:
        """Be ready for calls."""
        self.service.attach(self._runner, guard)
        watch = StepWatch(self.facts.curves.predict_ns)
        for work in (
            self.service.outbound.send_forever(),
            watch_steps(lambda: self._runner.snapshot.running, watch, self._crash),
        ):
            task = asyncio.create_task(work)
            task.add_done_callback(self._task_ended)
            self._tasks.append(task)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crash(error)

    def rename(self, artifact: StageArtifact) -> None:
        """Be the same slice of another split."""
        self.facts = dataclasses.replace(self.facts, artifact=artifact)
        self.service.renamed(self.facts)

    async def end_calls(self, crashed: asyncio.Future[None]) -> None:
        """End every route. Once the stage has crashed, work for the decode thread is dropped."""
        await _unless(crashed, self.service.close)

    async def close(self, crashed: asyncio.Future[None]) -> None:
        """Give the engine's memory back. `end_calls` comes before."""
        for task in self._tasks[:1]:
            task.cancel()
        await _unless(crashed, lambda: self._runner.call(self._executor.close))
        for task in self._tasks[1:]:
            task.cancel()  # not before: a step that hangs while the stage stops must end too
        await self._runner.stop(SHUTDOWN_GRACE_S if crashed.done() else None)


async def _unless(crashed: asyncio.Future[None], work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do what needs the decode thread; give it up once the stage has crashed, since that may never answer."""
    if crashed.done():
        return
    task = asyncio.create_task(work())
    await first_of(task, crashed)
    if crashed.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(task, return_exceptions=True)
    else:
        await task
