"""Advice of a plan in plain sentences: whether spanning pays, what limits, and what would fit. Pure.

Each sentence rests on a plan that was searched for it: one machine alone, two pipelines side by side, another
quantisation, a longer context. A link without delay is looked at with the plan's own layers.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from relayline.coordinator.planner.instance import Host, Instance, Link
from relayline.coordinator.planner.quantisations import larger_quantisation
from relayline.coordinator.planner.rates import rate_of
from relayline.coordinator.planner.search import Best, Room, best_split
from relayline.coordinator.planner.whatif import largest
from relayline.wire.common.kv_layout import CTX_STEP_TOKENS

SEARCH_SIZE_MAX = 400  # stages x layers up to which pairs of pipelines are looked for: each takes two searches
PAIR_HOSTS_MAX = 6  # there are 31 pairs of six hosts
PAIR_GAIN = 1.1  # from which on two pipelines are recommended
ALONE_PART = 0.5  # of the plan's tokens, from which on a machine that holds the whole model is recommended
LINK_GAIN = 1.1
NO_DELAY = Link(0, 1e12)


def advice(instance: Instance, best: Best) -> tuple[str, ...]:
    """Return what to say about a plan besides its figures."""
    alone = _best_alone(instance)
    return (
        *_alone(instance, best, alone),
        *_pair(instance, best, 0.0 if alone is None else alone[0]),
        *_links(instance, best),
        *_room(instance),
    )


def rate_text(rate: float) -> str:
    """Return tokens per nanosecond as people read them."""
    per_s = rate * 1e9
    return f"{per_s:.0f} tok/s" if per_s >= 100 else f"{per_s:.1f} tok/s"


def _single_hosts(instance: Instance) -> list[Host]:
    """Return the hosts that have a machine to themselves: the speed of others with all cores was never measured."""
    machines = [host.machine for host in instance.hosts]
    return [host for host in instance.hosts if machines.count(host.machine) == 1]


def _of(instance: Instance, hosts: Sequence[Host], n_streams: int) -> Instance:
    """Return the same problem for only these hosts and n_streams; its links end at the same coordinator."""
    chosen = [dataclasses.replace(host, layers=None) for host in hosts]
    chosen[-1] = dataclasses.replace(chosen[-1], link=instance.hosts[-1].link)
    n_streams = max(1, n_streams)
    load = dataclasses.replace(instance.load, n_streams=n_streams, n_lanes=min(n_streams, instance.load.n_lanes))
    return dataclasses.replace(instance, hosts=tuple(chosen), load=load)


def _best_alone(instance: Instance) -> tuple[float, Host] | None:
    """Return the best machine that can hold the whole model, and its rate; None where there is none, or one host."""
    if len(instance.hosts) < 2:
        return None
    found = []
    for host in _single_hosts(instance):
        alone = best_split(_of(instance, [host], instance.load.streams))
        if alone is not None:
            found.append((alone.rate, host))
    return max(found, key=lambda pair: pair[0], default=None)


def _alone(instance: Instance, best: Best, alone: tuple[float, Host] | None) -> Iterator[str]:
    """Tell of the best machine that can hold the whole model."""
    if alone is None:
        return
    rate, host = alone
    holds = "holds" if host.machine.memory_bytes or host.memory_bytes else "holds, if it has the memory,"
    if rate >= best.rate:
        yield (
            f"don't span: {host.name} {holds} the whole model alone and would make {rate_text(rate)}, where "
            f"{_together(len(instance.hosts))} make {rate_text(best.rate)}"
        )
    elif rate >= ALONE_PART * best.rate:
        yield (
            f"{host.name} {holds} the whole model alone and would make {rate_text(rate)}; spanning makes "
            f"{best.rate / rate:.2f} times as many"
        )


def _together(n_hosts: int) -> str:
    return "both hosts together" if n_hosts == 2 else f"all {n_hosts} hosts together"


def _pair(instance: Instance, best: Best, alone_rate: float) -> Iterator[str]:
    """Tell of two pipelines on the same hosts, where they make clearly more than the plan, and than one host alone."""
    hosts = instance.hosts
    single = len(_single_hosts(instance)) == len(hosts)
    if not single or not 2 <= len(hosts) <= PAIR_HOSTS_MAX or instance.load.streams < 2:
        return
    if len(hosts) * instance.model.n_layers > SEARCH_SIZE_MAX:
        return
    found = []
    n_left = instance.load.streams // 2
    for left in _parts_with_the_first(len(hosts)):
        right = tuple(at for at in range(len(hosts)) if at not in left)
        parts = ((left, n_left), (right, instance.load.streams - n_left))
        both = [best_split(_of(instance, [hosts[at] for at in part], n_streams)) for part, n_streams in parts]
        rates = [one.rate for one in both if one is not None]
        if len(rates) == len(parts):
            found.append((sum(rates), left, right))
    if not found:
        return
    rate, left, right = max(found, key=lambda each: each[0])
    if rate >= PAIR_GAIN * max(best.rate, alone_rate):
        names = [", ".join(hosts[at].name for at in part) for part in (left, right)]
        yield (
            f"two pipelines side by side, one on {names[0]} and one on {names[1]}, would make {rate_text(rate)} "
            f"together ({rate / best.rate - 1:+.0%})"
        )


def _parts_with_the_first(n_hosts: int) -> Iterator[tuple[int, ...]]:
    """Yield every part of the hosts that holds the first one, but for all of them."""
    for size in range(n_hosts - 1):
        for others in itertools.combinations(range(1, n_hosts), size):
            yield (0, *others)


def _links(instance: Instance, best: Best) -> Iterator[str]:
    """Tell what links cost, and which one costs most."""
    names = ["the coordinator", *(host.name for host in instance.hosts), "the coordinator"]
    found = []
    for at, link in enumerate(instance.links):
        if link.round_trip_ns or link.bytes_per_s < NO_DELAY.bytes_per_s:
            rate = rate_of(_with_link(instance, at, NO_DELAY), best.edges)
            found.append((rate / best.rate, names[at], names[at + 1], link, rate))
    if not found:
        return
    gain, start, end, link, rate = max(found, key=lambda each: each[0])
    if gain >= LINK_GAIN:
        yield (
            f"the link from {start} to {end} ({link.round_trip_ns / 1e6:.2g} ms, {link.bytes_per_s * 8 / 1e9:.2g} "
            f"Gbit/s) slows the pipeline down: without its delay it would make {rate_text(rate)} ({gain - 1:+.0%})"
        )


def _with_link(instance: Instance, at: int, link: Link) -> Instance:
    if not at:
        return dataclasses.replace(instance, entry=link)
    hosts = list(instance.hosts)
    hosts[at - 1] = dataclasses.replace(hosts[at - 1], link=link)
    return dataclasses.replace(instance, hosts=tuple(hosts))


def _room(instance: Instance) -> Iterator[str]:
    """Tell of the largest quantisation and the longest context that fit, where the memory of every host is known."""
    if any(host.machine.memory_bytes is None and host.memory_bytes is None for host in instance.hosts):
        return
    parts = []
    if name := larger_quantisation(instance):
        parts.append(f"this model as {name}")
    tokens = longest_context(instance)
    if tokens > instance.load.ctx_tokens:
        parts.append(f"contexts of {tokens:,} tokens instead of {instance.load.ctx_tokens:,}")
    if parts:
        yield f"there is room for more: {', or '.join(parts)} would fit too"


def longest_context(instance: Instance) -> int:
    """Return the longest context, in steps, with which something fits; 0 if even the shortest does not."""

    def fits(steps: int) -> bool:
        load = dataclasses.replace(instance.load, ctx_tokens=CTX_STEP_TOKENS * steps)
        return Room(dataclasses.replace(instance, load=load)).some_cuts() is not None

    most = max(instance.model.ctx_train, instance.load.ctx_tokens) // CTX_STEP_TOKENS
    return CTX_STEP_TOKENS * largest(most, fits)
