"""Videos: which of their frames are looked at, how they stand in a prompt, and which are refused in one line."""

from __future__ import annotations

import base64
import importlib.util
import io
import struct
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from relayline.coordinator.media import projector, video_frames, video_script
from relayline.coordinator.media.encoder import Encoder
from relayline.coordinator.media.parts import VIDEO, Takes, fetched_file, take_media
from relayline.coordinator.media.segments import joined, n_rows_in
from relayline.coordinator.media.video_frames import video_of
from relayline.coordinator.media.video_script import Sampling, script
from relayline.wire.common.bounds import MEDIA_BYTES_MAX, VIDEO_FRAMES_BYTES_MAX
from relayline.wire.common.errors import InvalidRequestError
from tests.support.tiny_models import make_tiny
from tests.support.tiny_projectors import N_ROWS, make_projector
from tests.support.tiny_shapes import N_EMBD
from tests.support.tiny_videos import CODINGS, as_helper, needs_video, pictures, sound_alone, video
from tests.support.whole_with_images import needs_library

SEES = Takes(images=True, video=True)
MP4 = b"\x00\x00\x00\x20ftypisom and more"


def chat(kind: str, inner: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, kind: inner}]}]


def base64_of(data: bytes, head: str = "data:video/mp4;base64,") -> str:
    return head + base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("kind", "inner"),
    [
        ("video_url", {"url": base64_of(MP4)}),
        ("video_url", base64_of(MP4)),
        ("input_video", {"data": base64_of(MP4, "")}),
        ("input_video", {"data": base64_of(MP4)}),
        ("input_video", {"url": base64_of(MP4)}),
    ],
)
def test_both_forms_are_videos(kind: str, inner: Any) -> None:
    marked = take_media(chat(kind, inner), SEES)
    assert [(each.data, each.kind) for each in marked.media] == [(MP4, VIDEO)]
    assert marked.shown(marked.messages[0]["content"]) == "a<__media__>"


