"""The planner against brute force and against common sense, on random pipelines."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayline.coordinator.model.cuts import ranges
from relayline.coordinator.planner.costs import Costs, Cycle, Edges, candidates
from relayline.coordinator.planner.instance import Host, Instance, Link, Load, Machine, ModelShape
from relayline.coordinator.planner.memory import machine_usable_bytes, stage_memory, usable_bytes
from relayline.coordinator.planner.predict import predict
from relayline.coordinator.planner.rates import rate_of
from relayline.coordinator.planner.search import Room, best_split, most_reaching
from relayline.coordinator.planner.speed import ROWS, Sample, Speed, from_samples, roofline
from relayline.coordinator.planner.whatif import explain, one_more, other_last
from relayline.coordinator.schedule.groups import GroupPlanner
from relayline.coordinator.schedule.overhead import RoundTrip
from relayline.wire.common.units import GIB
from tests.support.best_groupings import best_rate
from tests.support.examples import thinned

MB = 1_000_000
SAME = pytest.approx
N_EXAMPLES = 120


@st.composite
def speeds(draw: st.DrawFn) -> Speed:
    base = draw(st.floats(1e7, 2e9))
    growth = draw(st.lists(st.floats(0.8, 1.7), min_size=len(ROWS), max_size=len(ROWS)))
    layers = tuple(zip(ROWS, itertools.accumulate(growth, lambda ns, factor: ns * factor, initial=base), strict=False))
    head = tuple((rows, ns * draw(st.sampled_from((0.5, 1.0, 3.0)))) for rows, ns in layers)
    return Speed(layers, head, draw(st.sampled_from((0.0, 1e5, 5e6))))


@st.composite
def instances(draw: st.DrawFn, *, has_memory: bool = True) -> Instance:
    n_layers = draw(st.integers(1, 8))
    n_stages = draw(st.integers(1, min(4, n_layers)))
    period = draw(st.sampled_from((1, 1, 1, 2)))
    sizes = draw(st.lists(st.sampled_from((20, 30, 45)), min_size=n_layers, max_size=n_layers))
    model = ModelShape(
        layer_bytes=tuple(size * MB for size in sizes),
        head_bytes=draw(st.integers(1, 200)) * MB,
        embedding_bytes=draw(st.integers(1, 200)) * MB,
        kv_bytes=(4096,) * n_layers,
        n_embd=2048,
        n_vocab=32_000,
        n_ff=8192,
        is_allowed=lambda start, _: start % period == 0,
    )
    memory = st.one_of(st.none(), st.floats(0.4, 4.0).map(lambda gib: int(gib * GIB))) if has_memory else st.none()
    machines = [
        Machine(f"machine-{at}", draw(st.integers(1, 4)), draw(memory)) for at in range(draw(st.integers(1, n_stages)))
    ]
    quick = draw(speeds())
    hosts = tuple(
        Host(
            name=f"stage-{at}",
            machine=draw(st.sampled_from(machines)),
            threads=draw(st.integers(1, 3)),
            speed=draw(st.one_of(st.just(quick), speeds())),
            memory_bytes=draw(memory),
            link=Link(draw(st.sampled_from((0, 200_000, 20_000_000))), draw(st.sampled_from((1e6, 1e8, 1e9)))),
        )
        for at in range(n_stages)
    )
    layout = draw(st.sampled_from(("unified", "per-lane")))
    load = Load(ctx_tokens=512, n_lanes=draw(st.sampled_from((1, 2, 5, 8, 17))), kv_layout=layout)
    return Instance(model, hosts, load, coordinator=draw(st.sampled_from((None, machines[0]))))


def every_split(instance: Instance) -> list[Edges]:
    """All legal partitions, by brute force; the memory of hosts and machines is looked at stage by stage."""
    n_layers, found = instance.model.n_layers, []
    for cuts in itertools.combinations(range(1, n_layers), len(instance.hosts) - 1):
        edges = ranges(n_layers, cuts)
        if all(instance.model.is_allowed(*edge) for edge in edges) and _fits(instance, edges):
            given_ranges = (host.layers in (None, edge) for host, edge in zip(instance.hosts, edges, strict=True))
            if all(given_ranges):
                found.append(edges)
    return found


def _fits(instance: Instance, edges: Edges) -> bool:
    held: dict[Machine, int] = {}
    for host, edge in zip(instance.hosts, edges, strict=True):
        need = stage_memory(instance.model, instance.load, *edge).total_bytes
        limit = usable_bytes(host.memory_bytes)
        if limit is not None and need > limit:
            return False
        held[host.machine] = held.get(host.machine, 0) + need
    limits = {machine: machine_usable_bytes(machine) for machine in held}
    return all(limit is None or held[machine] <= limit for machine, limit in limits.items())


def reachable(instance: Instance, edges: Edges) -> float:
    return best_rate(Costs(instance), edges, instance.load.streams)


def most(instance: Instance) -> float:
    """Return what the first part of the search finds."""
    found = most_reaching(Costs(instance), Room(instance))
    assert found is not None
    assert found.is_exact
    return reachable(instance, found.edges)


@settings(max_examples=thinned(N_EXAMPLES))
@given(instances())
def test_no_brute_force_beats_the_planner(instance: Instance) -> None:
    splits = every_split(instance)
    best = best_split(instance)
    if not splits:
        assert best is None
        return
    assert best is not None
    assert best.is_exact
    assert best.edges in splits
    assert most(instance) == SAME(max(reachable(instance, edges) for edges in splits), rel=1e-9)


@settings(max_examples=thinned(N_EXAMPLES // 2))
@given(instances())
def test_a_plan_has_one_rate_and_no_grouping_makes_more(instance: Instance) -> None:
    best = best_split(instance)
    if best is None:
        return
    shown = predict(instance, best.edges).rate(instance.load.streams)
    assert shown is not None
    assert best.rate * 1e9 == SAME(shown.tokens_per_s, rel=1e-9)
    assert best.rate == SAME(rate_of(instance, best.edges), rel=1e-12)
    assert best.rate <= best.reachable * (1 + 1e-9)


@settings(max_examples=thinned(N_EXAMPLES // 2))
@given(instances(), st.data())
def test_given_ranges_are_kept(instance: Instance, data: st.DataObject) -> None:
    splits = every_split(instance)
    if not splits:
        return
    wanted, at = data.draw(st.sampled_from(splits)), data.draw(st.integers(0, len(instance.hosts) - 1))
    hosts = list(instance.hosts)
    hosts[at] = dataclasses.replace(hosts[at], layers=wanted[at])
    fixed = dataclasses.replace(instance, hosts=tuple(hosts))
    best = best_split(fixed)
    assert best is not None
    assert best.edges[at] == wanted[at]
    assert most(fixed) == SAME(max(reachable(fixed, edges) for edges in every_split(fixed)), rel=1e-9)


@settings(max_examples=thinned(N_EXAMPLES // 2))
@given(instances(), st.data())
def test_more_memory_and_faster_hosts_never_hurt(instance: Instance, data: st.DataObject) -> None:
    before = best_split(instance)
    at = data.draw(st.integers(0, len(instance.hosts) - 1))
    host = instance.hosts[at]
    factor = data.draw(st.floats(0.2, 1.0))
    wealth = {None: None} | {size: int(size * 1.5) for size in {h.memory_bytes for h in instance.hosts} if size}
    richer = {
        other.machine: dataclasses.replace(
            other.machine, memory_bytes=None if other.machine.memory_bytes is None else 2 * other.machine.memory_bytes
        )
        for other in instance.hosts
    }
    coordinator = richer.get(instance.coordinator) if instance.coordinator else None
    hosts = tuple(
        dataclasses.replace(
            other,
            machine=richer[other.machine],
            memory_bytes=wealth[other.memory_bytes],
            speed=other.speed.scaled(factor) if other is host else other.speed,
        )
        for other in instance.hosts
    )
    richer_one = dataclasses.replace(instance, hosts=hosts, coordinator=coordinator)
    if before is not None:
        assert best_split(richer_one) is not None
        assert most(richer_one) >= most(instance) * (1 - 1e-9)


@settings(max_examples=thinned(N_EXAMPLES // 2))
@given(instances())
def test_remedies_for_a_model_that_does_not_fit_are_true(instance: Instance) -> None:
    if best_split(instance) is not None:
        return
    infeasible = explain(instance)
    if Room(instance, ignore_memory=True).some_cuts() is None:
        assert "cannot make" in infeasible.text
        return
    assert infeasible.shortages
    assert all(short.missing_bytes > 0 for short in infeasible.shortages)
    for remedy in infeasible.remedies:
        if " lanes instead" in remedy:
            lanes = int(remedy.split()[0])
            assert 0 < lanes < instance.load.n_lanes
            assert best_split(_loaded(instance, n_lanes=lanes)) is not None
            assert best_split(_loaded(instance, n_lanes=lanes + 1)) is None
        elif remedy.startswith("contexts of "):
            assert best_split(_loaded(instance, ctx_tokens=int(remedy.split()[2].replace(",", "")))) is not None
        elif remedy.startswith("steps of "):
            assert best_split(_loaded(instance, max_rows=int(remedy.split()[2]))) is not None
        elif "kvLayout" in remedy:
            assert best_split(_loaded(instance, kv_layout="unified")) is not None
        elif "kvType" in remedy:
            assert best_split(_loaded(instance, kv_type="q8_0")) is not None
        else:
            gib = float(remedy.rsplit(" ", 2)[1])
            larger = (Host("more", Machine("more", 1, int(gib * GIB)), 1, instance.hosts[0].speed),)
            hosts = instance.hosts
            tried = [(*hosts[:at], *larger, *hosts[at:]) for at in range(len(hosts) + 1)]
            assert any(best_split(dataclasses.replace(instance, hosts=each)) is not None for each in tried)


def _loaded(instance: Instance, **changes: Any) -> Instance:
    return dataclasses.replace(instance, load=dataclasses.replace(instance.load, **changes))


def plain(n_stages: int, *, cores: int = 8, own_machines: bool = True, **load: Any) -> Instance:
    """Equal stages of 16 layers without memory limits or slow links."""
    model = ModelShape((40 * MB,) * 16, 100 * MB, 100 * MB, (4096,) * 16, 2048, 32_000, 8192)
    one = Machine("one", cores)
    speed = roofline(10e9, 50e9)
    hosts = tuple(
        Host(f"stage-{at}", Machine(f"machine-{at}", cores) if own_machines else one, 1, speed, link=Link(0, 1e12))
        for at in range(n_stages)
    )
    return Instance(model, hosts, Load(**load), Link(0, 1e12))


def test_the_rate_is_that_of_the_groups_that_the_coordinator_plans_with() -> None:
    instance = plain(3, n_lanes=32)
    edges = ((0, 5), (5, 11), (11, 16))
    costs = Costs(instance)
    planner = GroupPlanner([costs.stage_cost(stage, *edge) for stage, edge in enumerate(edges)])
    planner.round_trip = RoundTrip(float(predict(instance, edges).overhead_ns))
    for n_streams in (1, 8, 32):
        for key in candidates(n_streams, 3, 512):
            if not any(
                planner.stages[0].decode.padded_rows(rows, 512) != rows for rows in (key[1], n_streams % key[1])
            ):
                assert Cycle(costs, n_streams, key).of_split(edges) == SAME(planner.rate(n_streams, *key), rel=0.01)


def test_equal_hosts_share_the_work_evenly_and_the_head_counts() -> None:
    best = best_split(plain(3))
    assert best is not None
    assert [end - start for start, end in best.edges] == [6, 6, 4]  # the head weighs 2.5 layers


def test_a_slow_host_gets_less() -> None:
    instance = plain(2)
    slow = dataclasses.replace(instance.hosts[1], speed=instance.hosts[1].speed.scaled(3.0))
    best = best_split(dataclasses.replace(instance, hosts=(instance.hosts[0], slow)))
    assert best is not None
    assert best.edges[0][1] > 12


def test_stages_that_share_too_few_cores_gain_nothing_from_each_other() -> None:
    rates = {}
    for n_stages in (2, 4):
        instance = plain(n_stages, cores=2, own_machines=False)
        best = best_split(instance)
        assert best is not None
        rates[n_stages] = best.rate
        prediction = predict(instance, best.edges)
        limit = prediction.rates[-1].limit
        assert limit == ("the cores of one" if n_stages == 4 else limit)
    assert rates[4] == SAME(rates[2], rel=0.15)  # two stages on two cores leave them gaps


def test_chunks_of_a_prompt_wait_for_cores_that_stages_share() -> None:
    """With one thread each on one core, all of three stages' work for a chunk is in the way of the next chunk."""
    edges = ((0, 5), (5, 11), (11, 16))
    apart, together = plain(3, cores=1), plain(3, cores=1, own_machines=False)
    ways = {name: predict(instance, edges) for name, instance in (("apart", apart), ("together", together))}
    steps_ns = [Costs(apart).prefill_ns(stage, *edge, 64) for stage, edge in enumerate(edges)]
    assert max(steps_ns) < 0.5 * sum(steps_ns)
    assert ways["together"].ttft_ns > 1.5 * ways["apart"].ttft_ns


