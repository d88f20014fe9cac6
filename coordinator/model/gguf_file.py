"""Reads the header of a GGUF model, single file or sharded set, without reading its tensors.

What this module does not know: families, cuts, stages. It answers which keys and tensors a file holds and where
their bytes lie, so that they can be copied as they are.

House rules for this file:
* Every count and length from the file is checked against the bytes that are there before it is used: any bytes
  either parse or raise ModelFileError.
* Long arrays (vocabularies) are located, never decoded.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import gguf

from relayline.wire.common.errors import ModelFileError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT_DEFAULT = 32
HEADER_BYTES_MAX = 128 * 1024 * 1024  # ten times the largest known vocabulary; keeps a split inside its memory bound
ARRAY_DECODED_MAX = 4_096  # per-layer arrays are decoded; longer ones (vocabularies) are only located
DIMS_MAX = 4  # ggml's limit
SHARDS_MAX = 4_096

SHARD_NAME = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")

STRING_TYPE = 8
ARRAY_TYPE = 9
# GGUF scalar type id -> struct format (little endian).
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}

# ggml type id -> (name, values per block, bytes per block). The gguf package lags behind the newest type and has
# another size for Q8_1 than ggml; a test holds this table to the installed ggml.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    int(kind): (kind.name, block, size) for kind, (block, size) in gguf.GGML_QUANT_SIZES.items()
} | {9: ("Q8_1", 32, 36), 42: ("Q2_0", 64, 18)}

Scalar = int | float | bool | str
Value = Scalar | tuple[Scalar, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class KeyValue:
    """One metadata entry and where its bytes (key, type and value) lie in its file."""

    key: str
    type_id: int  # GGUF value type
    item_type: int  # type of an array's items; equal to type_id otherwise
    length: int  # items of an array; 1 otherwise
    start: int  # file offset of the entry's first byte
    end: int  # file offset past its last byte
    value: Value | None  # None for arrays longer than ARRAY_DECODED_MAX and for arrays of strings


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor's description and the place of its bytes."""

    name: str
    dims: tuple[int, ...]  # ggml order: the first is the contiguous one
    type_id: int  # ggml type
    file_index: int  # which file of the set holds it
    offset: int  # absolute, in that file
    size_bytes: int

    @property
    def type_name(self) -> str:
        """Return ggml's name of the type, Q4_K for instance."""
        return TENSOR_TYPES[self.type_id][0]


@dataclasses.dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of one file. `tensors` keep the file's order."""

    path: Path
    size_bytes: int
    mtime_ns: int
    entries: Mapping[str, KeyValue]
    tensors: tuple[Tensor, ...]

    def value(self, key: str) -> Value | None:
        """Return a decoded value, or None when the key is absent or too long to be decoded."""
        entry = self.entries.get(key)
        return None if entry is None else entry.value


