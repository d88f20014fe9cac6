"""A plan's advice in sentences: whether several hosts pay, which link limits, what else would fit."""

from __future__ import annotations

import dataclasses

from relayline.coordinator.planner.advice import advice, longest_context
from relayline.coordinator.planner.instance import Host, Instance, Link, Load, Machine, ModelShape
from relayline.coordinator.planner.memory import stage_memory
from relayline.coordinator.planner.quantisations import larger_quantisation, smaller_quantisation
from relayline.coordinator.planner.search import best_split
from relayline.coordinator.planner.speed import ROWS, Speed
from relayline.coordinator.planner.whatif import explain
from relayline.wire.common.units import GIB

MB = 1_000_000
MODEL = ModelShape(
    layer_bytes=(100 * MB,) * 16,
    head_bytes=100 * MB,
    embedding_bytes=100 * MB,
    kv_bytes=(4_096,) * 16,
    n_embd=2_048,
    n_vocab=32_000,
    n_ff=8_192,
    bits_per_weight=4.85,
    ctx_train=8_192,
)
LOAD = Load(ctx_tokens=1_024, n_lanes=8)


def host(name: str, gib_ms: float, *, gib: float | None = None, link: Link | None = None) -> Host:
    """A host that takes this many ms for a GiB in a step of one row; each further row costs half of that."""
    points = tuple((rows, gib_ms * 1e6 * (1 + 0.5 * (rows - 1))) for rows in ROWS)
    memory = None if gib is None else int(gib * GIB)
    return Host(name, Machine(name, 8, memory), 8, Speed(points, points, 0.0, "measured", 1.0), link=link or Link())


def advice_for(*hosts: Host, load: Load = LOAD) -> str:
    instance = Instance(MODEL, hosts, load)
    best = best_split(instance)
    assert best is not None
    return "\n".join(advice(instance, best))


def test_a_slow_helper_behind_a_slow_link_is_not_worth_it() -> None:
    far = Link(200_000_000, 1e6)
    text = advice_for(host("server", 100), host("phone", 3_000, link=far))
    assert "don't span: server holds, if it has the memory, the whole model alone" in text
    assert "both hosts together make" in text


def test_equal_hosts_learn_how_much_spanning_gives() -> None:
    text = advice_for(host("one", 400, gib=8), host("other", 400, gib=8))
    assert "don't span" not in text
    assert "holds the whole model alone and would make" in text
    assert "spanning makes" in text


def test_two_pipelines_are_advised_where_they_make_more_tokens() -> None:
    slow = Link(400_000_000, 1e9)
    text = advice_for(host("one", 100, gib=8, link=slow), host("other", 100, gib=8))
    assert "two pipelines side by side, one on one and one on other, would make" in text


def test_nothing_is_said_of_machines_that_cannot_hold_the_model() -> None:
    text = advice_for(host("one", 100, gib=1.6), host("other", 100, gib=1.6))
    assert "alone" not in text
    assert "two pipelines" not in text


def test_the_limiting_link_is_named_with_its_cost() -> None:
    text = advice_for(host("one", 50, gib=1.6, link=Link(300_000_000, 1e6)), host("other", 50, gib=1.6))
    assert "the link from one to other (3e+02 ms, 0.008 Gbit/s) slows the pipeline down" in text


def test_room_for_a_longer_context_and_a_larger_quantisation_is_reported() -> None:
    text = advice_for(host("one", 100, gib=2), host("other", 100, gib=2))
    assert (
        "there is room for more: this model as Q6_K, or contexts of 3,072 tokens instead of 1,024 would fit too" in text
    )


def test_the_largest_context_and_quantisation_that_fit_are_advised() -> None:
    instance = Instance(MODEL, (host("one", 100, gib=2), host("other", 100, gib=2)), LOAD)
    assert larger_quantisation(instance) == "Q6_K"
    assert longest_context(instance) == 3_072
    roomy = Instance(MODEL, (host("one", 100, gib=32), host("other", 100, gib=32)), LOAD)
    assert longest_context(roomy) == MODEL.ctx_train, "no longer than the model was made for"
    huge = dataclasses.replace(instance, model=dataclasses.replace(MODEL, layer_bytes=(250 * MB,) * 16))
    assert smaller_quantisation(huge) == "Q2_K"
    assert larger_quantisation(huge) == ""


def test_a_smaller_quantisation_is_advised_for_a_model_that_does_not_fit() -> None:
    model = dataclasses.replace(MODEL, layer_bytes=(250 * MB,) * 16)
    found = explain(Instance(model, (host("one", 100, gib=2), host("other", 100, gib=2)), LOAD))
    assert "the model as Q2_K" in found.remedies


def test_stored_prefixes_take_memory_of_every_stage() -> None:
    stores = dataclasses.replace(LOAD, prefix_memory_bytes=GIB)
    plain, more = (stage_memory(MODEL, load, 0, 8) for load in (LOAD, stores))
    assert more.total_bytes - plain.total_bytes == more.prefix_bytes == GIB
    hosts = (host("one", 100, gib=1.6), host("other", 100, gib=1.6))
    assert best_split(Instance(MODEL, hosts, LOAD)) is not None
    assert best_split(Instance(MODEL, hosts, stores)) is None
    assert "no stored prefixes (prefixMemoryBytes: 0)" in explain(Instance(MODEL, hosts, stores)).remedies


def test_one_more_machine_is_no_remedy_where_a_given_range_does_not_fit() -> None:
    given = dataclasses.replace(host("one", 100, gib=0.3), layers=(0, 8))
    found = explain(Instance(MODEL, (given, host("other", 100, gib=8)), LOAD))
    assert [(shortage.place, shortage.layers) for shortage in found.shortages] == [("one", (0, 8))]
    assert found.remedies == ()
