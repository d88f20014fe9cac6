"""Which process is meant: a pid together with its start time, so that a recycled pid is never signalled or believed.

Linux only, like the rest of the launcher: /proc has the start time, and a pidfd holds on to the process.
"""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import time
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessId:
    """One process of this boot of this machine."""

    pid: int
    """Process id; may belong to another process once this one has ended."""
    start_ticks: int
    """Clock ticks between boot and the start of the process."""


def identify(pid: int) -> ProcessId | None:
    """Return the identity of a process that is running now; None if there is none or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name is in parentheses and may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    if fields[0] in "ZX":
        return None
    return ProcessId(pid, int(fields[19]))


def is_running(process: ProcessId) -> bool:
    """Return whether this very process still runs."""
    return identify(process.pid) == process


def age_s(process: ProcessId) -> float:
    """Return the seconds since the process started, suspended time included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - process.start_ticks / os.sysconf("SC_CLK_TCK")


def _open(process: ProcessId) -> int | None:
    """Return a pidfd of this very process; None if it has ended."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if not is_running(process):
        os.close(handle)
        return None
    return handle


def send_signal(process: ProcessId, number: signal.Signals) -> bool:
    """Signal this very process; returns False if it has ended. Raises PermissionError for another user's."""
    handle = _open(process)
    if handle is None:
        return False
    try:
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def wait_ended(process: ProcessId, timeout_s: float) -> bool:
    """Block until the process has ended or `timeout_s` has passed; returns whether it has ended."""
    handle = _open(process)
    if handle is None:
        return True
    try:
        ended = select.poll()
        ended.register(handle, select.POLLIN)
        return bool(ended.poll(max(0.0, timeout_s) * 1_000))
    finally:
        os.close(handle)
