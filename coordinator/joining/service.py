"""The gRPC face of joining: carries stages' reports to the roster, and hands each stage its order and its artifact."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

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
    pb.ARTIFACT_PHASE_MEASURING: HostState.MEASURING,
}


@dataclasses.dataclass(slots=True)
class OpenMembership:
    """One open Join call. `replaced` ends it when the same stage comes back on another call."""

    ticket: int
    index: int
    secret: bytes
    replaced: asyncio.Event
    beats: bool  # whether it gives signs of life and takes ours
    moves: bool  # whether it takes orders of planned changes
    write: Callable[[pb.JoinResponse], Awaitable[None]]  # of its call, one message at a time
    owner: Identity | None = None
    silence: Silence = dataclasses.field(default_factory=Silence)
    fetching: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """A finished split on this machine's disk, with the very bytes of its description. Blocks while it is made."""

    directory: Path
    file: PipelineFile
    pipeline_json: bytes

    @classmethod
    def at(cls, directory: Path, file: PipelineFile) -> Split:
        """Return the split in a directory."""
        return cls(directory, file, (directory / PIPELINE_NAME).read_bytes())


class ChangeListener(Protocol):
    """Who hears what stages say of a planned change."""

    def prepared(self, number: int, index: int) -> None:
        """A stage is ready to switch."""

    def failed(self, number: int, why: str) -> None:
        """A stage cannot be."""

    def left(self, index: int) -> None:
        """A membership has ended, or the same stage began another."""


class MemberService(abc.ABC):
    """Memberships, whatever is ordered: carries introductions to the roster, signs of life both ways, and the end."""

    def __init__(self, config: JoinConfig, roster: JoinedRoster) -> None:
        self._config, self._roster = config, roster
        self._members: dict[int, OpenMembership] = {}  # by place, hence at most one per stage
        self._closing = asyncio.Event()

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
            member = self._admit(await _hello(context), peer_of(context.peer())[0], _one_by_one(context.write))
        except RelaylineError as error:
            log.warning("stage refused", extra={"fields": {"from": context.peer(), "reason": error.message}})
            await rpc.abort(context, error)
        reason: RelaylineError = ProtocolError("it said goodbye")
        is_in_order = False
        replaced, closing = asyncio.create_task(member.replaced.wait()), asyncio.create_task(self._closing.wait())
        ends: list[asyncio.Task[Any]] = [replaced, closing]
        beating: list[asyncio.Task[None]] = []
        try:
            await member.write(self._first_order(member))
            reading = asyncio.create_task(self._read(context, member))
            ends.append(reading)
            if member.beats:
                ends.append(asyncio.create_task(until_silent(member.silence)))
                beating.append(asyncio.create_task(beat(member.write, pb.JoinResponse(beats=True))))
            await first_of(*ends)
            if reading.done():
                await reading
                is_in_order = True
                return
            if closing.done():
                reason = self._reason_to_end()
            elif replaced.done():
                reason = StaleEpochError("the same stage has joined again")
            else:
                reason = StaleEpochError(silent_text("it"))
            await rpc.abort(context, reason)
        except (ProtocolError, NotReadyError) as error:
            reason = error
            await rpc.abort(context, error)
        except asyncio.CancelledError:
            reason = ProtocolError("the connection to the stage was lost")
            raise
        finally:
            self._release(member, reason.message, is_in_order=is_in_order)
            for task in (*ends, *beating):
                task.cancel()
            await asyncio.gather(*ends, *beating, return_exceptions=True)

    def _admit(
        self, hello: pb.StageHello, host: str, write: Callable[[pb.JoinResponse], Awaitable[None]]
    ) -> OpenMembership:
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
            memory_available_bytes=facts.memory_available_bytes,
            processor=facts.processor,
            engine_version=facts.engine_version,
            measures=hello.measures,
        )
        ticket = self._roster.join(who)
        place = self._roster.place_of(ticket)
        assert place is not None
        earlier = self._members.get(place.index)
        if earlier is not None:
            earlier.replaced.set()
            self._tell_left(place.index)
        secret = secrets.token_bytes(TICKET_BYTES)
        member = OpenMembership(ticket, place.index, secret, asyncio.Event(), hello.beats, hello.moves, write, caller())
        self._members[place.index] = member
        return member

    def _release(self, member: OpenMembership, reason: str, *, is_in_order: bool) -> None:
        self._roster.leave(member.ticket, reason, is_in_order=is_in_order)
        if self._members.get(member.index) is member:
            del self._members[member.index]
            self._tell_left(member.index)

    @abc.abstractmethod
    def _first_order(self, member: OpenMembership) -> pb.JoinResponse:
        """Return the answer to an introduction. Raises NotReadyError where the stage has to come again later."""

    @abc.abstractmethod
    async def _take(self, member: OpenMembership, report: pb.JoinRequest, context: Context) -> bool:
        """Take a report that is no sign of life and no failure; return whether it makes sense."""

    @abc.abstractmethod
    async def fetch(self, request: pb.FetchRequest, context: Context) -> None:
        """Send bytes from an offset on."""

    def _tell_left(self, index: int) -> None:  # noqa: B027 - most have nobody to tell
        """A membership has ended, or the same stage began another."""

    def _reason_to_end(self) -> RelaylineError:
        return NotReadyError("the coordinator is shutting down")

    def _member_of(self, request: pb.FetchRequest) -> OpenMembership:
        """Return whose ticket a request shows. Raises StaleEpochError."""
        for member in self._members.values():
            if secrets.compare_digest(member.secret, request.ticket) and member.owner == caller():
                return member
        raise StaleEpochError("the ticket belongs to no member of this pipeline; join first")

    async def _read(self, context: Context, member: OpenMembership) -> None:
        ticket = member.ticket
        while (report := _parse(await context.read())) is not None:
            member.silence.heard()
            self._roster.heard(ticket)
            kind = report.WhichOneof("report")
            if kind == "progress" and report.progress.phase in _STATES:
                state, progress = _STATES[report.progress.phase], report.progress
                self._roster.progress(ticket, state, progress.done_bytes, progress.total_bytes)
            elif kind == "alive":
                pass
            elif kind == "failure":
                self._roster.failed(ticket, report.failure.message[: bounds.ERROR_TEXT_BYTES_MAX])
            elif not await self._take(member, report, context):
                raise ProtocolError(f"a stage reported {kind or 'nothing'} where that makes no sense")


