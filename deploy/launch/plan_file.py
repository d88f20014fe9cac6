"""The file that keeps who got which layers and why, for as long as a pipeline runs: plan.json of its state."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

log = logging.getLogger("relayline.up")


def write_plan(path: Path, planned: dict[str, Any]) -> None:
    """Keep a plan's description. A full disk is not an error."""
    try:
        path.write_text(json.dumps(planned, indent=1) + "\n")
    except OSError as error:
        log.warning("%s: cannot be written: %s", path, error.strerror)


def read_plan(path: Path | None) -> dict[str, Any] | None:
    """Return a plan's description; None where none was kept."""
    try:
        found = json.loads(path.read_text()) if path is not None else None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
