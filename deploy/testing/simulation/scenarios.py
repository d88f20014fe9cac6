"""Scenarios: steady streams, unequal stages, delay, churn, stalls, a slowing stage, prompts, drafts."""

from __future__ import annotations

import dataclasses
import math
import random

from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.coordinator.schedule.groups import GroupPlanner
from relayline.coordinator.schedule.overhead import RoundTrip
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.deploy.testing.simulation.draft_model import DraftedSimulation, DraftModelFacts
from relayline.deploy.testing.simulation.figures import Figures
from relayline.deploy.testing.simulation.run import AUTO, Setup, Simulation, fixed
from relayline.deploy.testing.simulation.world import MS, Disturbance, Request, StageModel, World, streams

PLAIN = Setup(ScheduleConfig(draft=0))
SWEEP_TRIES = 8  # number of hand-set plans to simulate; the planner's formula chooses them


def steady(stages: tuple[StageModel, ...], n_streams: int, *, link_ns: int = 0, jitter: float = 0.0) -> World:
    """Return a world of n_streams equal streams, long enough for a window in which all of them run."""
    return World(stages, streams(n_streams, max(48, 400 // n_streams)), link_ns=link_ns, jitter=jitter)


def steady_figures(world: World, setup: Setup = AUTO) -> Figures:
    """Simulate a steady world and return the figures of its middle."""
    return steady_part(Simulation(world, setup).run())


def steady_part(simulation: Simulation) -> Figures:
    """Return the figures of the middle third of a finished steady simulation, counted in tokens.

    The rate is that of whole gaps between tokens: a window that cuts the groups' cycles would count one group too many.
    """
    requests = simulation.world.requests
    total = sum(request.max_tokens for request in requests)
    figures = simulation.audit.figures(*simulation.audit.steady_window(total // 3))
    return dataclasses.replace(figures, tokens_per_s=1e3 * len(requests) / figures.itl_mean_ms)


def best_of_sweep(world: World, tries: int = SWEEP_TRIES) -> tuple[float, tuple[int, int]]:
    """Return (tokens a second, (groups, rows)) of the best hand-set plan for a steady world."""
    n_streams, n_stages = len(world.requests), len(world.stages)
    planner = GroupPlanner([StageCost(stage.decode, stage.prefill, stage.rows_max) for stage in world.stages])
    planner.round_trip = RoundTrip(world.overhead_ns)
    pairs = {
        (n_groups, rows)
        for rows in range(1, n_streams + 1)
        for n_groups in (
            math.ceil(n_streams / rows), n_streams // rows, min(n_stages, n_streams // rows),
            min(n_stages + 1, n_streams // rows),
        )
        if n_groups <= 4 * n_stages
    }  # fmt: skip
    hopeful = sorted(pairs, key=lambda pair: -planner.rate(n_streams, *pair))[:tries]
    # The classic choices are always tried.
    hopeful += [(1, n_streams), (min(n_streams, n_stages), math.ceil(n_streams / min(n_streams, n_stages)))]
    return max((steady_figures(world, fixed(*pair)).tokens_per_s, pair) for pair in hopeful)


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillEffect:
    """Running streams before and during the prefill of a long prompt."""

    quiet: Figures
    during: Figures
    ttft_ms: float
    ttft_alone_ms: float

    @property
    def itl_p99_ratio(self) -> float:
        """Inter-token latency p99 during the prefill, relative to before."""
        return self.during.itl_p99_ms / self.quiet.itl_p99_ms


def prompt_during_decode(
    stages: tuple[StageModel, ...], n_streams: int, n_prompt: int, *, setup: Setup = AUTO
) -> PrefillEffect:
    """Let a long prompt arrive while streams run."""
    quiet_world = World(stages, streams(n_streams, 100))
    quiet = Simulation(quiet_world, setup).run()
    arrives_ns = quiet.now_ns // 2
    running = tuple(Request(0, 4, 10_000) for _ in range(n_streams))
    simulation = Simulation(World(stages, (*running, Request(arrives_ns, n_prompt, 2))), setup)
    until_ns = arrives_ns
    while not (late := [ttft_ns for arrived_ns, ttft_ns in simulation.audit.firsts if arrived_ns == arrives_ns]):
        until_ns += 1_000 * MS
        simulation.run(until_ns)
    alone = Simulation(World(stages, (Request(0, n_prompt, 2),)), setup).run()
    return PrefillEffect(
        quiet.audit.figures(*quiet.audit.steady_window(20 * n_streams)),
        simulation.audit.figures(arrives_ns, arrives_ns + late[0]),
        late[0] / 1e6,
        alone.audit.firsts[0][1] / 1e6,
    )


def churn(stages: tuple[StageModel, ...], n_requests: int, seed: int, *, link_ns: int = 0, n_lanes: int = 24) -> World:
    """Return requests of all lengths that come, wait for lanes, finish, give up; stages jitter, stall, slow down."""
    rng = random.Random(seed)
    step_ns = stages[0].decode.cost_ns(8)
    requests = []
    at_ns = 0
    for _ in range(n_requests):
        at_ns += round(rng.expovariate(1.0) * step_ns)
        gives_up = at_ns + round(rng.random() * 60 * step_ns) if rng.random() < 0.25 else None
        n_prompt = rng.choice((1, 3, 20, 90, 700))
        requests.append(Request(at_ns, n_prompt, rng.randint(1, 30), gives_up))
    disturbances = tuple(
        Disturbance(
            round(rng.random() * at_ns),
            rng.randrange(len(stages)),
            rng.choice((1.0, 0.7, 3.0)),
            rng.choice((0, 0, round(10 * step_ns))),
        )
        for _ in range(6)
    )
    return World(
        stages, tuple(requests), link_ns=link_ns, jitter=0.1, disturbances=disturbances, n_lanes=n_lanes,
        refresh_ns=1_000 * MS, seed=seed,
    )  # fmt: skip


def burst(
    stages: tuple[StageModel, ...], n_streams: int, n_prompt: int, n_tokens: int, rounds: int = 3, *, link_ns: int = 0
) -> World:
    """Return n_streams requests that all come at once, again and again, before the last have ended."""
    alone_ns = sum(stage.prefill.cost_ns(n_prompt) + n_tokens * stage.decode.cost_ns(1) for stage in stages)
    return World(
        stages,
        tuple(
            Request(round(at * alone_ns * n_streams / (2 * len(stages))), n_prompt, n_tokens)
            for at in range(rounds)
            for _ in range(n_streams)
        ),
        link_ns=link_ns, jitter=0.03, n_lanes=2 * n_streams,
    )  # fmt: skip


def slowing(stages: tuple[StageModel, ...], n_streams: int, at_ns: int, factor: float, *, refresh_ns: int) -> World:
    """Return steady streams during which the first stage becomes `factor` times as slow."""
    return World(
        stages, streams(n_streams, 10_000), disturbances=(Disturbance(at_ns, 0, factor),), refresh_ns=refresh_ns
    )


def paused(stages: tuple[StageModel, ...], n_streams: int, n_read: int, n_tokens: int) -> World:
    """Return streams paused by a loss: each has n_read tokens, half of them of its answer, and n_tokens to come."""
    n_before = n_read // 2
    request = Request(0, n_read - n_before, n_before + n_tokens, n_before=n_before)
    return World(stages, (request,) * n_streams, link_ns=MS // 2, jitter=0.03)


@dataclasses.dataclass(frozen=True, slots=True)
class Drafting:
    """Streams whose clients predict their answers, with drafts and without."""

    plain_per_s: float
    """Tokens, without drafts."""
    gain: float
    """Tokens per second with drafts, relative to that, while all streams run: with drafts they do not all end together.
    """
    gain_whole: float
    """The same until the last one has ended."""
    n_drafted: float
    """Guesses for each stream."""
    n_guess_flights: int


def drafting(
    stages: tuple[StageModel, ...], n_streams: int, predicted: float, *, link_ns: int = 0, n_tokens: int = 96
) -> Drafting:
    """Let streams run with a share of right tokens in their predictions, once with drafts and once without."""
    requests = streams(n_streams, n_tokens, predicted=predicted)
    world = World(stages, requests, link_ns=link_ns, jitter=0.03)
    auto, plain = (Simulation(world, setup).run().audit for setup in (AUTO, PLAIN))
    plain_per_s, whole_per_s = plain.figures().tokens_per_s, auto.figures().tokens_per_s
    gain = auto.figures(*auto.common_window()).tokens_per_s / plain.figures(*plain.common_window()).tokens_per_s
    drafted = auto.rows.n_drafted / n_streams
    return Drafting(plain_per_s, gain, whole_per_s / plain_per_s, drafted, auto.flights.n_guess_flights)


def draft_model_gain(
    stages: tuple[StageModel, ...], n_streams: int, model: DraftModelFacts, *, link_ns: int = 0
) -> float:
    """Return the tokens per second of streams with a draft model, relative to those without drafts, while all run."""
    world = World(stages, streams(n_streams, 96), link_ns=link_ns, jitter=0.03)
    plain, drafted = Simulation(world, PLAIN).run().audit, DraftedSimulation(world, model).run().audit
    return drafted.figures(*drafted.common_window()).tokens_per_s / plain.figures(*plain.common_window()).tokens_per_s


def drafting_churn(stages: tuple[StageModel, ...], n_requests: int, seed: int, *, link_ns: int = 0) -> World:
    """Return churn in which some clients predict their answers, well or badly."""
    world, rng = churn(stages, n_requests, seed, link_ns=link_ns), random.Random(seed)
    predicted = (rng.choice((None, 0.0, 0.5, 0.9, 1.0)) for _ in world.requests)
    requests = tuple(
        dataclasses.replace(request, predicted=share, max_tokens=2 * request.max_tokens)
        for request, share in zip(world.requests, predicted, strict=True)
    )
    return dataclasses.replace(world, requests=requests)
