"""The header reader against the gguf package's writer, and against any bytes at all."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relayline.coordinator.model import gguf_file
from relayline.coordinator.model.gguf_file import open_model, read_entries
from relayline.wire.common.errors import ModelFileError
from relayline.wire.model_files import gguf_header
from relayline.wire.model_files.gguf_header import HEADER_BYTES_MAX, TENSOR_TYPES, read_header
from relayline.wire.model_files.gguf_write import F32, U32, TensorSlot, encode_array, encode_entry, encode_header
from tests.support.tiny_models import make_tiny


def small_file(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.number", 7)
    writer.add_int16("a.short", -3)
    writer.add_float64("a.double", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "grüße")
    writer.add_array("a.list", [1, 2, 3])
    writer.add_array("a.words", ["x", "", "yz"])
    writer.add_tensor("t.one", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("t.two", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_values_and_tensors(tmp_path: Path) -> None:
    file = read_header(small_file(tmp_path / "m.gguf"))
    assert file.value("general.architecture") == "llama"
    assert [file.value(f"a.{key}") for key in ("number", "short", "double", "flag", "text", "list")] == [
        7, -3, 0.5, True, "grüße", (1, 2, 3),
    ]  # fmt: skip
    assert file.entries["a.words"].length == 3
    assert file.value("a.words") is None
    one, two = file.tensors
    assert (one.name, one.dims, one.type_name, one.size_bytes) == ("t.one", (3, 2), "F32", 24)
    raw = (tmp_path / "m.gguf").read_bytes()
    assert raw[two.offset : two.offset + two.size_bytes] == np.arange(5, dtype=np.float16).tobytes()


def test_a_plan_reads_a_model_once_unless_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = small_file(tmp_path / "m.gguf"), make_tiny("llama", tmp_path / "other.gguf")
    read: list[Path] = []

    def counted(path: Path, *arguments: Any, **named: Any) -> gguf_header.GgufFile:
        read.append(path)
        return read_header(path, *arguments, **named)

    monkeypatch.setattr(gguf_file, "read_header", counted)
    with gguf_file.headers_read_once():
        first = open_model(path)
        with gguf_file.headers_read_once():
            assert open_model(path) is first
        assert open_model(other).path == other
        assert read == [path, other]
        other.replace(path)
        changed = open_model(path)
        assert "a.words" in first.entries
        assert "a.words" not in changed.entries
        assert open_model(path) is changed
        path.unlink()
        with pytest.raises(ModelFileError, match="no such file"):
            open_model(path)
    small_file(path)
    read.clear()
    assert open_model(path) is not open_model(path), "nothing is remembered beyond the plan"
    assert read == [path, path]


def test_written_headers_read_back(tmp_path: Path) -> None:
    source = open_model(small_file(tmp_path / "m.gguf"))
    kept = read_entries(source, ["a.words", "a.text"])
    added = [encode_entry("b.scale", F32, 1.5), encode_array("b.list", U32, (4, 5)), encode_entry("b.name", 8, "ö")]
    slots = [TensorSlot("x", (3,), 0, 12), TensorSlot("y", (32, 2), 2, 36)]
    header = encode_header([*kept, *added], slots)
    assert len(header) % 32 == 0
    (tmp_path / "n.gguf").write_bytes(header + bytes(32 + 64))
    reader = gguf.GGUFReader(tmp_path / "n.gguf")  # an independent reader agrees
    assert reader.get_field("a.words").contents() == ["x", "", "yz"]
    assert reader.get_field("b.list").contents() == [4, 5]
    assert [(tensor.name, tensor.n_bytes) for tensor in reader.tensors] == [("x", 12), ("y", 36)]
    ours = read_header(tmp_path / "n.gguf")
    assert (ours.value("a.text"), ours.value("b.scale"), ours.value("b.name")) == ("grüße", 1.5, "ö")
    assert [tensor.offset for tensor in ours.tensors] == [len(header), len(header) + 32]


def test_tensor_types_cover_llama_cpp() -> None:
    """Every type that this llama.cpp can store has the size here that it has there."""
    from llama_cpp import llama_cpp as llama

    from relayline.stage.engine.ggml import type_traits

    native = {number: type_traits(number) for number in range(llama.GGML_TYPE_COUNT)}
    for number, traits in native.items():
        if traits is not None:
            assert TENSOR_TYPES[number][1:] == (traits.block_elements, traits.block_bytes), traits.name


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty; download or convert it again"),
        (b"GGUF", "truncated after 4 bytes; download"),
        (b"xyz", "not a GGUF file: it has 3 bytes"),
        (b"GG\x07L" + bytes(40), r"not a GGUF file: it starts with 'GG\\\\x07L' and not with 'GGUF'"),
        (b"hello world, this is no model at all", "not a GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "1152921504606846976 tensors.*truncated or damaged; download"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "metadata entries"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 62) + bytes(20), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sI", 1, b"k", 99) + bytes(8), "unknown type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 4, 1 << 61), "items of k"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 1), "unknown type 9"),
    ],
)
def test_refused_in_one_line(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=words) as caught:
        open_model(path)
    assert "\n" not in caught.value.message
    assert str(path) in caught.value.message


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        open_model(tmp_path / "nothing.gguf")
    with pytest.raises(ModelFileError) as caught:
        open_model(tmp_path)
    assert caught.value.message == f"{tmp_path}: it is a directory; name a file"


@pytest.mark.parametrize("lost", [1, 100, 5000])
def test_truncated_tensors(lost: int, tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "m.gguf", n_layers=1)
    path.write_bytes(path.read_bytes()[:-lost])
    with pytest.raises(ModelFileError, match=r"truncated: tensor .* the file has"):
        open_model(path)


@pytest.mark.parametrize(("name", "offset"), [("t.two", 0), ("t.two", 64), ("t.one", 32)])
def test_a_tensor_whose_place_is_another_ones_or_a_gap_is_refused(name: str, offset: int, tmp_path: Path) -> None:
    """Its bytes would be read, and the model would answer nonsense."""
    path = small_file(tmp_path / "m.gguf")
    raw, (one, _) = bytearray(path.read_bytes()), read_header(path).tensors
    described = raw.index(name.encode()) + len(name) + (4 + 16 if name == one.name else 4 + 8) + 4
    raw[described : described + 8] = struct.pack("<Q", offset)
    path.write_bytes(raw + bytes(64))
    with pytest.raises(ModelFileError, match=f"damaged: tensor {name} (does not begin where|is not at the start)"):
        open_model(path)


def test_endless_header_is_not_read_on(tmp_path: Path) -> None:
    """A length that points past the bound is refused even when the file is that large."""
    path = tmp_path / "m.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", HEADER_BYTES_MAX))
        file.truncate(2 * HEADER_BYTES_MAX)
    with pytest.raises(ModelFileError, match="header is larger"):
        open_model(path)


def header(n_tensors: int, n_entries: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_entries)


def text(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def texts(key: bytes, count: int, raw: bytes = b"") -> bytes:
    return text(key) + struct.pack("<IIQ", 9, 8, count) + text(raw) * count


BOMBS = {
    "entries": header(0, 5_000) + b"".join(text(b"%04d" % n) + struct.pack("<IB", 0, 1) for n in range(5_000)),
    "tensors": header(20_000, 0) + (text(b"t") + struct.pack("<IQIQ", 1, 1, 0, 0)) * 20_000,
    "texts in arrays": header(0, 1) + texts(b"a", gguf_header.STRINGS_MAX + 1),
    "tokens": header(0, 1) + texts(b"tokenizer.ggml.tokens", gguf_header.TOKENS_MAX + 1),
    "values in short arrays": header(0, 40)
    + b"".join(text(b"%02d" % n) + struct.pack("<IIQ", 9, 0, 4_096) + bytes(4_096) for n in range(40)),
    "bytes of text": header(0, 1) + text(b"general.name") + struct.pack("<I", 8) + text(b"a" * (5 << 20)),
    "a metadata key has": header(0, 1) + text(b"k" * 2_000) + struct.pack("<IB", 0, 1),
    "a tensor name has": header(1, 0) + text(b"t" * 64) + struct.pack("<IQIQ", 1, 1, 0, 0),
    "a token has": header(0, 1) + texts(b"tokenizer.ggml.tokens", 1, b"x" * 70_000),
}


@pytest.mark.parametrize("words", BOMBS)
def test_a_header_that_would_take_long_is_refused_by_a_bound(words: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(BOMBS[words] + bytes(64))
    with pytest.raises(ModelFileError, match=words):
        read_header(path)


def test_shards_share_one_bound(tmp_path: Path) -> None:
    budget = gguf_header.HeaderBudget(strings=5)
    path = small_file(tmp_path / "m.gguf")
    read_header(path, 0, budget)
    with pytest.raises(ModelFileError, match="texts in arrays"):
        read_header(path, 1, budget)


def test_the_largest_known_vocabulary_passes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    words = b"".join(text(b"token%06d" % n) for n in range(262_144))
    listed = text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 262_144) + words
    scores = text(b"tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, 262_144) + bytes(4 * 262_144)
    merges = texts(b"tokenizer.ggml.merges", 514_906, b"abcdef ghijkl")
    path.write_bytes(header(0, 3) + listed + scores + merges)
    entries = read_header(path).entries
    assert [entry.length for entry in entries.values()] == [262_144, 262_144, 514_906]
    assert not entries["tokenizer.ggml.tokens"].repeats


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = small_file(tmp_path_factory.mktemp("gguf") / "m.gguf")
    return path.with_name("mutated.gguf"), path.read_bytes()


FUZZ = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


def parses_or_refuses(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        found = open_model(path)
    except ModelFileError as error:
        assert "\n" not in error.message  # noqa: PT017  (any other exception fails the test)
    else:
        assert all(tensor.offset + tensor.size_bytes <= len(content) for tensor in found.tensors.values())


@FUZZ
@given(changes=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), min_size=1, max_size=6))
def test_any_mutation_parses_or_is_refused(changes: list[tuple[int, int]], valid: tuple[Path, bytes]) -> None:
    path, original = valid
    content = bytearray(original)
    for at, byte in changes:
        content[at % len(content)] = byte
    parses_or_refuses(path, bytes(content))


@FUZZ
@given(length=st.integers(0, 700), tail=st.binary(max_size=40))
def test_any_truncation_parses_or_is_refused(length: int, tail: bytes, valid: tuple[Path, bytes]) -> None:
    path, original = valid
    parses_or_refuses(path, original[:length] + tail)
