"""Notices within seconds that a peer hangs: stopped, swapped out, on a laptop whose lid was closed, behind a cut cable.

A process that hangs keeps its connections, since the kernel still acknowledges data for it. gRPC's own pings notice
that, but they wait behind the data of their connection. Over a slow link an envelope, or an artifact that is being
fetched, delays them for many seconds. A ping timeout short enough to be useful would cut links that are only busy. So
heartbeats have a separate connection. Both ends send one every BEAT_EVERY_S from their event loops, which keep
running during a native step, and treat the other end as lost after LOST_AFTER_S of silence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from relayline.wire.common import bounds
from relayline.wire.common.errors import ProtocolError, RelaylineError, StageLostError
from relayline.wire.common.process import first_of
from relayline.wire.common.tasks import cancel_all, end_task
from relayline.wire.envelopes import messages
from relayline.wire.links import rpc
from relayline.wire.links.security import PLAINTEXT, LinkSecurity
from relayline.wire.links.silence import Silence, silent_text
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

log = logging.getLogger("relayline.link")

BEAT = b""  # a WatchRequest or WatchResponse without fields

OnHeard = Callable[[], None]


async def until_silent(silence: Silence) -> None:
    """Return once the peer has been silent for too long."""
    while not silence.is_final:
        await asyncio.sleep(bounds.BEAT_EVERY_S)
        silence.look()


async def beat(write: Callable[[Any], Awaitable[Any]], message: Any = BEAT) -> None:
    """Send `message` as a heartbeat forever. Raises the errors of `write`."""
    while True:
        await asyncio.sleep(bounds.BEAT_EVERY_S)
        await write(message)


async def first_beat(context: Any) -> pb.WatchRequest:
    """Read the first request of a Watch call. Raises ProtocolError."""
    try:
        async with asyncio.timeout(bounds.HANDSHAKE_TIMEOUT_S):
            message = await context.read()
    except TimeoutError as error:
        raise ProtocolError("the call brought no first heartbeat") from error
    if not isinstance(message, bytes):
        return pb.WatchRequest()
    if len(message) > bounds.UNARY_BYTES_MAX:
        raise ProtocolError(f"a first heartbeat of {len(message)} bytes is over the limit")
    return messages.read(pb.WatchRequest, message, "first heartbeat")


async def answer(context: Any, silence: Silence) -> bool:
    """Do the server's part of a Watch call whose first request has been read; returns whether the caller went silent.

    False: it has ended the call, or its connection is gone, which the other streams of that caller notice themselves.
    """

    async def read() -> None:
        while isinstance(await context.read(), bytes):
            silence.heard()

    tasks = [asyncio.create_task(work) for work in (beat(context.write), read(), until_silent(silence))]
    try:
        await first_of(*tasks)
        return silence.is_final
    finally:
        await cancel_all(tasks)


class Watch:
    """The calling end: watches the peer at one address until it is closed. Event loop only."""

    def __init__(
        self,
        address: str,
        route: tuple[int, int],
        on_silent: Callable[[RelaylineError], None],
        security: LinkSecurity = PLAINTEXT,
        *,
        shown_pass: str = "",
        who: str = "",
        on_heard: OnHeard = lambda: None,
    ) -> None:
        """`route` (id, epoch) is the route that the peer ends if this end goes silent.

        `shown_pass` is the coordinator's pass for that route. `on_silent` is called at most once, `on_heard` at every
        heartbeat. `who` names the peer in the loss. Raises UsageError when `security` does not allow a link to
        `address`.
        """
        self._who = who or address
        self._hello = rpc.serialize(pb.WatchRequest(route_id=route[0], epoch=route[1]))
        self._on_heard, self._silence = on_heard, Silence()
        self._metadata = rpc.pass_metadata(shown_pass)
        self._channel = rpc.open_channel(address, security, receive_bytes_max=bounds.UNARY_BYTES_MAX)
        self._task = asyncio.create_task(self._run(on_silent))

    async def _run(self, on_silent: Callable[[RelaylineError], None]) -> None:
        talking = asyncio.create_task(self._talk())
        judging = asyncio.create_task(until_silent(self._silence))
        try:
            await first_of(talking, judging)
            if judging.done():
                on_silent(StageLostError(silent_text(self._who)))
        finally:
            judging.cancel()  # even if this is cancelled again while it waits for the other
            await end_task(talking)
            await end_task(judging)

    async def _talk(self) -> None:
        """Beat and listen, on one call after the other; returns once it shows that the peer does not know of this."""
        stream = self._channel.stream_stream(rpc.method("Watch"), request_serializer=None, response_deserializer=None)
        has_failed = False
        while True:
            call = stream(metadata=self._metadata)
            beating = asyncio.create_task(self._beat(call))
            try:
                while isinstance(await call.read(), bytes):
                    self._silence.heard()
                    self._on_heard()
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return  # a version before this one: gRPC's own pings have to do
                if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                    log.warning("%s refuses to be watched: %s", self._who, error.details())
                    return
            except Exception:  # of `on_heard`, or a bug of ours: without this task nobody would miss the peer
                if not has_failed:
                    log.exception("the watch over %s is tried again", self._who)
                has_failed = True
            finally:
                rpc.end_call(call)
                await end_task(beating)
            if rpc.task_is_cancelled():
                return  # gRPC swallows a cancellation that meets a call whose connection has just failed
            await asyncio.sleep(bounds.BEAT_EVERY_S)  # this connection alone may have broken; silence is still counted

    async def _beat(self, call: Any) -> None:
        try:
            await call.write(self._hello)
            await beat(call.write)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the call has ended; its reader knows why

    async def close(self) -> None:
        """Stop watching."""
        await end_task(self._task)
        await self._channel.close()
