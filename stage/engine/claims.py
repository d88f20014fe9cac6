"""Rows that llama.cpp counts as a lane's without computing them. Decode thread only.

llama.cpp has no call that gives a lane cells and leaves their content to the caller. But it decides about a step's
cells before it computes. So a step of these rows is begun whose graph ends at its first node (`stage.engine.capture`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from relayline.stage.engine.capture import RowCapture
from relayline.stage.engine.step_batch import StepBatch
from relayline.wire.common.errors import LaneLimitError, NativeError

if TYPE_CHECKING:
    from relayline.stage.engine.native import NativeEngine

_NO_KV_SLOT = 1  # return code of llama_decode


class Claims:
    """Claims cells of one engine."""

    def __init__(
        self, engine: NativeEngine, batch: StepBatch, capture: RowCapture, node: str, run: Callable[[Any], int]
    ) -> None:
        """node: the first one of the engine's graphs. run: llama_decode of a batch."""
        self._engine, self._batch, self._capture, self._node, self._run = engine, batch, capture, node, run

    def claim(self, lane: int, first: int, n_rows: int) -> None:
        """Let positions [first:first + n_rows) be the lane's, which ends at `first`; the caller fills in their cells.

        Logits of the last step are void. n_rows is at most the engine's max_rows. Raises LaneLimitError and
        NativeError, and the lane ends at `first`.
        """
        engine = self._engine
        engine.seq_ids[:n_rows], engine.wants[:n_rows] = lane, 0
        engine.positions[:n_rows] = range(first, first + n_rows)
        batch = self._batch.fill(n_rows)
        with self._capture.stopping_at(self._node):
            code = self._run(batch)
        engine.wants[:n_rows] = 1  # as at first
        if code != 0:
            engine.drop_from(lane, first)
            kind = LaneLimitError if code == _NO_KV_SLOT else NativeError
            raise kind(f"llama.cpp does not give lane {lane} {n_rows} more cells (code {code})")
        engine.copies_wait = False

    def works(self) -> bool:
        """Find out, on lane 0 with its one row, whether a further row can be claimed."""
        try:
            self.claim(0, 1, 1)
        except (LaneLimitError, NativeError):
            return False
        return self._engine.lane_tokens(0) == 2
