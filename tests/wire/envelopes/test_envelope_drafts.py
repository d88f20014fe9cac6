"""Goal: draft tokens travel with exactly the rows they belong to, in every encoding, or not at all.

The examples of wire_examples hold drafts too, so tests/wire/envelopes/test_envelope.py covers most; here are the parts
that only drafts have.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from relayline.stage.inbound import Inbound
from relayline.stage.routes import Route
from relayline.wire.common import bounds
from relayline.wire.common.errors import ProtocolError
from relayline.wire.envelopes.buffers import Buffer, with_extras
from relayline.wire.envelopes.dtypes import DTYPE_F16, DTYPE_F32, DTYPE_TOKENS
from relayline.wire.envelopes.envelope import CHECKSUM_BYTES, EnvelopeView, parse
from relayline.wire.envelopes.frames import Flag, Head
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.examples import thinned
from tests.support.wire_examples import ENCODINGS, EXAMPLES, canonical, envelope, frame, library, varint

SAMPLE, GUESSES = Flag.WANTS_SAMPLE, Flag.WANTS_SAMPLE | Flag.DRAFTED
NAMES = [name for name in EXAMPLES if EXAMPLES[name].draft_tokens]
each_name = pytest.mark.parametrize("name", NAMES)
each_encoding = pytest.mark.parametrize("encode", ENCODINGS.values(), ids=ENCODINGS.keys())


def without_drafts(name: str, drafts: list[int] | None = None) -> tuple[bytes, bytes, list[int]]:
    """An example's bytes without its drafts, the checksum that it has with them (or with others), and these."""
    message = copy.deepcopy(EXAMPLES[name])
    drafts = list(message.draft_tokens) if drafts is None else drafts
    message.draft_tokens[:] = drafts
    whole = canonical(message)
    return whole[:-CHECKSUM_BYTES].removesuffix(packed(drafts)), whole[-CHECKSUM_BYTES:], drafts


def one_by_one(tokens: list[int]) -> bytes:
    return b"".join(b"\x6d" + struct.pack("<I", token) for token in tokens)


def packed(tokens: list[int]) -> bytes:
    return b"\x6a" + varint(4 * len(tokens)) + struct.pack(f"<{len(tokens)}I", *tokens)


WAYS: dict[str, Callable[[list[int]], bytes]] = {
    "packed": packed,
    "one by one": one_by_one,
    "packed twice": lambda tokens: packed(tokens[:1]) + packed(tokens[1:]),
    "packed, none of them, and the rest": lambda tokens: packed(tokens[:2]) + packed([]) + packed(tokens[2:]),
    "packed, then one by one": lambda tokens: packed(tokens[:1]) + one_by_one(tokens[1:]),
    "a length longer than it need be": lambda tokens: b"\x6a\x8c\x80\x00" + packed(tokens)[2:],
}


@each_name
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_write_them_is_read(name: str, way: str) -> None:
    rest, check, drafts = without_drafts(name)
    data = rest + WAYS[way](drafts) + check
    assert parse(data).draft_tokens == tuple(drafts)
    assert list(pb.RelayRequest.FromString(data).draft_tokens) == drafts
    assert parse(WAYS[way](drafts) + rest + check).draft_tokens == tuple(drafts), "before everything else"


@each_name
def test_only_the_drafts_of_its_rows(name: str) -> None:
    """Cut, too many, too few, or of no whole number of tokens, in one part or several: refused by every reader."""
    rest, check, drafts = without_drafts(name)
    whole = packed(drafts)
    assert parse(rest + whole + check).draft_tokens == tuple(drafts)
    for tail in (
        b"",
        *(whole[:n_bytes] for n_bytes in range(1, len(whole))),
        packed(drafts[1:]),
        packed([*drafts, 1]),
        one_by_one(drafts[1:]),
        whole + packed([1]),
        b"\x6a\x0b" + whole[2:13],
        b"\x6a\x01" + whole[2:3] + b"\x6a\x0b" + whole[3:],  # twelve bytes in parts that are no tokens
    ):
        with pytest.raises(ProtocolError):
            parse(rest + tail + check)


def _flags(index: int, flags: int) -> Callable[[pb.RelayRequest], None]:
    return lambda message: setattr(message.frames[index], "flags", flags)


