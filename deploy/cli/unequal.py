"""The line about a cut that would be faster, for those who look at a running pipeline."""

from __future__ import annotations

from typing import Any


def unequal_line(described: dict[str, Any]) -> str:
    """Return it if the coordinator reports one in GET /v1/pipeline, else an empty text."""
    found = described.get("imbalance")
    if not found:
        return ""
    stage = described["stages"][found["slowest"]]
    cut = ", ".join(f"{start}-{end - 1}" for start, end in found["layers"])
    name = stage.get("name") or f"stage {found['slowest']}"
    said = f"{name} holds the others up for {found['for_s']:.0f} s: layers {cut} would give {found['gain']:.0%} more"
    cuts = ",".join(str(start) for start, _ in found["layers"][1:])
    wait_s = found.get("moves_in_s")
    return f"{said}; " + (
        f"relayline move --cuts {cuts}" if wait_s is None else f"layers move by themselves{_when(wait_s)}"
    )


def _when(wait_s: float) -> str:
    return f" in {wait_s:.0f} s" if wait_s > 0 else " now"
