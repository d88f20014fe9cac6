"""The production batcher and scheduler on virtual time: small versions of the targets, invariants at every event."""

from __future__ import annotations

import dataclasses
import statistics

import pytest

from relayline.coordinator.schedule import plan_choice
from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.coordinator.schedule.groups import GroupPlanner
from relayline.deploy.testing.simulation.run import AUTO, DRAIN, SINGLE, Setup, Simulation, fixed
from relayline.deploy.testing.simulation.scenarios import (
    best_of_sweep,
    burst,
    churn,
    paused,
    prompt_during_decode,
    slowing,
    steady,
    steady_figures,
    steady_part,
)
from relayline.deploy.testing.simulation.world import (
    MS,
    Disturbance,
    Request,
    StageModel,
    World,
    best_rate,
    equal_stages,
    one_slower,
    streams,
)
from relayline.wire.common.curve import CostCurve

CURVES = ("staircase", "smooth")
ALL_CURVES = (*CURVES, "arithmetic")
SETUPS = {"auto": AUTO, "drain": DRAIN, "single": SINGLE, "fixed": fixed(2, 3), "blind": Setup(is_calibrated=False)}


def churning(seed: int, n_requests: int = 50) -> World:
    """A small world of joins, leaves, stalls and slow-downs; every second one has a slow stage, links differ."""
    curve = CURVES[seed % 2]
    stages = one_slower(3, 3.0, curve) if seed % 4 < 2 else equal_stages(4, curve)
    return churn(stages, n_requests, seed, link_ns=(0, 1, 10)[seed % 3] * MS, n_lanes=12)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("seed", range(3))
def test_invariants_hold_while_requests_come_and_go(setup: str, seed: int) -> None:
    simulation = Simulation(churning(seed), SETUPS[setup]).run()
    assert len(simulation.audit.ends) == 50
    assert any(simulation.audit.ends.values()), "some client gave up"
    assert not all(simulation.audit.ends.values())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(6))
def test_invariants_hold_where_stages_crowd_each_other(seed: int) -> None:
    """One flight of all streams is tried as well as the planned ones there, while requests come and go."""
    simulation = Simulation(dataclasses.replace(churning(seed), crowding=1.6)).run()
    assert len(simulation.audit.ends) == 50


