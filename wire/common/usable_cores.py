"""The cores that this process may run on, and those on which it computes."""

from __future__ import annotations

import functools
import os
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")
_SLOW_PART = 0.5  # of the fastest core's capacity; Arm's small cores have about a third, x86's efficient ones .6


def usable_cores() -> list[int]:
    """Return the numbers of the cores that this process may run on, in order.

    All of the machine's, where the system binds no process to cores (macOS).
    """
    ask = getattr(os, "sched_getaffinity", None)
    return sorted(ask(0)) if ask is not None else [*range(os.cpu_count() or 1)]


def computing_cores() -> list[int]:
    """Return those of them that are worth a thread: a step is as slow as its slowest thread.

    Cores with less than half of the fastest one's capacity are left out, as Linux states it (cpu_capacity); all count
    where it does not.
    """
    cores = tuple(usable_cores())
    capacities = capacities_of(cores, CPUS)
    return [core for core in cores if capacities[core] >= _SLOW_PART * max(capacities.values())]


@functools.cache
def capacities_of(cores: tuple[int, ...], cpus: Path) -> dict[int, int]:
    """Return how much each core computes in a time, beside others; the same for all where that is not known."""
    try:
        return {core: int((cpus / f"cpu{core}" / "cpu_capacity").read_text()) for core in cores}
    except (OSError, ValueError):
        return dict.fromkeys(cores, 1)
