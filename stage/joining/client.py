"""The stage's side of one membership: introduce, be given the order, report, notice the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import socket
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import grpc.aio

from relayline.stage.speed.machine_key import ENGINE_PACKAGE, processor_name
from relayline.wire.common import bounds
from relayline.wire.common.errors import (
    HandshakeError,
    InternalError,
    ProtocolError,
    RelaylineError,
    StageLostError,
    UnauthenticatedError,
)
from relayline.wire.common.memory import available_memory_bytes, total_memory_bytes
from relayline.wire.common.tasks import cancel_all
from relayline.wire.common.texts import printable
from relayline.wire.common.usable_cores import usable_cores
from relayline.wire.common.versions import version_of
from relayline.wire.envelopes import messages
from relayline.wire.links import rpc
from relayline.wire.links.roles import Role
from relayline.wire.links.security import LinkSecurity
from relayline.wire.links.silence import Silence, silent_text
from relayline.wire.links.tls_probe import server_certificate
from relayline.wire.links.trouble import first_call
from relayline.wire.links.watch import beat, until_silent
from relayline.wire.pb.relayline.v1 import join_pb2 as pb

log = logging.getLogger("relayline.stage")

JOIN = "/relayline.v1.PipelineService/Join"
FETCH = "/relayline.v1.PipelineService/Fetch"
CHANGES_MAX = 16  # orders of changes that have not been followed; the coordinator makes one change at a time
# For the coordinator to notice that this stage leaves, so that its log says so. A busy one takes seconds.
GOODBYE_TIMEOUT_S = bounds.QUIET_AFTER_S


def failure_of(error: Exception) -> pb.StageFailure:
    """Return how a stage reports its own failure, including a bug of ours, to its coordinator."""
    if isinstance(error, RelaylineError):
        return pb.StageFailure(label=error.label, message=error.message)
    return pb.StageFailure(label=InternalError.label, message=f"{type(error).__name__}: {error}")


class Rest:
    """Whether a member is to hold nothing; the latest order counts. Event loop only."""

    def __init__(self, order: pb.Rest) -> None:
        self.is_asleep, self.route_id = order.is_asleep, order.route_id
        self.changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once that changes; another future takes its place then."""

    def tell(self, order: pb.Rest) -> None:
        """Take an order."""
        self.route_id = order.route_id
        if order.is_asleep is not self.is_asleep:
            self.is_asleep, changed = order.is_asleep, self.changed
            self.changed = asyncio.get_running_loop().create_future()
            changed.set_result(None)


