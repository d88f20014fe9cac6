"""The cost of the native engine over a bare llama_decode on the same slice: `python -m benches.bench_engine [--quick]`.

The models are a random Q4_0 llama, made in a temporary directory, and the demo's hybrid in two stages. The engine and a
bare ctypes loop (no capture callback; norm and head computed) decode the same rows in turns, so that a drifting machine
affects both. The bench prints medians, their ratio, and the ratio of minima, which a busy machine disturbs least. The
goal is a ratio of at most 1.03, or 1.05 for the hybrid. A ratio below 1 means that stopping before norm and head saved
more than the engine costs.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from llama_cpp import llama_cpp as llama

from benches.arguments import number
from relayline.coordinator.model.split import split_model
from relayline.deploy.testing.engines import engine_config
from relayline.deploy.testing.paths import HYBRID_DEMO_MODEL
from relayline.deploy.testing.tiny_slices import TinyShape, write_stage
from relayline.stage.engine.native import NativeEngine
from relayline.wire.settings.table import EngineSettings

ROW_COUNTS = (1, 4, 8, 32)
GOAL_RATIO, HYBRID_GOAL_RATIO = 1.03, 1.05
FULL = TinyShape(n_layers=5, n_embd=1024, n_heads=16, n_kv_heads=4, n_ff=2816, n_vocab=4096)
QUICK = TinyShape(n_layers=3, n_embd=256, n_heads=4, n_kv_heads=2, n_ff=512, n_vocab=512)


class BareLoop:
    """The minimum that decodes hidden rows: one context with the engine's parameters, and llama.cpp's own batch."""

    def __init__(self, path: Path, settings: EngineSettings, n_embd: int) -> None:
        self._model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        params.n_ctx = settings.n_lanes * settings.ctx_tokens
        params.n_batch = params.n_ubatch = settings.max_rows
        params.n_seq_max = settings.n_lanes
        params.n_threads = params.n_threads_batch = settings.n_threads
        params.kv_unified, params.swa_full, params.no_perf = True, True, True
        self._context = llama.llama_init_from_model(self._model, params)
        self._batch: Any = llama.llama_batch_init(settings.max_rows, n_embd, 1)
        self.rows = np.ctypeslib.as_array(self._batch.embd, (settings.max_rows, n_embd))
        self.n_lanes = settings.n_lanes
        for row in range(settings.max_rows):
            self._batch.n_seq_id[row], self._batch.seq_id[row][0], self._batch.logits[row] = 1, row, 1

    def step(self, n_rows: int, position: int) -> None:
        """Decode one row of each of `n_rows` lanes and wait for it."""
        self._batch.n_tokens = n_rows
        for row in range(n_rows):
            self._batch.pos[row] = position
        assert llama.llama_decode(self._context, self._batch) == 0
        llama.llama_synchronize(self._context)

    def clear(self) -> None:
        """Empty the cache."""
        llama.llama_memory_clear(llama.llama_get_memory(self._context), ctypes.c_bool(False))

    def close(self) -> None:
        """Free everything native."""
        llama.llama_batch_free(self._batch)
        llama.llama_free(self._context)
        llama.llama_model_free(self._model)


def engine_step(engine: NativeEngine, n_rows: int, position: int) -> None:
    """The same step through the engine, including its caller's work."""
    engine.positions[:n_rows] = position
    engine.decode(n_rows)
    if engine.is_last:
        engine.logits(n_rows - 1)


def measure(engine: NativeEngine, bare: BareLoop, n_rows: int, n_steps: int) -> dict[str, float]:
    """Median step time of each in milliseconds, over `n_steps` alternating decode steps of `n_rows` lanes."""
    times_ns: dict[str, list[int]] = {"bare": [], "engine": []}
    steps = {
        "bare": lambda position: bare.step(n_rows, position),
        "engine": lambda position: engine_step(engine, n_rows, position),
    }
    for position in range(n_steps + 2):
        # The second of the two finds warm caches, so they take turns.
        for name in sorted(steps, reverse=position % 2 == 0):
            started_ns = time.perf_counter_ns()
            steps[name](position)
            if position >= 2:  # the first two build graphs
                times_ns[name].append(time.perf_counter_ns() - started_ns)
    bare.clear()
    for lane in range(n_rows):
        engine.clear(lane)
    bare_ms, engine_ms = (statistics.median(times_ns[name]) / 1e6 for name in ("bare", "engine"))
    of_minima = min(times_ns["engine"]) / min(times_ns["bare"])
    return {"bare_ms": bare_ms, "engine_ms": engine_ms, "ratio": engine_ms / bare_ms, "of_minima": of_minima}


def slices(shape: TinyShape, directory: Path) -> dict[str, Path]:
    """Return a stage without a head and one with it, for a model of this shape and for the hybrid demo model."""
    found = {
        kind: write_stage(directory / f"{kind}.gguf", shape, index, cuts)
        for kind, index, cuts in (("not last", 0, [shape.n_layers - 1]), ("last", 1, [1]))
    }
    pipeline = split_model(HYBRID_DEMO_MODEL, directory / "hybrid", n_stages=2)
    hybrid = {"hybrid, not last": pipeline.stages[0].file, "hybrid, last": pipeline.stages[1].file}
    return found | {kind: directory / "hybrid" / file for kind, file in hybrid.items()}


def run(shape: TinyShape, n_steps: int, n_threads: int) -> list[dict[str, float | int | str]]:
    """Measure each slice at every row count."""
    results: list[dict[str, float | int | str]] = []
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as directory:
        for kind, path in slices(shape, Path(directory)).items():
            config = engine_config(path, max(ROW_COUNTS), 512, max_rows=max(ROW_COUNTS), n_threads=n_threads)
            with NativeEngine(config) as engine:
                bare = BareLoop(path, config.settings, engine.n_embd)
                engine.input_rows[:] = rng.standard_normal(engine.input_rows.shape, np.float32)
                engine.seq_ids[:] = range(engine.max_rows)
                bare.rows[:] = engine.input_rows
                for n_rows in ROW_COUNTS:
                    results.append({"stage": kind, "rows": n_rows, **measure(engine, bare, n_rows, n_steps)})
                bare.close()
    return results


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line per stage kind and row count, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a toy model and few steps: checks the bench itself")
    parser.add_argument("--threads", type=number, default=1)
    parser.add_argument("--steps", type=number, default=None, help="steps per row count (default 60, quick 10)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    shape = QUICK if options.quick else FULL
    shape = TinyShape(**{**shape.__dict__, "type": gguf.GGMLQuantizationType.Q4_0})
    results = run(shape, options.steps or (10 if options.quick else 60), options.threads)
    if options.json:
        print(json.dumps({"goal_ratio": GOAL_RATIO, "n_threads": options.threads, "results": results}))
        return
    print(f"goal: ratio <= {GOAL_RATIO}, for the hybrid {HYBRID_GOAL_RATIO}")
    print(f"{'stage':>16} {'rows':>5} {'bare ms':>9} {'engine ms':>10} {'ratio':>7} {'of minima':>10}")
    row = "{stage:>16} {rows:>5} {bare_ms:>9.3f} {engine_ms:>10.3f} {ratio:>7.3f} {of_minima:>10.3f}"
    for result in results:
        print(row.format(**result))


if __name__ == "__main__":
    main()
