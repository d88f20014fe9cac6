"""Memory of this process, and of its machine or container."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import resource
from pathlib import Path
from typing import NamedTuple

STATM = Path("/proc/self/statm")
CGROUPS = Path("/sys/fs/cgroup")  # in a container, its own


class _Files(NamedTuple):
    """Where one version of cgroups says what a container may use and uses."""

    limit: str
    used: str
    stat: str
    inactive: str
    """Line of `stat`: bytes of the page cache that the kernel drops first."""


_VERSIONS = (
    _Files("memory.max", "memory.current", "memory.stat", "inactive_file"),
    _Files("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


async def give_back() -> None:
    """Free garbage now, and return it to the system. Call it once something large has ended and nothing refers to it.

    The parts of such a thing refer to each other. Python finds that by itself after many more objects were made, which
    an idle process may never do. And glibc keeps small freed pieces: of a demo stage that sleeps, a quarter of all.
    """
    await asyncio.sleep(0)  # an error that has just been caught is held until this turn of the loop ends
    gc.collect()
    await asyncio.to_thread(_trim)


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def resident_bytes() -> int | None:
    """Return this process's memory; None where it is unknown."""
    return _pages(1)


def address_space_bytes() -> int | None:
    """Return the size of this process's address space, which RLIMIT_AS bounds; None where it is unknown."""
    return _pages(0)


def _pages(field: int) -> int | None:
    try:
        return int(STATM.read_text().split()[field]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return None


def total_memory_bytes() -> int | None:
    """Return this machine's memory, or this container's limit if that is less; None where it is unknown."""
    return _least(_meminfo("MemTotal"), _cgroup_limit())


def available_memory_bytes() -> int | None:
    """Return the memory available to new processes; None where it is unknown."""
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
    limits = (_number(CGROUPS / version.limit) for version in _VERSIONS)
    return next((limit for limit in limits if limit is not None), None)


def _cgroup_left() -> int | None:
    """Return what a container may still take. Fetched files that are only cached do not count as used: a stage's layers
    would fill its container twice otherwise.
    """
    for version in _VERSIONS:
        limit, used = _number(CGROUPS / version.limit), _number(CGROUPS / version.used)
        if limit is not None and used is not None:
            return max(0, limit - max(0, used - _inactive(version)))
    return None


def _inactive(version: _Files) -> int:
    try:
        lines = (CGROUPS / version.stat).read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{version.inactive} ")), 0)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
