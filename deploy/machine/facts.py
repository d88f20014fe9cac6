"""This machine: cores, memory, and a rough idea of its speed where nothing has been measured."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import numpy as np

from relayline.wire.common.memory import available_memory_bytes as available_memory_bytes
from relayline.wire.common.memory import total_memory_bytes as total_memory_bytes
from relayline.wire.common.usable_cores import computing_cores

BANDWIDTH_PROBE_BYTES = 64 << 20  # beyond most caches
FLOPS_PROBE_SIZE = 768
REPEATS = 3
# Threads share a memory controller: beyond this many, more of them read hardly more.
BANDWIDTH_THREADS_MAX = 4
# Quantised kernels reach about this share of a plain sum's bandwidth and of a plain matrix product's arithmetic.
READ_SHARE, FLOPS_SHARE = 0.9, 0.8


def cores() -> int:
    """Return the number of cores on which this process computes."""
    return len(computing_cores())


@functools.cache
def _one_thread_bandwidth() -> float:
    data = np.ones(BANDWIDTH_PROBE_BYTES // 8, np.float64)
    return READ_SHARE * BANDWIDTH_PROBE_BYTES / _least_cpu_s(data.sum)


@functools.cache
def _one_core_flops() -> float:
    matrix = np.ones((FLOPS_PROBE_SIZE, FLOPS_PROBE_SIZE), np.float32)
    with np.errstate(all="ignore"):  # products of some BLAS on Arm warn of numbers that they read and leave out
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
    """Estimate how many bytes of weights n_threads read per second."""
    return _one_thread_bandwidth() * min(n_threads, BANDWIDTH_THREADS_MAX)


def flops(n_threads: int) -> float:
    """Estimate the floating-point operations per second of quantised kernels with n_threads."""
    return _one_core_flops() * n_threads
