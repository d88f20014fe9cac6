"""Envelopes: all frames that one native step decoded, as one message in a buffer that is used again.

Encoding. A message of a given shape (frames, rows) always has the same length and the same tags, so a `Buffer` is
made once per shape and then only overwritten: header fields, frame records and payload rows are numpy views into it.
gRPC's Python binding insists on `bytes` for a message and copies them into its own slices before `write` returns, so
a Buffer is a `bytes` object filled in place through the C API's pointer to its storage. House rules for that: nobody
but the pool and one send holds the object, it is never hashed, compared or kept by the receiver of the call, and it
returns to the pool only after `write` has returned.

Decoding. A message in the canonical layout is read by views without copying. Anything else goes through the protobuf
library into the same `EnvelopeView`: other languages may write the fields as they like.

Bytes from the network either become an `EnvelopeView` whose every count, size and checksum holds, or ProtocolError.
"""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from google.protobuf.message import DecodeError

from wire import bounds, frames
from wire.errors import ChecksumError, ProtocolError
from wire.pb.relayline.v1 import relayline_pb2 as pb

DTYPE_TOKENS, DTYPE_F16, DTYPE_F32 = 1, 2, 3
NUMPY_DTYPE: dict[int, np.dtype[Any]] = {
    DTYPE_TOKENS: np.dtype("<i4"),
    DTYPE_F16: np.dtype("<f2"),
    DTYPE_F32: np.dtype("<f4"),
}
DTYPE_BY_NAME = {"f16": DTYPE_F16, "f32": DTYPE_F32}
DTYPE_NAMES = {DTYPE_TOKENS: "tokens", DTYPE_F16: "f16", DTYPE_F32: "f32"}

HEADER_DTYPE: np.dtype[np.void] = np.dtype(
    [
        ("_t1", "u1"),
        ("epoch", "<u4"),
        ("_t2", "u1"),
        ("sequence", "<u8"),
        ("_t3", "u1"),
        ("dtype", "<u4"),
        ("_t4", "u1"),
        ("n_rows", "<u4"),
        ("_t5", "u1"),
        ("width", "<u4"),
        ("_t6", "u1"),
        ("sent_ns", "<u8"),
        ("_t7", "u1"),
        ("n_frames", "<u4"),
    ]
)
HEADER_BYTES = HEADER_DTYPE.itemsize
_HEADER_CONSTANTS = {"_t1": 0x0D, "_t2": 0x11, "_t3": 0x1D, "_t4": 0x25, "_t5": 0x2D, "_t6": 0x31, "_t7": 0x3D}
_PAYLOAD_TAG = 0x4A  # field 9, length-delimited

_bytes_storage = ctypes.pythonapi.PyBytes_AsString
_bytes_storage.argtypes = [ctypes.py_object]
_bytes_storage.restype = ctypes.c_void_p


