"""Reads envelopes. An envelope holds all frames of one native step, as one message.

A message of a given shape (frames, rows) always has the same length and the same tags: the canonical layout, which
`wire/envelopes/buffers.py` writes. It is read through views, without copying. Envelopes of ordinary rows are read in C
(`_frames.c`), which saves 7 of 11 us for 8 rows, measured by `python -m benches.tricks`. Any other layout goes through
the protobuf library into the same `EnvelopeView`, since other languages may write the fields as they like.

Every byte has a checksum: a frame's covers its rows, and the envelope's covers everything else. The envelope's is the
xxh3-64 of the tail, seeded by the xxh3-64 of the head. The head is the header and the frames in the canonical layout.
The tail is what a protobuf library writes for row exponents, options and draft tokens.

Bytes from the network either become an `EnvelopeView` with every count, size and checksum verified, or raise
ProtocolError.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from google.protobuf.message import DecodeError

from relayline.wire.common import bounds
from relayline.wire.common.errors import ChecksumError, ProtocolError
from relayline.wire.common.texts import counted
from relayline.wire.envelopes import _frames, frames, layout, trace_context
from relayline.wire.envelopes.dtypes import DTYPE_F16, DTYPE_F32, DTYPE_TOKENS
from relayline.wire.envelopes.frames import FRAME_DTYPE, Head
from relayline.wire.envelopes.messages import check_cost, split
from relayline.wire.envelopes.rows import EXPONENT_MAX
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

NUMPY_DTYPE: dict[int, np.dtype[Any]] = {
    DTYPE_TOKENS: np.dtype("<i4"),
    DTYPE_F16: np.dtype("<f2"),
    DTYPE_F32: np.dtype("<f4"),
}

# Tag and value in turn: epoch, sequence, dtype, n_rows, width, sent_ns, n_frames; then batch_trace with its length too.
HEADER = struct.Struct(layout.HEADER.struct_form(with_constants=True))
HEADER_TAGS = tuple(place.constants[0] for place in layout.HEADER.places)
HEADER_BYTES = HEADER.size
PAYLOAD_TAG, EXPONENTS_TAG = layout.TAGS["payload"], layout.TAGS["row_exponents"]
_OPTIONS_TAG, _DRAFTS_TAG = layout.TAGS["options"], layout.TAGS["draft_tokens"]
CHECKSUM, CHECKSUM_TAG = struct.Struct(layout.CHECKSUM_FORM), layout.TAGS["checksum"]
CHECKSUM_BYTES = CHECKSUM.size
_OPEN, _DRAFTED = frames.Flag.OPEN, frames.Flag.DRAFTED
_GUESSED, _WANTS_GUESSES = frames.Flag.GUESSED, frames.Flag.WANTS_GUESSES
_EITHER = _DRAFTED | _GUESSED
_DRAFT = _DRAFTED | frames.Flag.WANTS_SAMPLE  # the flags of a drafted frame, except _GUESSED
_SCORED = frames.Flag.SCORED  # the least flags of a scored frame
_CHECKPOINT, _MUTUAL, _GRID = frames.Flag.CHECKPOINT, frames.Flag.MUTUAL, frames.Flag.GRID
_CONTROL = frames.CONTROL
_ODD = _EITHER | _WANTS_GUESSES
_ALL_FLAGS = _CONTROL | frames.Flag.PREFILL | _DRAFT | _GUESSED | _WANTS_GUESSES | _CHECKPOINT | _MUTUAL | _GRID

# What ENVELOPE_BYTES_MAX allows for around the rows, see wire.common.bounds.
assert (
    bounds.FRAMES_PER_ENVELOPE_MAX * frames.FRAME_BYTES
    + HEADER_BYTES
    + CHECKSUM_BYTES
    + 6 * bounds.ROWS_PER_ENVELOPE_MAX
    <= bounds.FRAMES_PER_ENVELOPE_MAX * 256
)

checksum = xxhash.xxh3_64_intdigest
"""The 64-bit XXH3 of some bytes, with a seed if one is given."""


def rest_checksum(head: Any, tail: Any) -> int:
    """Return the checksum of everything around an envelope's rows, see the module's docstring."""
    return checksum(tail, checksum(head))


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append((value & 0x7F) | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def bytes_max_of(width: int) -> int:
    """Return the largest size in bytes of an envelope whose rows have `width` values, in any dtype."""
    return bounds.HEADERS_BYTES_MAX + bounds.ROWS_PER_ENVELOPE_MAX * width * 4


@functools.lru_cache(maxsize=256)
def lead_of(tag: int, size_bytes: int) -> bytes:
    """Return the bytes before a length-delimited field."""
    return _varint(tag) + _varint(size_bytes)


@dataclasses.dataclass(slots=True)
class EnvelopeView:
    """A received envelope, checked. Arrays are read-only views of the message where its layout allows."""

    epoch: int
    sequence: int
    dtype: int
    width: int
    sent_ns: int
    heads: list[Head]  # one per frame
    payload: npt.NDArray[Any]  # (n_rows, width) of NUMPY_DTYPE[dtype]
    exponents: npt.NDArray[np.int8] | None  # (n_rows,); None when all are zero
    options: list[pb.SessionOptions]  # one per OPEN frame, in order
    draft_tokens: tuple[int, ...]  # one per row of the DRAFTED frames, in order
    payload_bytes: int
    records: memoryview  # the frames' bytes, which `heads` were read from
    batch_trace: bytes = trace_context.NONE  # 25 bytes, see wire.envelopes.trace_context

    @property
    def frames(self) -> frames.Records:
        """The frames as records (n_frames,), for callers that want columns."""
        return np.frombuffer(self.records, dtype=FRAME_DTYPE)


def parse(message: bytes, *, max_rows: int = bounds.ROWS_PER_FRAME_MAX) -> EnvelopeView:
    """Read one envelope whose frames hold at most max_rows rows each.

    Raises ProtocolError (ChecksumError for altered rows); never anything else.
    """
    if len(message) > bounds.ENVELOPE_BYTES_MAX:
        raise ProtocolError(f"envelope of {len(message)} bytes is over the limit of {bounds.ENVELOPE_BYTES_MAX}")
    if (plain := _parse_plain(message, max_rows)) is not None:
        return plain
    view, rows = _parse_canonical(message) or _parse_any(message)
    _check_extras(view, *_check_frames(view, rows, max_rows))
    return view


def _parse_plain(message: bytes, max_rows: int) -> EnvelopeView | None:
    """Read an envelope of ordinary rows alone, with everything checked; None for any other, and for a wrong one."""
    read = _frames.read(message, checksum, bounds.FRAMES_PER_ENVELOPE_MAX)
    if read is None:
        return None
    epoch, sequence, dtype, n_rows, width, sent_ns, heads, payload_at, most_rows, last_position, batch_trace = read
    if (
        most_rows > max_rows
        or n_rows > bounds.ROWS_PER_ENVELOPE_MAX
        or width > bounds.N_EMBD_MAX
        or last_position > bounds.CTX_TOKENS_MAX
    ):
        return None
    element = NUMPY_DTYPE[dtype]
    payload = np.ndarray((n_rows, width), element, message, payload_at)
    records = memoryview(message)[HEADER_BYTES : HEADER_BYTES + len(heads) * frames.FRAME_BYTES]
    return EnvelopeView(
        epoch, sequence, dtype, width, sent_ns, heads, payload, None, [], (), payload.nbytes, records, batch_trace
    )


def _parse_canonical(message: bytes) -> tuple[EnvelopeView, memoryview] | None:
    """Read the layout that Buffer writes by views; None for any other layout. Also returns the payload's bytes."""
    if len(message) < HEADER_BYTES:
        return None
    header = HEADER.unpack_from(message)
    if header[:15:2] != HEADER_TAGS or header[15] != frames.TRACE_BYTES:
        return None
    epoch, sequence, dtype, n_rows, width, sent_ns, n_frames = header[1:14:2]
    element = NUMPY_DTYPE.get(dtype)
    if element is None or n_frames > bounds.FRAMES_PER_ENVELOPE_MAX:
        return None
    _check_shape(n_rows, width)
    payload_bytes = n_rows * width * element.itemsize
    lead = lead_of(PAYLOAD_TAG, payload_bytes)
    lead_at = HEADER_BYTES + n_frames * frames.FRAME_BYTES
    payload_at = lead_at + len(lead)
    payload_end, end = payload_at + payload_bytes, len(message) - CHECKSUM_BYTES
    if end < payload_end or message[end] != CHECKSUM_TAG or message[lead_at:payload_at] != lead:
        return None
    if not frames.has_canonical_tags(message, HEADER_BYTES, n_frames):
        return None
    view = memoryview(message)
    if rest_checksum(view[:lead_at], view[payload_end:end]) != CHECKSUM.unpack_from(message, end)[1]:
        return None  # altered, or extras that are right and written in another way
    if end - payload_end > bounds.ROWS_PER_ENVELOPE_MAX + 8:  # else these are but exponents
        check_cost(pb.RelayRequest, message[payload_end:end], "envelope")
    extras = _parse_extras(message, payload_end, end)
    if extras is None:
        return None
    records = view[HEADER_BYTES:lead_at]
    found = EnvelopeView(
        epoch=epoch,
        sequence=sequence,
        dtype=dtype,
        width=width,
        sent_ns=sent_ns,
        heads=frames.read_heads(records),
        payload=np.frombuffer(message, dtype=element, count=n_rows * width, offset=payload_at).reshape(n_rows, width),
        exponents=_exponents(extras[0]),
        options=extras[1],
        draft_tokens=extras[2],
        payload_bytes=payload_bytes,
        records=records,
        batch_trace=header[16],
    )
    return found, view[payload_at:payload_end]


