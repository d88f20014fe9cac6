"""The supervisor of one pipeline: starts its processes in order, starts them again when they die, ends them in order.

The coordinator comes first, because it gives stages their layers; then this machine's stages, the last layers first.
Stages of other hosts join when a user starts them there. The coordinator is ready once all of them are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from relayline.deploy.launch.board import Board
from relayline.deploy.launch.child import Child, started
from relayline.deploy.launch.here import reached_by
from relayline.deploy.launch.invitations import has_joined, invite
from relayline.deploy.launch.inviting import join_line
from relayline.deploy.launch.launch_plan import LaunchPlan, LocalStage, RemoteStage
from relayline.deploy.launch.log_files import LogWriter
from relayline.deploy.launch.process_id import identify, send_signal
from relayline.deploy.launch.restarts import RestartHistory, RestartPolicy
from relayline.deploy.launch.state import NOT_SEEN, ProcessRecord, StateDir
from relayline.deploy.launch.waiting import RESTING, Waiting
from relayline.deploy.models.mend import Mend, nothing_to_mend
from relayline.wire.common import bounds
from relayline.wire.common.errors import StartError
from relayline.wire.common.logs import PRINTED
from relayline.wire.common.phase import HostState, Phase
from relayline.wire.common.process import first_of
from relayline.wire.common.tasks import set_within
from relayline.wire.links.join_code import code_line
from relayline.wire.links.security import address_of, host_of, is_loopback, port_of, reached_at

log = logging.getLogger("relayline.up")

STAGE_STOP_TIMEOUT_S = 10.0
COORDINATOR_STOP_TIMEOUT_S = bounds.DRAIN_TIMEOUT_S + STAGE_STOP_TIMEOUT_S
COORDINATOR = "coordinator"

Emit = Callable[[dict[str, Any]], None]


class _Kept:
    """One process of this machine over all its lives."""

    def __init__(self, child: Child, policy: RestartPolicy, writer: LogWriter) -> None:
        self.child, self.history, self.log = child, RestartHistory(policy), writer
        self._settled_s: float | None = None

    def begins(self) -> None:
        """A process starts."""
        self._settled_s = None

    def settles(self) -> None:
        """It is ready, or rests: a spare, and a stage that comes back asleep, may not serve for days."""
        if self._settled_s is None:
            self._settled_s = time.monotonic()

    def settled_for_s(self) -> float:
        """Return how long it has been ready or at rest, 0 where it never was."""
        return time.monotonic() - self._settled_s if self._settled_s is not None else 0.0


class Supervisor:
    """Runs one LaunchPlan.

    Event loop only; its owner holds the lock of `directory`. `mend` checks the split before a dead stage is restarted,
    and returns whether its files are whole. `emit` gets events: `process` (one became ready), `remote` (a command to
    run on another host), `loading` (stages start here), `waiting` and `fetch` (see Waiting), `ready`.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        directory: StateDir,
        emit: Emit,
        *,
        policy: RestartPolicy | None = None,
        echo: Callable[[str, str], None] | None = None,
        mend: Mend = nothing_to_mend,
    ) -> None:
        self.plan, self._mend = plan, mend
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._emit, self._echo, self._policy = emit, echo, policy or RestartPolicy()
        self._directory = directory
        me = identify(os.getpid())
        assert me is not None, "this process runs"
        self.board = Board(directory, plan.name, str(plan.manifest), me, _records(plan), plan.certificate)
        self._listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        arguments = self._serve_arguments(plan.http, plan.join, plan.enrol)
        self._coordinator = self._kept(COORDINATOR, arguments, self._on_event)
        self._waiting = Waiting([stage.name for stage in plan.stages], tells_members=bool(plan.remote))
        self._stages: dict[str, _Kept] = {}
        self._remote_processes: dict[str, str] = {}  # stage of another host -> the incarnation name of its last process

    # --- start --------------------------------------------------------------------------------------------------------

    async def start(self) -> dict[str, Any]:
        """Start everything and wait until the pipeline serves; returns the ready event. Raises StartError."""
        self._keep(self._coordinator)
        await first_of(self._listening, self.failed)
        if self.failed.done():
            self.failed.result()
        # Never the address that it listens on, which may be every interface: certificates are for names.
        join = address_of(self.plan.advertised_host, port_of(self._listening.result()))
        for stage in reversed(self.plan.local):
            kept = self._kept(stage.name, self._stage_arguments(stage, join), None)
            self._stages[stage.name] = kept
            self._keep(kept)
        if self._stages and not self.plan.remote:  # otherwise it waits for hosts, and says so
            self._emit({"event": "loading", "stages": list(self._stages), "message": _loading(len(self._stages))})
        for remote in self.plan.remote:
            authority = self.plan.authority
            again = authority is not None and await asyncio.to_thread(has_joined, authority, remote.name, remote.host)
            command, bring, short = await self._remote_command(remote, join)
            self.board.set_process(remote.name, command=command, has_joined=again)
            self._emit({"event": "remote", "name": remote.name, "host": remote.host, "command": command,
                        "short": short, "bring": bring, "again": again})  # fmt: skip
        await first_of(self._ready, self.failed)
        if self.failed.done():
            self.failed.result()
        return self._ready.result()

    def reread_keys(self) -> None:
        """Have the coordinator read its API keys again."""
        if (process := self.board[COORDINATOR].process) is not None:
            send_signal(process, signal.SIGHUP)

    def stage(self, index: int) -> Child:
        """Return a stage of this machine, in layer order. Raises KeyError before it was started."""
        return self._stages[self.plan.local[index].name].child

    def take_on(self, stages: Sequence[LocalStage | RemoteStage]) -> None:
        """Start those of these stages that are new, as far as they are to run here."""
        if not self._listening.done() or self._stopping.is_set():
            return
        join = address_of(self.plan.advertised_host, port_of(self._listening.result()))
        for stage in stages:
            record = _record(stage)
            if not self.board.has(stage.name):
                self.board.add(record)
            elif self.board[stage.name].host != record.host:  # the coordinator reported it first
                self.board.set_process(stage.name, host=record.host)
            if isinstance(stage, LocalStage) and stage.name not in self._stages:
                log.info("one more stage: %s", stage.name)
                self._stages[stage.name] = self._kept(stage.name, self._stage_arguments(stage, join), None)
                self._keep(self._stages[stage.name])

    async def _remote_command(self, remote: RemoteStage, join: str) -> tuple[str, str, str]:
        """Return the command to run on another host, the files to copy there first, and the command's short form."""
        if self.plan.authority is None:
            command = ("relayline", "stage", "--join", join, "--name", remote.name, *remote.arguments)
            return shlex.join(command), " and ".join(map(str, remote.bring)), ""
        address, is_relayed = self.board.state.enrol, remote.is_relayed
        coded = await asyncio.to_thread(invite, self.plan.authority, remote.name, remote.host, is_relayed=is_relayed)
        short = code_line(coded.code, address, is_announced=self.plan.is_announced)
        return join_line(address, coded.token, is_relayed=is_relayed), "", short

    def _serve_arguments(self, http: tuple[str, int], join: tuple[str, int], enrol: tuple[str, int]) -> tuple[str, ...]:
        enrolling: tuple[str, ...] = ()
        if self.plan.authority is not None:
            enrolling = ("--enrol-listen", address_of(*enrol), "--authority", str(self.plan.authority))
        return ("serve", *self.plan.serve_arguments, "--http", address_of(*http), "--join-listen", address_of(*join),
                *enrolling, "--json", "--exit-with-stdin")  # fmt: skip

    def _stage_arguments(self, stage: LocalStage, join: str) -> tuple[str, ...]:
        return ("stage", "--join", join, "--name", stage.name, *stage.arguments, "--json", "--exit-with-stdin")

    def _kept(self, name: str, arguments: tuple[str, ...], on_event: Emit | None) -> _Kept:
        writer = LogWriter(self._directory.log(name))

        def on_line(_: str, text: str) -> None:
            writer.write(text)
            if self._echo is not None:
                self._echo(name, text)

        return _Kept(Child(name, arguments, on_line, on_event), self._policy, writer)

    # --- life ---------------------------------------------------------------------------------------------------------

    def _keep(self, kept: _Kept) -> None:
        task = asyncio.create_task(self._keep_alive(kept))
        task.add_done_callback(self._on_task_done)
        self._tasks.append(task)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._fail(error)

    async def _keep_alive(self, kept: _Kept) -> None:
        name = kept.child.name
        while True:
            await self._live(kept)
            ready_for_s = kept.settled_for_s()
            if self._stopping.is_set():
                return
            cause = kept.child.cause_of_death()
            kept.log.write(f"--- {cause}")
            is_damaged = kept is not self._coordinator and not await self._mend()
            delay_s = self._delay(kept, ready_for_s, is_damaged=is_damaged)
            if delay_s is None:
                self.board.note_end(name, HostState.FAILED, detail=cause)
                self._fail(StartError(kept.history.ended_because(cause)))
                return
            n_restarts = self.board[name].n_restarts + 1
            self.board.note_end(name, HostState.RESTARTING, detail=cause, n_restarts=n_restarts)
            log.warning("%s; starting it again in %.1f s", cause, delay_s)
            if await set_within(self._stopping, delay_s):
                return

    def _delay(self, kept: _Kept, ready_for_s: float, *, is_damaged: bool) -> float | None:
        """Return the delay before the next start, None for no start."""
        if kept is self._coordinator and not self._ready.done():
            return None  # a taken port or a bad model at the start is for the user to see now
        return kept.history.died(ready_for_s, kept.child.exit_code, is_damaged=is_damaged)

    async def _live(self, kept: _Kept) -> None:
        """Run one life of a process."""
        child = kept.child
        kept.begins()
        await started(child)
        self.board.note_start(child.name, child.pid, address="")
        if self._stopping.is_set():
            await child.stop(STAGE_STOP_TIMEOUT_S)  # it was still starting when the others were stopped
            return
        with contextlib.suppress(StartError):
            event = await asyncio.shield(child.ready)
            kept.settles()
            self._on_ready(child, event)
        await child.exited.wait()

    def _on_ready(self, child: Child, event: dict[str, Any]) -> None:
        address = reached_at(event.get("address", ""), self.plan.advertised_host)
        address = address or self._reachable_url(event.get("url", ""))
        metrics = event.get("metrics") or ""
        record = self.board.set_process(child.name, state=HostState.READY, address=address, metrics=metrics, detail="")
        facts = {"event": "process", "name": child.name, "role": record.role, "pid": child.pid, "address": address,
                 "restarts": record.n_restarts, "layers": event.get("layers")}  # fmt: skip
        # While clients are served nobody has to read it, as after the end of a pager or of `tee`.
        with contextlib.suppress(*((OSError,) if self._ready.done() else ())):
            self._emit(facts)
        if child is self._coordinator.child and not self._ready.done():
            self.board.set_phase(Phase.READY)
            facts = {"stages": len(self.plan.stages), "needs_key": self.plan.needs_key}
            self._ready.set_result(event | facts | self._for_other_hosts(event["url"]))

    def _for_other_hosts(self, url: str) -> dict[str, str]:
        """Return the URL under which clients on other hosts reach the API, empty for none; {} without such hosts."""
        if not self.plan.remote:
            return {}
        reached = self._reachable_url(url)
        return {"clients": "" if is_loopback(host_of(reached.partition("://")[2])) else reached}

    def _reachable_url(self, url: str) -> str:
        """Return the URL to connect to for one that listens, empty for none."""
        scheme, _, address = url.partition("://")
        host = reached_by(host_of(address), self.plan.advertised_host)
        return f"{scheme}://{reached_at(address, host)}" if address else ""

    def _on_event(self, event: dict[str, Any]) -> None:
        """Take the coordinator's report of itself and its stages."""
        if event["event"] in ("joinable", "surveying"):
            # It comes back where clients and stages look for it. During a survey there is no API yet.
            url = event.get("url", "")
            http = (self.plan.http[0], port_of(url)) if url else self.plan.http
            join = (self.plan.join[0], port_of(event["join"]))
            enrol = (self.plan.enrol[0], port_of(event.get("enrol") or ":0"))
            enrol_address = address_of(self.plan.advertised_host, enrol[1]) if enrol[1] else ""
            self.board.set_addresses(url, event["join"], enrol_address)
            self._coordinator.child.arguments = self._serve_arguments(http, join, enrol)
            if not self._listening.done():
                self._listening.set_result(event["join"])
        elif event["event"] in ("planned", "splitting"):
            self._emit(event)
        elif event["event"] == "stage":
            if not self.board.has(event["name"]):  # it was invited while the pipeline served
                self.board.add(ProcessRecord(event["name"], "stage", event["host"] or NOT_SEEN, HostState.WAITING))
            self._on_stage_event(event)
            for found in self._waiting.events_for(event, time.monotonic()):
                self._emit(found)

    def _on_stage_event(self, event: dict[str, Any]) -> None:
        name, address = event["name"], event.get("address") or ""
        was, known = self.board[name].state, HostState(event["state"])
        if name in self._stages:
            # Stages here are seen at first hand; the coordinator only knows a starting stage's present work.
            at_work = (HostState.MEASURING, HostState.FETCHING, HostState.LOADING)
            if (known in at_work and was in (HostState.STARTING, *at_work)) or known in RESTING:
                self.board.set_process(name, state=known)
                if known in RESTING:
                    self._stages[name].settles()
            elif was in RESTING and known in (*at_work, HostState.READY):  # it holds layers again
                self.board.set_process(name, state=known, address=address)
            elif was in at_work and known is HostState.READY and self._stages[name].child.ready.done():
                self.board.set_process(name, state=known, address=address)  # it was ready before, with other layers
            return
        if known is HostState.WAITING and was is not HostState.WAITING:
            known = HostState.LOST  # a restarted coordinator has not seen it yet
        details = {
            HostState.WAITING: "has not joined yet",
            HostState.LOST: "start it there again if it has ended",
        }
        changes = {"state": known, "address": address, "detail": details.get(known, "")}
        if address and self.board[name].host == NOT_SEEN:  # its host was unknown until now
            changes["host"] = host_of(address)
        n_restarts = self.board[name].n_restarts + self._is_new_process(name, event.get("process") or "")
        self.board.set_process(name, **changes, n_restarts=n_restarts)
        if known is HostState.READY and was is not HostState.READY:
            self._emit({"event": "process", "name": name, "role": "stage", "pid": 0, "address": address,
                        "restarts": n_restarts, "layers": event.get("layers")})  # fmt: skip
        elif known is HostState.LOST and was is not HostState.LOST and not self._stopping.is_set():
            why = f" ({failure})" if (failure := event.get("failure")) else ""
            log.warning("stage %s is lost%s; waiting for it to join again", name, why)

    def _is_new_process(self, name: str, process_id: str) -> bool:
        """Return whether another process holds the place of a stage of another host than the one before."""
        before = self._remote_processes.get(name, "")
        self._remote_processes[name] = process_id or before
        return before not in ("", self._remote_processes[name])

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # a waiting caller gets the error; without one there is no error

    # --- end ----------------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Drain the coordinator, then end the stages; no process is left behind. Stores how it ended."""
        self._stopping.set()
        self.board.set_phase(Phase.DRAINING)
        await self._coordinator.child.stop(COORDINATOR_STOP_TIMEOUT_S)
        self._gone(COORDINATOR)
        await asyncio.gather(*(kept.child.stop(STAGE_STOP_TIMEOUT_S) for kept in self._stages.values()))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for name, kept in self._stages.items():
            self._gone(name)
            kept.log.close()
        self._coordinator.log.close()
        error = self.failed.exception() if self.failed.done() else None
        self.board.set_phase(Phase.FAILED if error else Phase.STOPPED, str(error or ""))

    def _gone(self, name: str) -> None:
        if self.board[name].state is not HostState.FAILED:
            self.board.note_end(name, HostState.STOPPED)


async def supervise(supervisor: Supervisor, stopping: asyncio.Event, emit: Emit, *others: asyncio.Event) -> None:
    """Start, tell that it is ready, watch, end at one of the events. Raises StartError."""
    stop = asyncio.ensure_future(first_of(*(asyncio.ensure_future(event.wait()) for event in (stopping, *others))))
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


def _loading(n_stages: int) -> str:
    what = "1 stage loads its layers" if n_stages == 1 else f"{n_stages} stages load their layers"
    return f"{what}; the first start of a model takes longer, because stages measure their speed"


def _records(plan: LaunchPlan) -> tuple[ProcessRecord, ...]:
    coordinator = ProcessRecord(COORDINATOR, "coordinator", "localhost", HostState.WAITING)
    return (coordinator, *map(_record, plan.stages))


def _record(stage: LocalStage | RemoteStage) -> ProcessRecord:
    if isinstance(stage, LocalStage):
        return ProcessRecord(stage.name, "stage", "localhost", HostState.WAITING)
    return ProcessRecord(stage.name, "stage", stage.host, HostState.WAITING, detail="not started there yet")
