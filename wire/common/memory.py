"""Memory of this process, and of its machine or container."""

from __future__ import annotations

import resource
from pathlib import Path


def resident_bytes() -> int | None:
    """Return this process's memory; None where it is unknown."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
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
