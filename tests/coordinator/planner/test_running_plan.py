"""What-ifs of a pipeline that runs, from measured curves alone."""

from __future__ import annotations

import pytest

from relayline.coordinator.planner.running_plan import running_plan
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.wire.common.curve import CostCurve

MS = 1e6


def cost(row_ms: float) -> StageCost:
    points = [(rows, row_ms * MS * (1 + rows / 16)) for rows in (1, 2, 4, 8, 16, 32)]
    return StageCost(CostCurve(points), CostCurve(points), 32)


def test_a_slow_stage_gives_layers_away_and_one_more_machine_takes_some() -> None:
    found = running_plan([cost(1), cost(3)], ((0, 8), (8, 16)), ["a", "b"], overhead_ns=0.1 * MS, n_lanes=16)
    assert found.is_known
    assert found.streams == [1, 8, 16]
    as_is, recut, more = found.plans
    assert as_is.layers == [(0, 8), (8, 16)]
    assert recut.layers == [(0, 12), (12, 16)], "three times as quick, three times as many"
    assert more.name == "one more machine like b's"
    assert [end - start for start, end in more.layers] == [10, 3, 3]
    assert more.layers[-1][1] == 16
    assert as_is.tokens_per_s[-1] < min(recut.tokens_per_s[-1], more.tokens_per_s[-1])
    assert found.stages[1]["step_ms"]["1"] == pytest.approx(3 * (1 + 1 / 16), abs=0.001)


def test_even_stages_keep_their_cut() -> None:
    found = running_plan([cost(2), cost(2)], ((0, 4), (4, 8)), ["a", "b"], overhead_ns=0.0, n_lanes=1)
    assert [plan.name for plan in found.plans] == ["as it runs", "one more machine like a's"]
    assert found.streams == [1]


def test_every_stage_keeps_a_layer() -> None:
    found = running_plan([cost(1), cost(50)], ((0, 2), (2, 4)), ["a", "b"], overhead_ns=0.0, n_lanes=4)
    assert found.plans[1].layers == [(0, 3), (3, 4)]
    assert all(end > start for plan in found.plans for start, end in plan.layers)


def test_nothing_is_promised_before_stages_have_measured() -> None:
    bare = StageCost(CostCurve(), CostCurve(), 32)
    found = running_plan([bare], ((0, 4),), ["a"], overhead_ns=0.0, n_lanes=4)
    assert not found.is_known
    (as_is,) = found.plans
    assert as_is.tokens_per_s == [0.0, 0.0]
    assert found.stages == [{"step_ms": {}}]
