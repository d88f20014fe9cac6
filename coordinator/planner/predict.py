"""Predictions for a split: steps, rates, time to first token, bytes on links, and the bottleneck. Pure."""

from __future__ import annotations

import dataclasses
import math

from relayline.coordinator.planner.costs import Costs, Cycle, Edges, crowd_ns, devices_ns
from relayline.coordinator.planner.instance import Instance, Machine
from relayline.coordinator.planner.memory import Pool, StageMemory, pool_usable_bytes, pools_of, usable_bytes
from relayline.coordinator.planner.rates import Planned, Rates, split_rates
from relayline.coordinator.planner.search import Room
from relayline.coordinator.schedule.groups import GroupPlanner

ROWS_SHOWN = (1, 8, 32)
STREAMS_SHOWN = (1, 8, 32)
PROMPT_TOKENS = 256  # of the prompt whose time to first token is predicted


@dataclasses.dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage of a plan."""

    name: str
    machine: str
    layers: tuple[int, int]
    memory: StageMemory
    limit_bytes: int | None
    """This stage's memory limit: its own, or its machine's less the memory of other stages there."""
    step_ns: dict[int, int]
    """Predicted step by rows, host work included."""
    threads: int
    source: str
    """Where its speed is from."""
    gpu: str = ""
    """The GPU that holds `memory.gpu`; empty: none."""
    gpu_limit_bytes: int | None = None
    """Its limit of that GPU's memory, less the part of other stages."""


@dataclasses.dataclass(frozen=True, slots=True)
class RatePlan:
    """The pipeline with a number of streams running."""

    n_streams: int
    tokens_per_s: float
    n_groups: int
    group_rows: int
    limit: str
    """The bottleneck: a stage, a machine's cores, a link, or the round trip of one flight (latency)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """A whole plan in numbers."""

    stages: tuple[StagePlan, ...]
    rates: tuple[RatePlan, ...]
    ttft_ns: int
    """Of a prompt of PROMPT_TOKENS tokens in an idle pipeline."""
    link_bytes_per_token: tuple[int, ...]
    """Coordinator to stage 0, between neighbours, last stage to coordinator; one row in its own message."""
    overhead_ns: int
    """Links and coordinator in one round trip of one row."""

    def rate(self, n_streams: int) -> RatePlan | None:
        """Return the prediction for a number of streams, if it is among those made."""
        return next((rate for rate in self.rates if rate.n_streams == n_streams), None)


def predict(instance: Instance, edges: Edges) -> Prediction:
    """Predict everything that a plan shows."""
    costs = Costs(instance)
    rates = split_rates(costs, edges)
    counts = sorted({n for n in STREAMS_SHOWN if n <= instance.load.n_lanes} | {instance.load.streams})
    overhead_ns = Planned(instance, edges).around((1, 1, 0)).ways_ns
    return Prediction(
        stages=tuple(_stage(costs, edges, stage) for stage in range(len(edges))),
        rates=tuple(_rate(costs, edges, rates, n_streams) for n_streams in counts),
        ttft_ns=_ttft_ns(costs, edges, rates.planner(1), overhead_ns),
        link_bytes_per_token=instance.link_bytes(1, edges),
        overhead_ns=overhead_ns,
    )


def _stage(costs: Costs, edges: Edges, stage: int) -> StagePlan:
    instance = costs.instance
    host, edge = instance.hosts[stage], edges[stage]
    room = Room(instance, ignore_memory=True)
    gpu = None if host.offload is None else host.offload.gpu
    own, shared = usable_bytes(host.memory_bytes), _limit_bytes(room, edges, stage, host.machine)
    of_gpu = None if gpu is None else _limit_bytes(room, edges, stage, gpu)
    return StagePlan(
        name=host.name,
        machine=host.machine.name,
        layers=edge,
        memory=room.need(stage, *edge),
        limit_bytes=_least(shared, own if gpu is None else None),
        step_ns={rows: costs.step_ns(stage, *edge, rows) for rows in ROWS_SHOWN if rows <= instance.load.max_rows},
        threads=host.threads,
        source=host.speed.source,
        gpu="" if gpu is None else gpu.name,
        gpu_limit_bytes=_least(of_gpu, None if gpu is None else own),
    )


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _limit_bytes(room: Room, edges: Edges, stage: int, pool: Pool) -> int | None:
    """Return the memory that a stage may use: the rest that its other stages leave."""
    usable = pool_usable_bytes(pool)
    if usable is None:
        return None
    others = (at for at, host in enumerate(room.instance.hosts) if at != stage and pool in pools_of(host))
    return usable - sum(room.need_of(pool, at, *edges[at]) for at in others)


def _rate(costs: Costs, edges: Edges, rates: Rates, n_streams: int) -> RatePlan:
    grouping = rates.grouping(n_streams)
    limit = _limit(costs, edges, Cycle(costs, n_streams, grouping))
    return RatePlan(n_streams, rates.rate(n_streams) * 1e9, *grouping, limit)


def _limit(costs: Costs, edges: Edges, cycle: Cycle) -> str:
    """Name the longest part of a cycle."""
    instance = costs.instance
    works = [cycle.work_ns(stage, *edge) for stage, edge in enumerate(edges)]
    way = sum(cycle.way_ns(stage, *edge) for stage, edge in enumerate(edges))
    names = ["coordinator", *(host.name for host in instance.hosts), "coordinator"]
    parts = [(float(work), f"stage {host.name}") for work, host in zip(works, instance.hosts, strict=True)]
    crowds = cycle.crowds_ns(works, costs.crowded)
    parts += [(float(busy), f"the cores of {machine.name}") for machine, busy in crowds.items()]
    parts += [(cycle.links_ns[at], f"the link {names[at]} to {names[at + 1]}") for at in range(len(instance.links))]
    if (busiest := cycle.busiest_ns(works)) > max(works):
        parts.append((float(busiest), "a device that stages share"))
    parts.append((cycle.coordinator_ns, "the coordinator"))
    if way + cycle.ways_ns > max(busy for busy, _ in parts):
        return "latency" if cycle.ways_ns * 2 < way else "latency of links and coordinator"
    return max(parts, key=lambda part: part[0])[1]


def _ttft_ns(costs: Costs, edges: Edges, planner: GroupPlanner, overhead_ns: int) -> int:
    """Predict a prompt's way in chunks, one behind the other, through an idle pipeline."""
    instance = costs.instance
    tokens = min(PROMPT_TOKENS, max(1, instance.load.ctx_tokens - 1))
    chunk = min(planner.plan(0, n_prompts=1, n_prompt_rows=tokens).chunk_rows, tokens)
    steps = [costs.prefill_ns(stage, *edge, chunk) for stage, edge in enumerate(edges)]
    spent: dict[Machine, int] = {}
    for host, step in zip(instance.hosts, steps, strict=True):
        spent[host.machine] = spent.get(host.machine, 0) + host.cores_used * step
    crowded = costs.crowded
    devices = devices_ns(costs.devices, steps).values()
    slot = max(*devices, *(crowd_ns(ns, machine.cores) for machine, ns in spent.items() if machine in crowded), 0)
    return sum(steps) + (math.ceil(tokens / chunk) - 1) * slot + overhead_ns
