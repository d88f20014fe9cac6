"""Goal: a closed object is gone at once, sockets included, and not only at the next run of the garbage collector."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from relayline.coordinator.engine.stage_client import StageClient
from relayline.coordinator.engine.token_sender import TokenSender
from relayline.deploy.testing.engines import stage_config
from relayline.deploy.testing.tiny_slices import TinyShape, write_pipeline
from relayline.stage.process import serve
from relayline.stage.served import Served
from relayline.wire.common import bounds
from relayline.wire.common.errors import (
    InvalidRequestError,
    NotReadyError,
    RelaylineError,
    StageLostError,
    StaleEpochError,
    again,
    grpc_status,
)
from relayline.wire.common.tasks import end_task
from relayline.wire.links import rpc
from relayline.wire.links.listening import Listener
from relayline.wire.links.relay_link import RelayLink
from relayline.wire.links.security import PLAINTEXT
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.fakes import EPOCH, ROUTE
from tests.support.served_stage import Coordinator, StageUnderTest, served


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def gone(found: weakref.ref[object]) -> bool:
    """Whether the object goes within some turns of the loop."""
    for _ in range(100):
        if found() is None:
            return True
        await asyncio.to_thread(lambda: None)  # gRPC's own threads get a turn
    return False


async def link_to(stage: StageUnderTest, on_lost: Callable[[RelaylineError], None]) -> RelayLink:
    artifact = stage.artifact
    hello = pb.LinkOpen(
        protocol_version=bounds.PROTOCOL_VERSION,
        route_id=ROUTE,
        epoch=EPOCH,
        pipeline_id=artifact.pipeline_id,
        source_sha256=artifact.source_sha256,
        next_layer=artifact.layer_start,
        n_embd=artifact.n_embd,
        dtype=pb.DTYPE_F32,
    )
    return await RelayLink.open(stage.address, hello, on_lost)


@contextlib.asynccontextmanager
async def configured() -> AsyncIterator[tuple[StageUnderTest, Coordinator]]:
    async with served() as stage, Coordinator(stage) as one:
        await one.configure()
        with no_collector():
            yield stage, one


async def test_a_return_stream() -> None:
    async with configured() as (_, one):
        await one.listen()
        channel = weakref.ref(one.client._channel)
        await one.client.close()
        one.client = StageClient(one.stage.address)
        assert await gone(channel)


async def test_the_route_of_an_aborted_return_stream() -> None:
    """gRPC's context keeps the error with which a call was aborted, and the context is in the frames that it passed."""
    async with configured() as (stage, one):
        await one.listen()
        found = weakref.ref(stage.service.epochs.standing(ROUTE, EPOCH))
        await one.configure(epoch=EPOCH + 1)
        assert await gone(found)


async def test_an_aborted_call_of_a_guarded_port() -> None:
    """gRPC's context has the call, and so its connection; in those frames it would be in a cycle."""

    async def refuse(_: object, context: Any) -> None:
        await rpc.abort(context, StaleEpochError("over"))

    def kept() -> list[object]:
        return [each for each in gc.get_objects() if isinstance(each, grpc.aio.AbortError)]

    listener = Listener(PLAINTEXT, "stage 1")
    handlers = {"Watch": grpc.stream_stream_rpc_method_handler(refuse)}
    listener.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(rpc.SERVICE, handlers),))
    port = listener.add_port("127.0.0.1", 0)
    await listener.server.start()
    channel = rpc.open_channel(f"127.0.0.1:{port}")
    try:
        with no_collector():
            for _ in range(9):
                call = channel.stream_stream(rpc.method("Watch"))()
                assert await call.code() is grpc_status(StaleEpochError(""))
            for _ in range(100):
                if len(kept()) <= 2:
                    break
                await asyncio.to_thread(lambda: None)
            assert len(kept()) <= 2, "gRPC has the latest until the next ones"
    finally:
        await channel.close()
        await listener.server.stop(None)


@pytest.mark.parametrize("ends", ["closed here", "ended there"])
@pytest.mark.parametrize("uses", ["idle", "refused a send", "with a sender"])
async def test_a_link(ends: str, uses: str) -> None:
    async with configured() as (stage, _):
        lost = asyncio.Event()
        link = await link_to(stage, lambda error: lost.set())
        if ends == "ended there":
            await stage.service.close()
            await lost.wait()
        if uses == "with a sender":
            sender = TokenSender(link, EPOCH, lambda error: None)
            await sender.close()
            del sender
        found, channel = weakref.ref(link), weakref.ref(link._channel)
        await link.close()
        if uses == "refused a send":
            with pytest.raises((StageLostError, StaleEpochError, NotReadyError)):
                await link.send(link.pool.lease(1, 1), b"")
        del link
        assert await gone(found)
        assert await gone(channel)


@pytest.mark.parametrize("how", ["cancelled", "failed", "ended"])
async def test_a_task_that_is_ended_holds_nothing(how: str) -> None:
    class Owner:
        task: asyncio.Task[None]

        async def work(self) -> None:
            if how == "cancelled":
                await asyncio.Event().wait()
            if how == "failed":
                try:
                    raise ValueError(how)
                except ValueError as error:
                    raise KeyError(how) from error

    with no_collector():
        owner = Owner()
        owner.task = asyncio.create_task(owner.work())
        await asyncio.sleep(0)
        found = weakref.ref(owner)
        await end_task(owner.task)
        del owner
        assert await gone(found)


def test_a_copy_of_an_error_says_the_same_and_holds_nothing() -> None:
    kept = InvalidRequestError("why", param="n")
    with pytest.raises(InvalidRequestError, match="why") as caught:
        raise again(kept)
    assert caught.value is not kept
    assert caught.value.param == "n"
    assert kept.__traceback__ is None


async def test_a_stage_closes_to_its_end_when_it_is_cancelled_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing, may_close = asyncio.Event(), asyncio.Event()
    end_calls = Served.end_calls

    async def held(self: Served) -> None:
        closing.set()
        await may_close.wait()
        await end_calls(self)

    monkeypatch.setattr(Served, "end_calls", held)
    (path,) = write_pipeline(tmp_path, TinyShape(n_layers=1), [])
    config = stage_config(path, n_lanes=1, ctx_tokens=32, n_threads=1, verify=False, calibrate=False)

    async def serving() -> None:
        async with serve(config):
            pass

    task = asyncio.create_task(serving())
    await closing.wait()
    task.cancel()
    await asyncio.sleep(0)
    may_close.set()
    async with asyncio.timeout(60):
        await asyncio.wait({task})
    assert task.cancelled()
    assert not [thread for thread in threading.enumerate() if thread.name == "decode"], "its decode thread has ended"
