"""What the cost curves are for in a step: scratch rows where more are cheaper, a prediction, and what is learned."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from stage.curves import Curves
from stage.queue_types import QueuedFrame

if TYPE_CHECKING:
    from stage.step_types import Engine


@dataclasses.dataclass(frozen=True, slots=True)
class Padding:
    """Where scratch rows go, and the curves that say when they make a step cheaper."""

    curves: Curves
    spare_lane: int  # a native sequence that no session owns
    wanted_max: int  # rows of one step that may want logits
    enabled: bool = True

    def pad(self, engine: Engine, frames: Sequence[QueuedFrame], n_rows: int) -> int:
        """Add scratch rows behind n_rows where the curve says that more rows are cheaper; returns how many."""
        if not self.enabled or all(frame.is_prefill for frame in frames):
            return 0
        target = self.curves.decode.padded_rows(n_rows, engine.max_rows)
        if target == n_rows or n_rows > self.wanted_max - (target - n_rows):
            return 0
        engine.input_rows[n_rows:target] = 0
        engine.positions[n_rows:target] = np.arange(target - n_rows)
        engine.seq_ids[n_rows:target] = self.spare_lane
        engine.wants[n_rows:target] = 1  # the head is tiled too
        return target - n_rows

    def predicted_ns(self, frames: Sequence[QueuedFrame], n_rows: int) -> int:
        """Return what the curves say that these frames will cost in a step of n_rows, padding included; 0: unknown.

        Rows of prompts beside decode rows are not measured as such; the prefill curve is the nearer one.
        """
        curves = self.curves
        has_prefill = any(frame.is_prefill for frame in frames)
        curve = curves.prefill if has_prefill and curves.prefill.is_known else curves.decode
        return round(curve.cost_ns(n_rows))

    def learn(self, engine: Engine, frames: Sequence[QueuedFrame], n_rows: int, padded_rows: int, cost_ns: int) -> None:
        """Refine the curves from a step of n_rows rows, padded_rows of them scratch; no frames: the step failed."""
        if padded_rows:
            engine.clear(self.spare_lane)
        if not frames:
            return
        n_prefill = sum(frame.is_prefill for frame in frames)
        if n_prefill == 0:
            self.curves.decode.observe(n_rows, cost_ns)
        elif n_prefill == len(frames):
            self.curves.prefill.observe(n_rows, cost_ns)