@pytest.mark.parametrize(
    ("inner", "takes", "problem"),
    [
        ({"url": base64_of(MP4)}, Takes(audio=True), "takes audio, and no images or videos"),
        ({"url": base64_of(MP4)}, Takes(images=True), r"pip install 'relayline\[video\]'"),
        ({"url": base64_of(b"#EXTM3U\nhttp://10.0.0.1/")}, SEES, "it is no MP4, MOV, WebM, MKV, AVI or GIF"),
        ({"url": base64_of(b"ffconcat version 1.0\nfile /etc/passwd")}, SEES, "it is no MP4"),
        ({"url": "https://example.org/a.mp4"}, SEES, "fetches none from elsewhere, see --media-hosts"),
        ({"url": "file:///etc/passwd"}, SEES, "a video is sent itself"),
        ({}, SEES, "needs `url`, an address, or `data`"),
        ({"url": "data:video/mp4;base64,???"}, SEES, "is not base64"),
        ({"url": base64_of(MP4 + bytes(MEDIA_BYTES_MAX))}, SEES, f"a video has at most {MEDIA_BYTES_MAX} bytes"),
    ],
)
def test_what_is_no_video_is_refused_at_its_place(inner: Any, takes: Takes, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        take_media(chat("video_url", inner), takes)
    assert caught.value.param == "messages[0].content[1].video_url"
    assert "\n" not in caught.value.message


def test_videos_of_allowed_hosts_are_fetched() -> None:
    (asked,) = take_media(chat("video_url", {"url": "https://example.org/a.mp4"}), SEES, ("example.org",)).media
    assert (asked.kind, asked.address) == (VIDEO, "https://example.org/a.mp4")
    assert fetched_file(asked, MP4, "there").data == MP4
    with pytest.raises(InvalidRequestError, match="it is no MP4"):
        fetched_file(asked, b"<html>", "there")


def test_times_stand_behind_frames_and_part_twos() -> None:
    pieces = list(script(44, 4.0))
    assert pieces[:5] == ["Video:", (0,), "[0m0.00s]", (1, 2), (3, 4)]
    assert [piece for piece in pieces if isinstance(piece, str)][1:] == ["[0m0.00s]", "[0m5.00s]", "[0m10.00s]"]
    assert pieces[pieces.index("[0m5.00s]") - 1] == (19, 20)
    assert pieces[-2:] == [(41, 42), (43,)]
    assert [frame for piece in pieces if not isinstance(piece, str) for frame in piece] == list(range(44))
    slow = [piece for piece in script(4, 1 / 25) if isinstance(piece, str)]
    assert slow == ["Video:", "[0m0.00s]", "[0m25.00s]", "[0m50.00s]", "[1m15.00s]"]


def test_longer_and_larger_videos_have_a_lower_rate() -> None:
    sampling = Sampling(4.0, 32)
    assert sampling.rate(8, 640, 480) == 4
    assert sampling.rate(16, 640, 480) == 2
    assert sampling.rate(0, 640, 480) == 4, "one picture"
    n_fitting = VIDEO_FRAMES_BYTES_MAX // (3 * 4096 * 2160)
    assert sampling.rate(8, 4096, 2160) == n_fitting / 8 < 4


def test_tokens_that_follow_each_other_are_one_segment() -> None:
    assert joined([[1], [2, 3], 4, [5], [6]]) == [[1, 2, 3], 4, [5, 6]]


@needs_video
@pytest.mark.parametrize("container", CODINGS)
def test_every_format_is_read(container: str) -> None:
    found = video_of(video(1, 8, container=container, size=(64, 48)), Sampling())
    drawn = pictures(1, 8, (64, 48))
    assert (len(found.frames), found.rate) == (8, 4.0)
    for frame, picture in zip(found.frames, drawn, strict=True):
        assert frame.shape == picture.shape
        assert np.abs(frame.astype(int) - picture).mean() < 40


@needs_video
def test_frames_and_texts_are_those_of_llama_cpp() -> None:
    file = video(2, 26)
    frames, rate = video_of(file, Sampling())
    found: list[Any] = []
    for piece in script(len(frames), rate):
        found += [piece] if isinstance(piece, str) else [frames[at] for at in piece]
    for ours, theirs in zip(found, as_helper(file), strict=True):
        assert np.array_equal(ours, theirs)


@needs_video
@pytest.mark.parametrize(
    ("n_frames", "fps", "sampling", "n_found", "rate"),
    [
        (30, 10, Sampling(4.0, 32), 12, 4.0),
        (30, 10, Sampling(20.0, 64), 60, 20.0),  # frames that stand are looked at twice, as in llama.cpp
        (90, 10, Sampling(4.0, 18), 18, 2.0),
        (2, 10, Sampling(0.5, 32), 1, 0.5),  # shorter than a frame at that rate
        (1, 4, Sampling(), 1, 4.0),
    ],
)
def test_frames_are_chosen_at_a_rate(n_frames: int, fps: int, sampling: Sampling, n_found: int, rate: float) -> None:
    found = video_of(video(3, n_frames, fps=fps), sampling)
    assert (len(found.frames), found.rate) == (n_found, rate)


@needs_video
@pytest.mark.parametrize(
    ("matrix", "seen"),
    [
        ((0, 1, -1, 0), lambda lying: np.rot90(lying, -1)),  # a telephone's
        ((0, -1, 1, 0), np.rot90),
        ((-1, 0, 0, -1), lambda lying: np.rot90(lying, 2)),
        ((-1, 0, 0, 1), lambda lying: lying[:, ::-1]),  # mirrored, as a camera on the front has it
        ((1, 0, 0, -1), lambda lying: lying[::-1]),
        ((0, 1, 1, 0), lambda lying: lying.swapaxes(0, 1)),
        ((0, -1, -1, 0), lambda lying: np.rot90(lying, 2).swapaxes(0, 1)),
        ((0, 0, 0, 0), lambda lying: lying),  # some programs write nothing
    ],
)
def test_videos_are_turned_and_mirrored_as_their_track_says(matrix: tuple[int, ...], seen: Any) -> None:
    file = bytearray(video(4, 2, size=(64, 48)))
    at, (a, b, c, d) = file.index(b"tkhd") + 44, (each << 16 for each in matrix)
    file[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    lying, upright = (video_of(each, Sampling()).frames for each in (video(4, 2, size=(64, 48)), bytes(file)))
    assert np.array_equal(upright[1], seen(lying[1]))


@needs_video
def test_sound_is_left_out_and_a_broken_packet_too() -> None:
    whole = video_of(video(5, 8, has_sound=True), Sampling()).frames
    assert len(whole) == 8
    file = bytearray(video(5, 8, container="avi"))
    at = file.index(b"00dc", file.index(b"movi") + 200)
    file[at + 8 : at + 60] = bytes(52)
    assert len(video_of(bytes(file), Sampling()).frames) == 8, "its place is filled by the one before"


def long_video() -> bytes:
    import av

    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        track = file.add_stream("mpeg4", rate=Fraction(1, 1_000))
        track.width, track.height = 32, 32
        for _ in range(2):
            file.mux(track.encode(av.VideoFrame(32, 32, "yuv420p")))
        file.mux(track.encode())
    return out.getvalue()


@needs_video
@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: video(6)[:400], "the video cannot be read"),
        (lambda: MP4, "the video cannot be read"),
        (sound_alone, "has no track of pictures"),
        (lambda: video(6, coding="ffv1", container="matroska"), "coding is not read; these are: h264"),
        (long_video, "a video of 2000 seconds; at most 1800"),
        (lambda: b"\x1aE\xdf\xa3" + bytes(2_000), "the video cannot be read"),
        (lambda: b"#EXTM3U\nfile:///etc/passwd", "it is no MP4"),
    ],
)
def test_a_video_that_cannot_be_read_is_refused(make: Any, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        video_of(make(), Sampling())
    assert "\n" not in caught.value.message


@needs_video
@pytest.mark.parametrize(
    ("bound", "value", "problem"),
    [
        ("VIDEO_PIXELS_MAX", 1_000, "a video of 40 x 30 pixels; at most 1000"),
        ("VIDEO_FRAMES_READ_MAX", 5, "more than 5 pictures"),
        ("VIDEO_READ_S", -1.0, "takes longer than"),
        ("VIDEO_SECONDS_MAX", 1, "a video of 2 seconds; at most 1"),
    ],
)
def test_bounds_hold(monkeypatch: pytest.MonkeyPatch, bound: str, value: float, problem: str) -> None:
    monkeypatch.setattr(video_frames, bound, value)
    with pytest.raises(InvalidRequestError, match=problem):
        video_of(video(7, 8), Sampling())


@needs_video
def test_packets_that_give_no_pictures_have_an_end_as_well() -> None:
    packet = SimpleNamespace(decode=list)
    container = SimpleNamespace(start_time=0, demux=lambda _: [packet])
    stream = SimpleNamespace(time_base=Fraction(1, 4))
    with pytest.raises(InvalidRequestError, match="takes longer than"):
        list(video_frames._decoded(container, stream, video_frames._Facts(1, 2, 2), end_s=0.0))


@needs_video
@pytest.mark.parametrize("container", CODINGS)
def test_a_video_of_just_as_many_pixels_is_read(monkeypatch: pytest.MonkeyPatch, container: str) -> None:
    """FFmpeg holds its own bound against pictures with the margins that decoders add."""
    monkeypatch.setattr(video_frames, "VIDEO_PIXELS_MAX", 64 * 48)
    assert len(video_of(video(7, 8, container=container, size=(64, 48)), Sampling()).frames) == 8


@needs_video
def test_large_frames_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_script, "VIDEO_FRAMES_BYTES_MAX", 4 * 3 * 40 * 30)
    assert len(video_of(video(8, 16), Sampling()).frames) == 4


