"""Measures a slice's cost curves at start: the time of a native step by rows. Cached, since it takes seconds.

Decode rows have separate lanes and all want the stage's output; prefill rows share one lane and do not want the head.
Both have short contexts. The cost of a longer context is measured with a lane whose few cells were copied many times,
since computing a thousand tokens would take minutes on a slow machine. It is measured for rows one by one, and for a
tile of attention if two such steps fit the time.

Other programs on the cores would bend the curve. If single rows seem twice as dear, no batch seems worth its wait, and
a batch that never runs is never corrected. So a step that did not get its cores counts with its processor time. Real
steps soon show the machine's speed with all its load.

No process can see a slowdown from outside, such as another user of a virtual machine's host. A curve of such a moment
would stay wrong, because plans avoid steps that seem dear, and it would be remembered. So a stage with a remembered
curve first runs a few steps, and measures again if they are clearly quicker than the curve.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import msgspec
import numpy as np
import numpy.typing as npt

from relayline.stage.engine import ggml
from relayline.stage.engine.kv_cache import takes_lanes_apart
from relayline.stage.engine.loading import MEASURING, Load
from relayline.stage.engine.native import NativeEngine
from relayline.stage.speed.curves import Curves
from relayline.stage.speed.machine_key import machine_facts
from relayline.wire.common import places
from relayline.wire.common.curve import ATTENTION_TILE_ROWS as TILE
from relayline.wire.common.curve import LADDER, further_ns
from relayline.wire.common.remembered import recall, remember
from relayline.wire.settings.setting import entries
from relayline.wire.settings.table import DEVICE_SETTINGS, EngineSettings

log = logging.getLogger("relayline.stage")

BUDGET_S = 8.0  # of one calibration; a ladder stops where its part is spent, and the last slope continues
DECODE_UNTIL, PREFILL_UNTIL, CONTEXT_UNTIL = 0.35, 0.45, 0.5  # of the budget
TILE_PART = 0.6  # of it may go into steps of a tile of attention, after the others; else there are none
PASSES = 3
AGAIN_MAX, UNDERCUT = 8, 1.03  # times that steps are measured again which take so much longer than a larger one
# Few rows give the head's cost for as many decode rows in a step with a prompt (wire.common.curve.mixed_cost_ns). A
# line through tiles of four is wrong by the cost of a leftover. In the order of their worth, because time may run out.
# (One before three: below its first point a curve continues with the slope of the first two, which from three to four
# may fall.)
PREFILL_LADDER = (4, 8, 16, 32, 1, 3, 2, 64, 128, 5, 6, 7, 12, 256)
CONTEXT_TOKENS = (
    1_024  # of the lane with which the price of context is measured; with lanes' own cells: including its rows
)
CONTEXT_COMPUTED_TOKENS = 16  # of them; the others are copies
CONTEXT_ROWS = 2
# Context costs a row of a tile at least this share of its cost for rows one by one. (A quarter was measured.) Noise may
# hide all of it. But 0.0 means unknown, and with a price near 0.0 context would never be enough of a step's cost for
# real steps to refine it.
TILED_PART_MIN = 0.125
UNDISTURBED = 0.85  # part of its processor time below which a step did not have its cores for itself
DISTURBED_MIN_NS = 2_000_000  # of a step; shorter ones are over before anything disturbs them
# Linux counts the processor time of threads on other cores when the timer ticks there, at 100 Hz at the slowest. For
# two threads' steps of 5 ms it reported 0.74 to 1.29 of their time. Taken at its word, the fastest of a few such steps
# came out at three quarters of any real step.
CPU_TICK_NS = 10_000_000
# A guess for where no long lane can be made of lanes with cells of their own; steps correct it. Beside the 60 million
# weights of a layer (llama-1b), scores and values of a token are some 4,000 multiplications, in kernels half as quick.
CONTEXT_PART = 1 / 6_000  # of a row's cost: a token of its context
FURTHER_PART = 1 / 3  # and of that: the cost for every further row of a frame (measured: a fifth to a half)
USUAL_ROWS, USUAL_STEPS_MIN, USUAL_STEPS_MAX = 4, 5, 40  # steps that tell how much they differ
ROW_SIZE = 0.01  # of the values of a row
CACHE_VERSION = 11
ROWS_DIFFER = "rows differ"  # of a model with experts: until it was so, all of them chose the same ones
MEASURED_ALONE = "alone"  # of a GPU's curves: earlier ones, that other stages may have disturbed, are not used
CORES_TAKEN = (
    "other programs held the cores while this stage measured its speed. Plans may be off until real steps correct "
    "that; the next start measures again"
)
CHECK_ROWS, CHECK_S = (1, 4, 8), 0.5  # compared with a remembered curve; the first step may also read the weights
CHECK_MIN_NS = 2_000_000  # of a remembered step: what noise makes of shorter ones says nothing
BAD_MOMENT = 1.25  # times as long as now most of these steps took: then it was measured in one


class _Stored(msgspec.Struct, frozen=True):
    decode: list[tuple[int, int]]
    prefill: list[tuple[int, int]]
    context_ns: float
    context_tiled_ns: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Context:
    """Measurements with a long lane, in nanoseconds."""

    row_ns: float = 0.0
    """What the first row of a frame costs for every token before it; 0.0 not measured."""
    tiled_ns: float = 0.0
    """And each row of a tile of attention, or each further row of a frame."""
    tile_step_ns: int = 0
    """A step of such a tile without context."""


@dataclasses.dataclass(slots=True)
class StepTimes:
    """Estimates the time of steps on undisturbed cores."""

    n_threads: int
    """Threads that compute a step; 0 where other devices do, whose time is not counted here."""
    cores_share: float = 0.0
    """Largest part of `n_threads` cores that a step had. A single thread has all of one, or is disturbed."""
    before_each: Callable[[], None] = lambda: None
    """Called before each step. An exception from it ends the measurement."""

    @property
    def are_doubtful(self) -> bool:
        """Whether several threads never had their cores at the same time: then their speed is unknown."""
        return self.n_threads > 1 and 0 < self.cores_share < UNDISTURBED

    def undisturbed_ns(self, wall_ns: int, cpu_ns: int) -> int:
        """Return the step's time from the clock and the process's processor time, in nanoseconds."""
        if not self.n_threads or wall_ns < self._judged_from_ns():
            return wall_ns
        share = min(1.0, cpu_ns / (wall_ns * self.n_threads))
        self.cores_share = 1.0 if self.n_threads == 1 else max(self.cores_share, share)
        return wall_ns if share >= UNDISTURBED * self.cores_share else round(wall_ns * share / self.cores_share)

    def _judged_from_ns(self) -> int:
        """Return from which time on a step's processor time says whether it was disturbed."""
        return DISTURBED_MIN_NS if self.n_threads == 1 else round(CPU_TICK_NS / (1 - UNDISTURBED))


