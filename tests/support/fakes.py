"""Stand-ins for the native engine and the embedding table, and builders for frames, shared by the stage's tests.

The fake engine holds a model of the KV cache that can be compared: per lane, the rows it was fed by position. Its
output depends on the lane's own content only, and a frame that would not continue its lane fails the test at once.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from relayline.coordinator.model.pipeline_file import ArtifactFile, PipelineFile, Source, StageFile
from relayline.deploy.testing.engines import stage_config
from relayline.stage.engine.artifact import StageArtifact
from relayline.stage.engine.lane_places import Grid
from relayline.stage.facts import StageFacts
from relayline.stage.queue_types import QueuedFrame, Step
from relayline.stage.steps.lanes import LaneTable
from relayline.stage.steps.step import StepExecutor
from relayline.stage.steps.step_types import RouteWiring
from relayline.wire.common.errors import InternalError, PositionGapError
from relayline.wire.envelopes.buffers import BufferPool
from relayline.wire.envelopes.dtypes import DTYPE_F32
from relayline.wire.envelopes.frames import TRACE_BYTES, Flag
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

ROUTE, EPOCH, WIDTH, VOCAB, MAX_ROWS, CTX = 7, 1, 4, 32, 64, 256
ENVELOPE_NUMBERS = itertools.count(1_000_000)  # in addition to those of the tests


class FakeEngine:
    """Satisfies stage.steps.step_types.Engine. Everything is deterministic."""

    def __init__(
        self, *, n_lanes: int = 4, is_last: bool = False, max_rows: int = MAX_ROWS, n_embd: int = WIDTH
    ) -> None:
        self.n_embd, self.max_rows, self.is_last = n_embd, max_rows, is_last
        self.max_wanted = max_rows
        self.n_vocab = VOCAB if is_last else 0
        self.input_rows = np.zeros((max_rows, n_embd), np.float32)
        self.positions = np.zeros(max_rows, np.int32)
        self.seq_ids = np.zeros(max_rows, np.int32)
        self.wants = np.ones(max_rows, np.int8)
        self.output_rows = np.zeros((0 if is_last else max_rows, n_embd), np.float32)
        self.micro_batches: tuple[int, ...] = ()
        self.hidden = self.device = None
        self.lanes: list[list[tuple[float, ...]]] = [[] for _ in range(n_lanes)]
        self.steps: list[list[tuple[int, int]]] = []  # per decode: (lane, position) of every row
        self.grids: list[Grid] = []  # of all decodes
        self.adapters: list[int] = []  # of each decode
        self.n_mutual = 0  # decodes whose rows attend to each other
        self.checkpoints: list[tuple[int, int]] = []  # (lane, tokens) of each that was taken
        self.fail_next: BaseException | None = None
        self.failure_empties = False  # whether a failed step leaves its lanes empty, as with a recurrent state
        self.nan_lanes: set[int] = set()
        self.reused_until: dict[int, int] = {}  # lanes that cannot be rewound so far, except to position 0
        self.computes_apart = False  # whether it computes in parallel with this processor, as a GPU does
        self.on_decode: Callable[[], None] = lambda: None
        self.make_logits = logits_of
        self.n_closed = self.n_runs = 0
        self._logits: dict[int, np.ndarray] = {}

    def decode(
        self,
        n_rows: int,
        *,
        adapter: int = 0,
        is_mutual: bool = False,
        grids: Sequence[Grid] = (),
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        self.n_mutual += is_mutual
        self.adapters.append(adapter)
        self.grids += grids
        self.on_decode()
        self.n_runs += 1
        self.steps.append([(int(self.seq_ids[row]), int(self.positions[row])) for row in range(n_rows)])
        before = [len(lane) for lane in self.lanes]
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            for index in set(self.seq_ids[:n_rows].tolist()) if self.failure_empties else ():
                self.lanes[index].clear()
            raise error
        self._logits.clear()
        if meanwhile is not None and self.computes_apart:
            meanwhile()
        for row in range(n_rows):
            index, lane = int(self.seq_ids[row]), self.lanes[self.seq_ids[row]]
            if self.positions[row] != len(lane):
                raise InternalError(f"lane {index} holds {before[index]}, was fed position {self.positions[row]}")
            lane.append(tuple(self.input_rows[row].tolist()))
            broken = index in self.nan_lanes
            if self.is_last:
                if self.wants[row]:
                    self._logits[row] = np.full(VOCAB, np.nan, np.float32) if broken else self.make_logits(lane)
            else:
                self.output_rows[row] = np.nan if broken else output_of(lane)

    def logits(self, row: int) -> np.ndarray:
        return self._logits[row]

    def void_logits(self) -> None:
        """Do what any run of llama.cpp does to the logits of the one before."""
        self.n_runs += 1
        self._logits.clear()

    def lane_tokens(self, lane: int) -> int:
        return len(self.lanes[lane])

    def checkpoint(self, lane: int) -> None:
        self.checkpoints.append((lane, len(self.lanes[lane])))

    def check_rewind(self, lane: int, position: int) -> None:
        if 0 < position <= self.reused_until.get(lane, 0):
            raise PositionGapError(f"lane {lane} cannot be taken back to position {position}")

    def drop_from(self, lane: int, position: int) -> None:
        del self.lanes[lane][position:]

    def copy_prefix(self, source_lane: int, target_lane: int, n_tokens: int) -> None:
        self.lanes[target_lane] = self.lanes[source_lane][:n_tokens]

    def clear(self, lane: int) -> None:
        self.lanes[lane].clear()

    def close(self) -> None:
        self.n_closed += 1


def output_of(lane: list[tuple[float, ...]]) -> np.ndarray:
    """The output row of a lane with this content: its last row, plus its number of rows."""
    return np.asarray(lane[-1], np.float32) + np.float32(len(lane))


def logits_of(lane: list[tuple[float, ...]]) -> np.ndarray:
    """Logits whose largest is at a token that depends on the lane's whole content."""
    logits = np.zeros(VOCAB, np.float32)
    logits[int(sum(sum(row) for row in lane)) % VOCAB] = 5.0
    return logits


