"""Plans are judged by the groups that the coordinator chooses, and every place that shows a rate shows the same one."""

from __future__ import annotations

import dataclasses
import random

import pytest

from relayline.coordinator.planner.climb import shifts
from relayline.coordinator.planner.costs import Costs, Edges
from relayline.coordinator.planner.imbalance import HOLD_NS, ImbalanceWatch, faster_cut
from relayline.coordinator.planner.instance import Host, Instance, Link, Load, Machine, ModelShape
from relayline.coordinator.planner.predict import predict
from relayline.coordinator.planner.rates import Planned, rate_of, split_rates
from relayline.coordinator.planner.running_plan import gain_of, other_layers, running_plan
from relayline.coordinator.planner.search import Room, best_split, most_reaching
from relayline.coordinator.planner.speed import ROWS, Speed
from relayline.coordinator.schedule.overhead import RoundTrip
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.deploy.planning.plan_description import describe_plan

MB = 1_000_000
N_SHAPES = 100
STREAMS = (1, 2, 5, 8, 17, 32)


def speed(rng: random.Random) -> Speed:
    """A host whose step grows with its rows, from the first one or from the fourth on."""
    row_ns, slope, flat = 10 ** rng.uniform(7.5, 9), rng.uniform(0.02, 0.3), rng.choice((1, 4))
    points = tuple((rows, row_ns * max(1.0, 1 + slope * (rows - flat))) for rows in ROWS)
    return Speed(points, points, rng.choice((0.0, 1e5)), "measured", 1.0)


def shape(seed: int, *, is_crowded: bool | None = None) -> Instance:
    """A pipeline of unequal layers, hosts and links. With `is_crowded` stages share hosts with few cores."""
    rng = random.Random(seed)
    n_layers, n_stages = rng.randint(4, 14), rng.randint(2, 4)
    sizes = tuple(rng.choice((20, 30, 45)) * MB for _ in range(n_layers))
    model = ModelShape(sizes, rng.randint(1, 200) * MB, MB, (4_096,) * n_layers, 2_048, 32_000, 8_192)
    crowds = rng.random() < 0.4 if is_crowded is None else is_crowded
    few = [Machine(f"small-{at}", rng.randint(1, 4)) for at in range(rng.randint(1, n_stages))]
    usual = speed(rng)
    hosts = tuple(
        Host(
            name=f"stage-{at}",
            machine=rng.choice(few) if crowds else Machine(f"large-{at}", 8),
            threads=rng.randint(1, 3),
            speed=rng.choice((usual, speed(rng))),
            link=Link(rng.choice((0, 200_000, 20_000_000)), rng.choice((1e6, 1e8, 1e9))),
        )
        for at in range(n_stages)
    )
    load = Load(ctx_tokens=512, n_lanes=rng.choice(STREAMS))
    return Instance(model, hosts, load, coordinator=rng.choice((None, hosts[0].machine)))


def planned(seed: int) -> tuple[Instance, Edges]:
    instance = shape(seed)
    best = best_split(instance)
    assert best is not None
    return instance, best.edges


@pytest.mark.sampled(40)
@pytest.mark.parametrize("seed", range(N_SHAPES))
def test_no_shift_of_a_cut_is_better_with_the_groups_that_run(seed: int) -> None:
    instance, edges = planned(seed)
    rate = rate_of(instance, edges)
    tried = [rate_of(instance, shifted) for shifted in shifts(edges, Room(instance).holds)]
    assert max(tried, default=0.0) <= rate * (1 + 1e-9)


def test_shifts_are_those_to_the_nearest_cut_that_is_possible() -> None:
    edges = ((0, 4), (4, 8), (8, 16))
    even = list(shifts(edges, lambda split: all(start % 2 == 0 for start, _ in split)))
    assert [tuple(start for start, _ in split[1:]) for split in even] == [(2, 8), (6, 8), (4, 6), (4, 10)]


def test_the_best_grouping_alone_would_choose_other_cuts() -> None:
    """The rule matters: by the best grouping some cut would stay where a shift is better with the groups that run."""
    moved = 0
    for seed in range(N_SHAPES):
        instance, edges = planned(seed)
        reaching = most_reaching(Costs(instance), Room(instance))
        assert reaching is not None
        moved += reaching.edges != edges
    assert moved


