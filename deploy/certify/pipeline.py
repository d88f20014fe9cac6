"""The split side of `certify`: real stage processes, the real wire, and the coordinator's pipeline in this process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from relayline.coordinator.engine.pipeline import Pipeline, PipelineConfig
from relayline.coordinator.model.pipeline_file import load_pipeline
from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.deploy.certify.workload import N_LANES, PREFILL_CHUNK_ROWS, Run, Script
from relayline.deploy.launch.child import Child
from relayline.deploy.launch.local import STAGE_STOP_TIMEOUT_S, stage_child
from relayline.wire.common.errors import ProtocolError, StageLostError
from relayline.wire.common.tasks import cancel_all
from relayline.wire.links import role_tokens
from relayline.wire.links.security import LinkSecurity

ASKED_MAX = 15  # for the status of stages, which takes two seconds at most
PIPELINE_END_TIMEOUT_S = 2.0  # of the last closes, which a dead stage never takes

OnLine = Callable[[str, str], None]
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, slots=True)
class SplitConfig:
    """One pipeline to be run."""

    directory: Path
    """A finished split."""
    wire_dtype: int
    """Of activations between stages (wire.envelopes.dtypes.DTYPE_*)."""
    n_threads: int
    """Per stage."""
    stage_arguments: tuple[str, ...]
    """Passed on to every `relayline stage`."""


@dataclasses.dataclass(frozen=True, slots=True)
class SplitRuns:
    """A pipeline's results."""

    runs: tuple[Run, ...]
    """In the order of the batches' scripts."""
    sessions_per_step_max: int
    """Most sessions that one native step held, at the stage where that is least."""


async def run_split(
    config: SplitConfig,
    batches: Sequence[Sequence[Script]],
    n_tokens: int,
    on_line: OnLine,
    on_token: Callable[[], None] = lambda: None,
) -> SplitRuns:
    """Start the stages, run the batches one after another (a batch's scripts together), end the stages.

    Raises StartError if a stage does not start, StageLostError if one dies later (with its own last message), and the
    errors of sessions. No process is left behind in any case.
    """
    root = role_tokens.new_root()
    async with _stages(config, on_line, root) as stages:
        watch = asyncio.create_task(_first_death(stages))
        try:
            return await _unless(watch, _drive(config, stages, root, batches, n_tokens, on_token))
        finally:
            await _end(watch)


@contextlib.asynccontextmanager
async def _stages(config: SplitConfig, on_line: OnLine, root: str) -> AsyncIterator[list[Child]]:
    file = load_pipeline(config.directory)
    stages = [
        stage_child(
            index,
            config.directory / stage.file,
            config.stage_arguments,
            on_line,
            n_threads=config.n_threads,
            root=root,
        )
        for index, stage in enumerate(file.stages)
    ]
    try:
        await asyncio.gather(*(stage.start() for stage in stages))
        await asyncio.gather(*(stage.ready for stage in stages))
        yield stages
    finally:
        await asyncio.gather(*(stage.stop(STAGE_STOP_TIMEOUT_S) for stage in stages))


async def _first_death(stages: Sequence[Child]) -> None:
    exits = {asyncio.create_task(stage.exited.wait()): stage for stage in stages}
    try:
        done, _ = await asyncio.wait(exits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in exits:
            each.cancel()
    raise StageLostError(exits[done.pop()].cause_of_death())


async def _drive(
    config: SplitConfig,
    stages: Sequence[Child],
    root: str,
    batches: Sequence[Sequence[Script]],
    n_tokens: int,
    on_token: Callable[[], None],
) -> SplitRuns:
    file = load_pipeline(config.directory)
    pipeline_config = PipelineConfig(
        addresses=tuple([stage.ready.result()["address"] for stage in stages]),
        wire_dtype=config.wire_dtype,
        security=LinkSecurity(token=root),
        # One decode flight for all: sessions that run at once meet in it, however late one of them comes.
        schedule=ScheduleConfig("fixed", n_groups=1, group_rows=N_LANES, chunk_rows=PREFILL_CHUNK_ROWS, draft=0),
    )
    pipeline = Pipeline(pipeline_config, file, lambda _: False)
    stopping = asyncio.Event()
    serving = asyncio.create_task(pipeline.run(stopping))
    try:
        await _unless(serving, pipeline.ready.wait())
        runs: list[Run] = []
        for batch in batches:
            running = (_run_script(pipeline, script, n_tokens, file.n_vocab, on_token) for script in batch)
            runs += await _unless(serving, _all(running))
        return SplitRuns(tuple(runs), await _sessions_per_step_max(pipeline))
    finally:
        stopping.set()
        await asyncio.wait({serving}, timeout=PIPELINE_END_TIMEOUT_S)
        await _end(serving)


async def _run_script(
    pipeline: Pipeline, script: Script, n_tokens: int, n_vocab: int, on_token: Callable[[], None]
) -> Run:
    request = GenerationRequest(
        request_id=script.label,
        prompt_tokens=script.prompt,
        max_tokens=n_tokens,
        sampling=SamplingParams(temperature=script.temperature, seed=script.seed),
        ignore_eos=True,
        wants_logits=True,
    )
    tokens: list[int] = []
    logits = np.empty((n_tokens, n_vocab), np.float32)
    stream = pipeline.open(request)
    try:
        async for event in stream:
            if len(event.logits) != 4 * n_vocab:
                raise ProtocolError(f"{len(event.logits)} bytes of logits do not fit a vocabulary of {n_vocab}")
            logits[len(tokens)] = np.frombuffer(event.logits, "<f4")
            tokens.append(event.token)
            on_token()
    finally:
        await stream.aclose()
    return Run(script, tuple(tokens), logits)


async def _sessions_per_step_max(pipeline: Pipeline) -> int:
    """Ask again for a stage that was too busy to answer; 0 if it never does."""
    for _ in range(ASKED_MAX):
        described: dict[str, Any] = await pipeline.describe()
        counts = [stage.get("steps_by_sessions", {}) for stage in described["stages"]]
        if all(counts):
            return min(max(map(int, sizes)) for sizes in counts)
    return 0


async def _all(works: Any) -> list[Run]:
    """Run together; the first error ends the others and is raised unchanged."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_all(tasks)


async def _unless(watch: asyncio.Task[None], work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`; if `watch` ends before it, with an error, cancel the work and raise that error instead."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({watch, task}, return_when=asyncio.FIRST_COMPLETED)
        if watch.done() and watch.exception() is not None:
            raise watch.exception() or AssertionError
        return await task
    finally:
        await _end(task)


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
