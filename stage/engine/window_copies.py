"""Windows of lanes that keep the cells of sliding windows alone: taken from a lane, and put into one, in one go each.

Decode thread only, but where a method says otherwise.

Fresh memory costs more than the copy: 116 MiB took 57 ms, and 12 where the memory was used before. So the windows of
one lane are read into memory that is kept for the next one.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from llama_cpp import llama_cpp as llama

from relayline.stage.engine.lane_rewinds import LaneRewinds
from relayline.stage.engine.lane_state import filled_at_once, has_window, read_partial
from relayline.stage.engine.lane_windows import Bytes, LaneWindows, reaches
from relayline.wire.common.errors import NativeError, PositionGapError

if TYPE_CHECKING:
    from relayline.stage.engine.native import NativeEngine


class WindowCopies:
    """Of one engine."""

    def __init__(
        self, engine: NativeEngine, context: Any, rewinds: LaneRewinds, n_positions: int, position_bytes: int
    ) -> None:
        """n_positions: of a window, with a row's own. position_bytes: of one position in all windows, about."""
        self._engine, self._context, self._rewinds = engine, context, rewinds
        self.n_positions, self._position_bytes = n_positions, position_bytes
        self._kept: Bytes | None = None  # as much as a window needs, once one was read
        self._reader: weakref.ref[Bytes] | None = None  # who uses it; it is free once that is gone

    def n_bytes(self, n_tokens: int) -> int:
        """Return about how many bytes the windows at the end of a lane with so many tokens take. Any thread."""
        return min(n_tokens, self.n_positions) * self._position_bytes

    def take(self, lane: int, n_tokens: int) -> LaneWindows:
        """Return the windows of a lane's first tokens: at their end, and at the checkpoints before it.

        Raises PositionGapError where the lane does not have that window any more, and NativeError where llama.cpp does
        not give it.
        """
        end, checkpoints = self._engine.lane_tokens(lane), tuple(self._rewinds.saved(lane, n_tokens))
        if checkpoints and checkpoints[-1][0] == n_tokens:
            return LaneWindows(checkpoints, checkpoints[-1])
        if not reaches(end, n_tokens, self.n_positions):
            raise PositionGapError(f"lane {lane} has the window of its end at {end}, not that at {n_tokens}")
        window = read_partial(self._context, lane, self._memory)
        if window is None:
            raise NativeError(f"llama.cpp does not give the windows of lane {lane}")
        return LaneWindows(checkpoints, (end, window))

    def _memory(self, n_bytes: int) -> Bytes:
        if self._reader is not None and self._reader() is not None:
            return filled_at_once(n_bytes)
        if self._kept is None or self._kept.nbytes < n_bytes:
            self._kept = filled_at_once(n_bytes)
        view = self._kept[:n_bytes]
        self._reader = weakref.ref(view)
        return view

    def put(self, lane: int, windows: LaneWindows, n_tokens: int) -> None:
        """Let a lane that was given n_tokens cells have these windows, and their checkpoints up to there.

        Raises PositionGapError where they have none for so many tokens, NativeError where llama.cpp does not take it or
        it is of another position. Then the lane is empty.
        """
        engine, window = self._engine, windows.at(n_tokens, self.n_positions)
        if window is None:
            engine.clear(lane)
            raise PositionGapError(f"the window at {n_tokens} was not kept")
        self._rewinds.put_window(self._context, lane, window)
        memory = llama.llama_get_memory(self._context)
        llama.llama_memory_seq_rm(memory, lane, n_tokens, -1)  # it may be that of one token more
        if engine.lane_tokens(lane) != n_tokens or not has_window(memory, lane, n_tokens, self.n_positions):
            engine.clear(lane)
            raise NativeError(f"a window of another position came for the {n_tokens} tokens of lane {lane}")
        self._rewinds.put_back(lane, [(at, state) for at, state in windows.checkpoints if at <= n_tokens])
