"""Limits that the system keeps for this process."""

from __future__ import annotations

import resource
import sys


def lower_limit(kind: int, most: int) -> None:
    """Lower a limit (resource.RLIMIT_...) to `most`, in its own unit; a hard one that is lower already stays.

    Raises OSError and ValueError, on Linux alone: macOS refuses some of these limits, and the process lives without.
    """
    _, hard = resource.getrlimit(kind)
    try:
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    except (OSError, ValueError):
        if sys.platform.startswith("linux"):
            raise