class Member:
    """An open membership with its order. `lost` is set, once, with the reason for its end. Event loop only."""

    def __init__(
        self, channel: grpc.aio.Channel, bulk: grpc.aio.Channel, call: Any, order: pb.JoinResponse, peer: str
    ) -> None:
        """`bulk` carries the artifact: on the membership's own connection it would hold up heartbeats."""
        self.order, self.peer = order, peer
        self.relay_port = order.relay_port
        """Of the relay, which the first order alone names; 0: this coordinator has none."""
        self.changes: asyncio.Queue[pb.JoinResponse] = asyncio.Queue(CHANGES_MAX)
        """Further orders: planned changes of layers."""
        self.rest = Rest(order.rest)
        self.lost: asyncio.Future[RelaylineError] = asyncio.get_running_loop().create_future()
        self._channel, self._bulk, self._call = channel, bulk, call
        self._writing = asyncio.Lock()
        self._silence = Silence()
        self._reader = asyncio.create_task(self._read())
        watching = (self._beat(), self._judge()) if order.beats else ()
        self._watchers = [asyncio.create_task(work) for work in watching]

    @classmethod
    async def join(cls, address: str, security: LinkSecurity, hello: pb.StageHello) -> Member:
        """Introduce this stage to the coordinator and take its order.

        Raises the coordinator's typed refusal, or StageLostError when it cannot be reached. UnauthenticatedError:
        certificates or the token are not accepted, or the certificate there is not a coordinator's. ProtocolError and
        HandshakeError: something else answers. After an error nothing stays open.
        """
        peer = f"the coordinator at {address}"
        shown = await asyncio.to_thread(_coordinators_certificate, address, security) if security.is_tls else b""
        channel = rpc.open_channel(address, security, Role.COORDINATOR, certificate=shown)
        async with first_call(channel, address, security, f"{peer} did not answer"):
            if security.is_tls and not shown:  # nothing is told to it, but why it cannot be reached
                await channel.channel_ready()
                raise StageLostError(f"{peer} did not show its certificate in time")
            call, order = await _introduce(channel, hello, peer)
        return cls(channel, rpc.open_channel(address, security, Role.COORDINATOR), call, order, peer)

    async def report(self, **report: Any) -> None:
        """Send one report (a field of JoinRequest by name). One that cannot be sent any more is dropped: see `lost`."""
        async with self._writing:
            if self.lost.done():
                return
            try:
                await self._call.write(rpc.serialize(pb.JoinRequest(**report)))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass  # the reader learns why

    async def report_progress(
        self, phase: pb.ArtifactPhase, done_bytes: int, total_bytes: int, trouble: str = ""
    ) -> None:
        """Say how far this stage is with its artifact, and why it does not get on."""
        progress = pb.ArtifactProgress(phase=phase, done_bytes=done_bytes, total_bytes=total_bytes, trouble=trouble)
        await self.report(progress=progress)

    async def fetch(self, offset: int, sha256: str = "", end: int = 0) -> AsyncGenerator[pb.FetchResponse, None]:
        """Yield the artifact's bytes from an offset on; `sha256` names another than the order's.

        `end`: past the last byte that is wanted, 0 for all; older coordinators send more. Raises the typed error of
        the other side, or its loss.
        """
        request = pb.FetchRequest(ticket=self.order.ticket, offset=offset, sha256=sha256, end=end)
        stream = self._bulk.unary_stream(FETCH, request_serializer=rpc.serialize, response_deserializer=None)
        call = stream(request)
        try:
            while isinstance(data := await call.read(), bytes):
                what, limit = "piece of the artifact", bounds.FETCH_CHUNK_BYTES_MAX
                yield messages.read(pb.FetchResponse, data, what, bytes_max=limit, who=self.peer)
        except grpc.aio.AioRpcError as error:
            raise rpc.typed(error, self.peer) from error
        finally:
            call.cancel()

    async def close(self) -> None:
        """End the membership; the coordinator gives the place up at once."""
        if not self.lost.done():
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self._call.done_writing()
            await asyncio.wait({self._reader}, timeout=GOODBYE_TIMEOUT_S)
        await cancel_all((self._reader, *self._watchers))
        self._lose(StageLostError("the membership was closed"))
        rpc.end_call(self._call)
        await asyncio.gather(self._channel.close(), self._bulk.close())

    def _lose(self, error: RelaylineError) -> None:
        if not self.lost.done():
            self.lost.set_result(error)

    async def _read(self) -> None:
        error: RelaylineError = StageLostError(f"{self.peer} ended the membership")
        try:
            while isinstance(data := await self._call.read(), bytes):
                self._silence.heard()
                limit = bounds.ORDER_BYTES_MAX
                order = messages.read(pb.JoinResponse, data, "order", bytes_max=limit, who=self.peer)
                if order.HasField("change"):
                    self.changes.put_nowait(order)
                elif order.HasField("rest"):
                    self.rest.tell(order.rest)
                elif not order.beats:
                    error = ProtocolError(f"{self.peer} sent a second order, which this version does not support")
                    break
                elif order.notice:
                    log.warning("%s", printable(order.notice, bounds.PEER_TEXT_CHARS_MAX))
        except grpc.aio.AioRpcError as failure:
            error = rpc.typed(failure, self.peer)
        except ProtocolError as failure:
            error = failure
        except asyncio.QueueFull:
            error = ProtocolError(f"{self.peer} sent more than {CHANGES_MAX} orders at once")
        except asyncio.CancelledError:
            if rpc.task_is_cancelled():
                raise
            error = StageLostError(f"a report to {self.peer} was cancelled halfway")
        self._lose(error)

    async def _beat(self) -> None:
        await beat(lambda message: self.report(alive=message), pb.StageAlive())

    async def _judge(self) -> None:
        await until_silent(self._silence)
        self._lose(StageLostError(silent_text(self.peer)))


def _coordinators_certificate(address: str, security: LinkSecurity) -> bytes:
    """Return the certificate (DER) of the coordinator at host:port. Blocks.

    Empty where none is shown: gRPC then says why.

    A stage that is relayed has one with the coordinator's host, too, so the host does not say who answers. Raises
    UnauthenticatedError for a certificate of another role.
    """
    from relayline.wire.links.tls_material import credential_of_der  # loads cryptography, which plaintext does not need

    shown = server_certificate(address, security)
    identity = credential_of_der(shown).identity if shown else None
    if shown and (identity is None or identity.role is not Role.COORDINATOR):
        raise UnauthenticatedError(f"{address} is not a coordinator but {identity or 'unknown'}; nothing was sent")
    return shown


async def _introduce(channel: grpc.aio.Channel, hello: pb.StageHello, peer: str) -> tuple[Any, pb.JoinResponse]:
    try:
        call, data = await rpc.first_reply(channel, JOIN, rpc.serialize(pb.JoinRequest(hello=hello)))
        if not isinstance(data, bytes):
            raise StageLostError(f"{peer} ended the membership")
        return call, messages.read(pb.JoinResponse, data, "order", bytes_max=bounds.ORDER_BYTES_MAX, who=peer)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise HandshakeError(f"stages cannot join at {peer}; give the address of its --join-listen") from error
        raise rpc.typed(error, peer) from error


def introduction(name: str, process_id: str, *, is_relayed: bool = False) -> pb.StageHello:
    """Return the facts of this process and its host."""
    try:
        memory_bytes = total_memory_bytes() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        memory_bytes = 0
    return pb.StageHello(
        protocol_version=bounds.PROTOCOL_VERSION,
        software_version=version_of(),
        name=name,
        process_id=process_id,
        moves=True,
        measures=True,
        stands_by=True,
        hands_over=True,
        beats=True,
        is_relayed=is_relayed,
        sleeps=True,
        takes_unread=True,
        host=pb.HostFacts(
            hostname=socket.gethostname(),
            system=f"{platform.system()} {platform.machine()}",
            n_cores=len(usable_cores()),
            memory_bytes=memory_bytes,
            memory_available_bytes=available_memory_bytes() or 0,
            processor=processor_name(),
            engine_version=version_of(ENGINE_PACKAGE),
        ),
    )
