"""A stage process: load the artifact, serve it, end cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import os
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as grpc_health_aio

from stage.artifact import open_artifact, verify_artifact
from stage.batcher import Batcher
from stage.calibrate import cached_curves
from stage.config import StageConfig
from stage.curves import Curves
from stage.embedding import EmbeddingTable
from stage.lanes import LaneTable
from stage.native import EngineConfig, NativeEngine
from stage.policy import DrainPolicy, GroupPolicy, Policy, SinglePolicy
from stage.runner import Runner
from stage.service import StageFacts, StageService
from stage.stats import StageStats
from stage.step import StepExecutor
from stage.step_types import Padding
from wire import rpc
from wire.curve import PAD_SEARCH_ROWS
from wire.errors import StartError
from wire.process import first_of, run

log = logging.getLogger("relayline.stage")

SHUTDOWN_GRACE_S = 2.0  # calls still running when the process ends

OnReady = Callable[[str, StageFacts], None]


def run_stage(config: StageConfig, on_ready: OnReady) -> None:
    """Run one stage until SIGINT or SIGTERM. `on_ready(address, facts)` is called once it can take links.

    Raises ArtifactError, ModelFileError, NativeError, StartError or UsageError before that.
    """

    # An abort inside ggml would start a debugger on this process, which takes long and says nothing to a user.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")

    async def main(stopping: asyncio.Event) -> None:
        async with serve(config) as (address, facts, crashed):
            on_ready(address, facts)
            stop = asyncio.ensure_future(stopping.wait())
            await first_of(stop, crashed)
            if crashed.done():
                await crashed

    run(main)


def load(config: StageConfig) -> tuple[StageFacts, StepExecutor]:
    """Verify and load the artifact; takes as long as the disk needs."""
    artifact = verify_artifact(config.artifact) if config.verify else open_artifact(config.artifact)
    wanted_max = min(config.n_lanes + PAD_SEARCH_ROWS, config.max_rows)
    engine = NativeEngine(
        EngineConfig(
            artifact_path=config.artifact,
            n_lanes=config.n_lanes,
            ctx_tokens=config.ctx_tokens,
            max_rows=config.max_rows,
            n_threads=config.threads_used,
            gpu_layers=config.gpu_layers,
            kv_type=config.kv_type,
            spare_lanes=1,
            max_wanted=wanted_max,
        )
    )
    embeddings = EmbeddingTable(artifact) if artifact.is_first else None
    curves = cached_curves(engine) if config.calibrate else Curves()
    facts = StageFacts(artifact, config, importlib.metadata.version("relayline"), curves)
    executor = StepExecutor(
        engine,
        LaneTable(config.n_lanes, config.ctx_tokens),
        artifact.stage_index,
        embeddings,
        close=engine.close,
        padding=Padding(curves, config.n_lanes, wanted_max, enabled=config.policy == "auto"),
    )
    return facts, executor


def make_policy(config: StageConfig, curves: Curves) -> Policy:
    """Return the batching policy that the configuration names."""
    if config.policy == "single":
        return SinglePolicy(config.max_rows)
    if config.policy == "drain":
        return DrainPolicy(max_rows=config.max_rows, prefill_rows=config.prefill_rows)
    return GroupPolicy(config.max_rows, curves.decode)


@contextlib.asynccontextmanager
async def serve(config: StageConfig) -> AsyncIterator[tuple[str, StageFacts, asyncio.Future[None]]]:
    """Serve a stage inside the running loop; yields (address, facts, a future that fails if the engine crashes)."""
    facts, executor = load(config)
    crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    stats = StageStats()
    service = StageService(facts, executor, stats)
    batcher = Batcher(make_policy(config, facts.curves))
    runner = Runner(batcher, executor, service.deliver, crashed.set_exception)
    service.attach(runner)
    sender = asyncio.create_task(service.send_forever())
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    server.add_generic_rpc_handlers((service.handlers(),))
    health = grpc_health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    try:
        try:
            port = server.add_insecure_port(f"{config.host}:{config.port}")
        except RuntimeError as error:
            raise StartError(f"cannot listen on {config.host}:{config.port}; is the port taken?") from error
        await server.start()
        for name in ("", rpc.SERVICE):
            await health.set(name, health_pb2.HealthCheckResponse.SERVING)
        yield f"{config.host}:{port}", facts, crashed
    finally:
        await health.enter_graceful_shutdown()
        if not crashed.done():
            await service.close()
        await server.stop(SHUTDOWN_GRACE_S)
        sender.cancel()
        if not crashed.done():
            await runner.call(executor.close)
        await runner.stop()
