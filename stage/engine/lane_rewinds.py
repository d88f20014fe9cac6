"""The positions that each lane can be taken back to, and the means, where a lane's past is not kept whole.

Of a layer with a recurrent state llama.cpp keeps one state of a lane, that of its end, and forgets the rest. Of a layer
with a sliding window it may keep the window's cells alone (wire.common.kv_layout.keeps_window). `Checkpoints` holds
copies of earlier states and windows. Of other models every lane can be taken back anywhere, and nothing here does
anything.

Of some families llama.cpp can also keep the states behind the last rows of each lane (n_rs_seq). Rows that were guessed
wrong can then be taken back. It does not check a request: these states are those of the lane's last micro-batch, and
other steps may have written over them. So `_RecentRows` knows by how much a lane can be taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as llama

from relayline.stage.engine.artifact import StageArtifact
from relayline.stage.engine.checkpoints import Checkpoints, State
from relayline.stage.engine.eagle import EaglePredictor, Inner
from relayline.stage.engine.lane_state import has_window, read_partial, write_partial
from relayline.stage.engine.micro_batches import Cut
from relayline.stage.engine.prediction import Predictor
from relayline.wire.common.errors import NativeError, PositionGapError, UsageError
from relayline.wire.common.kv_layout import PER_LANE_ARCHITECTURES, layout_refusal
from relayline.wire.settings.table import EngineSettings


class _RecentRows:
    """By how many rows each lane can be taken back without a checkpoint.

    A micro-batch of several lanes moves the states of others out of its way, but not their earlier ones
    (llama_memory_recurrent::find_slot). One of a single lane moves nothing.
    """

    def __init__(self) -> None:
        self.n_kept = 0  # states that llama.cpp keeps of each lane, besides that of its end
        self._of_lane: dict[int, int] = {}
        self.taken_back: set[int] = set()  # lanes taken back so, with no row since: their state is an earlier one

    def count(self, lane: int) -> int:
        return self._of_lane.get(lane, 0)

    def ran(self, lanes: Sequence[Sequence[int]]) -> None:
        """A step has run: the lane of each row, micro-batch by micro-batch."""
        for part in lanes:
            present = set(part)
            if len(present) > 1:
                self._of_lane = {lane: count for lane, count in self._of_lane.items() if lane in present}
            for lane in present:
                self._of_lane[lane] = min(self.n_kept, part.count(lane) - 1)
            self.taken_back -= present

    def forget(self, lane: int) -> None:
        self._of_lane.pop(lane, None)
        self.taken_back.discard(lane)

    def take_back(self, lane: int) -> None:
        """llama.cpp does it once."""
        self._of_lane.pop(lane, None)
        self.taken_back.add(lane)

    def failed(self) -> None:
        """It is unknown how far a step came."""
        self._of_lane.clear()


class LaneRewinds:
    """How far the lanes of one native context can be taken back."""

    def __init__(self, model: Any, architecture: str, kv_layout: str) -> None:
        """Read the kinds of state that the model keeps. Raises UsageError for a KV layout on which llama.cpp would
        abort.
        """
        is_recurrent = bool(llama.llama_model_is_recurrent(model))
        self.are_recurrent = is_recurrent or bool(llama.llama_model_is_hybrid(model))
        """Whether some layer has a recurrent state."""
        is_per_lane = kv_layout == "per-lane"
        if refusal := layout_refusal(kv_layout, architecture):
            raise UsageError(refusal)
        self.predictor: Predictor | None = None
        """Of the last stage, where its slice can draft and the settings say so; its lanes go back as these do."""
        # llama_memory_recurrent::init_batch and llama_memory_hybrid::init_batch.
        self.cut_steps = is_per_lane or self.are_recurrent
        """Whether llama.cpp cuts steps into micro-batches, see stage.engine.micro_batches."""
        self.cut_in_sequence = is_per_lane or is_recurrent
        """Whether only lanes of consecutive numbers then share one."""
        # llama_kv_cache_dsv4: the state has cells of a window, which a copy that waits would bring once more.
        self.has_cells = architecture in PER_LANE_ARCHITECTURES
        """Whether states hold KV cells: then a lane is copied at once and no other way."""
        self._architecture = architecture
        self._checkpoints = Checkpoints()
        self._recent = _RecentRows()
        self._memory: Any = None
        self._window = 0  # positions of a window whose cells alone are kept; 0: all cells are

    @property
    def n_recent(self) -> int:
        """By how many rows of its last step a lane can be taken back at most; 0 where llama.cpp keeps no states."""
        return self._recent.n_kept

    @property
    def n_tail(self) -> int:
        """As of `stage.engine.micro_batches.cut`."""
        return self._recent.n_kept + 1 if self._recent.n_kept else 0

    @property
    def need_checkpoints(self) -> bool:
        """Whether lanes can be taken back to checkpoints alone, but for some rows at their ends."""
        return self.are_recurrent or self._window > 0

    def keep_recent(self, n_states: int) -> None:
        """llama.cpp keeps so many earlier states of each lane."""
        self._recent.n_kept = n_states

    def keep_windows(self, memory: Any, n_positions: int) -> None:
        """Layers with a window of so many positions keep the cells of a lane's next row, and a few more."""
        self._memory, self._window = memory, n_positions

    def ran(self, lanes: npt.NDArray[np.int32], step: Cut | None) -> None:
        """Take note of a step that has run. lanes: i32 [n_rows], of its rows."""
        if not self._recent.n_kept or step is None:
            return
        computed = lanes[step.computed].tolist()
        ends = np.cumsum(step.sizes).tolist()
        self._recent.ran([computed[end - size : end] for end, size in zip(ends, step.sizes, strict=True)])

    def failed(self) -> None:
        """Take note of a step that has failed."""
        self._recent.failed()

    def is_taken_back(self, lane: int) -> bool:
        """Whether the lane's state is an earlier one, which llama.cpp's copy of a lane would miss."""
        return lane in self._recent.taken_back

    def can_rewind(self, lane: int, position: int, n_tokens: int) -> bool:
        """Return whether a lane of n_tokens can be rewound to a position."""
        return self.can_copy(lane, position, n_tokens) or self._has_recent(lane, position, n_tokens)

    def can_copy(self, lane: int, position: int, n_tokens: int) -> bool:
        """Return whether the first tokens of a lane of n_tokens, up to a position, can be copied to another lane."""
        return (
            not self.needs_checkpoint(lane, position, n_tokens) or self._checkpoints.state(lane, position) is not None
        )

    def needs_checkpoint(self, lane: int, position: int, n_tokens: int) -> bool:
        """Return whether a lane of n_tokens does not hold what a row at a position reads."""
        if not self.need_checkpoints or not 0 < position < n_tokens:
            return False
        return self.are_recurrent or not has_window(self._memory, lane, position, self._window)

    def _has_recent(self, lane: int, position: int, n_tokens: int) -> bool:
        return n_tokens - position <= self._recent.count(lane)

    def require(self, lane: int, position: int, n_tokens: int) -> None:
        """Raise PositionGapError if a lane of n_tokens cannot be rewound to a position."""
        self._require(lane, position, n_tokens, can=self.can_rewind(lane, position, n_tokens))

    def require_copy(self, lane: int, position: int, n_tokens: int) -> None:
        """Raise PositionGapError if the first tokens of a lane of n_tokens, up to a position, cannot be copied."""
        self._require(lane, position, n_tokens, can=self.can_copy(lane, position, n_tokens))

    def _require(self, lane: int, position: int, n_tokens: int, *, can: bool) -> None:
        if not can:
            there = ", ".join(map(str, self._checkpoints.positions(lane))) or "none"
            raise PositionGapError(
                f"lane {lane} cannot be taken back from position {n_tokens} to {position}: "
                f"{self._forgets}, and its checkpoints are at {there}"
            )

    @property
    def _forgets(self) -> str:
        return "it has a recurrent state" if self.are_recurrent else "it keeps the cells of a sliding window alone"

    def checkpoint(self, context: Any, lane: int, n_tokens: int) -> None:
        """Remember the state of a lane of n_tokens. Raises NativeError where llama.cpp does not give it."""
        if not self.need_checkpoints or not n_tokens:
            return
        state = read_partial(context, lane)
        if state is None:
            raise NativeError(f"{self._architecture}: llama.cpp does not give the state of lane {lane}")
        self._checkpoints.add(lane, n_tokens, state)

    def take_back(self, context: Any, lane: int, position: int, n_tokens: int) -> None:
        """Set the state of a lane of n_tokens to a checkpoint. Only then its KV cells can be cut there.

        Or llama.cpp has the state itself, and takes it when it cuts the cells. Raises NativeError if there is none, or
        if llama.cpp does not take it; then the lane is empty.
        """
        if self.predictor is not None:
            self.predictor.dropped(lane, position)
        state = self._checkpoints.state(lane, position) if 0 < position < n_tokens else None
        if self.needs_checkpoint(lane, position, n_tokens):
            if state is not None:
                self.put_window(context, lane, state)
            elif self._has_recent(lane, position, n_tokens):
                self._recent.take_back(lane)
            else:
                raise NativeError(f"{self._architecture}: lane {lane} has no checkpoint at {position}")
        elif not position:
            self._recent.forget(lane)
        self._checkpoints.drop_beyond(lane, position)

    def put_window(self, context: Any, lane: int, state: State) -> None:
        """Let a lane have the windows, or the recurrent state, of a checkpoint. Its other cells stay.

        Raises NativeError, and the lane is empty, where llama.cpp does not take it.
        """
        self._recent.forget(lane)
        if not write_partial(context, lane, state):
            # It has forgotten this part of the lane by now. Rows of its other part would be taken for another stream's.
            llama.llama_memory_seq_rm(llama.llama_get_memory(context), lane, -1, -1)
            self._checkpoints.drop_beyond(lane, 0)
            raise NativeError(f"{self._architecture}: llama.cpp does not take a state of lane {lane}")

    def own(self, context: Any, lane: int) -> None:
        """Let a lane that shares another one's cells have those of its windows for itself.

        Cells that several lanes have are never given away, not even behind all their windows, and there are just
        enough for a window of each lane. Raises NativeError where llama.cpp does not copy them.
        """
        if self._window:
            state = read_partial(context, lane)
            if state is None:
                raise NativeError(f"{self._architecture}: llama.cpp does not give the windows of lane {lane}")
            self.put_window(context, lane, state)

    def saved(self, lane: int, n_tokens: int) -> list[tuple[int, State]]:
        """Return a lane's checkpoints up to a position, each with its position, ascending."""
        found = [(at, self._checkpoints.state(lane, at)) for at in self._checkpoints.positions(lane) if at <= n_tokens]
        return [(at, state) for at, state in found if state is not None]

    def put_back(self, lane: int, saved: list[tuple[int, State]]) -> None:
        """Let an empty lane have checkpoints that `saved` returned."""
        for position, state in saved:
            self._checkpoints.add(lane, position, state)

    def copy(self, source_lane: int, target_lane: int, n_tokens: int) -> None:
        """Let the target have the source's checkpoints up to a position; the state itself is copied by llama.cpp."""
        if self.predictor is not None:
            self.predictor.copied(source_lane, target_lane, n_tokens)
        if self.need_checkpoints:
            if source_lane not in self._recent.taken_back:  # both share a state until one of them continues
                self._recent.forget(source_lane)
            self._checkpoints.hand_on(source_lane, target_lane, n_tokens)


def predictor_of(
    artifact: StageArtifact,
    settings: EngineSettings,
    drafter: Path | None,
    *,
    model: Any,
    context: Any,
    params: Any,
    batch: Inner,
) -> Predictor | None:
    """Return what drafts on this stage and follows its lanes; None: nothing does.

    `drafter`: an EAGLE-3 model. The others are the engine's. Raises as `Predictor` and `EaglePredictor`.
    """
    if artifact.predicts(settings):
        return Predictor(model, context, params, batch, settings.mtp_drafts)
    if artifact.is_last and drafter is not None:
        return EaglePredictor(drafter, settings, artifact, context, params, batch)
    return None
