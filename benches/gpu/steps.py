"""One decode step of a whole model by its rows: the engine and `llama-batched-bench` in turns.

Both decode one row of each of M streams after a prompt of PROMPT_TOKENS, in a cache that streams share, and compute the
head for every row. The bench compares their means over the same N_STEPS positions.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benches.peers import Peers
from relayline.deploy.testing.engines import engine_config
from relayline.stage.engine.native import NativeEngine
from relayline.wire.common.errors import RelaylineError
from relayline.wire.common.kv_layout import count_cells

PROMPT_TOKENS, N_STEPS = 16, 32
CTX_TOKENS = PROMPT_TOKENS + N_STEPS + 8
GOAL_RATIO = 1.03


class BareError(RelaylineError):
    """`llama-batched-bench` did not print all figures. The text ends with its last line."""


def open_engine(artifact: Path, rows_max: int, n_threads: int, gpu_layers: int) -> NativeEngine:
    """Load a whole model as one stage, with a lane for every row."""
    engine = NativeEngine(
        engine_config(
            artifact,
            n_lanes=rows_max,
            ctx_tokens=CTX_TOKENS,
            max_rows=rows_max,
            n_threads=n_threads,
            gpu_layers=gpu_layers,
        )
    )
    engine.input_rows[:] = np.random.default_rng(1).standard_normal(engine.input_rows.shape, np.float32)
    engine.seq_ids[:] = range(rows_max)
    return engine


def engine_ms(engine: NativeEngine, n_rows: int) -> float:
    """Return the mean time of a step of one row of each of n_rows lanes, behind their prompts."""
    for position in range(PROMPT_TOKENS):
        _step(engine, n_rows, position)
    started_ns = time.perf_counter_ns()
    for position in range(PROMPT_TOKENS, PROMPT_TOKENS + N_STEPS):
        _step(engine, n_rows, position)
    took_ms = (time.perf_counter_ns() - started_ns) / 1e6 / N_STEPS
    for lane in range(n_rows):
        engine.clear(lane)
    return took_ms


def _step(engine: NativeEngine, n_rows: int, position: int) -> None:
    engine.positions[:n_rows] = position
    engine.decode(n_rows)
    if engine.is_last:
        engine.logits(n_rows - 1)  # waits for the device


def halves(
    artifacts: Sequence[Path], rows: Sequence[int], n_threads: int, gpu_layers: int, repeats: int
) -> list[dict[str, float]]:
    """Measure the steps of a model's slices, one slice after the other; medians, and their sum as `engine_ms`.

    Compared with the whole model's steps they show what it costs to give rows to the next stage, without another
    process on the device.
    """
    found: list[dict[int, float]] = []
    for artifact in artifacts:
        with open_engine(artifact, max(rows), n_threads, gpu_layers) as engine:
            for n_rows in rows:
                engine_ms(engine, n_rows)
            found.append({n: statistics.median(engine_ms(engine, n) for _ in range(repeats)) for n in rows})
    return [
        entry(n_rows, [sum(each[n_rows] for each in found)], [])
        | {f"stage_{at}_ms": each[n_rows] for at, each in enumerate(found)}
        for n_rows in rows
    ]


def bare_command(peers: Peers, model: Path, rows: Sequence[int], n_threads: int, gpu_layers: int) -> list[str]:
    """Return the command that measures the same steps without relayline."""
    # As many cells as the engine has.
    n_cells = count_cells("unified", max(rows), 0, CTX_TOKENS, max(rows))
    batch = str(max(rows))
    return [
        str(peers.batched_bench), "--model", str(model), "--ctx-size", str(n_cells), "--batch-size", batch,
        "--ubatch-size", batch, "--threads", str(n_threads), "--threads-batch", str(n_threads), "--kv-unified",
        "--n-gpu-layers", "all" if gpu_layers < 0 else str(gpu_layers), "--fit", "off", "--output-format", "jsonl",
        # It may be killed before its last line is written, so it is asked for one more.
        "-npp", str(PROMPT_TOKENS), "-ntg", str(N_STEPS), "-npl", ",".join(map(str, (*rows, 1))),
    ]  # fmt: skip


def bare_ms(command: Sequence[str], rows: Sequence[int]) -> dict[int, float]:
    """Run it and return the mean time of a step by its rows. Raises BareError."""
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    found = parse(ran.stdout)
    if ran.returncode or any(n_rows not in found for n_rows in rows):
        last = (ran.stderr.strip().splitlines() or ["it printed no figures for some rows"])[-1]
        raise BareError(f"llama-batched-bench failed (exit code {ran.returncode}): {last}")
    return found


def parse(text: str) -> dict[int, float]:
    """Return milliseconds of a step by rows, from the program's lines of JSON. Pure. The first of a kind counts."""
    found: dict[int, float] = {}
    for line in text.splitlines():
        if line.startswith("{"):
            figures: dict[str, Any] = json.loads(line)
            found.setdefault(int(figures["pl"]), float(figures["t_tg"]) * 1e3 / int(figures["tg"]))
    return found


def measure(
    engine: NativeEngine, command: Sequence[str] | None, rows: Sequence[int], repeats: int
) -> list[dict[str, float]]:
    """Measure both in turns; one entry for each number of rows, with medians and their ratio."""
    ours: dict[int, list[float]] = {n_rows: [] for n_rows in rows}
    bare: dict[int, list[float]] = {n_rows: [] for n_rows in rows}
    for n_rows in rows:
        engine_ms(engine, n_rows)  # builds graphs, and on a GPU its kernels' choice
    for _ in range(repeats):
        for n_rows, took_ms in (bare_ms(command, rows) if command else {}).items():
            bare[n_rows].append(took_ms)
        for n_rows in rows:
            ours[n_rows].append(engine_ms(engine, n_rows))
    return [entry(n_rows, ours[n_rows], bare[n_rows]) for n_rows in rows]


def entry(n_rows: int, ours_ms: Sequence[float], bare_ms: Sequence[float]) -> dict[str, float]:
    """Return the figures of one number of rows. Pure; without a bare time there is no ratio."""
    median_ms = statistics.median(ours_ms)
    found = {"rows": n_rows, "engine_ms": median_ms, "row_ms": median_ms / n_rows, "tok_s": 1e3 * n_rows / median_ms}
    if bare_ms:
        found |= {"bare_ms": statistics.median(bare_ms), "ratio": median_ms / statistics.median(bare_ms)}
    return found
