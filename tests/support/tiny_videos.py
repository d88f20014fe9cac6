"""Small videos of drawn pictures, made by the library that reads them, and what llama.cpp's own helper makes of one."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

HAS_LIBRARY = importlib.util.find_spec("av") is not None
needs_video = pytest.mark.skipif(not HAS_LIBRARY, reason="videos need PyAV: pip install 'relayline[video]'")
FPS = 4  # of most videos here: each of their frames is looked at
# Of each container a coding that the library writes. Not x265: at such sizes its encoder writes beyond its memory.
CODINGS = {"mp4": "mpeg4", "mov": "libx264", "matroska": "libx264", "webm": "libvpx-vp9", "avi": "mjpeg", "gif": "gif"}
_OPTIONS = {"libx264": {"crf": "10"}}
_FORMATS = {"gif": "rgb8", "mjpeg": "yuvj420p"}


def pictures(seed: int, n_frames: int, size: tuple[int, int] = (40, 30)) -> list[npt.NDArray[np.uint8]]:
    """Return frames: a drawn pattern that a bar crosses."""
    width, height = size
    ground = np.random.default_rng(seed).integers(0, 256, (5, 4, 3))
    large = np.kron(ground, np.ones((height // 5 + 1, width // 4 + 1, 1)))[:height, :width].astype(np.uint8)
    found = []
    for number in range(n_frames):
        picture = large.copy()
        picture[:, (7 * number) % width :][:, :8] = (255, 37 * number % 256, 0)
        found.append(picture)
    return found


def video(
    seed: int = 1, n_frames: int = 6, *, size: tuple[int, int] = (40, 30), container: str = "mp4", fps: int = FPS,
    coding: str = "", has_sound: bool = False,
) -> bytes:  # fmt: skip
    """Return a video file."""
    import av

    file, coding = io.BytesIO(), coding or CODINGS[container]
    with av.open(file, "w", format=container) as out:
        track = out.add_stream(coding, rate=fps, options=_OPTIONS.get(coding, {}))
        track.width, track.height = size
        track.pix_fmt = _FORMATS.get(coding, "yuv420p")
        sound = out.add_stream("aac", rate=16_000) if has_sound else None
        for picture in pictures(seed, n_frames, size):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format=track.pix_fmt)
            out.mux(track.encode(frame))
        out.mux(track.encode())
        if sound is not None:
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 16_000), np.float32), format="fltp", layout="mono")
            silence.sample_rate = 16_000
            out.mux(sound.encode(silence))
            out.mux(sound.encode())
    return file.getvalue()


def sound_alone() -> bytes:
    """Return an MP4 file without a track of pictures."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        track = out.add_stream("aac", rate=16_000)
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 16_000), np.float32), format="fltp", layout="mono")
        silence.sample_rate = 16_000
        out.mux(track.encode(silence))
        out.mux(track.encode())
    return file.getvalue()


def is_video(file: bytes) -> bool:
    """Whether a test's file is a video: of other kinds, none begins like these."""
    return file[4:8] == b"ftyp" or file.startswith(b"\x1aE\xdf\xa3") or file[8:12] == b"AVI "


def as_helper(file: bytes) -> Iterator[str | npt.NDArray[np.uint8]]:
    """Give what llama.cpp's helper (`mtmd_helper_video::read_next`) makes of a video of FPS frames a second.

    Its own code needs an ffmpeg, and is not compiled in here. It takes each frame of such a video as it is.
    """
    import av

    yield "Video:"
    elapsed = due = 0.0
    with av.open(io.BytesIO(file)) as container:
        for frame in container.decode(video=0):
            yield frame.reformat(format="rgb24", interpolation="BICUBIC").to_ndarray()
            if elapsed >= due:
                yield f"[{int(elapsed // 60)}m{elapsed % 60:.2f}s]"
                due += 5
            elapsed += 1 / FPS
