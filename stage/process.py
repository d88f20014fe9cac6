"""A stage process: serve a loaded stage on its port, and end cleanly. `stage/assembly.py` loads it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import AsyncIterator, Callable

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE

from relayline.stage.assembly import load_stage, make_policy
from relayline.stage.config import StageConfig
from relayline.stage.engine.loading import Load, LoadStoppedError
from relayline.stage.facts import StageFacts
from relayline.stage.loaded_engine import SHUTDOWN_GRACE_S, load_engine
from relayline.stage.observe.metrics import serve_metrics
from relayline.stage.observe.stats import StageStats
from relayline.stage.served import Served
from relayline.stage.service import handlers
from relayline.wire.common.bounds import MESSAGE_BYTES_MAX
from relayline.wire.common.errors import UsageError
from relayline.wire.common.process import first_of, run
from relayline.wire.common.tasks import to_its_end
from relayline.wire.envelopes.envelope import bytes_max_of
from relayline.wire.links import rpc
from relayline.wire.links.health import Health
from relayline.wire.links.listening import Listener
from relayline.wire.links.revocation import Revocations
from relayline.wire.links.security import address_of
from relayline.wire.telemetry.telemetry import Role, Telemetry

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
    """Set what native code reads from the environment, and what Python's garbage collector leaves alone.

    Call it before anything is loaded.
    """
    gc.freeze()  # the modules: looking for garbage among them would hold up a stage that serves
    # An abort inside ggml would start a debugger on this process, which takes long and says nothing to a user.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")


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
async def serve_changing(
    config: StageConfig, load: Load | None = None, like: StageFacts | None = None
) -> AsyncIterator[Served]:
    """Serve a stage whose engine may be replaced later; yields the handle of its port. Raises as `serve`.

    `like`: an earlier engine with the same slice, whose curves take the place of a measurement.
    """
    served, telemetry = await _loaded(config, load or Load(), like)
    facts = served.facts
    receive_bytes_max = min(bytes_max_of(1 if facts.artifact.is_first else facts.artifact.width_in), MESSAGE_BYTES_MAX)
    listener = Listener(config.security, f"stage {facts.artifact.stage_index}", receive_bytes_max, config.coordinator)
    served.begin(listener.guard)
    server = listener.server
    server.add_generic_rpc_handlers((handlers(lambda: served.service, served.give_call),))
    health = listener.add_health()
    if config.engine.reflection:
        listener.add_reflection(rpc.SERVICE, HEALTH_SERVICE)
    try:
        port = listener.add_port(config.host, config.port, "--listen HOST:PORT")
        async with metrics(config, served, listener.guard.revocations) as served.metrics_address:
            await server.start()
            for name in ("", rpc.SERVICE):
                await health.set(name, health_pb2.HealthCheckResponse.SERVING)
            served.address = address_of(config.host, port)
            yield served
    finally:
        await to_its_end(_close(health, served, listener, telemetry))
    if served.crashed.done():
        await served.crashed


async def _loaded(config: StageConfig, load: Load, like: StageFacts | None) -> tuple[Served, Telemetry]:
    """Return the handle of a port over a stage that was loaded for it.

    The handle alone refers to the engine: it goes when another one takes its place.
    """
    facts, executor = await load_engine(load_stage, config, load, like.curves if like else None)
    try:
        telemetry = start_telemetry(facts)
    except UsageError:
        executor.close()
        raise
    crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    served = Served(load_stage, make_policy, StageStats(), crashed)
    served.start(facts, executor, telemetry)
    return served, telemetry


async def _close(health: Health, served: Served, listener: Listener, telemetry: Telemetry) -> None:
    await health.enter_graceful_shutdown()
    await served.end_calls()
    await listener.stop(SHUTDOWN_GRACE_S)
    await served.close()
    await asyncio.to_thread(telemetry.shutdown)


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
