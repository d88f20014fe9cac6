"""A whole pipeline on this machine: split if needed, start stages and coordinator, watch them, end them in order."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from relayline.coordinator.engine.roster import default_names
from relayline.coordinator.model.pipeline_file import PipelineFile, load_pipeline
from relayline.deploy.launch.backoff import RestartHistory, RestartPolicy
from relayline.deploy.launch.child import Child, child_environment
from relayline.deploy.machine.cores import Cores, shares, write_cores
from relayline.wire.common import bounds
from relayline.wire.common.errors import StartError
from relayline.wire.links import role_tokens
from relayline.wire.links.roles import Identity, Role
from relayline.wire.links.security import TOKEN_VARIABLE, address_of
from relayline.wire.settings.setting import argument
from relayline.wire.settings.table import EngineSettings

log = logging.getLogger("relayline.up")

# A stage that lived for so long after it was ready starts with a clean record; one that keeps dying ends the whole.
RESTARTS = RestartPolicy(max_s=2.5, healthy_s=12.0)
EXIT_USAGE = 2  # a stage that was told something impossible says the same next time
STAGE_STOP_TIMEOUT_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class LocalConfig:
    """What `relayline up` starts."""

    pipeline_dir: Path
    """A finished split."""
    http: tuple[str, int]
    """Host and port of the API; port 0 lets the system choose."""
    n_threads: int = 0
    """Threads per stage; 0 divides this process's cores among the stages."""
    stage_arguments: tuple[str, ...] = ()
    """Passed on to every `relayline stage`."""
    serve_arguments: tuple[str, ...] = ()
    """Passed on to `relayline serve`."""
    pin: bool = True
    """Whether each stage keeps to its share of the cores, where they are as many as all threads."""
    policy: RestartPolicy = dataclasses.field(default_factory=RestartPolicy)
    """When a coordinator that died is started again."""


