"""Goal: a peer that opens calls and leaves them open cannot fill a process: their number is bounded.

Method: a port on loopback with the standard health service and one handler of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from relayline.wire.common import bounds
from relayline.wire.common.errors import NotReadyError, StartError
from relayline.wire.links import listening, rpc
from relayline.wire.links.listening import Listener
from relayline.wire.links.security import PLAINTEXT

MORE = 12
N_TURNS = 100  # of the event loop


class Held(grpc.GenericRpcHandler):
    """Answers a stream with one message and holds it."""

    def __init__(self) -> None:
        self.n_now = self.n_most = 0

    def service(self, handler_call_details: Any) -> Any:
        if handler_call_details.method != rpc.method("Watch"):
            return None

        async def hold(requests: Any, context: Any) -> None:
            self.n_now += 1
            self.n_most = max(self.n_most, self.n_now)
            try:
                await context.write(b"x")
                await asyncio.Event().wait()
            finally:
                self.n_now -= 1

        return grpc.stream_stream_rpc_method_handler(hold)


@contextlib.asynccontextmanager
async def port_of(held: Held) -> AsyncIterator[str]:
    listener = Listener(PLAINTEXT, "stage 1")
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, listener.server)
    listener.server.add_generic_rpc_handlers((held,))
    port = listener.add_port("127.0.0.1", 0)
    await listener.server.start()
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await listener.stop(0)


async def test_a_connection_has_a_bound_of_calls_and_the_next_ones_wait() -> None:
    held = Held()
    async with port_of(held) as address, rpc.open_channel(address) as channel:
        make = channel.stream_stream(rpc.method("Watch"), request_serializer=None, response_deserializer=None)
        calls = [make() for _ in range(bounds.CALLS_PER_CONNECTION_MAX + MORE)]
        reads = [asyncio.ensure_future(call.read()) for call in calls]
        answered, waiting = set[int](), set(range(len(calls)))
        while waiting:
            await asyncio.wait([reads[at] for at in waiting], return_when=asyncio.FIRST_COMPLETED, timeout=20)
            new = {at for at in waiting if reads[at].done()}
            assert {reads[at].result() for at in new} == {b"x"}
            answered |= new
            waiting -= new
            if len(answered) >= bounds.CALLS_PER_CONNECTION_MAX and waiting:
                calls[answered.pop()].cancel()
        assert held.n_most == bounds.CALLS_PER_CONNECTION_MAX


async def test_calls_after_health_have_a_bound_and_leave_room_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "HEALTH_CALLS_MAX", 3)
    request = health_pb2.HealthCheckRequest()
    async with port_of(Held()) as address, rpc.open_channel(address) as channel, rpc.open_channel(address) as other:
        watches = [health_pb2_grpc.HealthStub(each).Watch(request) for each in (channel, other, channel)]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        for stub in (health_pb2_grpc.HealthStub(channel), health_pb2_grpc.HealthStub(other)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Check(request)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert caught.value.details() == "stage 1 already answers 3 health checks, which is the limit"
        make = channel.stream_stream(rpc.method("Watch"), request_serializer=None, response_deserializer=None)
        assert await make().read() == b"x", "links go on"
        watches[0].cancel()
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await health_pb2_grpc.HealthStub(other).Check(request)
                break


class SlowEnd(grpc.GenericRpcHandler):
    """Answers a stream with one message, ends it when its port closes, and takes some turns more for that."""

    def __init__(self) -> None:
        self.closing = asyncio.Event()

    def service(self, handler_call_details: Any) -> Any:
        async def hold(requests: Any, context: Any) -> None:
            await context.write(b"x")
            try:
                await self.closing.wait()
                await rpc.abort(context, NotReadyError("closing"))
            finally:
                for _ in range(N_TURNS):
                    await asyncio.sleep(0)

        return grpc.stream_stream_rpc_method_handler(hold)


def tasks_of_calls() -> int:
    """gRPC's tasks of the calls that are served: two of each."""
    made_for = [getattr(task.get_coro(), "__name__", "") for task in asyncio.all_tasks()]
    return sum(name in ("_schedule_rpc_coro", "_handle_exceptions") for name in made_for)


async def test_no_task_of_a_call_is_left_when_a_port_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC logs one that the end of the event loop cancels as a fault of the handler, with a traceback."""
    monkeypatch.setattr(listening, "HANDLERS_END_S", 60.0)  # a busy host may take longer for some turns
    held = SlowEnd()
    listener = Listener(PLAINTEXT, "stage 1")
    listener.server.add_generic_rpc_handlers((held,))
    port = listener.add_port("127.0.0.1", 0)
    await listener.server.start()
    async with rpc.open_channel(f"127.0.0.1:{port}") as channel:
        make = channel.stream_stream(rpc.method("Watch"), request_serializer=None, response_deserializer=None)
        calls = [make() for _ in range(3)]
        assert [await call.read() for call in calls] == [b"x"] * 3
        assert tasks_of_calls() == 6
        held.closing.set()
        await listener.stop(20)
        assert tasks_of_calls() == 0


@pytest.mark.parametrize("n_turns", range(8))
async def test_a_cancellation_as_a_server_stops_is_not_lost(n_turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC waits for its own end by asyncio.wait_for, which in Python 3.11 loses one that comes so many turns later."""
    listener = Listener(PLAINTEXT, "stage 1")
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def stop(grace_s: float | None) -> None:
        await asyncio.wait_for(asyncio.shield(ended), grace_s)

    monkeypatch.setattr(listener.server, "stop", stop)
    going_on = asyncio.Event()

    async def work() -> None:
        await listener.stop(20)
        await going_on.wait()  # what an owner does next, for ever

    task = asyncio.create_task(work())
    for _ in range(4):
        await asyncio.sleep(0)
    ended.set_result(None)
    for _ in range(n_turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=60)
    is_cancelled = task.cancelled()
    task.cancel()
    monkeypatch.undo()
    await listener.stop(None)
    assert is_cancelled


async def test_a_port_that_is_taken_is_refused_with_the_flag_that_chooses_another() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for flag, more in (("", ""), ("--listen HOST:PORT", " --listen HOST:PORT chooses another one")):
            with pytest.raises(StartError) as caught:
                Listener(PLAINTEXT, "the stage").add_port("127.0.0.1", port, flag)
            assert caught.value.message == f"cannot listen on 127.0.0.1:{port}; is the port taken?{more}"
