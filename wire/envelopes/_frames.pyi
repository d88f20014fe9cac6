"""Typed view of _frames.c."""

from collections.abc import Callable
from typing import Any

from relayline.wire.envelopes.frames import Head

# epoch, sequence, dtype, n_rows, width, sent_ns, heads, where the payload begins, the most rows of one frame, the last
# position of any frame's rows, batch_trace
Plain = tuple[int, int, int, int, int, int, list[Head], int, int, int, bytes]

def read(message: bytes, checksum: Callable[..., int], frames_max: int, /) -> Plain | None:
    """Read a message whole; None for any that is not plain, or not right, or has more frames. Other bounds are not
    looked at. `checksum(data)` and `checksum(data, seed)` give the sums of wire.envelope."""

def write(
    message: memoryview, heads: list[Head], payload_at: int, row_bytes: int, checksum: Callable[[Any], int], /
) -> None:
    """Write the records of all frames behind the header of a message whose rows, row_bytes each, are in place.

    The heads' own checksums are ignored. Raises ValueError where message has no room for as many frames or rows.
    """
