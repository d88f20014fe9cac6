"""Finds the quickest weight type for each batch size: `python -m benches.quantisation [--quick]`.

One slice of a 1B-shape llama per type, without head, random blocks; one decode step of M streams through
`NativeEngine`, on one thread. With one row a step costs as much as reading the weights, so few bits win. With more rows
the weights are read once for all of them, and the arithmetic of unpacking decides. So the order of types changes, and
the bench prints where. The types take turns, so a drifting machine affects all alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benches import machine, plot
from benches.arguments import number, some_of
from benches.models import MIXES, SHAPES, Shape, matrices, model
from relayline.deploy.models.splits import split_for
from relayline.deploy.testing.engines import engine_config
from relayline.stage.engine.native import NativeEngine
from relayline.wire.common.errors import RelaylineError

TYPES = ("q4_0", "q8_0", "f16", "q4_k", "iq2_xxs", "mxfp4", "nvfp4")
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
CTX_TOKENS = 64
CLEAR = 0.03  # two times closer than this share are equal
CERTAIN = 0.10  # a difference of this share is certain without a second number of rows


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """The bytes that one step of a slice reads, and its arithmetic."""

    weight_bytes: int  # of the matrices that a step multiplies with
    n_weights: int


def slice_shape(quick: bool) -> Shape:
    """Return the shape of the models; its last layer is cut off, so that the slice before it has no head."""
    base = SHAPES["toy" if quick else "llama-1b"]
    return dataclasses.replace(base, name=f"{base.name}-slice", n_layers=3 if quick else 4, n_vocab=512)


def slice_facts(shape: Shape, mix: str) -> Slice:
    """Return the size of the first n_layers - 1 blocks."""
    last = f"blk.{shape.n_layers - 1}."
    used = [m for m in matrices(shape, mix) if m.name.startswith("blk.") and not m.name.startswith(last)]
    used = [matrix for matrix in used if matrix.constant is None]
    return Slice(sum(matrix.size_bytes for matrix in used), sum(matrix.n_out * matrix.n_in for matrix in used))


def open_slice(shape: Shape, mix: str, n_threads: int) -> NativeEngine:
    """Make, cut and load a slice. Raises RelaylineError where llama.cpp cannot load the type."""
    directory = split_for(model(shape, mix), None, (shape.n_layers - 1,), None)
    config = engine_config(
        directory / "stage-0.gguf", n_lanes=max(ROWS), ctx_tokens=CTX_TOKENS, max_rows=max(ROWS), n_threads=n_threads
    )
    engine = NativeEngine(config)
    engine.input_rows[:] = np.random.default_rng(1).standard_normal(engine.input_rows.shape, np.float32)
    engine.seq_ids[:] = range(engine.max_rows)
    return engine


def step_ms(engine: NativeEngine, n_rows: int, position: int) -> float:
    """Return the time of one decode step of `n_rows` lanes at one position."""
    engine.positions[:n_rows] = position
    started_ns = time.perf_counter_ns()
    engine.decode(n_rows)
    return (time.perf_counter_ns() - started_ns) / 1e6


def measure(engines: dict[str, NativeEngine], n_steps: int) -> dict[str, dict[int, list[float]]]:
    """Return every step time, ms, by type and rows."""
    times: dict[str, dict[int, list[float]]] = {name: {} for name in engines}
    for n_rows in ROWS:
        for position in range(n_steps + 1):
            for name, engine in engines.items():
                took_ms = step_ms(engine, n_rows, position)
                if position:  # the first one builds the graph
                    times[name].setdefault(n_rows, []).append(took_ms)
        for engine in engines.values():
            for lane in range(n_rows):
                engine.clear(lane)
        print(f"{n_rows} rows measured", file=sys.stderr, flush=True)
    return times


def crossings(rows: Sequence[int], first: Sequence[float], second: Sequence[float]) -> list[tuple[int, str]]:
    """Return where the quicker of two types changes: (rows, "first" or "second") for each change. Pure. The first entry
    is the first type that is certainly quicker. Times within CLEAR of each other change nothing. A lead of less than
    CERTAIN counts only if the next clear one confirms it, since steps of a shared machine are noisy.
    """
    lead = [_leader(a, b, CLEAR) for a, b in zip(first, second, strict=True)]
    found: list[tuple[int, str]] = []
    for at, n_rows in enumerate(rows):
        following = next((leader for leader in lead[at + 1 :] if leader), None)
        is_so = lead[at] and (lead[at] == following or _leader(first[at], second[at], CERTAIN))
        if is_so and (not found or found[-1][1] != lead[at]):
            found.append((n_rows, lead[at]))
    return found


def _leader(first: float, second: float, clear: float) -> str:
    if abs(first - second) <= clear * min(first, second):
        return ""
    return "first" if first < second else "second"


def figures(times: dict[str, dict[int, list[float]]], facts: dict[str, Slice]) -> list[dict[str, Any]]:
    """Return one entry per type and number of rows."""
    found: list[dict[str, Any]] = []
    for name, by_rows in times.items():
        for n_rows, measured in by_rows.items():
            median_s = statistics.median(measured) / 1e3
            found.append(
                {
                    "type": name,
                    "rows": n_rows,
                    "step_ms": median_s * 1e3,
                    "step_ms_min": min(measured),
                    "weight_bytes": facts[name].weight_bytes,
                    "gb_per_s": facts[name].weight_bytes / median_s / 1e9,
                    "gflop_per_s": 2 * facts[name].n_weights * n_rows / median_s / 1e9,
                }
            )
    return found


def pairs(found: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return, for every pair of types, the quicker one from each number of rows on, by the quickest step of each."""
    ms = {(entry["type"], entry["rows"]): entry["step_ms_min"] for entry in found}
    result: list[dict[str, Any]] = []
    for first, second in itertools.combinations(names, 2):
        changes = crossings(ROWS, [ms[first, n] for n in ROWS], [ms[second, n] for n in ROWS])
        named = [{"from_rows": n, "quicker": first if who == "first" else second} for n, who in changes]
        result.append({"pair": [first, second], "changes": named})
    return result


