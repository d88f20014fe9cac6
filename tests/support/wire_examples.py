"""Envelopes for the wire tests: each example once, as a protobuf message, with two independent ways to encode it.

`canonical` writes the layout of the wire contract by `struct` alone. `library` leaves the encoding to the protobuf
library. Neither uses the code under test.
"""

from __future__ import annotations

import struct

import numpy as np
import xxhash

from relayline.wire.envelopes.frames import TRACE_BYTES, Records
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

TRACE = bytes(range(25))
BATCH_TRACE = bytes(range(100, 125))


def set_traces(frames: Records, traces: list[bytes]) -> None:
    """Write one trace context per record."""
    frames["trace"] = np.frombuffer(b"".join(traces), f"V{TRACE_BYTES}")


def frame(n_rows: int, session: int = 1, **fields: object) -> pb.Frame:
    """A frame whose fields all have different values, so that a mix-up shows."""
    values: dict[str, object] = {
        "session_id": 0x0102030405060708 + session,
        "epoch": 5,
        "position": 70_000 + session,
        "n_rows": n_rows,
        "flags": 0,
        "argument": 0,
        "enqueued_ns": 0x1122334455667788,
        "trace": TRACE,
    }
    return pb.Frame(**(values | fields))


def envelope(dtype: int, rows: np.ndarray, frames: list[pb.Frame], **fields: object) -> pb.RelayRequest:
    """An envelope around rows (n_rows, width) with the frames' checksums filled in."""
    at = 0
    for each in frames:
        part = rows[at : at + each.n_rows].tobytes()
        each.checksum = xxhash.xxh3_64_intdigest(part) if part else 0
        at += each.n_rows
    values: dict[str, object] = {
        "epoch": 5,
        "sequence": 9,
        "dtype": dtype,
        "n_rows": rows.shape[0],
        "width": rows.shape[1],
        "sent_ns": 1_234_567_890_123,
        "n_frames": len(frames),
        "frames": frames,
        "payload": rows.tobytes(),
        "batch_trace": BATCH_TRACE,
    }
    return pb.RelayRequest(**(values | fields))


def _rows(n_rows: int, width: int, dtype: str) -> np.ndarray:
    return (np.arange(n_rows * width).reshape(n_rows, width) % 509 * 7 + 1).astype(dtype)


_OPTIONS = pb.SessionOptions(temperature=0.5, top_k=40, seed=7, n_logprobs=-1)
_GREEDY = pb.SessionOptions()

# name -> a message whose frames' rows, options and exponents agree
EXAMPLES: dict[str, pb.RelayRequest] = {
    "one token": envelope(1, _rows(1, 1, "<i4"), [frame(1, flags=2)]),
    "a prompt opens a session": envelope(
        1, _rows(5, 1, "<i4"), [frame(0, flags=16), frame(5, flags=1 | 2)], options=[_OPTIONS]
    ),
    "one f16 row": envelope(2, _rows(1, 8, "<f2"), [frame(1)]),
    "f16 rows of three sessions": envelope(2, _rows(4, 6, "<f2"), [frame(1), frame(2, session=2), frame(1, session=3)]),
    "scaled f16 rows": envelope(
        2, _rows(3, 4, "<f2"), [frame(1), frame(2, session=2)], row_exponents=bytes([0, 112, 3])
    ),
    "scaled rows and an open": envelope(
        2,
        _rows(2, 4, "<f2"),
        [frame(0, session=3, flags=16), frame(2)],
        row_exponents=bytes([1, 0]),
        options=[_GREEDY],
    ),
    "exact rows": envelope(3, _rows(2, 5, "<f4"), [frame(2, flags=1)]),
    "untraced": envelope(3, _rows(1, 5, "<f4"), [frame(1, trace=bytes(25), enqueued_ns=0)], batch_trace=bytes(25)),
    "controls only": envelope(
        2,
        _rows(0, 16, "<f2"),
        [frame(0, flags=32), frame(0, session=2, flags=64), frame(0, session=3, flags=128, argument=1 << 63)],
    ),
    "guessed tokens": envelope(
        1,
        _rows(4, 1, "<i4"),
        [frame(1, flags=2), frame(3, session=2, flags=2 | 4)],
        draft_tokens=[8, 2**32 - 1, 0],
    ),
    "guessed rows, exponents and an open": envelope(
        2,
        _rows(5, 4, "<f2"),
        [frame(0, session=3, flags=16), frame(2, flags=1), frame(2, flags=2 | 4), frame(1, session=2, flags=2 | 4)],
        row_exponents=bytes([0, 0, 3, 0, 0]),
        options=[_OPTIONS],
        draft_tokens=[70, 71, 72],
    ),
    "a payload whose length takes three bytes": envelope(2, _rows(2, 8200, "<f2"), [frame(2)]),
}


