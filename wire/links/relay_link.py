"""The sending end of one Relay stream: open, credits, reusable buffers, loss.

Owned by one event loop. A stage uses it towards its downstream neighbour, the coordinator towards stage 0.

Credits: the receiver grants a number of payload bytes in flight, and returns bytes once it has decoded them. `send`
waits for credit, so a slow receiver stops its sender, and that sender's sender, up to the coordinator. While almost
nothing is in flight an envelope of any size goes; otherwise one larger than the window could never be sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc
import grpc.aio

from relayline.wire.common import bounds
from relayline.wire.common.errors import ProtocolError, RelaylineError, StageLostError, again
from relayline.wire.common.tasks import end_task
from relayline.wire.common.texts import printable
from relayline.wire.envelopes import messages
from relayline.wire.envelopes.buffers import Buffer, BufferPool
from relayline.wire.envelopes.dtypes import DTYPE_F32
from relayline.wire.envelopes.parts import parts_of
from relayline.wire.links import rpc
from relayline.wire.links.security import PLAINTEXT, LinkSecurity
from relayline.wire.links.trouble import first_call
from relayline.wire.links.watch import Watch
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

OnLost = Callable[[RelaylineError], None]


class RelayLink:
    """One established link. Make it with `RelayLink.open`."""

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel,
        call: grpc.aio.StreamStreamCall[bytes, bytes],
        accepted: pb.LinkAccepted,
        pool: BufferPool,
        on_lost: OnLost,
        media_width: int = 0,
    ) -> None:
        self.address = address
        self.max_rows: int = accepted.max_rows
        self.pool = pool
        self.row_pool = BufferPool(DTYPE_F32, media_width or pool.width)  # of a link for tokens: of rows in their place
        self.envelopes_sent = 0
        self.payload_bytes_sent = 0
        self.handed_ns = 0  # when the latest envelope was handed to gRPC; that it returned is heard of later
        self._channel, self._call = channel, call
        self._on_lost = on_lost
        self._window_bytes: int = accepted.credit_bytes
        self._in_flight_bytes = 0
        # Envelopes leave in the order of `send` calls; gRPC allows one write at a time, too.
        self._sending = asyncio.Lock()
        self._credit_changed = asyncio.Event()
        self._lost: RelaylineError | None = None
        self._closing = False
        self._watch: Watch | None = None
        self._reader = asyncio.create_task(self._read_credits())

    @classmethod
    async def open(
        cls,
        address: str,
        hello: pb.LinkOpen,
        on_lost: OnLost,
        security: LinkSecurity = PLAINTEXT,
        shown_pass: str = "",
        *,
        is_watched: bool = True,
        media_width: int = 0,
    ) -> RelayLink:
        """Connect, identify this end and wait to be accepted; `shown_pass` is the coordinator's pass for this link.

        `on_lost` is called once, from the event loop, if the link breaks later, and where the link `is_watched` also
        once the other side sends no heartbeat. `media_width`: values of rows of images and audio, which a link for
        tokens may send in their place.

        Raises the typed error with which the other side refuses: HandshakeError or StaleEpochError. Raises
        StageLostError when it cannot be reached within HANDSHAKE_TIMEOUT_S. Raises UnauthenticatedError when
        certificates or the token are not accepted. Raises UsageError when `security` does not allow this link. Raises
        ProtocolError when something else answers.
        """
        channel = rpc.open_channel(address, security, receive_bytes_max=bounds.UNARY_BYTES_MAX)
        async with first_call(channel, address, security, f"{address} did not accept the link"):
            call, accepted = await _shake_hands(channel, address, hello, shown_pass)
        width = 1 if hello.dtype == pb.DTYPE_TOKENS else hello.n_embd
        link = cls(address, channel, call, accepted, BufferPool(hello.dtype, width), on_lost, media_width)
        if is_watched:
            link._watch = Watch(address, (hello.route_id, hello.epoch), link._silent, security, shown_pass=shown_pass)
        return link

    def figures(self) -> dict[str, int]:
        """Return what went over this link and what of its credit is in use."""
        return {
            "envelopes_sent": self.envelopes_sent,
            "payload_bytes_sent": self.payload_bytes_sent,
            "in_flight_bytes": self._in_flight_bytes,
            "window_bytes": self._window_bytes,
        }

    async def send(self, buffer: Buffer, message: bytes) -> None:
        """Send one envelope once there is credit for it; `message` is the buffer's own bytes or those plus extras.

        The buffer goes back to the pool in any case. Raises the link's loss. Cancelling it before gRPC has taken the
        message drops only this envelope. Cancelling it later loses the link, since gRPC ends the call.
        """
        try:
            async with self._sending:
                await self._take_credit(buffer.payload_bytes)
                self.handed_ns = time.monotonic_ns()
                if len(message) <= bounds.MESSAGE_BYTES_MAX:
                    await self._call.write(message)
                else:
                    for part in parts_of(message):
                        await self._call.write(part)
            self.envelopes_sent += 1
            self.payload_bytes_sent += buffer.payload_bytes
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise self._loss("is gone") from error
        except asyncio.CancelledError as error:
            if rpc.task_is_cancelled():
                raise
            # The call was cancelled, by `close` say, not the task that sends.
            raise self._loss("was closed") from error
        finally:
            (self.pool if buffer.dtype == self.pool.dtype else self.row_pool).give_back(buffer)

    async def _take_credit(self, size_bytes: int) -> None:
        while self._lost is None and not self._fits(size_bytes):
            self._credit_changed.clear()
            await self._credit_changed.wait()
        if self._lost is not None:
            raise again(self._lost)
        self._in_flight_bytes += size_bytes

    def _fits(self, size_bytes: int) -> bool:
        # A receiver may keep less than this part of the window, so bytes in flight need not reach zero although
        # everything was decoded.
        held_bytes = self._window_bytes // bounds.CREDIT_HELD_DIVISOR
        return self._in_flight_bytes <= held_bytes or self._in_flight_bytes + size_bytes <= self._window_bytes

    async def _read_credits(self) -> None:
        try:
            while isinstance(data := await self._call.read(), bytes):
                reply = messages.read(pb.RelayResponse, data, "reply", who=self.address)
                self._in_flight_bytes = max(0, self._in_flight_bytes - reply.credit_bytes)
                self._credit_changed.set()
            detail = printable(await self._call.details() or "no reason given")
            error: RelaylineError = StageLostError(f"{self.address} closed the link: {detail}")
        except grpc.aio.AioRpcError as failure:
            error = rpc.typed(failure, self.address)
        except ProtocolError as failure:
            error = failure
            self._call.cancel()
        except asyncio.CancelledError:
            if self._closing or rpc.task_is_cancelled():
                raise
            error = StageLostError(f"a send to {self.address} was cancelled halfway")
        self._lose(error)
        if not self._closing:
            self._on_lost(self._lost or error)

    def _silent(self, error: RelaylineError) -> None:
        self._lose(error)  # first: this is the reason that counts
        self._call.cancel()

    def _loss(self, how: str) -> RelaylineError:
        return again(self._lost) if self._lost is not None else StageLostError(f"link to {self.address} {how}")

    def _lose(self, error: RelaylineError) -> None:
        self._lost = self._lost or error
        self._credit_changed.set()

    async def close(self) -> None:
        """Close the stream and its channel; waiting senders get StageLostError. `on_lost` is not called."""
        self._closing = True
        self._lose(StageLostError(f"link to {self.address} was closed"))
        rpc.end_call(self._call)
        await end_task(self._reader)
        if self._watch is not None:
            await self._watch.close()
        await self._channel.close()


async def _shake_hands(
    channel: grpc.aio.Channel, address: str, hello: pb.LinkOpen, shown_pass: str
) -> tuple[grpc.aio.StreamStreamCall[bytes, bytes], pb.LinkAccepted]:
    message = rpc.serialize(pb.RelayRequest(open=hello))
    metadata = rpc.route_metadata(hello.route_id, hello.epoch) + rpc.pass_metadata(shown_pass)
    try:
        call, data = await rpc.first_reply(channel, rpc.method("Relay"), message, metadata)
        if not isinstance(data, bytes):
            detail = printable(await call.details() or "no reason given")
            raise StageLostError(f"{address} closed the link: {detail}")
        reply = messages.read(pb.RelayResponse, data, "answer to the handshake", who=address)
    except grpc.aio.AioRpcError as error:
        raise rpc.typed(error, address) from error
    if not reply.HasField("accepted"):
        raise ProtocolError(f"{address} answered the handshake with something else")
    return call, reply.accepted
