"""Frames with a place in the step's batch, and how their headers leave again."""

from __future__ import annotations

import dataclasses

from relayline.stage.engine.lane_places import Grid
from relayline.stage.queue_types import QueuedFrame
from relayline.stage.steps.lanes import Lane
from relayline.wire.envelopes.frames import Head, grid_of


@dataclasses.dataclass(slots=True)
class Placed:
    """A frame that runs in this step."""

    frame: QueuedFrame
    row: int  # first row in the batch
    lane: Lane
    drop_from: int | None  # the lane forgets from here first

    @property
    def position_after(self) -> int:
        """The position of the row that would come next."""
        return self.frame.position + self.frame.n_rows


def grid_at(placed: Placed) -> Grid:
    """Return the places of a frame's rows, where it is a part of an image (Flag.GRID)."""
    frame = placed.frame
    n_before, width, height = grid_of(frame.argument)
    return Grid(placed.row, frame.n_rows, placed.lane.index, frame.position - n_before, n_before, width, height)


def run_length(placed: list[Placed], at: int) -> int:
    """Return how many frames from `at` on are adjacent in one received message."""
    first = placed[at].frame
    payload, end_row = first.payload, first.first_row + first.n_rows
    run = 1
    for item in placed[at + 1 :]:
        frame = item.frame
        if frame.payload is not payload or frame.first_row != end_row:
            break
        end_row += frame.n_rows
        run += 1
    return run


def heads_of(forwarded: list[QueuedFrame]) -> list[Head]:
    """Return the headers of frames for the next stage; sealing fills the checksums in."""
    return [
        (f.session_id, f.epoch, f.position, f.n_rows, f.flags, f.argument, 0, f.arrived_ns, f.trace) for f in forwarded
    ]