# the mistake -> (change of "guessed tokens", text of the error)
BROKEN: dict[str, tuple[Callable[[pb.RelayRequest], None], str]] = {
    "no sample wanted": (_flags(1, Flag.DRAFTED), "flags 0x4 have no meaning"),
    "scored rows that are guessed": (_flags(1, Flag.SCORED | Flag.GUESSED), "flags 0xd have no meaning"),
    "rows that are scored as well": (_flags(0, Flag.SCORED), "4 drafted rows came with 3"),
    "an unknown flag": (_flags(1, GUESSES | 256), "flags 0x106 have no meaning"),
    "rows that see each other and are guesses": (_flags(1, GUESSES | 512), "flags 0x206 have no meaning"),
    "rows that see each other and are no prompt's": (_flags(1, 512), "flags 0x200 have no meaning"),
    "a grid's rows that are no prompt's": (_flags(1, 1024), "flags 0x400 have no meaning"),
    "rows of no grid": (_flags(0, Flag.PREFILL | 1024), "are not in an image of 0 x 0"),
    "guessed and not drafted": (_flags(1, SAMPLE | Flag.GUESSED), "flags 0xa have no meaning"),
    "guessed rows of a prompt": (_flags(1, GUESSES | Flag.GUESSED | Flag.PREFILL), "flags 0xf have no meaning"),
    "rows that are not drafted": (_flags(1, SAMPLE), "0 drafted rows came with 3"),
    "rows that are drafted as well": (_flags(0, GUESSES), "4 drafted rows came with 3"),
    **{
        f"a control: {control}": (
            lambda message, control=control: message.MergeFrom(  # type: ignore[misc]
                pb.RelayRequest(n_frames=3, frames=[frame(0, flags=control | GUESSES)])
            ),
            "have no meaning",
        )
        for control in (Flag.CLOSE, Flag.TRIM, Flag.COPY_PREFIX, Flag.OPEN)
    },
    "a control with rows": (_flags(1, Flag.CLOSE | GUESSES), "either carry rows"),
    "no rows": (
        lambda message: message.MergeFrom(pb.RelayRequest(n_frames=3, frames=[frame(0, flags=GUESSES)])),
        "either carry rows",
    ),
    "drafts without any": (lambda message: message.ClearField("draft_tokens"), "3 drafted rows came with 0"),
}


@pytest.mark.parametrize("problem", BROKEN)
@each_encoding
def test_broken_rule(problem: str, encode: Callable[[pb.RelayRequest], bytes]) -> None:
    change, text = BROKEN[problem]
    message = copy.deepcopy(EXAMPLES["guessed tokens"])
    change(message)
    with pytest.raises(ProtocolError, match=text):
        parse(encode(message))


@each_encoding
def test_rows_of_a_drafted_frame_are_bounded(encode: Callable[[pb.RelayRequest], bytes]) -> None:
    for n_rows in (bounds.DRAFT_TOKENS_MAX + 1, bounds.DRAFT_TOKENS_MAX + 2):
        tokens = np.arange(n_rows, dtype="<i4")[:, None]
        data = encode(envelope(1, tokens, [frame(n_rows, flags=GUESSES)], draft_tokens=range(n_rows)))
        if n_rows <= bounds.DRAFT_TOKENS_MAX + 1:
            assert parse(data).draft_tokens == tuple(range(n_rows))
            with pytest.raises(ProtocolError, match="a frame of 32 rows is over the limit of 16"):
                parse(data, max_rows=16)
            continue
        with pytest.raises(ProtocolError, match="a drafted frame of 33 rows is over the limit"):
            parse(data)


@pytest.mark.parametrize("way", [packed, one_by_one, lambda tokens: b"".join(packed([token]) for token in tokens)])
def test_more_drafts_than_any_envelope_has_rows_are_refused_unread(way: Callable[[list[int]], bytes]) -> None:
    """A message may have hundreds of megabytes, and a token as Python's integer ten times its four bytes."""
    most = bounds.ROWS_PER_ENVELOPE_MAX
    rest, check, _ = without_drafts("guessed tokens", [7] * most)
    with pytest.raises(ProtocolError, match=f"3 drafted rows came with {most}"):
        parse(rest + way([7] * most) + check)
    with pytest.raises(ProtocolError, match=f"draft tokens are over the limit of {most}"):
        parse(rest + way([7] * (most + 1)) + check)


# --- any frames together ----------------------------------------------------------------------------------------------

KINDS = {
    "open": (Flag.OPEN, st.just(0)),
    "close": (Flag.CLOSE, st.just(0)),
    "prompt": (Flag.PREFILL, st.integers(1, 6)),
    "end of prompt": (Flag.PREFILL | SAMPLE, st.integers(1, 6)),
    "decode": (SAMPLE, st.just(1)),
    "drafted": (GUESSES, st.integers(1, 6)),
    "guessed": (GUESSES | Flag.GUESSED, st.integers(1, 6)),
}


