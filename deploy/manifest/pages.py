"""Writes the files that are derived from tables: the pages of settings and metrics in docs/reference, and the
manifest's JSON Schema.

With --check it writes nothing, and fails if one of them is out of date.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from relayline.coordinator.gateway.metrics import gateway_metrics
from relayline.coordinator.gateway.router import Router
from relayline.coordinator.observe.metrics import Described
from relayline.coordinator.observe.request_metrics import RequestMetrics
from relayline.coordinator.observe.usage import KeyUsage
from relayline.coordinator.sessions.media_record import FileRecord, MediaRecord
from relayline.deploy.manifest.gateway import GatewayManifest
from relayline.deploy.manifest.schema import GATEWAY_SCHEMA_FILE, SCHEMA_FILE, schema_text
from relayline.stage.observe import figures
from relayline.wire.settings.setting import Reader, Setting, entries
from relayline.wire.settings.table import TABLES
from relayline.wire.telemetry import names

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
PAGE, METRICS_PAGE = REFERENCE / "settings.md", REFERENCE / "metrics.md"
READERS = {
    Reader.STAGE: "stages",
    Reader.COORDINATOR: "the coordinator",
    Reader.STAGE | Reader.COORDINATOR: "both",
}
HEAD = """# Settings

<!-- Made by `make reference` from wire/settings/table.py. Do not edit this page. -->

Each setting can be given by a flag, by an environment variable (for `relayline up` and `relayline serve`) and in a
manifest, below `spec`. A flag wins over a variable, and a variable over the manifest. A value that is not allowed is
refused with one line, before anything is done.

Sizes in bytes may have a unit: `4M` and `4MiB` are 4 times 1,024², `4MB` is 4,000,000; so with K, G and T, and `1.5G`.
"""
METRICS_HEAD = """# Metrics

<!-- Made by `make reference` from stage/observe/figures.py and the metrics of coordinator and gateway. Do not edit this
page. -->

Every process serves its own at `/metrics`, in Prometheus' form. Each also has the `process_*` of Prometheus' clients:
processor time, memory, open files and the time of its start.

## A stage

At the address of `relayline stage --metrics HOST:PORT`. Each has the label `stage`, the stage's index. Beside these
there is `relayline_batch_stage_info`, always 1, with the labels `layers`, `pipeline`, `policy` and `version`. With TLS
there is `relayline_certificate_expires_timestamp_seconds` too.
"""
COORDINATOR_HEAD = """## A coordinator

At the address of its API. `stage` is the index of a stage, or `coordinator` for the link to the first stage. The
figures of stages are as the coordinator last heard them, for a Prometheus that reads the coordinator alone.
`relayline_grants_total` and `relayline_grant_rows_total` move only with `--grant-steps`, and the figures of drafts only
with drafts. Those with `api_key`, a key's name, are there once a key of `--api-keys` was used: the first 256 keys have
their own, and all others share one.
"""
GATEWAY_HEAD = """## A gateway

