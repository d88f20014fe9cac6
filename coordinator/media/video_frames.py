"""The frames of a video file, unpacked by PyAV (FFmpeg's libraries) in the process that encodes.

A file gets a reader of its own format alone, and decoders of known codings: some readers of FFmpeg open other files and
addresses that a file names.
"""

from __future__ import annotations

import contextlib
import io
import math
import struct
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from relayline.coordinator.media.memory_limit import no_more_memory_than
from relayline.coordinator.media.parts import NO_VIDEO_FORMAT, NO_VIDEO_LIBRARY, video_format
from relayline.coordinator.media.video_script import Sampling
from relayline.wire.common.bounds import (
    VIDEO_FRAMES_READ_MAX,
    VIDEO_PIXELS_MAX,
    VIDEO_READ_S,
    VIDEO_SECONDS_MAX,
    VIDEO_UNPACKED_BYTES_MAX,
)
from relayline.wire.common.errors import InvalidRequestError
from relayline.wire.common.texts import printable

# By FFmpeg's names of codings; the decoders that the library may use for them, sound among them, have others at times.
_CODINGS = ("h264", "hevc", "av1", "vp9", "vp8", "mpeg4", "mpeg2video", "mpeg1video", "h263", "mjpeg", "gif", "theora")
_DECODERS = (*_CODINGS, "libdav1d", "libvpx", "libvpx-vp9")
_THREADS = 2  # each has frames of its own in memory
_MARGIN = 256  # decoders make pictures wider and higher by less, and FFmpeg holds its bound against these
_AV_TIME_BASE = 1_000_000  # of a second
_MATRIX = "<9i"  # of a track, which says how its pictures are turned and mirrored for the screen


class Video(NamedTuple):
    """The frames of a video that are looked at: all of one size, and at one rate."""

    frames: list[npt.NDArray[np.uint8]]  # [height, width, 3], upright
    rate: float  # of a second


class _Facts(NamedTuple):
    seconds: float
    width: int
    height: int


