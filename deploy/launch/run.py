"""`relayline up`: checks everything, starts everything, then watches until stopped."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.coordinator.text.chat import read_template
from relayline.deploy.launch.arrange import arrange, stage_directory
from relayline.deploy.launch.backoff import RestartPolicy
from relayline.deploy.launch.first_plan import keep_plan, plan_event, waits_for_hosts
from relayline.deploy.launch.leftovers import end_leftovers
from relayline.deploy.launch.log_files import LOG_BYTES_MAX, LOG_OLD_FILES, RotatedFile
from relayline.deploy.launch.mend import Mend, later_mender, mender
from relayline.deploy.launch.plan import LaunchPlan
from relayline.deploy.launch.ports import port_problem, wanted_ports
from relayline.deploy.launch.prepare import (
    Prepared,
    Split,
    find_model,
    planned_cuts,
    prepare,
    settled,
    with_credentials,
)
from relayline.deploy.launch.splits import split_for
from relayline.deploy.launch.state import MORE_SIGNAL, StateDir, register
from relayline.deploy.launch.supervisor import COORDINATOR, Emit, Supervisor
from relayline.deploy.manifest import Manifest, is_local, load_manifest
from relayline.deploy.planning.shared import gpu_sharing
from relayline.wire.common.errors import RelaylineError, StartError, UsageError
from relayline.wire.common.process import first_of
from relayline.wire.links.roles import Role
from relayline.wire.links.security import load_security
from relayline.wire.links.tls_material import check_pair
from relayline.wire.telemetry.config import Level, TelemetryConfig

log = logging.getLogger("relayline.up")

SUPERVISOR = "up"  # the name of its own log


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
    """What a launch starts with."""

    manifest: Manifest
    """With every path in full and every choice made, but for layers that a survey is to decide."""
    prepared: Prepared | None
    """The split; None until there was a survey."""


def check_names(manifest: Manifest) -> None:
    """Raise UsageError for a stage with the name that a process of every launch has."""
    taken = next((stage.name for stage in manifest.members if stage.name in (SUPERVISOR, COORDINATOR)), None)
    if taken is not None:
        raise UsageError(f"no stage can be named {taken!r}: the logs of that name are the launch's own; rename it")


def check_ports(manifest: Manifest) -> None:
    """Raise StartError with every port of this machine that is wanted and not free."""
    problems = [
        f"{what}: {problem}"
        for what, host, port in wanted_ports(manifest)
        if (problem := port_problem(host, port)) is not None
    ]
    if problems:
        raise StartError("; ".join(problems) + "; end what holds it or name another port in the manifest")


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


def check_before_work(manifest: Manifest) -> None:
    """Check all that can be checked before the model is known. Raises UsageError, StartError."""
    check_names(manifest)
    check_ports(manifest)
    said = manifest.telemetry
    TelemetryConfig(Level.named(said.level), said.otlp_endpoint, said.sampler_ratio)
    coordinator = manifest.spec.coordinator
    if (tls := coordinator.http.tls) is not None:
        check_pair(manifest.resolve(tls.cert_file), manifest.resolve(tls.key_file))
    if coordinator.chat_template_file is not None:
        read_template(manifest.resolve(coordinator.chat_template_file))


def ready_to_start(what: Launch, directory: StateDir) -> Ready:
    """Check what a launch needs and prepare its files; nothing is started. Raises what is wrong.

    Where hosts have to be surveyed first, the model is not split yet.
    """
    manifest = what.manifest
    check_before_work(manifest)
    if not all(stage.is_local for stage in manifest.members) and is_local(manifest.spec.coordinator.host):
        log.warning("coordinator.host is %s, where stages on other hosts cannot reach it; set it in the manifest",
                    manifest.spec.coordinator.host)  # fmt: skip
    model = find_model(manifest)
    if waits_for_hosts(manifest, model, what.measure, is_again=what.is_again):
        manifest = with_credentials(manifest, directory.tls)
        found = Ready(settled(manifest, model, [stage.layer_range for stage in manifest.stages]), None)
    else:
        prepared = prepare(manifest, choose=planned_cuts, split=what.split, own_tls=directory.tls)
        warn_of_context(manifest.engine.ctx_tokens, prepared.file)
        found = Ready(prepared.manifest, prepared)
    check_security(found.manifest)
    for line in gpu_sharing(manifest):
        log.warning("%s", line)
    return found


def warn_of_context(ctx_tokens: int, file: PipelineFile) -> None:
    """Warn where streams may grow longer than the model's training context."""
    if 0 < file.ctx_train < ctx_tokens:
        log.warning(
            "the context of %d tokens is longer than the %d that %s was trained for: answers beyond them may "
            "make no sense; --ctx %d saves memory too",
                    ctx_tokens, file.ctx_train, file.model_name, file.ctx_train)  # fmt: skip


