"""The planner: small cases by hand, and properties for any curve."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from relayline.coordinator.schedule.groups import (
    CONTEXT_STEP_MIN,
    CONTEXT_STEPS,
    GROUPS_MAX_PER_STAGE,
    LEFT_OUT_GAIN,
    PREDICTED_PART,
    GroupPlanner,
    _context_step,
)
from relayline.coordinator.schedule.overhead import RoundTrip
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.deploy.testing.simulation.world import CURVES, MS, best_rate, equal_stages, one_slower
from relayline.wire.common.curve import CostCurve


def planner(n_stages: int, curve: str = "staircase", overhead_ms: float = 0.0, rows_max: int = 512) -> GroupPlanner:
    made = GroupPlanner([StageCost(CURVES[curve](), CURVES[curve](), rows_max) for _ in range(n_stages)])
    made.round_trip = RoundTrip(overhead_ms * MS)
    return made


def shape(made: GroupPlanner, n_streams: int) -> tuple[int, int]:
    plan = made.plan(n_streams, n_prompts=0)
    return plan.n_groups, plan.group_rows


def with_context(n_stages: int, context_ns: float, curve: str = "arithmetic") -> GroupPlanner:
    return GroupPlanner([StageCost(CURVES[curve](), CURVES[curve](), 512, context_ns) for _ in range(n_stages)])


def test_rows_of_a_long_context_are_dearer_and_fewer_ride() -> None:
    made = with_context(2, 13_000)
    short, long = made.at(0, 0), made.at(0, 2_048)
    assert long.chunk_ns(4) == short.chunk_ns(4) + 4 * 2_048 * 13_000
    assert long.mixed_ns(4, 4) == short.mixed_ns(4, 4) + 4 * 2_048 * 13_000
    assert long.step_ns(4) == short.step_ns(4)
    assert made.at(2_048, 0).step_ns(4) == short.step_ns(4) + 4 * 2_048 * 13_000
    rides = [made.at(0, tokens).plan(16, n_prompts=1).ride_rows for tokens in (0, 1_024, 4_096)]
    assert rides == sorted(rides, reverse=True)
    assert rides[0] > rides[-1]
    assert long.plan(4, n_prompts=1).latency_max_ns == short.plan(4, n_prompts=1).latency_max_ns


def with_tiles(n_stages: int = 2, curve: str = "arithmetic") -> GroupPlanner:
    """Attention as in docs/results/curves.md: in tiles a token of context costs a row of its lane a quarter."""
    stage = StageCost(CURVES[curve](), CURVES[curve](), 512, context_ns=12_000, context_tiled_ns=3_000)
    return GroupPlanner([stage] * n_stages)


def test_steps_of_tiles_are_priced_by_the_lanes_that_a_tile_reads() -> None:
    made, curve = with_tiles(), CURVES["arithmetic"]()
    view, tile = made.at(1_024, 2_048), 64 * 3_000
    assert view.chunk_ns(63) == pytest.approx(curve.cost_ns(63) + 63 * 2_048 * 12_000)
    assert view.chunk_ns(64) == pytest.approx(curve.cost_ns(64) + 2_048 * tile)
    assert view.chunk_ns(96) == pytest.approx(curve.cost_ns(96) + 2 * 2_048 * tile), (
        "a tile that is not full is no cheaper"
    )
    assert view.step_ns(64) == pytest.approx(curve.cost_ns(64) + 64 * 1_024 * tile)
    assert view.step_ns(96) == pytest.approx(curve.cost_ns(96) + 96 * 1_024 * tile), "each lane is read in one tile"
    assert view.mixed_ns(4, 60) == pytest.approx(curve.cost_ns(64) + (4 * 1_024 + 2_048) * tile)
    assert view.mixed_ns(4, 64) == pytest.approx(curve.cost_ns(68) + (4 * 1_024 + 2 * 2_048) * tile)
    assert view.mixed_ns(64, 64) == pytest.approx(curve.cost_ns(128) + (64 * 1_024 + 2_048) * tile)


def test_a_prompts_rows_read_a_lane_with_separate_cells_once() -> None:
    curve = CURVES["arithmetic"]()
    made = GroupPlanner([StageCost(curve, curve, 512, 12_000, 3_000, is_per_lane=True)] * 2)
    view, prompt_ns = made.at(1_024, 2_048), 2_048 * (12_000 + 63 * 3_000)
    assert view.chunk_ns(64) == pytest.approx(curve.cost_ns(64) + prompt_ns)
    assert view.step_ns(80) == pytest.approx(curve.cost_ns(80) + 80 * 1_024 * 12_000), "no stages share a device"
    assert view.mixed_ns(4, 64) == pytest.approx(view.step_ns(4) + view.chunk_ns(64))


def test_rows_of_many_lanes_stay_below_a_tile() -> None:
    made = with_tiles(1, "smooth")
    assert made.plan(64, n_prompts=0).group_rows == 64, "without context there is nothing to read"
    plan = made.at(1_000, 0).plan(64, n_prompts=0)
    assert plan.group_rows < 64


def test_padding_is_planned_as_stages_pad() -> None:
    """62 rows run as 64 where that is cheaper, except steps that go by tiles from 64 rows on."""
    curve = CostCurve(
        [(1, 25e6), (4, 80e6), (5, 180e6), (6, 280e6), (7, 380e6), (8, 160e6), (60, 1_200e6), (64, 1_240e6)]
    )
    assert StageCost(curve, curve, 512, context_ns=12_000).decode_ns(62) == curve.cost_ns(64)
    tiled = StageCost(curve, curve, 512, context_ns=12_000, context_tiled_ns=3_000)
    assert tiled.decode_ns(62) == curve.cost_ns(62)
    assert tiled.decode_ns(7) == curve.cost_ns(8)


def test_a_long_prompt_alone_travels_in_whole_tiles_and_a_short_one_as_ever() -> None:
    made, plain = with_tiles(), with_context(2, 12_000)
    for n_rows in (2_000, 4_000, 8_000):
        plan = made.at(0, n_rows / 2).plan(0, n_prompts=1, n_prompt_rows=n_rows)
        assert plan.chunk_rows >= 64
        assert plan.chunk_rows % 64 == 0
    for n_rows in (4, 16, 60, 120, 250):
        short = [
            one.at(0, n_rows / 2).plan(0, n_prompts=1, n_prompt_rows=n_rows)
            for one in (made, plain, planner(2, "arithmetic"))
        ]
        assert len({plan.chunk_rows for plan in short}) == 1
        assert short[0].chunk_rows < 64


def test_prompt_rows_ride_in_whole_tiles_where_fewer_take_longer() -> None:
    """At a long context 64 rows take less time than 48: what exceeds the bound does not end the search."""
    view = with_tiles(1).at(10, 8_000)
    latency_ns = view.mixed_ns(1, 63)
    assert latency_ns < view.mixed_ns(1, 47)
    assert view.ride_within(1, 95, 1.01 * latency_ns, 1) == 63
    stretch = 1.001 * latency_ns / (PREDICTED_PART * view.plan(1, n_prompts=0).period_ns)
    assert GroupPlanner(view.stages, stretch).plan(1, n_prompts=1).ride_rows == 63


def test_the_stretch_of_latency_that_somebody_allows_buys_prompts_a_higher_rate() -> None:
    found = []
    for stretch in (1.5, 2.0, 4.0):
        made = GroupPlanner([StageCost(CURVES["arithmetic"](), CURVES["arithmetic"](), 512)] * 2, stretch)
        plan = made.at(0, 0).plan(4, n_prompts=1)
        assert plan.latency_max_ns <= stretch * made.plan(4, n_prompts=0).period_ns * 1.02
        found.append(plan.n_groups * plan.ride_rows + plan.prefill_flights * plan.chunk_rows)
    assert found[0] <= found[1] < found[2]


def test_a_step_of_both_kinds_is_padded_as_a_whole() -> None:
    made, curve = planner(2), CURVES["staircase"]()
    assert made.mixed_ns(3, 1) == made.step_ns(3) == curve.cost_ns(4), "the prompt row takes the scratch row's place"
    assert made.mixed_ns(3, 4) == made.mixed_ns(3, 5) == curve.cost_ns(8)


def test_contexts_are_rounded_to_eighths_and_cost_nothing_without_a_price() -> None:
    made = with_context(2, 13_000)
    assert made.at(1_000, 0) is made.at(1_010, 0)
    assert made.at(1_000, 0) is not made.at(1_200, 0)
    view = made.at(10, 10)
    made.forget()
    assert made.at(10, 10) is not view, "curves or overhead have changed"
    assert all(abs(_context_step(n) - n) <= max(CONTEXT_STEP_MIN / 2, n / CONTEXT_STEPS) for n in range(5_000))
    plain = planner(2)
    assert plain.at(4_000, 4_000) is plain


def test_prompts_get_a_flight_more_where_decode_alone_leaves_stages_idle() -> None:
    """Steps that cost 8 ms for any number of rows, the first stage a third faster: one flight of all is best."""
    made = GroupPlanner([StageCost(CURVES["smooth"](factor), CURVES["smooth"](factor), 512) for factor in (0.6, 1.0)])
    quiet, mixed = made.plan(11, n_prompts=0), made.plan(11, n_prompts=8)
    assert (quiet.n_groups, quiet.group_rows) == (1, 11)
    assert (mixed.n_groups, mixed.group_rows) == (2, 6)
    assert mixed.ride_rows > 0
    assert 2 * made.mixed_ns(6, mixed.ride_rows) <= mixed.latency_max_ns
    busy = planner(2, "smooth")
    assert busy.plan(16, n_prompts=1).n_groups == busy.plan(16, n_prompts=0).n_groups == 2


CASES = {  # (stages, streams) -> (flights, rows), on the staircase
    "one stream": (2, 1, (1, 1)),
    "two streams, a stage each": (2, 2, (2, 1)),
    "eight streams, two full tiles": (2, 8, (2, 4)),
    "32 streams": (2, 32, (2, 16)),
    "ten streams take turns in full tiles": (2, 10, (3, 4)),
    "as many stages as streams": (8, 8, (8, 1)),
    "eight stages, 32 streams": (8, 32, (8, 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_small_cases(name: str) -> None:
    n_stages, n_streams, expected = CASES[name]
    made = planner(n_stages)
    n_groups, rows = shape(made, n_streams)
    if name.startswith("ten"):  # two or three flights: either way every step is a full tile
        assert rows == 4
        assert made.rate(n_streams, n_groups, rows) >= 0.97 * 8 / (53 * MS)
    else:
        assert (n_groups, rows) == expected


def test_link_delay_wants_more_flights() -> None:
    assert shape(planner(2, overhead_ms=30), 4) == (4, 1)
    assert shape(planner(2, overhead_ms=30), 12)[0] > shape(planner(2), 8)[0]


@pytest.mark.parametrize(("dearer", "rows"), [(1.0, 8), (1.05, 8), (1.3, 7)])
def test_one_flight_leaves_no_stream_out_for_a_small_gain(dearer: float, rows: int) -> None:
    """A stream that is left out waits for a whole extra step.

    On a GPU flights of 7 rows for 8 streams cost an eighth once.
    """
    curve = CostCurve([(1, 3.6 * MS), (7, 6.2 * MS), (8, dearer * 6.2 * MS * 8 / 7), (16, 8 * dearer * 6.2 * MS / 3)])
    made = GroupPlanner([StageCost(curve, curve, 512, device=device) for device in (0, 0)])
    assert shape(made, 8) == (1, rows)


def test_flights_of_equally_fast_plans_are_even() -> None:
    curve = CostCurve([(1, 2.0 * MS), (64, 65.1 * MS)])
    made = GroupPlanner([StageCost(curve, curve, 512)])
    made.round_trip = RoundTrip(30.0 * MS)
    n_groups, rows = shape(made, 24)
    assert n_groups > 1
    assert rows == -(-24 // n_groups)


def test_a_stage_that_runs_ahead_has_one_flight() -> None:
    """Its rows are computed during the round trip; those of a second flight would take their place."""
    stage = StageCost(CURVES["staircase"](), CURVES["staircase"](), 512)
    for runs_ahead in (False, True):
        made = GroupPlanner([dataclasses.replace(stage, runs_ahead=runs_ahead)])
        made.round_trip = RoundTrip(60.0 * MS)
        assert (shape(made, 8) == (1, 8)) == runs_ahead
        assert (made.plan(8, n_prompts=3).n_groups == 1) == runs_ahead


def test_a_stage_that_runs_ahead_gets_the_rows_of_all_streams() -> None:
    """It computes them together in any case. If some were left out, theirs would wait, and others be computed late."""
    stage = StageCost(CURVES["staircase"](), CURVES["staircase"](), 64, runs_ahead=True)
    made = GroupPlanner([stage])
    assert [shape(made, n) for n in (5, 9, 13, 64)] == [(1, 5), (1, 9), (1, 13), (1, 64)]
    assert shape(GroupPlanner([dataclasses.replace(stage, runs_ahead=False)]), 5) == (1, 4)
    assert shape(made, 100)[1] <= 64


def test_flat_costs_still_keep_both_stages_at_work() -> None:
    assert [shape(planner(2, "smooth"), n_streams)[0] for n_streams in (8, 16, 32)] == [2, 2, 2]


def test_a_plan_without_curves_spreads_streams_evenly() -> None:
    made = GroupPlanner([StageCost(CostCurve(), CostCurve(), 64) for _ in range(3)])
    plan = made.plan(10, n_prompts=1)
    assert (plan.n_groups, plan.group_rows, plan.period_ns) == (3, 4, 0.0)
    assert plan.prefill_flights == 3
    assert plan.chunk_rows == 64


def test_a_planner_without_stages_plans_one_row() -> None:
    plan = GroupPlanner(()).plan(5, n_prompts=1)
    assert (plan.n_groups, plan.group_rows) == (1, 1)
    assert plan.prefill_flights >= 1
    assert plan.chunk_rows == 1


def test_refreshed_curves_change_the_plan() -> None:
    made = planner(2)
    before = made.plan(8, n_prompts=0).period_ns
    made.update([StageCost(CURVES["staircase"](2.0), CURVES["staircase"](2.0), 512)] * 2)
    assert made.plan(8, n_prompts=0).period_ns == pytest.approx(2 * before)


def test_a_prompt_alone_travels_as_a_train() -> None:
    plan = planner(4).plan(0, n_prompts=1)
    assert plan.prefill_flights >= 4
    assert 16 <= plan.chunk_rows <= 128


def test_a_short_prompt_travels_in_small_chunks_where_rows_cost_alike() -> None:
    """16 rows of the staircase in one flight take 2 x 90 ms through two stages; in four, 5 x 26.5 ms."""
    made = planner(2)
    assert made.plan(0, n_prompts=1, n_prompt_rows=16).chunk_rows == 4
    assert made.plan(0, n_prompts=1, n_prompt_rows=2_000).chunk_rows >= 16
    assert planner(2, "smooth").plan(0, n_prompts=1, n_prompt_rows=16).chunk_rows == 16, (
        "one step costs what 64 rows do"
    )


def test_a_train_waits_for_its_slowest_stage_alone() -> None:
    """Two prompts of 16 rows, the second stage 0.4 of the time: in fours 8 x 26.5 + 11 ms, whole 2 x 90 + 36."""
    curves = [CURVES["staircase"](factor) for factor in (1, 0.4)]
    made = GroupPlanner([StageCost(curve, curve, 512) for curve in curves])
    assert made.plan(0, n_prompts=2, n_prompt_rows=32).chunk_rows == 16
    assert planner(2).plan(0, n_prompts=2, n_prompt_rows=32).chunk_rows == 4, (
        "the second is as slow: 270 ms instead of 239"
    )


def test_many_prompts_travel_in_smaller_chunks_where_large_ones_gain_little() -> None:
    """Prompts that end in a chunk land with it: on the average they wait for half of the others, and half a chunk."""
    even = CostCurve([(1, 1e6), (64, 10e6), (512, 75e6)])  # 512 rows at once save a twentieth
    made = GroupPlanner([StageCost(even, even, 512)])
    assert made.plan(0, n_prompts=1, n_prompt_rows=1_920).chunk_rows == 512
    assert made.plan(0, n_prompts=2, n_prompt_rows=1_920).chunk_rows == 512, "each is longer than a chunk"
    assert made.plan(0, n_prompts=64, n_prompt_rows=1_920).chunk_rows <= 128
    steps = CostCurve([(1, 10e6), (512, 50e6)])
    costly = GroupPlanner([StageCost(steps, steps, 512)])
    assert costly.plan(0, n_prompts=64, n_prompt_rows=1_920).chunk_rows == 512, "few rows cost nearly as much"


def test_prompt_rows_ride_where_a_step_has_room() -> None:
    """On the staircase a step of two rows costs what one of four does; on a flat curve dozens of rows are free."""
    assert planner(2).plan(2, n_prompts=1).ride_rows == 3
    plan = planner(2, "smooth").plan(4, n_prompts=1)
    assert plan.ride_rows >= 32
    assert plan.prefill_flights == 0


def test_rows_ride_only_as_far_as_the_time_allows() -> None:
    made = planner(4, "smooth")  # 4 x (8 ms + 0.02 ms a row) up to 64 rows, then 0.1 ms more for each
    assert made.ride_within(1, 95, 1e9, 1) == 95
    assert made.ride_within(1, 95, 38e6, 1) == 63
    assert made.ride_within(1, 95, 33e6, 1) == 11
    assert made.ride_within(1, 95, 1e6, 1) == made.ride_within(1, 0, 1e9, 1) == 0
    made.round_trip = RoundTrip(0.0, 1, MS)
    assert made.ride_within(1, 95, 38e6, 6) == 11, "five other streams take 5 ms"


def test_flights_that_keep_stages_busy_are_more_where_other_streams_take_time() -> None:
    made = planner(4, "smooth")
    made.round_trip = RoundTrip(0.0, 1, MS)
    assert (made.saturating(8, 8), made.saturating(8, 32)) == (5, 8)


@pytest.mark.parametrize("curve", CURVES)
def test_waiting_prompts_weigh_against_running_streams(curve: str) -> None:
    """One prompt must not slow many streams much; many prompts may slow one stream."""
    made = planner(2, curve)

    def rows_under_way(n_streams: int, n_prompts: int) -> int:
        plan = made.plan(n_streams, n_prompts=n_prompts)
        return plan.n_groups * plan.ride_rows + plan.prefill_flights * plan.chunk_rows

    assert made.plan(8, n_prompts=1) == made.plan(8, n_prompts=8)
    assert rows_under_way(2, 20) > rows_under_way(2, 2)
    assert rows_under_way(2, 200) >= rows_under_way(2, 20)


curves = st.dictionaries(st.integers(1, 64), st.integers(10_000, 10**8), min_size=1, max_size=8)
stages = st.lists(st.tuples(curves, curves, st.integers(1, 100)), min_size=1, max_size=5)


@settings(max_examples=60)
@given(stages, st.integers(0, 300), st.integers(0, 400), st.integers(0, 10**8))
@example([({1: 10_000}, {1: 10_000}, 3)], 10, 1, 103_334)
def test_any_plan_is_within_its_caps(
    given_stages: list[tuple[dict[int, int], dict[int, int], int]], n_streams: int, n_prompts: int, overhead_ns: int
) -> None:
    made = GroupPlanner([StageCost(CostCurve(d.items()), CostCurve(p.items()), most) for d, p, most in given_stages])
    made.round_trip = RoundTrip(float(overhead_ns))
    plan = made.plan(n_streams, n_prompts=n_prompts)
    n_stages, rows_max = len(given_stages), min(most for _, _, most in given_stages)
    assert 1 <= plan.group_rows <= max(1, min(n_streams, rows_max))
    assert 1 <= plan.n_groups <= max(1, -(-n_streams // rows_max), min(n_streams, GROUPS_MAX_PER_STAGE * n_stages))
    assert (0 if plan.ride_rows else 1) <= plan.prefill_flights <= 2 * n_stages, "prompts always have a way"
    assert 0 <= plan.ride_rows <= max(0, rows_max - plan.group_rows)
    assert 1 <= plan.chunk_rows <= max(1, rows_max)
    assert plan == made.plan(n_streams, n_prompts=n_prompts), "cached"


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("n_stages", [1, 2, 4, 8])
def test_more_streams_are_never_predicted_to_be_slower_together(curve: str, n_stages: int) -> None:
    made = planner(n_stages, curve)
    rates = [n / made.plan(n, n_prompts=0).period_ns for n in range(1, 80)]
    # A plan may be EQUAL below the best, and one flight on one stage is as much below two by SHARPNESS. The only one
    # leaves streams out for a clear gain alone.
    least = 0.959 / (LEFT_OUT_GAIN if n_stages == 1 else 1)
    assert all(later >= least * max(rates[: index + 1]) for index, later in enumerate(rates[1:]))


@pytest.mark.parametrize("curve", CURVES)
def test_no_plan_promises_more_than_is_possible(curve: str) -> None:
    for model in (equal_stages(3, curve), one_slower(4, 3.0, curve)):
        made = GroupPlanner([StageCost(stage.decode, stage.prefill, stage.rows_max) for stage in model])
        for n_streams in range(1, 40):
            predicted = 1e9 * n_streams / made.plan(n_streams, n_prompts=0).period_ns
            assert predicted <= 1.001 * best_rate(model, n_streams, 0)


def test_a_mixed_step_is_priced_with_the_head_that_runs() -> None:
    """Of the scratch rows that fill the layers' tile, as many want the head as fill its own, as stages pad them."""
    layers = {1: 10.0, 2: 20.0, 3: 30.0, 4: 20.0, 5: 30.0, 6: 40.0, 7: 50.0, 8: 40.0}
    head = {1: 4.0, 2: 8.0, 3: 12.0, 4: 6.0, 5: 10.0, 6: 14.0, 7: 18.0, 8: 12.0}
    stage = StageCost(CostCurve((r, layers[r] + head[r]) for r in layers), CostCurve(layers.items()), 64)
    assert stage.mixed_ns(3, 4) == pytest.approx(40 + 6)  # eight rows, four of them with the head: one is scratch
    assert stage.mixed_ns(3, 5) == pytest.approx(40 + 12)  # no scratch row is there to fill the head's tile


def test_per_lane_cells_pay_for_prompt_rows_apart_and_are_not_padded() -> None:
    curve = CURVES["staircase"]()
    shared, apart = (StageCost(curve, curve, 512, is_per_lane=is_per_lane) for is_per_lane in (False, True))
    assert shared.decode_ns(3) == curve.cost_ns(4)
    assert apart.decode_ns(3) == curve.cost_ns(3)
    assert apart.mixed_ns(2, 6) == curve.cost_ns(2) + curve.cost_ns(6) > shared.mixed_ns(2, 6)
    with_decode, alone = (GroupPlanner([cost, cost]).rides(2)[:3] for cost in (shared, apart))
    assert (with_decode, alone) == ([2, 6, 10], [1, 2, 4]), "numbers that fill tiles, alone or with the decode rows"
