"""Streams that could share a step do share it: after other numbers of streams, after starts, ends and slow moments."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from relayline.deploy.testing.simulation.run import Simulation
from relayline.deploy.testing.simulation.world import (
    MS,
    Request,
    SlowLinks,
    StageModel,
    World,
    gpu,
    staircase,
)
from relayline.wire.common.curve import CostCurve

S = 1_000 * MS
TOKEN_NS = 45_000  # of the coordinator, as with a GPU (docs/results/gpu.md)


def one_gpu(requests: tuple[Request, ...], *, slow_links: tuple[SlowLinks, ...] = (), seed: int = 1) -> World:
    """Return a pipeline of one quick stage, whose round trip takes a part of a step."""
    stage = StageModel(gpu(), gpu(), host_ns=500_000)
    return World(
        (stage,), requests, link_ns=200_000, token_ns=TOKEN_NS, jitter=0.03, refresh_ns=S, seed=seed,
        slow_links=slow_links,
    )  # fmt: skip


def decoding(simulation: Simulation) -> list[tuple[int, int]]:
    """Return (rows, streams that run) of each step while the number of streams did not change."""
    audit = simulation.audit
    firsts = {when for when, _ in audit.firsts}
    spans = [(arrived_ns + ttft_ns, 1) for arrived_ns, ttft_ns in audit.firsts]
    lasts: dict[int, int] = {}
    for when, _, session_id in audit.itls:
        lasts[session_id] = when
    changes = sorted([*spans, *((when, -1) for when in lasts.values()), *((when, 0) for when in firsts)])
    found, at, running = [], 0, 0
    for start, end, _, rows in audit.steps:
        while at < len(changes) and changes[at][0] <= start:
            running += changes[at][1]
            at += 1
        if at == len(changes) or changes[at][0] > end:
            found.append((rows, running))
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("n_before", "n_after"), [(64, 8), (32, 4), (64, 24)])
def test_fewer_streams_than_before_share_their_steps(n_before: int, n_after: int) -> None:
    """The round trip of many rows says little about one of few rows: two small flights once resulted from it."""
    many = tuple(Request(0, 32, 400) for _ in range(n_before))
    begins_ns = 30 * S
    few = tuple(Request(begins_ns, 32, 300) for _ in range(n_after))
    simulation = Simulation(one_gpu(many + few))
    simulation.run(begins_ns)
    assert simulation.planner.round_trip.ns > n_before * TOKEN_NS, "the same number of rows as before"
    simulation.run()
    steps = [rows for start, _, _, rows in simulation.audit.steps if start > begins_ns + S // 2]
    assert sum(rows == n_after for rows in steps) > 0.9 * len(steps)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_streams_that_start_and_end_at_any_time_share_every_step(seed: int) -> None:
    draw, at_ns, requests = random.Random(seed), 0, []
    for _ in range(60):
        at_ns += round(draw.expovariate(1.0) * 100 * MS)
        requests.append(Request(at_ns, 32, draw.randint(40, 160)))
    steps = decoding(Simulation(one_gpu(tuple(requests), seed=seed)).run())
    alone = [(rows, running) for rows, running in steps if rows <= running]
    assert sum(rows for rows, _ in alone) > 0.95 * sum(running for _, running in alone)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("curve", "n_stages"), [(staircase, 2), (staircase, 3), (gpu, 2)], ids=["tiles", "three", "gpu"]
)
def test_groups_form_again_on_several_stages(curve: Callable[[], CostCurve], n_stages: int) -> None:
    """16 streams begin at any time, among others that end: soon each of their steps has as many rows as planned."""
    draw, step_ns = random.Random(n_stages), curve().cost_ns(8)
    requests = [
        Request(round(draw.random() * 20 * step_ns), draw.choice((4, 20, 60)), 300 if at < 16 else draw.randint(5, 40))
        for at in range(32)
    ]
    requests.sort(key=lambda request: request.arrives_ns)
    stages = (StageModel(curve(), curve(), host_ns=300_000),) * n_stages
    simulation = Simulation(
        World(stages, tuple(requests), link_ns=300_000, token_ns=20_000, jitter=0.05, refresh_ns=S)
    ).run()  # fmt: skip
    plan, audit = simulation.planner.plan(16, n_prompts=0), simulation.audit
    assert (plan.n_groups > 1, plan.n_groups * plan.group_rows) == (True, 16)
    lasts = {session_id: when for when, _, session_id in audit.itls}
    begins_ns = max(when for session_id, when in lasts.items() if requests[session_id - 1].max_tokens < 300)
    ends_ns = min(when for session_id, when in lasts.items() if requests[session_id - 1].max_tokens == 300)
    steps = [rows for start, end, _, rows in audit.steps if start > begins_ns + 3 * step_ns and end < ends_ns]
    assert len(steps) > 100
    assert sum(rows == plan.group_rows for rows in steps) > 0.97 * len(steps)
