"""The gRPC face of joining: carries stages' reports to the roster, and hands each stage its order and its artifact."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import grpc.aio

from relayline.coordinator.engine.membership import Introduction
from relayline.coordinator.engine.roster import JoinedRoster
from relayline.coordinator.engine.whereabouts import whereabouts
from relayline.coordinator.joining.artifact_reader import read_chunks
from relayline.coordinator.joining.config import JoinConfig, engine_message
from relayline.coordinator.model.pipeline_file import PIPELINE_NAME, PipelineFile
from relayline.wire.common import bounds
from relayline.wire.common.errors import (
    ArtifactError,
    NotReadyError,
    ProtocolError,
    RelaylineError,
    StaleEpochError,
)
from relayline.wire.common.phase import HostState
from relayline.wire.common.process import first_of
from relayline.wire.common.texts import tidy
from relayline.wire.envelopes import messages
from relayline.wire.links import rpc
from relayline.wire.links.guard import caller, credential
from relayline.wire.links.refusals import peer_of
from relayline.wire.links.roles import Identity
from relayline.wire.links.security import PLAINTEXT, LinkSecurity
from relayline.wire.links.silence import Silence, silent_text
from relayline.wire.links.watch import beat, until_silent
from relayline.wire.pb.relayline.v1 import join_pb2 as pb

log = logging.getLogger("relayline.coordinator")

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

SERVICE = "relayline.v1.PipelineService"
TICKET_BYTES = 16
_STATES = {
    pb.ARTIFACT_PHASE_FETCHING: HostState.FETCHING,
    pb.ARTIFACT_PHASE_LOADING: HostState.LOADING,
}


@dataclasses.dataclass(slots=True)
class _Membership:
    """One open Join call. `replaced` ends it when the same stage comes back on another call."""

    ticket: int
    index: int
    secret: bytes
    replaced: asyncio.Event
    beats: bool  # whether it gives signs of life and takes ours
    owner: Identity | None = None
    silence: Silence = dataclasses.field(default_factory=Silence)
    fetching: bool = False


class JoinService:
    """All calls of relayline.v1.PipelineService."""

    def __init__(
        self,
        config: JoinConfig,
        directory: Path,
        file: PipelineFile,
        roster: JoinedRoster,
        security: LinkSecurity = PLAINTEXT,
    ) -> None:
        """`security` is that of links to the stages; its identity is what this coordinator's certificate states."""
        self._own = security.identity.uri if security.identity is not None else ""
        self._config, self._directory, self._file, self._roster = config, directory, file, roster
        self._security = security
        self._pipeline_json = (directory / PIPELINE_NAME).read_bytes()
        self._members: dict[int, _Membership] = {}  # by place, hence at most one per stage
        self._fetches = asyncio.Semaphore(config.fetches_max)
        self._closing = asyncio.Event()
        # A setting that cannot be said is the operator's mistake, to be told now and not to the first stage that asks.
        for index in range(len(config.stages)):
            self._order(index, b"")

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the generic handler to register with a server."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Join": grpc.stream_stream_rpc_method_handler(self.join, None, rpc.serialize),
                "Fetch": grpc.unary_stream_rpc_method_handler(self.fetch, rpc.parser(pb.FetchRequest), rpc.serialize),
            },
        )

    def close(self) -> None:
        """End every membership, telling the stages that the coordinator stops."""
        self._roster.is_closing = True
        self._closing.set()

    # --- membership ---------------------------------------------------------------------------------------------------

    async def join(self, requests: Any, context: Context) -> None:
        """Let one stage in, give it its order, and keep its place until the call ends."""
        try:
            member = self._admit(await _hello(context), peer_of(context.peer())[0])
        except RelaylineError as error:
            log.warning("stage refused", extra={"fields": {"from": context.peer(), "reason": error.message}})
            await rpc.abort(context, error)
        reason: RelaylineError = ProtocolError("it said goodbye")
        replaced, closing = asyncio.create_task(member.replaced.wait()), asyncio.create_task(self._closing.wait())
        ends: list[asyncio.Task[Any]] = [replaced, closing]
        beating: list[asyncio.Task[None]] = []
        try:
            await context.write(self._order(member.index, member.secret, beats=member.beats))
            reading = asyncio.create_task(self._read(context, member))
            ends.append(reading)
            if member.beats:
                ends.append(asyncio.create_task(until_silent(member.silence)))
                beating.append(asyncio.create_task(beat(context.write, pb.JoinResponse(beats=True))))
            await first_of(*ends)
            if reading.done():
                await reading
                return
            if closing.done():
                reason = NotReadyError("the coordinator is shutting down")
            elif replaced.done():
                reason = StaleEpochError("the same stage has joined anew")
            else:
                reason = StaleEpochError(silent_text("it"))
            await rpc.abort(context, reason)
        except ProtocolError as error:
            reason = error
            await rpc.abort(context, error)
        except asyncio.CancelledError:
            reason = ProtocolError("the connection to the stage was lost")
            raise
        finally:
            self._release(member, reason.message)
            for task in (*ends, *beating):
                task.cancel()
            await asyncio.gather(*ends, *beating, return_exceptions=True)

    def _admit(self, hello: pb.StageHello, host: str) -> _Membership:
        if self._closing.is_set():
            raise NotReadyError("the coordinator is shutting down")
        facts = hello.host
        who = Introduction(
            hello.name,
            hello.process_id,
            hello.protocol_version,
            hello.software_version,
            host,
            facts.hostname,
            facts.system,
            facts.n_cores,
            facts.memory_bytes,
            credential(),
        )
        ticket = self._roster.join(who)
        place = self._roster.place_of(ticket)
        assert place is not None
        earlier = self._members.get(place.index)
        if earlier is not None:
            earlier.replaced.set()
        secret = secrets.token_bytes(TICKET_BYTES)
        member = _Membership(ticket, place.index, secret, asyncio.Event(), hello.beats, caller())
        self._members[place.index] = member
        return member

    def _release(self, member: _Membership, reason: str) -> None:
        self._roster.leave(member.ticket, reason)
        if self._members.get(member.index) is member:
            del self._members[member.index]

    def _order(self, index: int, secret: bytes, *, beats: bool = False) -> pb.JoinResponse:
        stage, settings = self._file.stages[index], self._config.stages[index]
        path = str((self._directory / stage.file).resolve()) if self._config.offer_path else ""
        return pb.JoinResponse(
            stage_index=index,
            stage_count=len(self._file.stages),
            pipeline_id=self._file.pipeline_id,
            artifact=pb.ArtifactFile(file=stage.file, size_bytes=stage.size_bytes, sha256=stage.sha256, path=path),
            pipeline_json=self._pipeline_json,
            engine=engine_message(settings.engine),
            telemetry=settings.telemetry.message(),
            ticket=secret,
            beats=beats,
            coordinator=self._own,
            listen_port=settings.listen_port,
        )

    async def _read(self, context: Context, member: _Membership) -> None:
        ticket = member.ticket
        while (report := _parse(await context.read())) is not None:
            member.silence.heard()
            self._roster.heard(ticket)
            kind = report.WhichOneof("report")
            if kind == "progress" and report.progress.phase in _STATES:
                state, progress = _STATES[report.progress.phase], report.progress
                self._roster.progress(ticket, state, progress.done_bytes, progress.total_bytes)
            elif kind == "serving" and 0 < report.serving.port <= 65_535:
                address = await self._whereabouts(member, report.serving, peer_of(context.peer())[0])
                self._roster.serving(ticket, address, report.serving.instance_id)
            elif kind == "alive":
                pass
            elif kind == "failure":
                self._roster.failed(ticket, report.failure.message[: bounds.ERROR_TEXT_BYTES_MAX])
            else:
                raise ProtocolError(f"a stage reported {kind or 'nothing'} where that makes no sense")

    async def _whereabouts(self, member: _Membership, serving: pb.StageServing, seen: str) -> str:
        name = self._config.stages[member.index].name
        address, line = await whereabouts(name, serving.host, seen, serving.port, self._security, member.owner)
        if line:
            log.warning("%s", line)
        return address

    # --- artifacts ----------------------------------------------------------------------------------------------------

    async def fetch(self, request: pb.FetchRequest, context: Context) -> None:
        """Send the caller's own artifact from an offset on."""
        try:
            member = self._member(request)
            stage = self._file.stages[member.index]
            member.fetching = True
            try:
                chunks = read_chunks(self._directory / stage.file, request.offset, stage.size_bytes)
                async with self._fetches, contextlib.aclosing(chunks):
                    async for offset, data in chunks:
                        if self._members.get(member.index) is not member or self._closing.is_set():
                            raise NotReadyError("this membership has ended")
                        await context.write(pb.FetchResponse(offset=offset, data=data))
            finally:
                member.fetching = False
        except RelaylineError as error:
            await rpc.abort(context, error)

    def _member(self, request: pb.FetchRequest) -> _Membership:
        """Return whose ticket this is. Nothing in the request names a file, so nothing else can be had."""
        for member in self._members.values():
            if secrets.compare_digest(member.secret, request.ticket) and member.owner == caller():
                size_bytes = self._file.stages[member.index].size_bytes
                if request.offset > size_bytes:
                    raise ArtifactError(f"offset {request.offset} is beyond the artifact's {size_bytes} bytes")
                if member.fetching:
                    raise NotReadyError("this stage's artifact is already being sent")
                return member
        raise StaleEpochError("the ticket belongs to no member of this pipeline; join first")


async def _hello(context: Context) -> pb.StageHello:
    try:
        async with asyncio.timeout(bounds.HANDSHAKE_TIMEOUT_S):
            report = _parse(await context.read())
    except TimeoutError as error:
        raise ProtocolError("no introduction came on this membership") from error
    if report is None or report.WhichOneof("report") != "hello":
        raise ProtocolError("a membership begins with an introduction")
    return report.hello


def _parse(message: Any) -> pb.JoinRequest | None:
    """Read one report; None at the end of the stream. Raises ProtocolError."""
    if not isinstance(message, bytes):
        return None
    report = messages.read(pb.JoinRequest, message, "report", who="a stage")
    tidy(report, bounds.PEER_TEXT_CHARS_MAX if report.HasField("failure") else bounds.PEER_NAME_CHARS_MAX)
    return report
