"""`relayline up`: checks everything, starts everything, then watches until stopped."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from relayline.coordinator.model.gguf_file import headers_read_once
from relayline.deploy.launch.again import Again, failures_in, forget_ended, is_ordered, refuse
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
    check_fits,
    check_named_model,
    find_model,
    override,
    planned_cuts,
    prepare,
    settled,
    with_credentials,
)
from relayline.deploy.launch.renewing import renewing
from relayline.deploy.launch.restarts import RestartPolicy
from relayline.deploy.launch.stage_checks import warn_of_shared_gpus
from relayline.deploy.launch.state import MORE_SIGNAL, StateDir, register
from relayline.deploy.launch.supervisor import Emit, Supervisor, supervise
from relayline.deploy.manifest import Manifest, is_local, load_manifest
from relayline.deploy.models.mend import Mend, later_mender, mender
from relayline.deploy.models.splits import split_for
from relayline.wire.common.errors import RelaylineError
from relayline.wire.common.files import naming, try_writing, write_again

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
    or_before: bool = False
    """Whether a start that fails starts what served before."""
    is_behind: bool = False
    """Whether a gateway runs it, which may start another process in its place: that one finds what served before."""
    beside: str = ""
    """The other pipelines of its gateway, as `gateway.plan.beside_text` says it."""

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
    manifest, model = _checked(to_start, directory)
    if waits_for_hosts(manifest, model, to_start.measure, is_again=to_start.is_again):
        found = Ready(settled(manifest, model, [stage.layer_range for stage in manifest.stages]), None)
    else:
        prepared = prepare(manifest, choose=planned_cuts, split=to_start.split)
        warn_of_context(manifest.engine.ctx_tokens, prepared.file)
        found = Ready(prepared.manifest, prepared)
    warn_of_shared_gpus(manifest)
    return found


def check_while_it_runs(to_start: Launch, directory: StateDir) -> None:
    """Check what a launch needs while the same pipeline serves, which ends before: its ports and its memory are free
    by then. Raises the first problem found.

    A model of the hub is here afterwards. The model must fit if all memory were free: how much will be is not known.
    """
    manifest, model = _checked(to_start, directory, may_run=True)
    if not waits_for_hosts(manifest, model, to_start.measure, is_again=True):  # a check forgets no measurements
        check_fits(manifest, model)
    with naming(directory.path):
        try_writing(directory.path)


def _checked(to_start: Launch, directory: StateDir, *, may_run: bool = False) -> tuple[Manifest, Path]:
    """Return the manifest with its credentials, and its model's file. `may_run` as in `check_ports`."""
    manifest = to_start.manifest
    check_named_model(manifest)
    check_before_work(manifest, may_run=may_run)
    if not all(stage.is_local for stage in manifest.members) and is_local(manifest.spec.coordinator.host):
        log.warning("coordinator.host is %s, where stages on other hosts cannot reach it; set it in the manifest",
                    manifest.spec.coordinator.host)  # fmt: skip
    model = find_model(manifest)
    check_companions(manifest, model, may_run=may_run)
    warn_of_unused_drafts(manifest.engine, model)
    manifest = with_credentials(manifest, directory.tls)
    check_security(manifest)
    return manifest, model


def plan_of(to_start: Launch, directory: StateDir) -> tuple[LaunchPlan, Mend]:
    """Check and prepare a launch, and record every choice for the coordinator.

    Raises as `ready_to_start`. Returns also the function that repairs damaged files of the split.
    """
    ready = ready_to_start(to_start, directory)
    write_settled(ready.manifest, directory.manifest)
    # Of the last run: this one begins with its own settings.
    for kept in (directory.layers, directory.more, directory.plan):
        kept.unlink(missing_ok=True)
    if is_ordered(directory.restart):  # an answer stays, for this may be the start as before
        directory.restart.unlink()
    split_dir = to_start.split_dir
    if ready.prepared is None:
        mend = later_mender(directory.manifest)
    else:
        model, pipeline_dir = find_model(ready.manifest), ready.prepared.pipeline_dir
        split_dir = pipeline_dir if split_dir is not None else None
        mend = mender(model, pipeline_dir, ready.prepared.file)
        keep_plan(ready.manifest, model, directory.plan)
    more_flags: tuple[str, ...] = ("--pipeline", str(split_dir.absolute())) if split_dir is not None else ()
    if ready.prepared is None and to_start.beside:
        more_flags += ("--beside", to_start.beside)
    fixed = tuple(stage.name for stage in to_start.manifest.stages if stage.layer_range is not None)
    plan = arrange(ready.manifest, to_start.source, directory.manifest, to_start.log_flags, more_flags, fixed)
    return plan, mend


def write_settled(manifest: Manifest, path: Path) -> None:
    """Write a settled manifest where the coordinator reads it. What a survey is to choose is not in it."""
    text = json.dumps(manifest.model_dump(mode="json", by_alias=True, exclude_unset=True), indent=2)
    write_again(path, text.encode() + b"\n")


def before_of(directory: StateDir, mistake: RelaylineError) -> tuple[Manifest, Path]:
    """Return the manifest of what served in `directory`, and its source, now that there is a mistake in the source.

    Where that is not known any more, it raises the mistake, and answers the order to start again with it.
    """
    state = directory.load()
    try:
        if state is None or not directory.before.exists():
            raise mistake
        return _manifest_before(directory, Path(state.manifest).parent), Path(state.manifest)
    except (RelaylineError, OSError):
        refuse(directory.restart, mistake.message)
        raise mistake from None


def _manifest_before(directory: StateDir, place: Path) -> Manifest:
    """Return the manifest of before. `place`: where its relative paths begin."""
    return load_manifest(directory.before).with_directory(place)


