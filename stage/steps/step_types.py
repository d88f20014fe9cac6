"""The input and output of a step's executor, apart from the frames themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from relayline.stage.engine.cell_state import Pieces
from relayline.stage.engine.lane_places import Grid
from relayline.stage.engine.layer_cells import Form, LayerCells
from relayline.stage.engine.told_rows import Guess, Told
from relayline.stage.queue_types import QueuedFrame, Step
from relayline.stage.sampling.device_draws import Device
from relayline.stage.steps.placement import Placed
from relayline.wire.envelopes import trace_context
from relayline.wire.envelopes.buffers import Buffer, BufferPool
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb


class Ranker(Protocol):
    """The head of a reranker; see stage.engine.rank_head.RankHead."""

    def chances(self, row: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]: ...  # noqa: D102


class Hidden(Protocol):
    """The last stage's hidden rows; see stage.engine.hidden.HiddenRows."""

    @property
    def rank_head(self) -> Ranker | None: ...  # noqa: D102
    def want(self, *, wanted: bool) -> None: ...  # noqa: D102
    def rows(self, first: int, n_rows: int) -> npt.NDArray[np.float32]: ...  # noqa: D102


class Predictor(Protocol):
    """The last stage's prediction layers; see stage.engine.prediction.Predictor."""

    n_drafts: int
    begins_with_zeros: bool
    what: str

    def hidden(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.float32]: ...  # noqa: D102
    def take(self, told: Sequence[Told]) -> list[list[Guess]]: ...  # noqa: D102


class Engine(Protocol):
    """The part of the native engine that a step uses; see stage.engine.native.NativeEngine for the meaning of each
    member.
    """

    n_embd: int
    n_vocab: int
    max_rows: int
    max_wanted: int
    is_last: bool
    input_rows: npt.NDArray[np.float32]
    positions: npt.NDArray[np.int32]
    seq_ids: npt.NDArray[np.int32]
    wants: npt.NDArray[np.int8]
    output_rows: npt.NDArray[np.float32]

    @property
    def n_runs(self) -> int: ...  # noqa: D102
    @property
    def hidden(self) -> Hidden | None: ...  # noqa: D102
    @property
    def device(self) -> Device | None: ...  # noqa: D102
    @property
    def micro_batches(self) -> tuple[int, ...]: ...  # noqa: D102
    def decode(  # noqa: D102
        self,
        n_rows: int,
        *,
        adapter: int = 0,
        is_mutual: bool = False,
        grids: Sequence[Grid] = (),
        meanwhile: Callable[[], None] | None = None,
    ) -> None: ...
    def logits(self, row: int) -> npt.NDArray[np.float32]: ...  # noqa: D102
    def checkpoint(self, lane: int) -> None: ...  # noqa: D102
    def lane_tokens(self, lane: int) -> int: ...  # noqa: D102
    def check_rewind(self, lane: int, position: int) -> None: ...  # noqa: D102
    def drop_from(self, lane: int, position: int) -> None: ...  # noqa: D102
    def copy_prefix(self, source_lane: int, target_lane: int, n_tokens: int) -> None: ...  # noqa: D102
    def clear(self, lane: int) -> None: ...  # noqa: D102


class Saver(Protocol):
    """The part of the native engine that the tier uses; see stage.engine.saved_lanes.SavedLanes."""

    @property
    def pieces(self) -> Pieces | None: ...  # noqa: D102
    @property
    def token_ns(self) -> float: ...  # noqa: D102
    def pieces_of(self, lane: int) -> Pieces | None: ...  # noqa: D102
    def size(self, lane: int) -> int: ...  # noqa: D102
    def settle(self, lane: int) -> None: ...  # noqa: D102
    def save(self, lane: int) -> npt.NDArray[np.uint8]: ...  # noqa: D102
    def restore(self, lane: int, saved: npt.NDArray[np.uint8]) -> int: ...  # noqa: D102
    def forms(self) -> tuple[Form, ...]: ...  # noqa: D102
    def cells(self, lane: int) -> list[LayerCells]: ...  # noqa: D102
    def put_cells(self, lane: int, cells: Sequence[LayerCells]) -> int: ...  # noqa: D102


