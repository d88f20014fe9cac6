"""Assembles GGUF headers: encoded entries in, bytes and tensor offsets out. Touches no file."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence

from relayline.wire.model_files.gguf_header import ARRAY_TYPE, MAGIC, SCALARS, STRING_TYPE, Scalar

ALIGNMENT = 32  # every artifact uses the format's default, so general.alignment is not written
VERSION = 3

U32, I32, F32, BOOL, U64 = 4, 5, 6, 7, 10


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSlot:
    """One tensor of the new file."""

    name: str
    dims: tuple[int, ...]  # ggml order
    type_id: int
    size_bytes: int


def aligned(offset: int) -> int:
    """Return the first multiple of ALIGNMENT at or above the offset."""
    return offset + -offset % ALIGNMENT


def _text(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def encode_entry(key: str, type_id: int, value: Scalar) -> bytes:
    """Encode one scalar or string metadata entry."""
    if type_id == STRING_TYPE:
        assert isinstance(value, str)
        return _text(key) + struct.pack("<I", type_id) + _text(value)
    return _text(key) + struct.pack("<I", type_id) + struct.pack(SCALARS[type_id], value)


def encode_array(key: str, item_type: int, values: Sequence[Scalar]) -> bytes:
    """Encode an array of scalars."""
    head = _text(key) + struct.pack("<IIQ", ARRAY_TYPE, item_type, len(values))
    return head + struct.pack(f"<{len(values)}{SCALARS[item_type][1]}", *values)


def encode_header(entries: Sequence[bytes], tensors: Sequence[TensorSlot]) -> bytes:
    """Return the whole header, padded, so that the first tensor's bytes may follow at once.

    Each tensor starts at the next multiple of ALIGNMENT after the one before it.
    """
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(entries)), *entries]
    offset = 0
    for tensor in tensors:
        parts.append(_text(tensor.name))
        parts.append(struct.pack("<I", len(tensor.dims)) + struct.pack(f"<{len(tensor.dims)}Q", *tensor.dims))
        parts.append(struct.pack("<IQ", tensor.type_id, offset))
        offset = aligned(offset + tensor.size_bytes)
    header = b"".join(parts)
    return header + bytes(-len(header) % ALIGNMENT)
