"""Uses the cost curves for padding: adds scratch rows where a step with more rows is cheaper."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from relayline.stage.queue_types import QueuedFrame
from relayline.stage.speed.curves import Curves, shape_of

if TYPE_CHECKING:
    from relayline.stage.steps.step_types import Engine


@dataclasses.dataclass(frozen=True, slots=True)
class Padding:
    """Where scratch rows go, and the curves that say when they make a step cheaper."""

    curves: Curves
    spare_lane: int  # a native sequence that no session owns
    wanted_max: int  # rows of one step that may want logits
    enabled: bool = True  # else there need be no such lane

    def prepare(self, engine: Engine, n_rows: int) -> None:
        """Find out beforehand what `pad` asks for where the next step has as many rows, once curves have changed."""
        if self.enabled:
            self.curves.decode.padded_rows(n_rows, engine.max_rows)

    def pad(self, engine: Engine, members: list[QueuedFrame], n_rows: int) -> int:
        """Add scratch rows behind a step's own where the curves say that more rows are cheaper; returns how many.

        `n_rows` counts the rows of all members; `engine.wants` holds their wants.
        """
        if not self.enabled or self.curves.decode.padded_rows(n_rows, engine.max_rows) == n_rows:
            return 0
        shape = shape_of(members)
        if not shape.decode_rows:
            return 0
        target = self.curves.padded_rows(shape, engine.max_rows)
        n_wanted = int(np.count_nonzero(engine.wants[:n_rows]))
        # The head is tiled as well, and in a step of decode rows alone all scratch rows want it. Next to prompt rows
        # they do not: rows that fill a tile of the layers might begin one of the head, and cost more than they save.
        n_heads = self.curves.decode.padded_rows(n_wanted, n_wanted + target - n_rows) - n_wanted
        if target == n_rows or n_wanted + n_heads > self.wanted_max:
            return 0
        engine.input_rows[n_rows:target] = 0
        engine.positions[n_rows:target] = np.arange(target - n_rows)
        engine.seq_ids[n_rows:target] = self.spare_lane
        engine.wants[n_rows:target] = 0
        engine.wants[n_rows : n_rows + n_heads] = 1
        return target - n_rows
