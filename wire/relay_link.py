"""The sending end of one Relay stream: open, credits, reusable buffers, loss.

Owned by one event loop. A stage uses it towards its downstream neighbour, the coordinator towards stage 0.

Credits: the receiver says how many payload bytes may be in flight and gives bytes back once it has decoded them.
`send` waits for credit, so a slow receiver stops its sender, and that sender's sender, up to the coordinator. An
envelope is let through whatever its size once next to nothing is in flight, or a very large one could never be sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import grpc.aio

from wire import bounds, rpc
from wire.envelope import Buffer, BufferPool
from wire.errors import ProtocolError, RelaylineError, StageLostError
from wire.pb.relayline.v1 import relayline_pb2 as pb

OnLost = Callable[[RelaylineError], None]


class RelayLink:
    """One established link. Make it with `RelayLink.open`."""

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel,
        call: grpc.aio.StreamStreamCall[bytes, pb.LinkReply],
        accepted: pb.LinkAccepted,
        pool: BufferPool,
        on_lost: OnLost,
    ) -> None:
        self.address = address
        self.max_rows: int = accepted.max_rows
        self.pool = pool
        self.envelopes_sent = 0
        self.payload_bytes_sent = 0
        self._channel, self._call = channel, call
        self._on_lost = on_lost
        self._window_bytes: int = accepted.credit_bytes
        self._in_flight_bytes = 0
        self._credit = asyncio.Condition()
        self._lost: RelaylineError | None = None
        self._closing = False
        self._reader = asyncio.create_task(self._read_credits())

    @classmethod
    async def open(cls, address: str, hello: pb.LinkOpen, on_lost: OnLost) -> RelayLink:
        """Connect, say who we are and wait to be accepted.

        `on_lost` is called once, from the event loop, if the link breaks later. Raises HandshakeError when the other
        side refuses, StageLostError when it cannot be reached within HANDSHAKE_TIMEOUT_S.
        """
        channel = rpc.open_channel(address)
        stream = channel.stream_stream(
            rpc.method("Relay"), request_serializer=None, response_deserializer=rpc.parser(pb.LinkReply)
        )
        call = stream()
        try:
            async with asyncio.timeout(bounds.HANDSHAKE_TIMEOUT_S):
                await call.write(rpc.serialize(pb.Envelope(open=hello)))
                reply = await call.read()
                if not isinstance(reply, pb.LinkReply):
                    # The stream ended before a reply; its status says why.
                    raise StageLostError(f"{address} closed the link: {await call.details() or 'no reason given'}")
                if not reply.HasField("accepted"):
                    raise ProtocolError(f"{address} answered the handshake with something else")
        except grpc.aio.AioRpcError as error:
            await channel.close()
            raise rpc.typed(error, address) from error
        except TimeoutError as error:
            await channel.close()
            raise StageLostError(f"{address} did not accept the link within {bounds.HANDSHAKE_TIMEOUT_S:.0f} s") from error
        except BaseException:
            await channel.close()
            raise
        width = 1 if hello.next_layer == 0 and hello.dtype == pb.DTYPE_TOKENS else hello.n_embd
        return cls(address, channel, call, reply.accepted, BufferPool(hello.dtype, width), on_lost)

    async def send(self, buffer: Buffer, message: bytes) -> None:
        """Send one envelope once there is credit for it; `message` is the buffer's own bytes or those plus extras.

        The buffer goes back to the pool in any case. Raises the link's loss.
        """
        try:
            await self._take_credit(buffer.payload_bytes)
            await self._call.write(message)
            self.envelopes_sent += 1
            self.payload_bytes_sent += buffer.payload_bytes
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise self._lost or StageLostError(f"link to {self.address} is gone") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if not self._closing or (task is not None and task.cancelling()):
                raise
            # gRPC says so to a writer whose call `close` has cancelled; the writer itself goes on.
            raise StageLostError(f"link to {self.address} was closed") from error
        finally:
            self.pool.give_back(buffer)

    async def _take_credit(self, size_bytes: int) -> None:
        if self._lost is None and self._fits(size_bytes):
            self._in_flight_bytes += size_bytes
            return
        async with self._credit:
            await self._credit.wait_for(lambda: self._lost is not None or self._fits(size_bytes))
            if self._lost is not None:
                raise self._lost
            self._in_flight_bytes += size_bytes

    def _fits(self, size_bytes: int) -> bool:
        # A receiver keeps less than a quarter of the window to itself between two replies (see CREDIT_HELD_DIVISOR), so what
        # is in flight may never come down to zero although everything was decoded.
        few_bytes = self._window_bytes // bounds.CREDIT_HELD_DIVISOR
        return self._in_flight_bytes <= few_bytes or self._in_flight_bytes + size_bytes <= self._window_bytes

    async def _read_credits(self) -> None:
        error: RelaylineError = StageLostError(f"{self.address} closed the link")
        try:
            while isinstance(reply := await self._call.read(), pb.LinkReply):
                async with self._credit:
                    self._in_flight_bytes = max(0, self._in_flight_bytes - reply.credit_bytes)
                    self._credit.notify_all()
        except grpc.aio.AioRpcError as failure:
            error = rpc.typed(failure, self.address)
        else:
            if not self._closing and (detail := await self._call.details()):
                error = StageLostError(f"{self.address} closed the link: {detail}")
        async with self._credit:
            self._lost = error
            self._credit.notify_all()
        if not self._closing:
            self._on_lost(error)

    async def close(self) -> None:
        """Close the stream and its channel; waiting senders get StageLostError. `on_lost` is not called."""
        self._closing = True
        self._call.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        async with self._credit:
            self._lost = self._lost or StageLostError(f"link to {self.address} was closed")
            self._credit.notify_all()
        await self._channel.close()
