"""Pipelines with per-lane KV cells on virtual time: flights join up, and no stream starves."""

from __future__ import annotations

import dataclasses

import pytest

from relayline.coordinator.schedule import stage_cost
from relayline.deploy.testing.simulation.run import Simulation
from relayline.deploy.testing.simulation.scenarios import churn, prompt_during_decode, steady, steady_part
from relayline.deploy.testing.simulation.world import MS, Request, StageModel, World, equal_stages


def per_lane(n_stages: int, curve: str, context_ns: float = 0.0, further_ns: float = 0.0) -> tuple[StageModel, ...]:
    prices = {"context_ns": context_ns, "context_tiled_ns": further_ns}
    return tuple(dataclasses.replace(stage, is_per_lane=True, **prices) for stage in equal_stages(n_stages, curve))


def parts_per_step(simulation: Simulation) -> float:
    return sum(s.counts.n_parts for s in simulation.stages) / sum(s.counts.n_steps for s in simulation.stages)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("n_streams", [8, 16, 32])
@pytest.mark.parametrize("curve", ["staircase", "arithmetic"])
def test_steady_streams_travel_with_their_neighbours(curve: str, n_streams: int) -> None:
    apart = Simulation(steady(per_lane(2, curve), n_streams, jitter=0.05)).run()
    shared = Simulation(steady(equal_stages(2, curve), n_streams, jitter=0.05)).run()
    assert parts_per_step(apart) <= 1.1
    assert steady_part(apart).tokens_per_s >= 0.97 * steady_part(shared).tokens_per_s


@pytest.mark.sampled(1)
@pytest.mark.parametrize("prices", [(0.0, 0.0), (6_000.0, 1_500.0)], ids=["no context", "context"])
@pytest.mark.parametrize("seed", range(4))
def test_churn_breaks_no_rule(seed: int, prices: tuple[float, float]) -> None:
    simulation = Simulation(churn(per_lane(3, "staircase", *prices), 60, seed, link_ns=MS // 2)).run()
    assert simulation.audit.holds, "decode rows were held and came out again"
    assert parts_per_step(simulation) < 2.2


@pytest.mark.parametrize(("n_streams", "ratio_max"), [(4, 2.0), (16, 2.2)])
def test_a_long_prompt_leaves_running_streams_their_pace(n_streams: int, ratio_max: float) -> None:
    """With many streams the blocks are divided again when the prompt comes, and some streams wait for theirs once."""
    seen = prompt_during_decode(per_lane(2, "arithmetic"), n_streams, 1_000)
    assert seen.itl_p99_ratio <= ratio_max
    assert seen.ttft_ms <= 4.5 * seen.ttft_alone_ms


def test_plans_know_that_further_rows_of_a_chunk_cost_less_than_its_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices as in docs/results/curves.md. Plans that take every row for a first one send fewer at once."""
    stages = per_lane(2, "arithmetic", 6_000, 1_500)
    seen = prompt_during_decode(stages, 4, 1_000)
    monkeypatch.setattr(stage_cost, "price_per_lane", lambda first_ns, _, row_tokens, __: first_ns * row_tokens)
    blind = prompt_during_decode(stages, 4, 1_000)
    assert seen.itl_p99_ratio <= 2.1
    assert seen.ttft_ms < 0.95 * blind.ttft_ms


def test_a_tile_leaves_although_decode_flights_leave_hardly_any_room() -> None:
    """With two streams on a staircase, room for 64 rows takes longer than a prompt may wait."""
    requests = (*(Request(0, 4, 120) for _ in range(2)), Request(60 * MS, 1_000, 2))
    Simulation(World(per_lane(2, "staircase"), requests)).run()
