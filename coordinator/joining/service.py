"""The gRPC face of joining: carries stages' reports to the roster, and hands each stage its order and its artifact."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import grpc
import grpc.aio

from relayline.coordinator.engine.membership import Introduction
from relayline.coordinator.engine.roster import JoinedRoster
from relayline.coordinator.engine.whereabouts import whereabouts
from relayline.coordinator.joining.artifact_reader import read_chunks
from relayline.coordinator.joining.config import JoinConfig, JoiningStage, check_names, engine_message
from relayline.coordinator.joining.hand_over import changing_hands, hand_over_orders
from relayline.coordinator.model.pipeline_file import PIPELINE_NAME, PipelineFile, StageFile
from relayline.wire.common import bounds
from relayline.wire.common.errors import (
    ArtifactError,
    HandshakeError,
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
REFUSALS_MAX = 64  # different ones of waiting stages; each is logged once
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
    stands_by: bool  # whether it takes an order to hold no layers
    hands_over: bool  # whether it gives and takes lanes
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
    """The receiver of the stages' reports of a planned change."""

    def prepared(self, number: int, index: int) -> None:
        """A stage is ready to switch."""

    def failed(self, number: int, why: str) -> None:
        """A stage cannot be."""

    def left(self, index: int) -> None:
        """A membership has ended, or the same stage began another."""

    def came(self, index: int) -> None:
        """A membership has begun, and has its order."""


