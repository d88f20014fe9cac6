"""Why nothing fits, what would help, and what one more machine would change. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from relayline.coordinator.model.cuts import ranges
from relayline.coordinator.planner.frontier import Label, frontier
from relayline.coordinator.planner.instance import Host, Instance, Machine
from relayline.coordinator.planner.memory import HEADROOM, pools_of, stage_memory, usable_bytes
from relayline.coordinator.planner.quantisations import smaller_quantisation
from relayline.coordinator.planner.search import Best, Room, best_split
from relayline.wire.common.texts import named_layers, named_stage
from relayline.wire.common.units import GIB

MEMORY_STEP_BYTES = GIB // 2  # the steps in which a further machine's memory is given
ROWS_STEP = 64  # in which smaller steps are proposed
NOTHING_ALONE = (
    "none of these alone is enough: fewer lanes, less context, a q8_0 cache, shared KV cells, smaller steps, "
    "a smaller quantisation, one more machine"
)
MEMORY_MAX_BYTES = 1 << 50


@dataclasses.dataclass(frozen=True, slots=True)
class Shortage:
    """The shortage at one place, in the split with the smallest shortage overall."""

    place: str
    needed_bytes: int
    usable_bytes: int
    layers: tuple[int, int]
    draft_bytes: int = 0
    """What a draft model takes there besides."""

    @property
    def missing_bytes(self) -> int:
        """The additional memory that it needs."""
        return self.needed_bytes - self.usable_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Infeasible:
    """Why there is no plan."""

    text: str
    """One line for the user."""
    shortages: tuple[Shortage, ...] = ()
    remedies: tuple[str, ...] = ()
    """Each of them is enough alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class OneMore:
    """The plan with one more machine."""

    like: str
    """The stage whose host was copied."""
    after: str
    """The stage behind which the new one stands."""
    best: Best


@dataclasses.dataclass(frozen=True, slots=True)
class OtherLast:
    """The plan with another stage at the end, where the head is."""

    last: str
    best: Best


def explain(instance: Instance) -> Infeasible:
    """Say why no split is possible. Call it only when best_split found none."""
    found = _least_missing(instance)
    if found is None:
        return Infeasible(_structure(instance))
    shortages = _shortages(instance, found)
    remedies = _remedies(instance)
    shortage_text = "; ".join(
        f"{short.place} needs {short.needed_bytes / GIB:.2f} GiB for {named_layers(*short.layers)} "
        f"but has {short.usable_bytes / GIB:.2f}{_beside(short)}: {short.missing_bytes / GIB:.2f} GiB are missing"
        for short in shortages
    )
    lead = "any of these helps" if len(remedies) > 1 else "what helps"
    ways = f"; {lead}: {', or '.join(remedies)}" if remedies else f"; {NOTHING_ALONE}"
    return Infeasible(f"the model does not fit: {shortage_text}{ways}", shortages, remedies)


def _beside(short: Shortage) -> str:
    return f" besides the {short.draft_bytes / GIB:.2f} of the draft model" if short.draft_bytes else ""


def _structure(instance: Instance) -> str:
    given = [f"{host.name} {list(host.layers)}" for host in instance.hosts if host.layers is not None]
    n_stages, n_layers = len(instance.hosts), instance.model.n_layers
    with_given = f" with the given ranges ({', '.join(given)})" if given else ""
    return f"{n_layers} layers cannot make {n_stages} stages{with_given} at cuts that this model allows"


def _least_missing(instance: Instance) -> tuple[int, ...] | None:
    """Return the cuts of the split with the least memory missing in all, of equals in one place.

    None if no split is legal at all.
    """
    room = Room(instance)
    bare = Room(instance, ignore_memory=True)
    pools = [pool for pool, _ in room.pools]

    def extend(label: Label, stage: int, start: int, end: int) -> Label | None:
        limit = room.limits[stage]
        short: list[float] = [0 if limit is None else max(0, room.need(stage, start, end).limited_bytes - limit)]
        held = list(label[2:])
        for pool in pools_of(instance.hosts[stage]):
            if pool not in pools:
                continue
            at = pools.index(pool)
            held[at] += room.need_of(pool, stage, start, end)
            if stage == room.last_stage[pool]:
                short.append(max(0, held[at] - room.pools[at][1]))
                held[at] = 0
        return (label[0] + sum(short), max(label[1], *short, 0), *held)

    first = (0,) * (2 + len(pools))
    found = frontier(len(instance.hosts), instance.model.n_layers, first, bare.ends, extend)
    return min(found)[1] if found else None


def _shortages(instance: Instance, cuts: Sequence[int]) -> tuple[Shortage, ...]:
    room, edges = Room(instance), ranges(instance.model.n_layers, cuts)
    found = []
    for stage, (host, edge) in enumerate(zip(instance.hosts, edges, strict=True)):
        limit, need = usable_bytes(host.memory_bytes), room.need(stage, *edge).limited_bytes
        if limit is not None and need > limit:
            found.append(Shortage(named_stage(host.name), need, limit, edge))
    for pool, usable in room.pools:
        mine = [stage for stage, host in enumerate(instance.hosts) if pool in pools_of(host)]
        need = sum(room.need_of(pool, stage, *edges[stage]) for stage in mine)
        if need > usable:
            found.append(Shortage(pool.name, need, usable, (edges[mine[0]][0], edges[mine[-1]][1]), pool.draft_bytes))
    return tuple(found)


