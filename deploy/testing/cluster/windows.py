"""Sliding windows of the model engine whose cells alone are kept, as `--window-cells window` has them.

Every other layer has a window. Of these layers a lane keeps the latest positions alone: WINDOW, and SLACK that it can
be taken back by. Beyond that it goes back to its checkpoints. Reading a row that is gone is a Violation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relayline.deploy.testing.cluster.clock import Violation
from relayline.stage.engine.checkpoints import State

WINDOW = 5  # positions, with a row's own
SLACK = 12  # rows that a lane can be taken back by: as many as an answer has, and some more

Row = tuple[int, ...]


def has_window(layer: int) -> bool:
    """Return whether a layer of the whole model has a window."""
    return layer % 2 == 1


class ModelWindows:
    """The windows of one engine's lanes."""

    def __init__(self, layers: range, n_lanes: int) -> None:
        self._layers = layers
        self.places = [place for place, layer in enumerate(layers) if has_window(layer)]
        """Which of the engine's layers have one."""
        self._held: list[dict[int, Row]] = [{} for _ in range(n_lanes)]  # by position, ascending

    def has(self, lane: int, position: int) -> bool:
        """Return whether a lane has all that a row at `position`, at most its end, reads."""
        held = self._held[lane]
        return all(at in held for at in range(max(0, position - WINDOW + 1), position))

    def seen(self, lane: int, position: int, before: Row) -> Row:
        """Return the row before `position` as the next one reads it: layers with a window read their own cells."""
        if not self.has(lane, position):
            raise Violation(f"layers {self._layers}: lane {lane} lacks the window of row {position}")
        row = list(before)
        for place, value in zip(self.places, self._held[lane].get(position - 1, ()), strict=False):
            row[place] = value
        return tuple(row)

    def wrote(self, lane: int, position: int, row: Row) -> None:
        """Keep a row that was computed, and let the earliest ones go."""
        held = self._held[lane]
        held[position] = tuple(row[place] for place in self.places)
        held.pop(position - WINDOW - SLACK, None)

    def cut(self, lane: int, position: int) -> None:
        """Forget rows from a position on."""
        self._held[lane] = {at: row for at, row in self._held[lane].items() if at < position}

    def copy(self, source: int, target: int) -> None:
        """Let a lane have the windows of another one."""
        self._held[target] = dict(self._held[source])

    def state(self, lane: int, end: int) -> State:
        """Return the windows of a lane that ends at `end`, as llama.cpp copies them: of the last WINDOW positions."""
        held = self._held[lane]
        rows = [(at, *held[at]) for at in range(max(0, end - WINDOW), end) if at in held]
        return np.array(rows, np.int32).reshape(-1).view(np.uint8)

    def put(self, lane: int, state: State) -> None:
        """Let a lane have these windows, and no others."""
        rows: Sequence[list[int]] = state.view(np.int32).reshape(-1, 1 + len(self.places)).tolist()
        self._held[lane] = {at: tuple(values) for at, *values in rows}
