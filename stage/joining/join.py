"""A stage that joins: takes a place in the pipeline, gets its artifact, serves, and takes its place again after a loss.

The engine outlives the membership: when the coordinator comes back with the same order, nothing is loaded again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from relayline.stage.config import StageConfig
from relayline.stage.engine.loading import WEIGHTS, Load, LoadStoppedError, Tell
from relayline.stage.facts import StageFacts
from relayline.stage.joining.artifact_fetch import NO_FILES, Files, obtain
from relayline.stage.joining.attempts import persistently
from relayline.stage.joining.changes import LayerChanges
from relayline.stage.joining.client import Member, failure_of, introduction
from relayline.stage.joining.config import JoinConfig
from relayline.stage.joining.reporting import Reporting
from relayline.stage.joining.stand_by import StandBy
from relayline.stage.joining.survey import survey
from relayline.stage.process import prepare_environment, serve_changing
from relayline.stage.served import Served
from relayline.wire.common.errors import (
    ArtifactError,
    NotReadyError,
    RelaylineError,
    StageLostError,
    StaleEpochError,
)
from relayline.wire.common.memory import give_back
from relayline.wire.common.process import first_of, run
from relayline.wire.common.tasks import end_task, to_its_end
from relayline.wire.links.security import check_listen, port_of
from relayline.wire.pb.relayline.v1 import join_pb2 as pb

log = logging.getLogger("relayline.stage")

RENEW_LOOK_S = 6 * 3600.0  # between two looks whether this host's certificate ends soon
USED_LOOK_S = 10.0  # a stage that is to sleep looks again whether another coordinator still uses it

STANDS_BY = "stands by without layers; the coordinator gives it some when needed"
SLEEPS = "sleeps; it loads its layers with the next request"

OnReady = Callable[[str, StageFacts], None]
Adapt = Callable[[StageConfig, pb.JoinResponse], StageConfig]


def run_joined(
    config: JoinConfig,
    on_ready: OnReady,
    adapt: Adapt,
    on_idle: Callable[[str], None],
) -> None:
    """Join, serve and rejoin until SIGINT or SIGTERM.

    `on_ready(address, facts)` is called for every engine that begins to serve. `adapt` may change the configuration of
    an order, by this process's own flags. `on_idle` is called when this stage has nothing loaded, with what it does
    then. Raises the coordinator's refusal, and the errors of `run_stage`.
    """
    prepare_environment()

    async def main(stopping: asyncio.Event) -> None:
        await JoinedStage(config, on_ready, adapt, on_idle).run(stopping)

    run(main)


class JoinedStage:
    """One joining stage inside a running event loop."""

    def __init__(
        self,
        config: JoinConfig,
        on_ready: OnReady,
        adapt: Adapt = lambda config, order: config,
        on_idle: Callable[[str], None] = lambda what: None,
    ) -> None:
        self._config, self._on_ready, self._adapt, self._on_idle = config, on_ready, adapt, on_idle
        self._hello = introduction(config.name, uuid.uuid4().hex, is_relayed=config.is_relayed)
        self._member: Member | None = None
        self._is_waking = False  # whether the engine to load is one that was freed
        self._wake_failure: pb.StageFailure | None = None  # why it could not be, until that is reported
        self._slept: tuple[pb.JoinResponse, StageFacts] | None = None  # the order of the last sleep, and its engine
        self._kept: asyncio.Future[None] | None = None  # `Rest.changed` of the order that it does not follow
        self._is_planned = False  # whether the coordinator said that it stops; then its absence is expected

    async def run(self, stopping: asyncio.Event) -> None:
        """Be a member until `stopping` is set. Raises as `run_joined`."""
        if self._config.host and not self._config.security.insecure:
            # Before anything is fetched; where plaintext is wanted, StageConfig warns of it once.
            check_listen(self._config.host, self._config.security, "this stage")
        stop = asyncio.ensure_future(stopping.wait())
        renewing = asyncio.create_task(self._keep_current())
        try:
            await self._rejoin(stop)
            while self._member is not None:
                await give_back()  # the engine before, if there was one
                await self._way_of(self._member)(self._member, stop)
        except Exception as error:
            if self._member is not None:  # else its goodbye would be taken for an end in order
                await self._member.report(failure=failure_of(error))
            raise
        finally:
            stop.cancel()
            await end_task(renewing)
            await to_its_end(self._leave())

    def _way_of(self, member: Member) -> Callable[[Member, asyncio.Future[Any]], Coroutine[Any, Any, None]]:
        """Return what follows a member's orders as they are now."""
        if member.order.stands_by:
            return self._stand_by
        return self._sleep if member.rest.is_asleep else self._follow

    async def _sleep(self, member: Member, stop: asyncio.Future[Any]) -> None:
        """Hold nothing but the artifact on the disk, until the coordinator wakes this stage."""
        changed, load = member.rest.changed, Load()
        if await self._obtain(member, load, stop) is None:
            await self._rejoin(stop)
            return
        failure, self._wake_failure = self._wake_failure, None
        await member.report(sleeping=pb.StageSleeping(failure=failure))
        log.info("asleep: its memory is free until it is needed", extra={"fields": {"name": self._config.name}})
        self._on_idle(SLEEPS)
        await first_of(stop, member.lost, changed)
        if stop.done() or member.lost.done():
            if not stop.done():
                self._note_end(member.lost.result())
            await self._rejoin(stop)
        else:
            self._is_waking = not member.rest.is_asleep

    async def _follow(self, member: Member, stop: asyncio.Future[Any]) -> None:
        """Do what one order says, until there is another one or this stage stops."""
        if member.order.HasField("survey"):
            await self._be_surveyed(member, stop)
            return
        load = Load(_teller(member))

        def give_up(_: asyncio.Future[Any]) -> None:
            load.stop()

        ends = (stop, member.rest.changed)
        for end in ends:
            end.add_done_callback(give_up)
        try:
            files, host = None, await self._listen_host()
            if host:
                await asyncio.to_thread(self._config_at(host)(NO_FILES, member.order).check_ports)
                files = await self._obtain(member, load, stop)
            if files is None:
                await self._rejoin(stop)
            else:
                await member.report_progress(pb.ARTIFACT_PHASE_LOADING, 0, member.order.artifact.size_bytes)
                await self._serve(member, files, host, load, stop)
        except LoadStoppedError:
            if stop.done() or not member.rest.is_asleep:
                await self._rejoin(stop)
        except RelaylineError as error:
            if not self._is_waking:
                raise
            # The process stays: it can load once there is memory again, or its port is free.
            log.warning("cannot wake: %s", error.message)
            self._is_waking, self._wake_failure = False, failure_of(error)
            member.rest.tell(pb.Rest(is_asleep=True, route_id=member.rest.route_id))
        finally:
            for end in ends:
                end.remove_done_callback(give_up)

    async def _be_surveyed(self, member: Member, stop: asyncio.Future[Any]) -> None:
        """Measure this host, and wait until there is a plan: then the coordinator ends the membership."""
        log.info("measuring this host, for a plan")
        measuring = asyncio.create_task(survey(member, self._config))
        try:
            await first_of(measuring, stop, member.lost)
            if measuring.done() and measuring.exception() is None:
                log.info("measured; waiting for the plan")
                await first_of(stop, member.lost)
        finally:
            await end_task(measuring)
        if not stop.done():
            lost = member.lost.result() if member.lost.done() else None
            self._note_end(lost or _error_of(measuring))
        await self._rejoin(stop)

    async def _listen_host(self) -> str:
        """Return the address to listen on; empty when the coordinator's name cannot be resolved just now."""
        try:
            return await asyncio.to_thread(self._config.listen_host)
        except StageLostError as error:
            log.warning("membership ended: %s", error)
            return ""

    async def _stand_by(self, member: Member, stop: asyncio.Future[Any]) -> None:
        """Hold no layers until the coordinator gives some, then serve them."""
        if not (host := await self._listen_host()):
            await self._rejoin(stop)
            return
        log.info("standing by without layers", extra={"fields": {"name": self._config.name}})
        self._on_idle(STANDS_BY)
        config_of, config = self._config_at(host), self._config
        standing = StandBy(member, stop, config_of, config.cache, always_fetch=config.always_fetch)
        async with standing.layers() as served:
            if served is not None:
                await self._serve_changing(member, host, served, config_of, stop)
                return
            if member.lost.done() and not stop.done():
                self._note_end(member.lost.result())
        await self._rejoin(stop)

    def _config_at(self, host: str) -> Callable[[Files, pb.JoinResponse], StageConfig]:
        """Return what says which stage an order leads to, on an address of this machine."""

        def config_of(files: Files, order: pb.JoinResponse) -> StageConfig:
            is_here = files is not NO_FILES
            ordered = self._config.ordered(
                order, files.artifact, files.adapters, host, drafter=files.drafter, is_here=is_here
            )
            return self._adapt(ordered, order)

        return config_of

    async def _serve(self, member: Member, files: Files, host: str, load: Load, stop: asyncio.Future[Any]) -> None:
        config_of = self._config_at(host)
        slept = self._slept if self._is_waking else None
        like = slept[1] if slept is not None and same_work(slept[0], member.order) else None
        async with contextlib.AsyncExitStack() as stack:
            served = await stack.enter_async_context(serve_changing(config_of(files, member.order), load, like))
            self._is_waking = False
            await self._serve_changing(member, host, served, config_of, stop)

    async def _serve_changing(
        self,
        member: Member,
        host: str,
        served: Served,
        config_of: Callable[[Files, pb.JoinResponse], StageConfig],
        stop: asyncio.Future[Any],
    ) -> None:
        artifact, order = served.facts.artifact, member.order
        if (artifact.pipeline_id, artifact.stage_index) != (order.pipeline_id, order.stage_index):
            raise ArtifactError(f"{order.artifact.file} is not the artifact that the coordinator's order describes")
        self._on_ready(served.address, served.facts)
        cache, always_fetch = self._config.cache, self._config.always_fetch
        changes = LayerChanges(served, config_of, cache, always_fetch=always_fetch)
        try:
            await self._stay(member, host, served, changes, stop)
        finally:
            await changes.drop()

    async def _obtain(self, member: Member, load: Load, stop: asyncio.Future[Any]) -> Files | None:
        """Return the order's files; None when stopped, or when the coordinator has gone."""
        getting = asyncio.create_task(obtain(member, self._config.cache, load, always_fetch=self._config.always_fetch))
        try:
            await first_of(getting, stop, member.lost)
        finally:
            if not getting.done():
                load.stop()  # a thread that reads a file hears of nothing else
            getting.cancel()  # does nothing to a task that is done
            await asyncio.gather(getting, return_exceptions=True)
        if stop.done():
            return None
        error = None if getting.cancelled() else getting.exception()
        if isinstance(error, StaleEpochError) or (member.lost.done() and (getting.cancelled() or error is not None)):
            # A ticket that means nothing any more is the end of the membership too, heard of on another way.
            reason = member.lost.result() if member.lost.done() else error
            log.warning("membership ended: %s", reason)
            return None
        return getting.result()

    async def _stay(
        self, member: Member, host: str, served: Served, changes: LayerChanges, stop: asyncio.Future[Any]
    ) -> None:
        """Serve on one port for as long as it can: through memberships and changes of layers, until all of it moves."""
        order, crashed = member.order, served.crashed
        async with Reporting(self._config, port_of(served.address)) as reporting:
            while self._stays(order, served):
                assert self._member is not None
                await reporting.serving(self._member, served.facts.instance_id)
                switching = asyncio.create_task(changes.next_switch(self._member))
                rests = asyncio.create_task(self._rests(self._member))
                try:
                    await first_of(stop, crashed, self._member.lost, switching, reporting.failed, rests)
                finally:
                    await end_task(switching)
                    await end_task(rests)
                if crashed.done():
                    await crashed
                if reporting.failed.done():
                    await reporting.failed
                if not switching.cancelled() and switching.exception() is None:
                    order = switching.result()
                    self._member.order = order
                    handing = asyncio.create_task(changes.hand_over(order))
                    try:
                        await first_of(stop, crashed, self._member.lost, handing)
                    finally:
                        await end_task(handing)
                    if order.stands_by:
                        return
                    self._on_ready(served.address, served.facts)
                    continue
                if _is_whole(rests) and not (stop.done() or self._member.lost.done()):
                    continue
                if not stop.done():
                    self._note_end(_end_of(self._member, switching))
                await changes.drop()
                await self._rejoin(stop, crashed)
                if not crashed.done() and await self._has_moved(host):
                    return
        if crashed.done():
            await crashed
        if self._member is None:
            return
        if self._member.rest.is_asleep:
            self._slept, self._is_waking = (order, served.facts), True  # it may be woken at once
            return
        log.info("the coordinator's settings for this stage have changed; loading again")

    def _stays(self, order: pb.JoinResponse, served: Served) -> bool:
        """Return whether the engine of an order is to go on: also in a sleep, while another coordinator uses it."""
        if self._member is None or not same_work(self._member.order, order):
            return False
        rest = self._member.rest
        return not rest.is_asleep or served.is_used_beside(rest.route_id)

    async def _rests(self, member: Member) -> None:
        """Return once a member that serves may have to sleep, or to serve again."""
        if member.rest.is_asleep:
            if self._kept is not member.rest.changed:  # once for each order, at every look nothing new
                self._kept = member.rest.changed
                log.warning("stays loaded while the pipeline sleeps: another coordinator uses this stage")
            await asyncio.wait({member.rest.changed}, timeout=USED_LOOK_S)
        else:
            await asyncio.wait({member.rest.changed})

    async def _has_moved(self, host: str) -> bool:
        """Return whether this machine faces the coordinator with another address than `host`, which it listens on."""
        if self._member is None or (now := await self._listen_host()) in ("", host):
            return False
        log.warning(
            "this machine's address has changed to %s (it was %s); loading again to serve at the new one", now, host
        )
        return True

    # --- membership ---------------------------------------------------------------------------------------------------

    @property
    def _level(self) -> int:
        return logging.INFO if self._is_planned else logging.WARNING

    def _level_of(self, problem: RelaylineError) -> int:
        """Return the level of a failed attempt. A coordinator that said that it ends is expected to be out of reach."""
        return logging.DEBUG if self._is_planned and isinstance(problem, StageLostError) else self._level

    def _note_end(self, reason: RelaylineError) -> None:
        self._is_planned = isinstance(reason, NotReadyError)
        log.log(self._level, "membership ended: %s", reason.message)

    async def _leave(self) -> None:
        if self._member is not None:
            await self._member.close()
            self._member = None

    async def _rejoin(self, *interrupts: asyncio.Future[Any]) -> None:
        """End this membership and begin the next one, or none if an interrupt comes first."""
        self._is_waking = False
        await self._leave()
        if not any(interrupt.done() for interrupt in interrupts):
            self._member = await self._join(*interrupts)
            if self._member is not None:
                await self._renew()  # perhaps this host has another address now

    async def _join(self, *interrupts: asyncio.Future[Any]) -> Member | None:
        """Join, again and again while that may help; None as soon as one of the interrupts is done."""
        member = await persistently(self._attempt, self._level_of, *interrupts)
        if member is None:
            return None
        index, count = member.order.stage_index, member.order.stage_count
        fields = {
            "name": self._config.name,
            "stage": "standing by" if member.order.stands_by else f"{index} of {count}",
            "coordinator": self._config.coordinator,
        }
        log.info("joined", extra={"fields": fields})
        self._is_planned = False
        return member

    async def _keep_current(self) -> None:
        """Have the certificate renewed in time; ends only by being cancelled."""
        while True:
            await asyncio.sleep(RENEW_LOOK_S)
            await self._renew()

    async def _renew(self) -> None:
        """Have the certificate renewed if that is needed. Links take it up when they begin."""
        try:
            await asyncio.to_thread(self._config.renew)
        except (RelaylineError, OSError) as error:
            log.warning("the certificate of this host cannot be renewed: %s", error)

    async def _attempt(self) -> Member:
        return await Member.join(self._config.coordinator, self._config.security, self._hello)


