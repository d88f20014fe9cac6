"""Fresh costs of an epoch reach its schedule, and a lasting imbalance is one line in the log."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from relayline.coordinator.engine.balance import Balance
from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.coordinator.planner import imbalance
from relayline.coordinator.planner.imbalance import HOLD_NS, STEPS_MIN
from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.coordinator.schedule.groups import GroupPlanner
from relayline.coordinator.schedule.scheduler import Scheduler
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.wire.common.curve import CostCurve


def cost(step_ms: float) -> StageCost:
    flat = CostCurve([(rows, step_ms * 1e6) for rows in (1, 8, 32)])
    return StageCost(flat, flat, 32)


async def test_costs_reach_the_schedule_and_an_imbalance_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layers = [SimpleNamespace(layer_start=start, layer_end=start + 4) for start in (0, 4)]
    file = cast("PipelineFile", SimpleNamespace(stages=layers))
    balance = Balance(lambda: ["desk", "laptop"])
    reported: list[Any] = []
    balance.on_reported = reported.append
    scheduler = Scheduler(ScheduleConfig(mode="fixed", n_groups=2, group_rows=8), GroupPlanner([cost(10), cost(10)]))
    assert balance.describe(0) is None, "nothing is known before the first epoch"
    refresh = balance.refresh(scheduler, file)
    now: dict[str, Any] = {"ns": 0}
    monkeypatch.setattr(time, "monotonic_ns", lambda: now["ns"])
    with caplog.at_level(logging.WARNING, "relayline.coordinator"):
        for _ in range(2 * HOLD_NS // 1_000_000_000):
            now["ns"] += 1_000_000_000
            scheduler.n_decode_landed += 30
            await refresh([cost(10), cost(30)], [])
    assert scheduler.planner.step_ns(8) == 30e6
    assert reported
    assert {found.slowest for found in reported} == {1}, "once it lasts, with all fresh costs"
    (line,) = caplog.messages
    assert line.startswith("laptop slows the pipeline down: with layers 0-5, 6-7 ")
    described = balance.describe(now["ns"])
    assert described is not None
    assert described["layers"] == [[0, 6], [6, 8]]
    assert balance.refresh(scheduler, file) is not refresh
    assert balance.describe(now["ns"]) is not None, "another epoch of the same layers"
    moved = [SimpleNamespace(layer_start=0, layer_end=6), SimpleNamespace(layer_start=6, layer_end=8)]
    balance.refresh(scheduler, cast("PipelineFile", SimpleNamespace(stages=moved)))
    assert balance.describe(now["ns"]) is None, "after a move it starts again"


async def test_streams_go_on_while_cuts_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison waits for something that only the event loop does."""
    has_gone_on = threading.Event()
    waited: list[bool] = []

    def gain_of(*_: object) -> float:
        waited.append(has_gone_on.wait(10))
        return 0.5

    monkeypatch.setattr(imbalance, "gain_of", gain_of)
    layers = [SimpleNamespace(layer_start=start, layer_end=start + 4) for start in (0, 4)]
    scheduler = Scheduler(ScheduleConfig(), GroupPlanner([cost(10), cost(10)]))
    refresh = Balance(list).refresh(scheduler, cast("PipelineFile", SimpleNamespace(stages=layers)))
    scheduler.n_decode_landed += STEPS_MIN
    asyncio.get_running_loop().call_soon(has_gone_on.set)
    await refresh([cost(10), cost(30)], [])
    assert waited == [True]
    scheduler.n_decode_landed += STEPS_MIN
    await refresh([cost(10), cost(30)], [])
    assert waited == [True], "a minute has to pass anyway: most of the time there is no look"