def test_a_slow_link_is_named() -> None:
    instance = plain(2)
    narrow = dataclasses.replace(instance.hosts[0], link=Link(0, 1e4))
    instance = dataclasses.replace(instance, hosts=(narrow, instance.hosts[1]))
    best = best_split(instance)
    assert best is not None
    assert predict(instance, best.edges).rates[-1].limit == "the link stage-0 to stage-1"


def test_one_stream_is_limited_by_latency_and_far_hosts_are_named_for_it() -> None:
    near = plain(2)
    best = best_split(near)
    assert best is not None
    assert predict(near, best.edges).rates[0].limit == "latency"
    hosts = tuple(dataclasses.replace(host, link=Link(400_000_000, 1e12)) for host in near.hosts)
    far = dataclasses.replace(near, hosts=hosts)
    assert predict(far, best.edges).rates[0].limit == "latency of links and coordinator"
    assert predict(far, best.edges).ttft_ns > predict(near, best.edges).ttft_ns


def test_one_more_machine_helps_by_about_its_share() -> None:
    instance = plain(2)
    best, more = best_split(instance), one_more(instance, 0)
    assert best is not None
    assert more is not None
    assert 1.3 < more.best.rate / best.rate < 1.6


def test_a_slow_host_at_the_end_is_seen() -> None:
    instance = plain(3)
    slow = dataclasses.replace(instance.hosts[2], speed=instance.hosts[2].speed.scaled(8.0))
    instance = dataclasses.replace(instance, hosts=(*instance.hosts[:2], slow))
    best, other = best_split(instance), other_last(instance)
    assert best is not None
    assert other is not None
    assert other.last in ("stage-0", "stage-1")
    assert other.best.rate > 1.3 * best.rate
    assert other_last(plain(3)) is None


