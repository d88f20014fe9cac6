"""Writes the files that are derived from tables: the pages of settings and metrics in docs/reference, and the
manifest's JSON Schema.

With --check it writes nothing, and fails if one of them is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from relayline.coordinator.observe.metrics import GRANT_COUNTS
from relayline.deploy.manifest.gateway import GatewayManifest
from relayline.deploy.manifest.schema import GATEWAY_SCHEMA_FILE, SCHEMA_FILE, schema_text
from relayline.stage.observe import figures
from relayline.wire.settings.setting import Reader, Setting, entries
from relayline.wire.settings.table import TABLES

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
"""
METRICS_HEAD = """# Metrics of a stage

<!-- Made by `make reference` from stage/observe/figures.py. Do not edit this page. -->

`relayline stage --metrics HOST:PORT` serves these at `/metrics`, in Prometheus' form. Each has the label `stage`.
"""
GRANTS_HEAD = """## Grants

The coordinator counts these at its own `/metrics`, with the label `model_name` too. They move only with
`--grant-steps`.
"""
METRICS_COLUMNS = ("name", "kind", "unit", "label", "meaning")
COLUMNS = ("flag", "variable", "manifest", "values", "default", "for", "meaning")


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
    """Return the reference page of a stage's metrics."""
    rows = [METRICS_COLUMNS, ("---",) * len(METRICS_COLUMNS)]
    for kind, found in (
        ("histogram", figures.HISTOGRAMS),
        ("counter", figures.COUNTERS + figures.TELEMETRY_COUNTERS),
        ("gauge", figures.GAUGES + figures.TELEMETRY_GAUGES),
    ):
        ending = "_total" if kind == "counter" else ""
        rows += [(f"`{each.name}{ending}`", kind, each.unit, each.label, each.help) for each in found]
    grants = [METRICS_COLUMNS, ("---",) * len(METRICS_COLUMNS)]
    grants += [(f"`{each.name}_total`", "counter", "", each.label, each.help) for each in GRANT_COUNTS]
    return f"{METRICS_HEAD}\n{_table(rows)}\n{GRANTS_HEAD}\n{_table(grants)}"


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