class MemberService(abc.ABC):
    """Memberships, whatever is ordered: carries introductions to the roster, signs of life both ways, and the end."""

    def __init__(self, config: JoinConfig, roster: JoinedRoster) -> None:
        self._config, self._roster = config, roster
        self._members: dict[int, OpenMembership] = {}  # by place, hence at most one per stage
        self._closing = asyncio.Event()
        self._refusals: set[str] = set()  # that have been logged, of stages that may wait

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
            self._note_refusal(context.peer(), error)
            await rpc.abort(context, error)
        reason: RelaylineError = ProtocolError("it said goodbye")
        is_in_order = False
        replaced, closing = asyncio.create_task(member.replaced.wait()), asyncio.create_task(self._closing.wait())
        ends: list[asyncio.Task[Any]] = [replaced, closing]
        beating: list[asyncio.Task[None]] = []
        try:
            await member.write(self._first_order(member))
            self._settle(member)
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

    def _note_refusal(self, peer: str, error: RelaylineError) -> None:
        """Log a refusal; of a stage that waits and asks again, the first one."""
        is_new = not error.retryable or error.message not in self._refusals
        if len(self._refusals) >= REFUSALS_MAX:
            self._refusals.clear()
        self._refusals.add(error.message)
        level = logging.WARNING if is_new else logging.DEBUG
        log.log(level, "stage refused", extra={"fields": {"from": peer, "reason": error.message}})

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
        index = self._roster.check(who).index
        if index not in self._roster.holders and not hello.stands_by:
            text = f"{hello.name} gets no layers now, but its version cannot wait without layers; upgrade it"
            raise HandshakeError(text)
        ticket = self._roster.join(who)
        place = self._roster.place_of(ticket)
        assert place is not None
        earlier = self._members.get(place.index)
        if earlier is not None:
            earlier.replaced.set()
            self._tell_left(place.index)
        secret = secrets.token_bytes(TICKET_BYTES)
        takes = (hello.beats, hello.moves, hello.stands_by, hello.hands_over)
        member = OpenMembership(ticket, place.index, secret, asyncio.Event(), *takes, write, caller())
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

    def _settle(self, member: OpenMembership) -> None:  # noqa: B027 - a survey asks no more of it
        """A member has its first order."""

    @abc.abstractmethod
    async def _take(self, member: OpenMembership, report: pb.JoinRequest, context: Context) -> bool:
        """Take a report other than a sign of life or a failure; return whether it makes sense."""

    @abc.abstractmethod
    async def fetch(self, request: pb.FetchRequest, context: Context) -> None:
        """Send bytes from an offset on."""

    def _tell_left(self, index: int) -> None:  # noqa: B027 - most have no one to notify
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
                raise ProtocolError(f"a stage sent {kind or 'nothing'} at the wrong time")


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
        self._places = list(config.stages)
        self._next: Split | None = None  # of a planned change, until the switch
        self._next_holders: tuple[int, ...] = ()
        self.changes: ChangeListener | None = None
        self._fetches = asyncio.Semaphore(config.fetches_max)
        # A setting that cannot be sent is the operator's mistake: report it now, not to the first stage that joins.
        for index in range(len(self._places)):
            self._order(index, b"")

    def _settle(self, member: OpenMembership) -> None:
        """From its first order on a member takes part in changes."""
        place = self._roster.place_of(member.ticket)
        if place is None:
            return
        if member.index not in self._roster.holders:
            self._roster.stands_by(place)
        if self.changes is not None:
            self.changes.came(member.index)

    def _tell_left(self, index: int) -> None:
        if self.changes is not None:
            self.changes.left(index)

    def _first_order(self, member: OpenMembership) -> pb.JoinResponse:
        return self._order(member.index, member.secret, beats=member.beats)

    def _order(self, index: int, secret: bytes, *, beats: bool = False, is_next: bool = False) -> pb.JoinResponse:
        """Return the order of a place; `is_next`: the one that holds after the change."""
        split, holders = self._split, self._roster.holders
        if is_next and self._next is not None:
            split, holders = self._next, self._next_holders
        settings = self._places[index]
        order = pb.JoinResponse(
            stage_count=len(split.file.stages),
            pipeline_id=split.file.pipeline_id,
            engine=engine_message(settings.engine),
            telemetry=settings.telemetry.message(),
            ticket=secret,
            beats=beats,
            coordinator=self._own,
            listen_port=settings.listen_port,
        )
        if index not in holders:
            order.stands_by = True
            return order
        order.stage_index = holders.index(index)
        stage = split.file.stages[order.stage_index]
        path = str((split.directory / stage.file).resolve()) if self._config.offer_path else ""
        artifact = pb.ArtifactFile(file=stage.file, size_bytes=stage.size_bytes, sha256=stage.sha256, path=path)
        order.artifact.CopyFrom(artifact)
        order.pipeline_json = split.pipeline_json
        return order

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
        name = self._places[member.index].name
        address, line = await whereabouts(name, serving.host, seen, serving.port, self._security, member.owner)
        if line:
            log.warning("%s", line)
        return address

    # --- planned changes ----------------------------------------------------------------------------------------------

    @property
    def split(self) -> Split:
        """The split that the stages have, or are to have at once."""
        return self._split

    def place(self, index: int) -> JoiningStage:
        """Return the facts about a place."""
        return self._places[index]

    def add(self, stage: JoiningStage) -> int:
        """Add a place that holds no layers; returns its index. Raises UsageError for a name that cannot be one."""
        check_names([*(place.name for place in self._places), stage.name])
        self._places.append(stage)
        return self._roster.add(stage.name).index

    @property
    def roster(self) -> JoinedRoster:
        """The places and their members."""
        return self._roster

    def unmovable(self, holders: tuple[int, ...] = ()) -> list[str]:
        """Return the names of places that keep layers from moving to `holders`, by default the present ones.

        They are to hold layers and are not here, or are of a version that takes no such order.
        """
        members, holders = self._members, holders or self._roster.holders
        lost = [index for index in holders if (member := members.get(index)) is None or not member.moves]
        freed = set(self._roster.holders) - set(holders)
        lost += [index for index in freed if (member := members.get(index)) is not None and not member.stands_by]
        return [self._places[index].name for index in lost]

    async def prepare(self, number: int, split: Split, keeps: Sequence[bool], holders: tuple[int, ...] = ()) -> None:
        """Have every holder fetch and load its slice of another split, next to the one that it serves."""
        self._next, self._next_holders = split, holders or self._roster.holders
        kept = dict(zip(self._next_holders, keeps, strict=True))
        hand_overs = self._hand_overs(split, keeps)
        for index in self._involved():
            change = pb.LayerChange(number=number, step=pb.LAYER_CHANGE_STEP_PREPARE, keeps=kept.get(index, False))
            if (member := self._members.get(index)) is not None:
                order = self._order(index, member.secret, is_next=True)
                order.change.CopyFrom(change)
                if index in hand_overs:
                    order.change.hand_over.CopyFrom(hand_overs[index])
                await self._say(member, order)

    def _hand_overs(self, split: Split, keeps: Sequence[bool]) -> dict[int, pb.HandOver]:
        """Return by place which layers' lanes change hands at the switch."""
        before, after = (self._split.file, self._roster.holders), (split.file, self._next_holders)
        able = [index for index, member in self._members.items() if member.hands_over]
        addresses = {index: self._roster.places[index].address for index in able}
        return hand_over_orders(changing_hands(before, after, keeps), self._roster.names(), addresses)

    def _involved(self) -> list[int]:
        """Return the places that hold layers before the change, after it, or both."""
        return sorted({*self._roster.holders, *self._next_holders})

    async def drop(self, number: int) -> None:
        """Have every stage drop its prepared slice."""
        self._next = None
        change = pb.LayerChange(number=number, step=pb.LAYER_CHANGE_STEP_DROP)
        await self._say_all(change, self._involved())

    def switch(self) -> list[int]:
        """From now on the prepared split is the one that stages have: also those that join later.

        Returns the places that need a message.
        """
        assert self._next is not None
        involved = self._involved()
        self._split, self._next = self._next, None
        self._roster.switching(self._next_holders)
        return involved

    async def tell_switch(self, number: int, places: Iterable[int], hand_over_ns: int = 0) -> None:
        """Notify the members of these places. Lanes may change hands for hand_over_ns.

        A member that cannot be reached, or had not prepared, joins again and gets its order then.
        """
        step, hand_over_ms = pb.LAYER_CHANGE_STEP_SWITCH, hand_over_ns // 1_000_000
        await self._say_all(pb.LayerChange(number=number, step=step, hand_over_ms=hand_over_ms), places)

    async def _say_all(self, change: pb.LayerChange, places: Iterable[int]) -> None:
        members = [member for index in places if (member := self._members.get(index)) is not None]
        await asyncio.gather(*(self._say(member, pb.JoinResponse(change=change)) for member in members))

    async def _say(self, member: OpenMembership, order: pb.JoinResponse) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            await member.write(order)  # else its call has ended, which its reader notices

    def _on_prepared(self, index: int, report: pb.StagePrepared) -> None:
        if self.changes is None:
            return
        if report.HasField("failure"):
            name = self._places[index].name
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
        """Return the holder of this ticket, and the requested file and its size.

        A request names a file by its content, and only the stage's own files can be had.
        """
        member = self._member_of(request)
        split, stage = self._part_of(member.index, request.sha256)
        if stage is None or request.sha256 not in ("", stage.sha256):
            raise ArtifactError("that artifact is not for this stage; a planned change was cancelled")
        if request.offset > stage.size_bytes:
            raise ArtifactError(f"offset {request.offset} is beyond the artifact's {stage.size_bytes} bytes")
        if member.fetching:
            raise NotReadyError("this stage's artifact is already being sent")
        return member, split.directory / stage.file, stage.size_bytes

    def _part_of(self, index: int, sha256: str) -> tuple[Split, StageFile | None]:
        """Return the split and the slice of a place: those of the next change if it requests them, otherwise the
        present ones."""
        if self._next is not None and index in self._next_holders:
            stage = self._next.file.stages[self._next_holders.index(index)]
            if sha256 == stage.sha256:
                return self._next, stage
        holders = self._roster.holders
        return self._split, self._split.file.stages[holders.index(index)] if index in holders else None


def _one_by_one(write: Callable[[pb.JoinResponse], Awaitable[None]]) -> Callable[[pb.JoinResponse], Awaitable[None]]:
    """Return the same call for several concurrent writers; gRPC allows only one."""
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
        raise ProtocolError("the first message of a membership must be an introduction")
    return report.hello


def _parse(message: Any) -> pb.JoinRequest | None:
    """Read one report; None at the end of the stream. Raises ProtocolError."""
    if not isinstance(message, bytes):
        return None
    report = messages.read(pb.JoinRequest, message, "report", who="a stage")
    is_long = any(each.HasField("failure") for each in (report, report.prepared, report.measured))
    tidy(report, bounds.PEER_TEXT_CHARS_MAX if is_long else bounds.PEER_NAME_CHARS_MAX)
    return report