class JoinService(MemberService):
    """All calls of relayline.v1.PipelineService, of a pipeline that has its split."""

    def __init__(
        self,
        config: JoinConfig,
        directory: Path,
        file: PipelineFile,
        roster: JoinedRoster,
        security: LinkSecurity = PLAINTEXT,
    ) -> None:
        """`security` is that of links to the stages; its identity is what this coordinator's certificate states."""
        super().__init__(config, roster)
        self._own = security.identity.uri if security.identity is not None else ""
        self._security = security
        self._split = Split.at(directory, file)
        self._next: Split | None = None  # of a planned change, until the switch
        self.changes: ChangeListener | None = None
        self._fetches = asyncio.Semaphore(config.fetches_max)
        # A setting that cannot be said is the operator's mistake, to be told now and not to the first stage that asks.
        for index in range(len(config.stages)):
            self._order(index, b"")

    def _tell_left(self, index: int) -> None:
        if self.changes is not None:
            self.changes.left(index)

    def _first_order(self, member: OpenMembership) -> pb.JoinResponse:
        return self._order(member.index, member.secret, beats=member.beats)

    def _order(self, index: int, secret: bytes, *, beats: bool = False, split: Split | None = None) -> pb.JoinResponse:
        split = split or self._split
        stage, settings = split.file.stages[index], self._config.stages[index]
        path = str((split.directory / stage.file).resolve()) if self._config.offer_path else ""
        return pb.JoinResponse(
            stage_index=index,
            stage_count=len(split.file.stages),
            pipeline_id=split.file.pipeline_id,
            artifact=pb.ArtifactFile(file=stage.file, size_bytes=stage.size_bytes, sha256=stage.sha256, path=path),
            pipeline_json=split.pipeline_json,
            engine=engine_message(settings.engine),
            telemetry=settings.telemetry.message(),
            ticket=secret,
            beats=beats,
            coordinator=self._own,
            listen_port=settings.listen_port,
        )

    async def _take(self, member: OpenMembership, report: pb.JoinRequest, context: Context) -> bool:
        kind = report.WhichOneof("report")
        if kind == "serving" and 0 < report.serving.port <= 65_535:
            address = await self._whereabouts(member, report.serving, peer_of(context.peer())[0])
            self._roster.serving(member.ticket, address, report.serving.instance_id)
        elif kind == "prepared":
            self._on_prepared(member.index, report.prepared)
        else:
            return False
        return True

    async def _whereabouts(self, member: OpenMembership, serving: pb.StageServing, seen: str) -> str:
        name = self._config.stages[member.index].name
        address, line = await whereabouts(name, serving.host, seen, serving.port, self._security, member.owner)
        if line:
            log.warning("%s", line)
        return address

    # --- planned changes ----------------------------------------------------------------------------------------------

    @property
    def split(self) -> Split:
        """The split that the stages have, or are to have at once."""
        return self._split

    def unmovable(self) -> list[str]:
        """Return the names of stages that are not here, or take no orders of planned changes."""
        members = self._members
        return [
            stage.name
            for index, stage in enumerate(self._config.stages)
            if (member := members.get(index)) is None or not member.moves
        ]

    async def prepare(self, number: int, split: Split, keeps: Sequence[bool]) -> None:
        """Have every stage fetch and load its slice of another split, next to the one that it serves."""
        self._next = split
        for index, keep in enumerate(keeps):
            change = pb.LayerChange(number=number, step=pb.LAYER_CHANGE_STEP_PREPARE, keeps=keep)
            if (member := self._members.get(index)) is not None:
                order = self._order(index, member.secret, split=split)
                order.change.CopyFrom(change)
                await self._say(member, order)

    async def drop(self, number: int) -> None:
        """Have every stage drop its prepared slice."""
        self._next = None
        await self._say_all(pb.LayerChange(number=number, step=pb.LAYER_CHANGE_STEP_DROP))

    def switch(self) -> None:
        """From now on the prepared split is the one that stages have: also those that join later."""
        assert self._next is not None
        self._split, self._next = self._next, None
        self._roster.switching()

    async def tell_switch(self, number: int) -> None:
        """Notify the members. A member that cannot be reached, or had not prepared, joins again and gets its order
        then.
        """
        await self._say_all(pb.LayerChange(number=number, step=pb.LAYER_CHANGE_STEP_SWITCH))

    async def _say_all(self, change: pb.LayerChange) -> None:
        members = list(self._members.values())
        await asyncio.gather(*(self._say(member, pb.JoinResponse(change=change)) for member in members))

    async def _say(self, member: OpenMembership, order: pb.JoinResponse) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            await member.write(order)  # else its call has ended, of which its reader tells

    def _on_prepared(self, index: int, report: pb.StagePrepared) -> None:
        if self.changes is None:
            return
        if report.HasField("failure"):
            name = self._config.stages[index].name
            self.changes.failed(report.change, f"{name}: {report.failure.message[: bounds.ERROR_TEXT_BYTES_MAX]}")
        elif report.is_ready:
            self.changes.prepared(report.change, index)

    # --- artifacts ----------------------------------------------------------------------------------------------------

    async def fetch(self, request: pb.FetchRequest, context: Context) -> None:
        """Send the caller's own artifact from an offset on."""
        try:
            member, path, size_bytes = self._wanted(request)
            member.fetching = True
            try:
                chunks = read_chunks(path, request.offset, size_bytes)
                async with self._fetches, contextlib.aclosing(chunks):
                    async for offset, data in chunks:
                        if self._members.get(member.index) is not member or self._closing.is_set():
                            raise NotReadyError("this membership has ended")
                        await context.write(pb.FetchResponse(offset=offset, data=data))
            finally:
                member.fetching = False
        except RelaylineError as error:
            await rpc.abort(context, error)

    def _wanted(self, request: pb.FetchRequest) -> tuple[OpenMembership, Path, int]:
        """Return whose ticket this is, and the file and size of what it asks for.

        A request names a file by its content, and only the stage's own files can be had.
        """
        member = self._member_of(request)
        split, stage = self._split, self._split.file.stages[member.index]
        if self._next is not None and request.sha256 == self._next.file.stages[member.index].sha256:
            split, stage = self._next, self._next.file.stages[member.index]
        if request.sha256 not in ("", stage.sha256):
            raise ArtifactError("that artifact is not this stage's; a planned change was taken back")
        if request.offset > stage.size_bytes:
            raise ArtifactError(f"offset {request.offset} is beyond the artifact's {stage.size_bytes} bytes")
        if member.fetching:
            raise NotReadyError("this stage's artifact is already being sent")
        return member, split.directory / stage.file, stage.size_bytes


def _one_by_one(write: Callable[[pb.JoinResponse], Awaitable[None]]) -> Callable[[pb.JoinResponse], Awaitable[None]]:
    """Return the same for several writers at once, of which gRPC takes one."""
    writing = asyncio.Lock()

    async def write_next(message: pb.JoinResponse) -> None:
        async with writing:
            await write(message)

    return write_next


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
    is_long = any(each.HasField("failure") for each in (report, report.prepared, report.measured))
    tidy(report, bounds.PEER_TEXT_CHARS_MAX if is_long else bounds.PEER_NAME_CHARS_MAX)
    return report
