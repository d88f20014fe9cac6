"""The default lanes and context of a pipeline: what its model was trained for and the memory of its hosts allows. Pure.

A context that a chat outgrows after some turns is of little use, and neither is a cache that fills a host. So streams
get CTX_GOOD tokens before there are many of them, and more than that only where all lanes can have it.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from relayline.coordinator.planner.instance import Host, Instance, Load
from relayline.coordinator.planner.memory import LANES_LEAST, pool_usable_bytes, pools_of, stage_memory
from relayline.coordinator.planner.search import Room
from relayline.wire.common.kv_layout import CTX_STEP_TOKENS
from relayline.wire.common.units import GIB

CTX_LEAST = 2_048  # less only for a model that was trained for less: some have no position beyond
CTX_GOOD = 8_192  # enough for most chats, so lanes are given up for it
CTX_MOST = 32_768  # longer ones are for those that ask for them: the memory is taken whether it is used or not
CACHE_BYTES_MAX = 8 * GIB  # of all stages together; or as much as the weights, if these are larger
SPARE = 2  # there must be room for a cache of this size: as much memory stays free as the cache takes


def usual_context(instance: Instance, n_lanes: int | None, ctx_tokens: int | None) -> tuple[int, int]:
    """Return the lanes and the tokens of each: the given ones, and defaults for None.

    instance.load holds the usual ones. They stay where the memory of a host is unknown, and where nothing fits, which
    the planner then explains.
    """
    usual = (n_lanes or instance.load.n_lanes, ctx_tokens or min(instance.load.ctx_tokens, _longest(instance)))
    if any(host.machine.memory_bytes is None and host.memory_bytes is None for host in instance.hosts):
        return usual
    all_lanes = (n_lanes,) if n_lanes else tuple(_halves(instance.load.n_lanes, LANES_LEAST))
    lengths = (ctx_tokens,) if ctx_tokens else tuple(_halves(_longest(instance), CTX_LEAST))
    for wish in _wishes(all_lanes, lengths):
        if _is_modest(instance, *wish) and _fits(instance, *wish, SPARE):
            return wish
    for times, lanes in itertools.product((SPARE, 1), all_lanes):
        if _fits(instance, lanes, usual[1], times):
            return lanes, usual[1]
    return usual


def weights_by_memory(instance: Instance) -> dict[str, int]:
    """Return the bytes of a pipeline's weights by the memory that holds them, a machine's or a GPU's name.

    Layers count as shared equally by its stages. Weights of a stage that is on a GPU in part count in both memories.
    """
    model = instance.model
    stage_bytes = stage_memory(model, instance.load, 0, model.n_layers).weights_bytes // len(instance.hosts)
    found: dict[str, int] = collections.defaultdict(int)
    for host in instance.hosts:
        if host.offload is None or host.offload.gpu_layers >= 0 or host.offload.n_cpu_moe or host.offload.kept_bytes:
            found[host.machine.name] += stage_bytes
        if host.offload is not None:
            found[host.offload.gpu.name] += stage_bytes
    return dict(found)


def beside_others(
    instance: Instance, others: Sequence[Mapping[str, int]], n_others_most: int | None = None
) -> Instance:
    """Return the planning problem of a pipeline whose memories are those of other pipelines, too.

    All that is left beside the weights is shared equally. `others`: of each, its `weights_by_memory`. At most
    `n_others_most` of them are in a memory at once (None: all); those with most weights there count.
    """
    own = weights_by_memory(instance)
    taken: dict[str, int] = {}
    for pool in {pool for host in instance.hosts for pool in pools_of(host)}:
        there = sorted((each[pool.name] for each in others if pool.name in each), reverse=True)[:n_others_most]
        usable = pool_usable_bytes(pool)
        if there and usable is not None:
            left = max(0, usable - own.get(pool.name, 0) - sum(there))
            taken[pool.name] = sum(there) + left * len(there) // (len(there) + 1)

    def host_of(host: Host) -> Host:
        offload, there = host.offload, host.machine
        machine = dataclasses.replace(there, reserved_bytes=there.reserved_bytes + taken.get(there.name, 0))
        if offload is not None:
            gpu = dataclasses.replace(offload.gpu, draft_bytes=offload.gpu.draft_bytes + taken.get(offload.gpu.name, 0))
            offload = dataclasses.replace(offload, gpu=gpu)
        return dataclasses.replace(host, machine=machine, offload=offload)

    return dataclasses.replace(instance, hosts=tuple(map(host_of, instance.hosts)))


def _longest(instance: Instance) -> int:
    trained = min(instance.model.ctx_train or CTX_LEAST, CTX_MOST)
    return trained // CTX_STEP_TOKENS * CTX_STEP_TOKENS or trained


def _halves(most: int, least: int) -> Iterator[int]:
    """Yield `most`, half of it, and so on while it is not below `least`; `most` in any case."""
    yield most
    while (most := most // 2) >= least:
        yield most


def _wishes(all_lanes: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield lanes and tokens of each, the best first. Both arguments fall."""
    good = min((length for length in lengths if length >= CTX_GOOD), default=lengths[0])
    for length in lengths:
        if length >= good:
            yield all_lanes[0], length
    for n_lanes in all_lanes[1:]:
        yield n_lanes, good
    for length in lengths:
        if length < good:
            yield all_lanes[-1], length


def _is_modest(instance: Instance, n_lanes: int, ctx_tokens: int) -> bool:
    model, load = instance.model, _load(instance, n_lanes, ctx_tokens)
    whole = stage_memory(model, load, 0, model.n_layers)
    return whole.kv_bytes <= max(CACHE_BYTES_MAX, whole.weights_bytes)


def _fits(instance: Instance, n_lanes: int, ctx_tokens: int, times: int = 1) -> bool:
    load = _load(instance, n_lanes, times * ctx_tokens)
    return Room(dataclasses.replace(instance, load=load)).some_cuts() is not None


def _load(instance: Instance, n_lanes: int, ctx_tokens: int) -> Load:
    return dataclasses.replace(instance.load, n_lanes=n_lanes, ctx_tokens=ctx_tokens)