def checksum(payload: Any) -> int:  # noqa: ANN401 - any object with the buffer interface
    """Return the 64-bit XXH3 of a frame's payload bytes."""
    return xxhash.xxh3_64_intdigest(payload)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append((value & 0x7F) | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


class Buffer:
    """One reusable message of a fixed shape. `header`, `frames` and `payload` are writable views into `message`."""

    __slots__ = ("frames", "header", "message", "payload", "payload_bytes", "shape")

    def __init__(self, dtype: int, width: int, n_frames: int, n_rows: int) -> None:
        element = NUMPY_DTYPE[dtype]
        self.shape = (n_frames, n_rows)
        self.payload_bytes = n_rows * width * element.itemsize
        lead = bytes([_PAYLOAD_TAG]) + _varint(self.payload_bytes)
        payload_at = HEADER_BYTES + n_frames * frames.FRAME_BYTES + len(lead)
        self.message = bytes(payload_at + self.payload_bytes)
        storage = (ctypes.c_uint8 * len(self.message)).from_address(_bytes_storage(self.message))
        raw = np.frombuffer(storage, dtype=np.uint8)
        self.header = raw[:HEADER_BYTES].view(HEADER_DTYPE)
        self.frames = raw[HEADER_BYTES : payload_at - len(lead)].view(frames.FRAME_DTYPE)
        raw[payload_at - len(lead) : payload_at] = np.frombuffer(lead, dtype=np.uint8)
        self.payload: npt.NDArray[Any] = raw[payload_at:].view(element).reshape(n_rows, width)
        for name, value in _HEADER_CONSTANTS.items():
            self.header[name] = value
        frames.stamp_tags(self.frames)
        self.header["dtype"], self.header["width"] = dtype, width
        self.header["n_rows"], self.header["n_frames"] = n_rows, n_frames

    def seal(self, epoch: int, sequence: int, sent_ns: int) -> None:
        """Fill the header and every data frame's checksum; the last step before sending."""
        self.header["epoch"], self.header["sequence"], self.header["sent_ns"] = epoch, sequence, sent_ns
        row = 0
        sums: list[int] = []
        for n_rows in self.frames["n_rows"].tolist():
            sums.append(checksum(self.payload[row : row + n_rows]) if n_rows else 0)
            row += n_rows
        self.frames["checksum"] = sums


class BufferPool:
    """Hands out Buffers of one link by shape and takes them back. Bounded by bytes; the least used shape goes first.

    `n_created` counts allocations: in steady decode it stands still.
    """

    def __init__(self, dtype: int, width: int, keep_bytes: int = bounds.BYTES_IN_FLIGHT_DEFAULT) -> None:
        self.dtype, self.width = dtype, width
        self.n_created = 0
        self._keep_bytes, self._kept_bytes = keep_bytes, 0
        self._free: dict[tuple[int, int], list[Buffer]] = {}

    def lease(self, n_frames: int, n_rows: int) -> Buffer:
        """Return a Buffer of this shape whose frames and payload hold old values to overwrite."""
        free = self._free.get((n_frames, n_rows))
        if free:
            buffer = free.pop()
            self._kept_bytes -= len(buffer.message)
            self._free[buffer.shape] = self._free.pop(buffer.shape)  # most recently used last
            return buffer
        self.n_created += 1
        return Buffer(self.dtype, self.width, n_frames, n_rows)

    def give_back(self, buffer: Buffer) -> None:
        """Return a Buffer whose send has completed."""
        self._free.setdefault(buffer.shape, []).append(buffer)
        self._kept_bytes += len(buffer.message)
        while self._kept_bytes > self._keep_bytes and self._free:
            shape = next(iter(self._free))
            if self._free[shape]:
                self._kept_bytes -= len(self._free[shape].pop().message)
            if not self._free[shape]:
                del self._free[shape]


def with_extras(
    buffer: Buffer, exponents: npt.NDArray[np.int8] | None, options: list[pb.SessionOptions]
) -> bytes:
    """Return the message with the rare trailing fields appended (a copy); the buffer's own bytes if there are none."""
    if exponents is None and not options:
        return buffer.message
    tail = pb.Envelope(row_exponents=exponents.tobytes() if exponents is not None else b"", options=options)
    return b"".join((buffer.message, tail.SerializeToString()))


@dataclasses.dataclass(slots=True)
class EnvelopeView:
    """A received envelope, checked. Arrays are read-only views of the message where its layout allows."""

    epoch: int
    sequence: int
    dtype: int
    width: int
    sent_ns: int
    frames: frames.Records  # (n_frames,)
    payload: npt.NDArray[Any]  # (n_rows, width) of NUMPY_DTYPE[dtype]
    exponents: npt.NDArray[np.int8] | None  # (n_rows,)
    options: list[pb.SessionOptions]  # one per OPEN frame, in order
    payload_bytes: int


def parse(message: bytes, *, max_rows: int = bounds.ROWS_PER_ENVELOPE_MAX) -> EnvelopeView:
    """Read one envelope. Raises ProtocolError (ChecksumError for altered rows); never anything else."""
    if len(message) > bounds.ENVELOPE_BYTES_MAX:
        raise ProtocolError(f"envelope of {len(message)} bytes is over the limit of {bounds.ENVELOPE_BYTES_MAX}")
    view = _parse_canonical(message) or _parse_any(message)
    _check(view, max_rows)
    return view


def _parse_canonical(message: bytes) -> EnvelopeView | None:
    """Read the layout that Buffer writes by views; None for any other layout."""
    if len(message) < HEADER_BYTES:
        return None
    header = np.frombuffer(message, dtype=HEADER_DTYPE, count=1)[0]
    if any(header[name] != value for name, value in _HEADER_CONSTANTS.items()):
        return None
    n_frames, n_rows, width, dtype = (int(header[k]) for k in ("n_frames", "n_rows", "width", "dtype"))
    if dtype not in NUMPY_DTYPE or n_frames > bounds.FRAMES_PER_ENVELOPE_MAX:
        return None
    payload_bytes = n_rows * width * NUMPY_DTYPE[dtype].itemsize
    lead = bytes([_PAYLOAD_TAG]) + _varint(payload_bytes)
    lead_at = HEADER_BYTES + n_frames * frames.FRAME_BYTES
    payload_at = lead_at + len(lead)
    if message[lead_at:payload_at] != lead or len(message) < payload_at + payload_bytes:
        return None
    raw = np.frombuffer(message, dtype=np.uint8, count=n_frames * frames.FRAME_BYTES, offset=HEADER_BYTES)
    if not frames.has_canonical_tags(raw.reshape(n_frames, frames.FRAME_BYTES)):
        return None
    exponents, options = None, []
    if len(message) > payload_at + payload_bytes:
        tail = _message(message[payload_at + payload_bytes :])
        if tail.frames or tail.payload or tail.n_rows or tail.width:
            return None
        exponents, options = _exponents(tail), list(tail.options)
    payload = np.frombuffer(message, dtype=NUMPY_DTYPE[dtype], count=n_rows * width, offset=payload_at)
    return EnvelopeView(
        epoch=int(header["epoch"]),
        sequence=int(header["sequence"]),
        dtype=dtype,
        width=width,
        sent_ns=int(header["sent_ns"]),
        frames=raw.view(frames.FRAME_DTYPE),
        payload=payload.reshape(n_rows, width),
        exponents=exponents,
        options=options,
        payload_bytes=payload_bytes,
    )


def _message(data: bytes) -> pb.Envelope:
    try:
        return pb.Envelope.FromString(data)
    except DecodeError as error:
        raise ProtocolError("message is not a relayline envelope; is something else talking to this port?") from error


def _exponents(message: pb.Envelope) -> npt.NDArray[np.int8] | None:
    return np.frombuffer(message.row_exponents, dtype=np.int8) if message.row_exponents else None


def _parse_any(data: bytes) -> EnvelopeView:
    """Read any valid protobuf encoding of an Envelope."""
    message = _message(data)
    if message.dtype not in NUMPY_DTYPE:
        raise ProtocolError(f"envelope has unknown dtype {message.dtype}")
    if len(message.frames) > bounds.FRAMES_PER_ENVELOPE_MAX:
        raise ProtocolError(f"envelope holds {len(message.frames)} frames, over {bounds.FRAMES_PER_ENVELOPE_MAX}")
    element = NUMPY_DTYPE[message.dtype]
    if message.width * message.n_rows * element.itemsize != len(message.payload):
        raise ProtocolError(
            f"payload has {len(message.payload)} bytes, but {message.n_rows} rows of {message.width} were announced"
        )
    records = frames.new_frames(len(message.frames))
    for record, frame in zip(records, message.frames, strict=True):
        for name in ("session_id", "epoch", "position", "n_rows", "flags", "argument", "checksum", "enqueued_ns"):
            record[name] = getattr(frame, name)
        if len(frame.trace) not in (0, frames.TRACE_BYTES):
            raise ProtocolError(f"trace context of {len(frame.trace)} bytes, expected {frames.TRACE_BYTES} or none")
        record["trace"] = np.void(frame.trace or bytes(frames.TRACE_BYTES))
    payload = np.frombuffer(message.payload, dtype=element).reshape(message.n_rows, message.width)
    return EnvelopeView(
        epoch=message.epoch,
        sequence=message.sequence,
        dtype=message.dtype,
        width=message.width,
        sent_ns=message.sent_ns,
        frames=records,
        payload=payload,
        exponents=_exponents(message),
        options=list(message.options),
        payload_bytes=len(message.payload),
    )


def _check(view: EnvelopeView, max_rows: int) -> None:
    """Hold every count and checksum of a parsed envelope against its content."""
    counts = view.frames["n_rows"]
    flags = view.frames["flags"]
    n_rows = view.payload.shape[0]
    if int(counts.sum(dtype=np.uint64)) != n_rows:
        raise ProtocolError(f"frames announce {int(counts.sum(dtype=np.uint64))} rows, envelope holds {n_rows}")
    if counts.size and int(counts.max()) > max_rows:
        raise ProtocolError(f"a frame of {int(counts.max())} rows is over the limit of {max_rows}")
    if not 0 < view.width <= bounds.N_EMBD_MAX:
        raise ProtocolError(f"row width {view.width} is outside 1..{bounds.N_EMBD_MAX}")
    is_control = (flags & int(frames.CONTROL)) != 0
    if bool((is_control != (counts == 0)).any()):
        raise ProtocolError("a frame must either carry rows or be a control, not both or neither")
    if int((view.frames["position"].astype(np.uint64) + counts).max(initial=0)) > bounds.CTX_TOKENS_MAX:
        raise ProtocolError(f"a position is beyond the limit of {bounds.CTX_TOKENS_MAX} tokens")
    n_open = int(((flags & int(frames.Flag.OPEN)) != 0).sum())
    if n_open != len(view.options):
        raise ProtocolError(f"{n_open} open frames came with {len(view.options)} session options")
    if view.exponents is not None and (view.dtype != DTYPE_F16 or view.exponents.shape[0] != n_rows):
        raise ProtocolError("row exponents do not match the rows")
    row = 0
    for count, expected in zip(counts.tolist(), view.frames["checksum"].tolist(), strict=True):
        if count:
            if checksum(view.payload[row : row + count]) != expected:
                raise ChecksumError("a frame's rows do not match their checksum; the sender may repeat the step")
            row += count
