"""Several pipelines planned for the same machines: their needs together, which each plan counts for itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from relayline.coordinator.planner.instance import Machine
from relayline.coordinator.planner.memory import Pool, gpu_usable_bytes, pools_of, usable_bytes
from relayline.deploy.planning.report import Plan
from relayline.wire.common.units import GIB

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


def missing_memory(plans: Sequence[Named], awake_max: int = 0) -> list[str]:
    """Return a line for each memory that is not enough for all pipelines together: a machine's, or that of its GPU.

    With `awake_max` only so many of them are awake at once: those that need most there are counted.
    """
    sizes = {
        pool.name: pool_size_bytes(pool) for _, plan in plans for host in plan.instance.hosts for pool in pools_of(host)
    }
    found = []
    for name, needs in {**_needs(plans), **_gpu_needs(plans)}.items():
        if awake_max:
            needs = dict(sorted(needs.items(), key=lambda each: -each[1])[:awake_max])
        known_bytes, total_bytes = sizes[name], sum(needs.values())
        if len(needs) > 1 and known_bytes is not None and total_bytes > known_bytes:
            each = ", ".join(f"{pipeline} {n_bytes / GIB:.2f}" for pipeline, n_bytes in needs.items())
            found.append(
                f"{name}: {(total_bytes - known_bytes) / GIB:.2f} GiB are missing: the pipelines need {each} GiB "
                f"together and may use {known_bytes / GIB:.2f}; lower context.lanes or context.tokens, or move stages"
            )
    return found


def awake_note(n_pipelines: int, awake_max: int) -> list[str]:
    """Return a line that says how many pipelines are counted, where not all are."""
    if not 0 < awake_max < n_pipelines:
        return []
    counted = "pipeline that needs most is" if awake_max == 1 else f"{awake_max} pipelines that need most are"
    return [f"awakeMax {awake_max}: of each machine's memory only the {counted} counted"]


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
    """Return the bytes that each pipeline needs of each GPU, draft models included."""
    found: dict[str, dict[str, int]] = {}
    hosts = [host for _, plan in plans for host in plan.instance.hosts]
    here = {host.offload.gpu.name: host.offload.gpu.memory_bytes or 0 for host in hosts if host.offload is not None}
    for name, plan in plans:
        offloads = [host.offload for host in plan.instance.hosts if host.offload is not None]
        draft = {offload.gpu.name: offload.gpu.draft_bytes for offload in offloads}
        for stage in plan.prediction.stages:
            if stage.memory.gpu is not None:
                needs = found.setdefault(stage.gpu, {})
                needs[name] = needs.get(name, draft[stage.gpu]) + stage.memory.gpu.total_bytes
        if plan.draft is not None and plan.draft.memory.gpu is not None and plan.draft.gpus_bytes:
            for gpu, memory_bytes in here.items():
                share_bytes = plan.draft.memory.gpu.total_bytes * memory_bytes // plan.draft.gpus_bytes
                if share_bytes and gpu not in draft:  # another pipeline's stages are there, and none of this one
                    found.setdefault(gpu, {})[name] = share_bytes
    return found