def step_times(engine: NativeEngine) -> StepTimes:
    """Return the estimator of this engine's step times."""
    return StepTimes(0 if _is_offloaded(engine) else engine.config.settings.n_threads)


def _is_offloaded(engine: NativeEngine) -> bool:
    return bool(engine.config.settings.gpu_layers) and bool(llama_cpp.llama_supports_gpu_offload())


def calibrate(engine: NativeEngine, budget_s: float = BUDGET_S, times: StepTimes | None = None) -> Curves:
    """Measure curves and context. The engine must be idle; its lanes are empty again afterwards."""
    now_s, times = time.monotonic(), times or step_times(engine)
    decode, prefill = row_costs(engine, times, now_s + DECODE_UNTIL * budget_s, now_s + PREFILL_UNTIL * budget_s)
    curves = curves_of(engine, decode=decode, prefill=prefill)
    context = _measure_context(engine, times, curves, now_s + CONTEXT_UNTIL * budget_s, TILE_PART * budget_s)
    if context.tile_step_ns and TILE not in dict(curves.prefill.points()):
        prefill.append((TILE, context.tile_step_ns))  # no ladder had the time to come so far
    return curves_of(
        engine, decode=decode, prefill=prefill, context_ns=context.row_ns, context_tiled_ns=context.tiled_ns
    )


def curves_of(engine: NativeEngine, **measured: Any) -> Curves:
    """Return curves with what was measured, as `Curves.of_stage` takes it, and what is known without."""
    is_per_lane = engine.config.settings.kv_layout == "per-lane"
    return Curves.of_stage(
        has_head=engine.is_last,
        is_per_lane=is_per_lane,
        takes_lanes_apart=takes_lanes_apart(engine.config.settings.kv_type),
        has_tiles=not is_per_lane and _has_two_prices(engine),
        **measured,
    )


