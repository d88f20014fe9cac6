"""Lines about a running pipeline for `status` and `top`: a faster cut, stages without layers, the pipelines of a
gateway."""

from __future__ import annotations

from typing import Any

from relayline.wire.common.texts import layer_ranges


def unequal_line(described: dict[str, Any]) -> str:
    """Return it if the coordinator reports one in GET /v1/pipeline, else an empty text."""
    found = described.get("imbalance")
    if not found:
        return ""
    stage = described["stages"][found["slowest"]]
    cut = layer_ranges(found["layers"])
    name = stage.get("name") or f"stage {found['slowest']}"
    slow = f"{name} has slowed the pipeline down for {found['for_s']:.0f} s"
    advice = f"{slow}: layers {cut} would give {found['gain']:.0%} more"
    cuts = ",".join(str(start) for start, _ in found["layers"][1:])
    wait_s = found.get("moves_in_s")
    return f"{advice}; " + (
        f"relayline move --cuts {cuts}" if wait_s is None else f"layers move automatically{_when(wait_s)}"
    )


def idle_line(described: dict[str, Any]) -> str:
    """Return which stages hold no layers, and when others take over from a lost one; empty if all is as usual."""
    idle = [f"{entry['name']} ({entry['state']})" for entry in described.get("idle") or ()]
    parts = [f"without layers: {', '.join(idle)}"] if idle else []
    parts += [
        f"other stages take over the layers of {stage['name']} in {stage['takeover_in_s']:.0f} s"
        for stage in described["stages"]
        if stage.get("takeover_in_s") is not None
    ]
    return "; ".join(parts)


def gateway_lines(pipelines: list[dict[str, Any]]) -> list[str]:
    """Return a line for each pipeline behind a gateway: its state, models, work and address."""
    width = max((len(each["name"]) for each in pipelines), default=0)
    phase_width = max((len(each["phase"]) for each in pipelines if not each["problem"]), default=0)
    lines = []
    for each in pipelines:
        serves = f"serves {', '.join(each['models'])}, " if each["models"] else ""
        why = f" ({each['problem']})" if each["problem"] else ""
        n_requests = f"{each['running'] + each['others']} running"
        if n_waiting := each.get("waiting", 0):
            n_requests += f", {n_waiting} waiting"
        state = f"{each['phase']}{why}"
        lines.append(f"{each['name']:<{width}}  {state:<{phase_width}}  {serves}{n_requests}, {each['url']}")
    return lines


def _when(wait_s: float) -> str:
    return f" in {wait_s:.0f} s" if wait_s > 0 else " now"