@st.composite
def mixed_heads(draw: st.DrawFn) -> list[Head]:
    heads: list[Head] = []
    for kind in draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=8)):
        flags, counts = KINDS[kind]
        session, position = draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, bounds.CTX_TOKENS_MAX - 6))
        argument, trace = draw(st.integers(0, 9)), draw(st.binary(min_size=25, max_size=25))
        heads.append((session, 5, position, draw(counts), flags, argument, 0, 1_000, trace))
    return heads


def sealed(heads: list[Head], dtype: int, drafts: list[int], scaled: bool) -> tuple[bytes, list[pb.SessionOptions]]:
    """A whole message as stages and coordinators write it: rows count upwards, seeds of opens too."""
    n_rows, width = sum(head[3] for head in heads), 1 if dtype == DTYPE_TOKENS else 3
    buffer = Buffer(dtype, width, len(heads), n_rows)
    buffer.payload[:] = np.arange(n_rows * width).reshape(n_rows, width)
    buffer.seal(5, 6, 7, heads=heads)
    options = [pb.SessionOptions(seed=at, top_p=0.5) for at in range(sum(head[4] == Flag.OPEN for head in heads))]
    exponents = np.arange(n_rows, dtype=np.int8) if scaled and dtype == DTYPE_F16 and n_rows else None
    return with_extras(buffer, exponents, options, drafts), options


def drafted_rows(heads: list[Head]) -> int:
    return sum(head[3] for head in heads if head[4] & Flag.DRAFTED)


@given(mixed_heads(), st.sampled_from([DTYPE_TOKENS, DTYPE_F16, DTYPE_F32]), st.booleans(), st.data())
def test_round_trip_of_mixed_frames(heads: list[Head], dtype: int, scaled: bool, data: st.DataObject) -> None:
    """Compared with the protobuf library's result, and back again; and each drafted frame is queued with its tokens."""
    n_drafted = drafted_rows(heads)
    drafts = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=n_drafted, max_size=n_drafted), "drafts")
    message, options = sealed(heads, dtype, drafts, scaled)
    views = [parse(message), parse(library(pb.RelayRequest.FromString(message)))]
    for view in views:
        assert (view.draft_tokens, view.options) == (tuple(drafts), options)
        assert [(*head[:6], 0, *head[7:]) for head in view.heads] == heads
        n_rows = sum(head[3] for head in heads)
        assert view.payload.ravel().tolist() == list(range(n_rows * view.width))
        exponents = [0] * n_rows if view.exponents is None else view.exponents.tolist()
        assert exponents == (list(range(n_rows)) if scaled and dtype == DTYPE_F16 else [0] * n_rows)
        rest = iter(drafts)
        inbound = Inbound(Route(7, 5, 0, None), pb.LinkOpen(dtype=dtype, n_embd=3), None, 64)  # type: ignore[arg-type]
        for queued in inbound.frames(view):
            expected = [next(rest) for _ in range(queued.n_rows)] if queued.flags & Flag.DRAFTED else []
            assert queued.draft_tokens == tuple(expected)
        assert next(rest, None) is None
    assert canonical(pb.RelayRequest.FromString(message)) == message


@settings(max_examples=thinned(300))
@given(mixed_heads(), st.sampled_from([DTYPE_TOKENS, DTYPE_F16, DTYPE_F32]), st.data())
def test_mutated_bytes_are_read_or_refused(heads: list[Head], dtype: int, data: st.DataObject) -> None:
    """Mostly bytes behind the payload, where drafts are: changed, removed or doubled."""
    drafts = list(range(drafted_rows(heads)))
    message, _ = sealed(heads, dtype, drafts, scaled=False)
    if data.draw(st.booleans(), "by the library"):
        message = library(pb.RelayRequest.FromString(message))
    start = data.draw(st.integers(max(0, len(message) - 60), len(message)) | st.integers(0, len(message)), "start")
    end = data.draw(st.integers(start, min(len(message), start + 12)), "end")
    filling = data.draw(st.binary(max_size=6) | st.just(message[start:end] * 2) | st.just(packed([1])), "filling")
    try:
        view = parse(message[:start] + filling + message[end:])
    except ProtocolError:
        return
    assert isinstance(view, EnvelopeView)
    assert len(view.draft_tokens) == drafted_rows(view.heads)
    assert all(head[4] | Flag.GUESSED == GUESSES | Flag.GUESSED for head in view.heads if head[4] & Flag.DRAFTED)
