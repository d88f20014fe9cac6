"""This machine: cores, memory, and a rough idea of its speed where nothing has been measured."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

BANDWIDTH_PROBE_BYTES = 64 << 20  # beyond most caches
FLOPS_PROBE_SIZE = 768
REPEATS = 3
# Threads share a memory controller: beyond this many, more of them read hardly more.
BANDWIDTH_THREADS_MAX = 4
# Of what a plain sum reads and a plain matrix product computes, quantised kernels reach about so much.
READ_SHARE, FLOPS_SHARE = 0.9, 0.8


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def total_memory_bytes() -> int | None:
    """Return this machine's memory, or this container's limit if that is less; None where it cannot be told."""
    return _least(_meminfo("MemTotal"), _cgroup_limit())


def available_memory_bytes() -> int | None:
    """Return the memory that new processes can have; None where it cannot be told."""
    return _least(_meminfo("MemAvailable"), _cgroup_left())


def _least(*sizes: int | None) -> int | None:
    return min((size for size in sizes if size is not None), default=None)


def _meminfo(key: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def _cgroup_limit() -> int | None:
    return _number(Path("/sys/fs/cgroup/memory.max"))


def _cgroup_left() -> int | None:
    limit, used = _cgroup_limit(), _number(Path("/sys/fs/cgroup/memory.current"))
    return None if limit is None or used is None else max(0, limit - used)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


@functools.cache
def _one_thread_bandwidth() -> float:
    data = np.ones(BANDWIDTH_PROBE_BYTES // 8, np.float64)
    return READ_SHARE * BANDWIDTH_PROBE_BYTES / _least_cpu_s(data.sum)


@functools.cache
def _one_core_flops() -> float:
    matrix = np.ones((FLOPS_PROBE_SIZE, FLOPS_PROBE_SIZE), np.float32)
    return FLOPS_SHARE * 2 * FLOPS_PROBE_SIZE**3 / _least_cpu_s(lambda: matrix @ matrix)


def _least_cpu_s(action: Callable[[], object]) -> float:
    """Return the processor time of the quickest of some runs, all threads together: others do not disturb it."""
    action()
    times = []
    for _ in range(REPEATS):
        began_s = time.process_time()
        action()
        times.append(time.process_time() - began_s)
    return max(min(times), 1e-9)


def bandwidth_bytes_per_s(n_threads: int) -> float:
    """Estimate how many bytes of weights so many threads read per second."""
    return _one_thread_bandwidth() * min(n_threads, BANDWIDTH_THREADS_MAX)


def flops(n_threads: int) -> float:
    """Estimate the floating-point operations of quantised kernels with so many threads, per second."""
    return _one_core_flops() * n_threads
