"""Finds installed dependencies of other versions than the tested ones (deploy/build/constraints.txt)."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from relayline.deploy.doctor.report import Finding, ok, warning

TRIED = Path(__file__).parents[1] / "build" / "constraints.txt"
NAMED_MAX = 8  # packages in one line


def read_constraints(text: str) -> dict[str, str]:
    """Return name -> version of a constraints file; comments and other lines are passed over."""
    pairs = (line.split("==", 1) for line in text.splitlines() if "==" in line and not line.startswith("#"))
    return {name.strip().lower(): version.strip() for name, version in pairs}


def requirements(lines: Iterable[str]) -> list[str]:
    """Return the names that a package needs to run: without extras, which are for development."""
    needed = [line for line in lines if "extra ==" not in line]
    return [re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0].lower().replace("_", "-") for line in needed]


def judge_versions(tried: Mapping[str, str], installed: Mapping[str, str]) -> Finding:
    """Hold the installed versions of what relayline needs against the tried ones."""
    other = [
        f"{name} {version} (tested: {tried[name]})"
        for name, version in sorted(installed.items())
        if name in tried and version != tried[name]
    ]
    if not other:
        return ok("versions", f"{len(installed)} dependencies have the tested versions")
    found = ", ".join(other[:NAMED_MAX]) + (f" and {len(other) - NAMED_MAX} more" if len(other) > NAMED_MAX else "")
    return warning(
        "versions", found, "if something behaves oddly, install the tested ones: `make setup` in the source tree"
    )


def look_versions() -> list[Finding]:
    """Look at the environment that runs."""
    installed = {}
    for name in requirements(importlib.metadata.requires("relayline") or []):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # an import says so long before a doctor is asked
    try:
        text = TRIED.read_text()
    except OSError:
        return [warning("versions", f"{TRIED} is missing", "install relayline again")]
    return [judge_versions(read_constraints(text), installed)]
