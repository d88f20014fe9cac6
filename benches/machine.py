"""Describes the machine of a result: processor, cores, memory, versions. Also writes the results files."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path

from relayline.deploy.cli.load import json_ready

PACKAGES = ("relayline", "llama_cpp_python", "grpcio", "numpy", "uvloop")


def _first_of(path: str, key: str) -> str:
    """Return the value of the first `key : value` line of a /proc file; empty where there is none."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")


def _commit() -> str:
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()


def write_json(path: Path, results: object) -> None:
    """Write one results file, making its directory if need be. A value that is no number, such as the latency of a run
    without an answer, becomes null.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(json_ready(results), indent=1, allow_nan=False))


def facts() -> dict[str, object]:
    """Return the machine and the versions, JSON-ready."""
    return {
        "cpu": _first_of("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _first_of("/proc/meminfo", "MemTotal"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": list(os.getloadavg()),  # at the start: above a few tenths, other programs used the machine too
        "commit": _commit(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }
