"""One of the two stage processes of the hop bench: everything is real except the engine, and every point has a time
stamp.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from relayline.deploy.machine.cores import keep_to, read_cores
from relayline.deploy.testing.engines import stage_config
from relayline.stage import inbound, process
from relayline.stage.engine.artifact import StageArtifact
from relayline.stage.engine.lane_places import Grid
from relayline.stage.facts import StageFacts
from relayline.stage.queue_types import QueuedFrame, Step
from relayline.stage.speed.curves import Curves, StepShape
from relayline.stage.steps.lanes import LaneTable
from relayline.stage.steps.padding import Padding
from relayline.stage.steps.runner import Runner
from relayline.stage.steps.step import StepExecutor
from relayline.stage.steps.step_types import StepResult
from relayline.wire.common.curve import LADDER
from relayline.wire.common.process import run
from relayline.wire.envelopes.buffers import Buffer
from relayline.wire.envelopes.envelope import EnvelopeView, parse
from relayline.wire.links.relay_link import RelayLink

N_VOCAB = 32
N_LANES = 33  # one for each stream of the widest step, and a spare one for scratch rows
CTX_TOKENS = 1 << 14
PIPELINE_ID = "hop"
SOURCE_SHA256 = "0" * 64
# The batcher asks whether to pad, as in a stage. The answer must be no, see stamped_execute.
COSTS = tuple((rows, 1e6 * rows) for rows in LADDER)


@dataclasses.dataclass(slots=True)
class Stamps:
    """Moments of one step in one process, monotonic nanoseconds; 0 where it does not pass that point."""

    n_rows: int
    parsed_ns: int = 0  # the event loop has the message, checking begins
    pushed_ns: int = 0  # frames on their way into the batcher
    taken_ns: int = 0
    begin_ns: int = 0  # the native step begins
    ready_ns: int = 0  # and has ended
    sealed_ns: int = 0
    send_ns: int = 0
    message_bytes: int = 0


class StampingEngine:
    """Satisfies stage.steps.step_types.Engine: returns rows of noise at once."""

    def __init__(self, width: int, *, is_last: bool, swept_bytes: int = 0) -> None:
        """`swept_bytes`: memory that a step reads in place of weights, without the GIL. 0: a step takes no time."""
        self._swept = np.zeros(swept_bytes, np.uint8)
        self._sweeps_into = np.ones_like(self._swept)
        self.n_embd, self.max_rows, self.is_last = width, N_LANES, is_last
        self.max_wanted = N_LANES
        self.n_vocab = N_VOCAB if is_last else 0
        self.input_rows = np.zeros((N_LANES, width), np.float32)
        self.positions = np.zeros(N_LANES, np.int32)
        self.seq_ids = np.zeros(N_LANES, np.int32)
        self.wants = np.ones(N_LANES, np.int8)
        self.output_rows = np.random.default_rng(1).standard_normal((0 if is_last else N_LANES, width), np.float32)
        self._logits = np.linspace(0, 1, N_VOCAB, dtype=np.float32)
        self.begin_ns = self.ready_ns = 0
        self.micro_batches: tuple[int, ...] = ()
        self.hidden = self.device = None
        self.n_runs = 0

    def decode(
        self,
        n_rows: int,
        *,
        adapter: int = 0,
        is_mutual: bool = False,
        grids: Sequence[Grid] = (),
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Read the memory; the output rows are always the same."""
        self.begin_ns = time.monotonic_ns()
        if self._swept.size:
            np.copyto(self._sweeps_into, self._swept)
        self.ready_ns = time.monotonic_ns()

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Return the same logits for every row."""
        return self._logits

    def lane_tokens(self, lane: int) -> int:
        """Nothing is kept, and no step fails."""
        return 0

    def checkpoint(self, lane: int) -> None:
        """Nothing is kept, so there is nothing to remember."""

    def check_rewind(self, lane: int, position: int) -> None:
        """Nothing is kept, so it can go back to anywhere."""

    def drop_from(self, lane: int, position: int) -> None:
        """Nothing is kept, so nothing is dropped."""

    def copy_prefix(self, source_lane: int, target_lane: int, n_tokens: int) -> None:
        """Nothing is kept, so nothing is copied."""

    def clear(self, lane: int) -> None:
        """Nothing is kept, so nothing is cleared."""


class FixedCurves(Curves):
    """Curves that do not change: steps that take the same time for any number of rows would teach it to pad them."""

    def observe(self, shape: StepShape, ns: int) -> None:
        """Learn nothing."""


class NoEmbeddings:
    """Satisfies stage.steps.step_types.Embeddings: the engine does not look at its input."""

    def lookup(self, tokens: npt.NDArray[np.int32], out: npt.NDArray[np.float32]) -> None:
        """Leave `out` as it is."""

    def take(self, rows: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> None:
        """Leave `out` as it is."""


class Recorder:
    """Stamps the points of a stage process by wrapping the functions that a step passes. One step at a time.

    On a step's path it only keeps a few plain numbers. The stamps are made from them at the end.
    """

    def __init__(self, engine: StampingEngine) -> None:
        self._steps: list[tuple[int, ...]] = []  # columns of Stamps in order, but for send_ns
        self._sent_ns: list[int] = []  # of the steps that sent rows, in order
        self._engine = engine
        self._parsed_ns = self._pushed_ns = 0

    def install(self, executor: StepExecutor) -> None:
        """Wrap parse, push, execute and send."""
        execute, push, send = executor.execute, Runner.push, RelayLink.send
        recorder = self

        def stamped_parse(message: bytes, *, max_rows: int) -> EnvelopeView:
            recorder._parsed_ns = time.monotonic_ns()
            return parse(message, max_rows=max_rows)

        def stamped_push(runner: Runner, frames: list[QueuedFrame]) -> list[QueuedFrame]:
            recorder._pushed_ns = time.monotonic_ns()
            return push(runner, frames)

        def stamped_execute(step: Step, riders: Sequence[QueuedFrame] = ()) -> StepResult:
            result = execute(step, riders)
            assert not result.padded_rows, "a padded step has other rows than were sent"
            if step.frames:
                sealed_ns, engine = time.monotonic_ns(), recorder._engine
                recorder._steps.append((
                    result.n_rows, recorder._parsed_ns, recorder._pushed_ns, step.taken_ns, engine.begin_ns,
                    engine.ready_ns, sealed_ns, len(result.outputs[0].message),
                ))  # fmt: skip
            return result

        async def stamped_send(link: RelayLink, buffer: Buffer, message: bytes) -> None:
            if buffer.payload_bytes:
                recorder._sent_ns.append(time.monotonic_ns())
            await send(link, buffer, message)

        inbound.parse = stamped_parse  # type: ignore[assignment, attr-defined]
        Runner.push = stamped_push  # type: ignore[assignment, method-assign]
        executor.execute = stamped_execute  # type: ignore[method-assign]
        RelayLink.send = stamped_send  # type: ignore[assignment, method-assign]

    def stamps(self) -> list[Stamps]:
        """Return the records of all steps that ran frames."""
        sent_ns = self._sent_ns or [0] * len(self._steps)
        assert len(sent_ns) == len(self._steps), "a step's rows left in several envelopes"
        return [Stamps(*(*step[:-1], send_ns, step[-1])) for step, send_ns in zip(self._steps, sent_ns, strict=True)]


def _artifact(index: int, width: int) -> StageArtifact:
    return StageArtifact(
        path=Path("hop.gguf"),
        architecture="none",
        n_embd=width,
        width_in=width,
        width_out=width,
        n_vocab=N_VOCAB,
        stage_index=index,
        stage_count=2,
        layer_start=index,
        layer_end=index + 1,
        source_layers=2,
        source_sha256=SOURCE_SHA256,
        pipeline_id=PIPELINE_ID,
        embedding=None,
    )


def stage_main(index: int, width: int, out: Path, swept_bytes: int) -> None:
    """Serve one stage until SIGTERM; then write the stamps of every step."""
    engine = StampingEngine(width, is_last=index == 1, swept_bytes=swept_bytes)
    config = stage_config(
        Path("hop.gguf"), ctx_tokens=CTX_TOKENS, n_lanes=N_LANES, max_rows=N_LANES, calibrate=False, verify=False
    )
    curves = FixedCurves.of_stage(has_head=engine.is_last, decode=COSTS, prefill=COSTS)
    executor = StepExecutor(
        engine, LaneTable(N_LANES - 1, CTX_TOKENS), index, NoEmbeddings() if index == 0 else None,
        padding=Padding(curves, spare_lane=N_LANES - 1, wanted_max=N_LANES),
    )  # fmt: skip
    recorder = Recorder(engine)
    recorder.install(executor)
    facts = StageFacts(_artifact(index, width), config, "bench")
    with_engine: Any = process
    with_engine.load_stage = lambda config, load=None, like=None: (facts, executor)

    async def main(stopping: asyncio.Event) -> None:
        async with process.serve(config) as (address, *_):
            print(address, flush=True)
            await stopping.wait()

    run(main)
    out.write_text(json.dumps([dataclasses.astuple(step) for step in recorder.stamps()]))


if __name__ == "__main__":
    if len(sys.argv) > 5:
        keep_to(read_cores(sys.argv[5]))
    stage_main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
