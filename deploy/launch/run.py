"""`relayline up`: checks everything, starts everything, then watches until stopped."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from relayline.coordinator.model.gguf_file import headers_read_once
from relayline.deploy.launch.arrange import arrange
from relayline.deploy.launch.checks import check_before_work, check_security, warn_of_context, warn_of_unused_drafts
from relayline.deploy.launch.companions import check_companions
from relayline.deploy.launch.first_plan import keep_plan, plan_event, waits_for_hosts
from relayline.deploy.launch.launch_plan import LaunchPlan
from relayline.deploy.launch.leftovers import end_leftovers
from relayline.deploy.launch.log_files import LOG_BYTES_MAX, LOG_OLD_FILES, SUPERVISOR, RotatedFile
from relayline.deploy.launch.prepare import (
    Prepared,
    Split,
    find_model,
    planned_cuts,
    prepare,
    settled,
    with_credentials,
)
from relayline.deploy.launch.restarts import RestartPolicy
from relayline.deploy.launch.stage_checks import warn_of_shared_gpus
from relayline.deploy.launch.state import MORE_SIGNAL, StateDir, register
from relayline.deploy.launch.supervisor import Emit, Supervisor
from relayline.deploy.manifest import Manifest, is_local, load_manifest
from relayline.deploy.models.mend import Mend, later_mender, mender
from relayline.deploy.models.model_source import check_here
from relayline.deploy.models.splits import split_for
from relayline.wire.common.errors import RelaylineError, StartError
from relayline.wire.common.files import write_again
from relayline.wire.common.logs import PRINTED
from relayline.wire.common.process import first_of

log = logging.getLogger("relayline.up")


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """The request of one `relayline up`."""

    manifest: Manifest
    """Changed by flags already. Of a model without a manifest it is the smallest one."""
    source: Path
    """The path that the user named, absolute: the manifest's file, or the model's."""
    log_flags: tuple[str, ...] = ()
    """Passed on to every process."""
    split_dir: Path | None = None
    """Where to keep the split; None for the cache."""

    measure: bool | None = None
    """Whether hosts are surveyed before there is a plan: True, False, or None as is sensible."""
    is_again: bool = False
    """Whether this was checked just now, by the command that starts this one in the background."""

    @property
    def split(self) -> Split | None:
        """How the model is split, None as usual."""
        if self.split_dir is None:
            return None
        return lambda model, cuts: split_for(model, None if cuts else 1, cuts or None, self.split_dir)


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """Everything that a launch starts with."""

    manifest: Manifest
    """With every path in full and every choice made, but for layers that a survey is to decide."""
    prepared: Prepared | None
    """The split; None until there was a survey."""


@contextlib.contextmanager
def log_file(path: Path) -> Iterator[logging.Handler]:
    """Send this process's log to a rotated file as well; yields the file's handler."""
    root = logging.getLogger()
    handler = RotatedFile(path, maxBytes=LOG_BYTES_MAX, backupCount=LOG_OLD_FILES)
    if root.handlers:
        handler.setFormatter(root.handlers[0].formatter)
    root.addHandler(handler)
    try:
        yield handler
    finally:
        root.removeHandler(handler)
        handler.close()


def ready_to_start(to_start: Launch, directory: StateDir) -> Ready:
    """Check what a launch needs and prepare its files; nothing is started. Raises the first problem found.

    Where hosts have to be surveyed first, the model is not split yet.
    """
    manifest = to_start.manifest
    if manifest.model_path is not None:
        check_here(str(manifest.model_path))
    check_before_work(manifest)
    if not all(stage.is_local for stage in manifest.members) and is_local(manifest.spec.coordinator.host):
        log.warning("coordinator.host is %s, where stages on other hosts cannot reach it; set it in the manifest",
                    manifest.spec.coordinator.host)  # fmt: skip
    model = find_model(manifest)
    check_companions(manifest, model)
    warn_of_unused_drafts(manifest.engine, model)
    manifest = with_credentials(manifest, directory.tls)
    check_security(manifest)
    if waits_for_hosts(manifest, model, to_start.measure, is_again=to_start.is_again):
        found = Ready(settled(manifest, model, [stage.layer_range for stage in manifest.stages]), None)
    else:
        prepared = prepare(manifest, choose=planned_cuts, split=to_start.split)
        warn_of_context(manifest.engine.ctx_tokens, prepared.file)
        found = Ready(prepared.manifest, prepared)
    warn_of_shared_gpus(manifest)
    return found


def plan_of(to_start: Launch, directory: StateDir) -> tuple[LaunchPlan, Mend]:
    """Check and prepare a launch, and record every choice for the coordinator.

    Raises as `ready_to_start`. Returns also the function that repairs damaged files of the split.
    """
    ready = ready_to_start(to_start, directory)
    write_settled(ready.manifest, directory.manifest)
    for kept in (
        directory.layers,
        directory.more,
        directory.plan,
    ):  # of the last run: this one begins with its own settings
        kept.unlink(missing_ok=True)
    if ready.prepared is None:
        split_flags = ("--pipeline", str(to_start.split_dir.absolute())) if to_start.split_dir is not None else ()
        mend = later_mender(directory.manifest)
    else:
        pipeline_dir, file = ready.prepared.pipeline_dir, ready.prepared.file
        split_flags = ("--pipeline", str(pipeline_dir.absolute())) if to_start.split_dir is not None else ()
        model = find_model(ready.manifest)
        mend = mender(model, pipeline_dir, file)
        keep_plan(ready.manifest, model, directory.plan)
    fixed = tuple(stage.name for stage in to_start.manifest.stages if stage.layer_range is not None)
    plan = arrange(ready.manifest, to_start.source, directory.manifest, to_start.log_flags, split_flags, fixed)
    return plan, mend


def write_settled(manifest: Manifest, path: Path) -> None:
    """Write a settled manifest where the coordinator reads it. What a survey is to choose is not in it."""
    text = json.dumps(manifest.model_dump(mode="json", by_alias=True, exclude_unset=True), indent=2)
    write_again(path, text.encode() + b"\n")


def launch(
    to_start: Launch,
    directory: StateDir,
    emit: Emit,
    *,
    echo: Callable[[str, str], None] | None = None,
    policy: RestartPolicy | None = None,
) -> None:
    """Run a pipeline until SIGINT, SIGTERM or SIGHUP.

    Raises UsageError and StartError before anything is started, StartError when a process cannot be kept alive.
    """
    from relayline.wire.common.process import run

    with directory.locked(to_start.manifest.name), log_file(directory.log(SUPERVISOR)) as file:
        register(directory.path)
        before = directory.load()
        n_ended = end_leftovers(before)
        if n_ended or (before is not None and not before.phase.has_ended):
            log.warning("the last run did not end properly; %d of its processes were still running", n_ended)
        with headers_read_once():
            plan, mend = plan_of(to_start, directory)
        if (event := plan_event(to_start.manifest, directory.plan)) is not None:
            emit(event)

        async def main(stopping: asyncio.Event) -> None:
            supervisor = Supervisor(plan, directory, emit, policy=policy, echo=echo, mend=mend)
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(MORE_SIGNAL, _take_on, supervisor, to_start, directory)
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # a closed terminal; `nohup` ignores it
                loop.add_signal_handler(signal.SIGHUP, stopping.set)
            await supervise(supervisor, stopping, emit)

        try:
            run(main)
        except StartError as error:
            # To the file alone: the command itself says it on stderr.
            file.handle(log.makeRecord(log.name, logging.ERROR, "", 0, error.message, (), None))
            raise
        except Exception:
            # In the background nothing else would keep what went wrong.
            file.handle(log.makeRecord(log.name, logging.ERROR, "", 0, "the supervisor failed", (), sys.exc_info()))
            raise


def _take_on(supervisor: Supervisor, to_start: Launch, directory: StateDir) -> None:
    """Start the stages that `relayline up` again has put into the state directory."""
    try:
        plan = arrange(load_manifest(directory.more), to_start.source, directory.manifest, to_start.log_flags)
    except RelaylineError as error:
        log.warning("no stage was added: %s", error.message)
        return
    supervisor.take_on(plan.stages)


async def supervise(supervisor: Supervisor, stopping: asyncio.Event, emit: Emit) -> None:
    """Start, tell that it is ready, watch, end. Raises StartError."""
    stop = asyncio.ensure_future(stopping.wait())
    starting = asyncio.ensure_future(supervisor.start())
    try:
        await first_of(starting, stop)
        if not starting.done():
            return
        ready: dict[str, Any] = starting.result()
        emit(ready)
        log.info("ready: %s", ready["url"], extra=PRINTED)
        await first_of(stop, supervisor.failed)
        if supervisor.failed.done():
            supervisor.failed.result()
    finally:
        starting.cancel()
        stop.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await supervisor.stop()
        log.info("ended")
