"""The measurements of `python -m benches.gpu`, after llama.cpp was built: this module loads its libraries."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benches import compare, interrupt, machine, plot
from benches.gpu import short, steps
from benches.gpu.what import MANY_STREAMS, QUICK_MANY_STREAMS, QUICK_STREAMS, SHORT_STREAMS
from benches.models import SHAPES, model
from benches.peers import Kernels, Peers
from relayline.deploy.models.splits import split_for
from relayline.stage.engine import ggml


def main(options: argparse.Namespace, peers: Peers | None, began_ns: int) -> int:
    """Measure; exit code 1 if a run did not count. Raises RelaylineError."""
    gpus = ggml.gpus()
    gpu_layers = -1 if gpus else 0
    print("on " + (", ".join(gpus) or "this processor: llama.cpp sees no GPU"), file=sys.stderr, flush=True)
    if options.minutes:
        return in_minutes(options, peers, gpus, began_ns + int(options.minutes * 60e9))
    entries = by_rows(options, peers, gpu_layers)
    show(entries)
    draw(entries, options.out / "gpu-steps.png")
    results: dict[str, Any] = {"machine": machine.facts(), "devices": gpus, "shape": options.shape, "steps": entries}
    machine.write_json(options.out / "gpu-steps.json", results)
    return interrupt.run(pipeline(options, peers, gpu_layers))


def by_rows(options: argparse.Namespace, peers: Peers | None, gpu_layers: int) -> list[dict[str, float]]:
    """Measure steps of the whole model."""
    path = model(SHAPES[options.shape], options.type)
    artifact = split_for(path, 1, None, None) / "stage-0.gguf"
    n_threads = len(os.sched_getaffinity(0))
    command = steps.bare_command(peers, path, options.rows, n_threads, gpu_layers) if peers else None
    with steps.open_engine(artifact, max(options.rows), n_threads, gpu_layers) as engine:
        return steps.measure(engine, command, options.rows, options.repeats)


def show(entries: Sequence[dict[str, float]]) -> None:
    """Print the steps as a table."""
    table = Table(title=f"a step of the whole model (goal: ratio <= {steps.GOAL_RATIO})", title_justify="left")
    columns = ("rows", "engine_ms", "row_ms", "tok_s", "bare_ms", "ratio")
    for name in columns:
        table.add_column(name, justify="right")
    for each in entries:
        table.add_row(*(f"{each[name]:.3f}".rstrip("0").rstrip(".") if name in each else "-" for name in columns))
    Console().print(table)


def draw(entries: Sequence[dict[str, float]], path: Path) -> None:
    """Plot the cost curve."""
    rows = [int(each["rows"]) for each in entries]
    lines: dict[str, tuple[Sequence[float], Sequence[float]]] = {
        "engine": (rows, [each["engine_ms"] for each in entries])
    }
    if "bare_ms" in entries[0]:
        lines["llama-batched-bench"] = (rows, [each["bare_ms"] for each in entries])
    plot.lines(path, "a step of the whole model", [("ms", "log", lines)])


async def pipeline(options: argparse.Namespace, peers: Peers | None, gpu_layers: int) -> int:
    """Two stages as two processes on one GPU, over HTTP."""
    arguments = [
        "--shape", options.shape, "--type", options.type, "--streams", ",".join(map(str, options.streams)),
        "--systems", "auto,single,unsplit", "--repeats", str(options.repeats), "--only-streams",
        "--gpu-layers", str(gpu_layers), "--cores", str(len(os.sched_getaffinity(0))),
        "--tokens", str(options.tokens or (8 if options.quick else 64)),
    ]  # fmt: skip
    rivals = {Kernels.SHIPPED: peers} if peers else {}  # on a GPU they are the same
    plan = compare.plan_of(compare.parse(arguments), rivals)
    return await compare.compare(plan, rivals, options.out / "gpu-streams", wants_peers=True)


def in_minutes(options: argparse.Namespace, peers: Peers | None, gpus: Sequence[str], deadline_ns: int) -> int:
    """Measure the parts that fit a short time."""
    streams = options.streams or (QUICK_STREAMS if options.quick else SHORT_STREAMS)
    n_tokens = options.tokens or (8 if options.quick else 128)
    repeats = 1 if options.quick else 2
    many = QUICK_MANY_STREAMS if options.quick else MANY_STREAMS
    plan = short.Plan(options.shape, options.type, streams, n_tokens, repeats, -1 if gpus else 0, options.out, many)
    return interrupt.run(short.run(plan, peers, {"devices": gpus}, deadline_ns, options.parts))
