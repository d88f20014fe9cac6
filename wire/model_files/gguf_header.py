"""Reads the header of one GGUF file without reading its tensors.

It lists a file's keys and tensors and the places of their bytes. It does not know their meaning.

House rules for this file:
* Every count and length from the file is checked against the bytes that are there before it is used: any bytes
  either parse or raise ModelFileError.
* Long arrays (vocabularies) are located, never decoded.
* For every file, reading takes less than a second of one core and less than 64 MiB: `HeaderBudget`.
"""

from __future__ import annotations

import array
import dataclasses
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from relayline.wire.common.errors import ModelFileError
from relayline.wire.common.texts import printable
from relayline.wire.model_files.file_kind import HEAD_BYTES, foreign_kind

MAGIC = b"GGUF"
VERSIONS = (2, 3)
HEAD_BYTES_MIN = 24  # magic, version and two counts
ALIGNMENT_DEFAULT = 32
ARRAY_DECODED_MAX = 4_096  # per-layer arrays are decoded; longer ones (vocabularies) are only located
DIMS_MAX = 4  # ggml's limit
TENSOR_NAME_BYTES_MAX = 63  # ggml's limit
KEY_BYTES_MAX = 1_024
# Of a header, or of all headers of a sharded set. The largest known vocabulary has 262,144 tokens and 514,906 merges in
# 20 MiB; models have some thousand tensors and some hundred keys, and chat templates of some ten KiB.
HEADER_BYTES_MAX = 64 * 1024 * 1024
STRINGS_MAX = 1_000_000
TOKENS_MAX = 524_288
TOKEN_BYTES_MAX = 65_536
TENSORS_MAX = 16_384
ENTRIES_MAX = 4_096
ITEMS_DECODED_MAX = 131_072
TEXT_BYTES_MAX = 4 * 1024 * 1024

TOKENS_KEY = "tokenizer.ggml.tokens"
_FORGOTTEN_BYTES = 1 << 20  # of the mapped file, once read: those pages count as this process's memory until then
_STRINGS_AT_ONCE = 65_536
_BYTE_TOKEN_BYTES = 8 + len("<0xNN>")

STRING_TYPE = 8
ARRAY_TYPE = 9
# GGUF scalar type id -> struct format (little endian).
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}

# ggml type id -> (name, values per block, bytes per block). A test holds this table to the installed ggml.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}

# A tensor's dimensions, type and offset, by the number of its dimensions.
_PLACES = [struct.Struct(f"<{n_dims}QIQ") for n_dims in range(DIMS_MAX + 1)]

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
    repeats: bool = False  # of TOKENS_KEY: whether some text appears twice
    n_byte_tokens: int = 0  # of TOKENS_KEY: how many are called <0xNN>


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


@dataclasses.dataclass(slots=True)
class HeaderBudget:
    """The remaining budget of a model's headers. The shards of one model share one."""

    header_bytes: int = HEADER_BYTES_MAX
    strings: int = STRINGS_MAX
    tokens: int = TOKENS_MAX
    tensors: int = TENSORS_MAX
    entries: int = ENTRIES_MAX
    items: int = ITEMS_DECODED_MAX
    text_bytes: int = TEXT_BYTES_MAX

    def take(self, path: Path, what: str, count: int) -> None:
        """Use some of it up. Raises ModelFileError if that is more than there is."""
        left = getattr(self, what) - count
        if left < 0:
            bound = type(self).__dataclass_fields__[what].default
            raise ModelFileError(f"{path}: has more than {bound:,} {_WHAT[what]} in its header; this is not a model")
        setattr(self, what, left)


_WHAT = {
    "header_bytes": "bytes",
    "strings": "texts in arrays",
    "tokens": "tokens",
    "tensors": "tensors",
    "entries": "metadata entries",
    "items": "values in short arrays",
    "text_bytes": "bytes of text",
}