@pytest.mark.parametrize("n_streams", [2, 4])
def test_one_flight_is_found_where_it_is_faster_than_curves_predict(n_streams: int) -> None:
    """Two stages that read one memory: rows cost little, and steps side by side take 1.75 times as long."""
    world = World(equal_stages(2, "smooth"), streams(n_streams, 300), refresh_ns=100 * MS, crowding=1.75)
    auto, single, planned = (
        steady_figures(world, setup) for setup in (AUTO, fixed(1, n_streams), fixed(2, n_streams // 2))
    )
    assert single.tokens_per_s > 1.2 * planned.tokens_per_s, "else there is nothing to find"
    assert auto.tokens_per_s >= 0.95 * single.tokens_per_s


def test_the_same_seed_gives_the_same_history() -> None:
    first, again, other = (Simulation(churning(seed, 20)).run().audit for seed in (5, 5, 9))
    assert first.token_times_ns == again.token_times_ns
    assert first.steps == again.steps
    assert first.token_times_ns != other.token_times_ns


@pytest.mark.sampled(4)
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("n_stages", [2, 4, 8])
@pytest.mark.parametrize("n_streams", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_automatic_is_close_to_the_best_hand_set_plan(curve: str, n_stages: int, n_streams: int) -> None:
    stages = equal_stages(n_stages, curve)
    world = World(stages, streams(n_streams, max(24, 90 // n_streams)))
    auto = steady_figures(world).tokens_per_s
    best, by_hand = best_of_sweep(world, tries=1)
    assert auto >= 0.95 * best, f"by hand {by_hand}"
    assert auto <= 1.01 * best_rate(stages, n_streams, 0)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("n_streams", [24, 32, 64])
@pytest.mark.parametrize("curve", CURVES)
def test_automatic_is_close_to_the_best_with_many_streams(curve: str, n_streams: int) -> None:
    for n_stages in (2, 8):
        world = World(equal_stages(n_stages, curve), streams(n_streams, 20))
        best, by_hand = best_of_sweep(world, tries=1)
        assert steady_figures(world).tokens_per_s >= 0.95 * best, f"{n_stages} stages, by hand {by_hand}"


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("n_streams", [8, 9, 12, 16, 32])
def test_two_equal_stages_work_at_the_same_time(curve: str, n_streams: int) -> None:
    assert steady_figures(steady(equal_stages(2, curve), n_streams, jitter=0.03)).overlap >= 0.85


@pytest.mark.parametrize("curve", CURVES)
def test_eight_stages_are_in_use_with_64_streams(curve: str) -> None:
    figures = steady_figures(World(equal_stages(8, curve), streams(64, 16)))
    assert figures.overlap >= 0.90
    assert figures.utilisation >= 0.90


def test_one_stream_goes_row_by_row_at_full_speed() -> None:
    world = steady(equal_stages(2), 1)
    figures = steady_figures(world)
    assert figures.rows_mean == 1
    assert figures.tokens_per_s == pytest.approx(best_rate(world.stages, 1, 0), rel=0.01)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("n_streams", [1, 4, 16])
def test_a_long_prompt_leaves_running_streams_their_pace(curve: str, n_streams: int) -> None:
    seen = prompt_during_decode(equal_stages(2, curve), n_streams, 2_000)
    assert seen.itl_p99_ratio <= 2.0
    assert seen.ttft_ms <= 4.5 * seen.ttft_alone_ms, "and the prompt advances all the same"


def test_flights_of_single_rows_meet_where_pairs_have_room_for_a_prompt() -> None:
    """Flights of one row are best for four streams alone; two of two rows take six rows of a prompt along each."""
    seen = prompt_during_decode(equal_stages(2, "matrix"), 4, 1_000)
    assert seen.quiet.rows_mean == pytest.approx(1, rel=0.1)
    assert seen.itl_p99_ratio <= 1.7
    assert seen.ttft_ms <= 2.2 * seen.ttft_alone_ms


@pytest.mark.sampled(1)
@pytest.mark.parametrize("n_streams", [4, 6, 8])
def test_decode_flights_behind_a_flight_of_prompt_rows_keep_their_pace_on_many_stages(n_streams: int) -> None:
    """They cannot overtake it, so that its way through all stages is theirs: a large chunk would take four steps."""
    assert prompt_during_decode(equal_stages(4, "matrix"), n_streams, 600).itl_p99_ratio <= 1.95


def test_prompt_rows_suit_flights_that_were_chosen_by_hand() -> None:
    """By itself the planner would put four streams together, with more riding prompt rows than single rows can take."""
    assert prompt_during_decode(equal_stages(2, "matrix"), 4, 1_000, setup=fixed(4, 1)).itl_p99_ratio <= 2.0


@pytest.mark.parametrize(("factor", "link_ms", "most_ms"), [(1.05, 0, 12), (1.15, 0, 24), (1.0, 10, 38)])
def test_steps_slower_than_predicted_are_not_taken_for_overhead(factor: float, link_ms: int, most_ms: float) -> None:
    """A plan that believes in an overhead sends many small flights, and these hide that there is none."""
    stages = equal_stages(2, "staircase", host_ns=600_000)
    slower = tuple(Disturbance(1, stage, factor) for stage in range(2))
    requests = streams(16, 120, n_prompt=8)
    world = World(
        stages, requests, link_ns=link_ms * MS, jitter=0.05, disturbances=slower, refresh_ns=1_000 * MS
    )  # fmt: skip
    simulation = Simulation(world).run()
    assert 0.8 * world.overhead_ns <= simulation.planner.round_trip.ns <= most_ms * MS


@pytest.mark.parametrize("curve", ["staircase", "arithmetic"])
def test_a_burst_of_short_prompts_is_read_although_some_of_it_run_already(
    curve: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of sixteen come a little sooner and have their first tokens while the others wait."""
    requests = tuple(Request(0 if index < 2 else 5 * MS, 12, 64) for index in range(16))
    found = []
    for cycles in (plan_choice.BURST_CYCLES, 0):
        monkeypatch.setattr(plan_choice, "BURST_CYCLES", cycles)
        simulation = Simulation(World(equal_stages(2, curve), requests)).run()
        last_first_ns = max(ttft_ns for _, ttft_ns in simulation.audit.firsts)
        found.append((last_first_ns, simulation.now_ns, simulation.audit.figures().itl_p99_ms))
    (last_first_ns, end_ns, p99_ms), (without_ns, end_without_ns, p99_without_ms) = found
    assert last_first_ns <= 0.85 * without_ns
    assert end_ns <= end_without_ns
    assert p99_ms <= 2 * p99_without_ms


@pytest.mark.parametrize("n_streams", [4, 8])
def test_after_a_loss_nobody_is_paused_much_longer_than_reading_takes(
    n_streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first streams to resume are slower until the last one does, and all are done sooner."""
    world = paused(equal_stages(2), n_streams, 200, 64)
    found = []
    for pressure in (plan_choice.REPLAY_PRESSURE, 0):
        monkeypatch.setattr(plan_choice, "REPLAY_PRESSURE", pressure)
        simulation = Simulation(world).run()
        found.append(([ttft_ns for _, ttft_ns in simulation.audit.firsts], simulation.now_ns))
    (pauses_ns, end_ns), (pauses_without_ns, end_without_ns) = found
    reading_ns = n_streams * 200 / 32 * world.stages[0].prefill.cost_ns(32)
    assert max(pauses_ns) <= 1.3 * reading_ns
    assert max(pauses_ns) <= 0.85 * max(pauses_without_ns)
    assert end_ns <= end_without_ns


@pytest.mark.sampled(1)
@pytest.mark.parametrize("context_tiled_ns", [0, 3_000], ids=["", "tiles"])
@pytest.mark.parametrize("n_streams", [4, 16])
def test_rows_of_a_growing_context_are_known_to_be_dearer(
    n_streams: int, context_tiled_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 2,000 tokens a row costs twice as much: fewer prompt rows ride, and running streams keep their pace.

    Quiet streams are young. Those during the prompt have grown by some hundred tokens, which alone makes their steps
    dearer by a fifth.
    """
    stages = equal_stages(2, "arithmetic", context_ns=13_000, context_tiled_ns=context_tiled_ns)
    known = prompt_during_decode(stages, n_streams, 2_000)
    assert known.itl_p99_ratio <= 2.0 * 1.2
    monkeypatch.setattr(GroupPlanner, "at", lambda self, *_: self)
    unknown = prompt_during_decode(stages, n_streams, 2_000)
    assert known.itl_p99_ratio < unknown.itl_p99_ratio


def first_token_ns(n_prompt: int, context_tiled_ns: float, setup: Setup = AUTO) -> int:
    """Return the time to first token of one prompt alone on two stages, at the prices of docs/results/curves.md."""
    stages = equal_stages(2, "arithmetic", context_ns=12_000, context_tiled_ns=context_tiled_ns)
    return Simulation(World(stages, (Request(0, n_prompt, 2),)), setup).run().audit.firsts[0][1]


def test_a_long_prompt_alone_is_read_in_tiles_of_attention() -> None:
    """64 rows read 4,000 tokens for a quarter of their cost one by one: quicker than in smaller chunks."""
    by_hand = Setup(ScheduleConfig(chunk_rows=16))
    assert first_token_ns(4_000, 3_000) < 0.72 * first_token_ns(4_000, 3_000, by_hand)
    assert first_token_ns(2_000, 3_000) < 0.85 * first_token_ns(2_000, 3_000, by_hand)


@pytest.mark.parametrize("n_prompt", [4, 16, 60, 120, 250, 350])
def test_a_short_prompt_alone_is_read_as_if_there_were_no_tiles(n_prompt: int) -> None:
    assert first_token_ns(n_prompt, 3_000) == first_token_ns(n_prompt, 0.0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("curve", ALL_CURVES)
@pytest.mark.parametrize("n_streams", [4, 8, 16, 32])
def test_bursts_of_short_requests_gain_from_batching(curve: str, n_streams: int) -> None:
    """Half of all rows are prompt rows here; automatic is at least as fast as taking turns and as draining."""
    world = burst(equal_stages(2, curve), n_streams, 16, 16, link_ns=MS // 2)
    auto, drain, single = (Simulation(world, setup).run().audit.figures() for setup in (AUTO, DRAIN, SINGLE))
    assert auto.tokens_per_s >= 0.98 * max(drain.tokens_per_s, single.tokens_per_s)
    assert auto.ttft_p50_ms <= drain.ttft_p50_ms
    assert auto.itl_p99_ms <= max(drain.itl_p99_ms, 4 * drain.itl_mean_ms)


@pytest.mark.parametrize("n_seeds", [3, pytest.param(8, marks=pytest.mark.nightly)])
def test_churn_on_a_flat_curve_is_about_as_fast_as_draining_and_answers_sooner(n_seeds: int) -> None:
    """Where batching costs nothing draining is hard to beat: it helps the pace of running and waiting streams.

    Histories that differ in one step soon differ in all, one of them by several percent: hence the mean of many.
    """
    ratios = []
    for seed in range(1, 1 + n_seeds):
        world = churn(equal_stages(2, "smooth"), 100, seed, link_ns=MS)
        auto, drain = (Simulation(world, setup).run().audit.figures() for setup in (AUTO, DRAIN))
        ratios.append(
            (
                auto.tokens_per_s / drain.tokens_per_s,
                auto.itl_mean_ms / drain.itl_mean_ms,
                auto.ttft_p50_ms / drain.ttft_p50_ms,
            )
        )
    rate, itl, ttft = (statistics.mean(each) for each in zip(*ratios, strict=True))
    assert rate >= 0.97
    assert itl <= 0.9
    assert ttft <= 0.87


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("n_stages", "n_streams", "link_ms", "is_held"),
    [(2, 8, 0, False), (4, 7, 0, True), (8, 12, 0, True), (2, 32, 10, True)],
    ids=["all at once", "five flights for seven", "nine for twelve", "three of eight rows for 32"],
)
def test_a_row_is_held_only_where_the_plan_says_so_and_no_longer_than_it_predicts(
    n_stages: int, n_streams: int, link_ms: int, is_held: bool
) -> None:
    """On the staircase full flights that streams take turns in beat one more, poorly filled one."""
    simulation = Simulation(steady(equal_stages(n_stages), n_streams, link_ns=link_ms * MS, jitter=0.03)).run()
    from_ns, to_ns = simulation.audit.steady_window(sum(r.max_tokens for r in simulation.world.requests) // 3)
    longest_ns = max(held_ns for when_ns, held_ns in simulation.audit.holds if from_ns <= when_ns <= to_ns)
    plan = simulation.planner.plan(n_streams, n_prompts=0)
    assert (longest_ns > 0) == is_held == (plan.n_groups * plan.group_rows < n_streams)
    assert longest_ns <= 0.5 * plan.period_ns, "by the curves, half of a token's time of every stream"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("curve", CURVES)
def test_a_slow_stage_bounds_the_pipeline_and_nothing_else_does(curve: str) -> None:
    stages = one_slower(4, 3.0, curve)
    for n_streams in (8, 16, 32):
        world = World(stages, streams(n_streams, 30))
        assert steady_figures(world).tokens_per_s >= 0.95 * best_of_sweep(world, tries=2)[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("link_ms", [1, 10])
@pytest.mark.parametrize("curve", CURVES)
def test_link_delay_is_learned_and_hidden(curve: str, link_ms: int) -> None:
    for n_streams in (2, 8, 12, 16):
        world = World(equal_stages(2, curve), streams(n_streams, 40), link_ns=link_ms * MS, jitter=0.03)
        assert steady_figures(world).tokens_per_s >= 0.95 * best_of_sweep(world, tries=2)[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("curve", CURVES)
def test_one_far_stage_of_four_is_hidden_too(curve: str) -> None:
    """Two machines in a room, two elsewhere: 20 ms between them, and 5 ms from the last back to the coordinator."""
    links_ns, stages = (0, 0, 20 * MS, 0, 5 * MS), equal_stages(4, curve)
    for n_streams in (4, 12, 16):
        world = World(stages, streams(n_streams, 30), links_ns=links_ns, jitter=0.03)
        assert steady_figures(world).tokens_per_s >= 0.95 * best_of_sweep(world, tries=2)[0]
    alone = Simulation(World(stages, streams(1, 4, n_prompt=1), links_ns=links_ns)).run()
    way_ns = 4 * stages[0].decode.cost_ns(1) + 25 * MS
    assert [itl_ns for _, itl_ns, _ in alone.audit.itls] == pytest.approx([way_ns] * 3), "every link, once a token"


def test_a_stage_that_slows_down_changes_the_plan() -> None:
    """A uniform slow-down of one of two stages: the plan that was best before may not be any more."""
    world = slowing(equal_stages(2), 8, 20_000 * MS, 3.0, refresh_ns=1_000 * MS)
    simulation = Simulation(world)
    simulation.run(60_000 * MS)
    assert simulation.planner.stages[0].decode.cost_ns(4) == pytest.approx(3 * 26.5 * MS, rel=0.1)
    after = simulation.run(120_000 * MS).audit.figures(60_000 * MS, 120_000 * MS)
    slow = dataclasses.replace(world, stages=(one_slower(1, 3.0)[0], *equal_stages(1)), disturbances=())
    assert after.tokens_per_s >= 0.95 * best_rate(slow.stages, 8, 0)


def test_envelopes_must_stay_apart() -> None:
    """The cost of one message for two groups: they are lock-step from then on. Hence the sender keeps them apart."""
    world = World(equal_stages(2), streams(8, 50, n_prompt=1))  # they start as two groups in one turn
    melted = steady_figures(world, Setup(melts_envelopes=True)).tokens_per_s
    assert steady_figures(world).tokens_per_s >= 1.5 * melted


@pytest.mark.parametrize(
    ("n_stages", "n_streams", "n_tokens"),
    [
        (16, 256, 6),
        pytest.param(16, 512, 6, marks=pytest.mark.nightly),
        pytest.param(64, 64, 6, marks=pytest.mark.nightly),
        pytest.param(2, 4_096, 4, marks=pytest.mark.nightly),
    ],
    ids=["256 on 16", "512 on 16", "64 on 64", "4,096 on 2"],
)
def test_many_streams_and_stages_come_close_to_the_bound(n_stages: int, n_streams: int, n_tokens: int) -> None:
    world = World(equal_stages(n_stages, "smooth"), streams(n_streams, n_tokens, n_prompt=1))
    simulation = Simulation(world).run()
    assert len(simulation.audit.token_times_ns) == n_streams * n_tokens
    assert simulation.audit.figures().overlap > 0.9, "of the whole run, its start and end included"
    figures = steady_part(simulation)
    assert figures.tokens_per_s >= 0.95 * best_rate(world.stages, n_streams, 0)
    assert figures.overlap >= 0.90


def test_a_larger_allowed_wait_gets_prompts_read_sooner() -> None:
    stages, found = equal_stages(2, "arithmetic"), []
    for stretch in (2.0, 4.0):
        seen = prompt_during_decode(stages, 4, 500, setup=Setup(ScheduleConfig(itl_stretch=stretch)))
        assert seen.during.itl_mean_ms <= stretch * seen.quiet.itl_mean_ms
        found.append(seen.ttft_ms)
    assert found[1] < 0.8 * found[0]


def test_the_bound_knows_that_no_stream_is_at_two_stages_at_once() -> None:
    """Sixteen rows are cheap per row, but sixteen streams cannot fill such a step at each of two stages."""
    curve = CostCurve([(1, 20 * MS), (4, 60 * MS), (8, 117 * MS), (12, 167 * MS), (16, 157 * MS)])
    stages = (StageModel(curve, curve),) * 2
    for n_streams in (1, 4, 7, 16, 20, 32):
        per_s = {rows: 1e9 * rows / curve.padded_cost_ns(rows, 512) for rows in range(1, n_streams + 1)} | {0: 0.0}
        moments = (
            (per_s[first] + per_s[second]) / 2 for first in per_s for second in per_s if first + second <= n_streams
        )
        crowded = max(moments)
        assert best_rate(stages, n_streams, 0) <= crowded * (1 + 1e-9)
        assert steady_figures(steady(stages, n_streams)).tokens_per_s <= 1.01 * best_rate(stages, n_streams, 0)
    assert best_rate(stages, 16, 0) < 0.75 * best_rate(stages, 32, 0)


@pytest.mark.parametrize(("n_stages", "n_requests"), [(32, 25), pytest.param(64, 40, marks=pytest.mark.nightly)])
def test_requests_come_and_go_on_many_unequal_stages(n_stages: int, n_requests: int) -> None:
    simulation = Simulation(churn(one_slower(n_stages, 3.0, "smooth"), n_requests, seed=3, link_ns=MS)).run()
    assert len(simulation.audit.ends) == n_requests


@pytest.mark.sampled(3)
@pytest.mark.parametrize("curve", ALL_CURVES)
@pytest.mark.parametrize("n_streams", [1, 4, 8, 16])
def test_curves_that_nobody_measured_are_learned_from_real_steps(curve: str, n_streams: int) -> None:
    """The effect of `--no-calibrate`: stages begin without any curve, and so does the coordinator."""
    world = dataclasses.replace(steady(equal_stages(2, curve), n_streams, jitter=0.05), refresh_ns=1_000 * MS)
    blind = Simulation(world, Setup(is_calibrated=False))
    assert not blind.planner.is_known
    assert not any(stage.curves.decode.is_known for stage in blind.stages)
    learned = steady_part(blind.run())
    assert blind.planner.is_known
    assert learned.tokens_per_s >= 0.90 * steady_figures(world).tokens_per_s


def test_streams_that_begin_apart_meet_although_nothing_is_known_yet() -> None:
    """While they have not met, stages can learn only from their costs alone."""
    requests = tuple(Request(3 * MS * index, 4, 100) for index in range(16))
    world = World(equal_stages(2, "smooth"), requests, refresh_ns=1_000 * MS)
    blind, known = (
        Simulation(world, Setup(is_calibrated=known)).run().audit.figures().tokens_per_s for known in (False, True)
    )
    assert blind >= 0.85 * known
