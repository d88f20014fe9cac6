"""The encoder process: formats and sizes of images, a crash, and projectors that it refuses."""

from __future__ import annotations

import io
import os
import signal
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from relayline.coordinator.media import encoder as encoder_module
from relayline.coordinator.media.encoder import Encoder
from relayline.coordinator.media.projector import pixels_of
from relayline.wire.common.bounds import IMAGE_PIXELS_MAX
from relayline.wire.common.child_command import code_command
from relayline.wire.common.errors import InternalError, InvalidRequestError, StartError, UsageError
from tests.support.tiny_models import make_tiny
from tests.support.tiny_projectors import N_ROWS, make_projector, picture
from tests.support.tiny_shapes import N_EMBD
from tests.support.whole_with_images import needs_library


@pytest.fixture(scope="module", name="vocabulary")
def vocabulary_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "model.gguf", tokenizer=True)


@pytest.fixture(name="encoder")
def encoder_fixture(vocabulary: Path, tmp_path: Path) -> Iterator[Encoder]:
    encoder = Encoder(make_projector(tmp_path / "mmproj.gguf"), vocabulary, N_EMBD)
    encoder.start()
    yield encoder
    encoder.close()


@needs_library
def test_images_are_encoded_counted_and_refused_and_a_death_costs_one(encoder: Encoder) -> None:
    segments, rows = encoder.encode(picture(1), N_ROWS["mlp"])
    assert segments == [N_ROWS["mlp"]]
    assert rows.shape == (N_ROWS["mlp"], N_EMBD)
    counted, none = encoder.encode(picture(1), N_ROWS["mlp"] - 1)
    assert (counted, none.shape) == (segments, (0, N_EMBD))
    with pytest.raises(InvalidRequestError, match="no image"):
        encoder.encode(b"\x89PNG\r\n\x1a\n", 100)
    assert encoder._process is not None
    os.kill(encoder._process.pid, signal.SIGKILL)
    with pytest.raises(InternalError, match="starts another"):
        encoder.encode(picture(1), 100)
    assert np.array_equal(encoder.encode(picture(1), 100)[1], rows)
    pipe = encoder._pipe
    assert pipe is not None
    encoder.close()
    assert pipe.fileno() == -1, "its socket is closed, not left to the garbage collector"
    with pytest.raises(InternalError, match="is closing"):
        encoder.encode(picture(1), 100)


@needs_library
async def test_one_that_rests_ends_its_process_and_the_next_image_starts_another(encoder: Encoder) -> None:
    rows = encoder.encode(picture(1), 100)[1]
    process = encoder._process
    assert process is not None
    await encoder.rest(is_asleep=True)
    assert process.poll() is not None, "its memory is free"
    await encoder.rest(is_asleep=False)
    assert encoder._process is None, "not before it is needed"
    assert np.array_equal(encoder.encode(picture(1), 100)[1], rows)


@needs_library
def test_one_that_does_not_start_again_is_no_mistake_of_the_client(
    encoder: Encoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = encoder.encode(picture(1), 100)[1]
    assert encoder._process is not None
    os.kill(encoder._process.pid, signal.SIGKILL)
    with pytest.raises(InternalError, match="starts another"):
        encoder.encode(picture(1), 100)
    (tmp_path / "mmproj.gguf").rename(tmp_path / "away.gguf")
    with pytest.raises(InternalError, match="did not start again") as caught:
        encoder.encode(picture(1), 100)
    assert str(tmp_path) not in caught.value.message, "clients get no paths"
    assert str(tmp_path) in caplog.text
    (tmp_path / "away.gguf").rename(tmp_path / "mmproj.gguf")
    assert np.array_equal(encoder.encode(picture(1), 100)[1], rows)


@needs_library
def test_a_projector_that_does_not_load_says_why(vocabulary: Path, tmp_path: Path) -> None:
    broken = make_projector(tmp_path / "mmproj.gguf")
    broken.write_bytes(broken.read_bytes()[:-1000])
    for path in (broken, make_projector(tmp_path / "other.gguf", "idefics3")):  # whose tokens the vocabulary lacks
        encoder = Encoder(path, vocabulary, N_EMBD)
        with pytest.raises(UsageError, match=r"cannot load it|tokens that the model's vocabulary"):
            encoder.start()
        encoder.close()


@needs_library
def test_tokens_of_large_images_alone_may_be_missing(vocabulary: Path, tmp_path: Path) -> None:
    encoder = Encoder(make_projector(tmp_path / "mmproj.gguf", "lfm2"), vocabulary, N_EMBD, 16)
    try:
        encoder.start()
        assert encoder.encode(picture(1), 100)[0].count(12) == 1
        with pytest.raises(InternalError, match="tokens that the model's vocabulary does not have"):
            encoder.encode(picture(1, size=(800, 800)), 100)
    finally:
        encoder.close()


@needs_library
def test_images_of_other_sizes_have_other_keys(vocabulary: Path, tmp_path: Path) -> None:
    projector, found = make_projector(tmp_path / "mmproj.gguf"), []
    for max_tokens in (0, 16, 32):
        encoder = Encoder(projector, vocabulary, N_EMBD, max_tokens)
        encoder.start()
        found.append(encoder.identity)
        encoder.close()
    assert len(set(found)) == 3, "a prefix on disk would serve rows of another size"


LATER = "from relayline.coordinator.media import encoding; encoding._send(pipe, encoding.LATER, b'no memory')"


@pytest.mark.parametrize(
    ("code", "kind", "why"),
    [
        ("raise ValueError('a bug')", UsageError, "loading it ended the process"),
        ("os.kill(os.getpid(), 9)", StartError, "was killed"),
        (LATER, StartError, "^no memory$"),
    ],
)
def test_one_that_ends_while_it_loads_says_whether_another_may_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, kind: type[Exception], why: str
) -> None:
    head = "import os, socket, sys\nwith socket.socket(fileno=int(sys.argv[1])) as pipe:\n    "
    monkeypatch.setattr(encoder_module, "module_command", lambda _, *given: code_command(head + code, *given))
    with pytest.raises(kind, match=why):
        Encoder(tmp_path / "mmproj.gguf", tmp_path / "model.gguf", N_EMBD).start()