def _parse_extras(message: bytes, at: int, end: int) -> tuple[bytes, list[pb.SessionOptions], tuple[int, ...]] | None:
    """Read exponents, options and drafts between two places; None if anything else is there, whole or cut."""
    exponents = drafts = b""
    options: list[pb.SessionOptions] = []
    while at < end:
        tag, size_bytes, shift = message[at], 0, 0
        if tag not in (EXPONENTS_TAG, _OPTIONS_TAG, _DRAFTS_TAG):
            return None
        while True:
            at += 1
            if at == end or shift > 28:
                return None
            size_bytes |= (message[at] & 0x7F) << shift
            shift += 7
            if message[at] < 0x80:
                break
        if size_bytes > end - at - 1:
            return None
        field = message[at + 1 : at + 1 + size_bytes]
        if tag == _OPTIONS_TAG:
            if len(options) == bounds.FRAMES_PER_ENVELOPE_MAX:
                raise ProtocolError(f"envelope holds more than {len(options)} session options")
            options.append(_message(pb.SessionOptions, field))
        elif tag == _DRAFTS_TAG:
            if size_bytes % 4:
                return None
            drafts += field
            _check_drafts(len(drafts) // 4)
        else:
            exponents = field
        at += 1 + size_bytes
    return exponents, options, struct.unpack(f"<{len(drafts) // 4}I", drafts)


def _message(kind: type[Any], data: bytes) -> Any:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise ProtocolError("message is not a relayline envelope; is something else talking to this port?") from error


def _exponents(data: bytes) -> npt.NDArray[np.int8] | None:
    """Return the exponents as an array, None when all are zero (nearly always)."""
    return np.frombuffer(data, dtype=np.int8) if data.count(0) != len(data) else None


def _parse_any(data: bytes) -> tuple[EnvelopeView, memoryview]:
    """Read any valid protobuf encoding of an Envelope. Also returns the payload's bytes, which are not copied."""
    parts = split(data, pb.RelayRequest.PAYLOAD_FIELD_NUMBER)
    if parts is None:
        raise ProtocolError("message is not a relayline envelope; is something else talking to this port?")
    rows, rest = parts
    check_cost(pb.RelayRequest, rest, "envelope")
    message: pb.RelayRequest = _message(pb.RelayRequest, rest)
    if message.HasField("open"):
        raise ProtocolError("a handshake came in the middle of a link")
    if message.part_of_bytes or message.part_at or message.part:
        raise ProtocolError("an envelope is also said to be a part of one")
    if message.dtype not in NUMPY_DTYPE:
        raise ProtocolError(f"envelope has unknown dtype {message.dtype}")
    if len(message.frames) > bounds.FRAMES_PER_ENVELOPE_MAX:
        raise ProtocolError(f"envelope holds {len(message.frames)} frames, over {bounds.FRAMES_PER_ENVELOPE_MAX}")
    if len(message.frames) != message.n_frames:
        raise ProtocolError(f"envelope announces {message.n_frames} frames and holds {len(message.frames)}")
    _check_shape(message.n_rows, message.width)
    _check_drafts(len(message.draft_tokens))
    element = NUMPY_DTYPE[message.dtype]
    if message.width * message.n_rows * element.itemsize != len(rows):
        raise ProtocolError(
            f"payload has {len(rows)} bytes, but {message.n_rows} rows of {message.width} were announced"
        )
    if message.row_exponents and len(message.row_exponents) != message.n_rows:
        raise ProtocolError("row exponents do not match the rows")
    payload = np.frombuffer(rows, dtype=element).reshape(message.n_rows, message.width)
    records = memoryview(_records(message).tobytes())
    tail = pb.RelayRequest(
        row_exponents=message.row_exponents, options=message.options, draft_tokens=message.draft_tokens
    )
    batch_trace = _trace(message.batch_trace)
    if rest_checksum(_header_of(message, batch_trace) + records, tail.SerializeToString()) != message.checksum:
        raise ChecksumError("an envelope's headers do not match their checksum; the sender may repeat the step")
    view = EnvelopeView(
        epoch=message.epoch,
        sequence=message.sequence,
        dtype=message.dtype,
        width=message.width,
        sent_ns=message.sent_ns,
        heads=frames.read_heads(records),
        payload=payload,
        exponents=_exponents(message.row_exponents),
        options=list(message.options),
        draft_tokens=tuple(message.draft_tokens),
        payload_bytes=len(rows),
        records=records,
        batch_trace=batch_trace,
    )
    return view, rows


def _header_of(message: pb.RelayRequest, batch_trace: bytes) -> bytes:
    """Return a message's header in the canonical layout."""
    t1, t2, t3, t4, t5, t6, t7, t8 = HEADER_TAGS
    head = (t1, message.epoch, t2, message.sequence, t3, message.dtype, t4, message.n_rows, t5, message.width)
    return HEADER.pack(*head, t6, message.sent_ns, t7, message.n_frames, t8, frames.TRACE_BYTES, batch_trace)


def _records(message: pb.RelayRequest) -> frames.Records:
    records = frames.new_frames(len(message.frames))
    for index, frame in enumerate(message.frames):
        for name in ("session_id", "epoch", "position", "n_rows", "flags", "argument", "checksum", "enqueued_ns"):
            records[name][index] = getattr(frame, name)
        records["trace"][index] = np.void(_trace(frame.trace))
    return records


def _trace(context: bytes) -> bytes:
    if len(context) not in (0, frames.TRACE_BYTES):
        raise ProtocolError(f"trace context of {len(context)} bytes, expected {frames.TRACE_BYTES} or none")
    return context or trace_context.NONE


def _check_shape(n_rows: int, width: int) -> None:
    if n_rows > bounds.ROWS_PER_ENVELOPE_MAX:
        raise ProtocolError(f"envelope of {n_rows} rows is over the limit of {bounds.ROWS_PER_ENVELOPE_MAX}")
    if not 0 < width <= bounds.N_EMBD_MAX:
        raise ProtocolError(f"row width {width} is outside 1..{bounds.N_EMBD_MAX}")


def _check_drafts(n_tokens: int) -> None:
    """Before they become Python's integers, which take ten times their room."""
    if n_tokens > bounds.ROWS_PER_ENVELOPE_MAX:
        raise ProtocolError(f"an envelope's draft tokens are over the limit of {bounds.ROWS_PER_ENVELOPE_MAX}")


def _check_frames(view: EnvelopeView, rows: memoryview, max_rows: int) -> tuple[int, int]:
    """Hold every count, flag and checksum of a parsed envelope against its content.

    Returns how many frames open, and how many rows are of drafted ones.
    """
    if not view.heads:
        raise ProtocolError("envelope has no frames")
    n_rows = sum([head[3] for head in view.heads])
    if n_rows != view.payload.shape[0]:
        raise ProtocolError(f"frames announce {counted(n_rows, 'row')}, envelope holds {view.payload.shape[0]}")
    row_bytes = view.width * view.payload.itemsize
    at = n_open = n_drafted = 0
    for _, _, position, count, flags, argument, expected, _, _ in view.heads:
        control = flags & _CONTROL
        if (control == 0) == (count == 0):
            raise ProtocolError("a frame must either carry rows or be a control, not both or neither")
        if control & (control - 1) or flags & ~_ALL_FLAGS or (flags & _ODD and not _is_meant(flags)):
            raise ProtocolError(f"frame flags {flags:#x} have no meaning")
        if control and flags & _CHECKPOINT:
            raise ProtocolError("a frame that is to leave a checkpoint carries no rows")
        if flags & (_MUTUAL | _GRID):
            _check_image(flags, argument, position, count)
        if position + count > bounds.CTX_TOKENS_MAX:
            raise ProtocolError(f"a position is beyond the limit of {bounds.CTX_TOKENS_MAX} tokens")
        if count == 0:
            n_open += control == _OPEN
            continue
        if count > max_rows:
            raise ProtocolError(f"a frame of {count} rows is over the limit of {max_rows}")
        if checksum(rows[at : at + count * row_bytes]) != expected:
            raise ChecksumError("a frame's rows do not match their checksum; the sender may repeat the step")
        at += count * row_bytes
        if flags & _DRAFTED:
            n_drafted += count
            if count > (bounds.SCORED_ROWS_MAX if flags & _SCORED == _SCORED else bounds.DRAFT_TOKENS_MAX + 1):
                raise ProtocolError(f"a drafted frame of {count} rows is over the limit")
    return n_open, n_drafted


def _is_meant(flags: int) -> bool:
    """Return whether these are flags of guesses, of a prompt whose rows are scored, or of a row that wants guesses."""
    if flags & _WANTS_GUESSES:
        flags &= ~_WANTS_GUESSES
        return flags == frames.Flag.WANTS_SAMPLE or flags & ~_GUESSED == _DRAFT
    return flags & ~_GUESSED == _DRAFT or flags & ~(frames.Flag.WANTS_SAMPLE | _CHECKPOINT) == _SCORED


def _check_image(flags: int, argument: int, position: int, n_rows: int) -> None:
    """Hold the flags of rows of an image against the others, and their places against the image."""
    if flags & (_CONTROL | _EITHER) or not flags & frames.Flag.PREFILL:
        raise ProtocolError(f"frame flags {flags:#x} have no meaning: rows of an image are a prompt's")
    n_before, width, height = frames.grid_of(argument)
    if flags & _GRID and (n_before + n_rows > width * height or n_before > position):
        raise ProtocolError(f"{n_rows} rows behind {n_before} are not in an image of {width} x {height}")


def _check_extras(view: EnvelopeView, n_open: int, n_drafted: int) -> None:
    """Hold drafts, exponents and options against the rows and frames they belong to."""
    if n_drafted != len(view.draft_tokens):
        raise ProtocolError(f"{n_drafted} drafted rows came with {len(view.draft_tokens)} draft tokens")
    if n_open != len(view.options):
        raise ProtocolError(f"{n_open} open frames came with {len(view.options)} session options")
    sizes = [options.ByteSize() for options in view.options]
    if max(sizes, default=0) > bounds.OPTIONS_BYTES_MAX:
        raise ProtocolError(f"session options are over the limit of {bounds.OPTIONS_BYTES_MAX} bytes")
    if sum(sizes) > bounds.OPTIONS_PER_ENVELOPE_BYTES_MAX:
        limit = bounds.OPTIONS_PER_ENVELOPE_BYTES_MAX
        raise ProtocolError(f"the session options of an envelope are over the limit of {limit} bytes")
    if view.exponents is None:
        return
    if view.dtype != DTYPE_F16 or view.exponents.shape[0] != view.payload.shape[0]:
        raise ProtocolError("row exponents do not match the rows")
    if int(view.exponents.min()) < 0 or int(view.exponents.max()) > EXPONENT_MAX:
        raise ProtocolError(f"a row exponent is outside 0..{EXPONENT_MAX}")
