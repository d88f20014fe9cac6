"""Stages on one device take turns: shared devices are recognised, and plans keep one group there."""

from __future__ import annotations

import dataclasses

import pytest

from relayline.coordinator.planner.instance import Host, Instance, Load, Machine, ModelShape
from relayline.coordinator.planner.predict import predict
from relayline.coordinator.planner.speed import ROWS, Speed
from relayline.coordinator.planner.whatif import one_more
from relayline.coordinator.schedule.groups import GroupPlanner
from relayline.coordinator.schedule.overhead import RoundTrip
from relayline.coordinator.schedule.shared_devices import Place, device_numbers, sharing
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.wire.common.curve import CostCurve

MS = 1_000_000
LAUNCHES = CostCurve([(1, 5 * MS), (64, 6 * MS), (512, 20 * MS)])  # of a GPU: rows cost next to nothing


def on_gpu(*ids: str, host: str = "a") -> Place:
    return Place(host, {each: f"CUDA{each[-1]} (H100)" for each in ids})


def on_cores(*cores: int, n_threads: int = 1, host: str = "a") -> Place:
    return Place(host, {}, frozenset(cores), n_threads)


@pytest.mark.parametrize(
    ("places", "numbers"),
    [
        ([on_gpu("bus0"), on_gpu("bus0")], [0, 0]),
        ([on_gpu("bus0"), on_gpu("bus1")], [0, 1]),
        ([on_gpu("bus0"), on_gpu("bus0", host="b")], [0, 1]),
        ([on_gpu("bus0", host=""), on_gpu("bus0", host="")], [0, 1]),
        ([on_gpu("bus0"), on_gpu("bus2"), on_gpu("bus1", "bus0")], [0, 1, 0]),
        ([on_gpu("bus0"), on_gpu("bus1"), on_gpu("bus0", "bus1")], [0, 0, 0]),
        ([on_gpu("bus0"), on_cores(0, 1, n_threads=2)], [0, 1]),
        ([on_cores(0, 1, n_threads=2), on_cores(0, 1, n_threads=2)], [0, 0]),
        ([on_cores(0, 1), on_cores(0, 1), on_cores(0, 1)], [0, 1, 2]),
        ([on_cores(0, n_threads=1), on_cores(1, n_threads=1)], [0, 1]),
        ([on_cores(0, 1, n_threads=2), on_cores(2, 3, n_threads=2)], [0, 1]),
        ([on_cores(0, n_threads=1), on_cores(0, n_threads=1)], [0, 0]),
    ],
)
def test_devices_that_stages_share_are_recognised(places: list[Place], numbers: list[int]) -> None:
    found = device_numbers(places)
    assert [found.index(number) for number in found] == [numbers.index(number) for number in numbers]


def test_it_is_said_in_a_line_for_each_device() -> None:
    places = [on_gpu("bus0"), on_gpu("bus1"), on_gpu("bus0"), on_cores(0, n_threads=1), on_cores(0, n_threads=1)]
    lines = list(sharing(places, ["first", "second", "third", "fourth", "fifth"]))
    assert lines == [
        "stages first and third share CUDA0 (H100): they take turns, so one stage in their place would be faster",
        "stages fourth and fifth share cores and have more threads than there are: they take turns; give them fewer "
        "threads, or make one stage of them",
    ]
    assert list(sharing(places[:2], ["first", "second"])) == []


def planner(*devices: int, curve: CostCurve = LAUNCHES) -> GroupPlanner:
    made = GroupPlanner([StageCost(curve, curve, 512, device=device) for device in devices])
    made.round_trip = RoundTrip(2.0 * MS)
    return made


@pytest.mark.parametrize("n_streams", [1, 2, 8, 32, 64, 200])
def test_one_group_where_all_stages_share(n_streams: int) -> None:
    apart, together = planner(-1, -1), planner(3, 3)
    assert together.plan(n_streams, n_prompts=0).n_groups == 1
    assert together.plan(n_streams, n_prompts=0).group_rows == n_streams
    assert together.plan(n_streams, n_prompts=4).n_groups == 1
    assert together.plan(n_streams, n_prompts=0).period_ns >= apart.plan(n_streams, n_prompts=0).period_ns
    if n_streams > 1:
        assert apart.plan(n_streams, n_prompts=0).n_groups > 1


def test_a_step_of_a_shared_device_is_that_of_all_its_stages() -> None:
    assert planner(0, 0).step_ns(64) == 12 * MS
    assert planner(0, 1).step_ns(64) == 6 * MS
    assert planner(0, 1, 0).step_ns(64) == 12 * MS
    assert planner(0, 1, 0).way_ns(64) == planner(-1, -1, -1).way_ns(64) == 18 * MS
    assert planner(0, 0).chunk_ns(64) == 12 * MS


def test_some_stages_that_share_leave_groups_for_the_others() -> None:
    linear = CostCurve([(1, 1 * MS), (512, 512 * MS)])
    plans = [planner(*devices, curve=linear).plan(32, n_prompts=0) for devices in ((0, 1, 2), (0, 0, 2), (0, 0, 0))]
    groups = [plan.n_groups for plan in plans]
    assert groups == sorted(groups, reverse=True)
    assert groups[1] > 1 == groups[2]
    periods = [plan.period_ns for plan in plans]
    assert periods == sorted(periods)


def test_more_streams_than_rows_take_turns_in_one_group() -> None:
    made = GroupPlanner([StageCost(LAUNCHES, LAUNCHES, 8, device=0)] * 2)
    made.round_trip = RoundTrip(50.0 * MS)  # more than all steps
    assert made.plan(20, n_prompts=0).group_rows <= 8


def test_a_plan_made_offline_knows_shared_devices() -> None:
    model = ModelShape((50_000_000,) * 4, 10_000_000, 10_000_000, (4096,) * 4, 512, 1_000, 2_048)
    curve = tuple((rows, 1e7 * rows) for rows in ROWS)
    speed = Speed(curve, curve, 0.0)
    found = []
    for devices in ((-1, -1), (0, 0)):
        hosts = (Host(f"stage-{at}", Machine("here", 64), 1, speed, device=each) for at, each in enumerate(devices))
        found.append(predict(Instance(model, tuple(hosts), Load(n_lanes=32)), ((0, 2), (2, 4))))
    apart, together = (prediction.rate(32) for prediction in found)
    assert apart is not None
    assert together is not None
    assert (apart.n_groups > 1, together.n_groups) == (True, 1)
    assert together.tokens_per_s < apart.tokens_per_s
    more = one_more(Instance(model, (*hosts_of(speed),), Load(n_lanes=32)), 0)
    assert more is not None
    assert more.best.rate > 0


def hosts_of(speed: Speed) -> tuple[Host, Host]:
    first = Host("a", Machine("here", 64), 1, speed, device=0)
    return first, dataclasses.replace(first, name="b")
