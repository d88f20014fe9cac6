"""What a terminal can do. Pure but for the environment."""

from __future__ import annotations

import os

DUMB = ("dumb", "unknown")  # names of terminals that show escape sequences as text


def can_move() -> bool:
    """Return whether the terminal, if there is one, obeys escape sequences. One without a name is thought to."""
    return os.environ.get("TERM", "").lower() not in DUMB
