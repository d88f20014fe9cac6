"""A stage process as its neighbours and its operator see it: health, options, and all lanes in one native step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from relayline.deploy.testing.engines import stage_config
from relayline.deploy.testing.tiny_slices import TinyShape, write_pipeline
from relayline.stage.assembly import load_stage, make_policy
from relayline.stage.config import StageConfig
from relayline.stage.process import serve
from relayline.stage.queue_types import Step
from relayline.stage.speed.curves import Curves
from relayline.stage.steps.lanes import LaneTable
from relayline.stage.steps.policy import DrainPolicy, GroupPolicy, SinglePolicy
from relayline.stage.steps.step import StepExecutor
from relayline.stage.steps.step_types import RouteWiring
from relayline.wire.common.errors import NativeError, StartError, UsageError
from relayline.wire.envelopes import buffers, dtypes, envelope
from relayline.wire.envelopes.frames import Flag
from relayline.wire.links import rpc
from tests.support.fakes import (
    CTX,
    EPOCH,
    ROUTE,
    BlockedDecode,
    FakeEngine,
    control,
    new_facts,
    rows_frame,
    tokens_frame,
)
from tests.support.served_stage import Coordinator, StageUnderTest

N_SESSIONS = 40


def config(artifact: Path, **changes: object) -> StageConfig:
    defaults = {"n_lanes": 4, "ctx_tokens": 32, "n_threads": 1, "calibrate": False, "verify": False}
    return stage_config(artifact, **(defaults | changes))


async def test_health_follows_the_standard_service(tmp_path: Path) -> None:
    artifacts = write_pipeline(tmp_path, TinyShape(), [2])
    async with serve(config(artifacts[0])) as (address, _, _), rpc.open_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", rpc.SERVICE):
            reply = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        listed = (await health.List(health_pb2.HealthListRequest())).statuses
        serving = dict.fromkeys(("", rpc.SERVICE), health_pb2.HealthCheckResponse.SERVING)
        assert {name: answer.status for name, answer in listed.items()} == serving
        with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
            await health.Check(health_pb2.HealthCheckRequest(service="another"))
        with pytest.raises(StartError, match="taken"):
            async with serve(config(artifacts[1], port=int(address.rpartition(":")[2]))):
                pass


async def test_a_step_that_hangs_as_the_stage_stops_does_not_hold_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    facts, engine = new_facts(1, 2), FakeEngine(is_last=True)
    executor = StepExecutor(engine, LaneTable(4, CTX), 1, None, close=engine.close)
    blocked, looks_again = BlockedDecode(engine), asyncio.Event()

    async def watch(running: Any, watch: Any, on_stuck: Callable[[NativeError], None]) -> None:
        await looks_again.wait()
        on_stuck(NativeError("one native step has run for 120 s"))

    monkeypatch.setattr("relayline.stage.process.load_stage", lambda *_: (facts, executor))
    monkeypatch.setattr("relayline.stage.loaded_engine.watch_steps", watch)
    monkeypatch.setattr("relayline.stage.process.SHUTDOWN_GRACE_S", 0.0)
    monkeypatch.setattr("relayline.stage.loaded_engine.SHUTDOWN_GRACE_S", 0.0)
    server = serve(facts.config)
    address, _, _ = await server.__aenter__()
    async with Coordinator(cast(StageUnderTest, SimpleNamespace(address=address, artifact=facts.artifact))) as one:
        await one.start()
        await one.send(control(5, Flag.OPEN), rows_frame(5, 0, 3, Flag.PREFILL))
        await asyncio.to_thread(blocked.entered.wait, 20)
        stopping = asyncio.create_task(server.__aexit__(None, None, None))
        try:
            async with asyncio.timeout(20):
                await one.lost
                looks_again.set()
                with pytest.raises(NativeError, match="has run for 120 s"):
                    await stopping
        finally:
            blocked.release()
    assert engine.n_closed == 0, "nothing is freed under a step that may still run"


def test_forty_sessions_run_in_one_native_step(tmp_path: Path) -> None:
    artifacts = write_pipeline(tmp_path, TinyShape(), [2])
    _, executor = load_stage(config(artifacts[0], n_lanes=N_SESSIONS))
    pool = buffers.BufferPool(dtypes.DTYPE_F16, TinyShape().n_embd)
    executor.reset_route(ROUTE, RouteWiring(EPOCH, pool))
    opens = [control(session_id, Flag.OPEN) for session_id in range(N_SESSIONS)]
    rows = [tokens_frame(session_id, 0, [session_id]) for session_id in range(N_SESSIONS)]
    result = executor.execute(Step(opens, rows, "test", 0, 0, 0))
    (output,) = result.outputs
    assert result.n_rows == N_SESSIONS
    assert not output.faults
    view = envelope.parse(output.message)
    assert view.frames["session_id"][-N_SESSIONS:].tolist() == list(range(N_SESSIONS))
    assert len(np.unique(view.payload.astype(np.float32), axis=0)) == N_SESSIONS
    executor.close()


def test_the_policy_is_the_one_that_was_asked_for(tmp_path: Path) -> None:
    artifact = tmp_path / "a"
    for name, kind in (("auto", GroupPolicy), ("drain", DrainPolicy), ("single", SinglePolicy)):
        chosen = config(artifact, policy=name)
        assert type(make_policy(chosen, Curves())) is kind
    with pytest.raises(UsageError, match="--policy"):
        config(artifact, policy="another")
    with pytest.raises(UsageError, match="--lanes 256 is outside"):
        config(artifact, n_lanes=256)
