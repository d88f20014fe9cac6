"""GET /metrics: the live description of the pipeline in Prometheus form. Pure: a description in, text out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from relayline.wire.telemetry import names

NEVER_SLEPT: Mapping[str, Any] = {"state": "awake", "sleeps": 0, "wakes": 0, "failed": 0, "woke_in_s": None}


class Described:
    """A collector over one description."""

    def __init__(self, described: dict[str, Any]) -> None:
        self._described = described

    def collect(self) -> list[Metric]:
        """Return every metric of the coordinator and its stages, besides those of requests."""
        return [*_pipeline(self._described), *_stages(self._described["stages"])]


def render(described: dict[str, Any], requests: CollectorRegistry | None = None, accept: str = "") -> tuple[bytes, str]:
    """Return the exposition of one `Generator.describe()`, with the metrics of requests, and its content type.

    `accept` is the client's header of this name: a client that names OpenMetrics gets it.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Described(described))
    if requests is not None:
        registry.register(requests)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def _pipeline(described: dict[str, Any]) -> list[Metric]:
    label = {names.LABEL_MODEL: described["model"]}
    overlap = GaugeMetricFamily(
        names.METRIC_OVERLAP,
        "Share of recent busy time in which so many stages computed at once; 2+: two or more",
        labels=[names.LABEL_STAGES],
    )
    for stages, share in described["overlap"].items():
        overlap.add_metric([stages], share)
    capacity = described["lanes"] * described.get("ctx_tokens", 0)
    kv_usage = described.get("kv_tokens", 0) / capacity if capacity else 0.0
    return [
        _gauge(names.METRIC_KV_USAGE, "Share of the KV cache that running streams fill", label, kv_usage),
        *_link(described.get("link", {})),
        *_telemetry(described.get("telemetry", {}), label),
        *_sleep(described.get("sleep") or NEVER_SLEPT, label),
        *_certificate(described.get("certificate_expires_unix_s"), label),
        _gauge(names.METRIC_RUNNING, "Requests that have a lane", label, described["running"]),
        _gauge(names.METRIC_WAITING, "Requests that wait for a lane", label, described["waiting"]),
        _gauge(names.METRIC_LANES, "Requests that may run at once", label, described["lanes"]),
        _gauge(names.METRIC_EPOCH, "Number of times that the stages were connected", label, described["epoch"]),
        _gauge(names.METRIC_GROUP_FLIGHTS, "Decode groups under way, as planned", label, described["plan"]["n_groups"]),
        _gauge(names.METRIC_GROUP_ROWS, "Rows of one decode group, as planned", label, described["plan"]["group_rows"]),
        _counter(names.METRIC_SHARED, "Requests that share another request's session", label,
                 described["shared_requests"]),
        overlap,
        *_keys(described.get("keys", ()), label),
        *_grants(described.get("grants", {}), label),
        *_batches(described.get("batches", {}), label),
    ]  # fmt: skip


class Count(NamedTuple):
    """A count by a label; `fields` has its values' names in GET /v1/pipeline."""

    name: str
    help: str
    label: str
    fields: Mapping[str, str]


# Of `coordinator.schedule.grants`.
_GRANT_COUNTS = (
    Count(
        names.METRIC_GRANTS,
        "Envelopes that gave grants, that extended some, and that ended some because other rows had to leave",
        names.LABEL_EVENT,
        {"given": "given", "extended": "extended", "ended": "repeated"},
    ),
    Count(
        names.METRIC_GRANT_ROWS,
        "Rows under grants: those that were used, and those that were computed in vain",
        names.LABEL_OUTCOME,
        {"used": "rows", "vain": "vain_rows"},
    ),
)


_OF_KEYS: tuple[tuple[str, type[GaugeMetricFamily] | type[CounterMetricFamily], str, str], ...] = (
    (names.METRIC_KEY_RUNNING, GaugeMetricFamily, "Streams of this API key that have a lane", "running"),
    (names.METRIC_KEY_WAITING, GaugeMetricFamily, "Streams of this API key that wait for a lane", "waiting"),
    (names.METRIC_KEY_REQUESTS, CounterMetricFamily, "Requests of this API key that have ended", "requests"),
    (names.METRIC_KEY_PROMPT, CounterMetricFamily, "Prompt tokens of these requests", "prompt_tokens"),
    (names.METRIC_KEY_CACHED, CounterMetricFamily, "Of these, tokens from the prefix cache", "cached_tokens"),
    (names.METRIC_KEY_COMPLETION, CounterMetricFamily, "Tokens of the answers to these requests", "completion_tokens"),
)


