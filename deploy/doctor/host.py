"""This machine's own fitness: Python, compiler, native libraries, memory, limits, disk, clock.

Every check is a judgement over plain facts. A separate `look_` function reads the facts from the machine.
"""

from __future__ import annotations

import datetime
import itertools
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

from relayline.deploy.doctor.report import Finding, failure, ok, warning
from relayline.wire.common.units import GIB

PYTHON_MIN = (3, 11)
COMPILER_TIMEOUT_S = 5.0
FILES_BASE = 128  # libraries, logs, the event loop, links
DISK_FREE_MIN_BYTES = GIB
WALL_CLOCK_MIN_YEAR = 2025  # before this release; certificates would not be valid yet
CLOCK_TICKS = 1_000


def judge_python(version: tuple[int, ...], executable: str) -> Finding:
    """Hold the interpreter's version against what relayline needs."""
    text = f"Python {'.'.join(map(str, version[:3]))} ({executable})"
    if version[:2] < PYTHON_MIN:
        return failure("python", text, f"install Python {'.'.join(map(str, PYTHON_MIN))} or later and relayline in it")
    return ok("python", text)


def look_python() -> list[Finding]:
    """Look at the interpreter that runs."""
    return [judge_python(tuple(sys.version_info[:3]), sys.executable)]


def look_compiler(candidates: tuple[str, ...] | None = None) -> list[Finding]:
    """Look for a C compiler that works: needed only to build relayline or llama-cpp-python from source."""
    names = candidates or tuple(filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")))
    path = next((found for name in names if (found := shutil.which(name))), None)
    remedy = "needed only to build from source: install gcc or clang (Debian: apt install build-essential cmake)"
    if path is None:
        return [warning("compiler", f"none of {', '.join(names)} found", remedy)]
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=COMPILER_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [warning("compiler", f"{path} does not work: {error}", remedy)]
    if done.returncode:
        return [warning("compiler", f"{path} --version ends with exit code {done.returncode}", remedy)]
    return [ok("compiler", f"{path}: {(done.stdout.splitlines() or ['no version'])[0]}")]


def judge_memory(available_bytes: int | None, needed_bytes: int | None) -> Finding:
    """Hold free memory against what local processes will take (None: not known)."""
    if available_bytes is None:
        return warning("memory", "this system does not report free memory", "compare with `relayline plan` by hand")
    free = f"{available_bytes / GIB:.1f} GiB available"
    if needed_bytes is None:
        return ok("memory", free)
    text = f"{free}, the local stages need {needed_bytes / GIB:.1f} GiB"
    if needed_bytes > available_bytes:
        short = (needed_bytes - available_bytes) / GIB
        return failure("memory", text, f"{short:.1f} GiB are missing: end other programs, lower lanes or tokens, "
                       "or move a stage to another host")  # fmt: skip
    if needed_bytes > 0.9 * available_bytes:
        return warning("memory", text, "that is tight: lower context.lanes or context.tokens")
    return ok("memory", text)


def judge_files(soft: int, hard: int, n_requests: int) -> Finding:
    """Hold the limit of open files against one socket for every request that may run or wait."""
    needed = FILES_BASE + n_requests
    text = f"{soft} open files allowed, {needed} needed at full load"
    if soft >= needed:
        return ok("open files", text)
    remedy = f"raise it with `ulimit -n {needed}`" if hard >= needed else f"raise the hard limit ({hard}) to {needed}"
    return (failure if soft < FILES_BASE else warning)("open files", text, remedy)


def look_files(n_requests: int) -> list[Finding]:
    """Look at this process's limit of open files, which children inherit."""
    soft, hard = (limit if limit != resource.RLIM_INFINITY else sys.maxsize for limit in
                  resource.getrlimit(resource.RLIMIT_NOFILE))  # fmt: skip
    return [judge_files(soft, hard, n_requests)]


def judge_disk(path: Path, free_bytes: int, needed_bytes: int) -> Finding:
    """Compare free disk space with the bytes still to be written there."""
    text = f"{free_bytes / GIB:.1f} GiB free at {path}"
    if needed_bytes:
        text += f", {needed_bytes / GIB:.1f} GiB still to be written"
    if free_bytes < needed_bytes:
        return failure("disk", text, "make room, or let XDG_CACHE_HOME name a directory on a larger disk")
    if free_bytes - needed_bytes < DISK_FREE_MIN_BYTES:
        return warning("disk", text, "make room: logs and further splits go there as well")
    return ok("disk", text)


def look_disk(path: Path, needed_bytes: int) -> list[Finding]:
    """Check the disk of `path`, which may not exist yet."""
    there = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    why = "is no directory" if not there.is_dir() else "cannot be written" if not os.access(there, os.W_OK) else ""
    if why:
        return [failure("disk", f"{there} {why}", "choose another place with XDG_CACHE_HOME")]
    return [judge_disk(path, shutil.disk_usage(there).free, needed_bytes)]


def judge_clock(year: int, resolution_s: float, *, monotonic: bool) -> Finding:
    """Judge wall clock and monotonic clock."""
    if not monotonic:
        return failure(
            "clock", "the monotonic clock runs backwards", "this machine cannot measure time; repair its clock"
        )
    if year < WALL_CLOCK_MIN_YEAR:
        return failure("clock", f"the clock says {year}", "set it (NTP): certificates are not valid at that time")
    if resolution_s > 1e-3:
        return warning("clock", f"the monotonic clock has steps of {resolution_s * 1e3:.0f} ms",
                       "waits and step times will be coarse")  # fmt: skip
    return ok("clock", f"monotonic clock in steps of {resolution_s * 1e9:.0f} ns, year {year}")


def look_clock() -> list[Finding]:
    """Look at this machine's clocks."""
    readings = [time.monotonic_ns() for _ in range(CLOCK_TICKS)]
    steady = all(later >= earlier for earlier, later in itertools.pairwise(readings))
    year = datetime.datetime.now(datetime.UTC).year
    return [judge_clock(year, time.get_clock_info("monotonic").resolution, monotonic=steady)]
