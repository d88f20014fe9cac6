"""Frame headers: the fixed part of what travels, as numpy records that overlay the protobuf bytes.

A `Frame` message whose fields are all fixed-width has a constant size, tags included. So a whole row of frame headers
is one numpy record array: encoding is a few column assignments, decoding is a view plus one comparison of the tag
bytes. The same bytes parse with any protobuf library.

This module does not know envelopes, links or sessions' meaning.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import numpy as np

TRACE_BYTES = 25  # trace id (16), span id (8), flags (1)

Records = np.ndarray[Any, np.dtype[np.void]]
# One record's session_id, epoch, position, n_rows, flags, argument, checksum, enqueued_ns and trace.
Head = tuple[int, int, int, int, int, int, int, int, bytes]


class Flag:
    """Bits of `Frame.flags`; the values are FrameFlag's in the .proto.

    Plain integers: an enum's operators would cost more per frame than everything else that looks at its flags.
    """

    NONE = 0
    PREFILL = 1
    WANTS_SAMPLE = 2
    DRAFTED = 4
    GUESSED = 8
    OPEN = 16
    CLOSE = 32
    TRIM = 64
    COPY_PREFIX = 128
    CHECKPOINT = 256


CONTROL = Flag.OPEN | Flag.CLOSE | Flag.TRIM | Flag.COPY_PREFIX

# The `_t*` columns are protobuf tags (and lengths): constants of every canonical frame.
FRAME_DTYPE: np.dtype[np.void] = np.dtype(
    [
        ("_tag", "u1"),
        ("_size", "u1"),
        ("_t1", "u1"),
        ("session_id", "<u8"),
        ("_t2", "u1"),
        ("epoch", "<u4"),
        ("_t3", "u1"),
        ("position", "<u4"),
        ("_t4", "u1"),
        ("n_rows", "<u4"),
        ("_t5", "u1"),
        ("flags", "<u4"),
        ("_t6", "u1"),
        ("argument", "<u8"),
        ("_t7", "u1"),
        ("checksum", "<u8"),
        ("_t8", "u1"),
        ("enqueued_ns", "<u8"),
        ("_t9", "u1"),
        ("_trace_size", "u1"),
        ("trace", f"V{TRACE_BYTES}"),
    ]
)
FRAME_BYTES = FRAME_DTYPE.itemsize

FRAME_CONSTANTS: dict[str, int] = {
    "_tag": 0x42,  # Envelope field 8, length-delimited
    "_size": FRAME_BYTES - 2,
    "_t1": 0x09,
    "_t2": 0x15,
    "_t3": 0x1D,
    "_t4": 0x25,
    "_t5": 0x2D,
    "_t6": 0x31,
    "_t7": 0x39,
    "_t8": 0x41,
    "_t9": 0x4A,
    "_trace_size": TRACE_BYTES,
}


# The same layout once more, for reading whole records: a column costs numpy about what a whole record costs `struct`,
# and a decode step has as few records as columns. `_frames.c` has it a third time, and writes them.
_READ = struct.Struct(f"<3xQxIxIxIxIxQxQxQ2x{TRACE_BYTES}s")
assert _READ.size == FRAME_BYTES


def new_frames(n_frames: int) -> Records:
    """Return n_frames zeroed records with every protobuf tag in place."""
    frames: Records = np.zeros(n_frames, dtype=FRAME_DTYPE)
    stamp_tags(frames)
    return frames


def stamp_tags(frames: Records) -> None:
    """Write the constant protobuf columns into freshly allocated records."""
    for name, value in FRAME_CONSTANTS.items():
        frames[name] = value


def has_canonical_tags(message: bytes, offset: int, n_frames: int) -> bool:
    """Return whether the n_frames records that begin at `offset` carry every constant at its place.

    All records are compared as one long integer: for the few frames of a decode step nothing in numpy is as quick.
    """
    mask, constants = _mask_and_constants(n_frames)
    records = message[offset : offset + n_frames * FRAME_BYTES]
    return int.from_bytes(records, "little") & mask == constants


@functools.lru_cache(maxsize=16)  # 0.7 MB each at most; steady decode comes in few shapes
def _mask_and_constants(n_frames: int) -> tuple[int, int]:
    mask, constants = np.zeros(1, dtype=FRAME_DTYPE), new_frames(1)
    for name in FRAME_CONSTANTS:
        mask[name] = 0xFF
    return (
        int.from_bytes(mask.tobytes() * n_frames, "little"),
        int.from_bytes(constants.tobytes() * n_frames, "little"),
    )


def read_heads(records: Any) -> list[Head]:
    """Return the columns of all records, one tuple per record; `records` are their bytes or an array of them."""
    return list(_READ.iter_unpack(records))


def set_traces(frames: Records, traces: list[bytes]) -> None:
    """Write one trace context (TRACE_BYTES each) per record; numpy takes 20 times longer from a list of np.void."""
    frames["trace"] = np.frombuffer(b"".join(traces), dtype=f"V{TRACE_BYTES}")
