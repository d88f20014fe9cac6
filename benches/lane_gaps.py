"""Gaps of another stream while a long lane is stored, restored or copied: `python -m benches.lane_gaps [--quick]`.

One stage with the KV cells of half of an 8B model (64 KiB a token; its matrices are smaller) decodes one stream. With
`--windows` it has those of Gemma 3 4B: 20 KiB a token in layers without a window, and 116 MiB of windows. Meanwhile
another lane of `--tokens` tokens is copied: into the tier, out of it, or to another lane. Copies in pieces between
steps and copies in one go take turns. The report has medians over the repeats: the stream's usual gap between two
tokens, its longest one meanwhile, and the time that each copy took. It also has the most processor time that was spent
on copying between two steps, which other programs change less.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benches import machine
from benches.arguments import number
from benches.models import Shape, model
from benches.origin import origin
from relayline.deploy.models.splits import split_for
from relayline.deploy.testing.engines import engine_config
from relayline.deploy.testing.tiny_slices import TinyShape, write_stage
from relayline.stage.engine.cell_state import bytes_of
from relayline.stage.engine.lane_pieces import OwnPieces
from relayline.stage.engine.native import NativeEngine
from relayline.stage.engine.tier import Tier
from relayline.stage.queue_types import QueuedFrame
from relayline.stage.steps import lane_states
from relayline.stage.steps.batcher import Batcher
from relayline.stage.steps.lane_states import LaneStates
from relayline.stage.steps.lanes import LaneTable
from relayline.stage.steps.policy import POLICIES, StepLimits
from relayline.stage.steps.runner import Runner
from relayline.stage.steps.step import StepExecutor
from relayline.stage.steps.step_types import RouteWiring, StepResult
from relayline.wire.common.curve import CostCurve
from relayline.wire.envelopes.frames import Flag
from relayline.wire.envelopes.trace_context import NONE
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

SHAPE = TinyShape(n_layers=16, n_embd=1_024, n_heads=8, n_kv_heads=8, n_ff=96, n_positions=1 << 17)
WINDOWED = Shape("lane-gaps", "gemma3", 256, 34, 4, 4, 256, 128, 512, 1_024)
STREAM, LONG, COPY, BACK = 1, 2, 3, 4  # sessions
STORED = 7  # a key
USUAL_STEPS = 30
WAYS = {"one go": "in one go", "pieces": "in pieces"}
KINDS = {"store": "into the tier", "restore": "out of the tier", "copy": "to another lane"}
COLUMNS = (
    "stream's usual gap",
    "its longest gap meanwhile",
    "most copying between two steps (processor time)",
    "until the copy is done",
)


@dataclasses.dataclass(slots=True)
class Copied:
    """One copy beside a stream."""

    way: str
    kind: str
    usual_ms: float  # median gap of the stream before
    longest_ms: float  # meanwhile
    hold_ms: float  # the most processor time that the decode thread spent on copying between two steps
    took_ms: float


class Stage:
    """An engine with its decode thread, and one stream that never ends."""

    def __init__(self, engine: NativeEngine, tier: Tier, n_tokens: int) -> None:
        self._engine, self._n_tokens = engine, n_tokens
        self.states = LaneStates(engine, engine.saved, tier)
        lanes = LaneTable(engine.config.settings.n_lanes, engine.config.settings.ctx_tokens)
        self.executor = StepExecutor(engine, lanes, 0, None, states=self.states)
        self.executor.begin_route(1, RouteWiring(1, None))
        batcher = Batcher(POLICIES["auto"](StepLimits(engine.max_rows, engine.max_rows, CostCurve())))
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.runner = Runner(batcher, self.executor, self._deliver, self._failed.set_exception)
        self._position, self._n_left = 0, 0
        self.came_ns: list[int] = []
        self._ended = asyncio.Event()
        self.holds_ns: list[int] = []
        self._timed(self.states.copies, "work")
        self._timed(self.executor.sessions, "control")
        self._row = np.full((1, engine.n_embd), 0.01, np.float32)

    def _timed(self, owner: object, name: str) -> None:
        call = getattr(owner, name)

        def timed(*arguments: object) -> None:
            began_ns = time.thread_time_ns()
            call(*arguments)
            self.holds_ns.append(time.thread_time_ns() - began_ns)

        setattr(owner, name, timed)

    def control(self, session: int, flag: int, position: int = 0, argument: int = 0) -> QueuedFrame:
        """Return a control."""
        options = pb.SessionOptions(temperature=0.0, top_p=1.0, n_logprobs=-1) if flag & Flag.OPEN else None
        return QueuedFrame(
            1, session, 1, position, 0, flag, argument, None, None, options, NONE, time.monotonic_ns(), 0
        )

    def push(self, *frames: QueuedFrame) -> None:
        """Queue frames."""
        self.runner.push(list(frames))

    def _step(self) -> None:
        frame = QueuedFrame(
            1, STREAM, 1, self._position, 1, Flag.WANTS_SAMPLE, 0, self._row, None, None, NONE, time.monotonic_ns(), 0
        )
        self._position += 1
        self.push(frame)

    def _deliver(self, result: StepResult) -> None:
        self.runner.sent()
        for output in result.outputs:
            if output.faults:
                self._failed.set_exception(SystemExit(str(output.faults)))
            if output.samples:
                self.came_ns.append(time.monotonic_ns())
                self._n_left -= 1
                if self._n_left > 0:
                    self._step()
                else:
                    self._ended.set()

    async def decode(self, n_steps: int) -> None:
        """Run steps of the stream until `n_steps` are done."""
        self._ended.clear()
        self._n_left = n_steps
        self._step()
        await self._ended.wait()

    async def fill(self) -> None:
        """Give the long session its lane, whose cells have some content and were not computed."""

        def filled() -> None:
            lane = self.executor.lanes.lane_of((1, LONG))
            assert lane is not None
            pieces = self._engine.saved.pieces
            assert isinstance(pieces, OwnPieces)
            claims = pieces._claims
            for first in range(0, self._n_tokens, self._engine.max_rows):
                n_rows = min(self._engine.max_rows, self._n_tokens - first)
                claims.claim(lane.index, first, n_rows)
                if first <= self._n_tokens // 2 < first + n_rows:  # of engines that keep windows alone
                    self._engine.checkpoint(lane.index)
            noise = np.random.default_rng(1).integers(0, 120, 1 << 16, np.uint8)
            for view in pieces._cells._views:
                rows = view[lane.index, 0, : self._n_tokens]
                rows[...] = np.resize(noise, rows.shape[1])
            lane.next_position = self._n_tokens

        self.push(self.control(LONG, Flag.OPEN))
        await self.decode(2)  # the opening has been carried out then
        await self.runner.call(filled)

    async def copied(self, way: str, kind: str) -> Copied:
        """Let a copy run beside the stream."""
        done = asyncio.Event()
        loop, began = asyncio.get_running_loop(), time.monotonic_ns()

        async def watch() -> None:
            target = {"store": None, "restore": BACK, "copy": COPY}[kind]
            while True:
                lane = self.executor.lanes.lane_of((1, target)) if target else None
                is_done = (
                    STORED in tier_of(self.states).stored() if target is None else bool(lane and lane.next_position)
                )
                if is_done:
                    done.set()
                    return
                await asyncio.sleep(0.001)

        await self.decode(USUAL_STEPS)
        usual = np.diff(self.came_ns[-USUAL_STEPS:])
        self.holds_ns.clear()
        if kind == "restore":
            self.push(self.control(BACK, Flag.OPEN), self.control(BACK, Flag.RESTORE, self._n_tokens, STORED))
        elif kind == "copy":
            self.push(self.control(COPY, Flag.OPEN), self.control(COPY, Flag.COPY_PREFIX, self._n_tokens, LONG))
        else:
            self.push(self.control(LONG, Flag.STORE, self._n_tokens, STORED))
        first, began = len(self.came_ns) - 1, time.monotonic_ns()
        watching = loop.create_task(watch())
        await self.decode(2)
        while not done.is_set():
            await self.decode(1)
        await watching
        took_ns = time.monotonic_ns() - began
        await self.decode(2)
        gaps, hold_ns = np.diff(self.came_ns[first:]), max(self.holds_ns)
        for session in (COPY, BACK):
            self.push(self.control(session, Flag.CLOSE))
        return Copied(way, kind, float(np.median(usual)) / 1e6, float(gaps.max()) / 1e6, hold_ns / 1e6, took_ns / 1e6)


def tier_of(states: LaneStates) -> Tier:
    """Return the tier of a stage."""
    tier = states._tier
    assert tier is not None
    return tier


async def measure(path: Path, n_tokens: int, repeats: int) -> tuple[list[Copied], float]:
    """Return all copies, the two ways in turn, and the MiB of one."""
    lane_states.WHOLE_BYTES_MAX = 1 << 40  # as it was before there were pieces
    config = engine_config(path, 4, n_tokens + 2_048, 512, kv_layout="per-lane", n_threads=2)
    results = []
    with NativeEngine(config) as engine:
        pieces = engine.saved.pieces
        assert pieces is not None
        n_mib = (n_tokens * bytes_of(pieces.forms) + pieces.window_bytes(n_tokens)) / 2**20
        for _ in range(repeats):
            for way in WAYS:
                engine.saved.pieces = pieces
                stage = Stage(engine, Tier(8 << 30), n_tokens)
                stage.push(stage.control(STREAM, Flag.OPEN))
                await stage.fill()
                engine.saved.pieces = pieces if way == "pieces" else None
                for kind in KINDS:
                    results.append(await stage.copied(way, kind))
                    print(results[-1], flush=True)
                await stage.runner.call(functools.partial(stage.executor.sessions.forget_route, 1))
                await stage.runner.stop()
    return results, n_mib


def table_of(results: Sequence[Copied], n_tokens: int, n_mib: float) -> dict[str, Any]:
    """Return the medians as a table of benches/results."""
    rows = []
    for kind, copied in KINDS.items():
        for way, how in WAYS.items():
            same = [dataclasses.astuple(one)[2:] for one in results if (one.kind, one.way) == (kind, way)]
            values: list[float | None] = [round(statistics.median(each), 1) for each in zip(*same, strict=True)]
            if (kind, way) == ("copy", "one go"):  # made inside the next step, not between two
                values[2] = None
            rows.append({"label": f"{copied}, {how}", "values": values})
    corner = f"{n_tokens:,} tokens ({n_mib:,.0f} MiB) beside one stream, ms"
    return {"corner": corner, "columns": list(COLUMNS), "rows": rows}


async def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benches.lane_gaps", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a short lane: checks the bench itself")
    parser.add_argument("--tokens", type=number, default=30_000, help="of the lane that is copied")
    parser.add_argument("--repeats", type=number, default=3)
    parser.add_argument("--windows", action="store_true", help="a slice that keeps the cells of sliding windows alone")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the measurement to this file")
    parser.add_argument("--machine", default="busy-avx512", help="its name in benches/results/machines.json")
    options = parser.parse_args(argv)
    if options.quick:
        options.tokens, options.repeats = min(options.tokens, 2_500), 1
    with tempfile.TemporaryDirectory() as directory:
        if options.windows:
            path = split_for(model(WINDOWED, "q4_0"), None, (), None) / "stage-0.gguf"
        else:
            path = write_stage(Path(directory) / "stage.gguf", SHAPE, 0, [])
        results, n_mib = await measure(path, options.tokens, options.repeats)
    measured = table_of(results, options.tokens, n_mib)
    table = Table(measured["corner"], *COLUMNS)
    for row in measured["rows"]:
        table.add_row(row["label"], *("" if value is None else f"{value:,.1f}" for value in row["values"]))
    Console().print(table)
    print(f"load {machine.facts()['load_average']}")
    if options.out:
        head = origin("benches.lane_gaps", options.machine, argv)
        options.out.write_text(json.dumps(head | measured, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
