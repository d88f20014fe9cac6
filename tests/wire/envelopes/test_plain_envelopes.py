"""The quick reader and writer of envelopes give the results of the full ones, and accept nothing that those refuse."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from relayline.wire.common import bounds
from relayline.wire.common.errors import InternalError, ProtocolError
from relayline.wire.envelopes import _frames, envelope
from relayline.wire.envelopes.buffers import Buffer, with_extras
from relayline.wire.envelopes.dtypes import DTYPE_F16, DTYPE_F32, DTYPE_TOKENS
from relayline.wire.envelopes.envelope import (
    CHECKSUM,
    CHECKSUM_BYTES,
    CHECKSUM_TAG,
    HEADER,
    HEADER_BYTES,
    NUMPY_DTYPE,
    PAYLOAD_TAG,
    checksum,
    lead_of,
    rest_checksum,
)
from relayline.wire.envelopes.frames import FRAME_BYTES, TRACE_BYTES, Flag, Head, read_heads

FRAMES_MAX = bounds.FRAMES_PER_ENVELOPE_MAX
U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
TRACES = st.binary(min_size=TRACE_BYTES, max_size=TRACE_BYTES)
ORDINARY = st.sampled_from((Flag.NONE, Flag.PREFILL, Flag.WANTS_SAMPLE, Flag.PREFILL | Flag.WANTS_SAMPLE))


@st.composite
def heads(draw: st.DrawFn, flags: st.SearchStrategy[int] = ORDINARY) -> list[Head]:
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    positions = st.integers(0, bounds.CTX_TOKENS_MAX - 3)
    return [
        (draw(U64), draw(U32), draw(positions), count, draw(flags), draw(U64), draw(U64), draw(U64), draw(TRACES))
        for count in counts
    ]


def message_of(made: list[Head], dtype: int, width: int, **extras: Any) -> bytes:
    """A separate copy, since a Buffer's bytes change."""
    n_rows = sum(head[3] for head in made)
    buffer = Buffer(dtype, width, len(made), n_rows)
    values = np.random.default_rng(n_rows).integers(0, 100, (n_rows, width))
    buffer.payload[:] = values
    buffer.seal(7, 9, 11, bytes(range(TRACE_BYTES)), made)
    sent = with_extras(buffer, extras.get("exponents"), [], extras.get("drafts", ()))
    return bytes(bytearray(sent))


def seal_again(message: bytearray, n_frames: int) -> None:
    """Write the checksum that an altered message would have if it had been sent so."""
    head_end = HEADER_BYTES + FRAME_BYTES * n_frames
    n_rows, width = (int.from_bytes(message[at : at + 4], "little") for at in (20, 25))
    tail_at = head_end + len(lead_of(PAYLOAD_TAG, 2 * n_rows * width)) + 2 * n_rows * width
    end = len(message) - CHECKSUM_BYTES
    CHECKSUM.pack_into(message, end, CHECKSUM_TAG, rest_checksum(message[:head_end], message[tail_at:end]))


def in_full(message: bytes) -> envelope.EnvelopeView:
    """As wire.envelopes.envelope reads envelopes that are not plain."""
    found = envelope._parse_canonical(message) or envelope._parse_any(message)
    envelope._check_extras(found[0], *envelope._check_frames(*found, bounds.ROWS_PER_FRAME_MAX))
    return found[0]


def same(one: envelope.EnvelopeView, other: envelope.EnvelopeView) -> bool:
    names = ("epoch", "sequence", "dtype", "width", "sent_ns", "heads", "options", "draft_tokens", "payload_bytes")
    return (
        all(getattr(one, name) == getattr(other, name) for name in (*names, "records", "batch_trace"))
        and one.payload.dtype == other.payload.dtype
        and one.payload.tobytes() == other.payload.tobytes()
        and one.payload.shape == other.payload.shape
        and one.exponents is other.exponents is None
        and not one.payload.flags.writeable
    )


