"""The memory that a sliding window saves where only its cells are kept: `python -m benches.windows [--quick]`.

The first six layers of Gemma 3 1B's shape, five of them with a window of 512 tokens, with cells of its own for each
lane. Two engines take turns, so that a drifting machine affects both alike: one keeps all cells, one those of windows.
Lanes read a text to a length; then the fastest of some steps counts. A checkpoint is what an engine keeps to come back
to a position, and the only way back to where a window is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from llama_cpp import llama_cpp as llama
from rich.console import Console
from rich.table import Table

from benches import machine
from benches.arguments import number, numbers
from benches.contexts import step_ms
from benches.models import SHAPES, model
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.planner.instance import Load
from relayline.coordinator.planner.memory import stage_memory
from relayline.deploy.models.splits import split_for
from relayline.deploy.planning.shapes import shape_of
from relayline.deploy.testing.engines import engine_config
from relayline.stage.engine.native import NativeEngine
from relayline.wire.common.units import MIB

N_LAYERS = 6  # of the slice; the last of them has no window
KEPT = ("all", "window")
CHUNK = 256  # rows of a prompt's step
LANES = 4
REPEATS = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One figure of both engines."""

    context: int
    what: str
    values: dict[str, float]  # by what is kept


def read(engine: NativeEngine, lane: int, n_tokens: int) -> float:
    """Let an empty lane read a text; returns the milliseconds of its last chunk."""
    rows = np.random.default_rng(lane).standard_normal((CHUNK, engine.n_embd), np.float32)
    for first in range(0, n_tokens, CHUNK):
        n_rows = min(CHUNK, n_tokens - first)
        engine.seq_ids[:n_rows], engine.positions[:n_rows] = lane, np.arange(first, first + n_rows)
        engine.input_rows[:n_rows] = rows[:n_rows]
        started_ns = time.thread_time_ns()
        engine.decode(n_rows)
        took_ns = time.thread_time_ns() - started_ns
    return took_ns / 1e6


def fastest(engines: dict[str, NativeEngine], run: Callable[[NativeEngine], float]) -> dict[str, float]:
    """Return the least of some runs of each engine, in turns."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(REPEATS):
        for name, engine in engines.items():
            found[name].append(run(engine))
    return {name: min(values) for name, values in found.items()}


def _there_and_back(engine: NativeEngine) -> float:
    """Return the milliseconds of one checkpoint of lane 0 and of one way back to it."""
    n_tokens = engine.lane_tokens(0)
    started_ns = time.thread_time_ns()
    engine.checkpoint(0)
    took_ns = time.thread_time_ns() - started_ns
    step_ms(engine, [0], [n_tokens])
    started_ns = time.thread_time_ns()
    engine.drop_from(0, n_tokens)
    return (took_ns + time.thread_time_ns() - started_ns) / 1e6


def measure(engines: dict[str, NativeEngine], n_tokens: int) -> list[Point]:
    """Return the points of one context."""
    for engine in engines.values():
        for lane in range(LANES):
            engine.clear(lane)
    chunks: dict[str, list[float]] = {name: [] for name in engines}
    for lane in range(LANES):
        for name, engine in engines.items():
            chunks[name].append(read(engine, lane, n_tokens))
    chunk = {name: min(values) for name, values in chunks.items()}
    points = [Point(n_tokens, f"last chunk of {CHUNK} rows, ms", chunk)]
    for lanes in (1, LANES):
        ms = fastest(engines, lambda engine, lanes=lanes: step_ms(  # type: ignore[misc]
            engine, list(range(lanes)), [n_tokens] * lanes, time.thread_time_ns))  # fmt: skip
        points.append(Point(n_tokens, f"decode step of {lanes} lanes, ms", ms))
    points.append(Point(n_tokens, "checkpoint and back, ms", fastest(engines, _there_and_back)))
    partial = llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
    window = engines["window"]
    n_bytes = llama.llama_state_seq_get_size_ext(window._context, 0, partial)
    points.append(Point(n_tokens, "one checkpoint, MiB", {"all": 0.0, "window": n_bytes / MIB}))
    return points


def show(points: Sequence[Point]) -> None:
    """Print the table."""
    table = Table("context", "what", *(f"{name} cells" for name in KEPT), title="layers with a sliding window")
    for point in points:
        table.add_row(f"{point.context:,}", point.what, *(f"{point.values[name]:.2f}" for name in KEPT))
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benches.windows", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a toy model and short texts: checks the bench itself")
    parser.add_argument("--contexts", type=numbers, default=(), help="tokens that lanes hold, such as 2048,16384")
    parser.add_argument("--threads", type=number, default=1, help="of a native step")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args(argv)
    contexts = options.contexts or ((512, 1_024) if options.quick else (2_048, 8_192, 16_384))
    base = SHAPES["toy-windows" if options.quick else "gemma3-1b"]
    shape = dataclasses.replace(base, name=f"{base.name}-slice", n_layers=N_LAYERS + 2, n_vocab=512)
    path = model(shape, "q4_0")
    artifact = split_for(path, None, (N_LAYERS,), None) / "stage-0.gguf"
    ctx_tokens = max(contexts) + CHUNK
    with contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(NativeEngine(engine_config(
                artifact, LANES, ctx_tokens, CHUNK, options.threads, kv_layout="per-lane", window_cells=name)))
            for name in KEPT
        }  # fmt: skip
        points = [point for context in contexts for point in measure(engines, context)]
    sizes = shape_of(inspect_model(path))
    kv = {
        name: stage_memory(sizes, Load(ctx_tokens, LANES, kv_layout="per-lane", window_cells=name, max_rows=CHUNK), 0,
                           N_LAYERS).kv_bytes / MIB
        for name in KEPT
    }  # fmt: skip
    points.append(Point(ctx_tokens, f"KV cells and checkpoints of {LANES} lanes, MiB", kv))
    show(points)
    results = {"points": [dataclasses.asdict(point) for point in points], "threads": options.threads}
    machine.write_json(options.out / "windows.json", {"machine": machine.facts(), **results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
