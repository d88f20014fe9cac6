"""Pipelines whose lanes have KV cells of their own, on virtual time: flights find together, nobody starves."""

from __future__ import annotations

import dataclasses

import pytest

from benches.simulate_run import Simulation
from benches.simulate_scenarios import churn, prompt_beside, steady, steady_part
from benches.simulate_world import MS, StageModel, equal_stages


def per_lane(n_stages: int, curve: str, context_ns: float = 0.0, further_ns: float = 0.0) -> tuple[StageModel, ...]:
    prices = {"context_ns": context_ns, "context_tiled_ns": further_ns}
    return tuple(dataclasses.replace(stage, is_per_lane=True, **prices) for stage in equal_stages(n_stages, curve))


def parts_per_step(simulation: Simulation) -> float:
    return sum(s.n_parts for s in simulation.stages) / sum(s.n_steps for s in simulation.stages)


@pytest.mark.parametrize("n_streams", [8, 16, 32])
@pytest.mark.parametrize("curve", ["staircase", "arithmetic"])
def test_steady_streams_travel_with_their_neighbours(curve: str, n_streams: int) -> None:
    apart = Simulation(steady(per_lane(2, curve), n_streams, jitter=0.05)).run()
    shared = Simulation(steady(equal_stages(2, curve), n_streams, jitter=0.05)).run()
    assert parts_per_step(apart) <= 1.1
    assert steady_part(apart).tokens_per_s >= 0.97 * steady_part(shared).tokens_per_s


@pytest.mark.parametrize("prices", [(0.0, 0.0), (6_000.0, 1_500.0)], ids=["no context", "context"])
@pytest.mark.parametrize("seed", range(4))
def test_churn_breaks_no_rule(seed: int, prices: tuple[float, float]) -> None:
    simulation = Simulation(churn(per_lane(3, "staircase", *prices), 60, seed, link_ns=MS // 2)).run()
    assert simulation.audit.holds, "decode rows were held and came out again"
    assert parts_per_step(simulation) < 2.2


@pytest.mark.parametrize(("n_streams", "ratio_max"), [(4, 2.0), (16, 2.2)])
def test_a_long_prompt_leaves_running_streams_their_pace(n_streams: int, ratio_max: float) -> None:
    """With many streams the blocks are cut anew when the prompt comes, and some streams wait for theirs once."""
    seen = prompt_beside(per_lane(2, "arithmetic"), n_streams, 1_000)
    assert seen.itl_p99_ratio <= ratio_max
    assert seen.ttft_ms <= 4.5 * seen.ttft_alone_ms


def test_and_where_its_context_makes_its_rows_dearer_than_the_first_of_them() -> None:
    """As measured, see benches/RESULTS.md. Plans that took every row for a first one would send fewer."""
    seen, dear = (prompt_beside(per_lane(2, "arithmetic", 6_000, further), 4, 1_000) for further in (1_500, 6_000))
    assert seen.itl_p99_ratio <= 2.1
    assert seen.ttft_ms < 0.9 * dear.ttft_ms
