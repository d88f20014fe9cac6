"""The rate that cost curves allow: no run reaches it, and a good schedule nearly does."""

from __future__ import annotations

import pytest

from benches import report, stages
from relayline.coordinator.observe.overlap import overlap_between
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.deploy.cli.load import Request
from relayline.deploy.testing.simulation.run import AUTO, Simulation
from relayline.deploy.testing.simulation.scenarios import burst
from relayline.deploy.testing.simulation.world import MS, StageModel, equal_stages
from relayline.wire.common.curve import CostCurve
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.benches.test_benches_report import run_of


def test_a_curve_without_gain_allows_the_rate_of_its_single_rows() -> None:
    by_row = CostCurve(((1, 10 * MS), (2, 20 * MS)))
    costs = [StageCost(by_row, by_row, 8)] * 2
    # 16 prompt rows one by one through two stages, 170 ms; then four times four rows at 100 a second, 160 ms.
    assert stages.allowed(costs, 4, 4, 5).tok_s == pytest.approx(20 / 0.33, rel=1e-3)
    assert stages.allowed(costs, 4, 4, 5).decode_tok_s == pytest.approx(100)
    # Only the slowest stage reads one row after the other: 15 x 10 + 10 + 5 ms, where a half as dear second has room.
    half = CostCurve(((1, 5 * MS), (2, 10 * MS)))
    uneven = [costs[0], StageCost(half, half, 8)]
    assert stages.allowed(uneven, 4, 4, 1).tok_s == pytest.approx(4 / 0.165, rel=1e-3)
    with_context = [StageCost(by_row, by_row, 8, context_ns=1 * MS)] * 2
    assert stages.allowed(with_context, 4, 4, 5).tok_s < 0.8 * stages.allowed(costs, 4, 4, 5).tok_s


def test_stages_that_are_dear_at_different_things_share_the_work() -> None:
    """The one that reads prompts for longest need not be the one that decodes for longest: neither waits for both."""

    def stage(decode_ms: int, prefill_ms: int) -> tuple[StageCost, StageModel]:
        curves = [CostCurve([(rows, rows * ms * MS) for rows in (1, 2)]) for ms in (decode_ms, prefill_ms)]
        return StageCost(*curves, 64), StageModel(*curves, 64)

    both = [stage(10, 10), stage(15, 5)]
    allowed = stages.allowed([cost for cost, _ in both], 16, 16, 16).tok_s
    assert allowed == pytest.approx(256 / (256 * 0.01 + 240 * 0.01 + 0.015), rel=1e-3)
    world = burst([model for _, model in both], 16, 16, 16, rounds=1)
    assert Simulation(world, AUTO).run().audit.figures().tokens_per_s < allowed


@pytest.mark.parametrize("curve", ["staircase", "smooth", "arithmetic"])
@pytest.mark.parametrize("n_streams", [1, 4, 8, 32])
def test_the_schedule_comes_near_and_never_beyond(curve: str, n_streams: int) -> None:
    models = equal_stages(2, curve)
    reached = Simulation(burst(models, n_streams, 8, 16, rounds=1), AUTO).run().audit.figures().tokens_per_s
    costs = [StageCost(stage.decode, stage.prefill, stage.rows_max) for stage in models]
    # The bound on steps of few streams is loose on a staircase, and prompts fill no step of decode rows in it.
    assert 0.75 < reached / stages.allowed(costs, n_streams, 8, 16).tok_s < 1.04  # steps jitter by three percent


def asked(steps_ms: list[tuple[int, int]], *, is_measured: bool = True) -> pb.StatusResponse:
    points = [pb.CostPoint(n_rows=rows, cost_ns=10 * rows * MS) for rows in (1, 2)] if is_measured else []
    return pb.StatusResponse(
        step_start_ns=[start * MS for start, _ in steps_ms], step_end_ns=[end * MS for _, end in steps_ms],
        decode_curve=points, prefill_curve=points,
    )  # fmt: skip


def answered(*token_ms: int) -> Request:
    return Request(0, len(token_ms), 0, list(range(len(token_ms))), [ms * MS for ms in token_ms])


def test_overlap_counts_while_every_stream_decodes() -> None:
    # One stage alone until the second stream's first token at 40 ms and from the first stream's end at 80 on.
    statuses = [asked([(0, 40), (40, 60), (60, 80), (80, 100)]), asked([(10, 30), (45, 60), (60, 80)])]
    requests = [answered(20, 60, 80), answered(40, 60, 100)]
    found = stages.figures(statuses, requests, 4)
    assert found["overlap_decode"] == pytest.approx(35 / 40)
    assert found["step_evenness"] == pytest.approx(35 / 40)
    assert found["allowed_tok_s"] > 0
    assert found["decode_reached"] * found["step_work"] == pytest.approx(1.0), "the first stage computes all the time"
    forgotten = [asked([(60, 80), (80, 100)]), statuses[1]]
    assert stages.figures(forgotten, requests, 4)["overlap_decode"] == pytest.approx(1.0)