@dataclasses.dataclass(frozen=True, slots=True)
class GgufModel:
    """A whole model: the metadata of the first file and the tensors of all files, in order."""

    files: tuple[GgufFile, ...]
    tensors: Mapping[str, Tensor]

    @property
    def entries(self) -> Mapping[str, KeyValue]:
        """Return the metadata entries by key; llama.cpp too reads them from the first file only."""
        return self.files[0].entries

    @property
    def path(self) -> Path:
        """Return the path that names the model: its only file or its first shard."""
        return self.files[0].path

    def value(self, key: str) -> Value | None:
        """Return a decoded metadata value, or None."""
        return self.files[0].value(key)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer value.

        Raises ModelFileError when it has another type, or is absent and there is no default.
        """
        found = self.value(key)
        if found is None and key not in self.entries and default is not None:
            return default
        if isinstance(found, bool) or not isinstance(found, int):
            what = "is missing" if key not in self.entries else "is not an integer"
            raise ModelFileError(f"{self.path}: metadata key {key} {what}; the file is not a complete language model")
        return found

    def text(self, key: str, default: str = "") -> str:
        """Return a string value, or the default when it is absent or of another type."""
        found = self.value(key)
        return found if isinstance(found, str) else default


def open_model(path: Path) -> GgufModel:
    """Read the headers of a model given as its only file or as the first file of a sharded set.

    Raises ModelFileError: no such file, not a GGUF, truncated, inconsistent, or a shard missing or out of place.
    """
    first = read_header(path)
    count = first.value("split.count")
    named = SHARD_NAME.match(path.name)
    if not isinstance(count, int) or count <= 1:
        if named and int(named["count"]) > 1:
            raise ModelFileError(f"{path}: named like a shard, but its metadata names no shards; rename it")
        return _joined((first,))
    if named is None or int(named["count"]) != count:
        raise ModelFileError(f"{path}: holds 1 of {count} shards, so its name must end in -00001-of-{count:05d}.gguf")
    if int(named["number"]) != 1:
        raise ModelFileError(f"{path}: is not the first shard; give {named['stem']}-00001-of-{count:05d}.gguf")
    if count > SHARDS_MAX:
        raise ModelFileError(f"{path}: {count} shards; at most {SHARDS_MAX} are read")
    shards = [first]
    for number in range(2, count + 1):
        shard_path = path.with_name(f"{named['stem']}-{number:05d}-of-{count:05d}.gguf")
        if not shard_path.is_file():
            raise ModelFileError(f"{shard_path}: shard {number} of {count} is missing")
        shards.append(read_header(shard_path, file_index=number - 1))
    for index, shard in enumerate(shards):
        if shard.value("split.no") != index or shard.value("split.count") != count:
            raise ModelFileError(
                f"{shard.path}: says it is shard {_one_based(shard.value('split.no'))} of {shard.value('split.count')},"
                f" but its name says {index + 1} of {count}"
            )
    model = _joined(tuple(shards))
    expected = first.value("split.tensors.count")
    if isinstance(expected, int) and expected != len(model.tensors):
        raise ModelFileError(f"{path}: the shards hold {len(model.tensors)} tensors, the first announces {expected}")
    return model


def _one_based(number: Value | None) -> str:
    return str(number + 1) if isinstance(number, int) else "?"


def _joined(files: tuple[GgufFile, ...]) -> GgufModel:
    tensors: dict[str, Tensor] = {}
    for file in files:
        for tensor in file.tensors:
            if tensor.name in tensors:
                raise ModelFileError(f"{file.path}: tensor {tensor.name} is there twice")
            tensors[tensor.name] = tensor
    return GgufModel(files, tensors)


def read_header(path: Path, file_index: int = 0) -> GgufFile:
    """Parse one file's header.

    Raises ModelFileError for anything that is not a well-formed GGUF whose tensors all lie inside the file.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would keep us waiting for ever
            raise ModelFileError(f"{path}: is no file")
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            return _parse(path, file, status.st_size, status.st_mtime_ns, file_index)
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: cannot be read: {error}") from error


def _parse(path: Path, file: BinaryIO, size_bytes: int, mtime_ns: int, file_index: int) -> GgufFile:
    if size_bytes < 24:
        raise ModelFileError(f"{path}: not a GGUF file ({size_bytes} bytes)")
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        cursor = _Cursor(path, view)
        if view[:4] != MAGIC:
            raise ModelFileError(f"{path}: not a GGUF file (starts with {view[:4]!r})")
        cursor.at = 4
        version = cursor.u32()
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = "big endian" if swapped in VERSIONS else f"GGUF version {version}"
            raise ModelFileError(f"{path}: {what} is not supported; convert it to a little-endian version 3 file")
        n_tensors, n_entries = cursor.u64(), cursor.u64()
        cursor.expect_items(n_tensors, 24, "tensors")
        cursor.expect_items(n_entries, 13, "metadata entries")
        entries: dict[str, KeyValue] = {}
        for _ in range(n_entries):
            entry = cursor.entry()
            if entry.key in entries:
                raise ModelFileError(f"{path}: metadata key {entry.key} is there twice")
            entries[entry.key] = entry
        descriptions = [cursor.tensor() for _ in range(n_tensors)]
        data_start = cursor.at
    alignment = entries["general.alignment"].value if "general.alignment" in entries else ALIGNMENT_DEFAULT
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ModelFileError(f"{path}: general.alignment is {alignment!r}, not a power of two")
    data_start += -data_start % alignment
    tensors = []
    for name, dims, type_id, relative in descriptions:
        tensor_bytes = _tensor_bytes(path, name, dims, type_id)
        if relative % alignment:
            raise ModelFileError(f"{path}: tensor {name} is not aligned")
        if data_start + relative + tensor_bytes > size_bytes:
            raise ModelFileError(
                f"{path}: truncated: tensor {name} ends at byte {data_start + relative + tensor_bytes},"
                f" the file has {size_bytes}; download or convert it again"
            )
        tensors.append(Tensor(name, dims, type_id, file_index, data_start + relative, tensor_bytes))
    return GgufFile(path, size_bytes, mtime_ns, entries, tuple(tensors))


