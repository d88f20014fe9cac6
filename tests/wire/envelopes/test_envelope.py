"""Goal: bytes from the network become a checked view or one ProtocolError, and the writer writes what the reader reads.

Method: the examples of wire_examples go through writer and reader, whole, cut at every byte and with bytes behind, in
every encoding; each bound and each broken rule is one row of a table; hypothesis does the rest.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from relayline.deploy.testing.paths import ROOT
from relayline.wire.common import bounds
from relayline.wire.common.errors import ChecksumError, InternalError, ProtocolError
from relayline.wire.envelopes import layout
from relayline.wire.envelopes.buffers import Buffer, with_extras
from relayline.wire.envelopes.dtypes import DTYPE_F16, DTYPE_F32, DTYPE_TOKENS
from relayline.wire.envelopes.envelope import HEADER_BYTES, NUMPY_DTYPE, EnvelopeView, parse
from relayline.wire.envelopes.frames import FRAME_BYTES, FRAME_DTYPE, Flag, Head
from relayline.wire.envelopes.rows import RowEncoder, decode_f16
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.wire_examples import ENCODINGS, EXAMPLES, canonical, envelope, frame, library, set_traces

FRAME_FIELDS = ("session_id", "epoch", "position", "n_rows", "flags", "argument", "checksum", "enqueued_ns")
each_example = pytest.mark.parametrize("name", EXAMPLES)
each_encoding = pytest.mark.parametrize("encode", ENCODINGS.values(), ids=ENCODINGS.keys())


def written_whole(like: Buffer, heads: list[Head]) -> bytes:
    """The message of a buffer like this one whose frames were written record by record, over bytes of another use."""
    dtype, width = (DTYPE_F16 if like.payload.itemsize == 2 else DTYPE_F32), like.payload.shape[1]
    again = Buffer(dtype, width, *like.shape)
    again.frames.view(np.uint8)[:] = 0xA5
    again.payload[:] = like.payload
    again.exponents[:] = like.exponents
    with pytest.raises(InternalError):
        again.seal(1, 2, 3, heads=heads[1:])
    again.seal(1, 2, 3, heads=[(*head[:6], 0, *head[7:]) for head in heads])
    return again.close()


def content(view: EnvelopeView) -> dict[str, Any]:
    """A view as plain values, to compare."""
    return {
        "head": (view.epoch, view.sequence, view.dtype, view.width, view.sent_ns, view.payload_bytes, view.batch_trace),
        "frames": [
            {name: int(record[name]) for name in FRAME_FIELDS} | {"trace": record["trace"].tobytes()}
            for record in view.frames
        ],
        "heads": view.heads,
        "payload": (view.payload.shape, view.payload.dtype, view.payload.tobytes()),
        "exponents": None if view.exponents is None else view.exponents.tolist(),
        "options": view.options,
        "drafts": view.draft_tokens,
    }


def expected(message: pb.RelayRequest) -> dict[str, Any]:
    exponents = list(message.row_exponents)
    return {
        "head": (
            message.epoch,
            message.sequence,
            message.dtype,
            message.width,
            message.sent_ns,
            len(message.payload),
            message.batch_trace,
        ),
        "frames": [
            {name: getattr(each, name) for name in FRAME_FIELDS} | {"trace": each.trace} for each in message.frames
        ],
        "heads": [(*(getattr(each, name) for name in FRAME_FIELDS), each.trace) for each in message.frames],
        "payload": ((message.n_rows, message.width), NUMPY_DTYPE[message.dtype], message.payload),
        "exponents": exponents if any(exponents) else None,
        "options": list(message.options),
        "drafts": tuple(message.draft_tokens),
    }


def write(message: pb.RelayRequest) -> bytes:
    """Encode an example with the code under test."""
    buffer = Buffer(message.dtype, message.width, len(message.frames), message.n_rows)
    buffer.payload[:] = np.frombuffer(message.payload, NUMPY_DTYPE[message.dtype]).reshape(buffer.payload.shape)
    for name in FRAME_FIELDS:
        if name != "checksum":
            buffer.frames[name] = [getattr(each, name) for each in message.frames]
    set_traces(buffer.frames, [each.trace for each in message.frames])
    exponents = np.frombuffer(message.row_exponents, np.int8) if message.row_exponents else None
    buffer.seal(message.epoch, message.sequence, message.sent_ns, message.batch_trace)
    return with_extras(buffer, exponents, list(message.options), list(message.draft_tokens))


@each_example
def test_writer_writes_the_canonical_layout(name: str):
    assert write(EXAMPLES[name]) == canonical(EXAMPLES[name])


@each_example
def test_the_protobuf_library_reads_the_writers_bytes(name: str):
    message = pb.RelayRequest.FromString(write(EXAMPLES[name]))
    message.checksum = 0
    if not any(message.row_exponents):
        message.row_exponents = b""
    assert message == EXAMPLES[name]


@each_example
@each_encoding
def test_every_encoding_gives_the_same_view(name: str, encode: Callable[[pb.RelayRequest], bytes]):
    assert content(parse(encode(EXAMPLES[name]))) == expected(EXAMPLES[name])


def test_canonical_bytes_are_read_without_copying():
    data = canonical(EXAMPLES["f16 rows of three sessions"])
    view = parse(data)
    whole = np.frombuffer(data, np.uint8)
    assert np.shares_memory(view.payload, whole)
    assert np.shares_memory(view.frames, whole)
    assert not view.payload.flags.writeable


def test_golden_bytes():
    """The wire format itself: changing it needs a new PROTOCOL_VERSION, not a new test."""
    message = envelope(1, np.array([[77]], "<i4"), [frame(1, flags=2)])
    assert canonical(message).hex() == (
        "0d050000001109000000000000001d0100000025010000002d0100000031cb04fb711f0100003d01000000"
        "62196465666768696a6b6c6d6e6f707172737475767778797a7b7c"
        "42530909070605040302011505000000" + "1d71110100" + "2501000000" + "2d02000000" + "310000000000000000"
        "39" + message.frames[0].checksum.to_bytes(8, "little").hex() + "418877665544332211"
        "4a19000102030405060708090a0b0c0d0e0f101112131415161718" + "4a044d000000" + "714941be32b92f98a9"
    )
    assert write(message) == canonical(message)
    assert FRAME_BYTES == 85


@pytest.mark.parametrize("name", [name for name in EXAMPLES if len(EXAMPLES[name].payload) < 1000])
@each_encoding
def test_cut_at_every_byte(name: str, encode: Callable[[pb.RelayRequest], bytes]):
    message = EXAMPLES[name]
    data = encode(message)
    for n_bytes in range(len(data)):
        try:
            view = parse(data[:n_bytes])
        except ProtocolError:
            continue
        # Fields that may be missing unnoticed: zero exponents, unknown fields, and fields in front that are zero.
        assert content(view)["payload"] == expected(message)["payload"]
        assert content(view)["frames"] == expected(message)["frames"]
        assert encode is not canonical or message.dtype == DTYPE_F16


@each_example
@each_encoding
def test_bytes_behind(name: str, encode: Callable[[pb.RelayRequest], bytes]):
    data = encode(EXAMPLES[name])
    for tail in (b"\x00", b"\x52", b"\x5a\x05", b"\x4a\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", b"\x5a\xff\xff"):
        with pytest.raises(ProtocolError):
            parse(data + tail)
    assert content(parse(data + b"\xa0\x06\x05")) == expected(EXAMPLES[name])


def test_later_fields_win_as_protobuf_says():
    data = canonical(EXAMPLES["scaled f16 rows"])
    assert parse(b"\x0d\x07\x00\x00\x00" + b"\x52\x01\x04" + data).exponents.tolist() == [0, 112, 3]
    with pytest.raises(ChecksumError):
        parse(data + b"\x0d\x07\x00\x00\x00")  # the header is another then
    with pytest.raises(ChecksumError):
        parse(data + b"\x52\x03\x00\x00\x00")


# --- broken rules and bounds ------------------------------------------------------------------------------------------


def _set(**fields: Any) -> Callable[[pb.RelayRequest], None]:
    def change(message: pb.RelayRequest) -> None:
        for name, value in fields.items():
            setattr(message, name, value)

    return change


def _set_frame(index: int, **fields: Any) -> Callable[[pb.RelayRequest], None]:
    def change(message: pb.RelayRequest) -> None:
        for name, value in fields.items():
            setattr(message.frames[index], name, value)

    return change


def _wide_options(message: pb.RelayRequest) -> None:
    message.options[0].said.extend([1] * bounds.OPTIONS_BYTES_MAX)


def _many_options(message: pb.RelayRequest) -> None:
    grammar = "x" * (bounds.OPTIONS_BYTES_MAX - 100)
    n_more = bounds.OPTIONS_PER_ENVELOPE_BYTES_MAX // bounds.OPTIONS_BYTES_MAX + 1
    message.frames.extend([frame(0, flags=Flag.OPEN)] * n_more)
    message.options.extend([pb.SessionOptions(grammar=grammar)] * n_more)
    message.n_frames = len(message.frames)


def _many_frames(message: pb.RelayRequest) -> None:
    del message.frames[:]
    message.frames.extend([frame(0, flags=32)] * (bounds.FRAMES_PER_ENVELOPE_MAX + 1))
    message.n_frames, message.n_rows, message.payload = len(message.frames), 0, b""


# the mistake -> (example, change, text of the error)
BROKEN: dict[str, tuple[str, Callable[[pb.RelayRequest], None], str]] = {
    "dtype 0": ("exact rows", _set(dtype=0), "dtype 0"),
    "dtype 4": ("exact rows", _set(dtype=4), "dtype 4"),
    "width 0": ("controls only", _set(width=0), "width 0"),
    "width over N_EMBD_MAX": ("controls only", _set(width=bounds.N_EMBD_MAX + 1), "width"),
    "rows over ROWS_PER_ENVELOPE_MAX": ("one token", _set(n_rows=bounds.ROWS_PER_ENVELOPE_MAX + 1), "rows"),
    "frames over FRAMES_PER_ENVELOPE_MAX": ("exact rows", _many_frames, "4097 frames"),
    "no frames": (
        "controls only",
        lambda message: (message.ClearField("frames"), _set(n_frames=0)(message)),
        "no frame",
    ),
    "fewer frames than announced": ("exact rows", _set(n_frames=2), "announces 2 frames"),
    "more frames than announced": ("controls only", _set(n_frames=2), "announces 2 frames"),
    "payload too short": ("exact rows", _set(payload=bytes(39)), "payload has 39 bytes"),
    "payload too long": ("exact rows", _set(payload=bytes(41)), "payload has 41 bytes"),
    "more rows than frames have": ("one token", _set(n_rows=2, payload=bytes(8)), "announce 1 row,"),
    "a frame announces too much": ("exact rows", _set_frame(0, n_rows=3), "announce 3 rows"),
    "rows without frames": (
        "exact rows",
        lambda message: (message.frames.pop(), _set(n_frames=0)(message)),
        "no frame",
    ),
    "a control with rows": ("exact rows", _set_frame(0, flags=int(Flag.CLOSE)), "either carry rows"),
    "neither control nor rows": ("controls only", _set_frame(0, flags=0), "either carry rows"),
    "two controls at once": ("controls only", _set_frame(0, flags=16 | 32), "have no meaning"),
    "an unknown flag": ("exact rows", _set_frame(0, flags=4), "have no meaning"),
    "position over CTX_TOKENS_MAX": ("one token", _set_frame(0, position=bounds.CTX_TOKENS_MAX), "position"),
    "last position over CTX_TOKENS_MAX": (
        "exact rows",
        _set_frame(0, position=bounds.CTX_TOKENS_MAX - 1),
        "position",
    ),
    "largest position": ("one token", _set_frame(0, position=2**32 - 1), "position"),
    "an open without options": ("a prompt opens a session", lambda message: message.options.pop(), "0 session options"),
    "options without an open": ("exact rows", lambda message: message.options.add(), "1 session options"),
    "options over OPTIONS_BYTES_MAX": (
        "a prompt opens a session",
        _wide_options,
        f"over the limit of {bounds.OPTIONS_BYTES_MAX}",
    ),
    "options over OPTIONS_PER_ENVELOPE_BYTES_MAX": ("a prompt opens a session", _many_options, "limit of 2097152"),
    "too few exponents": ("scaled f16 rows", _set(row_exponents=b"\x01"), "exponents"),
    "too many exponents": ("scaled f16 rows", _set(row_exponents=b"\x01\x01\x01\x01"), "exponents"),
    "exponents of exact rows": ("exact rows", _set(row_exponents=b"\x01\x01"), "exponents"),
    "exponents without rows": ("controls only", _set(row_exponents=b"\x01"), "exponents"),
    "an exponent over the limit": ("scaled f16 rows", _set(row_exponents=bytes([0, 113, 3])), "outside 0..112"),
    "a negative exponent": ("scaled f16 rows", _set(row_exponents=bytes([0, 255, 3])), "outside 0..112"),
    "a handshake": ("exact rows", lambda message: message.open.SetInParent(), "handshake"),
}


@pytest.mark.parametrize("problem", BROKEN)
@each_encoding
def test_broken_rule(problem: str, encode: Callable[[pb.RelayRequest], bytes]):
    name, change, text = BROKEN[problem]
    message = copy.deepcopy(EXAMPLES[name])
    change(message)
    data = encode(message)
    with pytest.raises(ProtocolError, match=text):
        parse(data)


@each_encoding
def test_bounds_themselves_are_allowed(encode: Callable[[pb.RelayRequest], bytes]):
    tokens = np.zeros((bounds.ROWS_PER_ENVELOPE_MAX, 1), "<i4")
    last = frame(tokens.shape[0], position=bounds.CTX_TOKENS_MAX - tokens.shape[0])
    assert parse(encode(envelope(1, tokens, [last]))).payload.shape == tokens.shape
    wide = np.zeros((1, bounds.N_EMBD_MAX), "<f2")
    assert parse(encode(envelope(2, wide, [frame(1)]))).width == bounds.N_EMBD_MAX
    crowd = [frame(0, flags=32) for _ in range(bounds.FRAMES_PER_ENVELOPE_MAX)]
    assert len(parse(encode(envelope(1, tokens[:0], crowd))).frames) == len(crowd)


@each_encoding
def test_rows_per_frame_are_bounded_by_the_reader(encode: Callable[[pb.RelayRequest], bytes]):
    data = encode(EXAMPLES["f16 rows of three sessions"])
    assert parse(data, max_rows=2).payload.shape[0] == 4
    with pytest.raises(ProtocolError, match="a frame of 2 rows is over the limit of 1"):
        parse(data, max_rows=1)


def test_message_bytes_are_bounded():
    with pytest.raises(ProtocolError, match="over the limit"):
        parse(bytes(bounds.ENVELOPE_BYTES_MAX + 1))


def test_a_trace_of_another_length_is_refused_and_none_is_allowed():
    message = copy.deepcopy(EXAMPLES["one f16 row"])
    message.frames[0].trace = b"short"
    with pytest.raises(ProtocolError, match="trace context of 5 bytes"):
        parse(library(message))
    message.frames[0].trace = b""
    assert parse(library(message)).frames["trace"][0].tobytes() == bytes(25)
    message.batch_trace = b"short"
    with pytest.raises(ProtocolError, match="trace context of 5 bytes"):
        parse(library(message))
    message.batch_trace = b""
    assert parse(library(message)).batch_trace == bytes(25)


def test_a_buffer_used_again_forgets_the_batch_it_carried():
    buffer = Buffer(DTYPE_F16, 4, 1, 1)
    buffer.frames["n_rows"] = 1
    buffer.seal(1, 1, 1, bytes(range(1, 26)))
    assert parse(buffer.close()).batch_trace == bytes(range(1, 26))
    buffer.seal(1, 2, 2)
    assert parse(buffer.close()).batch_trace == bytes(25)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if len(EXAMPLES[name].payload) < 1000])
@each_encoding
def test_every_altered_byte_is_noticed(name: str, encode: Callable[[pb.RelayRequest], bytes]):
    """In rows and everything around them; only meaningless bytes may change: unknown fields."""
    data = encode(EXAMPLES[name])
    for at in range(len(data)):
        for bit in (1, 0x80):
            altered = data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
            try:
                view = parse(altered)
            except ProtocolError:
                continue
            assert encode is ENCODINGS["unknown fields"]
            assert content(view) == expected(EXAMPLES[name])


def test_altered_rows_and_headers_may_be_sent_again():
    data = canonical(EXAMPLES["f16 rows of three sessions"])
    for at in (4, 50, 75, 100, data.index(EXAMPLES["f16 rows of three sessions"].payload)):
        with pytest.raises(ChecksumError):
            parse(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def test_seal_refuses_frames_that_do_not_add_up():
    buffer = Buffer(DTYPE_TOKENS, 1, 2, 3)
    buffer.frames["n_rows"] = [1, 1]
    with pytest.raises(InternalError, match="announce 2 rows"):
        buffer.seal(1, 1, 1)


# --- fuzz -------------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(data: bytes):
    try:
        assert isinstance(parse(data), EnvelopeView)
    except ProtocolError:
        pass


@given(st.sampled_from(sorted(EXAMPLES)), st.sampled_from(sorted(ENCODINGS)), st.data())
def test_any_change_of_a_message_gives_the_same_rows_or_is_refused(name: str, encoding: str, draw: st.DataObject):
    data = ENCODINGS[encoding](EXAMPLES[name])
    start = draw.draw(st.integers(0, len(data)), "start")
    end = draw.draw(st.integers(start, min(len(data), start + 100)), "end")
    filling = draw.draw(st.one_of(st.binary(max_size=20), st.just(data[start:end] * 2)), "filling")
    try:
        view = parse(data[:start] + filling + data[end:])
    except ProtocolError:
        return
    assert view.payload.tobytes() in (EXAMPLES[name].payload, b"")
    assert sum(view.frames["n_rows"].tolist()) == view.payload.shape[0]


def numbers(bits: int) -> st.SearchStrategy[int]:
    return st.integers(0, 2**bits - 1)


@st.composite
def arbitrary_frames(draw: st.DrawFn) -> list[pb.Frame]:
    frames = []
    for _ in range(draw(st.integers(1, 6))):
        control = draw(st.sampled_from([0, 0, 32, 64, 128]))
        n_rows = 0 if control else draw(st.integers(1, 4))
        frames.append(
            pb.Frame(
                session_id=draw(numbers(64)),
                epoch=draw(numbers(32)),
                position=draw(st.integers(0, bounds.CTX_TOKENS_MAX - n_rows)),
                n_rows=n_rows,
                flags=control or draw(st.integers(0, 3)),
                argument=draw(numbers(64)),
                enqueued_ns=draw(numbers(64)),
                trace=draw(st.binary(min_size=25, max_size=25)),
            )
        )
    return frames


FLOATS = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([3e5, -3e5, 1e38, -1e38, 65_504.0, 65_520.0, 2.0**-24, 2.0**-25, 1e-40, -0.0]),
)


@given(arbitrary_frames(), st.sampled_from([DTYPE_F16, DTYPE_F32]), st.integers(1, 12), st.data())
def test_round_trip_of_arbitrary_frames_and_rows(frames: list[pb.Frame], dtype: int, width: int, draw: st.DataObject):
    n_rows = sum(each.n_rows for each in frames)
    values = draw.draw(st.lists(FLOATS, min_size=n_rows * width, max_size=n_rows * width))
    rows = np.array(values, np.float32).reshape(n_rows, width)
    buffer = Buffer(dtype, width, len(frames), n_rows)
    encoded = RowEncoder(n_rows, width).encode(rows, buffer.payload)
    assert encoded.all_finite
    for name in FRAME_FIELDS:
        buffer.frames[name] = [getattr(each, name) for each in frames]
    set_traces(buffer.frames, [each.trace for each in frames])
    buffer.seal(1, 2, 3)
    view = parse(with_extras(buffer, encoded.exponents, []))
    assert [each["trace"].tobytes() for each in view.frames] == [each.trace for each in frames]
    assert written_whole(buffer, view.heads) == buffer.message
    for name in (*FRAME_FIELDS[:-2], "enqueued_ns"):
        assert view.frames[name].tolist() == [getattr(each, name) for each in frames]
    back = np.empty_like(rows)
    if dtype == DTYPE_F32:
        np.copyto(back, view.payload)
        assert back.tobytes() == rows.tobytes()
        return
    decode_f16(view.payload, view.exponents, back)
    scale = np.exp2(np.zeros(n_rows) if view.exponents is None else view.exponents.astype(np.float64))
    allowed = np.maximum(np.abs(rows.astype(np.float64)) * 2**-10, scale[:, None] * 2**-25)
    assert (np.abs(back.astype(np.float64) - rows) <= allowed).all()


# --- positions of the fields ------------------------------------------------------------------------------------------


def test_the_layout_is_the_contracts_own_in_all_its_forms() -> None:
    """`wire_examples` writes it by hand. A field added to the contract moves everything, and is seen here."""
    record = struct.Struct(layout.FRAME.struct_form(with_constants=False))
    columns = [name for name in FRAME_DTYPE.names or () if name]
    assert columns == [field.name for field in pb.Frame.DESCRIPTOR.fields]
    assert len(columns) == len(Head.__args__) == len(record.unpack(bytes(FRAME_BYTES)))  # type: ignore[attr-defined]
    data = canonical(EXAMPLES["one token"])
    frame_bytes = data[HEADER_BYTES : HEADER_BYTES + FRAME_BYTES]
    for place in layout.FRAME.places:
        column = np.frombuffer(frame_bytes, FRAME_DTYPE)[place.name]
        assert column.tobytes() == frame_bytes[place.value_at : place.value_at + place.n_bytes]
    full = frame(3, flags=1, argument=9, checksum=4)  # a library leaves zeros out
    library_made = pb.RelayRequest(frames=[full]).SerializeToString()
    assert len(library_made) == FRAME_BYTES
    for at, byte in layout.FRAME.constants:
        assert library_made[at] == byte
    for place in layout.HEADER.places:
        value = getattr(EXAMPLES["one token"], place.name)
        alone = pb.RelayRequest(**{place.name: value}).SerializeToString()
        assert data[place.at : place.value_at + place.n_bytes] == alone


def test_the_c_header_and_the_page_are_made_of_it() -> None:
    assert (ROOT / "wire/envelopes/_layout.h").read_text() == layout.c_header(), "run `make proto`"
    assert (ROOT / "docs/reference/envelopes.md").read_text() == layout.page(), "run `make proto`"
