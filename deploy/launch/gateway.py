"""`relayline up` of a gateway's manifest: every pipeline as an `up` of its own, and the address before them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from relayline.coordinator.gateway.links import BackendConfig
from relayline.coordinator.gateway.serve import GatewayConfig, serving_gateway
from relayline.deploy.launch.backoff import RestartHistory, RestartPolicy
from relayline.deploy.launch.board import Board
from relayline.deploy.launch.child import Child
from relayline.deploy.launch.control import first_key
from relayline.deploy.launch.leftovers import end_leftovers
from relayline.deploy.launch.log_files import SUPERVISOR, LogWriter
from relayline.deploy.launch.ports import LOCALHOST, port_problem
from relayline.deploy.launch.process_id import identify
from relayline.deploy.launch.run import log_file
from relayline.deploy.launch.state import ProcessRecord, StateDir, register
from relayline.deploy.launch.supervisor import COORDINATOR_STOP_TIMEOUT_S, STAGE_STOP_TIMEOUT_S, Emit
from relayline.deploy.manifest import Manifest, load_manifest
from relayline.deploy.manifest.gateway import GatewayManifest, Member
from relayline.deploy.manifest.model import ENROL_PORT, JOIN_PORT
from relayline.wire.common.errors import StartError, UsageError
from relayline.wire.common.logs import PRINTED
from relayline.wire.common.phase import HostState, Phase
from relayline.wire.common.process import first_of, run
from relayline.wire.links.security import address_of

log = logging.getLogger("relayline.up")

STOP_TIMEOUT_S = COORDINATOR_STOP_TIMEOUT_S + 2 * STAGE_STOP_TIMEOUT_S  # of a whole pipeline: its drain, its stages
PORTS_APART = 100  # join ports of two pipelines whose stages are on other hosts, where the manifests name none

Echo = Callable[[str, str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class LocalPipeline:
    """One pipeline that is started here."""

    name: str
    """Of the process, the pipeline and its state: the gateway's name, then its own."""
    arguments: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class GatewayPlan:
    """What `up` starts for a gateway."""

    name: str
    source: Path
    config: GatewayConfig
    pipelines: tuple[LocalPipeline, ...]


def plan_gateway(
    manifest: GatewayManifest, source: Path, name: str, state_dir: Path | None, log_flags: Sequence[str] = ()
) -> GatewayPlan:
    """Return what is to be started under this name.

    Raises UsageError for manifests and files that cannot be used, OSError for those that cannot be read.
    """
    backends, pipelines, n_apart = [], [], 0
    for member in manifest.members():
        if member.manifest is None:
            backends.append(_elsewhere(manifest, member))
            continue
        inner = load_manifest(member.manifest)
        port = _free_port()
        changes = _changes(inner, member, n_apart)
        n_apart += "coordinator.joinPort" in changes
        own_name = f"{name}-{member.name}"
        place = ("--state-dir", str((state_dir / "pipelines" / member.name).absolute())) if state_dir else ()
        arguments = ("up", str(member.manifest.absolute()), "--name", own_name, "--http", address_of(LOCALHOST, port),
                     "--change", json.dumps(changes), *place, "--json", "--exit-with-stdin", *log_flags)  # fmt: skip
        pipelines.append(LocalPipeline(own_name, arguments))
        backends.append(BackendConfig(member.name, f"http://{address_of(LOCALHOST, port)}", _key_of(inner)))
    spec = manifest.spec
    tls = spec.http.tls
    config = GatewayConfig(
        tuple(backends),
        spec.http.host,
        spec.http.port,
        manifest.resolve(spec.api_keys_file) if spec.api_keys_file is not None else None,
        (manifest.resolve(tls.cert_file), manifest.resolve(tls.key_file)) if tls is not None else None,
        spec.allow_hosts,
    )
    return GatewayPlan(name, source, config, tuple(pipelines))


def _elsewhere(manifest: GatewayManifest, member: Member) -> BackendConfig:
    place = member.place
    assert place.url is not None
    key = _read_key(manifest.resolve(place.key_file)) if place.key_file is not None else ""
    ca_file = str(manifest.resolve(place.ca_file)) if place.ca_file is not None else ""
    return BackendConfig(member.name, place.url.rstrip("/").removesuffix("/v1"), key, ca_file)


def _changes(inner: Manifest, member: Member, n_apart: int) -> dict[str, Any]:
    """Return what is different in a pipeline behind a gateway: its stages, and what only one of them can have."""
    changes: dict[str, Any] = {"coordinator.http.tls": None}
    if member.stages is not None:
        changes["stages"] = [
            stage.model_dump(mode="json", by_alias=True, exclude_unset=True) for stage in member.stages
        ]
    is_apart = member.stages is not None or not inner.all_local
    coordinator = inner.spec.coordinator
    if is_apart and not (coordinator.join_port or coordinator.enrol_port):
        changes["coordinator.joinPort"] = JOIN_PORT + n_apart * PORTS_APART
        changes["coordinator.enrolPort"] = ENROL_PORT + n_apart * PORTS_APART
    return changes


def _key_of(inner: Manifest) -> str:
    path = inner.spec.coordinator.api_keys_file
    return _read_key(inner.resolve(path)) if path is not None else ""


