"""How a video stands in a prompt, as llama.cpp writes it (`tools/mtmd/mtmd-helper.cpp`): its frames, and texts between
them. Pure.

`Video:` comes first. Behind each frame that begins a further interval stands its time, as `[0m5.00s]`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from relayline.wire.common.bounds import VIDEO_FRAMES_BYTES_MAX

_START = "Video:"
_INTERVAL_MS = 5_000
_PIXEL_BYTES = 3
_PAIR = 2  # frames that libmtmd may merge; it takes them in twos


class Sampling(NamedTuple):
    """Which frames of a video are looked at."""

    fps: float = 4.0
    frames_max: int = 32

    def rate(self, seconds: float, width: int, height: int) -> float:
        """Return how many frames of each second are looked at: fewer than were asked for where there were too many,
        or too large ones.
        """
        most = min(self.frames_max, VIDEO_FRAMES_BYTES_MAX // (_PIXEL_BYTES * width * height))
        return self.fps if seconds * self.fps <= most else max(most, 1) / seconds


def has_library() -> bool:
    """Whether the library that unpacks videos is installed."""
    return importlib.util.find_spec("av") is not None


def script(n_frames: int, rate: float) -> Iterator[str | tuple[int, ...]]:
    """Give the texts of a video, and the numbers of one frame or of two that follow each other without a text.

    libmtmd merges the frames of these twos for models that look at two frames as one, and no others: it goes from the
    first to the last, and a text parts frames. All times are floats of 32 bits, as llama.cpp's are.
    """
    yield _START
    held: tuple[int, ...] = ()
    next_ms = np.float32(0)
    for frame in range(n_frames):
        held = (*held, frame)
        elapsed_ms = np.float32(frame) / np.float32(rate) * np.float32(1_000)
        is_timed = elapsed_ms >= next_ms
        if is_timed or len(held) == _PAIR or frame == n_frames - 1:
            yield held
            held = ()
        if is_timed:
            yield _time_text(elapsed_ms / np.float32(1_000))
            next_ms += np.float32(_INTERVAL_MS)


def _time_text(seconds: np.float32) -> str:
    minutes = int(seconds / np.float32(60))
    return f"[{minutes}m{float(seconds - np.float32(minutes) * np.float32(60)):.2f}s]"