def test_a_speed_is_recovered_from_its_own_samples() -> None:
    truth = Speed(
        tuple((rows, 5e8 * (1 + 0.1 * rows)) for rows in ROWS), tuple((rows, 2e8 * rows) for rows in ROWS), 3e5
    )

    def sample(layer_bytes: int, head_bytes: int) -> Sample:
        layers, head = layer_bytes / GIB, head_bytes / GIB
        decode = [(rows, truth.step_ns + truth.layer_ns(rows) * layers + truth.head_ns(rows) * head) for rows in ROWS]
        prefill = [(rows, truth.step_ns + truth.layer_ns(rows) * layers) for rows in ROWS]
        return Sample(layer_bytes, head_bytes, decode, prefill)

    found = from_samples([sample(200 * MB, 0), sample(40 * MB, 0), sample(40 * MB, 300 * MB)])
    assert found is not None
    assert found.step_ns == SAME(truth.step_ns, rel=0.01)
    for rows in (1, 8, 32, 128):
        assert found.layer_ns(rows) == SAME(truth.layer_ns(rows), rel=0.01)
        assert found.head_ns(rows) == SAME(truth.head_ns(rows), rel=0.05)
    assert from_samples([]) is None


def test_one_more_machine_is_proposed_with_the_memory_that_it_needs() -> None:
    instance = plain(2, ctx_tokens=2048)
    hosts = tuple(dataclasses.replace(host, memory_bytes=2 * GIB) for host in instance.hosts)
    tight = dataclasses.replace(instance, hosts=hosts)
    assert best_split(tight) is None
    infeasible = explain(tight)
    assert {short.place for short in infeasible.shortages} <= {"stage-0", "stage-1"}
    (more,) = (remedy for remedy in infeasible.remedies if remedy.startswith("one more machine"))
    gib = float(more.split()[-2])
    assert 0 < gib < 6
    for size, fits in ((gib, True), (gib - 0.5, False)):
        extra = Host("more", Machine("more", 1, int(size * GIB)), 1, hosts[0].speed)
        tried = [(*hosts[:at], extra, *hosts[at:]) for at in range(3)]
        assert any(best_split(dataclasses.replace(tight, hosts=each)) is not None for each in tried) is fits