def _tensor_bytes(path: Path, name: str, dims: tuple[int, ...], type_id: int) -> int:
    if type_id not in TENSOR_TYPES:
        raise ModelFileError(f"{path}: tensor {name} has the unknown type {type_id}")
    type_name, block, block_bytes = TENSOR_TYPES[type_id]
    if min(dims) < 1 or dims[0] % block:
        raise ModelFileError(f"{path}: tensor {name} has a shape {list(dims)} that {type_name} cannot have")
    n_values = 1
    for dim in dims:
        n_values *= dim
    return n_values // block * block_bytes


class _Cursor:
    """A position in the header that never runs past the file or past HEADER_BYTES_MAX."""

    def __init__(self, path: Path, view: mmap.mmap) -> None:
        self.path = path
        self.view = view
        self.limit = min(len(view), HEADER_BYTES_MAX)
        self.at = 0

    def need(self, size_bytes: int) -> None:
        if size_bytes > self.limit - self.at:
            if self.limit < len(self.view):
                raise ModelFileError(f"{self.path}: the header is larger than {HEADER_BYTES_MAX} bytes")
            raise ModelFileError(f"{self.path}: truncated inside its header; download or convert it again")

    def expect_items(self, count: int, item_bytes: int, what: str) -> None:
        if count * item_bytes > self.limit - self.at:
            raise ModelFileError(f"{self.path}: announces {count} {what}, more than the file can hold")

    def scalar(self, form: str) -> int | float | bool:
        size_bytes = struct.calcsize(form)
        self.need(size_bytes)
        (value,) = struct.unpack_from(form, self.view, self.at)
        self.at += size_bytes
        assert isinstance(value, int | float)
        return value

    def u32(self) -> int:
        return int(self.scalar("<I"))

    def u64(self) -> int:
        return int(self.scalar("<Q"))

    def raw_string(self) -> bytes:
        size_bytes = self.u64()
        self.need(size_bytes)
        found = self.view[self.at : self.at + size_bytes]
        self.at += size_bytes
        return found

    def name(self, what: str) -> str:
        raw = self.raw_string()
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise ModelFileError(f"{self.path}: a {what} is not valid UTF-8") from None

    def skip_strings(self, count: int) -> None:
        """Step over an array of strings; the one loop here that real files run 500,000 times."""
        view, limit, at, unpack = self.view, self.limit, self.at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if limit - at < 8:
                self.at = at
                self.need(8)
            at += 8 + unpack(view, at)[0]
            if at > limit:
                self.at = limit
                self.need(1)
        self.at = at

    def entry(self) -> KeyValue:
        start = self.at
        key = self.name("metadata key")
        type_id = self.u32()
        item_type, length = type_id, 1
        value: Value | None
        if type_id == STRING_TYPE:
            value = self.raw_string().decode("utf-8", errors="replace")
        elif type_id == ARRAY_TYPE:
            item_type, length, value = self.array(key)
        else:
            value = self.scalar(self.form(key, type_id))
        return KeyValue(key, type_id, item_type, length, start, self.at, value)

    def form(self, key: str, type_id: int) -> str:
        form = SCALARS.get(type_id)
        if form is None:
            raise ModelFileError(f"{self.path}: metadata key {key} has the unknown type {type_id}")
        return form

    def array(self, key: str) -> tuple[int, int, Value | None]:
        item_type, length = self.u32(), self.u64()
        if item_type == STRING_TYPE:
            self.expect_items(length, 8, f"items of {key}")
            self.skip_strings(length)
            return item_type, length, None
        form = self.form(key, item_type)
        item_bytes = struct.calcsize(form)
        self.expect_items(length, item_bytes, f"items of {key}")
        start = self.at
        self.at += length * item_bytes
        if length > ARRAY_DECODED_MAX:
            return item_type, length, None
        return item_type, length, struct.unpack_from(f"<{length}{form[1]}", self.view, start)

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.name("tensor name")
        n_dims = self.u32()
        if not 1 <= n_dims <= DIMS_MAX:
            raise ModelFileError(f"{self.path}: tensor {name!r} has {n_dims} dimensions")
        dims = tuple(self.u64() for _ in range(n_dims))
        return name, dims, self.u32(), self.u64()


def read_entries(model: GgufModel, keys: list[str]) -> list[bytes]:
    """Return the bytes of metadata entries as they stand in the file, in the order of `keys`."""
    with model.path.open("rb") as file:
        return [
            os.pread(file.fileno(), model.entries[key].end - model.entries[key].start, model.entries[key].start)
            for key in keys
        ]