def test_pauses_are_for_steps_elsewhere_or_for_all_else() -> None:
    # The first waits until 50 for the second's step and until 54 for its rows. The second waits until 40 for the
    # first's rows, then 2 for the way, and 6 between two steps although its rows had arrived; at the end 1 for the
    # first's rows.
    steps = [[(0, 40), (54, 100), (101, 140)], [(0, 30), (42, 50), (56, 99)]]
    found = stages.idle(steps, 0, 100)
    assert found == pytest.approx({"idle_elsewhere": (10 + 10 + 1) / 200, "idle_way": (4 + 2 + 6) / 200})
    computing = sum(min(end, 100) - start for each in steps for start, end in each if start < 100)
    assert 200 * (1 - sum(found.values())) == pytest.approx(computing)
    half = stages.idle(steps, 44, 52)
    assert half == pytest.approx({"idle_elsewhere": 6 / 16, "idle_way": 4 / 16})
    assert stages.idle([[(0, 10), (15, 30)]], 0, 20) == {"idle_elsewhere": 0, "idle_way": 0.25}
    assert stages.idle([[(0, 10)], []], 0, 20) == {}


def test_no_overlap_is_more_than_stages_are_even() -> None:
    steps = [[(-5, 40), (50, 110)], [(0, 20), (30, 50)]]  # of 100: 90 and 40
    assert stages.evenness(steps, (0, 100)) == {"step_evenness": pytest.approx(40 / 90)}
    assert overlap_between(steps, 0, 100)["2+"] <= 40 / 90
    assert stages.evenness([*steps, []], (0, 100)) == {"step_evenness": 0}
    assert stages.evenness(steps, (200, 300)) == {}


def test_lost_decode_time_is_waiting_or_dearer_steps() -> None:
    # Eight tokens in 100 ms, where the curves allow 100 tokens a second; the busiest stage computes 90 ms.
    steps = [[(-5, 40), (50, 110)], [(0, 20), (30, 50)]]
    in_ns = [[(start * MS, end * MS) for start, end in each] for each in steps]
    tokens_ns = [at * MS for at in (0, 1, 20, 40, 60, 80, 99, 100, 100, 101)]
    found = stages.work(in_ns, tokens_ns, (0, 100 * MS), 100.0)
    assert found == pytest.approx({"decode_reached": 0.8, "step_work": 90 / 80})
    assert found["decode_reached"] * found["step_work"] == pytest.approx(0.9)
    assert stages.work(in_ns, [], (0, 100 * MS), 100.0) == {}


def test_unknown_figures_are_left_out() -> None:
    unmeasured = [asked([(0, 40)], is_measured=False)] * 2
    assert stages.figures(unmeasured, [answered(20), answered(30)], 4) == {}  # no two streams decode at once
    assert stages.figures([], [answered(20, 30)], 4) == {}
    assert "overlap_decode" not in stages.figures([asked([(0, 40)])] * 2, [answered(), answered(30)], 4)


def test_a_goal_beyond_the_curves_says_so() -> None:
    ours = run_of("auto", 8, 20.0)
    ours.extra |= {"allowed_tok_s": 25.0, "allowed_decode_tok_s": 25.0}
    points = report.points_of([ours, run_of("rpc", 8, 10.0), run_of("unsplit", 8, 25.0)])
    goals = {goal["what"]: goal for goal in report.goals_of(points, [8])}
    assert goals["of what its curves allow at most"]["value"] == pytest.approx(0.8)
    assert goals["against llama.cpp RPC, decode"]["allowed"] == pytest.approx(2.5)
    assert "2.00[/] (≥ 2.8; curves allow 2.50)" in report._goal_cell(goals["against llama.cpp RPC, decode"])
    assert "allow" not in report._goal_cell(goals["against unsplit llama-server"])  # 1.0 is allowed, 0.85 the goal


def test_the_time_of_a_token_is_split_into_steps_and_ways() -> None:
    """Two stages, one flight: 2 and 3 ms of steps, 1 ms between the stages and 4 by way of the coordinator."""
    first = [(10 * at * MS, (10 * at + 2) * MS) for at in range(6)]
    second = [((10 * at + 3) * MS, (10 * at + 6) * MS) for at in range(6)]
    assert stages.ways([first, second], (0, 60 * MS)) == {"step_ms": [2, 3], "way_ms": [1, 4]}
    assert stages.ways([first], (0, 60 * MS)) == {"step_ms": [2], "way_ms": [8]}
    assert stages.ways([first, second], (0, 2 * MS)) == stages.ways([], (0, MS)) == {}
