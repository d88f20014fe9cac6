"""A plan as a few lines for people and as JSON-ready values: the layers of each stage, and why. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relayline.coordinator.model.cuts import ranges
from relayline.coordinator.planner.costs import Edges
from relayline.coordinator.planner.instance import Host, Instance
from relayline.coordinator.planner.predict import predict
from relayline.coordinator.planner.rates import rate_of
from relayline.deploy.planning.busy import BOUNDED, BUSY_SLOWER_MAX
from relayline.deploy.planning.known_hosts import KnownHost
from relayline.wire.common.texts import counted, named_layers, named_stage
from relayline.wire.common.units import GIB

ROWS_COMPARED = 8  # of the step by which hosts are compared
FULL = 0.9  # of the usable memory; from here on a stage's memory limits its layers
RELAYED = " through the relay"
MEASURED = ("measured", "calibrated", BOUNDED)


def equal_cuts(instance: Instance) -> tuple[int, ...] | None:
    """Return the cuts with which every stage has about as many layers; None where the model does not allow them."""
    n_layers, n_stages = instance.model.n_layers, len(instance.hosts)
    cuts = tuple(n_layers * at // n_stages for at in range(1, n_stages))
    is_legal = all(instance.model.is_allowed(start, end) for start, end in ranges(n_layers, cuts))
    return cuts if is_legal and len(set(cuts)) == len(cuts) else None


def describe_plan(instance: Instance, edges: Edges, known: Mapping[str, KnownHost]) -> dict[str, Any]:
    """Return who got which layers and why: what GET /v1/pipeline says under `planned`.

    `from`: measured where all hosts are, else declared or estimated. Rates are tokens per second at `streams`.
    """
    prediction, pace = predict(instance, edges), _pace(instance)
    stages = [
        {
            "name": host.name,
            "host": host.machine.name,
            "layers": list(edge),
            "relative_speed": round(pace[host.name], 3),
            "speed_source": host.speed.source,
            "memory_bytes": planned.memory.total_bytes,
            "memory_limit_bytes": planned.limit_bytes,
            "is_full": planned.limit_bytes is not None and planned.memory.total_bytes > FULL * planned.limit_bytes,
            **_facts(known.get(host.name)),
        }
        for host, edge, planned in zip(instance.hosts, edges, prediction.stages, strict=True)
    ]
    cuts = equal_cuts(instance)
    rate = prediction.rate(instance.load.streams)
    sources = {host.speed.source for host in instance.hosts}
    return {
        "from": "measured" if sources <= set(MEASURED) else "estimated" if "estimated" in sources else "declared",
        "streams": instance.load.streams,
        "tok_s": _per_s(instance, edges),
        "limit": rate.limit if rate is not None else "",
        "equal_tok_s": None if cuts is None else _per_s(instance, ranges(instance.model.n_layers, cuts)),
        "stages": stages,
    }


def _per_s(instance: Instance, edges: Edges) -> float:
    return round(rate_of(instance, edges) * 1e9, 2)


def _pace(instance: Instance) -> dict[str, float]:
    """Return how quick each stage's host is, the slowest being 1.0."""
    ns = {host.name: _layer_ns(host) for host in instance.hosts}
    slowest = max(ns.values())
    return {name: slowest / max(each, 1e-9) for name, each in ns.items()}


def _layer_ns(host: Host) -> float:
    return host.speed.in_service * host.speed.layer_ns(ROWS_COMPARED)


def _facts(known: KnownHost | None) -> dict[str, Any]:
    if known is None:
        return {}
    link = known.link
    return {
        "hostname": known.hostname,
        "processor": known.processor,
        "cores": known.n_cores,
        "host_memory_bytes": known.memory_bytes,
        "engine_version": known.engine_version,
        "measured_unix_s": round(known.at_unix_s),
        "is_doubtful": known.is_doubtful,
        "is_relayed": known.is_relayed,
        "round_trip_ms": None if link is None else round(link.round_trip_ns / 1e6, 3),
        "bandwidth_gbps": None if link is None else round(link.bytes_per_s * 8 / 1e9, 3),
    }


def lines_of(planned: Mapping[str, Any]) -> list[str]:
    """Return the result of `describe_plan` as lines."""
    stages = planned["stages"]
    paces = ", ".join(f"{stage['name']} {stage['relative_speed']:.1f}x" for stage in stages)
    how = {"measured": "measured hosts", "declared": "declared speeds"}
    began = "layers have moved since the start; by" if planned.get("is_moved") else "planned from"
    lines = [f"{began} {how.get(planned['from'], 'estimates')}: {paces}"]
    width = max(len(stage["name"]) for stage in stages)
    for stage in stages:
        first, end = stage["layers"]
        lines.append(f"  {stage['name']:<{width}}  {named_layers(first, end):<14} ({end - first})  {_why(stage)}")
    equal, rate = planned["equal_tok_s"], planned["tok_s"]
    line = f"  about {_rounded(rate)} tok/s at {counted(planned['streams'], 'stream')}"
    if equal:
        line += f"; equal shares would give {_rounded(equal)}"
    if planned["limit"]:
        line += f"; the limit is {limit_text(planned['limit'])}"
    return [*lines, line]


def limit_text(limit: str) -> str:
    """Return a plan's `limit` for a person: "stage-1" for "stage stage-1"."""
    kind, _, name = limit.partition(" ")
    return named_stage(name) if kind == "stage" else limit


def _rounded(rate: float) -> str:
    """Return a predicted rate with as many digits as a prediction has."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def _why(stage: Mapping[str, Any]) -> str:
    parts = []
    if stage.get("cores"):
        parts.append(counted(stage["cores"], "core"))
    used, limit = stage["memory_bytes"] / GIB, stage["memory_limit_bytes"]
    memory = f"{used:.2f} GiB" if limit is None else f"{used:.2f} of {limit / GIB:.2f} GiB"
    parts.append(f"{memory}, which is its limit" if stage["is_full"] else memory)
    if stage.get("round_trip_ms") is not None:
        way = RELAYED if stage.get("is_relayed") else ""
        parts.append(f"{stage['round_trip_ms']:.2g} ms and {_rate_text(stage['bandwidth_gbps'])} from here{way}")
    if stage["speed_source"] == BOUNDED:
        parts.append(
            f"too busy to be measured: it counts as {BUSY_SLOWER_MAX:g} times as slow as its cores suggest, and the "
            "next start measures it again"
        )
    elif stage.get("is_doubtful"):
        parts.append("busy when it was measured: the next start measures it again")
    if stage["speed_source"] == "estimated":
        parts.append("its speed is an estimate")
    return ", ".join(parts)


def _rate_text(gbps: float) -> str:
    return f"{gbps:.2g} Gbit/s" if gbps >= 1 else f"{gbps * 1e3:.3g} Mbit/s"