class Embeddings(Protocol):
    """Token ids, or rows of images and audio, to hidden rows; only stage 0 has them."""

    def lookup(self, tokens: npt.NDArray[np.int32], out: npt.NDArray[np.float32]) -> None: ...  # noqa: D102
    def take(self, rows: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> None: ...  # noqa: D102


@dataclasses.dataclass(slots=True)
class RouteOutput:
    """One step's output for one route. `buffer` is None when nothing travels downstream."""

    route_id: int
    epoch: int
    buffer: Buffer | None = None
    message: bytes = b""
    sent_ns: int = 0  # when it was ready to leave
    samples: list[pb.Sampled] = dataclasses.field(default_factory=list)
    faults: list[pb.SessionFault] = dataclasses.field(default_factory=list)
    progress: list[pb.Progress] = dataclasses.field(default_factory=list)
    summaries: list[pb.SessionSummary] = dataclasses.field(default_factory=list)
    dropped_keys: list[int] = dataclasses.field(default_factory=list)  # of states that the tier does not have
    context: bytes = b""  # 25 bytes, of the batch's span; empty when none is recorded
    granted: list[tuple[QueuedFrame, int]] = dataclasses.field(default_factory=list)
    """Frames under a grant with the tokens sampled behind them, for stage 0: see stage.steps.grants."""


@dataclasses.dataclass(slots=True)
class StepResult:
    """Everything the event loop has to carry away after a step."""

    step: Step
    outputs: list[RouteOutput]
    due: list[QueuedFrame]  # its frames but for wrong guesses and those whose epoch has ended
    members: list[
        QueuedFrame
    ]  # frames of the native decode, without wrong guesses and those that do not fit their lane
    n_rows: int = 0  # of the members
    closed: list[QueuedFrame] = dataclasses.field(default_factory=list)  # closes that were applied
    padded_rows: int = 0  # scratch rows on top of n_rows
    micro_batches: tuple[int, ...] = ()  # rows of the parts in which llama.cpp ran the decode; empty: all at once
    number: int = 0  # counts native decodes of this process from 1; 0 when there was none
    started_ns: int = 0  # when the native decode began
    decode_ns: int = 0
    predicted_ns: int = 0  # the cost curves' prediction before they learned from it; 0: unknown
    encode_ns: int = 0  # sampling or encoding
    error: str = ""  # label of the error with which the native decode failed
    context: bytes = trace_context.NONE  # 25 bytes, of the batch's span; zeros when none is recorded
    # Of rows computed ahead, see stage.steps.run_ahead:
    riding: list[Placed] = dataclasses.field(default_factory=list)  # rows of the decode that were not asked for yet
    computed: list[QueuedFrame] = dataclasses.field(default_factory=list)  # all frames of the decode
    is_ahead: bool = False  # the decode began before these frames came
    is_reported: bool = False  # some result has the decode's time
    n_dropped: int = 0  # rows that had been computed ahead in vain since the result before
    computed_in: int = 0  # number of the decode that computed these rows, where an earlier result has its time

    @property
    def held_until_ns(self) -> int:
        """When the rows had been computed, but not before they were taken: where the stage held them no longer."""
        return self.step.taken_ns if self.is_ahead else self.step.taken_ns + self.decode_ns

    @property
    def waits_ns(self) -> list[int]:
        """From arrival to the moment the step was taken, of the frames that were due."""
        return [self.step.taken_ns - frame.arrived_ns for frame in self.due]

    @property
    def consumed(self) -> list[QueuedFrame]:
        """Frames whose links get the payload bytes back as credit."""
        return self.step.frames

    @property
    def n_micro_batches(self) -> int:
        """Parts in which llama.cpp ran the decode."""
        return len(self.micro_batches) or 1

    @property
    def close_reason(self) -> str:
        """Why the batch took no more, see stage.steps.policy."""
        return self.step.close_reason

    @property
    def handle_ns(self) -> int:
        """The stage's own work around the decode: placing rows, then sampling or encoding."""
        return self.encode_ns + (0 if self.is_ahead else max(0, self.started_ns - self.step.taken_ns))

    @property
    def ended_ns(self) -> int:
        """When everything of this step was ready to leave."""
        return max(self.started_ns + self.decode_ns, self.step.taken_ns) + self.encode_ns


class Snapshot(NamedTuple):
    """A stage's state at one moment, as a value that any thread may keep.

    Lanes are as the decode thread left them after its latest step or change of a route; during a step, others see the
    state before it. The queue is current.
    """

    lanes_total: int
    lanes_used: int = 0  # by sessions with a waiting client
    lanes_kept: int = 0  # by sessions that are only kept, or whose epoch has ended
    queued_frames: int = 0  # waiting for a step, controls included
    queued_rows: int = 0
    running: Step | None = None  # the engine's present work; a taken step is never changed


@dataclasses.dataclass(slots=True)
class RouteWiring:
    """The decode thread's view of a route: its epoch and its downstream link's buffers (None on the last stage)."""

    epoch: int
    pool: BufferPool | None
    sequence: int = 0
