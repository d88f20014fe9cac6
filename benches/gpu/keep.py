"""Makes benches/results/gpu.json, the table of docs/results/gpu.md, from the gpu-short.json of a short run."""

from __future__ import annotations

import datetime
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benches import machine
from benches.tables import RESULTS

COMMAND = "python -m benches.gpu --minutes 10"
HALVES = "our engine, one half of the model after the other"
SERVED = {
    "one-stage": "one stage over HTTP",
    "one-stage-drawn": "one stage, temperature .7 and top-p .9 (`--device-sampling all`)",
    "one-stage-drawn-rows": "the same with whole rows fetched one by one (`--device-sampling on`)",
    "one-stage-drawn-host": "the same with all rows copied (`--device-sampling off`)",
    "many-unified": "one stage with 255 lanes that share their cells",
    "many-per-lane": "one stage with 255 lanes that have cells of their own, sampled by the processor",
    "one-stage-waits": "one stage that waits for the coordinator (`--run-ahead off`)",
    "one-stage-host": "one stage, sampled by the processor",
    "one-stage-per-lane": "the same with cells of its own for each lane",
    "unsplit": "unsplit `llama-server`",
    "two-stages": "two stages on that GPU",
    "rpc": "llama.cpp RPC, two workers on that GPU",
}
QUOTIENTS = (
    ("engine", "bare", "engine / `llama-batched-bench`", ""),
    ("one-stage", "bare", "one stage / `llama-batched-bench`", "0.95 / 0.92 / 0.9 / 0.9"),
    ("one-stage", "unsplit", "one stage / unsplit `llama-server`", ""),
    ("one-stage", "one-stage-waits", "one stage / the same that waits for the coordinator", ""),
    ("one-stage", "one-stage-host", "one stage / the same, sampled by the processor", ""),
    ("one-stage-drawn", "one-stage", "one stage, drawn / greedy", ""),
    ("one-stage-drawn", "one-stage-drawn-rows", "one stage, drawn / the same with whole rows fetched", ""),
    ("one-stage-drawn", "one-stage-drawn-host", "one stage, drawn / the same with all rows copied", ""),
    ("many-per-lane", "many-unified", "255 lanes, cells of their own / shared cells", ""),
    ("halves", "engine", "our engine, in halves / whole", ""),
    ("two-stages", "one-stage", "two stages / one", "0.9"),
    ("two-stages", "rpc", "two stages / llama.cpp RPC", ""),
)


def kept(found: Mapping[str, Any], date: str, commit: str) -> dict[str, Any]:
    """Return the measurement: medians over repeats, in tok/s. Parts that were left out or failed have no row. Pure.

    Raises ValueError if no part of the run has figures by streams.
    """
    by_id: dict[str, tuple[str, dict[int, float]]] = {}
    if steps := _found(found, "engine"):
        if all("bare_ms" in each for each in steps):
            bare = {int(each["rows"]): each["rows"] / each["bare_ms"] * 1e3 for each in steps}
            by_id["bare"] = ("`llama-batched-bench`, the engine alone", bare)
        by_id["engine"] = ("our engine alone", {int(each["rows"]): each["tok_s"] for each in steps})
    if halves := _found(found, "two-halves"):
        by_id["halves"] = (HALVES, {int(each["rows"]): each["tok_s"] for each in halves})
    for name, label in SERVED.items():
        if points := _found(found, name):
            by_id[name] = (label, _medians(points))
    columns = sorted({streams for _, values in by_id.values() for streams in values})
    if not columns:
        raise ValueError("no part of the run has figures by streams")
    rows: list[dict[str, Any]] = [
        {"id": name, "label": label, "values": [_rounded(values.get(streams)) for streams in columns]}
        for name, (label, values) in by_id.items()
    ]
    for above, below, label, goal in QUOTIENTS:
        if above in by_id and below in by_id:
            rows.append({"label": label, "divide": [above, below]} | ({"goal": goal} if goal else {}))
    return {
        "machine": machine_key(found["devices"]),
        "date": date,
        "commit": commit,
        "command": COMMAND,
        "corner": f"tok/s, {found['shape']} {found['type'].upper()}, random weights, drafts off; streams",
        "columns": [str(streams) for streams in columns],
        "rows": rows,
    }


def _found(found: Mapping[str, Any], name: str) -> Sequence[Mapping[str, Any]]:
    points: Sequence[Mapping[str, Any]] = found["parts"].get(name, {}).get("found", [])
    return [each for each in points if not each.get("error")]


def _medians(points: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    by_streams: dict[int, list[float]] = {}
    for each in points:
        by_streams.setdefault(each["streams"], []).append(each["decode_tok_s"])
    return {streams: statistics.median(values) for streams, values in by_streams.items()}


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)


def machine_key(devices: Sequence[str]) -> str:
    """Return the name of the machine in machines.json: that of its first device, `cpu` without one."""
    name = devices[0].partition(": ")[2] if devices else "cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def machine_line(found: Mapping[str, Any]) -> str:
    """Return the machine's description in machines.json."""
    device = found["devices"][0].partition(": ")[2] if found["devices"] else "no GPU"
    return f"{device}; {found['machine']['cores']} cores of an {found['machine']['cpu']}"


def as_text(measurement: Mapping[str, Any]) -> str:
    """Return the JSON, one line for each row."""
    head = {name: value for name, value in measurement.items() if name != "rows"}
    lines = ",\n".join(f"    {json.dumps(row)}" for row in measurement["rows"])
    return json.dumps(head, indent=2).removesuffix("\n}") + f',\n  "rows": [\n{lines}\n  ]\n}}\n'


def keep(path: Path, results: Path = RESULTS) -> Path:
    """Write gpu.json and the machine's line in machines.json below `results`. Raises OSError or ValueError."""
    found = json.loads(path.read_text())
    commit = str(found["machine"].get("commit", ""))
    if not re.fullmatch(r"[0-9a-f]{7,40}", commit):  # the host had no git; it ran this checkout
        commit = str(machine.facts()["commit"])
    date = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC).date().isoformat()
    measurement = kept(found, date, commit.removesuffix("-dirty")[:7])
    machines: dict[str, str] = json.loads((results / "machines.json").read_text())
    machines[measurement["machine"]] = machine_line(found)
    (results / "machines.json").write_text(json.dumps(machines, indent=2) + "\n")
    (results / "gpu.json").write_text(as_text(measurement))
    return results / "gpu.json"