def threads_per_stage(n_stages: int) -> int:
    """Return this process's cores divided by the stages on it: two stages that spin on all cores ruin each other."""
    return max(1, len(os.sched_getaffinity(0)) // n_stages)


def print_prefixed(name: str, text: str) -> None:
    """Show a child's line on stderr."""
    print(f"[{name}] {text}", file=sys.stderr, flush=True)


def stage_child(
    index: int,
    artifact: Path,
    arguments: Sequence[str],
    on_line: Callable[[str, str], None],
    *,
    n_threads: int,
    listen: str = "127.0.0.1:0",
    cores: Cores = (),
    root: str = "",
) -> Child:
    """Return one stage of this machine as a child that has not been started; `arguments` are passed on.

    `cores`: those that it keeps to; none: it may run on any. `root`: the coordinator's join token, from which the
    stage gets its own; empty: it takes work from everyone on this machine.
    """
    token = role_tokens.token_for(root, local_identity(index), 0) if root else ""
    kept = ("--cores", write_cores(cores)) if cores else ()
    return Child(
        f"stage-{index}",
        ("stage", "--artifact", str(artifact), "--listen", listen, *argument(EngineSettings, "n_threads", n_threads),
         *kept, "--json", "--exit-with-stdin", *arguments),
        on_line,
        environment=child_environment(token),
    )  # fmt: skip


def given_root() -> str:
    """Return the coordinator's join token that RELAYLINE_TOKEN holds, for who wants to ask the stages; else nothing."""
    text = os.environ.get(TOKEN_VARIABLE, "")
    token = role_tokens.read(text)
    return text if token is not None and token.role is Role.COORDINATOR else ""


def local_identity(index: int) -> Identity:
    """Return how the coordinator of given addresses knows a stage of this machine."""
    return Identity(Role.STAGE, "localhost", default_names(index + 1)[index])


class LocalPipeline:
    """Running children of one `up`. Use `running`, which also ends them."""

    def __init__(self, config: LocalConfig, on_line: Callable[[str, str], None]) -> None:
        self.config = config
        self.file: PipelineFile = load_pipeline(config.pipeline_dir)
        self.stages: list[Child] = []
        self.coordinator: Child | None = None
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_line = on_line
        self.root = given_root() or role_tokens.new_root()
        """The coordinator's join token. Without one every user of this machine could give the stages work."""
        self._cores: list[Cores] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()

    async def start(self) -> dict[str, Any]:
        """Start everything; returns the coordinator's ready event. Raises StartError."""
        n_stages = len(self.file.stages)
        n_threads = self.config.n_threads or threads_per_stage(n_stages)
        self._cores = (shares([n_threads] * n_stages) if self.config.pin else None) or [()] * n_stages
        self.stages = [self._stage(index, n_threads, "127.0.0.1:0") for index in range(n_stages)]
        fields = {
            "stages": n_stages,
            "threads": n_threads,
            "cores": " ".join(write_cores(cores) or "any" for cores in self._cores),
        }
        log.info("loading %s", self.file.model_name, extra={"fields": fields})
        await asyncio.gather(*(stage.start() for stage in self.stages))
        addresses = await asyncio.gather(*map(self._address, self.stages))
        self.coordinator = Child(
            "coordinator",
            self._serve_arguments(addresses, self.config.http),
            self._on_line,
            environment=child_environment(self.root),
        )
        await self.coordinator.start()
        ready = await self.coordinator.ready
        for index, address in enumerate(addresses):
            # A restarted stage comes back where its neighbours look for it.
            self.stages[index].arguments = self._stage(index, n_threads, address).arguments
            self._watch(self.stages[index].name, self._keep_alive(self.stages[index]))
        # It comes back where clients look for it.
        http = (self.config.http[0], int(ready["url"].rpartition(":")[2]))
        self.coordinator.arguments = self._serve_arguments(addresses, http)
        self._watch(self.coordinator.name, self._keep_coordinator(self.coordinator))
        return ready

    def _serve_arguments(self, addresses: Sequence[str], http: tuple[str, int]) -> tuple[str, ...]:
        return ("serve", "--pipeline", str(self.config.pipeline_dir), "--stages", ",".join(addresses),
                "--http", address_of(*http), "--json", "--exit-with-stdin",
                *self.config.serve_arguments)  # fmt: skip

    async def _address(self, stage: Child) -> str:
        event = await stage.ready
        first, end = event["layers"]
        fields = {"layers": f"{first}-{end - 1}", "address": event["address"]}
        log.info("%s ready", stage.name, extra={"fields": fields})
        return str(event["address"])

    def _stage(self, index: int, n_threads: int, listen: str) -> Child:
        artifact = self.config.pipeline_dir / self.file.stages[index].file
        arguments = self.config.stage_arguments
        cores = self._cores[index]
        return stage_child(
            index, artifact, arguments, self._on_line,
            n_threads=n_threads, listen=listen, cores=cores, root=self.root,
        )  # fmt: skip

    def _watch(self, name: str, watching: Coroutine[Any, Any, None]) -> None:
        watcher = asyncio.create_task(watching)
        watcher.add_done_callback(functools.partial(self._on_watcher_end, name))
        self._watchers.append(watcher)

    def _on_watcher_end(self, name: str, watcher: asyncio.Task[None]) -> None:
        """End the whole where a child is watched no more: it would not come back, and nobody would be told."""
        error = None if watcher.cancelled() else watcher.exception()
        if error is not None:
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            self._fail(f"{name} cannot be started again: {why}")

    async def _keep_alive(self, stage: Child) -> None:
        """Start a stage that died again, until it dies again and again. It is ready when this begins."""
        history, ready_s = RestartHistory(RESTARTS), time.monotonic()
        while True:
            await stage.exited.wait()
            if self._stopping.is_set():
                return
            ready_for_s = time.monotonic() - ready_s if ready_s else 0.0
            delay_s = history.died(ready_for_s, stage.exit_code)
            cause = stage.cause_of_death()
            if delay_s is None or stage.exit_code == EXIT_USAGE:
                self._fail(f"{cause}; it died {history.n_deaths} times in a row" if history.n_deaths > 1 else cause)
                return
            log.warning("%s; starting it again", cause)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()
            if self._stopping.is_set():
                return
            await stage.start()
            ready_s = await self._ready_s(stage)

    async def _ready_s(self, stage: Child) -> float:
        """Wait until a stage is ready; returns when that was, 0 if it died before."""
        with contextlib.suppress(StartError):
            await asyncio.shield(stage.ready)
            return time.monotonic()
        return 0.0

    async def _keep_coordinator(self, coordinator: Child) -> None:
        """Start a coordinator that has died again, as under a manifest: its stages still hold what they hold."""
        history, ready_at_s = RestartHistory(self.config.policy), time.monotonic()
        while True:
            await coordinator.exited.wait()
            if self._stopping.is_set():
                return
            cause = coordinator.cause_of_death()
            delay_s = history.died(time.monotonic() - ready_at_s, coordinator.exit_code)
            if delay_s is None:
                self._fail(history.given_up(cause))
                return
            log.warning("%s; starting it again in %.1f s", cause, delay_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()
            if self._stopping.is_set():
                return
            await coordinator.start()
            with contextlib.suppress(StartError):  # it has died again, which the next turn sees
                await asyncio.shield(coordinator.ready)
                log.warning("%s serves again", coordinator.name)
            ready_at_s = time.monotonic()

    def _fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_exception(StartError(reason))

    async def stop(self) -> None:
        """Drain the coordinator, then end the stages; no process is left behind."""
        self._stopping.set()
        if self.coordinator is not None:
            await self.coordinator.stop(bounds.DRAIN_TIMEOUT_S + STAGE_STOP_TIMEOUT_S)
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await asyncio.gather(*(stage.stop(STAGE_STOP_TIMEOUT_S) for stage in self.stages))
        if self.failed.done():
            self.failed.exception()


@contextlib.asynccontextmanager
async def running(
    config: LocalConfig, on_line: Callable[[str, str], None] = print_prefixed
) -> AsyncIterator[tuple[LocalPipeline, dict[str, Any]]]:
    """Run a pipeline on this machine; yields it and the ready event. Raises StartError."""
    pipeline = LocalPipeline(config, on_line)
    try:
        yield pipeline, await pipeline.start()
    finally:
        await pipeline.stop()


def forwarded(pairs: Sequence[tuple[str, object]]) -> tuple[str, ...]:
    """Return flags with their values as command-line arguments."""
    return tuple(part for flag, value in pairs for part in (flag, str(value)))
