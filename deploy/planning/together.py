"""Several pipelines planned for the same machines: their needs together, which each plan counts for itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from relayline.coordinator.planner.instance import Machine
from relayline.coordinator.planner.memory import GIB, Pool, gpu_usable_bytes, pools_of, usable_bytes
from relayline.deploy.planning.report import Plan

Named = tuple[str, Plan]


def shared_machines(plans: Sequence[Named]) -> list[str]:
    """Return a line for each machine on which stages of several pipelines run. `plans`: with the pipelines' names."""
    found = []
    for machine, needs in _needs(plans).items():
        if len(needs) > 1:
            names = ", ".join(needs)
            found.append(
                f"{machine} has stages of {names}; each is planned as if it had the machine alone, so they are slower "
                "while others work"
            )
    return found


def missing_memory(plans: Sequence[Named]) -> list[str]:
    """Return a line for each memory that is not enough for all pipelines together: a machine's, or that of its GPU."""
    sizes = {
        pool.name: pool_size_bytes(pool) for _, plan in plans for host in plan.instance.hosts for pool in pools_of(host)
    }
    found = []
    for name, needs in {**_needs(plans), **_gpu_needs(plans)}.items():
        known_bytes, total_bytes = sizes[name], sum(needs.values())
        if len(needs) > 1 and known_bytes is not None and total_bytes > known_bytes:
            each = ", ".join(f"{pipeline} {n_bytes / GIB:.2f}" for pipeline, n_bytes in needs.items())
            found.append(
                f"{name}: {(total_bytes - known_bytes) / GIB:.2f} GiB are missing: the pipelines need {each} GiB "
                f"together and may use {known_bytes / GIB:.2f}; lower context.lanes or context.tokens, or move stages"
            )
    return found


def pool_size_bytes(pool: Pool) -> int | None:
    """Return how much of a memory stages and coordinators may use; None if unknown."""
    return usable_bytes(pool.memory_bytes) if isinstance(pool, Machine) else gpu_usable_bytes(pool)


def _needs(plans: Sequence[Named]) -> dict[str, dict[str, int]]:
    """Return the bytes that each pipeline needs on each machine, coordinators included, without GPUs' memory."""
    found: dict[str, dict[str, int]] = {}
    for name, plan in plans:
        reserved = {host.machine.name: host.machine.reserved_bytes for host in plan.instance.hosts}
        for stage in plan.prediction.stages:
            needs = found.setdefault(stage.machine, {})
            needs[name] = needs.get(name, reserved[stage.machine]) + stage.memory.total_bytes
    return found


def _gpu_needs(plans: Sequence[Named]) -> dict[str, dict[str, int]]:
    """Return the bytes that each pipeline needs of each GPU."""
    found: dict[str, dict[str, int]] = {}
    for name, plan in plans:
        for stage in plan.prediction.stages:
            if stage.memory.gpu is not None:
                needs = found.setdefault(stage.gpu, {})
                needs[name] = needs.get(name, 0) + stage.memory.gpu.total_bytes
    return found