def test_one_that_the_system_does_not_start_may_start_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_module, "module_command", lambda *_: ["/nowhere/python"])
    encoder = Encoder(tmp_path / "mmproj.gguf", tmp_path / "model.gguf", N_EMBD)
    with pytest.raises(StartError, match="cannot be started"):
        encoder.start()
    encoder.close()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_every_format_is_read(kind: str) -> None:
    pixels = pixels_of(picture(1, kind=kind))
    assert pixels.shape == (30, 40, 3)
    assert np.abs(pixels.astype(int) - pixels_of(picture(1))).mean() < 30


def test_transparency_becomes_white_and_photographs_stand_upright() -> None:
    file = io.BytesIO()
    Image.new("RGBA", (3, 2), (9, 9, 9, 0)).save(file, "PNG")
    assert (pixels_of(file.getvalue()) == 255).all()
    file, turned = io.BytesIO(), Image.Exif()
    turned[0x0112] = 6  # by a quarter
    Image.new("RGB", (3, 2)).save(file, "JPEG", exif=turned)
    assert pixels_of(file.getvalue()).shape == (3, 2, 3)


def test_grey_images_of_16_bits_are_as_bright_as_those_of_8() -> None:
    brightness = np.arange(0, 65536, 257, np.uint16).reshape(16, 16)
    files = io.BytesIO(), io.BytesIO()
    Image.fromarray(brightness).save(files[0], "PNG")
    Image.fromarray(brightness).save(files[1], "PNG", transparency=257 * 7)
    opaque, clear = (pixels_of(file.getvalue()) for file in files)
    assert opaque.tolist() == [[[16 * row + column] * 3 for column in range(16)] for row in range(16)]
    assert clear[0, 7].tolist() == [255, 255, 255]
    assert (clear != opaque).any(axis=2).sum() == 1


@pytest.mark.parametrize("tag", [0x0100, 0x011A])  # its width, its resolution
def test_a_photograph_whose_exif_is_odd_stands_upright(tag: int) -> None:
    entries = struct.pack("<HHIHHHHI4s", 0x0112, 3, 1, 6, 0, tag, 2, 4, b"odd\0")
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + entries + bytes(4)
    file = io.BytesIO()
    Image.new("RGB", (3, 2)).save(file, "JPEG", exif=exif)
    assert pixels_of(file.getvalue()).shape == (3, 2, 3)


@pytest.mark.parametrize("factor", [1, 3])  # beyond the second Pillow refuses it by itself
def test_a_bomb_is_refused_by_its_header(factor: int) -> None:
    file = io.BytesIO()
    Image.new("1", (8, 8)).save(file, "PNG")
    side = (factor * int(IMAGE_PIXELS_MAX**0.5) + 1).to_bytes(4, "big")
    bomb = bytearray(file.getvalue())
    bomb[16:24] = side + side
    bomb[29:33] = zlib.crc32(bomb[12:29]).to_bytes(4, "big")
    with pytest.raises(InvalidRequestError, match=f"at most {IMAGE_PIXELS_MAX}"):
        pixels_of(bytes(bomb))