def launch(
    to_start: Launch,
    directory: StateDir,
    emit: Emit,
    *,
    echo: Callable[[str, str], None] | None = None,
    policy: RestartPolicy | None = None,
    arguments: Sequence[str] = (),
    failed: RelaylineError | None = None,
) -> bool:
    """Run a pipeline until SIGINT or SIGTERM, or until its terminal closes. Returns whether it is to start again, see
    `Again`.

    If it has been started again so and cannot serve, it starts as it was before. `arguments`: this process's command
    line, `up` first; empty for a process that cannot start again by itself. `failed`: why the manifest of now cannot be
    used, if `to_start` is what served before. Raises UsageError and StartError before anything is started, StartError
    when a process cannot be kept alive.
    """
    with directory.locked(to_start.manifest.name), log_file(directory.log(SUPERVISOR)) as file:
        register(directory.path)
        last = directory.load()
        n_ended = end_leftovers(last)
        if n_ended or (last is not None and not last.phase.has_ended):
            left = f"; {n_ended} of its processes still ran, and had to end" if n_ended else ""
            log.warning("the last run did not end properly%s", left)
        forget_ended(directory, last, but_before=to_start.or_before)
        has_served = False

        def tell(event: dict[str, Any]) -> None:
            nonlocal has_served
            has_served = has_served or event["event"] == "ready"
            emit(event)

        once = functools.partial(
            _launch_once, directory=directory, emit=tell, echo=echo, policy=policy, arguments=arguments
        )
        try:
            with failures_in(file, directory):
                if failed is not None:
                    raise failed
                return once(to_start)
        except RelaylineError as error:
            if has_served or not directory.before.exists():  # or it was not started again
                raise
            reason = error.message
        log.warning("the new start failed, so the pipeline starts as it was before: %s", reason)
        refuse(directory.restart, reason)
        try:
            with failures_in(file, directory):
                return once(_as_before(to_start, directory), why_as_before=reason)
        except RelaylineError as error:
            if not has_served:
                refuse(directory.restart, f"{reason}; nor does it as it was before: {error.message}")
            raise


def _as_before(to_start: Launch, directory: StateDir) -> Launch:
    """Return the launch with the manifest of before."""
    before = _manifest_before(directory, to_start.manifest.directory)
    if to_start.is_behind:  # the gateway looks for it where it was to listen now
        before = override(before, {"coordinator.http.port": to_start.manifest.spec.coordinator.http.port})
    return dataclasses.replace(to_start, manifest=before, is_again=True)


def _launch_once(
    to_start: Launch,
    directory: StateDir,
    emit: Emit,
    *,
    echo: Callable[[str, str], None] | None,
    policy: RestartPolicy | None,
    arguments: Sequence[str],
    why_as_before: str = "",
) -> bool:
    """As `launch`, in a locked directory that is ready, with this manifest alone.

    `why_as_before`: why it is that of before; whoever hears that it is ready hears this, too.
    """
    from relayline.wire.common.process import is_in_background, may_hang_up, run

    again = Again(directory, arguments)

    def tell(event: dict[str, Any]) -> None:
        if event["event"] == "ready":
            event |= {"as_before": why_as_before} if why_as_before else {}
            if to_start.is_behind:
                _keep_before(to_start.manifest, directory)
            else:
                directory.before.unlink(missing_ok=True)
        emit(event)

    async def main(stopping: asyncio.Event) -> bool:
        supervisor = Supervisor(plan, directory, tell, policy=policy, echo=echo, mend=mend)
        supervisor.board.set_starts_again(bool(arguments))
        loop = asyncio.get_running_loop()

        def on_order() -> None:
            if is_ordered(directory.restart):
                again.ask(stopping)
            if directory.more.exists():  # beside an order, too: its check may take an hour and find a mistake
                _take_on(supervisor, to_start, directory)

        loop.add_signal_handler(MORE_SIGNAL, on_order)
        if may_hang_up():  # a closed terminal
            loop.add_signal_handler(signal.SIGHUP, stopping.set)
        elif is_in_background():
            loop.add_signal_handler(signal.SIGHUP, supervisor.reread_keys)
        try:
            async with renewing(to_start.manifest, directory.tls, supervisor.board.names):
                await supervise(supervisor, stopping, tell, again.wanted)
        finally:
            await again.close()
        if stopping.is_set() and is_ordered(directory.restart):
            refuse(directory.restart, "it was told to end meanwhile")
        return again.wanted.is_set() and not stopping.is_set()  # a signal has the last word

    with headers_read_once():
        plan, mend = plan_of(to_start, directory)
    if (event := plan_event(to_start.manifest, directory.plan)) is not None:
        emit(event)
    is_wanted_again = run(main)
    if is_wanted_again:
        _keep_before(to_start.manifest, directory)
    return is_wanted_again


def _keep_before(manifest: Manifest, directory: StateDir) -> None:
    """Keep the manifest of a pipeline that is to start again, for a new start that fails."""
    try:
        write_settled(manifest, directory.before)
    except OSError as error:
        log.warning("%s cannot be written, so nothing serves if the new start fails: %s",
                    directory.before, error.strerror)  # fmt: skip


def _take_on(supervisor: Supervisor, to_start: Launch, directory: StateDir) -> None:
    """Start the stages that `relayline up` again has put into the state directory."""
    try:
        plan = arrange(load_manifest(directory.more), to_start.source, directory.manifest, to_start.log_flags)
    except RelaylineError as error:
        log.warning("no stage was added: %s", error.message)
        return
    supervisor.take_on(plan.stages)