def plan_of(what: Launch, directory: StateDir) -> tuple[LaunchPlan, Mend]:
    """Check and prepare a launch, and record every choice for the coordinator.

    Raises as `ready_to_start`. Returns also the function that repairs damaged files of the split.
    """
    ready = ready_to_start(what, directory)
    write_settled(ready.manifest, directory.manifest)
    for kept in (directory.layers, directory.more, directory.plan):  # of the run before: this one begins as it is told
        kept.unlink(missing_ok=True)
    if ready.prepared is None:
        split_flags = ("--pipeline", str(what.split_dir.absolute())) if what.split_dir is not None else ()
        mend = later_mender(directory.manifest)
    else:
        pipeline_dir, file = ready.prepared.pipeline_dir, ready.prepared.file
        split_flags = ("--pipeline", str(pipeline_dir.absolute())) if what.split_dir is not None else ()
        model = find_model(ready.manifest)
        mend = mender(model, pipeline_dir, file)
        keep_plan(ready.manifest, model, directory.plan)
    plan = arrange(ready.manifest, what.source, directory.manifest, what.log_flags, split_flags)
    return plan, mend


def write_settled(manifest: Manifest, path: Path) -> None:
    """Write a settled manifest where the coordinator reads it."""
    text = json.dumps(manifest.model_dump(mode="json", by_alias=True, exclude_none=True), indent=2)
    partial = path.with_suffix(".partial")
    partial.write_text(text + "\n")
    partial.replace(path)


def check_security(manifest: Manifest) -> None:
    """Check the credentials of the links of this machine's processes. Raises UsageError."""
    wire = manifest.spec.wire
    token_file = manifest.resolve(wire.token_file) if wire.token_file is not None else None
    if not manifest.uses_tls or wire.tls.directory is None:
        load_security(None, token_file=token_file, insecure=not manifest.all_local, role=Role.COORDINATOR)
        return
    load_security(manifest.resolve(wire.tls.directory), token_file=token_file, role=Role.COORDINATOR)
    for stage in manifest.members:
        if stage.is_local:
            load_security(stage_directory(manifest, stage), role=Role.STAGE, name=stage.name)


def launch(
    what: Launch,
    directory: StateDir,
    emit: Emit,
    *,
    echo: Callable[[str, str], None] | None = None,
    policy: RestartPolicy | None = None,
) -> None:
    """Run a pipeline until SIGINT or SIGTERM.

    Raises UsageError and StartError before anything is started, StartError when a process cannot be kept alive.
    """
    from relayline.wire.common.process import run

    with directory.locked(what.manifest.name), log_file(directory.log(SUPERVISOR)) as file:
        register(directory.path)
        before = directory.load()
        n_ended = end_leftovers(before)
        if n_ended or (before is not None and not before.phase.has_ended):
            log.warning("the last run did not end properly; %d processes of it were still there", n_ended)
        plan, mend = plan_of(what, directory)
        if (said := plan_event(what.manifest, directory.plan)) is not None:
            emit(said)

        async def main(stopping: asyncio.Event) -> None:
            supervisor = Supervisor(plan, directory, emit, policy=policy, echo=echo, mend=mend)
            asyncio.get_running_loop().add_signal_handler(MORE_SIGNAL, _take_on, supervisor, what, directory)
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


def _take_on(supervisor: Supervisor, what: Launch, directory: StateDir) -> None:
    """Start the stages that `relayline up` again has put into the state directory."""
    try:
        plan = arrange(load_manifest(directory.more), what.source, directory.manifest, what.log_flags)
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
        log.info("ready: %s", ready["url"])
        await first_of(stop, supervisor.failed)
        if supervisor.failed.done():
            supervisor.failed.result()
    finally:
        starting.cancel()
        stop.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await supervisor.stop()
        log.info("ended")
