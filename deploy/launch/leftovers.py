"""Processes that a supervisor left behind because it was killed itself."""

from __future__ import annotations

import signal
import time

from relayline.deploy.launch.process_id import send_signal, wait_ended
from relayline.deploy.launch.state import LaunchState

LEFTOVER_STOP_S = 10.0  # for processes of a supervisor that ended without ending them; then they are killed


def end_leftovers(state: LaunchState | None) -> int:
    """End the processes of a supervisor that was killed; returns their number."""
    leftovers = [record.process for record in state.processes if record.process is not None] if state else []
    found = [process for process in leftovers if send_signal(process, signal.SIGTERM)]
    give_up_s = time.monotonic() + LEFTOVER_STOP_S
    for process in found:
        if not wait_ended(process, give_up_s - time.monotonic()):
            send_signal(process, signal.SIGKILL)
            wait_ended(process, LEFTOVER_STOP_S)
    return len(found)