@pytest.mark.sampled(20)
@pytest.mark.parametrize("seed", range(0, N_SHAPES, 2))
def test_table_page_and_description_say_one_rate(seed: int) -> None:
    """The page knows of crowded cores and busy links only what the overhead shows: there it may promise more."""
    instance, edges = planned(seed)
    n_lanes = instance.load.n_lanes
    rates = split_rates(Costs(instance), edges)
    shown = predict(instance, edges).rate(n_lanes)
    assert shown is not None
    assert describe_plan(instance, edges, {})["tok_s"] == pytest.approx(shown.tokens_per_s, abs=0.01)
    names = [host.name for host in instance.hosts]
    overhead_ns = Planned(instance, edges).overhead_ns(n_lanes, rates.grouping(n_lanes)[1])
    page = running_plan(rates.stages, edges, names, round_trips=[RoundTrip(overhead_ns)], n_lanes=n_lanes)
    at = page.streams.index(n_lanes)
    of_page = page.plans[0].tokens_per_s[at]
    if instance.crowded_machines or shown.limit.startswith("the link"):
        assert of_page >= shown.tokens_per_s - 0.01
    else:
        assert of_page == pytest.approx(shown.tokens_per_s, abs=0.01)
    asked = other_layers(rates.stages, edges, edges, round_trips=[RoundTrip(overhead_ns)], n_lanes=n_lanes)
    assert asked is not None
    assert asked.tokens_per_s == page.plans[0].tokens_per_s


def slower(costs: list[StageCost], at: int, times: float) -> list[StageCost]:
    for curve in (costs[at].decode, costs[at].prefill):
        curve.scale(times)
    return costs


@pytest.mark.parametrize("seed", range(0, N_SHAPES, 4))
def test_an_imbalance_gains_what_the_page_shows_for_its_layers(seed: int) -> None:
    instance, edges = planned(seed)
    n_lanes, trip = instance.load.n_lanes, RoundTrip(2e6, 8, 5e4)
    costs = slower(list(split_rates(Costs(instance), edges).stages), seed % len(edges), 3.0)
    watch, found = ImbalanceWatch(), None
    for now_ns in (1, HOLD_NS // 8, *(HOLD_NS * at // 8 for at in range(2, 12))):
        watch.look(faster_cut(costs, edges, n_lanes, trip, now_ns), now_ns)
        found = found or watch.reported
    if found is None:
        return
    page = running_plan(costs, edges, ["stage"] * len(edges), round_trips=[trip], n_lanes=n_lanes, faster=found.layers)
    base, at = page.plans[0], page.streams.index(n_lanes)
    (other,) = (plan for plan in page.plans if plan.name == "layers by measured speed")
    assert tuple(other.layers) == found.layers
    assert other.tokens_per_s[at] / base.tokens_per_s[at] - 1 == pytest.approx(found.gain, abs=0.02)
    assert gain_of(costs, edges, found.layers, n_lanes, [trip]) == found.gain


def alike(n_stages: int, *, threads: int, cores: int, device: int = -1, runs_ahead: bool = False) -> Instance:
    """Equal stages on one host."""
    points = tuple((rows, 1e8 * (1 + rows / 64)) for rows in ROWS)
    box, measured = Machine("box", cores), Speed(points, points, 0.0, "measured", 1.0)
    hosts = tuple(
        Host(f"stage-{at}", box, threads, measured, device=device, runs_ahead=runs_ahead) for at in range(n_stages)
    )
    model = ModelShape((100 * MB,) * 12, MB, MB, (4_096,) * 12, 2_048, 32_000, 8_192)
    return Instance(model, hosts, Load(ctx_tokens=512, n_lanes=8))


@pytest.mark.parametrize(
    ("instance", "n_groups"),
    [
        (alike(2, threads=4, cores=16), 2),
        (alike(2, threads=4, cores=7), 1),  # the coordinator finds that they take turns
        (alike(2, threads=4, cores=16, device=0), 1),
        (alike(4, threads=2, cores=4), 1),  # each two have cores enough, all have not: it finds out by trial
        (alike(4, threads=2, cores=16), 4),
    ],
)
def test_stages_that_take_turns_are_planned_with_one_flight(instance: Instance, n_groups: int) -> None:
    best = best_split(instance)
    assert best is not None
    assert split_rates(Costs(instance), best.edges).grouping(8)[0] == n_groups


def test_rows_ahead_hide_the_round_trip_of_one_host_and_of_no_two() -> None:
    waits, ahead = (alike(1, threads=4, cores=8, runs_ahead=runs_ahead) for runs_ahead in (False, True))
    step_ns = Costs(waits).step_ns(0, 0, 12, 1)
    round_trip_ns = Planned(waits, ((0, 12),)).overhead_ns(1, 1)
    assert 1 / rate_of(_one(ahead), ((0, 12),)) == pytest.approx(step_ns)
    assert 1 / rate_of(_one(waits), ((0, 12),)) >= step_ns + round_trip_ns
    rates = [rate_of(_one(alike(2, threads=4, cores=8, runs_ahead=each)), ((0, 6), (6, 12))) for each in (False, True)]
    assert rates[0] == rates[1]


def _one(instance: Instance) -> Instance:
    return dataclasses.replace(instance, load=dataclasses.replace(instance.load, n_streams=1))
