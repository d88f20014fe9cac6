"""Streams that could share a step do share it: after other numbers of streams, after starts, ends and slow moments."""

from __future__ import annotations

import random

import pytest

from relayline.deploy.testing.simulation.run import Simulation
from relayline.deploy.testing.simulation.world import (
    MS,
    Request,
    SlowLinks,
    StageModel,
    World,
    gpu,
)

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


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_streams_that_start_and_end_at_any_time_share_every_step(seed: int) -> None:
    draw, at_ns, requests = random.Random(seed), 0, []
    for _ in range(60):
        at_ns += round(draw.expovariate(1.0) * 100 * MS)
        requests.append(Request(at_ns, 32, draw.randint(40, 160)))
    steps = decoding(Simulation(one_gpu(tuple(requests), seed=seed)).run())
    alone = [(rows, running) for rows, running in steps if rows <= running]
    assert sum(rows for rows, _ in alone) > 0.95 * sum(running for _, running in alone)