def show(results: dict[str, Any]) -> None:
    """Print the table and the crossings."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    table = Table(title="ms per step; GB/s of weights; GFLOP/s", title_justify="left")
    table.add_column("type")
    table.add_column("MiB")
    for n_rows in ROWS:
        table.add_column(str(n_rows), justify="right")
    for name in results["types"]:
        mine = {entry["rows"]: entry for entry in results["figures"] if entry["type"] == name}
        cells = [f"{mine[n]['step_ms']:.2f}\n{mine[n]['gb_per_s']:.1f}\n{mine[n]['gflop_per_s']:.0f}" for n in ROWS]
        table.add_row(name, f"{mine[1]['weight_bytes'] / 2**20:.0f}", *cells)
    console.print(table)
    for pair in results["pairs"]:
        changes = ", ".join(f"{change['quicker']} from {change['from_rows']}" for change in pair["changes"])
        console.print(f"  {' / '.join(pair['pair'])}: {changes or 'no difference'}")
    for name, why in results["left_out"].items():
        console.print(f"left out: {name}: {why}")


def run(*, quick: bool, n_threads: int, n_steps: int, names: Sequence[str] = TYPES) -> dict[str, Any]:
    """Measure and return the results, JSON-ready."""
    shape = slice_shape(quick)
    engines: dict[str, NativeEngine] = {}
    left_out: dict[str, str] = {}
    try:
        for name in names:
            try:
                engines[name] = open_slice(shape, name, n_threads)
            except RelaylineError as error:
                left_out[name] = error.message
        facts = {name: slice_facts(shape, name) for name in engines}
        found = figures(measure(engines, n_steps), facts)
    finally:
        for engine in engines.values():
            engine.close()
    return {
        "machine": machine.facts(),
        "shape": dataclasses.asdict(shape),
        "n_threads": n_threads,
        "n_steps": n_steps,
        "types": list(engines),
        "left_out": left_out,
        "figures": found,
        "pairs": pairs(found, list(engines)),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write quantisation.json and quantisation.png."""
    parser = argparse.ArgumentParser(prog="python -m benches.quantisation", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a toy slice and few steps: checks the bench itself")
    parser.add_argument("--types", type=some_of(MIXES), default=TYPES, help=f"some of {','.join(MIXES)}")
    parser.add_argument("--threads", type=number, default=1)
    parser.add_argument("--steps", type=number, default=0, help="per type and number of rows [default: 7, quick 3]")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args(argv)
    n_steps = options.steps or (3 if options.quick else 7)
    if not 0 < n_steps < CTX_TOKENS:
        parser.error(f"--steps must be between 1 and {CTX_TOKENS - 1}")
    results = run(quick=options.quick, n_threads=options.threads, n_steps=n_steps, names=options.types)
    machine.write_json(options.out / "quantisation.json", results)
    show(results)
    series = {
        name: {entry["rows"]: entry for entry in results["figures"] if entry["type"] == name}
        for name in results["types"]
    }
    panels: list[plot.Panel] = [
        (title, scale, {name: (list(ROWS), [mine[n][key] / (n if per_row else 1) for n in ROWS])
                        for name, mine in series.items()})
        for title, scale, key, per_row in (
            ("ms per step", "log", "step_ms", False),
            ("ms per row", "log", "step_ms", True),
            ("GFLOP/s", "linear", "gflop_per_s", False),
        )
    ]  # fmt: skip
    plot.lines(options.out / "quantisation.png", f"{results['shape']['name']}, {options.threads} thread", panels)


if __name__ == "__main__":
    main()
