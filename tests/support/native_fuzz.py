"""Random and altered bytes for all of our C code; see deploy/build/check_native.py.

Each call must either return a result or raise one of its documented errors. With sanitizers the process ends at the
first forbidden access. Envelopes are altered as peers might alter them. Half of them get valid checksums afterwards,
since otherwise no code after the checksums would be reached.
"""

from __future__ import annotations

import argparse
import collections
import functools
import random
import struct
import time
from collections.abc import Callable

import numpy as np

from relayline.wire.common import bounds
from relayline.wire.common.errors import RelaylineError
from relayline.wire.envelopes import _frames, _rows, _weigh, envelope, messages
from relayline.wire.envelopes.buffers import Buffer, with_extras
from relayline.wire.envelopes.dtypes import DTYPE_F16, DTYPE_TOKENS
from relayline.wire.envelopes.envelope import CHECKSUM, CHECKSUM_BYTES, CHECKSUM_TAG, HEADER, HEADER_BYTES
from relayline.wire.envelopes.frames import FRAME_BYTES, TRACE_BYTES, Flag, Head
from relayline.wire.envelopes.returns import ReturnReader, ReturnWriter
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

EDGES = (
    0,
    1,
    2,
    3,
    4,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2_048,
    2_049,
    4_096,
    4_097,
)
TABLE, ROOT = messages._table(pb.RelayRequest.DESCRIPTOR)
KINDS = (Flag.NONE, Flag.PREFILL, Flag.WANTS_SAMPLE, Flag.PREFILL | Flag.WANTS_SAMPLE)


def plausible(rnd: random.Random) -> bytes:
    """An envelope as stages and coordinators write them."""
    dtype = rnd.choice((1, 2, 3))
    width = 1 if dtype == DTYPE_TOKENS else rnd.choice((1, 2, 7, 8, 64, 160))
    heads: list[Head] = []
    options: list[pb.SessionOptions] = []
    drafts: list[int] = []
    for _ in range(rnd.choice((1, 1, 2, 3, 8, 40))):
        kind, n_rows = rnd.random(), rnd.choice((1, 1, 1, 2, 5))
        flags = rnd.choice(KINDS) if kind < 0.6 else Flag.DRAFTED | Flag.WANTS_SAMPLE
        if kind >= 0.75:
            flags, n_rows = rnd.choice((Flag.OPEN, Flag.CLOSE, Flag.TRIM, Flag.COPY_PREFIX)), 0
        if flags & Flag.DRAFTED:
            drafts += [rnd.getrandbits(32) for _ in range(n_rows)]
        if flags & Flag.OPEN:
            options.append(pb.SessionOptions(seed=3, grammar="x" * rnd.randrange(40)))
        heads.append((rnd.getrandbits(64), 1, rnd.randrange(1_000), n_rows, flags, 0, 0, 5, bytes(TRACE_BYTES)))
    n_rows = sum(head[3] for head in heads)
    buffer = Buffer(dtype, width, len(heads), n_rows)
    buffer.payload[:] = np.arange(n_rows * width).reshape(n_rows, width) % 100
    buffer.seal(1, rnd.randrange(100), 123, bytes(TRACE_BYTES), heads)
    scaled = dtype == DTYPE_F16 and n_rows and rnd.random() < 0.3
    exponents = np.array([rnd.randrange(113) for _ in range(n_rows)], np.int8) if scaled else None
    return bytes(bytearray(with_extras(buffer, exponents, options, drafts)))


@functools.cache
def _base(number: int) -> bytes:
    return plausible(random.Random(number))


def base(rnd: random.Random) -> bytes:
    """One of a hundred envelopes that were written once."""
    return _base(rnd.randrange(100))


def altered(message: bytes, rnd: random.Random) -> bytes:
    """The message with one change."""
    data = bytearray(message)
    for _ in range(rnd.choice((1, 1, 1, 2, 4))):
        if not data:
            break
        at, way = rnd.randrange(len(data)), rnd.randrange(8)
        if way == 0:
            data[at] ^= 1 << rnd.randrange(8)
        elif way == 1:
            data[at] = rnd.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif way == 2:
            del data[at:]
        elif way == 3:
            data += rnd.randbytes(rnd.randrange(1, 40))
        elif way == 4:
            _put(data, rnd.choice((1, 15, 20, 25, 39)), rnd)
        elif way == 5:
            _put(data, HEADER_BYTES + FRAME_BYTES * rnd.randrange(50) + rnd.choice((3, 12, 17, 22, 27, 32, 41)), rnd)
        elif way == 6:
            data[at:at] = data[rnd.randrange(len(data)) :][:300]
        else:
            del data[at : at + rnd.randrange(1, 100)]
    return bytes(data)


def _put(data: bytearray, at: int, rnd: random.Random) -> None:
    if at + 4 <= len(data):
        data[at : at + 4] = struct.pack("<I", rnd.choice(EDGES))


def sealed_again(message: bytes) -> bytes:
    """The message with a valid checksum, if its headers still give the positions."""
    if len(message) < HEADER_BYTES + CHECKSUM_BYTES:
        return message
    values = HEADER.unpack_from(message)
    item = {1: 4, 2: 2, 3: 4}.get(values[5], 1)
    head_end = min(HEADER_BYTES + values[13] * FRAME_BYTES, len(message))
    payload_bytes = values[7] * values[9] * item
    tail_at = head_end + len(envelope.lead_of(envelope.PAYLOAD_TAG, payload_bytes)) + payload_bytes
    end = len(message) - CHECKSUM_BYTES
    total = envelope.rest_checksum(message[:head_end], message[min(tail_at, end) : end])
    return message[:end] + CHECKSUM.pack(CHECKSUM_TAG, total)