@given(heads(), st.sampled_from([*NUMPY_DTYPE]), st.integers(1, 40))
def test_plain_envelopes_are_read_at_once_and_as_in_full(made: list[Head], dtype: int, width: int) -> None:
    message = message_of(made, dtype, width)
    plain = envelope._parse_plain(message, bounds.ROWS_PER_FRAME_MAX)
    assert plain is not None
    assert same(plain, in_full(message))
    for found, head in zip(plain.heads, made, strict=True):
        assert (*found[:6], *found[7:]) == (*head[:6], *head[7:])


@given(heads(), st.data())
def test_the_quick_reader_agrees_with_the_full_one_on_altered_bytes(made: list[Head], data: st.DataObject) -> None:
    message = bytearray(message_of(made, DTYPE_F16, 3))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(message) - 1))
        message[at] = data.draw(st.integers(0, 255))
    altered = bytes(message[: data.draw(st.one_of(st.just(len(message)), st.integers(0, len(message))))])
    plain = envelope._parse_plain(altered, bounds.ROWS_PER_FRAME_MAX)
    if plain is not None:
        assert same(plain, in_full(altered))


@pytest.mark.parametrize("at", [0, 5, 14, 19, 24, 29, 38, 43, 44])
def test_a_header_with_another_tag_is_not_plain(at: int) -> None:
    message = bytearray(message_of([_head()], DTYPE_F16, 4))
    assert _frames.read(bytes(message), checksum, FRAMES_MAX)
    message[at] ^= 1
    seal_again(message, 1)
    assert _frames.read(bytes(message), checksum, FRAMES_MAX) is None


@pytest.mark.parametrize("size_bytes", [200, 2**18 - 1, 2**18, 2**20 + 7, 2**24])
@pytest.mark.parametrize("dtype", [DTYPE_TOKENS, DTYPE_F16, DTYPE_F32])
@pytest.mark.parametrize("few", ["rows", "values", "frames"])
def test_a_header_may_announce_any_payload(size_bytes: int, dtype: int, few: str) -> None:
    """As many rows, values and frames as a header of 32 bits can say: up to 66 bits of payload."""
    most = min(2**32 - 1, size_bytes)
    width = size_bytes // NUMPY_DTYPE[dtype].itemsize
    for n_rows, values in ((most, width), (most, 2**32 - 1), (2**32 - 1, 2**32 - 1), (2**32 - 1, 1), (1, 2**32 - 1)):
        n_rows, values, n_frames = (
            1 if few == "rows" else n_rows,
            1 if few == "values" else values,
            1 if few == "frames" else 2**32 - 1,
        )
        fields = (1, 0x11, 0, 0x1D, dtype, 0x25, n_rows, 0x2D, values, 0x31, 0, 0x3D, n_frames)
        head = HEADER.pack(0x0D, *fields, 0x62, TRACE_BYTES, bytes(TRACE_BYTES))
        end = CHECKSUM.pack(CHECKSUM_TAG, 0)
        message = head + bytes(size_bytes - len(head) - len(end)) + end
        assert _frames.read(message, checksum, FRAMES_MAX) is None
        with pytest.raises(ProtocolError):
            envelope.parse(message)


def test_no_tag_of_a_frame_goes_unlooked_at() -> None:
    message = message_of([_head(), _head()], DTYPE_F16, 4)
    fields = {*range(3, 11), *range(12, 16), *range(17, 21), *range(32, 40), *range(50, 58), *range(60, FRAME_BYTES)}
    for at in range(FRAME_BYTES):
        altered = bytearray(message)
        altered[HEADER_BYTES + FRAME_BYTES + at] ^= 0x80
        assert _frames.read(bytes(altered), checksum, FRAMES_MAX) is None, at
        seal_again(altered, 2)
        found = _frames.read(bytes(altered), checksum, FRAMES_MAX)
        assert (found is not None) == (at in fields), at


def _head(count: int = 1, flags: int = Flag.WANTS_SAMPLE, position: int = 5) -> Head:
    return (3, 4, position, count, flags, 0, 0, 8, bytes(TRACE_BYTES))