class FakeEmbeddings:
    """Row of token t is t everywhere."""

    def lookup(self, tokens: np.ndarray, out: np.ndarray) -> None:
        out[:] = tokens[:, None]

    def take(self, rows: np.ndarray, out: np.ndarray) -> None:
        out[:] = rows


class BlockedDecode:
    """Holds a fake engine inside `decode` until `release`; `entered` is set once it is there."""

    def __init__(self, engine: FakeEngine) -> None:
        self.entered, self._released = threading.Event(), threading.Event()
        engine.on_decode = self._hold

    def _hold(self) -> None:
        self.entered.set()
        assert self._released.wait(30), "the engine was not released"

    def release(self) -> None:
        self._released.set()


def hidden(n_rows: int, first: float = 1.0) -> np.ndarray:
    """Rows of whole numbers, each different: f32 (n_rows, WIDTH)."""
    return (np.arange(n_rows * WIDTH, dtype=np.float32) + first).reshape(n_rows, WIDTH)


def rows_frame(
    session_id: int,
    position: int,
    rows: np.ndarray | int = 1,
    flags: int = 0,
    *,
    route_id: int = ROUTE,
    epoch: int = EPOCH,
    arrived_ns: int = 0,
) -> QueuedFrame:
    """One data frame alone in an envelope; `rows` as a number means any content."""
    content = hidden(rows, 100.0 * session_id + position) if isinstance(rows, int) else rows
    return QueuedFrame(
        route_id=route_id,
        session_id=session_id,
        epoch=epoch,
        position=position,
        n_rows=len(content),
        flags=flags,
        argument=0,
        payload=content,
        exponents=None,
        options=None,
        envelope=next(ENVELOPE_NUMBERS),
        trace=bytes(TRACE_BYTES),
        arrived_ns=arrived_ns,
        upstream_wait_ns=0,
    )


