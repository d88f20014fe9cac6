"""The identity of a process: a pid with its start time, so that a recycled pid is never signalled or believed.

On Linux /proc has the start time, and a pidfd holds on to the process. Elsewhere `ps` says when it started, in seconds,
and between that look and the signal nothing holds on to it.
"""

from __future__ import annotations

import calendar
import dataclasses
import os
import select
import signal
import subprocess
import threading
import time
from pathlib import Path

PROCESSES = Path("/proc")
POLL_S = 0.05  # between two looks at a process that cannot be waited for
_PS_TIMEOUT_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessId:
    """One process of this boot of this machine."""

    pid: int
    """Process id; may belong to another process once this one has ended."""
    start_ticks: int
    """Clock ticks between boot and the start of the process; without /proc, seconds since 1970 at its start."""


def identify(pid: int) -> ProcessId | None:
    """Return the identity of a process that is running now; None if there is none or it is a zombie."""
    if not _has_proc():
        return _identify_by_ps(pid)
    try:
        stat = (PROCESSES / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The command name is in parentheses and may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    if fields[0] in "ZX":
        return None
    return ProcessId(pid, int(fields[19]))


def _has_proc() -> bool:
    return (PROCESSES / "self" / "stat").exists()


def _identify_by_ps(pid: int) -> ProcessId | None:
    command = ("ps", "-o", "stat=", "-o", "lstart=", "-p", str(pid))
    environment = {**os.environ, "LC_ALL": "C", "TZ": "UTC0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PS_TIMEOUT_S, env=environment)
        state, started = done.stdout.strip().split(maxsplit=1)
        when = time.strptime(" ".join(started.split()), "%a %b %d %H:%M:%S %Y")
    except (OSError, subprocess.SubprocessError, ValueError):  # ValueError: no line, so no such process
        return None
    return None if state.startswith("Z") else ProcessId(pid, calendar.timegm(when))


def is_running(process: ProcessId) -> bool:
    """Return whether this very process still runs."""
    return identify(process.pid) == process


def age_s(process: ProcessId) -> float:
    """Return the seconds since the process started, suspended time included."""
    if not _has_proc():
        return max(0.0, time.time() - process.start_ticks)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - process.start_ticks / os.sysconf("SC_CLK_TCK")  # type: ignore[attr-defined, unused-ignore]


def _open(process: ProcessId) -> int | None:
    """Return a pidfd of this very process; None if it has ended."""
    try:
        handle: int = os.pidfd_open(process.pid)  # type: ignore[attr-defined, unused-ignore]
    except ProcessLookupError:
        return None
    if not is_running(process):
        os.close(handle)
        return None
    return handle


def send_signal(process: ProcessId, number: signal.Signals) -> bool:
    """Signal this very process; returns False if it has ended. Raises PermissionError for another user's."""
    if not hasattr(os, "pidfd_open"):
        return _send_by_number(process, number)
    handle = _open(process)
    if handle is None:
        return False
    try:
        signal.pidfd_send_signal(handle, number)  # type: ignore[attr-defined, unused-ignore]
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def _send_by_number(process: ProcessId, number: signal.Signals) -> bool:
    try:
        if is_running(process):
            os.kill(process.pid, number)
            return True
    except ProcessLookupError:
        pass
    return False


def wait_ended(process: ProcessId, timeout_s: float) -> bool:
    """Block until the process has ended or `timeout_s` has passed; returns whether it has ended."""
    if not hasattr(os, "pidfd_open"):
        return _watch_ended(process, timeout_s)
    handle = _open(process)
    if handle is None:
        return True
    try:
        ended = select.poll()
        ended.register(handle, select.POLLIN)
        return bool(ended.poll(max(0.0, timeout_s) * 1_000))
    finally:
        os.close(handle)


def _watch_ended(process: ProcessId, timeout_s: float) -> bool:
    until_s, never = time.monotonic() + timeout_s, threading.Event()
    while is_running(process):
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return False
        never.wait(min(POLL_S, left_s))
    return True
