"""The default lanes and context of a pipeline, by its model and the memory of its hosts."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayline.coordinator.planner.instance import Host, Instance, Load, Machine, ModelShape
from relayline.coordinator.planner.memory import stage_memory
from relayline.coordinator.planner.search import Room
from relayline.coordinator.planner.speed import ROWS, Speed
from relayline.coordinator.planner.usual_context import (
    CACHE_BYTES_MAX,
    CTX_LEAST,
    CTX_MOST,
    SPARE,
    beside_others,
    usual_context,
    weights_by_memory,
)
from relayline.wire.common.units import GIB

MB = 1_000_000
# The sizes of a model of 8 billion weights in Q4_K_M: 4.9 GB, and 128 KiB of cache for each token.
MODEL = ModelShape(
    layer_bytes=(140 * MB,) * 32,
    head_bytes=430 * MB,
    embedding_bytes=300 * MB,
    kv_bytes=(4_096,) * 32,
    n_embd=4_096,
    n_vocab=128_256,
    n_ff=14_336,
    ctx_train=131_072,
)
LOAD = Load(kv_layout="per-lane")


def instance(*gib: float | None, model: ModelShape = MODEL, load: Load = LOAD) -> Instance:
    """Hosts with so much memory, one stage on each."""
    points = tuple((rows, 1e6 * rows) for rows in ROWS)
    speed = Speed(points, points, 0.0, "measured", 1.0)
    memories = [None if size is None else int(size * GIB) for size in gib]
    hosts = tuple(Host(f"h{at}", Machine(f"h{at}", 8, memory), 8, speed) for at, memory in enumerate(memories))
    return Instance(model, hosts, load)


def small(model: ModelShape = MODEL, **changes: object) -> ModelShape:
    """The same model with an eighth of the cache for each token."""
    return dataclasses.replace(model, kv_bytes=(512,) * 32, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gib", "model", "expected"),
    [
        (256, MODEL, (8, 8_192)),  # 8 GiB of cache, which is enough on any host
        (24, MODEL, (8, 8_192)),
        (15, MODEL, (4, 8_192)),
        (10, MODEL, (4, 4_096)),
        (8, MODEL, (4, 2_048)),
        (7, MODEL, (4, 2_048)),  # less stays free than the cache takes
        (4, MODEL, (32, 2_048)),  # nothing fits, and the planner says so
        (64, small(), (32, 16_384)),
        (64, small(ctx_train=8_192), (32, 8_192)),
        (64, small(ctx_train=5_000), (32, 4_864)),
        (64, small(ctx_train=512), (32, 512)),
        (64, small(ctx_train=100), (32, 100)),
        (64, small(ctx_train=0), (32, 2_048)),
        (64, dataclasses.replace(MODEL, kv_bytes=(0,) * 32), (32, 32_768)),
    ],
)
def test_a_good_context_comes_first_then_lanes_then_a_longer_one(
    gib: float, model: ModelShape, expected: tuple[int, int]
) -> None:
    assert usual_context(instance(gib, model=model), None, None) == expected


def test_given_values_stand() -> None:
    large = instance(256)
    assert usual_context(large, 2, None) == (2, 32_768)
    assert usual_context(large, 255, None) == (255, 2_048), "as many were asked for, so their contexts are short"
    assert usual_context(large, None, 4_096) == (16, 4_096)
    assert usual_context(large, None, 100_000) == (8, 100_000), "fewer such lanes"
    assert usual_context(large, 3, 5_000) == (3, 5_000)


def test_all_hosts_count_and_one_of_unknown_memory_leaves_the_usual() -> None:
    assert usual_context(instance(8, 8), None, None) == (4, 8_192), "one alone holds less"
    assert usual_context(instance(24, 24), None, None) == (8, 8_192)
    assert usual_context(instance(24, None), None, None) == (32, 2_048)
    assert usual_context(instance(24, None, model=small(ctx_train=1_024)), None, None) == (32, 1_024), (
        "no more positions"
    )


@given(
    gib=st.lists(st.floats(1, 512), min_size=1, max_size=3),
    kv_bytes=st.integers(0, 20_000),
    layer_mb=st.integers(1, 2_000),
    ctx_train=st.integers(0, 300_000),
    lanes=st.none() | st.integers(1, 255),
    tokens=st.none() | st.integers(8, 40_000),
)
def test_a_choice_fits_with_spare_memory_or_nothing_better_does(
    gib: list[float], kv_bytes: int, layer_mb: int, ctx_train: int, lanes: int | None, tokens: int | None
) -> None:
    model = dataclasses.replace(
        MODEL, layer_bytes=(layer_mb * MB,) * 32, kv_bytes=(kv_bytes,) * 32, ctx_train=ctx_train
    )
    problem = instance(*gib, model=model)
    n_lanes, ctx_tokens = usual_context(problem, lanes, tokens)
    assert lanes in (None, n_lanes)
    assert tokens in (None, ctx_tokens)
    least = tokens or min(CTX_LEAST, usual_context(instance(512, model=small(ctx_train=ctx_train)), None, None)[1])
    if tokens is None:
        assert least <= ctx_tokens <= min(ctx_train or CTX_LEAST, CTX_MOST)

    def fits(wanted_lanes: int, wanted_tokens: int) -> bool:
        load = dataclasses.replace(LOAD, n_lanes=wanted_lanes, ctx_tokens=wanted_tokens)
        return Room(dataclasses.replace(problem, load=load)).some_cuts() is not None

    load = dataclasses.replace(LOAD, n_lanes=n_lanes, ctx_tokens=ctx_tokens)
    whole = stage_memory(model, load, 0, 32)
    is_default = (n_lanes, ctx_tokens) == (lanes or LOAD.n_lanes, tokens or LOAD.ctx_tokens)
    is_least = ctx_tokens == least
    if not is_default and not is_least:
        assert fits(n_lanes, SPARE * ctx_tokens), "as much memory stays free as the cache takes"
        assert whole.kv_bytes <= max(CACHE_BYTES_MAX, whole.weights_bytes)
    elif not fits(n_lanes, ctx_tokens):
        others = itertools.product((lanes,) if lanes else (32, 16, 8, 4), (least,))
        assert not any(fits(*other) for other in others), "less is only refused where nothing fits"


@given(
    times=st.lists(st.floats(0.5, 3), min_size=1, max_size=3),
    scales=st.lists(st.sampled_from([0.1, 0.5, 1.0, 3.0]), min_size=2, max_size=4),
    n_most=st.none() | st.integers(1, 3),
)
def test_pipelines_that_share_machines_fit_there_together(
    times: list[float], scales: list[float], n_most: int | None
) -> None:
    """Whichever of them are awake at once. `times`: the memory of each host, by the weights of all on one of them."""
    models = [
        dataclasses.replace(MODEL, layer_bytes=tuple(int(size * scale) for size in MODEL.layer_bytes))
        for scale in scales
    ]
    all_gib = sum(sum(model.layer_bytes) for model in models) / GIB / len(times)
    gib = [all_gib * each for each in times]
    alone = [instance(*gib, model=model) for model in models]
    weights = [weights_by_memory(each) for each in alone]
    needed = []
    for at, each in enumerate(alone):
        shared = beside_others(each, [*weights[:at], *weights[at + 1 :]], n_most)
        n_lanes, ctx_tokens = usual_context(shared, None, None)
        load = dataclasses.replace(LOAD, n_lanes=n_lanes, ctx_tokens=ctx_tokens)
        if Room(dataclasses.replace(shared, load=load)).some_cuts() is None:
            return  # not even the least fits, and `plan` says so
        memory = stage_memory(each.model, load, 0, each.model.n_layers)
        needed.append(memory.weights_bytes + memory.kv_bytes)
    n_awake = len(alone) if n_most is None else n_most + 1
    assert sum(sorted(needed, reverse=True)[:n_awake]) <= sum(gib) * GIB


def test_one_alone_is_planned_as_before() -> None:
    assert beside_others(instance(24), []) == instance(24)
    elsewhere = {"another host": 20 * GIB}
    assert beside_others(instance(24), [elsewhere]) == instance(24)


def test_weights_of_those_beside_are_not_free() -> None:
    mine = instance(24)
    (own,) = weights_by_memory(mine).values()
    (host,) = beside_others(mine, [{"h0": 2 * GIB}, {"h0": GIB}], 1).hosts
    usable = int(24 * GIB * 0.95)
    assert host.machine.reserved_bytes == 2 * GIB + (usable - own - 2 * GIB) // 2
