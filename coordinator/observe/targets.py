"""GET /v1/pipeline/targets: where metrics are read, in the form of Prometheus' HTTP service discovery. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relayline.wire.links.security import host_of, reached_at


def targets(described: Mapping[str, Any], coordinator: str, scheme: str) -> list[dict[str, object]]:
    """Return the coordinator, at the address under which it was asked, and every stage that serves metrics.

    `described` is that of GET /v1/pipeline. A stage that does not answer is left out, because its address is unknown.
    """
    model = str(described.get("model", ""))
    found = [target(coordinator, scheme, {"role": "coordinator", "model": model})]
    for stage in described.get("stages", ()):
        if not (address := stage.get("metrics")):
            continue
        address = reached_at(address, host_of(str(stage["address"])))
        labels = {"role": "stage", "model": model, "stage_name": str(stage.get("name") or stage["index"])}
        found.append(target(address, str(stage.get("metrics_scheme", "http")), labels))
    return found


def target(address: str, scheme: str, labels: Mapping[str, str], path: str = "") -> dict[str, object]:
    """Return one group of targets. `path` is of its metrics, if not /metrics."""
    special = {"__scheme__": scheme} | ({"__metrics_path__": path} if path else {})
    return {"targets": [address], "labels": {**special, **labels}}