@pytest.mark.parametrize(
    "flags", [Flag.OPEN, Flag.CLOSE, Flag.TRIM, Flag.DRAFTED | Flag.WANTS_SAMPLE, Flag.GUESSED, 256]
)
def test_frames_that_are_not_ordinary_are_read_in_full(flags: int) -> None:
    assert _frames.read(message_of([_head(), _head(flags=flags)], DTYPE_F16, 4), checksum, FRAMES_MAX) is None


def test_rows_that_were_scaled_or_drafted_are_read_in_full() -> None:
    scaled = message_of([_head()], DTYPE_F16, 4, exponents=np.array([1], np.int8))
    assert _frames.read(scaled, checksum, FRAMES_MAX) is None
    parsed = envelope.parse(scaled).exponents
    assert parsed is not None
    assert parsed.tolist() == [1]
    assert _frames.read(message_of([_head()], DTYPE_F16, 4, drafts=[3]), checksum, FRAMES_MAX) is None


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (lambda: message_of([_head(3)], DTYPE_F16, 4), "over the limit of 2"),
        (lambda: message_of([_head(position=bounds.CTX_TOKENS_MAX)], DTYPE_TOKENS, 1), "tokens"),
        (lambda: message_of([_head()], DTYPE_F32, bounds.N_EMBD_MAX + 1), "width"),
        (lambda: message_of([_head()] * (bounds.ROWS_PER_ENVELOPE_MAX + 1), DTYPE_TOKENS, 1), "rows"),
        (lambda: message_of([_head()] * (FRAMES_MAX + 1), DTYPE_TOKENS, 1), "frames"),
    ],
)
def test_limits_hold_for_plain_envelopes_too(message: Any, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        envelope.parse(message(), max_rows=2)


def test_wrong_arguments_raise_and_nothing_is_written_outside() -> None:
    view = memoryview(bytearray(HEADER_BYTES + 2 * FRAME_BYTES + 16))
    payload_at = HEADER_BYTES + FRAME_BYTES + 8
    for made, at, row_bytes in (
        ([_head(), _head()], payload_at, 8),
        ([_head(2**32 - 1)], payload_at, 8),
        ([_head(99)], payload_at, 8),
        ([_head()], len(view) + 1, 8),
        ([_head()], payload_at, 0),
        ([(*_head()[:8], b"short")], payload_at, 8),
    ):
        with pytest.raises(ValueError, match=r"room|trace"):
            _frames.write(view, made, at, row_bytes, checksum)
    for wrong in [(1,)], [None], [(*_head()[:3], "x", *_head()[4:])], [(*_head()[:3], -1, *_head()[4:])]:
        with pytest.raises((TypeError, OverflowError)):
            _frames.write(view, wrong, payload_at, 8, checksum)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _frames.read("text", checksum, FRAMES_MAX)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        _frames.read(message_of([_head()], DTYPE_F16, 4), lambda _: 1 // 0, FRAMES_MAX)
    with pytest.raises(BufferError):
        _frames.write(memoryview(bytes(200)), [_head()], payload_at, 8, checksum)
    with pytest.raises(InternalError, match="2 frames for an envelope of 1"):
        Buffer(DTYPE_F16, 4, 1, 2).seal(1, 1, 1, heads=[_head(), _head()])


def test_records_written_are_records_read() -> None:
    made = [_head(2, Flag.PREFILL), _head(0, Flag.CLOSE), _head(1)]
    buffer = Buffer(DTYPE_F16, 4, 3, 3)
    buffer.payload[:] = 1
    buffer.seal(1, 2, 3, heads=made)
    found = read_heads(buffer.frames)
    assert [head[6] for head in found] == [checksum(bytes(buffer.payload[:2])), 0, checksum(bytes(buffer.payload[2:]))]
    assert [(*head[:6], *head[7:]) for head in found] == [(*head[:6], *head[7:]) for head in made]