def video_of(data: bytes, sampling: Sampling) -> Video:
    """Return the frames of a video file that are looked at.

    Raises InvalidRequestError for a file that is none, that is too long or too large, or that takes too long.
    """
    try:
        import av
    except ImportError:
        raise InvalidRequestError(NO_VIDEO_LIBRARY) from None
    format_name = video_format(data)
    if not format_name:
        raise InvalidRequestError(NO_VIDEO_FORMAT)
    end_s = time.monotonic() + VIDEO_READ_S
    try:
        with no_more_memory_than(VIDEO_UNPACKED_BYTES_MAX):
            with _opened(data, format_name) as (container, stream):
                facts = _facts(container, stream, end_s)
            rate = sampling.rate(facts.seconds, facts.width, facts.height)
            with _opened(data, format_name) as (container, stream):
                frames = _frames(container, stream, facts, rate, sampling.frames_max, end_s)
    except MemoryError:
        raise InvalidRequestError(f"unpacking the video takes more than {VIDEO_UNPACKED_BYTES_MAX} bytes") from None
    except (av.FFmpegError, OSError, ValueError, EOFError, ArithmeticError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidRequestError(f"the video cannot be read: {printable(reason)[:200]}") from None
    if not frames:
        raise InvalidRequestError("the video cannot be read: none of its frames could be unpacked")
    return Video(frames, rate)


@contextlib.contextmanager
def _opened(data: bytes, format_name: str) -> Iterator[tuple[Any, Any]]:
    """Give a file and its first track of pictures. Raises InvalidRequestError where it has none that is read."""
    import av

    options = {
        "format_whitelist": format_name,
        "codec_whitelist": ",".join(_DECODERS),
        "protocol_whitelist": "none",  # no file and no address can be opened besides
    }
    file = io.BytesIO(data)
    with av.open(file, format=format_name, container_options=options, metadata_errors="replace") as container:
        stream = container.streams.best("video")  # no picture of a cover, if there is another
        if stream is None:
            raise InvalidRequestError("the video has no track of pictures")
        if stream.codec_context is None or stream.codec_context.codec.canonical_name not in _CODINGS:
            raise InvalidRequestError(f"the video's coding is not read; these are: {', '.join(_CODINGS)}")
        context = stream.codec_context
        _check_size(context.width, context.height)
        padded = (context.width + _MARGIN) * (context.height + _MARGIN)
        context.options = {"max_pixels": str(max(VIDEO_PIXELS_MAX, padded))}
        context.thread_type, context.thread_count = "AUTO", _THREADS
        yield container, stream


def _facts(container: Any, stream: Any, end_s: float) -> _Facts:
    """Return how long and how large a video is, from all that it holds: headers may say anything."""
    n_packets, begin, end = 0, math.inf, -math.inf
    for packet in container.demux(stream):
        if packet.size == 0:
            continue
        n_packets += 1
        _check_work(n_packets, end_s)
        at = packet.pts if packet.pts is not None else packet.dts
        if at is not None:
            at_s = float(at * packet.time_base)
            begin, end = min(begin, at_s), max(end, at_s + float((packet.duration or 0) * packet.time_base))
    seconds = end - begin if n_packets and end > begin else 0.0
    if not n_packets:
        raise InvalidRequestError("the video has no pictures")
    if seconds > VIDEO_SECONDS_MAX:
        raise InvalidRequestError(f"a video of {seconds:.0f} seconds; at most {VIDEO_SECONDS_MAX} are taken")
    return _Facts(seconds, stream.codec_context.width, stream.codec_context.height)


def _frames(
    container: Any, stream: Any, facts: _Facts, rate: float, frames_max: int, end_s: float
) -> list[npt.NDArray[np.uint8]]:
    """Return the frames at a rate, as FFmpeg's own filters choose and convert them."""
    found: list[npt.NDArray[np.uint8]] = []
    choice, first = _Choice(rate, frames_max), None
    for frame in _decoded(container, stream, facts, end_s):
        first = first or frame
        found += choice.behind(frame)
        if len(found) >= frames_max:  # by times that are odd, or by rounding
            break
    else:
        found += choice.behind(None)
    if not found and first is not None:  # shorter than half of a frame at that rate
        found = _Choice(0, 1).behind(first)
    return found[:frames_max]


def _decoded(container: Any, stream: Any, facts: _Facts, end_s: float) -> Iterator[Any]:
    """Give the frames of a track, from time 0 on. As in FFmpeg, packets that are broken are left out."""
    import av

    start = round((container.start_time or 0) / _AV_TIME_BASE / stream.time_base)
    n_read, next_pts = 0, 0
    for packet in container.demux(stream):
        _check_work(n_read, end_s)  # many packets may give no frame
        try:
            frames = packet.decode()
        except av.InvalidDataError:
            continue
        for frame in frames:
            n_read += 1
            _check_work(n_read, end_s)
            if (frame.width, frame.height) != (facts.width, facts.height):
                raise InvalidRequestError("the video's pictures change their size")
            frame.time_base = stream.time_base
            frame.pts = frame.pts - start if frame.pts is not None else next_pts
            next_pts = frame.pts + max(frame.duration or 0, 1)
            yield frame


class _Choice:
    """FFmpeg's filter `fps`, which chooses frames, and its conversion to red, green and blue."""

    def __init__(self, rate: float, frames_max: int) -> None:
        """`rate`: 0 chooses each."""
        self._rate, self._frames_max = rate, frames_max
        self._graph: Any = None
        self._matrix = b""  # of the first frame, for all: else they had several sizes

    def behind(self, frame: Any) -> list[npt.NDArray[np.uint8]]:
        """Return the frames that are chosen once one more is known; None: no more come."""
        import av

        if self._graph is None:
            if frame is None:
                return []
            self._begin(frame)
        self._graph.push(frame)
        found: list[npt.NDArray[np.uint8]] = []
        while len(found) < self._frames_max:  # between two that are far apart there are many
            try:
                chosen = self._graph.pull()
            except (av.BlockingIOError, av.EOFError):
                break
            found.append(np.array(_upright(chosen.to_ndarray(), self._matrix), np.uint8, order="C"))
        return found

    def _begin(self, frame: Any) -> None:
        import av.filter

        self._matrix = bytes(frame.side_data.get("DISPLAYMATRIX") or b"")
        self._graph = graph = av.filter.Graph()
        source = graph.add_buffer(
            width=frame.width, height=frame.height, format=frame.format, time_base=frame.time_base
        )
        chosen = [graph.add("fps", f"{self._rate:.6f}")] if self._rate else []
        graph.link_nodes(source, *chosen, graph.add("format", "rgb24"), graph.add("buffersink")).configure()


def _upright(pixels: npt.NDArray[np.uint8], matrix: bytes) -> npt.NDArray[np.uint8]:
    """Return pixels as the matrix shows them. ffmpeg does the same, but for angles between quarters."""
    if len(matrix) != struct.calcsize(_MATRIX):
        return pixels
    x_of_x, y_of_x, _, x_of_y, y_of_y, *_ = struct.unpack(_MATRIX, matrix)
    if abs(y_of_x) > abs(x_of_x):
        pixels, x_of_x, y_of_y = pixels.swapaxes(0, 1), x_of_y, y_of_x
    return pixels[:: -1 if y_of_y < 0 else 1, :: -1 if x_of_x < 0 else 1]


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise InvalidRequestError("the video's pictures have no size")
    if width * height > VIDEO_PIXELS_MAX:
        text = f"a video of {width} x {height} pixels; at most {VIDEO_PIXELS_MAX} are taken"
        raise InvalidRequestError(text)


def _check_work(n_read: int, end_s: float) -> None:
    if n_read > VIDEO_FRAMES_READ_MAX:
        raise InvalidRequestError(f"a video of more than {VIDEO_FRAMES_READ_MAX} pictures")
    if time.monotonic() > end_s:
        raise InvalidRequestError(f"unpacking the video takes longer than {VIDEO_READ_S:g} s; send a smaller one")