def _keys(keys: Sequence[Mapping[str, Any]], label: dict[str, str]) -> list[Metric]:
    """Return what API keys have used, see `coordinator.observe.usage`; nothing where there are none."""
    families: list[Metric] = []
    for name, kind, text, field in _OF_KEYS if keys else ():
        family = kind(name, text, labels=[*label, names.LABEL_KEY])
        for key in keys:
            family.add_metric([*label.values(), key["name"]], key[field])
        families.append(family)
    return families


def _grants(grants: Mapping[str, int], label: dict[str, str]) -> list[Metric]:
    families: list[Metric] = []
    for count in _GRANT_COUNTS:
        family = CounterMetricFamily(count.name, count.help, labels=[*label, count.label])
        for what, field in count.fields.items():
            family.add_metric([*label.values(), what], grants.get(field, 0))
        families.append(family)
    return families


# Of `coordinator.http.batches.keeper`.
_BATCH_COUNTS = (
    Count(
        names.METRIC_OFFLINE_BATCHES,
        "Kept batches that run, and that wait for their turn",
        names.LABEL_STATE,
        {"running": "running", "waiting": "waiting"},
    ),
    Count(
        names.METRIC_OFFLINE_REQUESTS,
        "Requests of batches that have not ended: those to do, those that are done, and of these those that failed",
        names.LABEL_STATE,
        {"waiting": "requests_waiting", "done": "requests_done", "failed": "requests_failed"},
    ),
)


def _batches(batches: Mapping[str, int], label: dict[str, str]) -> list[Metric]:
    """Return how many batches and requests of batches there are; nothing where none are kept."""
    families: list[Metric] = []
    for count in _BATCH_COUNTS if batches else ():
        family = GaugeMetricFamily(count.name, count.help, labels=[*label, count.label])
        for what, field in count.fields.items():
            family.add_metric([*label.values(), what], batches.get(field, 0))
        families.append(family)
    return families


def _telemetry(telemetry: dict[str, int], label: dict[str, str]) -> list[Metric]:
    """Return the figures of the coordinator's own telemetry, under the same names as a stage's."""
    if not telemetry:
        return []
    return [
        _counter(names.METRIC_SPANS_EXPORTED, "Spans that a collector accepted", label, telemetry["exported_spans"]),
        _counter(names.METRIC_SPANS_DROPPED, "Spans that were lost", label, telemetry["dropped_spans"]),
        _gauge(names.METRIC_TELEMETRY_LEVEL, "0 off, 1 summary, 2 batches, 3 frames", label, telemetry["level"]),
    ]


def _sleep(sleep: Mapping[str, Any], label: dict[str, str]) -> list[Metric]:
    """Return whether the pipeline sleeps, and how it woke."""
    wakes = CounterMetricFamily(
        names.METRIC_WAKES,
        "Times that sleeping stages were to load again; failed: they could not",
        labels=[names.LABEL_MODEL, names.LABEL_OUTCOME],
    )
    for outcome, key in (("woken", "wakes"), ("failed", "failed")):
        wakes.add_metric([*label.values(), outcome], sleep[key])
    is_asleep = sleep["state"] in ("asleep", "waking")
    return [
        _gauge(names.METRIC_ASLEEP, "Whether the stages have freed their memory: 1 or 0", label, float(is_asleep)),
        _counter(names.METRIC_SLEEPS, "Times that the stages were told to free their memory", label, sleep["sleeps"]),
        wakes,
        _gauge(names.METRIC_WAKE_TIME, "How long the latest wake took; 0: there was none", label,
               sleep["woke_in_s"] or 0.0),
    ]  # fmt: skip


def _certificate(expires_unix_s: float | None, label: dict[str, str]) -> list[Metric]:
    """Return when the coordinator's certificate ends, under the same name as a stage's; nothing without one."""
    if expires_unix_s is None:
        return []
    return [_gauge(names.METRIC_CERTIFICATE_EXPIRES, names.HELP_CERTIFICATE_EXPIRES, label, expires_unix_s)]


def _link(link: dict[str, int]) -> list[Metric]:
    """Return the figures of the link to stage 0, in the form that stages use; none while it is not connected."""
    if not link:
        return []
    own = {names.LABEL_STAGE: names.STAGE_COORDINATOR}
    out = own | {names.LABEL_DIRECTION: "out"}
    return [
        _counter(
            names.METRIC_LINK_ENVELOPES,
            "Envelopes sent since the stages were last connected",
            out,
            link["envelopes_sent"],
        ),
        _counter(
            names.METRIC_LINK_BYTES,
            "Payload bytes sent since the stages were last connected",
            out,
            link["payload_bytes_sent"],
        ),
        _gauge(names.METRIC_LINK_IN_FLIGHT, names.HELP_LINK_IN_FLIGHT, own, link["in_flight_bytes"]),
        _gauge(names.METRIC_LINK_WINDOW, names.HELP_LINK_WINDOW, own, link["window_bytes"]),
    ]


