"""Lanes that are handed over with their layers: an old engine's cells of a session continue in the new ones. Pure.

After a planned change of layers a stage's new engine is empty. Each of its layers was on some stage before, maybe on
this one. Those stages' old engines still have the lanes that their last epoch left
(`stage.steps.sessions.Sessions.leave_route`). The new engine takes the cells of its layers from there, session by
session, and has lanes that an epoch left, too. The coordinator's next epoch resumes from them as after a loss of links:
see `Sessions.held`. The history of a session whose cells cannot be had is read again, as ever.

Decode thread only, but for `joined`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from relayline.stage.engine.layer_cells import Form, LayerCells
from relayline.stage.steps.lanes import LaneTable
from relayline.stage.steps.step_types import Saver
from relayline.wire.common.errors import LaneLimitError, RelaylineError

Key = tuple[int, int]  # (route id, session id)


@dataclasses.dataclass(frozen=True, slots=True)
class HandedLane:
    """A session's cells in some layers."""

    route_id: int
    session_id: int
    lane: int
    """Where it was; its next lane is the same if that is free."""
    layers: tuple[LayerCells, ...]

    @property
    def key(self) -> Key:
        """Whose it is."""
        return self.route_id, self.session_id

    @property
    def n_tokens(self) -> int:
        """Positions 0 to n_tokens - 1 of its history."""
        return self.layers[0].n_tokens


def joined(parts: Sequence[HandedLane]) -> HandedLane:
    """Return one session's neighbouring layers, as many tokens as all of them have.

    Stages may have got further than others: frames were in flight as the epoch ended, or held guesses.
    """
    n_tokens = min(part.n_tokens for part in parts)
    layers = tuple(layer.shortened(n_tokens) for part in parts for layer in part.layers)
    return dataclasses.replace(parts[0], layers=layers)


def behind(heads: Sequence[HandedLane]) -> list[int]:
    """Return which of several sources, each in order of its keys, are to go on to a later session.

    heads: what each gives next. None: all give the same session's layers.
    """
    latest = max(head.key for head in heads)
    return [index for index, head in enumerate(heads) if head.key < latest]


class Handing:
    """Gives cells of one engine's lanes, and takes those of others."""

    def __init__(self, lanes: LaneTable, saver: Saver | None) -> None:
        self._lanes, self._saver = lanes, saver

    def close(self) -> None:
        """The engine is about to be freed: later requests get nothing."""
        self._saver = None

    def forms(self) -> tuple[Form, ...]:
        """Return the form of each layer's cells; empty where lanes cannot change hands."""
        return self._saver.forms() if self._saver is not None else ()

    @property
    def ctx_tokens(self) -> int:
        """Tokens that one lane can hold."""
        return self._lanes.ctx_tokens

    def left(self) -> list[Key]:
        """Return whose lanes there are that an epoch has left, in ascending order."""
        return sorted((lane.route_id, lane.session_id) for lane in self._lanes if lane.is_left)

    def give(self, key: Key, first: int, end: int) -> HandedLane | None:
        """Return a session's cells in layers [first:end) of this engine; None if it has none, or they cannot be read.

        A lane that cannot be taken apart is no error: it may hold images.
        """
        lane = next((lane for lane in self._lanes if (lane.route_id, lane.session_id) == key and lane.is_left), None)
        if lane is None or self._saver is None or not lane.next_position:
            return None
        try:
            layers = self._saver.cells(lane.index)[first:end]
        except RelaylineError:
            return None
        if not layers or layers[0].n_tokens != lane.next_position:
            return None
        return HandedLane(*key, lane.index, tuple(layers))

    def take(self, handed: HandedLane) -> bool:
        """Let a session have a lane with these cells of all layers, as if an epoch had left it. False: it has none."""
        lanes, saver = self._lanes, self._saver
        if saver is None or not 0 < handed.n_tokens <= lanes.ctx_tokens or handed.key in self.left():
            return False
        try:
            lane = lanes.open(handed.session_id, handed.route_id, handed.lane)
        except LaneLimitError:
            return False
        try:
            lane.next_position = saver.put_cells(lane.index, handed.layers)
        except RelaylineError:
            lanes.close(handed.session_id, handed.route_id)
            return False
        lane.is_left = True
        return True
