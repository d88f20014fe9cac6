"""One stage served on a real port over a fake engine, and a minimal client of it in place of a coordinator."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import numpy as np

from relayline.coordinator.engine.stage_client import StageClient
from relayline.stage.observe.stats import StageStats
from relayline.stage.queue_types import QueuedFrame
from relayline.stage.service import StageService, handlers
from relayline.stage.steps.batcher import Batcher
from relayline.stage.steps.lanes import LaneTable
from relayline.stage.steps.picking import drafts_of
from relayline.stage.steps.placement import heads_of
from relayline.stage.steps.policy import DrainPolicy
from relayline.stage.steps.runner import Runner
from relayline.stage.steps.step import StepExecutor
from relayline.wire.common import bounds
from relayline.wire.common.errors import RelaylineError
from relayline.wire.envelopes.buffers import Buffer, with_extras
from relayline.wire.envelopes.dtypes import DTYPE_F32, DTYPE_TOKENS
from relayline.wire.links import rpc
from relayline.wire.links.roles import Identity
from relayline.wire.links.security import PLAINTEXT, LinkSecurity
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.telemetry.telemetry import Telemetry
from tests.support.fakes import CTX, EPOCH, MAX_ROWS, ROUTE, WIDTH, FakeEmbeddings, FakeEngine, new_facts


class StageUnderTest:
    """A StageService on a real port, over a fake engine, with access to its parts."""

    def __init__(self, address: str, service: StageService, executor: StepExecutor, engine: FakeEngine) -> None:
        self.address, self.service, self.executor, self.engine = address, service, executor, engine
        self.artifact = service.epochs.facts.artifact

    async def settled(self) -> tuple[int, list[list[tuple[float, ...]]]]:
        """(used lanes, KV content) once the decode thread has done all earlier work."""
        await self.service.runner.call(lambda: None)
        return await self.service.runner.call(
            lambda: (self.executor.lanes.n_used, [list(x) for x in self.engine.lanes])
        )


@contextlib.asynccontextmanager
async def served(
    stage_index: int = 1,
    stage_count: int = 2,
    *,
    n_lanes: int = 4,
    n_embd: int = WIDTH,
    telemetry: Telemetry | None = None,
) -> AsyncIterator[StageUnderTest]:
    """Serve one stage of a fake pipeline in this process."""
    facts = new_facts(stage_index, stage_count, n_lanes=n_lanes, n_embd=n_embd)
    engine = FakeEngine(n_lanes=n_lanes, is_last=facts.artifact.is_last, n_embd=n_embd)
    embeddings = FakeEmbeddings() if facts.artifact.is_first else None
    executor = StepExecutor(engine, LaneTable(n_lanes, CTX), stage_index, embeddings, close=engine.close)
    service = StageService(facts, executor, StageStats(), telemetry)
    crashed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    outbound, batcher = service.outbound, Batcher(DrainPolicy(MAX_ROWS, MAX_ROWS))
    runner = Runner(batcher, executor, outbound.deliver, crashed.set_result, outbound.account)
    service.attach(runner)
    sender = asyncio.create_task(outbound.send_forever())
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    server.add_generic_rpc_handlers((handlers(lambda: service),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield StageUnderTest(f"127.0.0.1:{port}", service, executor, engine)
        assert not crashed.done(), crashed.result()
        assert not sender.done(), "the sender died"
    finally:
        await service.close()
        await server.stop(1)
        sender.cancel()
        await runner.stop()


class Coordinator:
    """The minimal user of one stage as a route: configure, listen, an upstream link, frames as bytes."""

    def __init__(
        self, stage: StageUnderTest, route_id: int = ROUTE, epoch: int = EPOCH, *,
        security: LinkSecurity = PLAINTEXT, to: Identity | None = None,
    ) -> None:  # fmt: skip
        self.stage, self.route_id, self.epoch = stage, route_id, epoch
        self.client = StageClient(stage.address, security, to)
        self.returned: asyncio.Queue[pb.ReturnResponse] = asyncio.Queue()
        self.lost: asyncio.Future[RelaylineError] = asyncio.get_running_loop().create_future()
        self.channel = rpc.open_channel(stage.address, security, to)
        self.call: Any = None
        self.held: dict[int, int] = {}  # the stage's answer when the epoch began

    async def __aenter__(self) -> Coordinator:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        await self.channel.close()

    async def configure(self, **changes: Any) -> None:
        """Begin the epoch, unless a change makes it a refusal."""
        artifact = self.stage.artifact
        fields = {
            "protocol_version": bounds.PROTOCOL_VERSION,
            "route_id": self.route_id,
            "epoch": self.epoch,
            "pipeline_id": artifact.pipeline_id,
            "stage_index": artifact.stage_index,
            "wire_dtype": pb.DTYPE_F32,
        }
        answer = await self.client.configure(pb.ConfigureRequest(**(fields | changes)))
        self.held = {held.session_id: held.n_tokens for held in answer.held}

    async def listen(self) -> None:
        """Subscribe; messages go to `returned`, the stream's end to `lost`."""
        request = pb.ReturnRequest(route_id=self.route_id, epoch=self.epoch)
        await self.client.listen(request, self.returned.put_nowait, self.lost.set_result)

    def hello(self, **changes: Any) -> pb.LinkOpen:
        artifact = self.stage.artifact
        fields = {
            "protocol_version": bounds.PROTOCOL_VERSION,
            "route_id": self.route_id,
            "epoch": self.epoch,
            "pipeline_id": artifact.pipeline_id,
            "source_sha256": artifact.source_sha256,
            "next_layer": artifact.layer_start,
            "n_embd": artifact.n_embd,
            "dtype": pb.DTYPE_TOKENS if artifact.is_first else pb.DTYPE_F32,
        }
        return pb.LinkOpen(**(fields | changes))

    async def upstream(self, **changes: Any) -> pb.LinkAccepted:
        """Open the link as an upstream neighbour. Raises the typed refusal."""
        hello = self.hello(**changes)
        metadata = rpc.route_metadata(hello.route_id, hello.epoch)
        return await self.first_message(rpc.serialize(pb.RelayRequest(open=hello)), metadata)

    async def first_message(self, message: bytes, metadata: tuple[tuple[str, str], ...] = ()) -> pb.LinkAccepted:
        """Open a stream with these bytes. Raises the typed refusal."""
        self.n_sent = 0
        try:
            self.call, data = await rpc.first_reply(self.channel, rpc.method("Relay"), message, metadata)
        except grpc.aio.AioRpcError as error:
            raise rpc.typed(error, "stage") from error
        return rpc.parser(pb.RelayResponse)(data).accepted

    async def start(self, **changes: Any) -> Coordinator:
        """Configure, listen and connect."""
        await self.configure(**changes)
        await self.listen()
        await self.upstream()
        return self

    async def send(self, *frames: QueuedFrame) -> None:
        """Send frames as one envelope."""
        await self.write(*frames, width=1 if self.stage.artifact.is_first else None)

    async def write(self, *frames: QueuedFrame, **form: Any) -> None:
        """Send frames as one envelope of another form."""
        self.n_sent += 1
        await self.call.write(envelope_of(*frames, **({"epoch": self.epoch, "sequence": self.n_sent} | form)))

    async def reply(self) -> pb.ReturnResponse:
        """The next message of the return stream."""
        async with asyncio.timeout(60):
            return await self.returned.get()

    async def refusal(self) -> RelaylineError:
        """The typed error with which the stage ends the upstream link."""
        async with asyncio.timeout(60):
            try:
                while isinstance(await self.call.read(), bytes):
                    pass
            except grpc.aio.AioRpcError as error:
                return rpc.typed(error, "stage")
        raise AssertionError("the link ended without an error")


def envelope_of(
    *frames: QueuedFrame, epoch: int = EPOCH, width: int | None = None, dtype: int = DTYPE_F32, sequence: int = 1
) -> bytes:
    """The message that carries these frames; width 1 means that their rows are token ids."""
    rows = [frame.payload for frame in frames if frame.payload is not None]
    if width == 1:
        dtype = DTYPE_TOKENS
    width = width or (rows[0].shape[1] if rows else WIDTH)
    buffer = Buffer(dtype, width, len(frames), sum(map(len, rows)))
    if rows:
        buffer.payload[:] = np.concatenate(rows)
    buffer.seal(epoch, sequence, 0, heads=heads_of(list(frames)))
    options = [frame.options for frame in frames if frame.options is not None]
    return with_extras(buffer, None, options, drafts_of(list(frames)))
