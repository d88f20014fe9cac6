"""A plan has one rate: its table, its advice, one more machine, other cuts and a comparison say the same figures."""

from __future__ import annotations

import dataclasses
import re

import pytest

from relayline.coordinator.model.cuts import ranges
from relayline.coordinator.planner.advice import advice
from relayline.coordinator.planner.instance import Host, Instance, Link, Load, Machine, ModelShape
from relayline.coordinator.planner.predict import predict
from relayline.coordinator.planner.search import best_split
from relayline.coordinator.planner.speed import ROWS, Speed
from relayline.deploy.cli.plan_notes import variants
from relayline.deploy.planning.plan_description import describe_plan, equal_cuts
from relayline.deploy.planning.report import Plan, as_json, show

MB = 1_000_000
MODEL = ModelShape(
    layer_bytes=(MB,) * 12,
    head_bytes=2 * MB,
    embedding_bytes=2 * MB,
    kv_bytes=(1_024,) * 12,
    n_embd=256,
    n_vocab=8_000,
    n_ff=1_024,
    bits_per_weight=4.85,
    ctx_train=2_048,
)
FAR = Link(40_000_000, 1e8)


def hosts(n_hosts: int, gib_ms: float, *, last: float = 1.0, link: Link | None = None) -> tuple[Host, ...]:
    """Hosts that take gib_ms for a GiB of one row, the last one `last` times as long; each further row a twentieth."""
    points = tuple((rows, gib_ms * 1e6 * (1 + 0.05 * (rows - 1))) for rows in ROWS)
    speed = Speed(points, points, 0.0, "measured", 1.0)
    speeds = [speed] * (n_hosts - 1) + [speed.scaled(last)]
    names = [f"box{at}" for at in range(n_hosts)]
    return tuple(
        Host(name, Machine(name, 8), 8, speed, link=link or Link()) for name, speed in zip(names, speeds, strict=True)
    )


SHAPES = {
    "a tiny model, which the coordinator limits": (hosts(4, 20), 8),
    "many streams of it": (hosts(3, 20), 32),
    "one stream": (hosts(2, 20), 1),
    "slow hosts": (hosts(4, 3_000), 8),
    "a slow last host": (hosts(3, 300, last=6.0), 8),
    "far hosts": (hosts(3, 100, link=FAR), 8),
}


def plan_of(name: str) -> Plan:
    chosen, n_lanes = SHAPES[name]
    instance = Instance(MODEL, chosen, Load(ctx_tokens=512, n_lanes=n_lanes))
    best = best_split(instance)
    assert best is not None
    prediction = predict(instance, best.edges)
    more = variants(instance, best, prediction)
    return Plan(name, "tiny", instance, best, prediction, more, (), advice(instance, best))


@pytest.mark.parametrize("name", SHAPES)
def test_table_advice_and_description_say_one_rate(name: str) -> None:
    plan = plan_of(name)
    streams = plan.instance.load.streams
    (shown,) = (rate["tok_s"] for rate in as_json(plan)["rates"] if rate["streams"] == streams)
    assert plan.best.rate * 1e9 == pytest.approx(shown, abs=0.001)
    described = describe_plan(plan.instance, plan.best.edges, {})
    assert described["tok_s"] == pytest.approx(shown, abs=0.01)
    cuts = equal_cuts(plan.instance)
    assert cuts is not None
    equal = predict(plan.instance, ranges(plan.instance.model.n_layers, cuts)).rate(streams)
    assert equal is not None
    assert described["equal_tok_s"] == pytest.approx(equal.tokens_per_s, abs=0.01)
    for together in re.findall(r"together make ([\d.]+) tok/s", "\n".join(plan.advice)):
        assert float(together) == pytest.approx(shown, abs=0.5)


@pytest.mark.parametrize("name", SHAPES)
def test_one_more_machine_has_the_rate_of_the_plan_that_has_it(name: str) -> None:
    plan = plan_of(name)
    streams, (first, *_) = plan.instance.load.streams, plan.variants
    at = [host.name for host in plan.instance.hosts].index(first.after) + 1
    like = next(host for host in plan.instance.hosts if host.name == first.like)
    copy = dataclasses.replace(like, name="copy", machine=Machine("copy", 8))
    longer = dataclasses.replace(plan.instance, hosts=(*plan.instance.hosts[:at], copy, *plan.instance.hosts[at:]))
    rate = predict(longer, ranges(MODEL.n_layers, first.cuts)).rate(streams)
    now = plan.prediction.rate(streams)
    assert rate is not None
    assert now is not None
    assert first.tokens_per_s == pytest.approx(rate.tokens_per_s)
    assert first.gain == pytest.approx(rate.tokens_per_s / now.tokens_per_s - 1)


@pytest.mark.parametrize("name", SHAPES)
def test_a_loss_is_never_given_as_advice(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(name)
    show(plan)
    text = capsys.readouterr().out
    assert not re.findall(r"\(-\d+%\)|\(\+0%\)", text)
    for variant in plan.variants:
        is_told = f"one more machine like {variant.like}'s ({variant.why}), after" in text
        assert is_told == (variant.gain >= 0.005)


@pytest.mark.parametrize("name", SHAPES)
def test_two_pipelines_are_not_advised_where_one_host_alone_makes_more(name: str) -> None:
    text = "\n".join(plan_of(name).advice)
    alone = re.search(r"the whole model alone and would make ([\d.]+)", text)
    pair = re.search(r"would make ([\d.]+) tok/s together", text)
    assert alone is None or pair is None or float(pair[1]) > float(alone[1])


def test_shapes_have_both_gains_and_losses_and_a_grouping_that_is_not_the_best() -> None:
    plans = [plan_of(name) for name in SHAPES]
    gains = [variant.gain for plan in plans for variant in plan.variants]
    assert min(gains) < -0.01
    assert max(gains) > 0.1
    assert min(plan.best.rate / plan.best.reachable for plan in plans) < 0.9
