"""Keeps the pipelines of one gateway alive, and the gateway itself in this process; changes them while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from relayline.coordinator.gateway.serve import ServedGateway, serving_gateway
from relayline.deploy.launch.again import OR_BEFORE
from relayline.deploy.launch.board import Board
from relayline.deploy.launch.child import Child, started
from relayline.deploy.launch.gateway.change import AS_BEFORE, OTHERS_SERVE, difference, join_ports, restarting
from relayline.deploy.launch.gateway.plan import GatewayPlan, LocalPipeline, MemberPlan, key_of_running, plan_members
from relayline.deploy.launch.log_files import LogWriter
from relayline.deploy.launch.process_id import identify
from relayline.deploy.launch.restarts import RestartHistory, RestartPolicy
from relayline.deploy.launch.state import MORE_SIGNAL, ProcessRecord, StateDir
from relayline.deploy.launch.supervisor import COORDINATOR_STOP_TIMEOUT_S, STAGE_STOP_TIMEOUT_S, Emit
from relayline.deploy.manifest.gateway import Member, load_gateway, write_gateway
from relayline.wire.common.errors import RelaylineError, StartError
from relayline.wire.common.logs import PRINTED
from relayline.wire.common.phase import HostState, Phase
from relayline.wire.common.process import first_of
from relayline.wire.common.tasks import end_task, set_within

log = logging.getLogger("relayline.up")

STOP_TIMEOUT_S = COORDINATOR_STOP_TIMEOUT_S + 2 * STAGE_STOP_TIMEOUT_S  # of a whole pipeline: its drain, its stages

BEHIND = "runs as before the last change: one before it did not come up; `up` again goes on"
LEAVES = "takes no new requests; it starts again when those that run there have ended"

Echo = Callable[[str, str], None]


@dataclasses.dataclass(slots=True)
class _Kept:
    """One pipeline that is kept alive."""

    member: str
    child: Child
    first: asyncio.Future[dict[str, Any]]
    """Done when it serves for the first time."""
    at_start: bool
    """Whether it starts with the gateway, while somebody waits for the reports."""
    ending: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Keeper:
    """One gateway. Event loop only."""

    def __init__(self, plan: GatewayPlan, directory: StateDir, emit: Emit, echo: Echo | None) -> None:
        self._plan, self._directory, self._emit, self._echo = plan, directory, emit, echo
        me = identify(os.getpid())
        assert me is not None, "this process runs"
        tls, records = plan.config.http.tls, tuple(map(_record, plan.pipelines))
        self.board = Board(directory, plan.name, str(plan.source), me, records, tls[0] if tls is not None else None)
        self._kept: dict[str, _Kept] = {}  # by the pipeline's own name
        self._served: ServedGateway
        self._stopping, self._asked = asyncio.Event(), asyncio.Event()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping`."""
        reason, stop = "", asyncio.ensure_future(stopping.wait())
        asyncio.get_running_loop().add_signal_handler(MORE_SIGNAL, self._asked.set)
        try:
            async with serving_gateway(self._plan.config) as served:
                self._served = served
                self.board.set_addresses(served.url, "")
                ready = asyncio.create_task(self._begin_all())
                await first_of(ready, self._failed, stop)
                if not (self._failed.done() or stop.done()):
                    self._ready(served.url, ready.result(), served.asleep)
                    changing = asyncio.create_task(self._change_when_asked(served))
                    await first_of(self._failed, stop)
                    await end_task(changing)
                await end_task(ready)
                self._stopping.set()
                self.board.set_phase(Phase.DRAINING)
                if self._failed.done():
                    self._failed.result()
        except StartError as error:
            reason = error.message
            raise
        finally:
            self._stopping.set()
            stop.cancel()
            await asyncio.gather(*(self._end(kept) for kept in self._kept.values()))
            for record in self.board.state.processes:
                self.board.note_end(record.name, HostState.STOPPED)
            self.board.set_phase(Phase.FAILED if reason else Phase.STOPPED, reason)

    async def _begin_all(self) -> list[dict[str, Any]]:
        """Start all pipelines. Where not all may be awake they start one after the other, the first ones last.

        One that cannot start is left out. Raises StartError where none is left.
        """
        pipelines = self._plan.pipelines
        if not self._plan.config.awake_max:
            found = await asyncio.gather(*map(self._begin_first, pipelines))
        else:
            found = [await self._begin_first(each) for each in reversed(pipelines)][::-1]
        errors = [each for each in found if isinstance(each, StartError)]
        if errors and len(errors) == len(self._plan.config.backends):
            raise errors[0]
        for error in errors:
            self._emit({"event": "left_out", "message": f"{error.message}. {OTHERS_SERVE}"})
        return [each for each in found if not isinstance(each, StartError)]

    async def _begin_first(self, pipeline: LocalPipeline) -> dict[str, Any] | StartError:
        try:
            return await self._begin(pipeline, at_start=True)
        except StartError as error:  # the board says why
            self._served.leave(pipeline.member)
            await self._retire(self._served, pipeline.member, is_failed=True)
            return error

    def _ready(self, url: str, events: Sequence[dict[str, Any]], asleep: Sequence[str]) -> None:
        self.board.set_phase(Phase.READY)
        models = list(dict.fromkeys(event["model"] for event in events))
        facts: dict[str, Any] = {"event": "ready", "role": "gateway", "url": url, "models": models}
        facts["needs_key"] = self._plan.config.http.api_keys_file is not None
        if models:
            facts |= {"model": models[0], "chat": events[0].get("chat", True), "ranks": events[0].get("ranks", False)}
        if self._plan.config.awake_max:
            facts |= {"awake_max": self._plan.config.awake_max, "asleep": list(asleep)}
        self._emit(facts)
        log.info("ready: %s", url, extra=PRINTED)

    # --- changes while it serves --------------------------------------------------------------------------------------

    async def _change_when_asked(self, served: ServedGateway) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            if not self._directory.more.exists():  # the order before was this one already
                continue
            order = [(path, _written(path)) for path in (self._directory.restart, self._directory.more)]
            try:
                await self._change(served)
            except (RelaylineError, OSError) as error:
                log.warning("the gateway was not changed: %s", error)
            finally:
                for path, written in order:  # the caller waits for the end of the last one
                    if _written(path) == written:  # else the caller was killed, and there is a new order
                        path.unlink(missing_ok=True)

    async def _change(self, served: ServedGateway) -> None:
        """Bring the gateway to the state of the manifest that was left for it. Raises as `plan_members`.

        Pipelines come and go at once. Those that are replaced or started again go one after the other, so that their
        replicas answer: the next one begins when the one before takes requests.
        """
        wanted = load_gateway(self._directory.more)
        differs = difference(self._plan.manifest, wanted, self.board.unlike_manifest())
        again = restarting(self._directory, differs)
        plan = dataclasses.replace(self._plan, manifest=wanted)
        started, new = self._plan.started, [*differs.beginning, *again]
        ports = await asyncio.to_thread(join_ports, started, self._kept)
        taken = {join for join, _ in ports.values()}
        keep = {each.name: ports.get(each.name, (0, 0)) for each in (*differs.retried, *again)}
        planned = await asyncio.to_thread(plan_members, wanted, started, new, taken, keep)
        write_gateway(wanted, self._directory.manifest)  # a full disk changes nothing
        self._plan = plan
        for each in planned:
            if each.local is not None and not self.board.has(each.local.name):
                self.board.add(_record(each.local))
        log.info("the gateway changes: %s", ", ".join(filter(None, (differs.words, _again_words(again)))))
        rolling = [each for each in planned if each.backend.name in self._kept or each.local is None]
        coming = [each for each in planned if each not in rolling]
        removing = (self._remove(served, member.name) for member in differs.removed)
        await asyncio.gather(*(self._renew(served, each) for each in coming), *removing)
        await self._roll(served, rolling)
        served.arrange([member.name for member in wanted.members()])

    async def _roll(self, served: ServedGateway, planned: Sequence[MemberPlan]) -> None:
        """Replace pipelines one after the other. If one doesn't come up, those behind it stay as they are."""
        waiting = sorted(planned, key=lambda each: each.local is not None)  # pipelines started elsewhere take no time
        for each in waiting:
            if each.local is not None:
                self.board.set_process(each.local.name, is_behind=True)
        for at, each in enumerate(waiting):
            if not await self._renew(served, each):
                left = [other.local.name for other in waiting[at + 1 :] if other.local is not None]
                for name in left:
                    self.board.set_process(name, detail=BEHIND)
                if left:
                    log.warning("%s did not come up, so these stay as they are: %s", each.backend.name, ", ".join(left))
                return

    async def _renew(self, served: ServedGateway, planned: MemberPlan) -> bool:
        """Take a pipeline behind the gateway, in the place of one of the same name if there is one.

        Returns whether it takes requests. If it cannot start, the one in whose place it is starts as it was before.
        """
        name = planned.backend.name
        is_again = name in self._kept
        if planned.local is not None and is_again:
            self.board.set_process(planned.local.name, detail=LEAVES)
        await served.add(planned.backend)
        await self._retire(served, name)
        if planned.local is None:
            self.board.remove(self._record_name(name))
            return True
        self.board.set_process(planned.local.name, is_behind=False)
        with contextlib.suppress(StartError):  # the board says why
            event = await self._begin(planned.local, at_start=False, is_again=is_again)
            return await served.until_ready(name) and "as_before" not in event
        served.leave(name)
        await self._retire(served, name, is_failed=True)
        return False

    async def _remove(self, served: ServedGateway, name: str) -> None:
        served.leave(name)
        await self._retire(served, name)
        self.board.remove(self._record_name(name))

    async def _retire(self, served: ServedGateway, name: str, *, is_failed: bool = False) -> None:
        """Let the leaving pipelines finish their requests, then end them."""
        await served.forget_leaving(name)
        if (kept := self._kept.pop(name, None)) is not None:
            await self._end(kept)
            if not is_failed:
                self.board.note_end(kept.child.name, HostState.STOPPED)

    def _record_name(self, member: str) -> str:
        return f"{self._plan.name}-{member}"

    # --- processes ----------------------------------------------------------------------------------------------------

    def _begin(
        self, pipeline: LocalPipeline, *, at_start: bool, is_again: bool = False
    ) -> asyncio.Future[dict[str, Any]]:
        """Start a pipeline and keep it alive; the future is done when it serves for the first time, or cannot.

        `is_again`: it ran until now, and does so again as it was before if it cannot start.
        """
        kept = _Kept(pipeline.member, self._child(pipeline), asyncio.get_running_loop().create_future(), at_start)
        if is_again:
            kept.child.arguments = _or_before(kept.child.arguments)
        self._kept[pipeline.member] = kept
        kept.task = asyncio.create_task(self._guarded(kept))
        return kept.first

    async def _end(self, kept: _Kept) -> None:
        kept.ending.set()
        await kept.child.stop(STOP_TIMEOUT_S)
        if kept.task is not None:
            await asyncio.wait({kept.task})

    def _child(self, pipeline: LocalPipeline) -> Child:
        writer = LogWriter(self._directory.log(pipeline.name))

        def on_line(_: str, text: str) -> None:
            writer.write(text)
            if self._echo is not None:
                self._echo(pipeline.name, text)

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "remote":
                self._emit(event)
            writer.write(json.dumps(event))

        return Child(pipeline.name, pipeline.arguments, on_line, on_event)

    async def _guarded(self, kept: _Kept) -> None:
        try:
            await self._keep(kept)
        except StartError as error:
            self._give_up(kept, error)
        except OSError as error:  # nobody reads what it reports
            self._fail(error)

    async def _keep(self, kept: _Kept) -> None:
        """Start a pipeline, and again when it ends."""
        child, history = kept.child, RestartHistory(RestartPolicy())
        loop = asyncio.get_running_loop()
        while not (self._stopping.is_set() or kept.ending.is_set()):
            event = await self._started(kept)
            if self._stopping.is_set() or kept.ending.is_set():
                return
            began_s = loop.time() if event is not None else 0.0
            if event is not None:
                self._serves(kept, event)
            await child.exited.wait()
            if self._stopping.is_set() or kept.ending.is_set():
                return
            cause = child.cause_of_death()
            ready_for_s = loop.time() - began_s if began_s else 0.0
            delay_s = history.died(ready_for_s, child.exit_code) if kept.first.done() else None
            if delay_s is None:
                self._give_up(kept, StartError(history.ended_because(cause) if kept.first.done() else cause))
                return
            child.arguments = _or_before(child.arguments)  # its manifest may have a mistake by now
            n_restarts = self.board[child.name].n_restarts + 1
            self.board.note_end(child.name, HostState.RESTARTING, detail=cause, n_restarts=n_restarts)
            log.warning("%s; starting it again in %.1f s", cause, delay_s)
            await set_within(kept.ending, delay_s)

    async def _started(self, kept: _Kept) -> dict[str, Any] | None:
        """Start a pipeline's process once it may be awake; return its report when it serves, None if it has ended."""
        child = kept.child
        async with self._served.starting(kept.member):
            if self._stopping.is_set() or kept.ending.is_set():
                return None
            await started(child)
            self.board.note_start(child.name, child.pid, detail="")
            with contextlib.suppress(StartError):
                event = await asyncio.shield(child.ready)
                await self._show_key(kept.member)
                return event
        return None

    async def _show_key(self, member: str) -> None:
        """Have the gateway show a pipeline that serves a key of its own: of its manifest of now, or of before."""
        try:
            key = await asyncio.to_thread(key_of_running, self._plan.started, member)
        except (RelaylineError, OSError) as error:
            log.warning("%s: %s", member, error)
        else:
            self._served.set_key(member, key)

    def _serves(self, kept: _Kept, event: dict[str, Any]) -> None:
        child, reason = kept.child, event.get("as_before", "")
        if reason:
            log.warning("%s %s%s", child.name, AS_BEFORE, reason)
        detail = f"{AS_BEFORE}{reason}" if reason else ""
        self.board.set_process(
            child.name, state=HostState.READY, address=event["url"], detail=detail, is_behind=bool(reason)
        )
        facts = {"event": "process", "name": child.name, "role": "pipeline", "pid": child.pid,
                 "address": event["url"], "restarts": self.board[child.name].n_restarts}  # fmt: skip
        # While clients are served nobody has to read it, as after the end of a pager or of `tee`.
        with contextlib.suppress(*((OSError,) if kept.first.done() or not kept.at_start else ())):
            self._emit(facts)
        if not kept.first.done():
            kept.first.set_result(event)

    def _give_up(self, kept: _Kept, error: StartError) -> None:
        """A pipeline cannot be kept alive, which leaves the others alone. The gateway ends if none is left."""
        log.warning("%s", error.message)
        self.board.note_end(kept.child.name, HostState.FAILED, detail=error.message)
        if not kept.first.done():
            kept.first.set_exception(error)
            kept.first.exception()
            return
        names = [self._record_name(member.name) for member in self._plan.manifest.members()]
        if all(self.board.has(name) and self.board[name].state is HostState.FAILED for name in names):
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)
            self._failed.exception()


def _record(pipeline: LocalPipeline) -> ProcessRecord:
    return ProcessRecord(pipeline.name, "pipeline", "localhost", HostState.WAITING)


def _written(path: Path) -> tuple[int, int] | None:
    """Return which file is at a path; None for none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _or_before(arguments: tuple[str, ...]) -> tuple[str, ...]:
    return arguments if OR_BEFORE in arguments else (*arguments, OR_BEFORE)


def _again_words(members: Sequence[Member]) -> str:
    return f"starts again {', '.join(member.name for member in members)}" if members else ""