def _head(message: pb.RelayRequest) -> bytes:
    """Header and frames, every fixed field in order, present even when zero."""
    parts = [
        struct.pack(
            "<BIBQBIBI", 0x0D, message.epoch, 0x11, message.sequence, 0x1D, message.dtype, 0x25, message.n_rows
        ),
        struct.pack("<BIBQBI", 0x2D, message.width, 0x31, message.sent_ns, 0x3D, message.n_frames),
        b"\x62\x19" + (message.batch_trace or bytes(25)),
    ]
    for each in message.frames:
        parts += [
            struct.pack("<BBBQBIBI", 0x42, 83, 0x09, each.session_id, 0x15, each.epoch, 0x1D, each.position),
            struct.pack("<BIBIBQ", 0x25, each.n_rows, 0x2D, each.flags, 0x31, each.argument),
            struct.pack("<BQBQBB", 0x39, each.checksum, 0x41, each.enqueued_ns, 0x4A, 25) + (each.trace or bytes(25)),
        ]
    return b"".join(parts)


def _tail(message: pb.RelayRequest, exponents: bytes) -> bytes:
    parts = [b"\x52" + varint(len(exponents)) + exponents] if exponents else []
    for options in message.options:
        parts.append(b"\x5a" + varint(options.ByteSize()) + options.SerializeToString())
    if message.draft_tokens:
        packed = struct.pack(f"<{len(message.draft_tokens)}I", *message.draft_tokens)
        parts.append(b"\x6a" + varint(len(packed)) + packed)
    return b"".join(parts)


def _sum(head: bytes, tail: bytes) -> int:
    return xxhash.xxh3_64_intdigest(tail, xxhash.xxh3_64_intdigest(head))


def canonical(message: pb.RelayRequest) -> bytes:
    """Every fixed field in order, present even when zero; exponents with every f16 payload; drafts packed."""
    head = _head(message)
    tail = _tail(message, message.row_exponents or bytes(message.n_rows if message.dtype == 2 else 0))
    parts = [head, b"\x4a" + varint(len(message.payload)) + message.payload, tail]
    if message.HasField("open"):
        parts.append(pb.RelayRequest(open=message.open).SerializeToString())
    return b"".join((*parts, struct.pack("<BQ", 0x71, _sum(head, tail))))


def sealed(message: pb.RelayRequest) -> pb.RelayRequest:
    """A copy with its checksum, as any program would make it."""
    copy = pb.RelayRequest()
    copy.CopyFrom(message)
    copy.checksum = _sum(_head(message), _tail(message, message.row_exponents))
    return copy


def library(message: pb.RelayRequest) -> bytes:
    """As any program would send it: zero fields left out."""
    return sealed(message).SerializeToString()


def varint(value: int) -> bytes:
    """A protobuf varint."""
    return bytes([value & 0x7F | 0x80]) + varint(value >> 7) if value > 0x7F else bytes([value])


def reordered(message: pb.RelayRequest) -> bytes:
    """The fields in reverse order, repeated ones in theirs."""
    parts = []
    for descriptor, value in sealed(message).ListFields():
        part = pb.RelayRequest()
        if hasattr(value, "extend"):
            getattr(part, descriptor.name).extend(value)
        elif descriptor.name == "open":
            part.open.CopyFrom(value)
        else:
            setattr(part, descriptor.name, value)
        parts.append(part.SerializeToString())
    return b"".join(reversed(parts))


# Field 100 as a varint, as fixed64, and as bytes: as a later version may add it.
UNKNOWN_FIELDS = (b"\xa0\x06\x05", b"\xa1\x06" + bytes(8), b"\xa2\x06\x03abc")


def with_unknown_fields(message: pb.RelayRequest) -> bytes:
    """Fields this version does not know, before, after, and within each frame."""
    extended = sealed(message)
    for each in extended.frames:
        each.MergeFromString(b"".join(UNKNOWN_FIELDS))
    return UNKNOWN_FIELDS[0] + extended.SerializeToString() + b"".join(UNKNOWN_FIELDS)


ENCODINGS = {
    "canonical": canonical,
    "library": library,
    "reordered": reordered,
    "unknown fields": with_unknown_fields,
}
