"""Where relayline keeps its files on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return where splits are kept: $XDG_CACHE_HOME/relayline, ~/.cache/relayline without it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relayline"