def parse_altered(rnd: random.Random) -> str:
    """An altered envelope is read or refused."""
    message = altered(base(rnd), rnd)
    if rnd.random() < 0.5:
        message = sealed_again(message)
    if rnd.random() < 0.1:
        parsed = pb.RelayRequest()
        try:
            message = pb.RelayRequest.FromString(message).SerializeToString()
        except Exception:
            message = parsed.SerializeToString()
    _frames.read(message, envelope.checksum, rnd.choice((0, 1, 4_096)))
    envelope.parse(message)
    return "envelopes accepted"


def parse_large(rnd: random.Random) -> str:
    """A header that announces anything, in a message of any size up to the largest."""
    size_bytes = min(bounds.ENVELOPE_BYTES_MAX, int(2 ** rnd.uniform(7, 29)) + rnd.randrange(64))
    dtype = rnd.choice((1, 2, 3))
    numbers = (*EDGES, size_bytes, size_bytes // 2, size_bytes // 4)
    n_rows, width, n_frames = (rnd.choice(numbers) for _ in range(3))
    fields = (1, 0x11, 0, 0x1D, dtype, 0x25, n_rows, 0x2D, width, 0x31, 0, 0x3D, n_frames)
    head = HEADER.pack(0x0D, *fields, 0x62, TRACE_BYTES, bytes(TRACE_BYTES))
    message = b"".join((head, bytes(max(0, size_bytes - len(head) - CHECKSUM_BYTES)), CHECKSUM.pack(CHECKSUM_TAG, 0)))
    _frames.read(message, envelope.checksum, 4_096)
    envelope.parse(message)
    return "large envelopes accepted"


def write_anything(rnd: random.Random) -> str:
    """Records are written into the given message, or nothing is."""
    room = memoryview(bytearray(rnd.randrange(0, 600)))
    heads = [
        (1, 2, 3, rnd.choice((0, 1, 2, 9, 2**32 - 1)), 0, 0, 0, 0, bytes(TRACE_BYTES)) for _ in range(rnd.randrange(8))
    ]
    sizes = (rnd.choice((0, 1, 70, 155, 240, len(room), 2**63, 2**64 - 1)), rnd.choice((0, 1, 2, 64, 2**33, 2**64 - 1)))
    _frames.write(room, heads, *sizes, envelope.checksum)
    return "records written"


def weigh_anything(rnd: random.Random) -> str:
    """Any bytes are weighed to their end."""
    data = rnd.randbytes(rnd.randrange(200)) if rnd.random() < 0.5 else altered(base(rnd), rnd)
    _weigh.weigh(data, TABLE, ROOT, rnd.choice((0, 1_000, 1 << 40)), rnd.choice((0, 10, 1 << 30)))
    messages.split(data, rnd.choice((9, 1, 15, 2**31)))
    return "messages weighed"


def read_return(rnd: random.Random) -> str:
    """An altered message of the return stream is refused."""
    samples = [pb.Sampled(session_id=at, token=rnd.getrandbits(32)) for at in range(rnd.randrange(4))]
    (message,) = ReturnWriter().write(pb.ReturnResponse(epoch=1, samples=samples))
    ReturnReader("stage").read(altered(message, rnd) if rnd.random() < 0.9 else message)
    return "returns accepted"


def convert_rows(rnd: random.Random) -> str:
    """Rows of any shape at any address, with too few and too many exponents."""
    n_rows, width, offset = rnd.randrange(9), rnd.randrange(70), rnd.randrange(4)
    raw = np.frombuffer(rnd.randbytes(n_rows * width * 4 + 8), np.uint8)
    _rows.use(rnd.choice(_rows.implementations()))
    rows, halves = (np.ndarray((n_rows, width), kind, raw.data, offset) for kind in (np.float32, np.float16))
    _rows.encode_f16(rows, np.empty((n_rows, width), np.float16), np.empty(n_rows, np.int8))
    _rows.largest(rows, np.empty(n_rows, np.float32))
    n_given = max(0, n_rows + rnd.choice((0, 0, 0, -1, 1)))
    exponents = np.frombuffer(rnd.randbytes(n_given), np.int8) if rnd.random() < 0.5 else np.zeros(n_given, np.int8)
    _rows.decode_f16(halves, rnd.choice((None, exponents)), np.empty((n_rows, width), np.float32))
    return "rows converted"


WORK: tuple[tuple[Callable[[random.Random], str], int], ...] = (
    (parse_altered, 60), (weigh_anything, 20), (convert_rows, 20), (write_anything, 15), (read_return, 10),
    (parse_large, 1),
)  # fmt: skip


def fuzz(seed: int, seconds: float) -> collections.Counter[str]:
    """Do random work for a time; returns the counts of its outcomes. Raises any other exception."""
    found: collections.Counter[str] = collections.Counter()
    ends_s, n = time.monotonic() + seconds, 0
    works, weights = zip(*WORK, strict=True)
    while time.monotonic() < ends_s:
        rnd = random.Random(f"{seed} {n}")
        work = rnd.choices(works, weights)[0]
        try:
            found[work(rnd)] += 1
        except (RelaylineError, ValueError, OverflowError) as error:
            found[f"{work.__name__}: {type(error).__name__}"] += 1
        except BaseException:
            print(f"seed {seed}, try {n}: {work.__name__}")
            raise
        n += 1
    return found


def main() -> None:
    """Run from a shell: --seed N --seconds S."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    arguments.add_argument("--seconds", type=float, default=40.0)
    given = arguments.parse_args()
    print(f"seed {given.seed}", flush=True)
    for what, n in sorted(fuzz(given.seed, given.seconds).items()):
        print(f"{n:>9,}  {what}")


if __name__ == "__main__":
    main()
