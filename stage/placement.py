"""Frames with a place in the step's batch, and how their headers leave again."""

from __future__ import annotations

import dataclasses

from stage.lanes import Lane
from stage.queue_types import QueuedFrame
from wire.envelope import Buffer
from wire.frames import set_traces


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


def run_length(placed: list[Placed], at: int) -> int:
    """Return how many frames from `at` on stand behind each other in one received message."""
    first = placed[at].frame
    end_row = first.source_row + first.n_rows
    run = 1
    for item in placed[at + 1 :]:
        frame = item.frame
        if first.source is None or frame.source is not first.source or frame.source_row != end_row:
            break
        end_row += frame.n_rows
        run += 1
    return run


def fill_frames(buffer: Buffer, forwarded: list[QueuedFrame]) -> None:
    """Write the header records of frames that go on to the next stage."""
    records = buffer.frames
    records["session_id"] = [frame.session_id for frame in forwarded]
    records["epoch"] = [frame.epoch for frame in forwarded]
    records["position"] = [frame.position for frame in forwarded]
    records["n_rows"] = [frame.n_rows for frame in forwarded]
    records["flags"] = [frame.flags for frame in forwarded]
    records["argument"] = [frame.argument for frame in forwarded]
    records["enqueued_ns"] = [frame.arrived_ns for frame in forwarded]
    set_traces(records, [frame.trace for frame in forwarded])
