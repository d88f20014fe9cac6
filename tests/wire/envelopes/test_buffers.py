"""Goal: in steady decode the forward path allocates nothing of a payload's size, and no buffer has two users.

Method: tracemalloc counts the allocations of numpy and CPython on a stage's real path; identities and addresses are
compared; the pool is used from two threads at once.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from relayline.wire.common.errors import InternalError
from relayline.wire.envelopes.buffers import BUFFERS_KEPT_MAX, Buffer, BufferPool, _writable, with_extras
from relayline.wire.envelopes.dtypes import DTYPE_F16, DTYPE_F32, DTYPE_TOKENS
from relayline.wire.envelopes.envelope import HEADER_BYTES, checksum, parse
from relayline.wire.envelopes.frames import TRACE_BYTES
from relayline.wire.envelopes.rows import RowEncoder, decode_f16
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.wire_examples import TRACE, library, set_traces

N_ROWS, WIDTH = 8, 4096
PAYLOAD_BYTES = N_ROWS * WIDTH * 2


def cached_hash(data: bytes) -> int:
    """The hash that a bytes object remembers, -1 if it was never computed."""
    at = bytes.__basicsize__ - 1 - ctypes.sizeof(ctypes.c_ssize_t)
    return ctypes.c_ssize_t.from_address(id(data) + at).value


def test_cached_hash_sees_a_hash():
    data = bytes(100)
    assert cached_hash(data) == -1
    assert cached_hash(data) != hash(data) == cached_hash(data)


class Path:
    """A stage's handling of its output rows, and the next stage's of its input, for one step."""

    def __init__(self, largest: float = 1.0) -> None:
        self.pool = BufferPool(DTYPE_F16, WIDTH)
        self.encoder = RowEncoder(N_ROWS, WIDTH)
        self.rows = np.random.default_rng(0).standard_normal((N_ROWS, WIDTH)).astype(np.float32)
        self.rows[0, 0] = largest
        self.received = np.empty_like(self.rows)
        self.messages: set[int] = set()

    def step(self, sequence: int) -> None:
        buffer = self.pool.lease(N_ROWS, N_ROWS)
        exponents = self.encoder.encode(self.rows, buffer.payload).exponents
        buffer.frames["session_id"] = list(range(N_ROWS))
        buffer.frames["position"] = sequence
        buffer.frames["n_rows"] = 1
        set_traces(buffer.frames, [TRACE] * N_ROWS)
        buffer.seal(1, sequence, 0)
        message = with_extras(buffer, exponents, [])
        self.messages.add(id(message))
        view = parse(message)
        for row in range(N_ROWS):
            part = None if view.exponents is None else view.exponents[row : row + 1]
            decode_f16(view.payload[row : row + 1], part, self.received[row : row + 1])
        self.pool.give_back(buffer)


class Naive(Path):
    """The same with a new message and new arrays each time: the control that shows the measurement sees them."""

    def step(self, sequence: int) -> None:
        payload = self.rows.astype(np.float16)
        frames = [
            pb.Frame(session_id=row, position=sequence, n_rows=1, checksum=checksum(payload[row]), trace=TRACE)
            for row in range(N_ROWS)
        ]
        message = library(
            pb.RelayRequest(
                dtype=2, n_rows=N_ROWS, width=WIDTH, n_frames=N_ROWS, frames=frames, payload=payload.tobytes()
            )
        )
        self.received = parse(message).payload.astype(np.float32)


def peak_bytes(step: Callable[[int], None]) -> int:
    """The most memory that one of several warm steps adds."""
    for sequence in range(3):
        step(sequence)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for sequence in range(20):
            step(sequence)
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("largest", [1.0, 3e5])
def test_a_warm_step_allocates_nothing_payload_sized(largest: float):
    path = Path(largest)
    assert peak_bytes(path.step) < PAYLOAD_BYTES // 4
    assert path.pool.n_created == 1
    assert len(path.messages) == 1
    assert np.allclose(path.received, path.rows, rtol=2**-10, atol=1e-3)


def test_the_measurement_sees_payload_sized_allocations():
    assert peak_bytes(Naive().step) > 2 * PAYLOAD_BYTES


@pytest.mark.parametrize("dtype", [DTYPE_TOKENS, DTYPE_F16, DTYPE_F32])
@pytest.mark.parametrize(("n_frames", "n_rows"), [(0, 0), (1, 0), (1, 1), (3, 7)])
def test_views_lie_in_the_message_and_nowhere_else(dtype: int, n_frames: int, n_rows: int):
    width = 1 if dtype == DTYPE_TOKENS else 5
    buffer = Buffer(dtype, width, n_frames, n_rows)
    before = np.frombuffer(buffer.message, np.uint8).copy()
    buffer.frames["session_id"] = 2**64 - 1
    buffer.payload.view(np.uint8)[:] = 0xFF
    buffer.exponents[:] = -1
    changed = np.flatnonzero(np.frombuffer(buffer.message, np.uint8) != before)
    assert len(changed) == n_frames * 8 + buffer.payload_bytes + (n_rows if dtype == DTYPE_F16 else 0)
    assert len(buffer.message) >= HEADER_BYTES


def test_the_shared_small_bytes_objects_are_never_written():
    for small in (b"", b"a", bytes(HEADER_BYTES - 1)):
        with pytest.raises(InternalError):
            _writable(small)
    assert Buffer(DTYPE_TOKENS, 1, 0, 0).message is not Buffer(DTYPE_TOKENS, 1, 0, 0).message


def test_nobody_asks_for_the_hash_of_a_buffer():
    buffer = Buffer(DTYPE_F16, 64, 1, 1)
    buffer.frames["n_rows"] = 1
    buffer.seal(1, 1, 1)
    parse(with_extras(buffer, None, []))
    assert cached_hash(buffer.message) == -1


def test_a_view_keeps_the_message_alive():
    buffer = Buffer(DTYPE_F32, 64, 1, 1)
    message, payload = buffer.message, buffer.payload
    held = sys.getrefcount(message)  # differs between Pythons: from 3.14 on a call may borrow a local variable
    del buffer
    assert sys.getrefcount(message) == held - 1  # the Buffer's own; the view's remains
    address = payload.ctypes.data
    assert id(message) < address < id(message) + sys.getsizeof(message)
    del payload
    assert sys.getrefcount(message) == held - 2


def test_leased_buffers_share_nothing():
    pool = BufferPool(DTYPE_F16, 64)
    leased = [pool.lease(2, 2) for _ in range(5)]
    assert len({id(buffer.message) for buffer in leased}) == 5
    for index, buffer in enumerate(leased):
        buffer.payload[:] = index
    assert [float(buffer.payload.min()) for buffer in leased] == [float(buffer.payload.max()) for buffer in leased]
    assert pool.n_created == 5


def test_a_returned_buffer_is_used_again_by_shape():
    pool = BufferPool(DTYPE_F16, 64)
    first, other = pool.lease(1, 1), pool.lease(2, 1)
    pool.give_back(first)
    pool.give_back(other)
    assert pool.lease(2, 1) is other
    assert pool.lease(1, 1) is first
    assert pool.lease(1, 1) is not first
    assert pool.n_created == 3


def test_unused_bytes_are_bounded_and_the_longest_unused_shape_goes_first():
    size_bytes = len(Buffer(DTYPE_F32, 256, 1, 1).message)
    pool = BufferPool(DTYPE_F32, 256, keep_bytes=3 * size_bytes + 1000)
    ones = [pool.lease(1, 1) for _ in range(2)]
    two = pool.lease(2, 1)
    for buffer in (ones[0], ones[1], two):
        pool.give_back(buffer)
    assert pool.kept_bytes == sum(len(buffer.message) for buffer in (*ones, two))
    pool.give_back(pool.lease(1, 1))  # now the shape (2, 1) is the one unused for longest
    pool.give_back(pool.lease(3, 1))
    assert pool.kept_bytes <= 3 * size_bytes + 1000
    created = pool.n_created
    assert pool.lease(1, 1) in ones
    assert pool.lease(3, 1).shape == (3, 1)
    assert pool.n_created == created
    assert pool.lease(2, 1) is not two
    huge = Buffer(DTYPE_F32, 256, 1, 50)
    pool.give_back(huge)
    assert pool.lease(1, 50) is not huge


def test_many_shapes_leave_nothing_behind():
    pool = BufferPool(DTYPE_TOKENS, 1, keep_bytes=10_000)
    for n_rows in range(2_000):
        pool.give_back(pool.lease(1, n_rows))
        assert pool.kept_bytes <= 10_000
    assert sum(len(free) for free in pool._free.values()) <= 10_000 // HEADER_BYTES
    assert all(pool._free.values())


def test_unused_buffers_are_bounded_by_number_however_small():
    pool = BufferPool(DTYPE_TOKENS, 1)
    for n_rows in range(3 * BUFFERS_KEPT_MAX):
        pool.give_back(pool.lease(1, n_rows))
        assert pool.n_kept == sum(len(free) for free in pool._free.values()) <= BUFFERS_KEPT_MAX
    created = pool.n_created
    for n_rows in range(2 * BUFFERS_KEPT_MAX, 3 * BUFFERS_KEPT_MAX):
        pool.lease(1, n_rows)
    assert (pool.n_created, pool.n_kept) == (created, 0), "the shapes used last are the ones that stay"


def test_pool_is_used_by_the_decode_thread_and_the_event_loop_at_once():
    pool = BufferPool(DTYPE_TOKENS, 1, keep_bytes=2_000)
    problems: list[str] = []

    def use(owner: int) -> None:
        for turn in range(3_000):
            buffer = pool.lease(1, 1 + turn % 3)
            buffer.payload[:] = owner
            if (buffer.payload != owner).any():
                problems.append("a buffer is in two hands")
            pool.give_back(buffer)

    previous = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=use, args=(owner,)) for owner in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(previous)
    assert problems == []
    assert pool.kept_bytes == sum(len(buffer.message) for free in pool._free.values() for buffer in free) <= 2_000


def test_traces_are_written_whole():
    buffer = Buffer(DTYPE_TOKENS, 1, 2, 2)
    set_traces(buffer.frames, [TRACE, bytes(TRACE_BYTES)])
    assert [record["trace"].tobytes() for record in buffer.frames] == [TRACE, bytes(TRACE_BYTES)]
