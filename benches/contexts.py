"""The cost of a native step when streams have a long context: `python -m benches.contexts [--quick]`.

One slice of a 1B-shape llama, three layers without head, on one thread, with each layout of the KV cache: decode rows,
one of each lane, and chunks of one prompt. All lanes hold a context of computed cells and copies of them. The layouts
take turns, so that a drifting machine affects all alike.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benches import machine
from benches.arguments import number, numbers
from benches.models import model
from benches.quantisation import slice_shape
from relayline.deploy.models.splits import split_for
from relayline.deploy.testing.engines import engine_config
from relayline.stage.engine.native import NativeEngine

COPIED_TOKENS = 16  # cells that are computed first and copied afterwards
MAX_ROWS = 256  # of one step
REPEATS = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "unified": {"kv_layout": "unified", "spare_lanes": 1},
    "per-lane, flash": {"kv_layout": "per-lane", "flash_attn": "on"},
    "per-lane": {"kv_layout": "per-lane"},
}


def step_ms(
    engine: NativeEngine,
    lanes: Sequence[int],
    positions: Sequence[int],
    clock_ns: Callable[[], int] = time.monotonic_ns,
) -> float:
    """Run one step, undo it, and return its time by a clock."""
    n_rows = len(lanes)
    engine.seq_ids[:n_rows], engine.positions[:n_rows] = lanes, positions
    engine.input_rows[:n_rows] = 0.01
    started_ns = clock_ns()
    engine.decode(n_rows)
    took_ns = clock_ns() - started_ns
    for lane in set(lanes):
        engine.drop_from(lane, min(positions))
    return took_ns / 1e6


def fill(engine: NativeEngine, n_lanes: int, n_tokens: int) -> None:
    """Fill every lane with this many cells; positions continue at COPIED_TOKENS."""
    for lane in range(n_lanes):
        engine.seq_ids[:COPIED_TOKENS], engine.positions[:COPIED_TOKENS] = lane, np.arange(COPIED_TOKENS)
        engine.input_rows[:COPIED_TOKENS] = 0.01
        engine.decode(COPIED_TOKENS)
        if not engine.multiply(lane, engine.config.n_sequences - 1, n_tokens // COPIED_TOKENS):
            raise SystemExit("this llama.cpp copies no cells")


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One measured step."""

    context: int
    what: str  # lanes, or rows of a chunk
    ms: dict[str, float]  # by layout, the fastest of the repeats


def measure(
    engines: dict[str, NativeEngine], n_tokens: int, lanes: Sequence[int], chunks: Sequence[int]
) -> list[Point]:
    """Return the points of one context."""
    for engine in engines.values():
        fill(engine, max(lanes), n_tokens)
    steps = [(f"{n} lanes", list(range(n)), [0] * n) for n in lanes]
    steps += [(f"chunk of {n}", [0] * n, list(range(n))) for n in chunks]
    points = []
    for what, rows, offsets in steps:
        ms: dict[str, float] = {}
        for _ in range(REPEATS):
            for name, engine in engines.items():
                took_ms = step_ms(engine, rows, [COPIED_TOKENS + offset for offset in offsets])
                ms[name] = min(took_ms, ms.get(name, took_ms))
        points.append(Point(n_tokens, what, ms))
    for engine in engines.values():
        for lane in range(max(lanes)):
            engine.clear(lane)
    return points


def show(points: Sequence[Point]) -> None:
    """Print the table."""
    table = Table(
        "context", "step", *(f"{name}, ms" for name in LAYOUTS), "unified / per-lane", title="a step by context"
    )
    for point in points:
        ratio = point.ms["unified"] / point.ms["per-lane"]
        table.add_row(f"{point.context:,}", point.what, *(f"{point.ms[name]:.1f}" for name in LAYOUTS), f"{ratio:.2f}")
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benches.contexts", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a toy model and short contexts: checks the bench itself")
    parser.add_argument(
        "--contexts",
        type=numbers,
        default=(),
        help=f"tokens that lanes hold, multiples of {COPIED_TOKENS}, such as 64,1024",
    )
    parser.add_argument("--lanes", type=numbers, default=(), help="lanes of a decode step, such as 1,8")
    parser.add_argument("--threads", type=number, default=1, help="of a native step")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args(argv)
    if any(n_tokens % COPIED_TOKENS for n_tokens in options.contexts):
        parser.error(f"--contexts: contexts are copies of {COPIED_TOKENS} tokens, so give multiples of that")
    contexts = options.contexts or ((32, 128) if options.quick else (64, 256, 512, 1024, 2048))
    lanes = options.lanes or ((1, 4) if options.quick else (1, 4, 8, 16))
    chunks = (4,) if options.quick else (4, 32, 64, 256)
    shape = slice_shape(options.quick)
    artifact = split_for(model(shape, "q4_0"), None, (shape.n_layers - 1,), None) / "stage-0.gguf"
    common: dict[str, Any] = {
        "artifact_path": artifact, "n_lanes": max(lanes), "ctx_tokens": max(contexts) + max(chunks),
        "max_rows": MAX_ROWS, "n_threads": options.threads,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(NativeEngine(engine_config(**common, **layout)))
            for name, layout in LAYOUTS.items()
        }
        points = [point for context in contexts for point in measure(engines, context, lanes, chunks)]
    show(points)
    results = {"points": [dataclasses.asdict(point) for point in points], "threads": options.threads}
    machine.write_json(options.out / "contexts.json", {"machine": machine.facts(), **results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