def control(
    session_id: int,
    flag: int,
    position: int = 0,
    *,
    argument: int = 0,
    route_id: int = ROUTE,
    epoch: int = EPOCH,
    options: pb.SessionOptions | None = None,
) -> QueuedFrame:
    """One control frame; an open is greedy by default."""
    frame = rows_frame(session_id, position, np.zeros((0, WIDTH), np.float32), flag, route_id=route_id, epoch=epoch)
    frame.payload, frame.argument = None, argument
    if flag & Flag.OPEN:
        frame.options = options or greedy()
    return frame


def greedy(**changes: object) -> pb.SessionOptions:
    """Options of a session that takes the largest logit."""
    return pb.SessionOptions(**({"temperature": 0.0, "top_p": 1.0, "n_logprobs": -1} | changes))  # type: ignore[arg-type]


def step_of(*frames: QueuedFrame, taken_ns: int = 0) -> Step:
    """A step as the batcher would hand it over: controls apart, the rest in order."""
    return Step(
        [frame for frame in frames if frame.is_control],
        [frame for frame in frames if not frame.is_control],
        "queue_drained",
        taken_ns,
        0,
        0,
    )


def new_executor(engine: FakeEngine, *, stage_index: int = 1, dtype: int = DTYPE_F32) -> StepExecutor:
    """An executor with ROUTE configured at EPOCH, sending `dtype` unless the engine is the last stage's."""
    lanes = LaneTable(len(engine.lanes), CTX)
    embeddings = FakeEmbeddings() if stage_index == 0 else None
    executor = StepExecutor(engine, lanes, stage_index, embeddings, close=engine.close)
    executor.reset_route(ROUTE, new_wiring(engine, dtype=dtype))
    return executor


def new_wiring(engine: FakeEngine, *, epoch: int = EPOCH, dtype: int = DTYPE_F32) -> RouteWiring:
    """The decode thread's view of a fresh route."""
    return RouteWiring(epoch, None if engine.is_last else BufferPool(dtype, engine.n_embd))


def new_facts(
    stage_index: int, stage_count: int, *, n_lanes: int = 4, max_rows: int = MAX_ROWS, n_embd: int = WIDTH
) -> StageFacts:
    """The self-description of a stage in a fake pipeline with one layer per stage."""
    artifact = StageArtifact(
        path=Path("fake.gguf"),
        architecture="llama",
        n_embd=n_embd,
        width_in=n_embd,
        width_out=n_embd,
        n_vocab=VOCAB,
        stage_index=stage_index,
        stage_count=stage_count,
        layer_start=stage_index,
        layer_end=stage_index + 1,
        source_layers=stage_count,
        source_sha256="0" * 64,
        pipeline_id="fake",
        embedding=None,
    )
    config = stage_config(Path("fake.gguf"), n_lanes=n_lanes, ctx_tokens=CTX, max_rows=max_rows)
    return StageFacts(artifact, config, "0", instance_id=f"fake-{stage_index}")


def pipeline_file(
    n_stages: int, *, pipeline_id: str = "fake", n_embd: int = WIDTH, n_vocab: int = VOCAB
) -> PipelineFile:
    """A pipeline.json's content with as many stages; sizes and hashes do not matter."""
    stages = tuple(StageFile(index, f"stage-{index}.gguf", 0, "", index, index + 1) for index in range(n_stages))
    return PipelineFile(
        version=1,
        pipeline_id=pipeline_id,
        source=Source((), "0" * 64),
        architecture="llama",
        model_name="tiny",
        n_layers=n_stages,
        n_embd=n_embd,
        n_vocab=n_vocab,
        ctx_train=4096,
        cuts=tuple(range(1, n_stages)),
        tokenizer=ArtifactFile("tokenizer.gguf", 0, ""),
        stages=stages,
    )


def tokens_frame(session_id: int, position: int, tokens: Sequence[int], flags: int = 0, **names: int) -> QueuedFrame:
    """A data frame for stage 0."""
    return rows_frame(session_id, position, np.asarray(tokens, np.int32)[:, None], flags, **names)