def _is_whole(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled()


def _teller(member: Member) -> Tell:
    """Return what reports a load to the coordinator, from the thread that loads; a report waits for the one before."""
    loop, total_bytes = asyncio.get_running_loop(), member.order.artifact.size_bytes
    last: Future[None] | None = None

    def tell(work: str, share: float) -> None:
        nonlocal last
        if work == WEIGHTS and (last is None or last.done()):
            report = member.report_progress(pb.ARTIFACT_PHASE_LOADING, round(share * total_bytes), total_bytes)
            last = asyncio.run_coroutine_threadsafe(report, loop)

    return tell


def _end_of(member: Member, switching: asyncio.Task[pb.JoinResponse]) -> RelaylineError:
    """Return why a membership is to end: its loss, or an order that cannot be followed. Raises a bug of ours."""
    if member.lost.done():
        return member.lost.result()
    error = switching.exception() if not switching.cancelled() else None
    if isinstance(error, RelaylineError):
        return error
    raise error or StageLostError("the membership ended")


def _error_of(measuring: asyncio.Task[None]) -> RelaylineError:
    """Return why a survey could not be reported. Raises a bug of ours."""
    error = measuring.exception()
    if isinstance(error, RelaylineError):
        return error
    raise error or StageLostError("the membership ended")


def same_work(one: pb.JoinResponse, other: pb.JoinResponse) -> bool:
    """Return whether two orders lead to the same engine, so that a loaded one can continue."""
    return _work(one) == _work(other)


def _work(order: pb.JoinResponse) -> tuple[Any, ...]:
    adapters = [(each.file.sha256, each.name, each.scale) for each in order.adapters]
    drafter = (tuple(order.drafter.layers), order.drafter.file.sha256)
    pipeline = (order.pipeline_id, order.stage_index, order.artifact.sha256)
    return *pipeline, order.engine, order.coordinator, adapters, drafter
