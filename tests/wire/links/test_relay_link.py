"""Goal: a link sends in order within its credit, returns every buffer, and reports its loss once and clearly.

Method: a real in-process server whose Relay handler is a script of the test; every step waits for an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from relayline.wire.common import bounds
from relayline.wire.common.errors import (
    HandshakeError,
    NotReadyError,
    ProtocolError,
    RelaylineError,
    StageLostError,
    StaleEpochError,
)
from relayline.wire.envelopes.buffers import Buffer, BufferPool, with_extras
from relayline.wire.envelopes.dtypes import DTYPE_F16, DTYPE_TOKENS
from relayline.wire.envelopes.envelope import parse
from relayline.wire.links import rpc
from relayline.wire.links.relay_link import RelayLink
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.wire.envelopes.test_buffers import cached_hash

WIDTH = 50
ROW_BYTES = 2 * WIDTH
HELLO = pb.LinkOpen(protocol_version=1, route_id=3, epoch=5, next_layer=8, n_embd=WIDTH, dtype=DTYPE_F16)
Script = Callable[[Any], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(script: Script) -> AsyncIterator[str]:
    """A server whose Relay call runs the script; yields its address. Replies are bytes, so garbage can be sent."""

    async def relay(requests: object, context: Any) -> None:
        await script(context)

    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(relay, None, None)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(rpc.SERVICE, {"Relay": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


class Receiver:
    """A scripted neighbour: accepts with a window, collects envelopes, and does what the test asks for."""

    def __init__(self, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self.hello: pb.LinkOpen | None = None
        self.arrived: asyncio.Queue[bytes] = asyncio.Queue()
        self.orders: asyncio.Queue[bytes | RelaylineError | None] = asyncio.Queue()

    async def __call__(self, context: Any) -> None:
        self.hello = pb.RelayRequest.FromString(await context.read()).open
        accepted = pb.LinkAccepted(credit_bytes=self.window_bytes, max_rows=77)
        await context.write(pb.RelayResponse(accepted=accepted).SerializeToString())
        reading = asyncio.create_task(self._read(context))
        try:
            while (order := await self.orders.get()) is not None:
                if isinstance(order, RelaylineError):
                    await rpc.abort(context, order)
                await context.write(order)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, context: Any) -> None:
        while isinstance(message := await context.read(), bytes):
            self.arrived.put_nowait(message)

    def give_credit(self, n_bytes: int) -> None:
        self.orders.put_nowait(pb.RelayResponse(credit_bytes=n_bytes).SerializeToString())


class Lost:
    """An `on_lost` that counts."""

    def __init__(self) -> None:
        self.errors: list[RelaylineError] = []
        self.happened = asyncio.Event()

    def __call__(self, error: RelaylineError) -> None:
        self.errors.append(error)
        self.happened.set()


@contextlib.asynccontextmanager
async def linked(window_bytes: int) -> AsyncIterator[tuple[RelayLink, Receiver, Lost]]:
    """An open link to a Receiver. At the end every buffer that was ever made lies in the pool."""
    receiver, lost = Receiver(window_bytes), Lost()
    async with serving(receiver) as address:
        link = await RelayLink.open(address, HELLO, lost)
        try:
            yield link, receiver, lost
            free = [buffer for buffers in link.pool._free.values() for buffer in buffers]
            assert len(free) == len({id(buffer) for buffer in free}) == link.pool.n_created
        finally:
            await link.close()


def filled(link: RelayLink, n_rows: int = 1, sequence: int = 1) -> Buffer:
    buffer = link.pool.lease(1, n_rows)
    buffer.payload[:] = sequence
    buffer.frames["n_rows"] = n_rows
    buffer.seal(5, sequence, 0)
    with_extras(buffer, None, [])
    return buffer


async def send(link: RelayLink, n_rows: int = 1, sequence: int = 1) -> None:
    buffer = filled(link, n_rows, sequence)
    await link.send(buffer, buffer.message)


async def settle() -> None:
    """Let everything that can run now run."""
    for _ in range(20):
        await asyncio.sleep(0)


# --- opening ----------------------------------------------------------------------------------------------------------


async def test_accepted_link_knows_its_terms_and_carries_envelopes():
    async with linked(10_000) as (link, receiver, lost):
        assert receiver.hello == HELLO
        assert (link.max_rows, link.pool.dtype, link.pool.width) == (77, DTYPE_F16, WIDTH)
        await send(link, n_rows=3, sequence=4)
        view = parse(await receiver.arrived.get())
        assert (view.sequence, view.payload.shape, float(view.payload.min())) == (4, (3, WIDTH), 4.0)
        assert (link.envelopes_sent, link.payload_bytes_sent) == (1, 3 * ROW_BYTES)
    assert lost.errors == []


async def test_token_links_have_rows_of_width_one():
    receiver = Receiver(100)
    async with serving(receiver) as address:
        hello = pb.LinkOpen(dtype=DTYPE_TOKENS, n_embd=WIDTH)
        link = await RelayLink.open(address, hello, Lost())
        assert (link.pool.dtype, link.pool.width) == (DTYPE_TOKENS, 1)
        await link.close()


@pytest.mark.parametrize("error", [HandshakeError("other model"), StaleEpochError("epoch 5 is over")])
async def test_refusal_arrives_as_the_typed_error(error: RelaylineError):
    async def refuse(context: Any) -> None:
        await context.read()
        await rpc.abort(context, error)

    async with serving(refuse) as address:
        with pytest.raises(type(error), match=error.message):
            await RelayLink.open(address, HELLO, Lost())


async def test_refusal_before_the_handshake_was_read():
    async def refuse(context: Any) -> None:
        await rpc.abort(context, NotReadyError("still loading"))

    async with serving(refuse) as address:
        with pytest.raises(NotReadyError, match="still loading"):
            await RelayLink.open(address, HELLO, Lost())


@pytest.mark.parametrize("reply", [pb.RelayResponse(credit_bytes=5).SerializeToString(), b"", b"\xff\xff\xff"])
async def test_another_answer_is_a_protocol_error(reply: bytes):
    async def answer(context: Any) -> None:
        await context.write(reply)
        await context.read()

    async with serving(answer) as address:
        with pytest.raises(ProtocolError, match="handshake"):
            await RelayLink.open(address, HELLO, Lost())


async def test_end_of_stream_is_no_acceptance():
    async def leave(context: Any) -> None:
        await context.read()

    async with serving(leave) as address:
        with pytest.raises(StageLostError, match="closed the link"):
            await RelayLink.open(address, HELLO, Lost())


async def test_silence_ends_after_the_handshake_timeout(monkeypatch: pytest.MonkeyPatch):
    ended = asyncio.Event()

    async def say_nothing(context: Any) -> None:
        await ended.wait()

    monkeypatch.setattr(bounds, "HANDSHAKE_TIMEOUT_S", 0.05)
    async with serving(say_nothing) as address:
        with pytest.raises(StageLostError, match="did not accept the link"):
            await RelayLink.open(address, HELLO, Lost())
        ended.set()


async def test_nobody_listening_is_a_lost_stage():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(StageLostError, match="cannot be reached") as raised:
            await RelayLink.open(f"127.0.0.1:{taken.getsockname()[1]}", HELLO, Lost())
    cause, chain = raised.value.__cause__, [raised.value]
    while cause is not None:
        assert cause not in chain, "a chain of causes without an end"
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__


# --- credits ----------------------------------------------------------------------------------------------------------


async def test_sender_waits_for_credit_and_goes_on_with_it():
    async with linked(2 * ROW_BYTES) as (link, receiver, _):
        await send(link, sequence=1)
        await send(link, sequence=2)
        third = asyncio.create_task(send(link, sequence=3))
        for sequence in (1, 2):
            assert parse(await receiver.arrived.get()).sequence == sequence
        await settle()
        assert not third.done()
        assert link.envelopes_sent == 2
        receiver.give_credit(ROW_BYTES)
        await third
        assert parse(await receiver.arrived.get()).sequence == 3


async def test_too_little_credit_keeps_waiting():
    async with linked(4 * ROW_BYTES) as (link, receiver, _):
        await send(link, n_rows=4)
        waiting = asyncio.create_task(send(link, n_rows=2))
        receiver.give_credit(ROW_BYTES)
        await receiver.arrived.get()
        while link._in_flight_bytes != 3 * ROW_BYTES:
            link._credit_changed.clear()
            await link._credit_changed.wait()
            await settle()
        assert not waiting.done()
        receiver.give_credit(ROW_BYTES)
        await waiting


async def test_envelope_larger_than_the_window_goes_alone():
    async with linked(ROW_BYTES) as (link, receiver, _):
        await send(link, n_rows=10, sequence=1)
        second = asyncio.create_task(send(link, n_rows=10, sequence=2))
        assert parse(await receiver.arrived.get()).sequence == 1
        await settle()
        assert not second.done()
        receiver.give_credit(10 * ROW_BYTES)
        await second
        assert parse(await receiver.arrived.get()).sequence == 2


async def test_credit_that_a_receiver_may_keep_to_itself_stops_nobody():
    """A receiver answers once it owes a quarter of the window; a smaller debt may never be answered."""
    async with linked(8 * ROW_BYTES) as (link, receiver, _):
        await send(link, n_rows=2)
        await send(link, n_rows=20)
        blocked = asyncio.create_task(send(link, n_rows=1))
        for _ in range(2):
            await receiver.arrived.get()
        await settle()
        assert not blocked.done()
        receiver.give_credit(20 * ROW_BYTES)
        await blocked


async def test_more_credit_than_was_taken_is_worth_nothing():
    async with linked(ROW_BYTES) as (link, receiver, _):
        await send(link)
        receiver.give_credit(1_000_000)
        await send(link)
        blocked = asyncio.create_task(send(link))
        await settle()
        assert not blocked.done()
        receiver.give_credit(ROW_BYTES)
        await blocked


async def test_envelopes_leave_in_the_order_of_the_calls():
    async with linked(ROW_BYTES) as (link, receiver, _):
        sends = [asyncio.create_task(send(link, sequence=sequence)) for sequence in range(1, 6)]
        for sequence in range(1, 6):
            assert parse(await receiver.arrived.get()).sequence == sequence
            receiver.give_credit(ROW_BYTES)
        await asyncio.gather(*sends)


# --- buffers ----------------------------------------------------------------------------------------------------------


async def test_a_buffer_is_free_as_soon_as_send_returns():
    """gRPC has copied the message by then: overwriting the buffer changes nothing that is on its way."""
    gate = asyncio.Event()
    arrived: list[bytes] = []

    async def read_late(context: Any) -> None:
        await context.read()
        accepted = pb.LinkAccepted(credit_bytes=1 << 20, max_rows=8)
        await context.write(pb.RelayResponse(accepted=accepted).SerializeToString())
        await gate.wait()
        arrived.extend([await context.read() for _ in range(3)])

    lost = Lost()
    async with serving(read_late) as address:
        link = await RelayLink.open(address, HELLO, lost)
        for sequence in range(1, 4):
            await send(link, n_rows=2, sequence=sequence)
        buffer = filled(link, n_rows=2, sequence=99)
        gate.set()
        await lost.happened.wait()
        await link.close()
    assert [parse(message).sequence for message in arrived] == [1, 2, 3]
    assert [float(parse(message).payload.max()) for message in arrived] == [1.0, 2.0, 3.0]
    assert link.pool.n_created == 1
    assert cached_hash(buffer.message) == -1
    assert sys.getrefcount(buffer.message) == sys.getrefcount(Buffer(DTYPE_F16, WIDTH, 1, 2).message)


# --- loss -------------------------------------------------------------------------------------------------------------


async def test_a_loss_reaches_a_waiting_sender_and_is_reported_once():
    async with linked(ROW_BYTES) as (link, receiver, lost):
        await send(link)
        waiting = [asyncio.create_task(send(link)) for _ in range(2)]
        await receiver.arrived.get()
        receiver.orders.put_nowait(StaleEpochError("epoch 5 of this route is over"))
        for task in waiting:
            with pytest.raises(StaleEpochError, match="is over"):
                await task
        await lost.happened.wait()
        with pytest.raises(StaleEpochError):
            await send(link)
        assert [type(error) for error in lost.errors] == [StaleEpochError]
        await link.close()
        assert len(lost.errors) == 1


async def test_a_stream_that_ends_in_order_is_lost_too():
    async with linked(ROW_BYTES) as (link, receiver, lost):
        receiver.orders.put_nowait(None)
        await lost.happened.wait()
        with pytest.raises(StageLostError, match="closed the link"):
            await send(link)
        assert len(lost.errors) == 1


async def test_a_server_that_dies_is_a_lost_stage():
    receiver, lost = Receiver(ROW_BYTES), Lost()
    async with serving(receiver) as address:
        link = await RelayLink.open(address, HELLO, lost)
    await lost.happened.wait()
    assert isinstance(lost.errors[0], StageLostError)
    with pytest.raises(StageLostError):
        await send(link)
    await link.close()
    assert len(lost.errors) == 1


async def test_a_reply_that_does_not_parse_is_a_lost_link():
    async with linked(ROW_BYTES) as (link, receiver, lost):
        receiver.orders.put_nowait(b"\xff\xff\xff")
        await lost.happened.wait()
        assert [type(error) for error in lost.errors] == [ProtocolError]
        with pytest.raises(ProtocolError):
            await send(link)


async def test_close_frees_waiting_senders_and_reports_no_loss():
    async with linked(ROW_BYTES) as (link, receiver, lost):
        await send(link)
        waiting = [asyncio.create_task(send(link)) for _ in range(3)]
        await receiver.arrived.get()
        await settle()
        await link.close()
        for task in waiting:
            with pytest.raises(StageLostError, match="was closed"):
                await task
        with pytest.raises(StageLostError, match="was closed"):
            await send(link)
        await link.close()
        assert lost.errors == []


async def test_a_cancelled_waiter_gives_up_its_envelope_only():
    async with linked(ROW_BYTES) as (link, receiver, lost):
        await send(link, sequence=1)
        waiting = asyncio.create_task(send(link, sequence=2))
        await settle()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        receiver.give_credit(ROW_BYTES)
        await send(link, sequence=3)
        assert [parse(await receiver.arrived.get()).sequence for _ in range(2)] == [1, 3]
        assert lost.errors == []


class StuckCall:
    """A gRPC call whose writes never end; cancelling a write cancels the call, as grpc.aio does."""

    def __init__(self) -> None:
        self.writing, self.cancelled = asyncio.Event(), asyncio.Event()

    async def write(self, message: bytes) -> None:
        self.writing.set()
        try:
            await self.cancelled.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise asyncio.CancelledError

    async def read(self) -> bytes:
        await self.cancelled.wait()
        raise asyncio.CancelledError

    def cancel(self) -> None:
        self.cancelled.set()


class NoChannel:
    async def close(self) -> None:
        pass


def stuck_link(lost: Lost) -> tuple[RelayLink, StuckCall]:
    call, accepted = StuckCall(), pb.LinkAccepted(credit_bytes=1 << 20, max_rows=1)
    channel: Any = NoChannel()
    stream: Any = call
    return RelayLink("b", channel, stream, accepted, BufferPool(DTYPE_F16, WIDTH), lost), call


async def test_a_send_cancelled_halfway_is_a_lost_link():
    lost = Lost()
    link, call = stuck_link(lost)
    sending = asyncio.create_task(send(link))
    await call.writing.wait()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    await lost.happened.wait()
    assert isinstance(lost.errors[0], StageLostError)
    with pytest.raises(StageLostError):
        await send(link)
    await link.close()
    assert len(lost.errors) == 1
    assert link.pool.kept_bytes == len(Buffer(DTYPE_F16, WIDTH, 1, 1).message)


async def test_close_during_a_write_fails_the_send_and_does_not_cancel_its_task():
    lost = Lost()
    link, call = stuck_link(lost)
    sending = asyncio.create_task(send(link))
    await call.writing.wait()
    await link.close()
    with pytest.raises(StageLostError, match="was closed"):
        await sending
    assert lost.errors == []
    assert link.pool.kept_bytes == len(Buffer(DTYPE_F16, WIDTH, 1, 1).message)


async def test_options_travel_behind_the_buffer():
    async with linked(10_000) as (link, receiver, _):
        buffer = link.pool.lease(2, 1)
        buffer.payload[:] = 2.5
        buffer.frames["flags"], buffer.frames["n_rows"] = [16, 0], [0, 1]
        buffer.seal(5, 1, 0)
        message = with_extras(buffer, np.array([3], np.int8), [pb.SessionOptions(seed=9)])
        await link.send(buffer, message)
        view = parse(await receiver.arrived.get())
        assert [options.seed for options in view.options] == [9]
        assert view.exponents is not None
        assert view.exponents.tolist() == [3]
