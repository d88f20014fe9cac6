"""Measures a slice's cost curves at start: how long a native step takes by rows. Cached, since it takes seconds.

Decode rows stand in lanes of their own and all want the stage's output; prefill rows stand in one lane and want none
of the head. Short contexts: what longer ones cost is learned from real steps.
"""

from __future__ import annotations

import hashlib
import os
import platform
import statistics
import time
from collections.abc import Iterable
from pathlib import Path

import llama_cpp
import msgspec

from stage.curves import Curves
from stage.native import NativeEngine
from wire.curve import LADDER, CostCurve

BUDGET_S = 4.0  # of one calibration; the ladder stops where it is spent and the last slope goes on
REPEATS = 3
PREFILL_LADDER = (4, 8, 16, 32, 64, 128, 256)
CACHE_VERSION = 1


class _Stored(msgspec.Struct, frozen=True):
    decode: list[tuple[int, int]]
    prefill: list[tuple[int, int]]


def calibrate(engine: NativeEngine, budget_s: float = BUDGET_S) -> Curves:
    """Measure both curves. The engine must be idle; its lanes are empty again afterwards."""
    deadline_s = time.monotonic() + budget_s
    decode = CostCurve(_measure(engine, LADDER, deadline_s - budget_s / 3, in_one_lane=False))
    if not engine.is_last:
        more = [rows for rows in PREFILL_LADDER if rows > LADDER[-1]]
        tail = _measure(engine, more, deadline_s, in_one_lane=True)
        return Curves(decode, CostCurve([*decode.points(), *tail]))
    return Curves(decode, CostCurve(_measure(engine, PREFILL_LADDER, deadline_s, in_one_lane=True)))


def _measure(
    engine: NativeEngine, ladder: Iterable[int], deadline_s: float, *, in_one_lane: bool
) -> list[tuple[int, float]]:
    n_lanes = engine.config.n_lanes
    points: list[tuple[int, float]] = []
    for n_rows in ladder:
        wanted_rows = 1 if in_one_lane else n_rows
        if n_rows > engine.max_rows or (engine.is_last and wanted_rows > engine.max_wanted):
            break
        if -(-n_rows // n_lanes) > engine.config.ctx_tokens or (in_one_lane and n_rows > engine.config.ctx_tokens):
            break
        durations_ns: list[int] = []
        for _ in range(REPEATS):
            for row in range(n_rows):
                engine.seq_ids[row] = 0 if in_one_lane else row % n_lanes
                engine.positions[row] = row if in_one_lane else row // n_lanes
                engine.wants[row] = row >= n_rows - wanted_rows
            engine.input_rows[:n_rows] = 0.01
            started_ns = time.monotonic_ns()
            engine.decode(n_rows)
            durations_ns.append(time.monotonic_ns() - started_ns)
            for lane in range(1 if in_one_lane else min(n_rows, n_lanes)):
                engine.clear(lane)
            if time.monotonic() > deadline_s:
                break
        points.append((n_rows, statistics.median(durations_ns)))
        if time.monotonic() > deadline_s:
            break
    return points


def cached_curves(engine: NativeEngine, cache_dir: Path | None = None) -> Curves:
    """Return the curves from the cache, or measure and remember them.

    The key covers what changes them: artifact, threads, device, KV type, processor and llama.cpp's version.
    """
    try:
        stored = msgspec.json.decode(_path(engine, cache_dir).read_bytes(), type=_Stored)
    except (OSError, msgspec.MsgspecError):
        return fresh_curves(engine, cache_dir)  # not measured yet, or a file nobody can use
    return Curves(CostCurve(stored.decode), CostCurve(stored.prefill))


def fresh_curves(engine: NativeEngine, cache_dir: Path | None = None) -> Curves:
    """Measure, remember, return."""
    curves = calibrate(engine)
    path = _path(engine, cache_dir)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_bytes(msgspec.json.encode(_Stored(curves.decode.points(), curves.prefill.points())))
        scratch.replace(path)
    except OSError:
        pass  # measured again at the next start
    return curves


def _path(engine: NativeEngine, cache_dir: Path | None) -> Path:
    return (cache_dir or _cache_dir()) / "curves" / f"{_key(engine)}.json"


def _cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relayline"


def _key(engine: NativeEngine) -> str:
    config, artifact = engine.config, engine.artifact
    parts = (CACHE_VERSION, artifact.pipeline_id, artifact.stage_index, config.n_threads, config.gpu_layers,
             config.kv_type, min(config.n_lanes, LADDER[-1]), config.max_rows, llama_cpp.__version__,
             platform.processor(), platform.node(), os.cpu_count())  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
