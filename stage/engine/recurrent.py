"""Lanes of a model in which some layers have a recurrent state: how far each can be taken back, and by what.

llama.cpp keeps one state of a lane, that of its end, and forgets the rest. `Checkpoints` holds copies of others. Of a
model without such layers every lane can be taken back anywhere, and nothing here does anything.
"""

from __future__ import annotations

from typing import Any

from llama_cpp import llama_cpp as llama

from relayline.stage.engine.checkpoints import Checkpoints, State
from relayline.stage.engine.lane_state import read_recurrent, write_recurrent
from relayline.wire.common.errors import NativeError, PositionGapError, UsageError
from relayline.wire.common.kv_layout import PER_LANE_ARCHITECTURES, layout_refusal


class RecurrentLanes:
    """The recurrent states of one native context."""

    def __init__(self, model: Any, architecture: str, kv_layout: str) -> None:
        """Read the kinds of state that the model keeps. Raises UsageError for a KV layout on which llama.cpp would
        abort.
        """
        is_recurrent = bool(llama.llama_model_is_recurrent(model))
        self.exist = is_recurrent or bool(llama.llama_model_is_hybrid(model))
        """Whether some layer has a state."""
        is_per_lane = kv_layout == "per-lane"
        if refusal := layout_refusal(kv_layout, architecture):
            raise UsageError(refusal)
        # llama_memory_recurrent::init_batch and llama_memory_hybrid::init_batch.
        self.cut_steps = is_per_lane or self.exist
        """Whether llama.cpp cuts steps into micro-batches, see stage.engine.micro_batches."""
        self.cut_in_sequence = is_per_lane or is_recurrent
        """Whether only lanes of consecutive numbers then share one."""
        # llama_kv_cache_dsv4: the state has cells of a window, which a copy that waits would bring once more.
        self.has_cells = architecture in PER_LANE_ARCHITECTURES
        """Whether states hold KV cells: then a lane is copied at once and no other way."""
        self._architecture = architecture
        self._checkpoints = Checkpoints()

    def can_rewind(self, lane: int, position: int, n_tokens: int) -> bool:
        """Tell whether a lane of so many tokens can be taken back to a position."""
        return not self.exist or not 0 < position < n_tokens or self._checkpoints.state(lane, position) is not None

    def require(self, lane: int, position: int, n_tokens: int) -> None:
        """Raise PositionGapError where a lane of so many tokens cannot be taken back to a position."""
        if not self.can_rewind(lane, position, n_tokens):
            there = ", ".join(map(str, self._checkpoints.positions(lane))) or "none"
            raise PositionGapError(
                f"lane {lane} cannot be taken back from position {n_tokens} to {position}: it has a recurrent state, "
                f"and its checkpoints are at {there}"
            )

    def checkpoint(self, context: Any, lane: int, n_tokens: int) -> None:
        """Remember the state of a lane of so many tokens. Raises NativeError where llama.cpp does not give it."""
        if not self.exist or not n_tokens:
            return
        state = read_recurrent(context, lane)
        if state is None:
            raise NativeError(f"{self._architecture}: llama.cpp does not give the state of lane {lane}")
        self._checkpoints.add(lane, n_tokens, state)

    def take_back(self, context: Any, lane: int, position: int, n_tokens: int) -> None:
        """Give a lane of so many tokens the state of a checkpoint. Only then its KV cells can be cut there.

        Raises NativeError where there is none.
        """
        if not self.exist:
            return
        if 0 < position < n_tokens:
            state = self._checkpoints.state(lane, position)
            if state is None or not write_recurrent(context, lane, state):
                raise NativeError(f"{self._architecture}: lane {lane} has no checkpoint at {position}")
        self._checkpoints.drop_beyond(lane, position)

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
        if self.exist:
            self._checkpoints.hand_on(source_lane, target_lane, n_tokens)
