"""A stage process: load the artifact, serve it, end cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from llama_cpp import llama_cpp as llama

from relayline.stage.config import StageConfig
from relayline.stage.engine.artifact import StageArtifact, open_artifact, verify_artifact
from relayline.stage.engine.embedding import EmbeddingTable
from relayline.stage.engine.load_attempts import attempt
from relayline.stage.engine.loading import Load, LoadStoppedError
from relayline.stage.engine.native import EngineConfig, NativeEngine
from relayline.stage.engine.open_tier import open_tier
from relayline.stage.engine.place import idle_gpus, place_of
from relayline.stage.facts import StageFacts
from relayline.stage.observe.metrics import serve_metrics
from relayline.stage.observe.stats import StageStats
from relayline.stage.sampling.constraint import read_vocabulary
from relayline.stage.served import SHUTDOWN_GRACE_S, Served
from relayline.stage.service import handlers
from relayline.stage.speed.calibrate import cached_curves
from relayline.stage.speed.curves import Curves
from relayline.stage.steps.lane_states import LaneStates
from relayline.stage.steps.lanes import LaneTable
from relayline.stage.steps.padding import Padding
from relayline.stage.steps.policy import POLICIES, Policy, StepLimits
from relayline.stage.steps.step import StepExecutor
from relayline.wire.common.bounds import DRAFTED_ROWS_MAX, MESSAGE_BYTES_MAX
from relayline.wire.common.curve import PAD_SEARCH_ROWS, CostCurve
from relayline.wire.common.errors import UsageError
from relayline.wire.common.process import first_of, run
from relayline.wire.envelopes.envelope import bytes_max_of
from relayline.wire.links import rpc
from relayline.wire.links.listening import Listener
from relayline.wire.links.revocation import Revocations
from relayline.wire.links.security import address_of
from relayline.wire.telemetry.telemetry import Role, Telemetry

log = logging.getLogger("relayline.stage")

OnReady = Callable[[str, StageFacts], None]


def run_stage(config: StageConfig, on_ready: OnReady) -> None:
    """Run one stage until SIGINT or SIGTERM. `on_ready(address, facts)` is called once it can take links.

    Raises ArtifactError, ModelFileError, NativeError, StartError or UsageError before that.
    """

    prepare_environment()

    async def main(stopping: asyncio.Event) -> None:
        load, stop = Load(), asyncio.ensure_future(stopping.wait())
        stop.add_done_callback(lambda _: load.stop())
        with contextlib.suppress(LoadStoppedError):
            async with serve(config, load) as (address, facts, crashed):
                on_ready(address, facts)
                await first_of(stop, crashed)

    run(main)


def prepare_environment() -> None:
    """Set what native code reads from the environment. Call it before anything is loaded."""
    # An abort inside ggml would start a debugger on this process, which takes long and says nothing to a user.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")


def load_stage(
    config: StageConfig, load: Load | None = None, like: Curves | None = None
) -> tuple[StageFacts, StepExecutor]:
    """Verify and load the artifact; takes as long as the disk needs.

    Raises LoadStoppedError when stopped. Its speed is measured if the configuration asks for it, or starts as a copy of
    the curves of `like`.
    """
    artifact = verify_artifact(config.artifact, load) if config.verify else open_artifact(config.artifact)
    with attempt(config.artifact):
        return _load(config, artifact, load, like)


def _load(
    config: StageConfig, artifact: StageArtifact, load: Load | None, like: Curves | None
) -> tuple[StageFacts, StepExecutor]:
    settings = config.engine.of_architecture(artifact.architecture)
    config = dataclasses.replace(config, engine=settings)
    if settings.gpu_layers and not llama.llama_supports_gpu_offload():
        log.warning("this build of llama.cpp cannot use a GPU: all layers run on the CPU; see `relayline doctor`")
    elif not settings.gpu_layers and (idle := idle_gpus()):
        log.warning("%s is not used; --gpu-layers -1 (in a manifest: device: gpu) puts all layers there", idle[0])
    # Rows of a spare lane would be a micro-batch of their own where lanes have cells of their own.
    spare_lanes = 1 if settings.layout_used == "unified" else 0
    wanted_max = min(settings.n_lanes + DRAFTED_ROWS_MAX + PAD_SEARCH_ROWS, settings.max_rows)
    engine = NativeEngine(
        EngineConfig(
            artifact_path=config.artifact,
            settings=settings,
            spare_lanes=spare_lanes,
            max_wanted=wanted_max,
        ),
        load,
    )
    try:
        embeddings = EmbeddingTable(artifact, engine.config.settings.n_threads) if artifact.is_first else None
        if like is not None:
            curves = like.copy(has_head=engine.is_last)
        else:
            curves = (
                cached_curves(engine, load=load) if settings.calibrate else Curves.of_stage(has_head=engine.is_last)
            )
    except BaseException:
        engine.close()
        raise
    rewinds = not engine.keeps_state and (not engine.window or settings.layout_used == "per-lane")
    facts = StageFacts(
        artifact,
        config,
        importlib.metadata.version("relayline"),
        curves,
        rewinds,
        engine.keeps_state,
        engine.rewind_rows,
        place=place_of(settings),
        name=own_name(config),
    )
    # With a recurrent state a lane's further rows are computed apart: scratch rows would be another micro-batch.
    pads = settings.policy == "auto" and spare_lanes > 0 and not engine.keeps_state
    executor = StepExecutor(
        engine,
        LaneTable(settings.n_lanes, settings.ctx_tokens),
        artifact.stage_index,
        embeddings,
        close=engine.close,
        padding=Padding(curves, settings.n_lanes, wanted_max, enabled=pads),
        vocabulary=read_vocabulary(engine.vocab, engine.n_vocab) if engine.is_last else None,
        states=LaneStates(engine, engine.saved, open_tier(settings, artifact)),
    )
    return facts, executor


def own_name(config: StageConfig) -> str:
    """Return which stage its credential says that this is, empty without one."""
    identity = config.security.identity
    return identity.name if identity is not None else ""


def make_policy(config: StageConfig, curves: Curves) -> Policy:
    """Return the batching policy that the configuration names."""
    settings = config.engine
    # Rows of other lanes are computed apart where lanes have cells of their own: there is nothing to fill up.
    curve = curves.decode if settings.layout_used == "unified" else CostCurve()
    limits = StepLimits(settings.max_rows, settings.prefill_rows, curve, settings.n_lanes + DRAFTED_ROWS_MAX)
    return POLICIES[settings.policy](limits)


@contextlib.asynccontextmanager
async def serve(
    config: StageConfig, load: Load | None = None
) -> AsyncIterator[tuple[str, StageFacts, asyncio.Future[None]]]:
    """Serve a stage inside the running loop; yields (address, facts, a future that fails if it crashes).

    Entering raises the errors of `run_stage`, and LoadStoppedError once `load` is stopped. Leaving raises the stage's
    crash: NativeError for a step that hangs, even one that hung while the stage was stopping.
    """
    async with serve_changing(config, load) as served:
        yield served.address, served.facts, served.crashed


@contextlib.asynccontextmanager
async def serve_changing(config: StageConfig, load: Load | None = None) -> AsyncIterator[Served]:
    """Serve a stage whose engine may be replaced later; yields the handle of its port. Raises as `serve`."""
    load = load or Load()
    try:
        # In a thread, so that a stage that joined can go on saying that it is there.
        facts, executor = await asyncio.to_thread(load_stage, config, load)
    except asyncio.CancelledError:
        load.stop()
        raise
    try:
        telemetry = start_telemetry(facts)
    except UsageError:
        executor.close()
        raise
    crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    served = Served(load_stage, make_policy, StageStats(), crashed)
    served.start(facts, executor, telemetry)
    artifact = facts.artifact
    receive_bytes_max = min(bytes_max_of(1 if artifact.is_first else artifact.width_in), MESSAGE_BYTES_MAX)
    listener = Listener(config.security, f"stage {artifact.stage_index}", receive_bytes_max, config.coordinator)
    served.begin(listener.guard)
    server = listener.server
    server.add_generic_rpc_handlers((handlers(lambda: served.service, served.give_call),))
    health = listener.add_health()
    if config.engine.reflection:
        listener.add_reflection(rpc.SERVICE, HEALTH_SERVICE)
    try:
        port = listener.add_port(config.host, config.port)
        async with metrics(config, served, listener.guard.revocations) as served.metrics_address:
            await server.start()
            for name in ("", rpc.SERVICE):
                await health.set(name, health_pb2.HealthCheckResponse.SERVING)
            served.address = address_of(config.host, port)
            yield served
    finally:
        await health.enter_graceful_shutdown()
        await served.end_calls()
        await server.stop(SHUTDOWN_GRACE_S)
        listener.close()
        await served.close()
        await asyncio.to_thread(telemetry.shutdown)
    if crashed.done():
        await crashed


def start_telemetry(facts: StageFacts) -> Telemetry:
    """Start telemetry as configured for the stage. Raises UsageError for OTEL_* that cannot be used."""
    artifact = facts.artifact
    return Telemetry.start(
        Role.STAGE,
        f"{socket.gethostname()}:{os.getpid()}",
        facts.config.telemetry,
        stage_index=artifact.stage_index,
        layers=(artifact.layer_start, artifact.layer_end),
        pipeline_name=artifact.pipeline_id[:12],  # until the coordinator says how people call it
    )


@contextlib.asynccontextmanager
async def metrics(config: StageConfig, served: Served, revocations: Revocations) -> AsyncIterator[str]:
    """Serve /metrics if the configuration says where; yields the address, empty if not. Raises as serve_metrics."""
    if config.metrics is None:
        yield ""
        return
    async with serve_metrics(config.metrics, served, config.security, revocations) as address:
        yield address