def _remedies(instance: Instance) -> tuple[str, ...]:
    """Return single changes that make it fit."""
    load = instance.load
    found: list[str] = []

    def fits(**changes: Any) -> bool:
        changed = dataclasses.replace(instance, load=dataclasses.replace(load, **changes))
        return Room(changed).some_cuts() is not None

    lanes = largest(load.n_lanes - 1, lambda n: fits(n_lanes=n))
    if lanes:
        found.append(f"{lanes} lanes instead of {load.n_lanes}")
    tokens = largest((load.ctx_tokens - 1) // 256, lambda n: fits(ctx_tokens=256 * n)) * 256
    if tokens:
        found.append(f"contexts of {tokens:,} tokens instead of {load.ctx_tokens:,}")
    if load.kv_type in ("f16", "f32") and fits(kv_type="q8_0"):
        found.append("a q8_0 cache (kvType)")
    if load.kv_layout == "per-lane" and fits(kv_layout="unified"):
        found.append("shared KV cells (kvLayout: unified)")
    rows = largest(load.max_rows // ROWS_STEP - 1, lambda n: fits(max_rows=ROWS_STEP * n)) * ROWS_STEP
    if rows:
        found.append(f"steps of {rows} rows (maxRows) instead of {load.max_rows}")
    if load.prefix_memory_bytes and fits(prefix_memory_bytes=0):
        found.append("no stored prefixes (prefixMemoryBytes: 0)")
    if name := smaller_quantisation(instance):
        found.append(f"the model as {name}")
    if Room(without_draft(instance)).some_cuts() is not None:
        found.append("no draft model")
    more = _one_more_bytes(instance)
    if more is not None:
        found.append(f"one more machine with {more / GIB:g} GiB")
    return tuple(found)


def without_draft(instance: Instance) -> Instance:
    """Return the instance with the memory of its draft model free."""
    hosts = []
    for host in instance.hosts:
        machine, offload = host.machine, host.offload
        left_bytes = machine.reserved_bytes - machine.draft_bytes
        machine = dataclasses.replace(machine, reserved_bytes=left_bytes, draft_bytes=0)
        if offload is not None:
            offload = dataclasses.replace(offload, gpu=dataclasses.replace(offload.gpu, draft_bytes=0))
        hosts.append(dataclasses.replace(host, machine=machine, offload=offload))
    return dataclasses.replace(instance, hosts=tuple(hosts))


def largest(most: int, is_good: Callable[[int], bool]) -> int:
    """Return the largest good number from 1 to `most`, 0 if none is good; every number below a good one is good."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_good(middle) else (low, middle - 1)
    return low


def _one_more_bytes(instance: Instance) -> int | None:
    """Return how much memory one further machine needs to make it fit, wherever it stands."""

    def fits(n_steps: int) -> bool:
        machine = Machine("one more", 1, int(n_steps * MEMORY_STEP_BYTES))
        speed = instance.hosts[0].speed
        host = Host("one more", machine, 1, speed)
        places = range(len(instance.hosts) + 1)
        return any(Room(_with(instance, at, host)).some_cuts() is not None for at in places)

    most = MEMORY_MAX_BYTES // MEMORY_STEP_BYTES
    whole = stage_memory(instance.model, instance.load, 0, instance.model.n_layers).total_bytes
    most = min(most, int(whole / (1 - HEADROOM)) // MEMORY_STEP_BYTES + 2)
    if not fits(most):
        return None
    too_little = largest(most, lambda n: not fits(n))
    return (too_little + 1) * MEMORY_STEP_BYTES


def _with(instance: Instance, at: int, host: Host) -> Instance:
    return dataclasses.replace(instance, hosts=(*instance.hosts[:at], host, *instance.hosts[at:]))


def one_more(instance: Instance, stage: int) -> OneMore | None:
    """Plan with a copy of one stage's host, on its own machine: right behind it or at the end, whichever is faster.

    None where neither makes a legal split.
    """
    host = instance.hosts[stage]
    machine = dataclasses.replace(host.machine, name=f"like-{host.machine.name}", reserved_bytes=0, draft_bytes=0)
    offload = host.offload
    if offload is not None:  # on its own GPU
        offload = dataclasses.replace(
            offload, gpu=dataclasses.replace(offload.gpu, name=f"like-{offload.gpu.name}", draft_bytes=0)
        )
    name = f"{host.name}-copy"
    copy = dataclasses.replace(host, name=name, machine=machine, layers=None, device=-1, offload=offload)
    places = dict.fromkeys((stage + 1, len(instance.hosts)))
    found = [(best, at) for at in places if (best := best_split(_with(instance, at, copy))) is not None]
    if not found:
        return None
    best, at = max(found, key=lambda pair: pair[0].rate)
    return OneMore(host.name, instance.hosts[at - 1].name, best)


def other_last(instance: Instance) -> OtherLast | None:
    """Plan with each other host at the end and return the best of these: the head is the last stage's.

    None where the order is settled by given ranges, or where nothing else is legal.
    """
    hosts = instance.hosts
    if any(host.layers is not None for host in hosts):
        return None
    found = []
    for at in range(len(hosts) - 1):
        if (hosts[at].speed, hosts[at].threads) != (hosts[-1].speed, hosts[-1].threads):
            order = (*hosts[:at], *hosts[at + 1 :], hosts[at])
            best = best_split(dataclasses.replace(instance, hosts=order))
            if best is not None:
                found.append(OtherLast(hosts[at].name, best))
    return max(found, key=lambda other: other.best.rate, default=None)