def _metric(family: Callable[..., Metric], name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    metric = family(name, text, labels=list(labels))
    metric.add_metric(list(labels.values()), value)
    return metric


_gauge = functools.partial(_metric, GaugeMetricFamily)
_counter = functools.partial(_metric, CounterMetricFamily)

_STAGE_COUNTERS = {
    "steps": (names.METRIC_STAGE_STEPS, "Native steps", 1),
    "rows": (names.METRIC_STAGE_ROWS, "Rows decoded", 1),
    "frames": (names.METRIC_STAGE_FRAMES, "Frames decoded", 1),
    "padded_rows": (names.METRIC_STAGE_PADDED_ROWS, "Padding rows decoded in the same steps", 1),
    "micro_batches": (names.METRIC_STAGE_MICRO_BATCHES, "Micro-batches that llama.cpp ran", 1),
    "busy_ns": (names.METRIC_STAGE_BUSY, "Time inside native decode", 1e-9),
    "envelopes_in": (names.METRIC_STAGE_ENVELOPES_IN, "Envelopes received", 1),
    "envelopes_out": (names.METRIC_STAGE_ENVELOPES_OUT, "Envelopes sent", 1),
    "payload_bytes_in": (names.METRIC_STAGE_BYTES_IN, "Payload bytes received", 1),
    "payload_bytes_out": (names.METRIC_STAGE_BYTES_OUT, "Payload bytes sent", 1),
}
# Counts by a second label.
_STAGE_COUNTS = {
    "close_reasons": (names.METRIC_STAGE_CLOSED, "Native steps by close reason", names.LABEL_CLOSE_REASON),
    "faults": (names.METRIC_STAGE_FAULTS, "Sessions that failed at the stage", names.LABEL_ERROR),
}
_STAGE_GAUGES = {
    "lanes_used": (names.METRIC_STAGE_LANES_USED, "Lanes in use", 1),
    "lanes_kept": (names.METRIC_STAGE_LANES_KEPT, "Lanes that hold prefixes of ended streams", 1),
    "queued_rows": (names.METRIC_STAGE_QUEUED_ROWS, "Rows waiting for a step", 1),
    "wait_p50_ns": (names.METRIC_STAGE_WAIT_P50, "Median wait of recent frames", 1e-9),
    "wait_p95_ns": (names.METRIC_STAGE_WAIT_P95, "95th percentile of recent frames' waits", 1e-9),
}


def _stages(stages: list[dict[str, Any]]) -> list[Metric]:
    up = GaugeMetricFamily(names.METRIC_STAGE_UP, "Whether the stage answers", labels=[names.LABEL_STAGE])
    families: list[Metric] = [up]
    for stage in stages:
        up.add_metric([str(stage["index"])], float(stage["up"]))
    for kind, table in ((CounterMetricFamily, _STAGE_COUNTERS), (GaugeMetricFamily, _STAGE_GAUGES)):
        for key, (name, text, factor) in table.items():
            family = kind(name, text, labels=[names.LABEL_STAGE])
            for stage in stages:
                if key in stage:
                    family.add_metric([str(stage["index"])], stage[key] * factor)
            families.append(family)
    for key, (name, text, label) in _STAGE_COUNTS.items():
        counts = CounterMetricFamily(name, text, labels=[names.LABEL_STAGE, label])
        for stage in stages:
            for what, n_times in stage.get(key, {}).items():
                counts.add_metric([str(stage["index"]), what], n_times)
        families.append(counts)
    return [*families, *_relay(stages)]


def _relay(stages: list[dict[str, Any]]) -> list[Metric]:
    """Return what the relay carries, of the stages that are reached through it."""
    label = [names.LABEL_STAGE]
    is_open = GaugeMetricFamily(names.METRIC_RELAY_CONNECTIONS, "Connections that the relay carries", labels=label)
    refused = CounterMetricFamily(
        names.METRIC_RELAY_REFUSED, "Connections that the relay closed: no tunnel, or too many", labels=label
    )
    carried = CounterMetricFamily(
        names.METRIC_RELAY_BYTES, "Bytes that the relay has carried", labels=[*label, names.LABEL_DIRECTION]
    )
    for stage in stages:
        if (relay := stage.get("relay")) is not None:
            index = str(stage["index"])
            is_open.add_metric([index], relay["connections"])
            refused.add_metric([index], relay["refused"])
            carried.add_metric([index, "in"], relay["to_stage_bytes"])
            carried.add_metric([index, "out"], relay["from_stage_bytes"])
    return [is_open, refused, carried]