@pytest.fixture(scope="module", name="encoder")
def encoder_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encoder]:
    directory = tmp_path_factory.mktemp("model")
    vocabulary = make_tiny("llama", directory / "model.gguf", tokenizer=True)
    encoder = Encoder(make_projector(directory / "mmproj.gguf"), vocabulary, N_EMBD, 0, Sampling(2.0, 3))
    encoder.start()
    yield encoder
    encoder.close()


@needs_library
@needs_video
def test_the_process_takes_its_settings_counts_and_refuses(encoder: Encoder) -> None:
    assert encoder.takes == Takes(images=True, video=True)
    file = video(9, 8)
    counted, none = encoder.encode(file, 0, is_video=True)
    segments, rows = encoder.encode(file, 1_000, is_video=True)
    assert counted == segments
    assert (none.shape, rows.shape) == ((0, N_EMBD), (3 * N_ROWS["mlp"], N_EMBD)), "two seconds, three frames"
    assert sum(map(n_rows_in, segments)) == len(rows)
    process = encoder._process
    with pytest.raises(InvalidRequestError, match="the video cannot be read"):
        encoder.encode(file[:300], 1_000, is_video=True)
    assert encoder._process is process, "the next file needs no other"


@needs_library
def test_without_the_library_images_are_taken_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "av" else found(name))
    vocabulary = make_tiny("llama", tmp_path / "model.gguf", tokenizer=True)
    assert projector.Projector(make_projector(tmp_path / "mmproj.gguf"), vocabulary, N_EMBD).takes == Takes(images=True)
