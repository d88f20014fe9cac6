"""Goal: a span context survives its way through 25 bytes, and zeros mean that there is none."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given
from opentelemetry.trace import INVALID_SPAN_CONTEXT, SpanContext, TraceFlags

from relayline.wire.envelopes import trace_context
from relayline.wire.envelopes.frames import TRACE_BYTES

ids = st.tuples(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1))


@given(ids, st.booleans())
def test_a_context_comes_back_as_it_left(named: tuple[int, int], is_sampled: bool) -> None:
    context = SpanContext(*named, is_remote=False, trace_flags=TraceFlags(is_sampled))
    packed = trace_context.pack(context)
    assert len(packed) == TRACE_BYTES
    assert trace_context.is_sampled(packed) is is_sampled
    back = trace_context.unpack(packed)
    assert back is not None
    assert (back.trace_id, back.span_id, back.trace_flags, back.is_remote) == (*named, int(is_sampled), True)


def test_the_layout_is_that_of_w3c_in_binary() -> None:
    context = SpanContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, False, TraceFlags(1))
    assert trace_context.pack(context).hex() == "0af7651916cd43dd8448eb211c80319c" + "b7ad6b7169203331" + "01"


def test_only_the_sampled_bit_travels() -> None:
    """The SDK also marks random trace ids; a peer that compares flags must not see that."""
    assert trace_context.pack(SpanContext(1, 2, False, TraceFlags(0xFF)))[-1] == 1
    back = trace_context.unpack(bytes(15) + b"\x01" + bytes(7) + b"\x02" + b"\xfe")
    assert back is not None
    assert back.trace_flags == 0


def test_zeros_are_no_context() -> None:
    assert trace_context.pack(INVALID_SPAN_CONTEXT) == trace_context.NONE == bytes(TRACE_BYTES)
    assert trace_context.unpack(trace_context.NONE) is None
    assert trace_context.unpack(bytes(16) + b"\x01" * 9) is None
    assert trace_context.unpack(b"\x01" * 16 + bytes(9)) is None
    assert not trace_context.is_sampled(trace_context.NONE)


def test_ids_alone_name_a_recorded_span() -> None:
    root = trace_context.new_root()
    assert trace_context.unpack(root[: trace_context.IDS_BYTES]) == trace_context.unpack(root)
    with pytest.raises(ValueError, match="not 3"):
        trace_context.unpack(b"abc")


def test_roots_differ_even_where_randomness_is_seeded() -> None:
    made = []
    for _ in range(2):
        random.seed(7)
        made += [trace_context.new_root() for _ in range(500)]
    assert len(set(made)) == 1000
    assert all(trace_context.is_sampled(root) and trace_context.unpack(root) is not None for root in made)
