"""The images and audio of one request: when each file was fetched, counted and encoded. Plain records. Pure.

Times are this process's monotonic nanoseconds; 0 means not yet. Nothing here holds a file, or the address of one.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class FileRecord:
    """One image, audio or video file."""

    kind: str  # image | audio | video
    n_bytes: int = 0
    n_rows: int = 0  # that it becomes in the prompt; 0 until they have been counted
    is_kept: bool = False  # its rows were there, encoded for an earlier request
    wait_ns: int = 0  # for the encoder, which works on one file at a time
    steps: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Start and end of the work on it that has ended, by the name of its span; none where nothing had to be done."""


@dataclasses.dataclass(slots=True)
class MediaRecord:
    """All files of one request, in the order of its messages."""

    start_ns: int = 0
    end_ns: int = 0
    files: list[FileRecord] = dataclasses.field(default_factory=list)

    @property
    def wait_ns(self) -> int:
        """Waits for the encoder, summed."""
        return sum(file.wait_ns for file in self.files)