def read_header(path: Path, file_index: int = 0, budget: HeaderBudget | None = None, size_bytes: int = 0) -> GgufFile:
    """Parse one file's header. Shards of a model are given one budget. `size_bytes`: of the whole file, where only its
    first bytes are here yet.

    Raises ModelFileError for anything that is not a well-formed GGUF whose tensors all lie inside the file, and for
    what holds more than a model does.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would keep us waiting for ever
            raise ModelFileError(f"{path}: is not a file")
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            return _parse(path, file, status, file_index, budget or HeaderBudget(), size_bytes or status.st_size)
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ModelFileError(f"{path}: it is a directory; name a file") from None
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _parse(
    path: Path, file: BinaryIO, status: os.stat_result, file_index: int, budget: HeaderBudget, size_bytes: int
) -> GgufFile:
    head = os.pread(file.fileno(), HEAD_BYTES, 0)
    if not head.startswith(MAGIC) and (kind := foreign_kind(path.name, head)):
        raise ModelFileError(f"{path}: not a GGUF file but {kind}")
    if not size_bytes:
        raise ModelFileError(f"{path}: the file is empty; download or convert it again")
    if size_bytes < HEAD_BYTES_MIN and head.startswith(MAGIC):
        raise ModelFileError(f"{path}: truncated after {size_bytes} bytes; download or convert it again")
    if size_bytes < HEAD_BYTES_MIN:
        raise ModelFileError(f"{path}: not a GGUF file: it has {size_bytes} bytes")
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        cursor = _Cursor(path, view, budget)
        if view[:4] != MAGIC:
            start = printable(view[:4].decode("latin-1"), len(MAGIC))
            raise ModelFileError(f"{path}: not a GGUF file: it starts with {start!r} and not with 'GGUF'")
        cursor.at = 4
        version = cursor.u32()
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = "big endian" if swapped in VERSIONS else f"GGUF version {version}"
            raise ModelFileError(f"{path}: {what} is not supported; convert it to a little-endian version 3 file")
        n_tensors, n_entries = cursor.u64(), cursor.u64()
        cursor.expect_items(n_tensors, 24, "tensors")
        cursor.expect_items(n_entries, 13, "metadata entries")
        budget.take(path, "tensors", n_tensors)
        budget.take(path, "entries", n_entries)
        entries: dict[str, KeyValue] = {}
        for _ in range(n_entries):
            entry = cursor.entry()
            if entry.key in entries:
                raise ModelFileError(f"{path}: metadata key {entry.key} appears twice")
            entries[entry.key] = entry
        descriptions = [cursor.tensor() for _ in range(n_tensors)]
        data_start = cursor.at
        budget.take(path, "header_bytes", data_start)
    alignment = entries["general.alignment"].value if "general.alignment" in entries else ALIGNMENT_DEFAULT
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ModelFileError(f"{path}: general.alignment is {alignment!r}, not a power of two")
    data_start += -data_start % alignment
    tensors = _placed(path, descriptions, data_start, alignment, size_bytes, file_index)
    return GgufFile(path, size_bytes, status.st_mtime_ns, entries, tensors)


_Described = tuple[str, tuple[int, ...], int, int]  # name, dims, type and offset from where the data begins


def _placed(
    path: Path, described: list[_Described], data_start: int, alignment: int, size_bytes: int, file_index: int
) -> tuple[Tensor, ...]:
    tensors: list[Tensor] = []
    expected = 0
    for name, dims, type_id, relative in described:
        tensor_bytes = _tensor_bytes(path, name, dims, type_id)
        # llama.cpp refuses what does not follow at once. A slice, laid out anew, would hide that from it.
        if relative != expected:
            what = "does not begin where the one before it ends" if tensors else "is not at the start of the data"
            raise ModelFileError(f"{path}: damaged: tensor {printable(name)} {what}; download or convert it again")
        expected += tensor_bytes + -tensor_bytes % alignment
        if data_start + relative + tensor_bytes > size_bytes:
            raise ModelFileError(
                f"{path}: truncated: tensor {printable(name)} ends at byte {data_start + relative + tensor_bytes},"
                f" the file has {size_bytes}; download or convert it again"
            )
        tensors.append(Tensor(name, dims, type_id, file_index, data_start + relative, tensor_bytes))
    return tuple(tensors)


def _tensor_bytes(path: Path, name: str, dims: tuple[int, ...], type_id: int) -> int:
    if type_id not in TENSOR_TYPES:
        raise ModelFileError(f"{path}: tensor {printable(name)} has the unknown type {type_id}")
    type_name, block, block_bytes = TENSOR_TYPES[type_id]
    if min(dims) < 1 or dims[0] % block:
        raise ModelFileError(f"{path}: tensor {printable(name)} has a shape {list(dims)} that {type_name} cannot have")
    n_values = 1
    for dim in dims:
        n_values *= dim
    return n_values // block * block_bytes


class _Cursor:
    """A position in the header that never runs past the end of the file or of the budget."""

    def __init__(self, path: Path, view: mmap.mmap, budget: HeaderBudget) -> None:
        self.path = path
        self.view = view
        self.budget = budget
        self.limit = min(len(view), budget.header_bytes)
        self.at = 0
        self._forgotten = 0

    def need(self, size_bytes: int) -> None:
        if size_bytes > self.limit - self.at:
            if self.limit < len(self.view):
                raise ModelFileError(f"{self.path}: the header is larger than {HEADER_BYTES_MAX} bytes")
            raise ModelFileError(f"{self.path}: truncated inside its header; download or convert it again")

    def expect_items(self, count: int, item_bytes: int, what: str) -> None:
        if count * item_bytes > self.limit - self.at:
            raise ModelFileError(
                f"{self.path}: announces {count} {what}, more than the file can hold: it is truncated or damaged; "
                "download or convert it again"
            )

    def forget(self) -> None:
        """Give the pages behind this position back: they are of the file, and are not read again."""
        if self.at - self._forgotten >= _FORGOTTEN_BYTES:
            end = self.at - self.at % mmap.PAGESIZE
            self.view.madvise(mmap.MADV_DONTNEED, self._forgotten, end - self._forgotten)
            self._forgotten = end

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
        self.budget.take(self.path, "text_bytes", size_bytes)
        found = self.view[self.at : self.at + size_bytes]
        self.at += size_bytes
        return found

    def name(self, what: str, bytes_max: int) -> str:
        size_bytes = self.u64()
        self.need(size_bytes)
        if size_bytes > bytes_max:
            raise ModelFileError(f"{self.path}: a {what} has {size_bytes} bytes; at most {bytes_max} are read")
        raw = self.view[self.at : self.at + size_bytes]
        self.at += size_bytes
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise ModelFileError(f"{self.path}: a {what} is not valid UTF-8") from None

    def skip_strings(self, count: int) -> None:
        """Step over an array of strings; one of the two loops here that real files run 500,000 times."""
        view, limit, at, unpack = self.view, self.limit, self.at, struct.Struct("<Q").unpack_from
        for left in range(count, 0, -_STRINGS_AT_ONCE):
            for _ in range(min(left, _STRINGS_AT_ONCE)):
                if limit - at < 8:
                    self.at = at
                    self.need(8)
                at += 8 + unpack(view, at)[0]
                if at > limit:
                    self.at = limit
                    self.need(1)
            self.at = at
            self.forget()

    def tokens(self, count: int) -> tuple[bool, int]:
        """Step over the vocabulary; returns whether two of its texts are equal, and how many are named <0xNN>.

        Compared by 64-bit hashes with a random key. Empty texts are left out: llama.cpp names them itself.
        """
        view, limit, at, unpack = self.view, self.limit, self.at, struct.Struct("<Q").unpack_from
        hashes, n_byte_tokens = array.array("q"), 0
        for left in range(count, 0, -_STRINGS_AT_ONCE):
            for _ in range(min(left, _STRINGS_AT_ONCE)):
                if limit - at < 8:
                    self.at = at
                    self.need(8)
                end = at + 8 + unpack(view, at)[0]
                if end > limit:
                    self.at = limit
                    self.need(1)
                text = view[at + 8 : min(end, at + 8 + TOKEN_BYTES_MAX)]
                if end - at - 8 > TOKEN_BYTES_MAX:
                    raise ModelFileError(f"{self.path}: a token has more than {TOKEN_BYTES_MAX} bytes")
                if text:
                    hashes.append(hash(text))
                    n_byte_tokens += end - at == _BYTE_TOKEN_BYTES and text[:3] == b"<0x"
                at = end
            self.at = at
            self.forget()
        ordered = np.sort(np.frombuffer(hashes, np.int64)) if hashes else np.zeros(0, np.int64)
        return bool((ordered[1:] == ordered[:-1]).any()), n_byte_tokens

    def entry(self) -> KeyValue:
        start = self.at
        key = self.name("metadata key", KEY_BYTES_MAX)
        type_id = self.u32()
        if type_id == ARRAY_TYPE:
            return self.array(key, start)
        value: Value
        if type_id == STRING_TYPE:
            value = self.raw_string().decode("utf-8", errors="replace")
        else:
            value = self.scalar(self.form(key, type_id))
        return KeyValue(key, type_id, type_id, 1, start, self.at, value)

    def form(self, key: str, type_id: int) -> str:
        form = SCALARS.get(type_id)
        if form is None:
            raise ModelFileError(f"{self.path}: metadata key {printable(key)} has the unknown type {type_id}")
        return form

    def array(self, key: str, start: int) -> KeyValue:
        item_type, length = self.u32(), self.u64()
        value, repeats, n_byte_tokens = None, False, 0
        if item_type == STRING_TYPE:
            self.expect_items(length, 8, f"items of {printable(key)}")
            self.budget.take(self.path, "strings", length)
            if key == TOKENS_KEY:
                self.budget.take(self.path, "tokens", length)
                repeats, n_byte_tokens = self.tokens(length)
            else:
                self.skip_strings(length)
        else:
            form = self.form(key, item_type)
            self.expect_items(length, struct.calcsize(form), f"items of {printable(key)}")
            if length <= ARRAY_DECODED_MAX:
                self.budget.take(self.path, "items", length)
                value = struct.unpack_from(f"<{length}{form[1]}", self.view, self.at)
            self.at += length * struct.calcsize(form)
            self.forget()
        return KeyValue(key, ARRAY_TYPE, item_type, length, start, self.at, value, repeats, n_byte_tokens)

    def tensor(self) -> _Described:
        name = self.name("tensor name", TENSOR_NAME_BYTES_MAX)
        n_dims = self.u32()
        if not 1 <= n_dims <= DIMS_MAX:
            raise ModelFileError(f"{self.path}: tensor {name!r} has {n_dims} dimensions")
        form = _PLACES[n_dims]
        self.need(form.size)
        *dims, type_id, offset = form.unpack_from(self.view, self.at)
        self.at += form.size
        return name, tuple(dims), type_id, offset