def row_costs(
    engine: NativeEngine, times: StepTimes, decode_until_s: float, prefill_until_s: float
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return (rows, ns) of decode rows and of prompt rows, measured until these times of the monotonic clock."""
    decode = _measured_again(engine, times, LADDER, decode_until_s, in_one_lane=False)
    # Without a head prefill rows cost what decode rows do; only the upper end is missing.
    top = 0 if engine.is_last else max(decode, default=(0, 0))[0]
    ladder = [rows for rows in PREFILL_LADDER if rows > top]
    return decode, _measured_again(engine, times, ladder, prefill_until_s, in_one_lane=True)


def usual_share(engine: NativeEngine, until_s: float) -> float:
    """Return how long a step usually takes by the clock, as a multiple of the quickest of some; 1.0 at least.

    It holds all that keeps a step from its cores, unlike the curves, which count with undisturbed steps.
    """
    found: list[int] = []
    times = StepTimes(0)  # the clock alone
    while len(found) < USUAL_STEPS_MIN or (len(found) < USUAL_STEPS_MAX and time.monotonic() < until_s):
        found.append(_time_step(engine, times, USUAL_ROWS, in_one_lane=False))
    return max(1.0, statistics.median(found) / min(found))


def _measure_context(
    engine: NativeEngine, times: StepTimes, curves: Curves, deadline_s: float, tile_s: float
) -> _Context:
    """Return the price of context; one long lane serves for both prices.

    If no such lane can be made: 0.0 in one cache, a guess in lanes with their own cells.
    """
    n_computed, n_sequences, settings = CONTEXT_COMPUTED_TOKENS, engine.config.n_sequences, engine.config.settings
    long_lane, free_lane = 0, n_sequences - 1
    is_per_lane, n_rows = settings.kv_layout == "per-lane", CONTEXT_ROWS
    most = min(CONTEXT_TOKENS, settings.n_lanes * settings.ctx_tokens // 2)
    if is_per_lane:  # the first row of a frame reads a lane for all of them, so it is measured alone
        n_rows, most = 1, min(CONTEXT_TOKENS - TILE, settings.ctx_tokens // 2)
    n_times = most // n_computed
    rows_max = min(engine.max_rows, settings.ctx_tokens - n_computed)  # of a step that the long lane takes
    unknown = _guess(engine, CONTEXT_PART * curves.prefill.cost_ns(1)) if is_per_lane else _Context()
    if n_sequences < 2 or n_times < 2 or rows_max < n_rows or engine.max_rows < n_computed:
        return unknown
    n_tokens, found = n_computed * n_times, unknown
    _run_lane(engine, times, long_lane, 0, n_computed)
    if engine.multiply(long_lane, free_lane, n_times):
        short_ns, long_ns = _context_steps(engine, times, n_rows, deadline_s)
        part = further_ns(1.0, takes_lanes_apart=takes_lanes_apart(settings.kv_type))
        row_ns = max(0, long_ns - short_ns) / ((1 + part * (n_rows - 1)) * n_tokens)
        if row_ns:  # else noise has hidden it
            found = _guess(engine, row_ns) if is_per_lane else _Context(row_ns)
        tile_ns = 2 * curves.prefill.cost_ns(TILE) + found.row_ns * TILE * n_tokens  # no tile would be dearer than that
        fits = tile_ns <= tile_s * 1e9
        if fits and found.row_ns and _has_two_prices(engine) and min(rows_max, n_tokens) >= TILE:
            short_ns, long_ns = _context_steps(engine, times, TILE, time.monotonic() + tile_s, tile_ns)
            tiled_ns = (long_ns - short_ns) / (TILE * n_tokens)
            if is_per_lane:
                tiled_ns = min(found.row_ns, (TILE * tiled_ns - found.row_ns) / (TILE - 1))
            found = _Context(found.row_ns, max(TILED_PART_MIN * found.row_ns, tiled_ns), short_ns)
    engine.clear(long_lane)
    engine.clear(free_lane)
    return found


def _guess(engine: NativeEngine, row_ns: float) -> _Context:
    """Return the cost of context in lanes with separate cells, while only a first row's price is known."""
    return _Context(row_ns, FURTHER_PART * row_ns if engine.attention.has_scores else 0.0)


def _context_steps(
    engine: NativeEngine, times: StepTimes, n_rows: int, deadline_s: float, pass_ns: float = 0.0
) -> tuple[int, int]:
    """Return the fastest steps of n_rows of an empty lane and of the long one, whose passes take pass_ns."""
    long_lane, free_lane = 0, engine.config.n_sequences - 1
    found: list[tuple[int, int]] = []
    while not found or (len(found) < PASSES and time.monotonic() + pass_ns / 1e9 <= deadline_s):
        short_ns = _run_lane(engine, times, free_lane, 0, n_rows)
        engine.clear(free_lane)
        found.append((short_ns, _run_lane(engine, times, long_lane, CONTEXT_COMPUTED_TOKENS, n_rows)))
        engine.drop_from(long_lane, CONTEXT_COMPUTED_TOKENS)
    return min(short for short, _ in found), min(long for _, long in found)


def _has_two_prices(engine: NativeEngine) -> bool:
    """Whether context costs many rows another price than few, which a step of a tile's rows tells.

    In one cache: whether attention runs on the processor and goes by tiles. In a lane's own: whether all scores are
    computed at once. Flash attention may be tiled there too, but from 64 rows on alone.
    """
    if engine.config.settings.kv_layout == "per-lane":
        return engine.attention.has_scores
    return not _is_offloaded(engine) and engine.attention.goes_by_tiles


def _measure(
    engine: NativeEngine,
    times: StepTimes,
    ladder: Sequence[int],
    deadline_s: float,
    *,
    in_one_lane: bool,
    passes: int = PASSES,
) -> list[tuple[int, int]]:
    """Walk the ladder again and again until the time is spent; the fastest run of each row count stands.

    Whole passes, not repeats of one rung: interference then affects all rungs alike. Even on a slow machine, where time
    runs out within the first pass, many rungs are measured, and the last slope continues. A rung that does not fit is
    left out.
    """
    fastest_ns: dict[int, int] = {}
    for _ in range(passes):
        for n_rows in ladder:
            if not _fits(engine, n_rows, in_one_lane):
                continue
            if fastest_ns and time.monotonic() > deadline_s:
                break
            duration_ns = _time_step(engine, times, n_rows, in_one_lane=in_one_lane)
            fastest_ns[n_rows] = min(duration_ns, fastest_ns.get(n_rows, duration_ns))
    return sorted(fastest_ns.items())


def _measured_again(
    engine: NativeEngine, times: StepTimes, ladder: Sequence[int], deadline_s: float, *, in_one_lane: bool
) -> list[tuple[int, int]]:
    """Walk the ladder, and measure again what a larger step seems to undercut, where only the clock tells.

    On such devices a step that takes longer than one of more rows has nearly always been disturbed in every pass.
    """
    found = dict(_measure(engine, times, ladder, deadline_s, in_one_lane=in_one_lane))
    for _ in range(0 if times.n_threads else AGAIN_MAX):
        doubtful = undercut(found)
        if not doubtful or time.monotonic() > deadline_s:
            break
        for n_rows, ns in _measure(engine, times, doubtful, deadline_s, in_one_lane=in_one_lane, passes=1):
            found[n_rows] = min(ns, found[n_rows])
    return sorted(found.items())


def undercut(found: Mapping[int, int]) -> list[int]:
    """Return the rows of steps that took longer than a larger one, from {rows: ns}. Pure."""
    least_ns, rows = math.inf, []
    for n_rows, ns in sorted(found.items(), reverse=True):
        if ns > UNDERCUT * least_ns:
            rows.append(n_rows)
        least_ns = min(least_ns, ns)
    return rows[::-1]


def _fits(engine: NativeEngine, n_rows: int, in_one_lane: bool) -> bool:
    if n_rows > engine.max_rows or (engine.is_last and not in_one_lane and n_rows > engine.max_wanted):
        return False
    settings = engine.config.settings
    if settings.kv_layout == "per-lane" and not in_one_lane and n_rows > settings.n_lanes:
        return False  # several rows of a lane would not be computed as those of several lanes are
    lane_rows = n_rows if in_one_lane else -(-n_rows // settings.n_lanes)
    return lane_rows <= settings.ctx_tokens


def _time_step(engine: NativeEngine, times: StepTimes, n_rows: int, *, in_one_lane: bool) -> int:
    n_lanes = 1 if in_one_lane else engine.config.settings.n_lanes
    rows = np.arange(n_rows)
    duration_ns = _run(engine, times, rows % n_lanes, rows // n_lanes, wants_all=not in_one_lane)
    for lane in range(min(n_rows, n_lanes)):
        engine.clear(lane)
    return duration_ns


def _run_lane(engine: NativeEngine, times: StepTimes, lane: int, position: int, n_rows: int) -> int:
    positions = np.arange(position, position + n_rows)
    return _run(engine, times, np.full(n_rows, lane), positions, wants_all=False)


def _run(
    engine: NativeEngine,
    times: StepTimes,
    lanes: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    *,
    wants_all: bool,
) -> int:
    """Run one step; returns its nanoseconds. Of rows that do not all want the head, the last one does."""
    times.before_each()
    n_rows = len(lanes)
    engine.seq_ids[:n_rows] = lanes
    engine.positions[:n_rows] = positions
    engine.wants[:n_rows] = wants_all
    engine.wants[n_rows - 1] = 1
    engine.input_rows[:n_rows] = _different_rows(n_rows, engine.artifact.width_in)
    started_ns, started_cpu_ns = time.monotonic_ns(), time.process_time_ns()
    engine.decode(n_rows)
    return times.undisturbed_ns(time.monotonic_ns() - started_ns, time.process_time_ns() - started_cpu_ns)


def _different_rows(n_rows: int, width: int) -> npt.NDArray[np.float32]:
    """Return rows that are the same each time, and no two of them alike: equal ones would all choose the same experts.

    Each is the one before it, moved on by a value.
    """
    values = np.random.default_rng(0).standard_normal(n_rows + width - 1, np.float32)
    return np.lib.stride_tricks.sliding_window_view(values * np.float32(ROW_SIZE), width)


def cached_curves(engine: NativeEngine, cache_dir: Path | None = None, load: Load | None = None) -> Curves:
    """Return the curves from the cache if steps are not clearly quicker now, or measure and remember them.

    Raises LoadStoppedError.

    The key covers what changes them: artifact, threads, devices where layers are put on one, KV type, lanes, context,
    machine and llama.cpp's build.
    """
    try:
        stored = msgspec.json.decode(recall(_path(engine, cache_dir)), type=_Stored)
    except (OSError, msgspec.MsgspecError):
        return fresh_curves(engine, cache_dir, load)  # not measured yet, or an unusable file
    curves = curves_of(engine, **msgspec.structs.asdict(stored))
    return fresh_curves(engine, cache_dir, load) if _is_outrun(engine, curves, load) else curves


def _is_outrun(engine: NativeEngine, curves: Curves, load: Load | None) -> bool:
    """Run a few steps; return whether they are clearly quicker than a curve says that was measured some time ago."""
    times = step_times(engine)
    if load is not None:
        times.before_each = lambda: load.at(MEASURING, 0.0)
    ladder = [rows for rows in CHECK_ROWS if curves.decode.cost_ns(rows) >= CHECK_MIN_NS]
    found = _measure(engine, times, ladder, time.monotonic() + CHECK_S, in_one_lane=False, passes=1)
    return bool(found) and statistics.median(curves.decode.cost_ns(rows) / ns for rows, ns in found) > BAD_MOMENT


def fresh_curves(engine: NativeEngine, cache_dir: Path | None = None, load: Load | None = None) -> Curves:
    """Measure, remember the result if it is not doubtful, and return it. Raises LoadStoppedError."""
    times, began_s = step_times(engine), time.monotonic()
    if load is not None:
        times.before_each = lambda: load.at(MEASURING, min(1.0, (time.monotonic() - began_s) / BUDGET_S))
    curves = calibrate(engine, times=times)
    if doubt := CORES_TAKEN if times.are_doubtful else curves.doubt:
        log.warning("%s", doubt)
    if times.are_doubtful or (curves.doubt and times.n_threads):
        return curves  # real steps correct them while this process lives; the next one measures again
    stored = _Stored(curves.decode.points(), curves.prefill.points(), curves.context_ns, curves.context_tiled_ns)
    with contextlib.suppress(OSError):  # without the file, the next start measures again
        remember(_path(engine, cache_dir), msgspec.json.encode(stored))
    return curves


def _path(engine: NativeEngine, cache_dir: Path | None) -> Path:
    return (cache_dir or places.cache_dir()) / "curves" / f"{_key(engine)}.json"


def _key(engine: NativeEngine) -> str:
    settings, artifact = engine.config.settings, engine.artifact
    # Lanes, context and rows as far as the ladders go: a curve that ended early must not serve for a roomier stage.
    parts = (CACHE_VERSION, artifact.pipeline_id, artifact.stage_index, settings.n_threads, settings.gpu_layers,
             settings.kv_type, settings.kv_layout, min(settings.n_lanes, LADDER[-1]),
             min(settings.ctx_tokens, CONTEXT_TOKENS), settings.max_rows, machine_facts(),
             (*ggml.devices(), MEASURED_ALONE) if settings.gpu_layers else (), *_device_settings(settings),
             *([settings.rewind_rows] if engine.rewind_rows else []),
             *([ROWS_DIFFER] if artifact.has_experts else []),
             *(["window"] if engine.attention.keeps_window else []))  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _device_settings(settings: EngineSettings) -> tuple[str, ...]:
    """Return the settings of the stage's devices; nothing where there are none, so that known curves stay valid."""
    values = [(entry, getattr(settings, entry.name)) for entry in entries(EngineSettings)]
    return tuple(f"{entry.name}={value}" for entry, value in values
                 if entry.name in DEVICE_SETTINGS and value != entry.default)  # fmt: skip
