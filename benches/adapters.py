"""What a LoRA adapter costs a step, and what a change of adapters costs: `python -m benches.adapters [--quick]`.

The first layers of a 1B shape as one stage, with two adapters of rank 16 on all seven matrices of a layer. One engine
runs steps without an adapter, steps with one, and steps that change between two, in turns, so that a drifting machine
affects all alike. The fastest of some steps of each kind counts, in processor time.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benches import machine
from benches.arguments import number, numbers
from benches.models import SHAPES, model
from relayline.deploy.models.splits import split_for
from relayline.deploy.testing.engines import engine_config
from relayline.deploy.testing.tiny_adapters import adapter_of, make_adapter
from relayline.stage.engine.native import NativeEngine

N_LAYERS = 8  # of the slice
RANK = 16
CONTEXT = 64  # tokens of each lane before the step
REPEATS = 40
KINDS = ("no adapter", "one adapter", "another adapter than the step before")


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """Milliseconds of a step of so many rows, by kind."""

    n_rows: int
    values: dict[str, float]


def fill(engine: NativeEngine, n_lanes: int) -> None:
    """Let each lane hold CONTEXT tokens."""
    for position in range(CONTEXT):
        engine.seq_ids[:n_lanes], engine.positions[:n_lanes] = np.arange(n_lanes), position
        engine.input_rows[:n_lanes] = 0.01
        engine.decode(n_lanes)


def step_ms(engine: NativeEngine, n_rows: int, adapter: int) -> float:
    """Run one step of as many lanes, undo it, and return its processor time."""
    engine.seq_ids[:n_rows], engine.positions[:n_rows] = np.arange(n_rows), CONTEXT
    engine.input_rows[:n_rows] = 0.01
    started_ns = time.thread_time_ns()
    engine.decode(n_rows, adapter=adapter)
    took_ns = time.thread_time_ns() - started_ns
    for lane in range(n_rows):
        engine.drop_from(lane, CONTEXT)
    return took_ns / 1e6


def measure(engine: NativeEngine, n_rows: int) -> Point:
    """Return the fastest step of each kind; a change of kinds is no step of either."""
    changing: Iterator[int] = itertools.cycle((1, 2))
    chosen = {KINDS[0]: itertools.repeat(0), KINDS[1]: itertools.repeat(1), KINDS[2]: changing}
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(REPEATS):
        for kind, adapters in chosen.items():
            step_ms(engine, n_rows, next(adapters))
            found[kind].append(step_ms(engine, n_rows, next(adapters)))
    return Point(n_rows, {kind: min(values) for kind, values in found.items()})


def show(points: Sequence[Point]) -> None:
    """Print the table."""
    table = Table("rows", *KINDS, title="a step with LoRA adapters, ms of processor time")
    for point in points:
        table.add_row(str(point.n_rows), *(f"{point.values[kind]:.2f}" for kind in KINDS))
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benches.adapters", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a toy model: checks the bench itself")
    parser.add_argument("--rows", type=numbers, default=(1, 8, 32), help="rows of a step, such as 1,8,32")
    parser.add_argument("--threads", type=number, default=1, help="of a native step")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args(argv)
    base = SHAPES["toy" if options.quick else "llama-1b"]
    n_layers = min(N_LAYERS, base.n_layers - 2)
    path = model(dataclasses.replace(base, name=f"{base.name}-slice", n_layers=n_layers + 2, n_vocab=512), "q4_0")
    artifact = split_for(path, None, (n_layers,), None) / "stage-0.gguf"
    options.out.mkdir(parents=True, exist_ok=True)
    adapters = [
        adapter_of(
            make_adapter(
                path,
                options.out / f"{name}.gguf",
                seed=seed,
                rank=RANK,
                dtype=np.float16,
                changes=("blk.*.attn_*.weight", "blk.*.ffn_*.weight"),
            ),
            name,
        )
        for seed, name in enumerate(("first", "second"), 1)
    ]
    most = max(options.rows)
    config = engine_config(artifact, most, 256, most, options.threads, adapters=tuple(adapters))
    with NativeEngine(config) as engine:
        fill(engine, most)
        points = [measure(engine, n_rows) for n_rows in options.rows]
    show(points)
    results = {"points": [dataclasses.asdict(point) for point in points], "threads": options.threads}
    machine.write_json(options.out / "adapters.json", {"machine": machine.facts(), **results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
