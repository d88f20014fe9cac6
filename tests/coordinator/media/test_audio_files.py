"""Audio files in messages and before they are unpacked: taken, made sound, or refused in one line."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relayline.coordinator.media.audio_headers import SAMPLE_MAX, checked
from relayline.coordinator.media.encoder import Encoder
from relayline.coordinator.media.memory_limit import no_more_memory_than
from relayline.coordinator.media.parts import Takes, take_media
from relayline.wire.common.bounds import AUDIO_SECONDS_MAX, MEDIA_BYTES_MAX
from relayline.wire.common.errors import InvalidRequestError
from relayline.wire.common.memory import address_space_bytes
from tests.support.tiny_audio import make_audio_projector, sound
from tests.support.tiny_models import make_tiny
from tests.support.tiny_shapes import N_EMBD
from tests.support.whole_with_images import needs_library

WAV = sound(1)
AUDIO = Takes(audio=True)
XING = bytes(36) + b"Xing" + struct.pack(">II", 1, 1 << 30) + bytes(400)


def part(data: bytes = WAV, kind: str = "input_audio", head: str = "") -> dict[str, Any]:
    sent = head + base64.b64encode(data).decode()
    return {"type": kind, kind: {"data": sent, "format": "wav"} if kind == "input_audio" else {"url": sent}}


def chat(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def test_audio_leaves_a_mark_in_every_form() -> None:
    of_vllm = part(kind="audio_url", head="data:audio/wav;base64,")
    marked = take_media(
        chat({"type": "text", "text": "a"}, part(), part(head="data:audio/x-wav;base64,"), of_vllm), AUDIO
    )
    assert marked.shown(marked.messages[0]["content"]) == "a" + 3 * "<__media__>"
    assert {(each.data, each.kind) for each in marked.media} == {(WAV, "audio")}
    assert marked.media[2].param == "messages[0].content[3].audio_url"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (part(b"OggS" + bytes(40)), "no WAV, MP3 or FLAC"),
        (part(b"RIFF1234WEBP"), "no WAV, MP3 or FLAC"),
        (part(b""), "no WAV, MP3 or FLAC"),
        ({"type": "input_audio"}, "needs `data`"),
        ({"type": "input_audio", "input_audio": {"data": 5}}, "needs `data`"),
        ({"type": "input_audio", "input_audio": {"data": "???"}}, "not base64"),
        ({"type": "input_audio", "input_audio": {"url": "https://example.org/a.wav"}}, "fetches none from elsewhere"),
        ({"type": "audio_url", "audio_url": {"url": "QUJD"}}, "fetches none from elsewhere"),
        (part(WAV + bytes(MEDIA_BYTES_MAX)), f"at most {MEDIA_BYTES_MAX} bytes"),
    ],
)
def test_a_part_that_is_no_audio_is_refused(given: Any, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        take_media(chat(given), AUDIO)
    assert caught.value.param == f"messages[0].content[0].{given['type']}"


def test_a_projector_takes_what_it_encodes() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    with pytest.raises(InvalidRequestError, match="takes images, and no audio"):
        take_media(chat(part()), Takes(images=True))
    with pytest.raises(InvalidRequestError, match="takes audio, and no images"):
        take_media(chat(image), AUDIO)


def wave_of(
    data: bytes, *, code: int = 1, rate: int = 8_000, size: int | None = None, before: bytes = b"", n_bytes: int = 2
) -> bytes:
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, code, 1, rate, n_bytes * rate, n_bytes, 8 * n_bytes)
    body = form + before + struct.pack("<4sI", b"data", len(data) if size is None else size) + data
    return struct.pack("<4sI4s", b"RIFF", 4 + len(body), b"WAVE") + body


def test_a_wave_has_the_sizes_that_are_there() -> None:
    plain = wave_of(bytes(range(200)))
    assert checked(plain) == plain
    lies = struct.pack("<4sII", b"fact", 4, 1 << 31)  # so many samples
    for size in (0xFFFFFFFF, 1 << 31, 200):
        assert checked(wave_of(bytes(range(200)), size=size, before=lies)) == plain
    assert checked(plain + b"LIST" + bytes(20)) == plain


def flac_of(rate: int, n_channels: int, n_frames: int) -> bytes:
    return b"fLaC" + bytes(14) + (rate << 44 | (n_channels - 1) << 41 | n_frames).to_bytes(8, "big") + bytes(30)


def test_a_flac_that_can_be_unpacked_soon_is_taken() -> None:
    for rate, n_channels, n_frames in ((48_000, 2, AUDIO_SECONDS_MAX * 48_000), (192_000, 8, 60 * 192_000)):
        data = flac_of(rate, n_channels, n_frames)
        assert checked(data) == data


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"RIFF1234WAVE", "no format"),
        (wave_of(bytes(100), code=2), "the coding 2"),
        (wave_of(bytes(100), rate=0), "is not sound"),
        (wave_of(b""), "no sound in"),
        (wave_of(bytes(100), rate=1)[:40] + struct.pack("<I", 1 << 31) + bytes(2 * AUDIO_SECONDS_MAX + 2), "at most"),
        (b"fLaC" + bytes(20), "no header"),
        (b"fLaC" + bytes(14) + ((8_000 << 44) | (1 << 35)).to_bytes(8, "big") + bytes(30), "at most"),
        (b"fLaC" + bytes(14) + (8_000 << 44).to_bytes(8, "big") + bytes(30), "no sound in"),
        (flac_of(1_048_575, 8, 1_000), "of 1048575 Hz; at most 192000"),
        (flac_of(48_000, 3, AUDIO_SECONDS_MAX * 48_000), "of 259200000 samples; at most 172800000"),
        (flac_of(192_000, 1, AUDIO_SECONDS_MAX * 192_000), "at most 172800000"),
        (b"\xff\xfb\x90\x00" + XING, "says that it has"),
        (b"ID3\x04\x00\x00\x00\x00\x01\x00" + bytes(128) + b"\xff\xfb\x90\x00" + XING, "says that it has"),
    ],
)
def test_a_header_that_lies_or_is_broken_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        checked(data)


@pytest.fixture(scope="module", name="encoder")
def encoder_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encoder]:
    directory = tmp_path_factory.mktemp("model")
    vocabulary: Path = make_tiny("llama", directory / "model.gguf", tokenizer=True)
    encoder = Encoder(make_audio_projector(directory / "mmproj.gguf"), vocabulary, N_EMBD)
    encoder.start()
    yield encoder
    encoder.close()
    encoder._end()  # of the socket, which closing leaves to a call that may wait at it


@needs_library
def test_audio_is_encoded_and_bad_files_leave_the_process_alive(encoder: Encoder) -> None:
    assert encoder.takes == Takes(audio=True)
    process = encoder._process
    segments, rows = encoder.encode(WAV, 100)
    assert (segments, rows.shape) == ([25], (25, N_EMBD))
    for bad in (
        b"\xff\xfb\x90\x00" + bytes(500),
        b"fLaC" + bytes(14) + ((8_000 << 44) | 9).to_bytes(8, "big") + bytes(30),
    ):
        with pytest.raises(InvalidRequestError, match="cannot be read"):
            encoder.encode(bad, 100)
    for sample in (np.nan, np.inf, -np.inf, 1e30):
        with pytest.raises(InvalidRequestError, match="samples that are no numbers, or beyond"):
            encoder.encode(wave_of(np.full(4_000, sample, "<f4").tobytes(), code=3, n_bytes=4), 100)
    loud = np.full(4_000, -SAMPLE_MAX / 2, "<f4").tobytes()  # less: unpacking rounds
    assert encoder.encode(wave_of(loud, code=3, n_bytes=4), 100)[0] == [25]
    assert (encoder.encode(WAV, 100)[1] == rows).all()
    assert encoder._process is process


@pytest.mark.skipif(address_space_bytes() is None, reason="not Linux")
def test_there_is_no_memory_beyond_the_bound_for_a_while() -> None:
    with no_more_memory_than(1 << 26), pytest.raises(MemoryError):
        np.zeros(1 << 30, np.uint8)
    assert len(np.zeros(1 << 30, np.uint8)) == 1 << 30