At the address of its API. Those of a pipeline behind it are at `/pipelines/NAME/metrics` too.
"""
METRICS_COLUMNS = ("name", "kind", "unit", "label", "meaning")
UNITS = ("seconds", "bytes", "ratio")  # which names end with
COLUMNS = ("flag", "variable", "manifest", "values", "default", "for", "meaning")
EXAMPLE_MEDIA = MediaRecord(files=[FileRecord("image", steps={names.SPAN_ENCODE: (0, 1)})])
EXAMPLE = {  # of GET /v1/pipeline: one of everything that has a metric
    "model": "", "running": 0, "waiting": 0, "lanes": 0, "epoch": 0, "shared_requests": 0,
    "plan": {"n_groups": 0, "group_rows": 0}, "overlap": {"1": 0.0}, "certificate_expires_unix_s": 0.0,
    "link": {"envelopes_sent": 0, "payload_bytes_sent": 0, "in_flight_bytes": 0, "window_bytes": 0},
    "telemetry": {"exported_spans": 0, "dropped_spans": 0, "level": 0},
    "keys": [dataclasses.asdict(KeyUsage(""))], "batches": {"running": 0},
    "stages": [
        {"index": 0, "up": True, "steps": 0, "rows": 0, "frames": 0, "padded_rows": 0, "micro_batches": 0, "busy_ns": 0,
         "envelopes_in": 0, "envelopes_out": 0, "payload_bytes_in": 0, "payload_bytes_out": 0, "lanes_used": 0,
         "lanes_kept": 0, "queued_rows": 0, "wait_p50_ns": 0, "wait_p95_ns": 0, "close_reasons": {"": 0},
         "faults": {"": 0}},
    ],
}  # fmt: skip


def page_text() -> str:
    """Return the reference page of all settings."""
    parts = [HEAD]
    for table in TABLES:
        title = (table.__doc__ or "").splitlines()[0].rstrip(".")
        rows = [COLUMNS, ("---",) * len(COLUMNS), *map(_row, entries(table))]
        parts.append(f"## {title}\n\n{_table(rows)}")
    return "\n".join(parts)


def _row(entry: Setting) -> tuple[str, ...]:
    default = "" if entry.default in (None, "") else f"`{entry.text(entry.default)}`"
    values = "true, false" if entry.is_switch else entry.allowed or "text"
    meaning = " ".join(entry.doc.split())
    if entry.is_negated:
        meaning += f" `{entry.flag}` turns it off."
    place = f"`{entry.place}`" if entry.place else ""
    return f"`{entry.flag}`", f"`{entry.variable}`", place, values, default, READERS[entry.reader], meaning


def metrics_text() -> str:
    """Return the reference page of all metrics."""
    rows = [METRICS_COLUMNS, ("---",) * len(METRICS_COLUMNS)]
    for kind, found in (
        ("histogram", figures.HISTOGRAMS),
        ("counter", figures.COUNTERS + figures.TELEMETRY_COUNTERS),
        ("gauge", figures.GAUGES + figures.TELEMETRY_GAUGES),
    ):
        ending = "_total" if kind == "counter" else ""
        rows += [(f"`{each.name}{ending}`", kind, _unit(each.name), each.label, each.help) for each in found]
    requests = RequestMetrics("")
    requests.media.ended(EXAMPLE_MEDIA)
    coordinator = _families(Described(EXAMPLE), requests.registry)
    gateway = _families(gateway_metrics(Router([""])))
    parts = (METRICS_HEAD, _table(rows), COORDINATOR_HEAD, _metrics(coordinator), GATEWAY_HEAD, _metrics(gateway))
    return "\n".join(parts)


def _families(*collectors: Collector | CollectorRegistry) -> list[Metric]:
    """Return the metrics of ours that some collectors have."""
    return [
        family
        for collector in collectors
        for family in collector.collect()
        if family.name.startswith(f"{names.SERVICE_STEM}_")
    ]


def _metrics(families: Sequence[Metric]) -> str:
    rows = [METRICS_COLUMNS, ("---",) * len(METRICS_COLUMNS)]
    for kind in ("histogram", "counter", "gauge"):
        rows += [_metric(family) for family in families if family.type == kind]
    return _table(rows)


def _metric(family: Metric) -> tuple[str, ...]:
    ending = "_total" if family.type == "counter" else ""
    labels = dict.fromkeys(label for sample in family.samples for label in sample.labels if label != "le")
    return f"`{family.name}{ending}`", family.type, _unit(family.name), ", ".join(labels), family.documentation


def _unit(name: str) -> str:
    return next((unit for unit in UNITS if name.endswith(unit)), "")


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def main() -> None:
    """Write the files, or compare."""
    made = {PAGE: page_text(), METRICS_PAGE: metrics_text(), SCHEMA_FILE: schema_text()}
    made[GATEWAY_SCHEMA_FILE] = schema_text(GatewayManifest)
    if "--check" not in sys.argv:
        for path, text in made.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return
    stale = [path.name for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if stale:
        sys.exit(f"out of date with its table: {', '.join(stale)}; run `make reference`")
    print(f"{len(made)} files match their tables")


if __name__ == "__main__":
    main()
