"""Telemetry of a coordinator process: made at its start, flushed with a bound at its end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
from collections.abc import AsyncIterator

from relayline.coordinator.observe.observer import Observer
from relayline.wire.telemetry.config import Level, TelemetryConfig
from relayline.wire.telemetry.telemetry import Role, Telemetry


@contextlib.asynccontextmanager
async def observed(
    config: TelemetryConfig, model_name: str, pushed_level: Level | None, pipeline_name: str
) -> AsyncIterator[Observer]:
    """Yield the observer of this process; at the end, what waits is ended and flushed, within telemetry's own bound.

    `pushed_level` is set on stages when they connect; None leaves them at their own. Raises UsageError for settings
    that cannot be used.
    """
    # The share of requests is drawn by the observer, where it can be changed while the process runs.
    whole = dataclasses.replace(config, sampler_ratio=1.0)
    instance = f"{socket.gethostname()}:{os.getpid()}"
    telemetry = Telemetry.start(Role.COORDINATOR, instance, whole, pipeline_name=pipeline_name or model_name)
    observer = Observer(
        telemetry,
        model_name=model_name,
        sampler_ratio=config.sampler_ratio,
        later=asyncio.get_running_loop().call_later,
        pushed_level=pushed_level,
    )
    try:
        yield observer
    finally:
        observer.close()
        await asyncio.to_thread(telemetry.shutdown)
