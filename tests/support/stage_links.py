"""For tests of a stage over real links: frames to send, neighbours, and events to wait for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import numpy as np

from relayline.wire.envelopes.frames import Flag
from relayline.wire.links import rpc
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.fakes import (
    EPOCH,
    MAX_ROWS,
    ROUTE,
    control,
    logits_of,
    rows_frame,
)
from tests.support.served_stage import Coordinator, StageUnderTest

SAMPLE, PREFILL = Flag.WANTS_SAMPLE, Flag.PREFILL
OTHER = ROUTE + 1


def prompt(session_id: int, route_id: int = ROUTE, epoch: int = EPOCH, n_rows: int = 3) -> list[Any]:
    """An open and a whole prompt."""
    names = {"route_id": route_id, "epoch": epoch}
    return [
        control(session_id, Flag.OPEN, **names),
        rows_frame(session_id, 0, n_rows, PREFILL | SAMPLE, **names),
    ]


def token_after(*rows: np.ndarray) -> int:
    """The fake engine's token for a session that holds these rows."""
    return int(logits_of([tuple(row) for part in rows for row in part.tolist()]).argmax())


async def status_of(one: Coordinator) -> pb.StatusResponse:
    return await rpc.call(one.channel, "Status", pb.StatusRequest(), pb.StatusResponse, "stage", 20)


class Downstream:
    """A neighbour that accepts the link and then follows the test."""

    def __init__(self, credit_bytes: int, reads: bool = True) -> None:
        self.credit_bytes, self.reads = credit_bytes, reads
        self.received: asyncio.Queue[bytes] = asyncio.Queue()
        self.credits: asyncio.Queue[int] = asyncio.Queue()
        self.gone = asyncio.Event()
        self.address = ""
        self.n_links = 0

    async def relay(self, _: object, context: Any) -> None:
        await context.read()
        accepted = pb.LinkAccepted(credit_bytes=self.credit_bytes, max_rows=MAX_ROWS)
        await context.write(rpc.serialize(pb.RelayResponse(accepted=accepted)))
        giving = asyncio.create_task(self._give(context))
        self.n_links += 1
        try:
            while self.reads and isinstance(message := await context.read(), bytes):
                self.received.put_nowait(message)
            await self.gone.wait()
        finally:
            self.n_links -= 1
            giving.cancel()

    async def _give(self, context: Any) -> None:
        while True:
            await context.write(rpc.serialize(pb.RelayResponse(credit_bytes=await self.credits.get())))


@contextlib.asynccontextmanager
async def downstream(credit_bytes: int, reads: bool = True) -> AsyncIterator[Downstream]:
    neighbour = Downstream(credit_bytes, reads)
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(neighbour.relay, None, None)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(rpc.SERVICE, {"Relay": handler}),))
    neighbour.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield neighbour
    finally:
        neighbour.gone.set()
        await server.stop(0)


def counted_steps(stage: StageUnderTest) -> asyncio.Queue[None]:
    """A queue that gets one entry for every native step."""
    loop, steps = asyncio.get_running_loop(), asyncio.Queue[None]()
    stage.engine.on_decode = lambda: loop.call_soon_threadsafe(steps.put_nowait, None)
    return steps


async def counted(steps: asyncio.Queue[None], n_steps: int) -> None:
    async with asyncio.timeout(60):
        for _ in range(n_steps):
            await steps.get()
