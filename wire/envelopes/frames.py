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

from relayline.wire.envelopes import layout

TRACE_BYTES = layout.TRACE_BYTES
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
    MUTUAL = 512
    GRID = 1_024
    WANTS_GUESSES = 2_048
    STORE = 4_096
    RESTORE = 8_192
    EXTEND = 16_384
    SCORED = PREFILL | DRAFTED  # rows of a prompt, each of which scores the token that follows it


def grid_argument(n_before: int, width: int, height: int) -> int:
    """Return the argument of a frame with Flag.GRID: rows of the image before its own, and the image's two sides."""
    return n_before << 32 | width << 16 | height


def grid_of(argument: int) -> tuple[int, int, int]:
    """Return the three numbers of `grid_argument`."""
    return argument >> 32, argument >> 16 & 0xFFFF, argument & 0xFFFF


def grant_argument(number: int, limit: int) -> int:
    """Return the argument of a decode row under a grant: the grant's number, and the position that it ends before."""
    return number << 32 | limit


def grant_of(argument: int) -> tuple[int, int]:
    """Return the two numbers of `grant_argument`; the first is 0 where there is no grant."""
    return argument >> 32, argument & 0xFFFF_FFFF


CONTROL = Flag.OPEN | Flag.CLOSE | Flag.TRIM | Flag.COPY_PREFIX | Flag.STORE | Flag.RESTORE | Flag.EXTEND

FRAME_DTYPE: np.dtype[np.void] = layout.FRAME.dtype()
FRAME_BYTES = FRAME_DTYPE.itemsize
# For reading whole records. With numpy a column costs about as much as a whole record does with `struct`, and a decode
# step has as few records as columns.
_READ = struct.Struct(layout.FRAME.struct_form(with_constants=False))


def new_frames(n_frames: int) -> Records:
    """Return n_frames zeroed records with every protobuf tag in place."""
    frames: Records = np.zeros(n_frames, dtype=FRAME_DTYPE)
    stamp_tags(frames)
    return frames


def stamp_tags(frames: Records) -> None:
    """Write the protobuf tags and lengths of freshly allocated records."""
    raw = frames.view(np.uint8).reshape(-1, FRAME_BYTES)
    for at, byte in layout.FRAME.constants:
        raw[:, at] = byte


def has_canonical_tags(message: bytes, offset: int, n_frames: int) -> bool:
    """Return whether the n_frames records that begin at `offset` carry every constant at its place.

    All records are compared as one long integer: for the few frames of a decode step nothing in numpy is as quick.
    """
    mask, constants = _mask_and_constants(n_frames)
    records = message[offset : offset + n_frames * FRAME_BYTES]
    return int.from_bytes(records, "little") & mask == constants


@functools.lru_cache(maxsize=16)  # 0.7 MB each at most; steady decode comes in few shapes
def _mask_and_constants(n_frames: int) -> tuple[int, int]:
    mask, constants = bytearray(FRAME_BYTES), bytearray(FRAME_BYTES)
    for at, byte in layout.FRAME.constants:
        mask[at], constants[at] = 0xFF, byte
    return int.from_bytes(mask * n_frames, "little"), int.from_bytes(constants * n_frames, "little")


def read_heads(records: Any) -> list[Head]:
    """Return the columns of all records, one tuple per record; `records` are their bytes or an array of them."""
    return list(_READ.iter_unpack(records))
