"""Writes envelopes into buffers that are used again and again.

A `Buffer` is made once per shape (frames, rows) and then only overwritten: header fields, frame records, payload rows
and row exponents are written straight into it. gRPC's Python binding accepts only `bytes` for a message, and copies
them into its own slices while `write` starts. So a Buffer is a `bytes` object that is filled in place, through the C
API's pointer to its storage.

This saves 7 of 11 us for 8 rows of 4,096 values, and a third to a half at other sizes, measured by
`python -m benches.tricks`. It is safe, on CPython only, for these reasons:

* `bytes(n)` makes a new object for n > 1; only the empty and the one-byte objects are shared. A Buffer is at least as
  long as its header.
* CPython interns and constant-folds bytes only when it compiles them. Ours are made at run time.
* A bytes object remembers its hash. No code hashes, compares or keeps `message`: it goes only to `write`, and a test
  checks the cached hash after a whole trip through gRPC.
* The views keep the bytes object alive, so a view that outlives its Buffer never points at freed memory.
* One send holds a Buffer at a time; it goes back to the pool only after `write` has returned.
"""

from __future__ import annotations

import collections
import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from relayline.wire.common import bounds
from relayline.wire.common.errors import InternalError
from relayline.wire.envelopes import _frames, frames, trace_context
from relayline.wire.envelopes.dtypes import DTYPE_F16
from relayline.wire.envelopes.envelope import (
    CHECKSUM,
    CHECKSUM_BYTES,
    CHECKSUM_TAG,
    EXPONENTS_TAG,
    HEADER,
    HEADER_BYTES,
    HEADER_TAGS,
    NUMPY_DTYPE,
    PAYLOAD_TAG,
    checksum,
    lead_of,
    rest_checksum,
)
from relayline.wire.envelopes.frames import Head
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

BUFFERS_KEPT_MAX = 256  # of one link, unused: a Buffer for tokens is some 4 kB of objects around 300 bytes of message

_bytes_storage = ctypes.pythonapi.PyBytes_AsString
_bytes_storage.argtypes = [ctypes.py_object]
_bytes_storage.restype = ctypes.c_void_p


class Buffer:
    """One reusable message of a fixed shape (n_frames, n_rows); after leasing, its content is old and to overwrite.

    frames: records (n_frames,), every column but `checksum` is the caller's. payload: (n_rows, width) of
    NUMPY_DTYPE[dtype]. exponents: i8 (n_rows,), present for f16; `with_extras` fills them.
    """

    __slots__ = (
        "_bytes", "_constants", "_end", "_head", "_no_exponents", "_payload_at", "_tail",
        "exponents", "frames", "message", "payload", "payload_bytes", "shape",
    )  # fmt: skip

    def __init__(self, dtype: int, width: int, n_frames: int, n_rows: int) -> None:
        element = NUMPY_DTYPE[dtype]
        self.shape = (n_frames, n_rows)
        self._constants = (dtype, n_rows, width, n_frames)
        self.payload_bytes = payload_bytes = n_rows * width * element.itemsize  # what counts against a link's credit
        lead = lead_of(PAYLOAD_TAG, payload_bytes)
        # An f16 message always carries its exponents: a few bytes, and rows that need them cost no copy.
        tail = lead_of(EXPONENTS_TAG, n_rows) if dtype == DTYPE_F16 and n_rows else b""
        lead_at = HEADER_BYTES + n_frames * frames.FRAME_BYTES
        self._payload_at = payload_at = lead_at + len(lead)
        tail_at = payload_at + payload_bytes
        exponents_at = tail_at + len(tail)
        self._end = end = exponents_at + (n_rows if tail else 0)
        self.message = bytes(end + CHECKSUM_BYTES)
        self._bytes = _writable(self.message)
        self._head, self._tail = self._bytes[:lead_at], self._bytes[tail_at:end]
        self._bytes[lead_at:payload_at] = lead
        self._bytes[tail_at:exponents_at] = tail
        raw = np.frombuffer(self._bytes, dtype=np.uint8)
        self.frames: frames.Records = raw[HEADER_BYTES:lead_at].view(frames.FRAME_DTYPE)
        self.payload: npt.NDArray[Any] = raw[payload_at:tail_at].view(element).reshape(n_rows, width)
        self.exponents = raw[exponents_at:end].view(np.int8)
        self._no_exponents = (slice(exponents_at, end), bytes(end - exponents_at))
        frames.stamp_tags(self.frames)

    @property
    def dtype(self) -> int:
        """The Dtype of its rows."""
        return self._constants[0]

    def scale_nothing(self) -> None:
        """Say that no row is scaled."""
        at, zeros = self._no_exponents
        self._bytes[at] = zeros  # numpy takes several times as long for as few bytes

    def close(self, extras: bytes = b"") -> bytes:
        """Write the checksum of everything but the rows and return the message, with extras in it if there are any."""
        if not extras:
            CHECKSUM.pack_into(self._bytes, self._end, CHECKSUM_TAG, rest_checksum(self._head, self._tail))
            return self.message
        total = rest_checksum(self._head, b"".join((self._tail, extras)))
        return b"".join((self._bytes[: self._end], extras, CHECKSUM.pack(CHECKSUM_TAG, total)))

    def seal(
        self,
        epoch: int,
        sequence: int,
        sent_ns: int,
        batch_trace: bytes = trace_context.NONE,
        heads: list[Head] | None = None,
    ) -> None:
        """Fill the header and every data frame's checksum; `with_extras` does the rest.

        batch_trace: 25 bytes, the context of the batch that computed these rows. heads: the frames, one for each of the
        buffer's, for a sender that has not filled `frames`; their checksums are ignored. Raises InternalError when the
        frames are not as many, or their n_rows do not add up to the buffer's rows.
        """
        dtype, n_rows, width, n_frames = self._constants
        t1, t2, t3, t4, t5, t6, t7, t8 = HEADER_TAGS
        head = (t1, epoch, t2, sequence, t3, dtype, t4, n_rows, t5, width, t6, sent_ns, t7, n_frames)
        HEADER.pack_into(self._bytes, 0, *head, t8, frames.TRACE_BYTES, batch_trace)
        if heads is None:
            heads = frames.read_heads(self.frames)
        counts = [head[3] for head in heads]
        if len(counts) != n_frames:
            raise InternalError(f"{len(counts)} frames for an envelope of {n_frames}")
        if sum(counts) != n_rows:
            raise InternalError(f"frames announce {sum(counts)} rows, their envelope holds {n_rows}")
        _frames.write(self._bytes, heads, self._payload_at, width * self.payload.itemsize, checksum)


