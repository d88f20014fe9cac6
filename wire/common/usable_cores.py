"""The cores that this process may run on."""

from __future__ import annotations

import os


def usable_cores() -> list[int]:
    """Return the numbers of the cores that this process may run on, in order.

    All of the machine's, where the system binds no process to cores (macOS).
    """
    ask = getattr(os, "sched_getaffinity", None)
    return sorted(ask(0)) if ask is not None else [*range(os.cpu_count() or 1)]
