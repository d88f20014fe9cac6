"""GET /v1/pipeline: stages and their live counters as JSON-ready values. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.coordinator.observe.overlap import Interval, overlap, overlap_between
from relayline.wire.common.phase import HostState
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb


def percentile(sorted_values: Sequence[int], share: float) -> int:
    """Return the value at `share` (0..1) of an ascending sequence by nearest rank; 0 when it is empty."""
    if not sorted_values:
        return 0
    return sorted_values[min(len(sorted_values) - 1, int(share * len(sorted_values)))]


def describe_pipeline(
    file: PipelineFile,
    live: Mapping[str, object],
    stages: Sequence[Mapping[str, object]],
    statuses: Sequence[pb.StatusResponse | None],
) -> dict[str, object]:
    """Return the whole description: model and settings, the coordinator's `live` figures, overlap, and the stages."""
    return {
        "model": file.model_name,
        "architecture": file.architecture,
        "pipeline_id": file.pipeline_id,
        **live,
        "overlap": overlap([steps_of(status) if status else [] for status in statuses]),
        "stages": list(stages),
    }


def overlap_since(statuses: Sequence[pb.StatusResponse | None], since_ns: int | None, now_ns: int) -> dict[str, object]:
    """Return `overlap` from `since_ns` to `now_ns` (this process's clock) for describe_pipeline's answer.

    Returns {} if since_ns is None. Stages remember a bounded number of steps. `overlap_since_ns` is the time from which
    every stage still has all of its steps, and only steps after it count. `overlap` is empty if a stage did not answer,
    or if no stage computed in that time.
    """
    if since_ns is None:
        return {}
    known = [status for status in statuses if status is not None]
    from_ns = max([since_ns, *(known_from_ns(status, now_ns) for status in known)])
    is_whole = len(known) == len(statuses)
    shares = overlap_between(list(map(steps_of, known)), from_ns, now_ns) if is_whole else {}
    return {"overlap": shares, "overlap_since_ns": from_ns}


def steps_of(status: pb.StatusResponse) -> list[Interval]:
    """Return the stage's remembered native decodes as (start, end)."""
    return list(zip(status.step_start_ns, status.step_end_ns, strict=True))


def known_from_ns(status: pb.StatusResponse, now_ns: int) -> int:
    """Return the time from which `status` has every native step: the stage's start, or later if it forgot some."""
    if status.n_steps > len(status.step_start_ns) > 0:
        return status.step_start_ns[0]
    return now_ns - status.uptime_ns


def describe_stages(
    file: PipelineFile,
    addresses: Sequence[str],
    statuses: Sequence[pb.StatusResponse | None],
    more: Sequence[dict[str, object]],
) -> list[dict[str, object]]:
    """Return one entry per stage; counters are missing where a stage did not answer. `more` is added to each."""
    described: list[dict[str, object]] = []
    for index, (stage, address) in enumerate(zip(file.stages, addresses, strict=True)):
        entry: dict[str, object] = {
            "index": stage.index,
            "address": address,
            "layers": [stage.layer_start, stage.layer_end],
            "artifact_bytes": stage.size_bytes,
            **more[index],
        }
        status = statuses[index] if index < len(statuses) else None
        entry["up"] = status is not None
        if entry.get("silent") and entry.get("state", HostState.READY) == HostState.READY:
            entry["state"] = HostState.SILENT.value
        if status is not None:
            entry |= _counters(status)
        described.append(entry)
    return described


def _counters(status: pb.StatusResponse) -> dict[str, object]:
    waits = sorted(status.recent_wait_ns)
    return {
        "instance_id": status.instance_id,
        "steps": status.n_steps,
        "rows": status.n_rows,
        "frames": status.n_frames,
        "padded_rows": status.n_padded_rows,
        "micro_batches": status.n_micro_batches,
        "steps_by_rows": {str(rows): status.steps_by_rows[rows] for rows in sorted(status.steps_by_rows)},
        "steps_by_sessions": {str(n): status.steps_by_sessions[n] for n in sorted(status.steps_by_sessions)},
        "wait_p50_ns": percentile(waits, 0.5),
        "wait_p95_ns": percentile(waits, 0.95),
        "busy_ns": status.busy_ns,
        "uptime_ns": status.uptime_ns,
        "lanes_used": status.lanes_used,
        "lanes_kept": status.lanes_kept,
        "lanes_total": status.lanes_total,
        "tier": {
            "memory_bytes": status.tier_memory_bytes,
            "disk_bytes": status.tier_disk_bytes,
            "states": status.tier_states,
            "hits": status.tier_hits,
            "misses": status.tier_misses,
        },
        "kv_layout": "per-lane" if status.kv_per_lane else "unified",
        "kernels": status.kernels.split(),
        "metrics": status.metrics_address,
        "metrics_scheme": "https" if status.metrics_tls else "http",
        "devices": [f"{device.name}: {device.description}" for device in status.place.devices],
        "queued_rows": status.queued_rows,
        "resident_bytes": status.resident_bytes or None,
        "memory_bytes": status.memory_bytes or None,
        "memory_free_bytes": status.memory_free_bytes or None,
        "envelopes_in": status.envelopes_in,
        "envelopes_out": status.envelopes_out,
        "payload_bytes_in": status.payload_bytes_in,
        "payload_bytes_out": status.payload_bytes_out,
        "close_reasons": dict(status.close_reasons),
        "faults": dict(status.faults_by_label),
    }