def _read_key(path: Path) -> str:
    try:
        return first_key(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"API key file {path} cannot be read: {getattr(error, 'strerror', error)}") from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOCALHOST, 0))
        return int(probe.getsockname()[1])


def launch_gateway(plan: GatewayPlan, directory: StateDir, emit: Emit, *, echo: Echo | None = None) -> None:
    """Run a gateway and its pipelines until SIGINT or SIGTERM.

    Raises UsageError and StartError before anything is started, StartError when a pipeline cannot be kept alive.
    """
    with directory.locked(plan.name), log_file(directory.log(SUPERVISOR)):
        register(directory.path)
        end_leftovers(directory.load())
        config = plan.config
        if config.port and (problem := port_problem(config.host, config.port)) is not None:
            raise StartError(f"the HTTP API: {problem}; end what holds it or name another port")
        directory.keys.unlink(missing_ok=True)
        if config.api_keys_file is not None:
            directory.keys.write_bytes(os.fsencode(config.api_keys_file.absolute()))

        async def main(stopping: asyncio.Event) -> None:
            await _Keeper(plan, directory, emit, echo).run(stopping)

        run(main)


class _Keeper:
    """Keeps the pipelines of one gateway alive, and the gateway itself in this process."""

    def __init__(self, plan: GatewayPlan, directory: StateDir, emit: Emit, echo: Echo | None) -> None:
        self._plan, self._directory, self._emit, self._echo = plan, directory, emit, echo
        me = identify(os.getpid())
        assert me is not None, "this process runs"
        records = tuple(ProcessRecord(each.name, "pipeline", "localhost", HostState.WAITING) for each in plan.pipelines)
        self.board = Board(directory, plan.name, str(plan.source), me, records)
        self._stopping = asyncio.Event()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping`."""
        reason, stop = "", asyncio.ensure_future(stopping.wait())
        children = {each.name: self._child(each) for each in self._plan.pipelines}
        keeping: list[asyncio.Task[None]] = []
        try:
            async with serving_gateway(self._plan.config) as url:
                self.board.set_addresses(url, "")
                first = {name: asyncio.get_running_loop().create_future() for name in children}
                keeping = [asyncio.create_task(self._kept(child, first[name])) for name, child in children.items()]
                ready = asyncio.gather(*first.values())
                await first_of(ready, self._failed, stop)
                if not (self._failed.done() or stop.done()):
                    self._ready(url, [future.result() for future in first.values()])
                    await first_of(self._failed, stop)
                ready.cancel()
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
            await asyncio.gather(*(child.stop(STOP_TIMEOUT_S) for child in children.values()))
            await asyncio.gather(*keeping, return_exceptions=True)
            for name in children:
                self.board.set_process(name, state=HostState.STOPPED, pid=0, start_ticks=0)
            self.board.set_phase(Phase.FAILED if reason else Phase.STOPPED, reason)

    def _ready(self, url: str, events: Sequence[dict[str, Any]]) -> None:
        self.board.set_phase(Phase.READY)
        models = list(dict.fromkeys(event["model"] for event in events))
        needs_key = self._plan.config.api_keys_file is not None
        facts = {"event": "ready", "role": "gateway", "url": url, "models": models, "needs_key": needs_key}
        if models:
            facts |= {"model": models[0], "chat": events[0].get("chat", True)}
        self._emit(facts)
        log.info("ready: %s", url, extra=PRINTED)

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

    async def _kept(self, child: Child, first: asyncio.Future[dict[str, Any]]) -> None:
        try:
            await self._keep(child, first)
        except OSError as error:
            self._fail(f"a process cannot be started: {error}")

    async def _keep(self, child: Child, first: asyncio.Future[dict[str, Any]]) -> None:
        """Start a pipeline, and again when it ends; `first` is done when it serves for the first time."""
        history = RestartHistory(RestartPolicy())
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            await child.start()
            process = identify(child.pid)
            ticks = process.start_ticks if process is not None else 0
            self.board.set_process(
                child.name, state=HostState.STARTING, pid=child.pid if ticks else 0, start_ticks=ticks
            )
            began_s = 0.0
            with contextlib.suppress(StartError):
                event = await asyncio.shield(child.ready)
                began_s = loop.time()
                self.board.set_process(child.name, state=HostState.READY, address=event["url"], detail="")
                self._emit({"event": "process", "name": child.name, "role": "pipeline", "pid": child.pid,
                            "address": event["url"], "restarts": self.board[child.name].n_restarts})  # fmt: skip
                if not first.done():
                    first.set_result(event)
            await child.exited.wait()
            if self._stopping.is_set():
                return
            cause = child.cause_of_death()
            ready_for_s = loop.time() - began_s if began_s else 0.0
            delay_s = history.died(ready_for_s, child.exit_code) if first.done() else None
            if delay_s is None:
                self._fail(history.given_up(cause) if first.done() else cause)
                return
            n_restarts = self.board[child.name].n_restarts + 1
            self.board.set_process(
                child.name, state=HostState.RESTARTING, pid=0, start_ticks=0, detail=cause, n_restarts=n_restarts
            )
            log.warning("%s; starting it again in %.1f s", cause, delay_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()

    def _fail(self, reason: str) -> None:
        if not self._failed.done():
            self._failed.set_exception(StartError(reason))
            self._failed.exception()
