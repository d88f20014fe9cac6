"""GET /metrics: the live description of the pipeline in Prometheus form. Pure: a description in, text out."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Description:
    """A collector over one description."""

    def __init__(self, described: dict[str, Any]) -> None:
        self._described = described

    def collect(self) -> list[Metric]:
        return [*_pipeline(self._described), *_stages(self._described["stages"])]


def render(described: dict[str, Any]) -> bytes:
    """Return the exposition text of one `Generator.describe()`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Description(described))
    text: bytes = generate_latest(registry)
    return text


def _pipeline(described: dict[str, Any]) -> list[Metric]:
    label = {"model_name": described["model"]}
    overlap = GaugeMetricFamily(
        "relayline_overlap_ratio", "Share of recent busy time with so many stages computing at once", labels=["stages"]
    )
    for stages, share in described["overlap"].items():
        overlap.add_metric([stages], share)
    return [
        _gauge("relayline_num_requests_running", "Requests that have a lane", label, described["running"]),
        _gauge("relayline_num_requests_waiting", "Requests that wait for a lane", label, described["waiting"]),
        _gauge("relayline_lanes", "Requests that may run at once", label, described["lanes"]),
        _gauge("relayline_epoch", "Times that the stages have been connected", label, described["epoch"]),
        _gauge("relayline_group_flights", "Decode groups under way, as planned", label, described["plan"]["n_groups"]),
        _gauge("relayline_group_rows", "Rows of one decode group, as planned", label, described["plan"]["group_rows"]),
        _counter("relayline_shared_requests", "Requests that joined another's session", label,
                 described["shared_requests"]),
        overlap,
    ]  # fmt: skip


def _gauge(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    family = CounterMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


_STAGE_COUNTERS = {
    "steps": ("relayline_stage_steps", "Native steps", 1),
    "rows": ("relayline_stage_rows", "Rows decoded", 1),
    "frames": ("relayline_stage_frames", "Frames decoded", 1),
    "padded_rows": ("relayline_stage_padded_rows", "Scratch rows decoded beside them", 1),
    "busy_ns": ("relayline_stage_busy_seconds", "Time inside native decode", 1e-9),
    "payload_bytes_in": ("relayline_stage_payload_received_bytes", "Payload received", 1),
    "payload_bytes_out": ("relayline_stage_payload_sent_bytes", "Payload sent", 1),
}
_STAGE_GAUGES = {
    "lanes_used": ("relayline_stage_lanes_used", "Lanes in use", 1),
    "queued_rows": ("relayline_stage_queued_rows", "Rows waiting for a step", 1),
    "wait_p50_ns": ("relayline_stage_wait_p50_seconds", "Median wait of recent frames", 1e-9),
    "wait_p95_ns": ("relayline_stage_wait_p95_seconds", "95th percentile of recent frames' waits", 1e-9),
}


def _stages(stages: list[dict[str, Any]]) -> list[Metric]:
    up = GaugeMetricFamily("relayline_stage_up", "Whether the stage answers", labels=["stage"])
    families: list[Metric] = [up]
    for stage in stages:
        up.add_metric([str(stage["index"])], float(stage["up"]))
    for kind, table in ((CounterMetricFamily, _STAGE_COUNTERS), (GaugeMetricFamily, _STAGE_GAUGES)):
        for key, (name, text, factor) in table.items():
            family = kind(name, text, labels=["stage"])
            for stage in stages:
                if key in stage:
                    family.add_metric([str(stage["index"])], stage[key] * factor)
            families.append(family)
    return families