def _writable(message: bytes) -> memoryview:
    """Return a writable view of a bytes object's storage, see the module's docstring. The view keeps it alive."""
    if len(message) < HEADER_BYTES:
        raise InternalError("only a whole envelope may be written in place")
    storage: Any = (ctypes.c_uint8 * len(message)).from_address(_bytes_storage(message) or 0)
    storage.message = message
    return memoryview(storage).cast("B")


class BufferPool:
    """Hands out Buffers of one link by shape and takes them back. Any thread.

    Unused buffers are bounded by bytes and by number; the least recently used shape goes first. `n_created` counts
    allocations: in steady decode it stands still.
    """

    def __init__(self, dtype: int, width: int, keep_bytes: int = bounds.BYTES_IN_FLIGHT_DEFAULT) -> None:
        self.dtype, self.width = dtype, width
        self.n_created = 0
        self._keep_bytes, self._kept_bytes, self._n_kept = keep_bytes, 0, 0
        # No list is empty; the shape used last stands last.
        self._free: collections.OrderedDict[tuple[int, int], list[Buffer]] = collections.OrderedDict()
        # A stage leases in its decode thread and gives back on its event loop.
        self._lock = threading.Lock()

    @property
    def kept_bytes(self) -> int:
        """Bytes of the Buffers that lie unused."""
        return self._kept_bytes

    @property
    def n_kept(self) -> int:
        """Buffers that lie unused."""
        return self._n_kept

    def lease(self, n_frames: int, n_rows: int) -> Buffer:
        """Return a Buffer of this shape whose frames and payload hold old values to overwrite."""
        shape = (n_frames, n_rows)
        with self._lock:
            free = self._free.get(shape)
            if free:
                buffer = free.pop()
                if not free:
                    del self._free[shape]
                self._kept_bytes -= len(buffer.message)
                self._n_kept -= 1
                return buffer
            self.n_created += 1
        return Buffer(self.dtype, self.width, n_frames, n_rows)

    def give_back(self, buffer: Buffer) -> None:
        """Return a Buffer whose send has completed."""
        with self._lock:
            self._free.setdefault(buffer.shape, []).append(buffer)
            self._free.move_to_end(buffer.shape)
            self._kept_bytes += len(buffer.message)
            self._n_kept += 1
            while self._kept_bytes > self._keep_bytes or self._n_kept > BUFFERS_KEPT_MAX:
                shape, free = next(iter(self._free.items()))
                self._kept_bytes -= len(free.pop().message)
                self._n_kept -= 1
                if not free:
                    del self._free[shape]


def with_extras(
    buffer: Buffer,
    exponents: npt.NDArray[np.int8] | None,
    options: list[pb.SessionOptions],
    draft_tokens: Sequence[int] = (),
) -> bytes:
    """Complete a sealed buffer and return the message to send: its own bytes, or a copy when something is appended.

    exponents: i8 (n_rows,) of f16 rows, None when all are zero. options: one per OPEN frame, in order. draft_tokens:
    one per row of the DRAFTED frames, in order.
    """
    if exponents is None:
        buffer.scale_nothing()
    else:
        buffer.exponents[:] = exponents
    if not options and not draft_tokens:
        return buffer.close()
    return buffer.close(pb.RelayRequest(options=options, draft_tokens=draft_tokens).SerializeToString())
