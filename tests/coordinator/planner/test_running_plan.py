"""What-ifs of a running pipeline, from measured curves alone."""

from __future__ import annotations

import dataclasses

import pytest

from relayline.coordinator.planner.running_plan import running_plan
from relayline.coordinator.schedule.overhead import RoundTrip
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.wire.common.curve import CostCurve

MS = 1e6
AT_ONCE = RoundTrip(1.0)  # measured: zero would mean that nothing has been


def cost(row_ms: float) -> StageCost:
    points = [(rows, row_ms * MS * (1 + rows / 16)) for rows in (1, 2, 4, 8, 16, 32)]
    return StageCost(CostCurve(points), CostCurve(points), 32)


def test_a_slow_stage_gives_layers_away_and_one_more_machine_takes_some() -> None:
    found = running_plan(
        [cost(1), cost(3)], ((0, 8), (8, 16)), ["a", "b"], round_trips=[RoundTrip(0.1 * MS)], n_lanes=16
    )
    assert found.is_known
    assert found.streams == [1, 8, 16, 32]
    as_is, _, recut, more = found.plans
    assert as_is.layers == [(0, 8), (8, 16)]
    assert recut.layers == [(0, 12), (12, 16)], "three times as quick, three times as many"
    assert more.name == "one more machine like b's"
    assert [end - start for start, end in more.layers] == [10, 3, 3]
    assert more.layers[-1][1] == 16
    assert as_is.tokens_per_s[-1] < min(recut.tokens_per_s[-1], more.tokens_per_s[-1])
    assert found.stages[1]["step_ms"]["1"] == pytest.approx(3 * (1 + 1 / 16), abs=0.001)


def test_even_stages_keep_their_cut() -> None:
    found = running_plan([cost(2), cost(2)], ((0, 4), (4, 8)), ["a", "b"], round_trips=[AT_ONCE], n_lanes=1)
    assert [plan.name for plan in found.plans] == ["as it runs", "2 lanes", "one more machine like a's"]
    assert found.streams == [1, 2]


def test_every_stage_keeps_a_layer() -> None:
    found = running_plan([cost(1), cost(50)], ((0, 2), (2, 4)), ["a", "b"], round_trips=[AT_ONCE], n_lanes=4)
    assert found.plans[2].layers == [(0, 3), (3, 4)]
    assert all(end > start for plan in found.plans for start, end in plan.layers)


def test_nothing_is_promised_before_stages_have_measured() -> None:
    bare = StageCost(CostCurve(), CostCurve(), 32)
    found = running_plan([bare], ((0, 4),), ["a"], round_trips=[AT_ONCE], n_lanes=4)
    assert not found.is_known
    (as_is,) = found.plans
    assert as_is.tokens_per_s == [0.0, 0.0, 0.0]
    assert found.stages == [{"step_ms": {}}]


def test_more_lanes_help_only_streams_that_would_wait_and_full_lanes_cost() -> None:
    priced = dataclasses.replace(cost(1), context_ns=1_000.0)
    found = running_plan([priced], ((0, 8),), ["a"], round_trips=[AT_ONCE], n_lanes=8, ctx_tokens=2_048)
    assert found.streams == [1, 8, 16]
    as_is, lanes, full, _ = found.plans
    assert (lanes.name, full.name) == ("16 lanes", "every lane full: 2,048 tokens")
    assert as_is.tokens_per_s[1] == as_is.tokens_per_s[2], "with 8 lanes the other 8 streams wait"
    assert lanes.tokens_per_s[:2] == as_is.tokens_per_s[:2]
    assert lanes.tokens_per_s[2] > as_is.tokens_per_s[2]
    # A row reads 2,048 tokens for 1 us each: 2.05 ms on top of its own 1.06 ms.
    assert full.tokens_per_s[0] == pytest.approx(1_000 / (1 + 1 / 16 + 2.048), rel=0.05)


def test_a_number_of_streams_has_the_overhead_that_was_measured_with_about_so_many() -> None:
    """A busy minute with many streams says little about one stream, which had its own."""
    many, one = RoundTrip(30 * MS, 10.0, 0.2 * MS), RoundTrip(2 * MS, 1.0, 0.2 * MS)
    rates = {}
    for name, known in (("both", [many, one]), ("many", [many]), ("one", [one]), ("none", [])):
        found = running_plan([cost(2), cost(2)], ((0, 4), (4, 8)), ["a", "b"], round_trips=known, n_lanes=8)
        rates[name] = found.plans[0].tokens_per_s
    assert rates["both"][0] == rates["one"][0] > 2 * rates["many"][0]
    assert rates["both"][1] == rates["many"][1] < rates["one"][1]
    assert rates["none"][0] < 1_000 / (2 * 2 * (1 + 1 / 16)), "the coordinator takes time before anything is measured"
