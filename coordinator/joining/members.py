"""The open Join calls: introductions to the roster, heartbeats both ways, and the end, whatever is ordered."""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio

from relayline.coordinator.engine.membership import Introduction
from relayline.coordinator.engine.roster import JoinedRoster
from relayline.coordinator.joining.config import JoinConfig
from relayline.coordinator.relay.child import RelayChild
from relayline.wire.common import bounds
from relayline.wire.common.errors import (
    HandshakeError,
    NotReadyError,
    ProtocolError,
    RelaylineError,
    StaleEpochError,
)
from relayline.wire.common.phase import HostState
from relayline.wire.common.process import first_of
from relayline.wire.common.tasks import cancel_all
from relayline.wire.common.texts import tidy
from relayline.wire.envelopes import messages
from relayline.wire.links import rpc
from relayline.wire.links.guard import caller, credential
from relayline.wire.links.refusals import peer_of
from relayline.wire.links.roles import Identity
from relayline.wire.links.security import LinkSecurity
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
    beats: bool  # whether it sends heartbeats and takes ours
    moves: bool  # whether it takes orders of planned changes
    stands_by: bool  # whether it takes an order to hold no layers
    hands_over: bool  # whether it gives and takes lanes
    is_relayed: bool  # whether it is reached through the relay alone
    sleeps: bool  # whether it takes orders to free its memory
    write: Callable[[pb.JoinResponse], Awaitable[None]]  # of its call, one message at a time
    owner: Identity | None = None
    silence: Silence = dataclasses.field(default_factory=Silence)
    fetching: bool = False


class MemberService(abc.ABC):
    """Memberships, whatever is ordered: carries introductions to the roster, heartbeats both ways, and the end."""

    def __init__(self, config: JoinConfig, roster: JoinedRoster, security: LinkSecurity) -> None:
        self._config, self._roster = config, roster
        self.relay = RelayChild(config.relay, security)
        roster.relay_figures = self.relay.figures
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

    async def end(self) -> None:
        """End the relay, once no membership needs it."""
        await self.relay.close()

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
            order = self._first_order(member)
            if member.is_relayed:
                order.relay_port = await self.relay.port()
            await member.write(order)
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
            await cancel_all((*ends, *beating))

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
            is_relayed=hello.is_relayed,
        )
        index = self._roster.check(who).index
        if index not in self._roster.holders and not hello.stands_by:
            text = f"{hello.name} gets no layers now, but its version cannot wait without layers; upgrade it"
            raise HandshakeError(text)
        self._check_hello(hello)
        ticket = self._roster.join(who)
        place = self._roster.place_of(ticket)
        assert place is not None
        earlier = self._members.get(place.index)
        if earlier is not None:
            earlier.replaced.set()
            self._tell_left(place.index)
        secret = secrets.token_bytes(TICKET_BYTES)
        takes = (hello.beats, hello.moves, hello.stands_by, hello.hands_over, hello.is_relayed, hello.sleeps)
        member = OpenMembership(ticket, place.index, secret, asyncio.Event(), *takes, write, caller())
        self._members[place.index] = member
        return member

    def _release(self, member: OpenMembership, reason: str, *, is_in_order: bool) -> None:
        self._roster.leave(member.ticket, reason, is_in_order=is_in_order)
        if self._members.get(member.index) is member:
            del self._members[member.index]
            self._tell_left(member.index)

    def _check_hello(self, hello: pb.StageHello) -> None:  # noqa: B027 - a survey takes every version
        """Raise HandshakeError for a stage whose version cannot do what it would be ordered to."""

    @abc.abstractmethod
    def _first_order(self, member: OpenMembership) -> pb.JoinResponse:
        """Return the answer to an introduction. Raises NotReadyError where the stage has to come again later."""

    def _settle(self, member: OpenMembership) -> None:  # noqa: B027 - a survey asks no more of it
        """A member has its first order."""

    @abc.abstractmethod
    async def _take(self, member: OpenMembership, report: pb.JoinRequest, context: Context) -> bool:
        """Take a report other than a heartbeat or a failure; return whether it makes sense."""

    @abc.abstractmethod
    async def fetch(self, request: pb.FetchRequest, context: Context) -> None:
        """Send bytes from an offset on."""

    def _tell_left(self, index: int) -> None:  # noqa: B027 - most have no one to notify
        """A membership has ended, or the same stage began another."""

    def _reason_to_end(self) -> RelaylineError:
        return NotReadyError("the coordinator is shutting down; joining again once it is back")

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
                self._roster.progress(ticket, state, progress.done_bytes, progress.total_bytes, progress.trouble)
            elif kind == "alive":
                pass
            elif kind == "failure":
                self._roster.failed(ticket, report.failure.message[: bounds.ERROR_TEXT_BYTES_MAX])
            elif not await self._take(member, report, context):
                raise ProtocolError(f"a stage sent {kind or 'nothing'} at the wrong time")


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
    is_long = any(each.HasField("failure") for each in (report, report.prepared, report.measured, report.sleeping))
    is_long = is_long or bool(report.progress.trouble or report.prepared.trouble)
    tidy(report, bounds.PEER_TEXT_CHARS_MAX if is_long else bounds.PEER_NAME_CHARS_MAX)
    return report
